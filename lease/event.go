package lease

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/go-resilience/resilience/policy"
)

// An EventKind says what an [Event] is.
type EventKind string

const (
	EventElected  EventKind = "elected"  // a term has begun
	EventLost     EventKind = "lost"     // a term has ended that was not given up; its function may still run
	EventResigned EventKind = "resigned" // a term was given up
)

// An Event is something that has happened to a [Candidate].
type Event struct {
	Kind   EventKind
	Name   string // of the lease
	Holder string
	Epoch  int64
	Waited time.Duration // of EventElected: since the campaign began
	Took   time.Duration // of EventLost and EventResigned: how long the term has lasted
	Err    error         // of EventLost: the *LostError; of EventResigned: why the store could not be told, or nil
}

// Observe calls f with each event, after [Config].OnEvent and in order, until stop is called.
func (c *Candidate) Observe(f func(context.Context, Event)) (stop func()) {
	return c.observers.Observe(f)
}

// tell tells the hook and the observers of an event.
func (c *Candidate) tell(ctx context.Context, e Event) {
	c.events.AddUnder(ctx, e)
	c.events.Deliver(ctx, func(ctx context.Context, next any) {
		e := next.(Event)
		if c.cfg.OnEvent != nil {
			c.cfg.OnEvent(ctx, e)
		}
		c.observers.Tell(ctx, e)
	})
}

// Stats are the metrics of a [Candidate].
type Stats struct {
	Elected     int64 `counter:"terms{event=elected}"`
	Lost        int64 `counter:"terms{event=lost}"`
	Resigned    int64 `counter:"terms{event=resigned}"`
	Asked       int64 `counter:"asks"`         // requests for the lease
	Renewed     int64 `counter:"renewals"`     // that succeeded
	StoreErrors int64 `counter:"store.errors"` // calls of the store that failed

	WaitTime time.Duration `counter:"wait.time_seconds"` // of all waits that have ended

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

// Describe implements [policy.Describer]. Health asks the store: it fails if the store does not answer, or if
// nobody has held the lease for a TTL, unless c is used as a lock, by TryCampaign alone.
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
	rec, err := c.Look(ctx)
	if err != nil {
		return policy.Health{Status: policy.Fail, State: "store_down", Err: err}
	}
	s, vacant := c.Stats(), rec.Now.Sub(rec.Until)
	if rec.Until.IsZero() { // the lease has never been held
		vacant = time.Since(c.made)
	}
	isLock := s.Asked > 0 && s.Queued == 0 && s.WaitTime == 0
	if isLock || vacant <= c.cfg.TTL {
		return policy.Health{}
	}
	detail := fmt.Sprintf("nobody has held it for %v", vacant.Round(time.Second))
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
