package lease

import (
	"context"
	"fmt"
	"time"

	"github.com/go-resilience/resilience/internal/describe"
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

// Stats are the figures of a [Candidate].
type Stats struct {
	Elected     int64 // terms begun
	Lost        int64 // terms lost
	Resigned    int64 // terms given up
	Asked       int64 // times that the store was asked for the lease
	Renewed     int64 // renewals that have succeeded
	StoreErrors int64 // calls of the store that have failed

	WaitTime time.Duration // sum over all waits of Run and Campaign that have ended

	Queued  int // calls of Run and Campaign that wait
	Leading int // terms that hold
}

func (c *Candidate) Stats() (s Stats) {
	c.count(func(now *Stats) { s = *now })
	return s
}

// count changes the figures.
func (c *Candidate) count(change func(*Stats)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	change(&c.stats)
}

// Level is as slog's: 4 for what needs attention, else -4.
func (e Event) Level() int {
	if e.Kind == EventLost || e.Err != nil {
		return 4
	}
	return -4
}

// Fields calls yield with each detail of the event.
func (e Event) Fields(yield func(name string, value any)) {
	yield("event", string(e.Kind))
	yield("holder", e.Holder)
	yield("epoch", e.Epoch)
	if e.Waited > 0 {
		yield("waited", e.Waited)
	}
	if e.Took > 0 {
		yield("took", e.Took)
	}
	if e.Err != nil {
		yield("err", e.Err)
	}
}

// Kind returns "lease".
func (c *Candidate) Kind() string { return "lease" }

// Figures returns the Stats.
func (c *Candidate) Figures() []describe.Figure {
	s := c.Stats()
	return []describe.Figure{
		describe.Count("lease.terms{state=elected}", s.Elected),
		describe.Count("lease.terms{state=lost}", s.Lost),
		describe.Count("lease.terms{state=resigned}", s.Resigned),
		describe.Count("lease.asks", s.Asked),
		describe.Count("lease.renewals", s.Renewed),
		describe.Count("lease.store.errors", s.StoreErrors),
		{Name: "lease.wait.time_seconds", Counter: true, Value: s.WaitTime.Seconds()},
		{Name: "lease.queued", Value: float64(s.Queued)},
		{Name: "lease.leading", Value: float64(s.Leading)},
	}
}

// Health asks the store, and returns what is wrong, or nil: the store does not answer, or nobody has
// held the lease for a TTL, unless TryCampaign alone has asked for it.
func (c *Candidate) Health(ctx context.Context) error {
	rec, err := c.Look(ctx)
	if err != nil {
		return &describe.Ailment{State: "store down", Fails: true, Err: err}
	}
	s, vacant := c.Stats(), rec.Now.Sub(rec.Until)
	if rec.Until.IsZero() { // forever
		vacant = time.Since(c.made)
	}
	lock := s.Asked > 0 && s.Queued == 0 && s.WaitTime == 0
	if lock || vacant <= c.cfg.TTL {
		return nil
	}
	detail := fmt.Sprintf("nobody has held it for %v", vacant.Round(time.Second))
	return &describe.Ailment{State: "vacant", Detail: detail, Fails: true}
}

// Settings returns the Config without its functions.
func (c *Candidate) Settings() any {
	cfg := c.cfg
	cfg.OnEvent, cfg.OnStoreError = nil, nil
	return cfg
}

// ObserveAny is Observe for a registry.
func (c *Candidate) ObserveAny(f func(context.Context, any)) (stop func()) {
	return c.Observe(func(ctx context.Context, e Event) { f(ctx, e) })
}
