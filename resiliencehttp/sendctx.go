package resiliencehttp

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/linger"
)

// A sendCtx is the ctx that a request is sent under. It has the values and the end of the
// attempt's ctx, but outlasts it if there is a response to read: policies cancel a ctx
// that they derived when they return, and the body is read after that.
type sendCtx struct {
	context.Context // of the attempt
	call            *call

	// Set if the attempt's ctx may end before the caller's:
	loose    context.Context         // ends with the caller's ctx
	cancel   context.CancelCauseFunc // of loose
	leave    func() bool             // unties loose from the attempt's ctx
	extended atomic.Bool
	rest     time.Duration // that a time-out left for the body when the ctx was extended
	passed   error         // the cause of this time-out; nil if there is none
	timer    *time.Timer   // of rest, if not nil
}

func newSendCtx(attempt context.Context, c *call) *sendCtx {
	s := &sendCtx{Context: attempt, call: c}
	if caller := c.req.Context(); attempt.Done() != caller.Done() {
		s.loose, s.cancel = context.WithCancelCause(caller)
		s.leave = context.AfterFunc(attempt, s.attemptEnded)
	}
	return s
}

// apart reports whether s can outlast the attempt's ctx.
func (s *sendCtx) apart() bool { return s.loose != nil }

// attemptEnded ends s when the attempt's ctx has ended. If s was extended, a cancel does
// not end it, since a policy that returns cancels; a time-out does, since it covers the
// body.
func (s *sendCtx) attemptEnded() {
	if !s.extended.Load() || s.Context.Err() != context.Canceled {
		s.cancel(context.Cause(s.Context))
	}
}

// extend lets s outlast the attempt, so that its response can be read.
func (s *sendCtx) extend() {
	if s.apart() {
		if limit := linger.LimitOf(s.Context); limit != nil {
			s.rest, s.passed = time.Until(limit.At), limit.Cause
		}
	}
	s.extended.Store(true)
}

// limit starts the rest of the time-out, if the attempt's ctx was canceled and no longer
// ends s. It is called when the policies have returned, so that the time in which they
// waited for another attempt does not count.
func (s *sendCtx) limit() {
	if s.passed != nil && s.Context.Err() == context.Canceled {
		s.timer = time.AfterFunc(s.rest, func() { s.cancel(s.passed) })
	}
}

// endAttempt is called when the attempt is over. It ends s unless that was extended.
func (s *sendCtx) endAttempt() {
	if !s.extended.Load() {
		s.end()
	}
}

// end ends s.
func (s *sendCtx) end() {
	if !s.apart() {
		return
	}
	s.leave()
	if s.timer != nil {
		s.timer.Stop()
	}
	s.cancel(nil)
}

// reason returns why s has ended.
func (s *sendCtx) reason() error { return ended.Error(s) }

func (s *sendCtx) Done() <-chan struct{} {
	if s.apart() {
		return s.loose.Done()
	}
	return s.Context.Done()
}

func (s *sendCtx) Err() error {
	if !s.apart() {
		return s.Context.Err()
	}
	end := s.loose.Err()
	if end != nil && errors.Is(context.Cause(s.loose), context.DeadlineExceeded) {
		return context.DeadlineExceeded // as the ctx of the time-out says
	}
	return end
}

// Value hides the work of the call from Base: policies within Base hold nothing for this
// response.
func (s *sendCtx) Value(key any) any {
	if key == (linger.Key{}) {
		return nil
	}
	v := s.Context.Value(key)
	if _, isCtx := v.(context.Context); isCtx && s.apart() && s.loose.Err() != nil {
		return s.loose.Value(key) // context.Cause looks for a ctx, and this one has the cause
	}
	return v
}

// AfterFunc spares a ctx derived from s a goroutine: package context looks for it.
func (s *sendCtx) AfterFunc(f func()) (stop func() bool) {
	if s.apart() {
		return context.AfterFunc(s.loose, f)
	}
	return context.AfterFunc(s.Context, f)
}
