package resiliencegrpc

import (
	"context"

	"github.com/go-resilience/resilience"
)

// A tryContext is the ctx that a stream is opened under. It has the values of the attempt's
// ctx, and the deadline of the caller's, which is the one that the server is told. It
// ends with both until the stream's first message has arrived, and then with the
// caller's only: policies cancel a ctx that they have derived when they return, and their
// timeouts are for the first message.
type tryContext struct {
	context.Context // derived from the caller's
	attempt         context.Context
	cancel          context.CancelCauseFunc
	leave           func() bool // keeps the ctx from ending with the attempt's ctx
}

func newTryContext(attempt, caller context.Context) *tryContext {
	attempt, _ = resilience.BeginWork(attempt) // what interceptors further in hold is not held for the stream
	c := &tryContext{attempt: attempt, leave: func() bool { return true }}
	c.Context, c.cancel = context.WithCancelCause(caller)
	if attempt.Done() != caller.Done() {
		c.leave = context.AfterFunc(attempt, func() { c.cancel(resilience.EndOf(attempt)) })
	}
	return c
}

// extend lets the ctx outlast the attempt.
func (c *tryContext) extend() { c.leave() }

// drop ends the ctx.
func (c *tryContext) drop() { c.cancel(nil) }

// timedOut reports whether a timeout of the attempt, or the deadline of the caller, has passed.
func (c *tryContext) timedOut() bool { return c.attempt.Err() == context.DeadlineExceeded }

// Value returns what the attempt's ctx has for key. What package context asks for is the
// end of the ctx, and not the attempt's.
func (c *tryContext) Value(key any) any {
	if _, isOurs := key.(callKey); isOurs {
		return c.attempt.Value(key)
	}
	v := c.attempt.Value(key)
	if _, isCtx := v.(context.Context); isCtx {
		return c.Context.Value(key)
	}
	return v
}
