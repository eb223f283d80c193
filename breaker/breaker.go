// Package breaker provides a circuit breaker: it stops calling a dependency that keeps failing, and notices
// when the dependency has recovered.
//
//	users := breaker.New(breaker.Config{
//		Name:                "users",
//		ConsecutiveFailures: 5,                // open the breaker
//		OpenFor:             30 * time.Second, // then one call probes
//	})
//	err := users.Do(ctx, fetchUser)
//	if errors.Is(err, breaker.ErrOpen) {
//		err = cachedUser(ctx) // fetchUser was not called
//	}
//
// # States
//
// A [Breaker] starts closed: all calls pass. It opens when calls fail as its [Config] says, and then refuses
// calls with an [*OpenError]. After OpenFor it is half-open: a few calls pass as probes. If they succeed, it
// closes; if one fails, it opens again.
//
// # How a call counts
//
//   - An answer (Answered() bool) is a success.
//   - A refusal (Refused() bool) of an inner policy is ignored.
//   - An error after the caller canceled is ignored. After the caller's deadline it is a failure if the
//     caller waited for Config.Patience, and ignored otherwise.
//   - Any other error is what Config.Classify returns, by default a failure. So are a panic, and a success
//     that took Config.SlowAfter or longer.
//
// A response that is still being read is a stream: its call counts as a success until the stream breaks,
// which is a failure in its place unless the caller canceled.
//
// The result of a call that began before the breaker opened, closed or was reset changes nothing, except
// that an overdue probe that succeeds during the same outage closes the breaker. An outage lasts until a
// probe fails or an operator intervenes.
//
// # Bursts
//
// Failures of calls that were in flight together are one event, not a trend: a lost connection fails all
// calls that share it. If a call was in flight when a run of consecutive failures began, and fails within
// 250ms of that, it belongs to the burst with which the run began. A burst counts as one failure. While a run
// with a burst is younger than 250ms, the breaker stays closed, unless half of the run's failures are
// timeouts. Calls that do not overlap have no burst: ConsecutiveFailures of them open the breaker at once.
//
// # Limits
//
// Do not nest calls under the same breaker: while it is half-open, the outer call holds the permit that the
// inner call needs.
//
// References: the Circuit Breaker pattern (Cloud Design Patterns); Nygard, Release It! The state machine is
// github.com/sony/gobreaker.
package breaker

import (
	"container/list"
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sony/gobreaker/v2"

	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/linger"
	"github.com/go-resilience/resilience/internal/settings"
)

// A Breaker is a circuit breaker. It is safe for concurrent use. It runs no goroutine and no timer;
// transitions that depend on time happen at the next use.
type Breaker struct {
	created   time.Time // all instants below are durations since created
	setting   settings.Setting[Config]
	observing atomic.Pointer[observerSet] // nil until the first Observe

	// mu is never held while user code runs. It is acquired before gobreaker's own lock.
	mu          sync.Mutex
	cfg         *Config
	state       State
	since       time.Duration   // when the breaker entered state
	transitions map[State]int64 // number of transitions to each state; nil before the first
	refusal     *OpenError      // the error of refused calls; nil if every call is admitted
	lastErr     error           // the last failure, or an operator's reason
	results     [refused + 1]int64

	calls    run // failed calls
	streams  run // streams that broke after their calls had succeeded
	window   window
	machine  *machine   // nil before the first failure after New, Reset and each closing
	probes   []*probe   // those that hold a permit
	overtime *list.List // *call values that succeeded less than Window ago and whose stream continues; oldest first

	generation  uint32 // incremented by each transition; calls of older generations do not count
	outages     uint32 // incremented when a late probe can no longer close the breaker
	moments     uint32 // number of the last moment at which a run of failures began
	permits     int    // Config.Probes at the last opening
	consecOpens int    // openings since the breaker was last closed for a whole Window
}

// A call is an admitted call.
type call struct {
	cfg        *Config // in effect when the call began
	generation uint32
	moment     uint32        // Breaker.moments when the call began
	probe      *probe        // nil unless the breaker was half-open
	began      time.Duration // set only if SlowAfter, a deadline or a probe needs it
	deadline   time.Duration // of the caller's ctx; 0 if none

	// For a call in Breaker.overtime.
	succeededAt time.Duration
	element     *list.Element
}

// An outcome is what the end of a call means for the breaker. With more than four words it would be passed in
// memory, which makes a call a fifth slower.
type outcome struct {
	Verdict
	err        error         // of a failure
	retryAfter time.Duration // of a failure; 0 if none
}

// New returns a closed Breaker. It panics if cfg is invalid; see [Config.Validate].
func New(cfg Config) *Breaker {
	b := &Breaker{created: time.Now(), state: Closed}
	b.setting.Init(cfg, Config.withDefaults)
	b.cfg = b.setting.Load()
	b.window.reset(b.cfg, 0)
	return b
}

func (b *Breaker) now() time.Duration { return time.Since(b.created) }

// Do calls fn and returns its error. It does not call fn if ctx has ended, or if the breaker refuses the call
// with an [*OpenError].
func (b *Breaker) Do(ctx context.Context, fn func(context.Context) error) error {
	var c call
	if err := b.admit(ctx, &c); err != nil {
		return err
	}
	out, timeout := outcome{Verdict: Ignore}, false // if fn calls runtime.Goexit
	var stream *call
	work := linger.WorkOf(ctx)
	defer func() {
		r := recover()
		if r != nil {
			out, timeout = outcome{Verdict: Failure, err: fmt.Errorf("%v", r)}, false
		}
		b.finish(ctx, &c, out, timeout, stream)
		if r != nil {
			panic(r) // keeps the stack of the first panic
		}
		if c := stream; c != nil && !work.OnEnd(func(err error) { b.finishStream(ctx, c, err) }) {
			b.finishStream(ctx, c, nil) // the stream ended before OnEnd
		}
	}()
	err := fn(ctx)
	out = c.judge(b, err, behavior.ReadUnder(ctx, err), true)
	timeout = c.timedOut(b, out)
	if work != nil && out.Verdict == Success && err == nil {
		stream = new(call) // a copy, so that c does not escape to the heap
		*stream = c
	}
	return err
}

// Wrap returns a function that calls next under [Breaker.Do].
func (b *Breaker) Wrap(next func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error { return b.Do(ctx, next) }
}

// Begin is [Breaker.Do] for a call that is not a single function. It returns an error if Do would not call its
// function. The first call of done, from any goroutine, ends the call with its error. ctx must not be canceled
// before that.
func (b *Breaker) Begin(ctx context.Context) (done func(error), err error) {
	var c call
	if err := b.admit(ctx, &c); err != nil {
		return nil, err
	}
	var called atomic.Bool
	return func(err error) {
		if called.Swap(true) {
			return
		}
		out, timeout := outcome{Verdict: Ignore}, false // if Classify or a method of err panics
		defer func() { b.finish(ctx, &c, out, timeout, nil) }()
		judged := c.judge(b, err, behavior.ReadUnder(ctx, err), true)
		timeout = c.timedOut(b, judged)
		out = judged
	}, nil
}

// admit initializes c if the call is admitted. Otherwise it returns the reason.
func (b *Breaker) admit(ctx context.Context, c *call) error {
	if ctx.Err() != nil {
		return ended.Error(ctx)
	}
	deadline, hasDeadline := ctx.Deadline()
	if hasDeadline {
		c.deadline = deadline.Sub(b.created)
	}
	b.mu.Lock()
	if b.refusal != nil {
		b.advance(b.now())
	}
	refusal := b.refusal
	c.cfg, c.generation, c.moment = b.cfg, b.generation, b.moments
	switch {
	case refusal == nil:
		if hasDeadline || c.cfg.SlowAfter > 0 {
			c.began = b.now()
		}
	case b.state == HalfOpen && b.admitProbe(c):
		refusal = nil
	default:
		b.results[refused]++
	}
	b.mu.Unlock()
	notified := false
	defer func() {
		if !notified && c.probe != nil { // an observer panicked, so the call is not made
			b.finish(ctx, c, outcome{Verdict: Ignore}, false, nil)
		}
	}()
	b.notify(ctx)
	notified = true
	if refusal == nil {
		return nil
	}
	if o := b.observing.Load(); o != nil {
		o.Tell(ctx, Event{Kind: EventRefused, Name: refusal.Name, At: time.Now(), Err: refusal})
	}
	return refusal
}

// judge returns the outcome of a call that ended with err. SlowAfter applies only if returned is set: the
// call's function has just returned, rather than its stream ended.
func (c *call) judge(b *Breaker, err error, end behavior.End, returned bool) outcome {
	verdict := Success
	switch end.Kind {
	case behavior.Canceled, behavior.Refused:
		return outcome{Verdict: Ignore}
	case behavior.Overran:
		if c.cfg.Patience == Unlimited || c.deadline-c.began < c.cfg.Patience {
			return outcome{Verdict: Ignore}
		}
		verdict = Failure
	case behavior.Failed:
		verdict = Failure
	}
	if c.cfg.Classify != nil && (verdict == Failure || end.Throttled) {
		if verdict = c.cfg.Classify(err); verdict < Failure || verdict > Ignore {
			verdict = Failure // another value would be out of range for b.results
		}
	}
	switch {
	case verdict == Failure:
		return outcome{Failure, err, end.RetryAfter}
	case verdict == Success && returned && c.cfg.SlowAfter > 0 && b.now()-c.began >= c.cfg.SlowAfter:
		return outcome{Failure, errSlow, 0}
	}
	return outcome{Verdict: verdict}
}

// timedOut reports whether a failure is that too much time passed. It must not be called with b.mu held, because
// the methods of err are user code.
func (c *call) timedOut(b *Breaker, out outcome) bool {
	return out.Verdict == Failure &&
		(c.deadline != 0 && b.now() >= c.deadline || out.err == errSlow || behavior.IsTimeout(out.err))
}

// finish records the outcome of a call whose function has returned, and whether it is a timeout. If its stream
// continues, stream is a copy of c.
func (b *Breaker) finish(ctx context.Context, c *call, out outcome, timeout bool, stream *call) {
	b.locked(ctx, func(now time.Duration) {
		b.results[out.Verdict]++
		switch {
		case c.probe != nil:
			b.finishProbe(now, c, out, stream != nil)
		case c.generation != b.generation || out.Verdict == Ignore:
		case out.Verdict == Failure:
			b.window.fail(now, out.retryAfter)
			b.recordFailure(now, &b.calls, c, out, timeout)
		default:
			b.window.succeed(now)
			b.calls.end()
			if stream == nil {
				break
			}
			if b.overtime == nil {
				b.overtime = list.New()
			}
			stream.succeededAt, stream.element = now, b.overtime.PushBack(stream)
		}
	})
}

// finishStream records the end of a stream, which continued after its call succeeded. If it broke, a failure
// replaces the newest success. Policies that have returned may have canceled ctx by now, so finishStream
// reads only the caller's deadline.
func (b *Breaker) finishStream(ctx context.Context, c *call, err error) {
	end := behavior.Read(err)
	switch {
	case end.Kind != behavior.Failed:
	case errors.Is(err, context.Canceled):
		end.Kind = behavior.Canceled
	case c.deadline != 0 && b.now() >= c.deadline:
		end.Kind = behavior.Overran
	}
	out := c.judge(b, err, end, false)
	timeout := c.timedOut(b, out)
	b.locked(ctx, func(now time.Duration) {
		if out.Verdict == Failure {
			b.results[Failure]++ // results[Success] keeps its count, because counters never decrease
		}
		switch {
		case c.generation != b.generation:
		case c.probe != nil:
			b.decideProbe(now, c.probe, &b.streams, out)
		case out.Verdict == Failure:
			b.window.replaceSuccess(now, out.retryAfter)
			b.recordFailure(now, &b.streams, c, out, timeout)
		case out.Verdict == Success:
			b.streams.end()
		}
		if c.element != nil && c.generation == b.generation {
			b.overtime.Remove(c.element)
		}
	})
}

// locked applies the transitions that are due, calls f with b.mu held, and then notifies the observers.
func (b *Breaker) locked(ctx context.Context, f func(now time.Duration)) {
	b.mu.Lock()
	now := b.now()
	b.advance(now)
	f(now)
	b.mu.Unlock()
	b.notify(ctx)
}

// The methods below require b.mu.

// recordFailure adds a failure, which the window has counted, to r, and opens the breaker if it reaches a
// limit.
func (b *Breaker) recordFailure(now time.Duration, r *run, c *call, out outcome, timeout bool) {
	f := failure{c.moment, now, timeout, out.retryAfter}
	inBurst := r.add(f, b.moments+1)
	if r.first.number == b.moments+1 {
		b.moments++
	}
	if inBurst {
		b.window.addToBurst(f, r.first)
	}
	b.lastErr = out.err
	if b.state == Disabled {
		return
	}
	if b.machine == nil {
		b.machine = newMachine(gobreaker.Settings{})
	}
	tooMany, hint := b.tooMany(now)
	if b.machine.fail(tooMany) {
		b.trip(now, out.err, hint)
	}
}

// tooMany reports whether the failures reach a limit, and returns the longest RetryAfter of those that do.
func (b *Breaker) tooMany(now time.Duration) (tooMany bool, hint time.Duration) {
	undecided := false
	for _, r := range [...]*run{&b.calls, &b.streams} {
		undecided = undecided || r.undecided(now)
		if b.cfg.tooManyConsecutive(r, now) {
			tooMany, hint = true, max(hint, r.retryAfter)
		}
	}
	if !undecided && b.cfg.tooManyInWindow(b.window.succeeded, b.window.events()) {
		tooMany, hint = true, max(hint, b.window.longestRetryAfter())
	}
	return tooMany, hint
}
