package resiliencehttp

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/linger"
)

// A sendCtx is the ctx that a request is sent under. It has the values and the end of the
// attempt's ctx, but outlasts it if there is a response to read: policies cancel a ctx
// that they derived when they return, and the body is read after that.
type sendCtx struct {
	context.Context // of the attempt
	call            *call

	// Set if the attempt's ctx may end before the caller's, or a client limits its time:
	apart    bool
	loose    loose       // its end
	leave    func() bool // unties loose from the attempt's ctx, if not nil
	extended atomic.Bool
	rest     time.Duration // that a time-out left for the body when the ctx was extended
	passed   error         // the cause of this time-out; nil if there is none
	timer    *time.Timer   // of rest, if not nil

	// Set if a client limits the time:
	at    time.Time // when that is over
	cause error     // what it is over by
	clock *time.Timer
	left  time.Duration // of an attempt whose clock was stopped
}

// newSendCtx returns a ctx for one attempt, the first of which is a part of the call.
func newSendCtx(attempt context.Context, c *call) *sendCtx {
	s := &c.first
	if s.call != nil {
		s = new(sendCtx)
	}
	s.Context, s.call = attempt, c
	same, limited := c.endsWith(attempt), c.limited()
	if same && !limited {
		return s
	}
	s.apart = true
	s.loose.tie(c.req.Context())
	if !same {
		s.leave = context.AfterFunc(attempt, s.attemptEnded)
	}
	if limited {
		var in time.Duration
		s.at, in, s.cause = c.limit(c.t.attemptTimeout)
		s.clock = time.AfterFunc(in, func() { s.expire(s.cause) })
	}
	return s
}

// expire ends s when its time is over.
func (s *sendCtx) expire(cause error) {
	if cause == s.call.total.cause {
		s.call.total.watched() // the policies are to see it, too
	}
	s.loose.cancel(cause)
}

// timedOut returns err, in a TimeoutError if AttemptTimeout is why the attempt failed.
func (s *sendCtx) timedOut(err error) error {
	passed := s.call.t.attemptPassed
	if passed == nil || s.cause != error(passed) || err == error(passed) || !ended.By(s, s.at, s.cause) {
		return err
	}
	return &resilience.TimeoutError{Name: passed.Name, After: passed.After, Err: err}
}

// attemptEnded ends s when the attempt's ctx has ended. If s was extended, a cancel does
// not end it, since a policy that returns cancels; a time-out does, since it covers the
// body.
func (s *sendCtx) attemptEnded() {
	if !s.extended.Load() || s.Context.Err() != context.Canceled {
		s.loose.cancel(context.Cause(s.Context))
	}
}

// extend lets s outlast the attempt, so that its response can be read.
func (s *sendCtx) extend() {
	if s.apart {
		if limit := linger.LimitOf(s.Context); limit != nil {
			s.rest, s.passed = time.Until(limit.At), limit.Cause
		}
	}
	s.extended.Store(true)
}

// pause stops the clock of an attempt that has failed, whose response the caller may get
// when the policies have waited and given up.
func (s *sendCtx) pause() {
	if s.clock != nil && s.clock.Stop() {
		s.left = max(1, time.Until(s.at))
	}
}

// limit starts the rest of the time-out, if the attempt's ctx was canceled and no longer
// ends s. It is called when the policies have returned, so that the time in which they
// waited for another attempt does not count.
func (s *sendCtx) limit() {
	if s.passed != nil && s.Context.Err() == context.Canceled {
		s.timer = time.AfterFunc(s.rest, func() { s.loose.cancel(s.passed) })
	}
	if s.left > 0 {
		_, in, cause := s.call.limit(s.left)
		s.clock = time.AfterFunc(in, func() { s.expire(cause) })
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
	if !s.apart {
		return
	}
	if s.leave != nil {
		s.leave()
	}
	if s.timer != nil {
		s.timer.Stop()
	}
	if s.clock != nil {
		s.clock.Stop()
	}
	s.loose.release()
}

// reason returns why s has ended.
func (s *sendCtx) reason() error { return ended.Error(s) }

func (s *sendCtx) Deadline() (time.Time, bool) {
	deadline, ok := s.Context.Deadline()
	if s.clock != nil && (!ok || s.at.Before(deadline)) {
		return s.at, true
	}
	return deadline, ok
}

func (s *sendCtx) Done() <-chan struct{} {
	if s.apart {
		return s.loose.Done()
	}
	return s.Context.Done()
}

func (s *sendCtx) Err() error {
	if s.apart {
		return s.loose.Err()
	}
	return s.Context.Err()
}

// Value hides the work of the call from Base: policies within Base hold nothing for this
// response.
func (s *sendCtx) Value(key any) any {
	if key == (linger.Key{}) {
		return nil
	}
	if v := s.loose.endValue(key); v != nil {
		return v
	}
	return s.Context.Value(key)
}

// AfterFunc spares a ctx derived from s a goroutine: package context looks for it.
func (s *sendCtx) AfterFunc(f func()) (stop func() bool) {
	if s.apart {
		return s.loose.AfterFunc(f)
	}
	return context.AfterFunc(s.Context, f)
}
