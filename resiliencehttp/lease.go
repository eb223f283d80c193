package resiliencehttp

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/linger"
)

// A lease is the ctx that a request is sent under. It has the values and the end of
// the attempt's, but outlasts that where the response does: policies cancel what
// they have derived from a ctx when they return, and a body is read after that.
type lease struct {
	context.Context // the attempt's
	call            *call

	// Where the attempt's ctx may end before the caller's:
	loose    context.Context
	cancel   context.CancelCauseFunc // of loose
	leave    func() bool             // keeps loose from ending with the attempt's
	extended atomic.Bool
	rest     time.Duration // that a time-out left for the body when it was extended
	passed   error         // the cause that this time-out gives; nil if there is none
	timer    *time.Timer   // of rest, if not nil
}

func newLease(attempt context.Context, c *call) *lease {
	l := &lease{Context: attempt, call: c}
	if caller := c.req.Context(); attempt.Done() != caller.Done() {
		l.loose, l.cancel = context.WithCancelCause(caller)
		l.leave = context.AfterFunc(attempt, l.attemptEnded)
	}
	return l
}

// apart reports whether the lease can outlast the attempt's ctx.
func (l *lease) apart() bool { return l.loose != nil }

// attemptEnded ends the lease with the attempt's ctx. One that was extended goes on
// if that was canceled, as by a policy that returns; a time-out covers the body.
func (l *lease) attemptEnded() {
	if !l.extended.Load() || l.Context.Err() != context.Canceled {
		l.cancel(context.Cause(l.Context))
	}
}

// extend lets the lease outlast the attempt, for its response to be read.
func (l *lease) extend() {
	if l.apart() {
		if limit := linger.LimitOf(l.Context); limit != nil {
			l.rest, l.passed = time.Until(limit.At), limit.Cause
		}
	}
	l.extended.Store(true)
}

// limit begins the rest of the time-out, if the attempt's ctx has been canceled and
// no longer ends the lease. The policies have returned; the time in which they
// waited for another attempt does not count.
func (l *lease) limit() {
	if l.passed != nil && l.Context.Err() == context.Canceled {
		l.timer = time.AfterFunc(l.rest, func() { l.cancel(l.passed) })
	}
}

// end is called when the attempt is over.
func (l *lease) end() {
	if !l.extended.Load() {
		l.drop()
	}
}

// drop ends the lease.
func (l *lease) drop() {
	if !l.apart() {
		return
	}
	l.leave()
	if l.timer != nil {
		l.timer.Stop()
	}
	l.cancel(nil)
}

// reason returns why the lease has ended.
func (l *lease) reason() error { return ended.Error(l) }

func (l *lease) Done() <-chan struct{} {
	if l.apart() {
		return l.loose.Done()
	}
	return l.Context.Done()
}

func (l *lease) Err() error {
	if !l.apart() {
		return l.Context.Err()
	}
	end := l.loose.Err()
	if end != nil && errors.Is(context.Cause(l.loose), context.DeadlineExceeded) {
		return context.DeadlineExceeded // as an attempt's time-out has it
	}
	return end
}

// Value hides the work of the call from Base: what policies there hold is not held
// for the response.
func (l *lease) Value(key any) any {
	if key == (linger.Key{}) {
		return nil
	}
	v := l.Context.Value(key)
	if _, isCtx := v.(context.Context); isCtx && l.apart() && l.loose.Err() != nil {
		return l.loose.Value(key) // the one that context.Cause looks for has another cause
	}
	return v
}

// AfterFunc is for those who derive a ctx from this one, as that of the call is.
func (l *lease) AfterFunc(f func()) (stop func() bool) {
	if l.apart() {
		return context.AfterFunc(l.loose, f)
	}
	return context.AfterFunc(l.Context, f)
}
