package lease

import (
	"context"
	"fmt"
	"log/slog"
	"runtime/debug"
	"time"
)

// An EventKind says what has happened.
type EventKind string

const (
	// Elected is the beginning of a term.
	Elected EventKind = "elected"
	// Lost is the end of a term that was not given up. Its function may still run.
	Lost EventKind = "lost"
	// Resigned is the end of a term that was given up.
	Resigned EventKind = "resigned"
)

// An Event is something that has happened to a [Candidate].
type Event struct {
	Kind   EventKind
	Name   string // of the lease
	Holder string
	Epoch  int64
	Waited time.Duration // of Elected: since the campaign began
	Took   time.Duration // of Lost and Resigned: how long the term has lasted
	Err    error         // of Lost: the *LostError; of Resigned: why the store could not be told, or nil
}

// Observe adds a function that is called for each Event, synchronously, in order, and
// with no lock held. stop removes the function.
func (c *Candidate) Observe(f func(context.Context, Event)) (stop func()) {
	return c.observers.Observe(f)
}

// tell tells the hook and the observers of an event.
func (c *Candidate) tell(ctx context.Context, e Event) {
	c.events.AddUnder(ctx, e)
	c.events.Deliver(ctx, func(ctx context.Context, e Event) {
		defer survive(ctx)
		if hook := c.config.Load().OnEvent; hook != nil {
			hook(ctx, e)
		}
		c.observers.Tell(ctx, e)
	})
}

// survive logs a panic of a hook, which may run on a goroutine of this package: it would
// end the process, and the term with it.
func survive(ctx context.Context) {
	if v := recover(); v != nil {
		slog.ErrorContext(ctx, "lease: a hook has panicked", "panic", v, "stack", string(debug.Stack()))
	}
}

// storeFailed tells of a call of the store that has failed.
func (c *Candidate) storeFailed(ctx context.Context, what string, err error) {
	c.count.storeErrors.Add(1)
	cfg := c.config.Load()
	err = fmt.Errorf("lease: %s: %s: %w", cfg.Name, what, err)
	if cfg.OnStoreError != nil {
		defer survive(ctx)
		cfg.OnStoreError(ctx, err)
		return
	}
	now, last := time.Now().UnixNano(), c.warned.Load()
	if now-last >= int64(time.Second) && c.warned.CompareAndSwap(last, now) {
		slog.WarnContext(ctx, "lease: the store has failed", "err", err)
	}
}
