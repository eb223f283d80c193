// Package breaker provides a circuit breaker: it stops calling a dependency that keeps failing, and notices
// when the dependency has recovered.
//
//	users := breaker.New(breaker.Config{
//		Name:                "users",
//		ConsecutiveFailures: 5,                // open after 5 failures; overlapping failures count as one
//		OpenFor:             30 * time.Second, // then let one call through to probe the dependency
//	})
//	err := users.Do(ctx, fetchUser)
//	if errors.Is(err, breaker.ErrOpen) {
//		err = cachedUser(ctx) // fetchUser was not called
//	}
//
// # States
//
// A [Breaker] starts closed: all calls pass. The breaker opens when failures reach a limit of its [Config]. An open
// breaker refuses calls with an [*OpenError]. After Config.OpenFor the breaker is half-open: a few calls pass as
// probes. If the probes succeed, the breaker closes. If a probe fails, the breaker opens again.
//
// # How a call counts
//
//   - An error whose method Answered() bool returns true is a success: the dependency works, although its answer may
//     be "not found".
//   - An error whose method Refused() bool returns true is ignored: a policy inside the breaker refused the call.
//   - An error that is returned after the caller canceled ctx is ignored.
//   - An error after the deadline of the caller's ctx is a failure only if the call had at least Config.Patience from
//     its start to the deadline. If the call had less time, the error is ignored. Patience does not apply to a
//     resilience.Timeout inside the breaker. The error of such a Timeout is a failure.
//   - Any other error is a failure, unless Config.Classify returns another verdict.
//   - A panic is a failure. A call that exits its goroutine is ignored.
//   - A successful call that took Config.SlowAfter or longer is a failure.
//
// # Streams
//
// The work of a call may continue after the call has returned. For example, the caller may still read the response of
// an HTTP server. Work that continues after its call has returned is called a stream. A stream's call counts as a
// success when the call returns. If the stream breaks later, the call counts as a failure instead, unless the caller
// canceled the stream.
//
// A gRPC stream is open before the server has answered. So the result of the stream's call is counted only at the
// first of three events: the server answers, the stream ends, or the stream has continued for Config.Window.
//
// # Late results
//
// If the breaker changes its state or is reset while a call is in flight, the result of the call affects neither the
// state nor the window. A late probe is an exception: if a probe exceeds Config.ProbeTimeout but succeeds during the
// same outage, the breaker closes. An outage ends when the breaker closes, when another probe fails within
// ProbeTimeout, or when an operator calls a method such as Trip or ForceOpen.
//
// # Bursts
//
// Calls that are in flight at the same time often fail for the same reason: a lost connection fails all calls that
// share the connection. The breaker counts such failures as one failure, called a burst. The first failure of a run of
// consecutive failures starts a burst. A later failure belongs to the same burst if its call was already in flight at
// the first failure, and failed at most 250ms after the first failure.
//
// If a burst has more than one failure, the breaker usually does not open within 250ms after the first failure. The
// breaker may open earlier if at least half of the failures in the run are timeouts.
//
// Failures of calls that do not overlap are never in the same burst. In a run without overlapping calls, the breaker
// opens at the failure that reaches ConsecutiveFailures.
//
// # Limits
//
// Do not nest a call under a breaker in another call under the same breaker. While the breaker is half-open, the
// outer call may be the only probe that can run. The breaker then refuses the inner call.
//
// References: the Circuit Breaker pattern (Cloud Design Patterns) and Nygard's book "Release It!". The state machine
// is github.com/sony/gobreaker.
package breaker

import (
	"container/list"
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sony/gobreaker/v2"

	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/linger"
	"github.com/go-resilience/resilience/internal/settings"
)

// A Breaker is a circuit breaker. A Breaker is safe for concurrent use. A Breaker runs no goroutine and no timer. A
// time-based change of state happens at the next use of the Breaker.
type Breaker struct {
	created   time.Time // all instants below are durations since created
	setting   settings.Setting[Config]
	observing atomic.Pointer[observerSet] // nil until the first Observe

	// mu is never held while user code runs. A goroutine that needs mu and gobreaker's lock acquires mu first.
	mu          sync.Mutex
	cfg         *Config
	state       State
	since       time.Duration   // the time at which the breaker entered state
	transitions map[State]int64 // number of transitions to each state; nil before the first
	refusal     *OpenError      // the error that refused calls return; nil if every call is admitted
	lastErr     error           // the error of the last failure, or the reason that an operator gave
	results     [refused + 1]int64

	calls    run // the run of consecutive failed calls
	streams  run // the run of consecutive streams that broke after their calls had succeeded
	window   window
	machine  *machine   // gobreaker's state machine; nil from New, Reset or a closing until the next failure
	probes   []*probe   // the probes that hold a permit
	overtime *list.List // the *calls that returned less than Window ago and whose streams continue; oldest first

	generation  uint32 // incremented by each transition; the results of calls from older generations do not count
	outages     uint32 // number of outages that have ended; a late probe closes the breaker only during its own outage
	moments     uint32 // number of runs that have started, of failed calls and of broken streams
	permits     int    // Config.Probes at the last opening
	consecOpens int    // number of openings since the breaker was last closed for a whole Window
}

// A call is an admitted call.
type call struct {
	cfg        *Config // the configuration that was in effect when the call started
	generation uint32
	moment     uint32        // the value of Breaker.moments when the call started
	probe      *probe        // nil unless the breaker was half-open
	began      time.Duration // start time; set only if SlowAfter, a deadline or a probe needs the time
	deadline   time.Duration // deadline of the caller's ctx; 0 if the ctx has no deadline

	// The following fields are set only for a call whose stream continues.
	unanswered  bool          // the server has not answered, so the result of the call is unknown
	succeededAt time.Duration // the time at which the call's function returned
	element     *list.Element // the call in Breaker.overtime
}

// An outcome is the result of a call, as the breaker counts it. An outcome has the size of four machine words. Go
// would pass a larger struct in memory instead of in registers, and a call would take 20% longer.
type outcome struct {
	Verdict
	err        error         // the error of a failed call
	retryAfter time.Duration // the RetryAfter of the error of a failed call; 0 if none
}

// New returns a closed Breaker. New panics if cfg is invalid; see [Config.Validate].
func New(cfg Config) *Breaker {
	b := &Breaker{created: time.Now(), state: Closed}
	b.setting.Init(cfg, Config.withDefaults)
	b.cfg = b.setting.Load()
	b.window.reset(b.cfg, 0)
	return b
}

func (b *Breaker) now() time.Duration { return time.Since(b.created) }

// Do calls fn and returns the error of fn. Do does not call fn if ctx is done, or if the breaker refuses the call.
// If ctx is done, Do returns an error that matches the error and the cause of ctx. If the breaker refuses the call,
// Do returns an [*OpenError].
func (b *Breaker) Do(ctx context.Context, fn func(context.Context) error) error {
	var c call
	if err := b.admit(ctx, &c); err != nil {
		return err
	}
	out, timeout := outcome{Verdict: Ignore}, false // the values if fn calls runtime.Goexit
	var stream *call
	work := linger.WorkOf(ctx)
	defer func() {
		r := recover()
		if r != nil {
			out, timeout = outcome{Verdict: Failure, err: fmt.Errorf("%v", r)}, false
		}
		b.finish(ctx, &c, out, timeout, stream)
		if r != nil {
			panic(r) // panicking again preserves the stack of the first panic
		}
		if stream != nil {
			b.observeStream(ctx, work, stream)
		}
	}()
	err := fn(ctx)
	out = c.judge(b, err, behavior.ReadUnder(ctx, err), true)
	timeout = c.timedOut(b, out)
	if work != nil && out.Verdict == Success && err == nil {
		stream = new(call) // a copy, because a pointer to c would move c to the heap
		*stream = c
		stream.unanswered = c.probe == nil && work.IsStream() // finishProbe decides when the stream of a probe counts
	}
	return err
}

// Wrap returns a function that calls [Breaker.Do](ctx, next).
func (b *Breaker) Wrap(next func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error { return b.Do(ctx, next) }
}

// Begin starts a call that is not a single function. If ctx is done or the breaker refuses the call, Begin returns
// the same error as [Breaker.Do], and done is nil. If Begin returns no error, the caller must call done with the
// result of the call. done may be called from any goroutine. Only the first call to done has an effect. Do not cancel
// ctx before done is called, because the breaker ignores an error that is passed to done after the cancellation.
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
		out, timeout := outcome{Verdict: Ignore}, false // the values if Classify or a method of err panics
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
	if hasDeadline { // deadline.Sub(b.created) would be wrong if the wall clock was set after New
		now := b.now()
		c.deadline = now + min(time.Until(deadline), math.MaxInt64-now)
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
		if !notified && c.probe != nil { // an observer panicked, so Do does not call its function
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

// judge returns the outcome of a call that ended with err. end is the classification of err by package behavior.
// returned is true if the call's function has just returned, and false if the call's stream has ended. SlowAfter
// applies only if returned is true.
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
			verdict = Failure // any other value would be out of range for b.results
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

// timedOut reports whether out is a failure by timeout. The caller must not hold b.mu, because timedOut calls
// methods of out.err, which are user code.
func (c *call) timedOut(b *Breaker, out outcome) bool {
	return out.Verdict == Failure &&
		(c.deadline != 0 && b.now() >= c.deadline || out.err == errSlow || behavior.IsTimeout(out.err))
}

// finish records the outcome of a call whose function has returned. timeout is true if the call timed out. If
// the call's stream continues, stream is a copy of c; otherwise stream is nil.
func (b *Breaker) finish(ctx context.Context, c *call, out outcome, timeout bool, stream *call) {
	b.locked(ctx, func(now time.Duration) {
		if stream == nil || !stream.unanswered {
			b.recordCall(now, c, out, timeout, stream != nil)
		}
		if stream != nil && c.probe == nil && c.generation == b.generation {
			if b.overtime == nil {
				b.overtime = list.New()
			}
			stream.succeededAt, stream.element = now, b.overtime.PushBack(stream)
		}
	})
}

// observeStream registers the functions that record the answer and the end of a stream. It is called after the
// stream's call has returned.
func (b *Breaker) observeStream(ctx context.Context, work *linger.Work, c *call) {
	if work.IsStream() {
		work.OnAnswer(func() { b.locked(ctx, func(now time.Duration) { b.recordAnswer(now, c) }) })
	}
	if !work.OnEnd(func(err error) { b.finishStream(ctx, c, err) }) {
		b.finishStream(ctx, c, nil) // the work does not continue
	}
}

// finishStream records the end of a stream that continued after its call had returned. If the stream broke, a failure
// replaces the newest success in the window. If the server has not answered, the stream's end is the result of the
// call. finishStream does not check ctx, because an outer policy that has returned may have canceled ctx. It checks
// err and the caller's deadline instead.
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
		unanswered := c.unanswered
		c.unanswered = false
		if unanswered {
			b.recordCall(now, c, out, timeout, false)
		} else if out.Verdict == Failure {
			b.results[Failure]++ // results[Success] is not decremented, because counters never decrease
		}
		switch {
		case c.generation != b.generation:
		case unanswered && out.Verdict == Failure:
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

// The callers of the methods below hold b.mu.

// recordCall adds the outcome of a call to the counts. streams is true if the call's stream continues.
func (b *Breaker) recordCall(now time.Duration, c *call, out outcome, timeout, streams bool) {
	b.results[out.Verdict]++
	switch {
	case c.probe != nil:
		b.finishProbe(now, c, out, streams)
	case c.generation != b.generation || out.Verdict == Ignore:
	case out.Verdict == Failure:
		b.window.fail(now, out.retryAfter)
		b.recordFailure(now, &b.calls, c, out, timeout)
	default:
		b.window.succeed(now)
		b.calls.end()
	}
}

// recordAnswer records the success of a call whose stream the server has answered. It does nothing if the result of
// the call has already been recorded, for example because the stream has ended.
func (b *Breaker) recordAnswer(now time.Duration, c *call) {
	if c.unanswered {
		c.unanswered = false
		b.recordCall(now, c, outcome{Verdict: Success}, false, true)
	}
}

// recordFailure adds a failure to r. The window must have counted the failure already. recordFailure opens the
// breaker if the failures reach a limit.
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

// tooMany reports whether the failures reach a limit of the Config. hint is the longest RetryAfter of the
// failures that reach a limit; it is 0 if no such failure has a RetryAfter.
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
