package breaker

import (
	"context"
	"time"
)

// A Change is a change of a breaker's state.
type Change struct {
	Name     string // of the breaker, or of its group
	Key      string // of the breaker in its group
	From, To State
	At       time.Time
	// Err is what opened the breaker: the error of the last call, or the reason given to
	// Trip or ForceOpen. It is nil for the other changes.
	Err error
	// OpenFor is how long calls are refused from At on, if To is Open.
	OpenFor time.Duration
}

// deliver tells of the changes that wait, in order. If another goroutine is telling, or a
// hook further up the stack, that one goes on with these.
func (b *Breaker) deliver(ctx context.Context) { b.changes.Deliver(ctx, b.tell) }

func (b *Breaker) tell(ctx context.Context, c Change) { b.cfg.OnChange(ctx, c) }
