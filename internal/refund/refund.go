// Package refund returns the tokens of admitted requests whose handler is refused by an inner policy.
//
// throttle.Limiter.Do gives its tokens back if its function returns a refusal. The middleware of resiliencehttp
// cannot use Do, because it needs the state of the limit before it calls the handler. It calls Admit under a ctx
// of Start, which records how the tokens are given back, and calls Refund if an inner middleware refuses.
package refund

import (
	"context"
	"sync"
)

// Charges are the tokens that several limits have taken for one request. They are safe for concurrent use. A nil
// *Charges records nothing.
type Charges struct {
	mu   sync.Mutex
	undo []func()
}

type (
	takenKey  struct{} // of the Charges of a request
	recordKey struct{} // of the Charges in which Admit records what it takes
)

// Of returns the Charges of the request that ctx belongs to, or nil.
func Of(ctx context.Context) *Charges {
	c, _ := ctx.Value(takenKey{}).(*Charges)
	return c
}

// Start returns the ctx under which middleware calls Admit, and the ctx of the handler. A handler that calls Admit
// itself does not get its own tokens back.
func Start(ctx context.Context) (admit, handler context.Context) {
	c := Of(ctx)
	handler = ctx
	if c == nil {
		c = new(Charges)
		handler = context.WithValue(ctx, takenKey{}, c)
	}
	return context.WithValue(ctx, recordKey{}, c), handler
}

// Record records a function that gives tokens back, if ctx is that of Admit from Start.
func Record(ctx context.Context, undo func()) {
	if c, _ := ctx.Value(recordKey{}).(*Charges); c != nil {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.undo = append(c.undo, undo)
	}
}

// Refund gives all tokens back once.
func (c *Charges) Refund() {
	if c == nil {
		return
	}
	c.mu.Lock()
	undo := c.undo
	c.undo = nil
	c.mu.Unlock()
	for _, f := range undo {
		f()
	}
}
