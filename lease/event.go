package lease

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/go-resilience/resilience/policy"
)

// An EventKind is the kind of an [Event].
type EventKind string

const (
	EventElected     EventKind = "elected"      // a term started
	EventLost        EventKind = "lost"         // a term ended that was not resigned; its function may still run
	EventResigned    EventKind = "resigned"     // a term was resigned
	EventStoreFailed EventKind = "store_failed" // the store failed; the call is repeated
)

// An Event is something that happened to a [Candidate].
type Event struct {
	Kind   EventKind     // the kind of the event
	Name   string        // the name of the lease
	Holder string        // the candidate's Config.Holder
	Epoch  int64         // the term's epoch; 0 if the store failed outside of a term
	Waited time.Duration // the time since the campaign started; only of EventElected
	Took   time.Duration // the duration of the term; only of EventLost and EventResigned

	// Err is a [*LostError] if Kind is EventLost. If Kind is EventResigned, it is why the store did not release the
	// lease, or nil. If Kind is EventStoreFailed, it is the store's error.
	Err error
}

// Observe calls f with each event, in order, until stop is called. A term's work waits for f, unless f is still busy
// with an earlier event. While a candidate has no observer, slog.Default warns of EventStoreFailed, at most once a
// second.
func (c *Candidate) Observe(f func(context.Context, Event)) (stop func()) {
	return c.observers.Observe(f)
}

// notify delivers an event to the observers.
func (c *Candidate) notify(ctx context.Context, e Event) {
	e.Name, e.Holder = c.cfg.Name, c.cfg.Holder
	c.events.AddUnder(ctx, e)
	c.events.Deliver(ctx, func(ctx context.Context, next any) { c.observers.Tell(ctx, next.(Event)) })
}

// Stats are the metrics of a [Candidate].
type Stats struct {
	Elected     int64 `counter:"terms{event=elected}"`  // terms that started
	Lost        int64 `counter:"terms{event=lost}"`     // terms that ended and were not resigned
	Resigned    int64 `counter:"terms{event=resigned}"` // terms that were resigned
	Asked       int64 `counter:"requests"`              // requests for the lease
	Renewed     int64 `counter:"renewals"`              // renewals that succeeded
	StoreErrors int64 `counter:"store.errors"`          // calls to the store that failed

	WaitTime time.Duration `counter:"wait.time_seconds"` // the duration of all waits that have ended

	Queued  int `gauge:"queued"`  // calls that wait to lead
	Leading int `gauge:"leading"` // terms that hold
}

// Stats returns the metrics of c.
func (c *Candidate) Stats() (s Stats) {
	c.count(func(now *Stats) { s = *now })
	return s
}

// count changes the metrics.
func (c *Candidate) count(change func(*Stats)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	change(&c.stats)
}

// Describe implements [policy.Describer]. Health queries the store. It fails with the state store_down if the store
// does not answer. It fails with the state vacant if c has seen for longer than a TTL that no process held the
// lease, unless c is used as a lock, which means that only TryCampaign was called.
func (c *Candidate) Describe() policy.Description {
	return policy.Description{
		Kind:    "lease",
		Name:    c.cfg.Name,
		Metrics: func() []policy.Metric { return policy.Metrics("lease", c.Stats()) },
		Health:  c.health,
		Config:  func() any { return c.Config() },
		Observe: policy.Events(c.Observe, Event.describe),
	}
}

func (c *Candidate) health(ctx context.Context) policy.Health {
	if _, err := c.Status(ctx); err != nil {
		return policy.Health{Status: policy.Fail, State: "store_down", Err: err}
	}
	c.mu.Lock()
	s, since := c.stats, c.vacant
	c.mu.Unlock()
	isLock := s.Asked > 0 && s.Queued == 0 && s.WaitTime == 0
	if isLock || since.IsZero() || time.Since(since) <= c.cfg.TTL {
		return policy.Health{}
	}
	detail := fmt.Sprintf("no process has held it for %v", time.Since(since).Round(time.Second))
	return policy.Health{Status: policy.Fail, State: "vacant", Detail: detail}
}

func (e Event) describe() policy.Event {
	d := policy.Event{
		Kind: "lease", Name: e.Name, What: string(e.Kind), Level: slog.LevelDebug, Err: e.Err,
		Attrs: []slog.Attr{slog.String("holder", e.Holder), slog.Int64("epoch", e.Epoch)},
	}
	if e.Kind == EventLost || e.Err != nil {
		d.Level = slog.LevelWarn
	}
	if e.Waited > 0 {
		d.Attrs = append(d.Attrs, slog.Duration("waited", e.Waited))
	}
	if e.Took > 0 {
		d.Attrs = append(d.Attrs, slog.Duration("took", e.Took))
	}
	return d
}
