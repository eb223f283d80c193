package lease

import (
	"context"
	"fmt"
	"log/slog"
	"time"
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

// Observe calls f with each event from now on, until stop is called: after
// [Config].OnEvent, synchronously, in order, and while no lock is held. A second call of
// stop does nothing.
func (c *Candidate) Observe(f func(context.Context, Event)) (stop func()) {
	return c.observers.Observe(f)
}

// tell tells the hook and the observers of an event.
func (c *Candidate) tell(ctx context.Context, e Event) {
	c.events.AddUnder(ctx, e)
	c.events.Deliver(ctx, func(ctx context.Context, e Event) {
		defer c.panics.Survive(ctx, "lease: a hook", c.setting.Load().OnPanic)
		if hook := c.setting.Load().OnEvent; hook != nil {
			hook(ctx, e)
		}
		c.observers.Tell(ctx, e)
	})
}

// storeFailed tells of a call of the store that has failed.
func (c *Candidate) storeFailed(ctx context.Context, what string, err error) {
	c.count.storeErrors.Add(1)
	cfg := c.setting.Load()
	err = fmt.Errorf("lease: %s: %s: %w", cfg.Name, what, err)
	if cfg.OnStoreError != nil {
		defer c.panics.Survive(ctx, "lease: a hook", c.setting.Load().OnPanic)
		cfg.OnStoreError(ctx, err)
		return
	}
	now, last := time.Now().UnixNano(), c.warned.Load()
	if now-last >= int64(time.Second) && c.warned.CompareAndSwap(last, now) {
		slog.WarnContext(ctx, "lease: the store has failed", "err", err)
	}
}
