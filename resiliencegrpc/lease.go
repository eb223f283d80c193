package resiliencegrpc

import (
	"context"

	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/linger"
)

// A lease is the ctx that a stream is opened under. It has the values of the attempt's
// ctx, and the deadline of the caller's, which is the one that the server is told. It
// ends with both until the stream's first message has arrived, and then with the
// caller's only: policies cancel a ctx that they have derived when they return, and their
// time-outs are for the first message.
type lease struct {
	context.Context // derived from the caller's
	attempt         context.Context
	cancel          context.CancelCauseFunc
	leave           func() bool // keeps the lease from ending with the attempt's ctx
}

func newLease(attempt, caller context.Context) *lease {
	l := &lease{attempt: attempt, leave: func() bool { return true }}
	l.Context, l.cancel = context.WithCancelCause(caller)
	if attempt.Done() != caller.Done() {
		l.leave = context.AfterFunc(attempt, func() { l.cancel(ended.Error(attempt)) })
	}
	return l
}

// extend lets the lease outlast the attempt.
func (l *lease) extend() { l.leave() }

// drop ends the lease.
func (l *lease) drop() {
	l.leave()
	l.cancel(nil)
}

// timedOut reports whether a time-out of the attempt has ended the lease.
func (l *lease) timedOut() bool {
	return l.Err() != nil && l.attempt.Err() == context.DeadlineExceeded
}

// Value returns what the attempt's ctx has for key. What package context asks for is the
// end of the lease, and not the attempt's. The work of the call is hidden: what
// interceptors further in hold is not held for the stream.
func (l *lease) Value(key any) any {
	switch key.(type) {
	case linger.Key:
		return nil
	case callKey:
		return l.attempt.Value(key)
	}
	v := l.attempt.Value(key)
	if _, isCtx := v.(context.Context); isCtx {
		return l.Context.Value(key)
	}
	return v
}
