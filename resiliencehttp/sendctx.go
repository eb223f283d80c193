package resiliencehttp

import (
	"context"
	"errors"
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
	own      context.Context // its end
	cancel   context.CancelCauseFunc
	leave    [2]func() bool // untie own from the ctx of the whole call, and of the attempt
	extended atomic.Bool
	rest     time.Duration // that a timeout left for the body when the ctx was extended
	passed   error         // the cause of this timeout; nil if there is none
	timer    *time.Timer   // of rest, if not nil

	// Set if a client limits the time of an attempt:
	at    time.Time // when that is over
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
	same, limit := c.endsWith(attempt), c.t.attemptTimeout
	if same && limit == 0 && c.stop == nil {
		return s
	}
	s.apart = true
	s.own, s.cancel = context.WithCancelCause(context.Background())
	s.tie(c.whole)
	if !same {
		s.leave[1] = context.AfterFunc(attempt, s.attemptEnded)
	}
	if limit > 0 {
		s.at = time.Now().Add(limit)
		s.clock = time.AfterFunc(limit, s.expire)
	}
	return s
}

// tie has s end with whole.
func (s *sendCtx) tie(whole context.Context) {
	s.leave[0] = context.AfterFunc(whole, func() { s.cancel(context.Cause(whole)) })
}

// expire ends s when the time of an attempt is over.
func (s *sendCtx) expire() { s.cancel(s.call.t.attemptPassed) }

// timedOut returns err, in a TimeoutError if AttemptTimeout is why the attempt failed.
func (s *sendCtx) timedOut(err error) error {
	passed := s.call.t.attemptPassed
	if passed == nil || err == error(passed) || !ended.By(s, s.at, passed) {
		return err
	}
	return &resilience.TimeoutError{Name: passed.Name, After: passed.After, Err: err}
}

// attemptEnded ends s when the attempt's ctx has ended. If s was extended, a cancel does
// not end it, since a policy that returns cancels; a timeout does, since it covers the
// body.
func (s *sendCtx) attemptEnded() {
	if !s.extended.Load() || s.Context.Err() != context.Canceled {
		s.cancel(context.Cause(s.Context))
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

// limit starts the rest of the timeout, if the attempt's ctx was canceled and no longer
// ends s. It is called when the policies have returned, so that the time in which they
// waited for another attempt does not count.
func (s *sendCtx) limit() {
	if s.passed != nil && s.Context.Err() == context.Canceled {
		s.timer = time.AfterFunc(s.rest, func() { s.cancel(s.passed) })
	}
	if s.left > 0 {
		s.clock.Reset(s.left)
	}
}

// unlimited takes the limits of the client from s: the response is a connection.
func (s *sendCtx) unlimited() {
	if s.clock != nil {
		s.clock.Stop()
	}
	if s.call.stop != nil && s.leave[0]() {
		s.tie(s.call.req.Context())
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
	for _, leave := range s.leave {
		if leave != nil {
			leave()
		}
	}
	if s.timer != nil {
		s.timer.Stop()
	}
	if s.clock != nil {
		s.clock.Stop()
	}
	s.cancel(nil)
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
		return s.own.Done()
	}
	return s.Context.Done()
}

func (s *sendCtx) Err() error {
	if !s.apart {
		return s.Context.Err()
	}
	if caller := s.call.req.Context(); caller.Err() != nil { // a function of AfterFunc runs a moment later
		s.cancel(context.Cause(caller))
	}
	if s.own.Err() != nil && errors.Is(context.Cause(s.own), context.DeadlineExceeded) {
		return context.DeadlineExceeded
	}
	return s.own.Err()
}

// Value hides the work of the call from Base: policies within Base hold nothing for this
// response.
func (s *sendCtx) Value(key any) any {
	if key == (linger.Key{}) {
		return nil
	}
	if s.apart && s.own.Err() != nil {
		if v := s.own.Value(key); v != nil { // what context.Cause looks for
			return v
		}
	}
	return s.Context.Value(key)
}

// AfterFunc spares a ctx derived from s a goroutine: package context looks for it.
func (s *sendCtx) AfterFunc(f func()) (stop func() bool) {
	if s.apart {
		return context.AfterFunc(s.own, f)
	}
	return context.AfterFunc(s.Context, f)
}
