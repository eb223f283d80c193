// Package refund refunds the tokens of an admitted request if an inner policy refuses the request.
//
// throttle.Limiter.Do refunds the tokens of a call if the function returns a refusal. The middleware of
// resiliencehttp cannot use Do, because it needs the state of the limit before it calls the handler. Instead, the
// middleware calls Admit under a ctx of [Start]. Admit records in this ctx how the tokens are refunded. If an inner
// middleware refuses the request, the middleware calls Refund.
package refund

import (
	"context"
	"sync"
)

// Charges are the tokens that several limits have taken for one request. They are safe for concurrent use. The
// methods of a nil *Charges do nothing.
type Charges struct {
	mu   sync.Mutex
	undo []func()
}

type (
	takenKey  struct{} // key of the Charges of a request
	recordKey struct{} // key of the Charges in which Admit records the tokens that it takes
)

// Of returns the Charges of the request that ctx belongs to, or nil.
func Of(ctx context.Context) *Charges {
	c, _ := ctx.Value(takenKey{}).(*Charges)
	return c
}

// Start returns the ctx under which middleware calls Admit, and the ctx of the handler. If the handler itself calls
// Admit under its ctx, those tokens are not refunded.
func Start(ctx context.Context) (admit, handler context.Context) {
	c := Of(ctx)
	handler = ctx
	if c == nil {
		c = new(Charges)
		handler = context.WithValue(ctx, takenKey{}, c)
	}
	return context.WithValue(ctx, recordKey{}, c), handler
}

// Record records a function that refunds tokens. It does nothing unless ctx comes from the first result of Start.
func Record(ctx context.Context, undo func()) {
	if c, _ := ctx.Value(recordKey{}).(*Charges); c != nil {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.undo = append(c.undo, undo)
	}
}

// Refund refunds all tokens. A second call has no effect.
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
