// Package adapter shows how to write a policy, [Spacing], and an adapter, [Dialer]. They use only packages that other
// modules can import. docs/adapter.md explains them.
package adapter

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/policy"
)

// Spacing is a policy that refuses a call that starts too soon after another call.
type Spacing struct {
	name string

	mu        sync.Mutex
	cfg       SpacingConfig
	last      time.Time // the time at which the last admitted call started
	stats     SpacingStats
	observers []*func(context.Context, SpacingEvent)
}

var _ policy.Describer = (*Spacing)(nil)

type SpacingConfig struct {
	Least time.Duration // the minimum time between the starts of two calls
}

type SpacingStats struct {
	Admitted int64 `counter:"calls{outcome=admitted}"`
	Refused  int64 `counter:"calls{outcome=refused}"`
}

// A SpacingEvent reports a refused call. After is the time after which another call is admitted.
type SpacingEvent struct{ After time.Duration }

type TooSoonError struct{ After time.Duration }

func (e *TooSoonError) Error() string             { return "too soon after another call" }
func (e *TooSoonError) Refused() bool             { return true }
func (e *TooSoonError) RetryAfter() time.Duration { return e.After }

func NewSpacing(name string, cfg SpacingConfig) *Spacing { return &Spacing{name: name, cfg: cfg} }

func (s *Spacing) Do(ctx context.Context, fn resilience.Func) error {
	if ctx.Err() != nil {
		return resilience.ContextErr(ctx)
	}
	wait, observers := s.admit()
	if wait <= 0 {
		return fn(ctx)
	}
	for _, f := range observers {
		(*f)(ctx, SpacingEvent{wait})
	}
	return &TooSoonError{After: wait}
}

func (s *Spacing) Wrap(next resilience.Func) resilience.Func {
	return func(ctx context.Context) error { return s.Do(ctx, next) }
}

// admit returns 0 if a call may start, and otherwise the time to wait and the observers to notify.
func (s *Spacing) admit() (wait time.Duration, observers []*func(context.Context, SpacingEvent)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if wait = s.cfg.Least - time.Since(s.last); wait > 0 {
		s.stats.Refused++
		return wait, s.observers
	}
	s.stats.Admitted++
	s.last = time.Now()
	return 0, nil
}

func (s *Spacing) Stats() SpacingStats {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.stats
}

func (s *Spacing) Config() SpacingConfig {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.cfg
}

// Observe calls f with an event for each refused call, until stop is called. f is called while s holds no lock.
func (s *Spacing) Observe(f func(context.Context, SpacingEvent)) (stop func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.observers = append(s.observers[:len(s.observers):len(s.observers)], &f)
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		var others []*func(context.Context, SpacingEvent)
		for _, o := range s.observers {
			if o != &f {
				others = append(others, o)
			}
		}
		s.observers = others
	}
}

func (s *Spacing) Describe() policy.Description {
	return policy.Description{
		Kind:    "spacing",
		Name:    s.name,
		Metrics: func() []policy.Metric { return policy.Metrics("spacing", s.Stats()) },
		Health:  s.health,
		Config:  func() any { return s.Config() },
		Update:  s.update,
		Observe: policy.Events(s.Observe, s.describe),
	}
}

// describe converts e to the type of event that a registry, its log and its metrics receive.
func (s *Spacing) describe(e SpacingEvent) policy.Event {
	return policy.Event{
		Kind: "spacing", Name: s.name, What: "refused", Level: slog.LevelWarn,
		Attrs: []slog.Attr{slog.Duration("retry_after", e.After)},
	}
}

func (s *Spacing) health(context.Context) policy.Health {
	s.mu.Lock()
	defer s.mu.Unlock()
	if wait := s.cfg.Least - time.Since(s.last); wait > time.Minute {
		return policy.Health{Status: policy.Fail, State: "closed", Detail: "opens in " + wait.String()}
	}
	return policy.Health{}
}

// update applies change to a copy of the configuration. So if there is an error, or dryRun is true, s does not change.
func (s *Spacing) update(dryRun bool, change func(cfg any) error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	next := s.cfg
	if err := change(&next); err != nil {
		return err
	}
	if next.Least < 0 {
		return errors.New("spacing: Least is negative")
	}
	if !dryRun {
		s.cfg = next
	}
	return nil
}
