// Package breaker stops calling a dependency that keeps failing, and finds out when the
// dependency has recovered.
//
//	circuit := breaker.New(breaker.Config{
//		Name:     "users",
//		Failures: 5,                // in a row open it
//		OpenFor:  30 * time.Second, // then one call probes
//	})
//	err := circuit.Do(ctx, fetchUser)
//	if errors.Is(err, breaker.ErrOpen) {
//		err = cachedUser(ctx) // fetchUser was not called
//	}
//
// A [Breaker] is closed at first: every call passes. It opens when calls fail as its [Config] says, and
// refuses them with an [*OpenError]. After its open time it is half-open: a few calls pass, as probes.
// If they succeed, it closes. If one fails, it opens again.
//
// What the end of a call says:
//
//   - An answer (an error that is Answered() bool) is a success.
//   - A refusal (Refused() bool) of a policy further in is ignored.
//   - An error after the caller's ctx was canceled is ignored. After its deadline, it is a failure
//     if the call had [Config].Patience, else ignored.
//   - Any other error is what [Config].Classify says, by default a failure. A panic is one, and so is
//     a success that took [Config].SlowAfter.
//
// Work that goes on after its call, such as a body that is being read, is a success until it breaks
// off: that is a failure in place of a success, unless the caller has left.
//
// A result whose call began before the breaker opened, closed or was reset changes nothing. Do not run
// a call under the same breaker twice: half-open, the outer call holds the permit of the inner one.
//
// Sources: Circuit Breaker (Cloud Design Patterns); Nygard, Release It! The states are kept by
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

// A Breaker is safe for concurrent use. It has no goroutine and no timer: what time brings about
// happens at the next use.
type Breaker struct {
	start     time.Time // instants are durations since then
	setting   settings.Setting[Config]
	observing atomic.Pointer[audience] // nil until somebody observes

	mu      sync.Mutex // no user code runs under it; gobreaker's lock is taken while it is held
	cfg     *Config
	state   State
	since   time.Duration   // of the state
	changes map[State]int64 // by the new state; nil before the first
	refusal *OpenError      // of calls that do not pass; nil if all do
	row     int             // failures since the last success
	lastErr error           // of the last failure, or the reason of an operator
	window  window          // of the last period in which calls passed
	machine *machine        // nil before the first failure of a breaker that is new or was reset
	probes  []*probe        // that have not ended, of earlier openings until their functions return
	works   *list.List      // calls of this period whose work goes on, younger than Window, the oldest first
	calls   [refused + 1]int64
	// A result counts only in the period in which its call began.
	period  uint32
	permits uint32 // Probes when it opened
	opens   uint32 // in a row, without having been closed for a whole Window
}

// A machine is told of failures and probes, and says when the breaker opens and closes.
type machine = gobreaker.TwoStepCircuitBreaker[struct{}]

// A call is one call that the breaker has admitted.
type call struct {
	cfg      *Config       // when it began
	period   uint32        // in which it began
	probe    *probe        // if the breaker was half-open
	begun    time.Duration // 0 if nobody asks
	deadline time.Duration // of the caller's ctx; 0 if it has none

	// Of one whose function has succeeded, and whose work goes on:
	since   time.Duration // when it was counted as a success
	element *list.Element // of Breaker.works
}

// A verdict is what the end of a call says about the dependency.
type verdict struct {
	Result
	err        error         // of a failure
	retryAfter time.Duration // that a failure asked for
}

// New returns a closed Breaker. It panics if cfg is not valid.
func New(cfg Config) *Breaker {
	b := &Breaker{start: time.Now(), state: Closed}
	b.setting.Init(cfg, Config.withDefaults)
	b.cfg = b.setting.Load()
	b.window.begin(b.cfg, 0)
	return b
}

func (b *Breaker) now() time.Duration { return time.Since(b.start) }

func (b *Breaker) Name() string { return b.setting.Load().Name }

// Do calls fn and returns its error, unless ctx has ended or the breaker refuses with an [*OpenError].
func (b *Breaker) Do(ctx context.Context, fn func(context.Context) error) error {
	var c call
	if err := b.enter(ctx, &c); err != nil {
		return err
	}
	v := verdict{Result: Ignore} // if fn ends its goroutine
	var goesOn *call
	work := linger.WorkOf(ctx)
	defer func() {
		r := recover()
		if r != nil {
			v = verdict{Result: Failure, err: fmt.Errorf("%v", r)}
		}
		b.endCall(ctx, &c, v, goesOn)
		if r != nil {
			panic(r) // the stack below is still that of the first panic
		}
		if c := goesOn; c != nil && !work.OnEnd(func(err error) { b.endWork(ctx, c, err) }) {
			b.endWork(ctx, c, nil) // it has ended meanwhile
		}
	}()
	err := fn(ctx)
	v = c.judge(b, err, behavior.ReadUnder(ctx, err), true)
	if work != nil && v.Result == Success && err == nil {
		goesOn = new(call) // on the heap, where c is not
		*goesOn = c
	}
	return err
}

func (b *Breaker) Wrap(next func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error { return b.Do(ctx, next) }
}

// Begin is [Breaker.Do] for a call that is not one function. The first call of done, from any
// goroutine, ends it. ctx must live until then.
func (b *Breaker) Begin(ctx context.Context) (done func(error), err error) {
	var c call
	if err := b.enter(ctx, &c); err != nil {
		return nil, err
	}
	var over atomic.Bool
	return func(err error) {
		if over.Swap(true) {
			return
		}
		v := verdict{Result: Ignore} // ignored, if Classify panics
		defer func() { b.endCall(ctx, &c, v, nil) }()
		v = c.judge(b, err, behavior.ReadUnder(ctx, err), true)
	}, nil
}

// enter makes c a call that is admitted, or returns why it is not made.
func (b *Breaker) enter(ctx context.Context, c *call) error {
	if ctx.Err() != nil {
		return ended.Error(ctx)
	}
	deadline, hasDeadline := ctx.Deadline()
	if hasDeadline {
		c.deadline = deadline.Sub(b.start)
	}
	b.mu.Lock()
	if b.refusal != nil {
		b.catchUp(b.now())
	}
	refusal := b.refusal
	c.cfg, c.period = b.cfg, b.period
	switch {
	case refusal == nil:
		if hasDeadline || c.cfg.SlowAfter > 0 {
			c.begun = b.now()
		}
	case b.state == HalfOpen && b.admitProbe(c):
		refusal = nil
	default:
		b.calls[refused]++
	}
	b.mu.Unlock()
	told := false
	defer func() {
		if !told && c.probe != nil { // an observer has panicked: the call is not made
			b.endCall(ctx, c, verdict{Result: Ignore}, nil)
		}
	}()
	b.deliver(ctx)
	told = true
	if refusal == nil {
		return nil
	}
	if a := b.observing.Load(); a != nil {
		a.Tell(ctx, Event{Kind: EventRefused, Name: refusal.Name, At: time.Now(), Err: refusal})
	}
	return refusal
}

// judge returns what the end of a call with err says. A call that has not just returned, but
// whose work has ended, is not slow.
func (c *call) judge(b *Breaker, err error, end behavior.End, returned bool) verdict {
	result := Success
	switch end.Kind {
	case behavior.Canceled, behavior.Refused:
		return verdict{Result: Ignore}
	case behavior.Overran:
		if c.cfg.Patience < 0 || c.deadline-c.begun < c.cfg.Patience {
			return verdict{Result: Ignore}
		}
		result = Failure
	case behavior.Failed:
		result = Failure
	}
	if c.cfg.Classify != nil && (result == Failure || end.Throttled) {
		if result = c.cfg.Classify(err); result > Ignore {
			result = Failure // it is none of the three: a panic under the lock would leave it locked
		}
	}
	switch {
	case result == Failure:
		return verdict{Failure, err, end.RetryAfter}
	case result == Success && returned && c.cfg.SlowAfter > 0 && b.now()-c.begun >= c.cfg.SlowAfter:
		return verdict{Failure, errSlow, 0}
	}
	return verdict{Result: result}
}

// endCall counts the result of a call that has returned. If its work goes on, goesOn is a copy of it.
func (b *Breaker) endCall(ctx context.Context, c *call, v verdict, goesOn *call) {
	b.operate(ctx, func(now time.Duration) {
		b.calls[v.Result]++
		switch {
		case c.probe != nil && c.period == b.period && goesOn != nil:
			c.probe.returned, c.probe.due = true, now+c.cfg.OpenFor
		case c.probe != nil:
			b.probeEnded(now, c.probe, v)
		case c.period != b.period || v.Result == Ignore:
		case v.Result == Failure:
			b.window.fail(now, v.retryAfter)
			b.failed(now, v)
		default:
			b.window.succeed(now)
			if goesOn == nil {
				b.endRow()
				break
			}
			if b.works == nil {
				b.works = list.New()
			}
			goesOn.since, goesOn.element = now, b.works.PushBack(goesOn)
		}
	})
}

// endWork counts the end of work that went on after its call had succeeded: a break is a failure in
// place of the newest success. By now ctx may have been canceled by policies that have returned, so
// only its deadline is asked.
func (b *Breaker) endWork(ctx context.Context, c *call, err error) {
	end := behavior.Read(err)
	switch {
	case end.Kind != behavior.Failed:
	case errors.Is(err, context.Canceled):
		end.Kind = behavior.Canceled
	case c.deadline != 0 && b.now() >= c.deadline:
		end.Kind = behavior.Overran
	}
	v := c.judge(b, err, end, false)
	b.operate(ctx, func(now time.Duration) {
		if v.Result == Failure {
			b.calls[Failure]++ // in addition to Success, since totals do not go back
		}
		switch {
		case c.period != b.period:
		case c.probe != nil:
			b.probeEnded(now, c.probe, v)
		case v.Result == Failure:
			b.window.breakOff(now, v.retryAfter)
			b.failed(now, v)
		case v.Result == Success:
			b.endRow()
		}
		if c.element != nil && c.period == b.period {
			b.works.Remove(c.element)
		}
	})
}

// operate calls f under b.mu, after all changes that time has brought about, and tells of all
// changes.
func (b *Breaker) operate(ctx context.Context, f func(now time.Duration)) {
	b.mu.Lock()
	now := b.now()
	b.catchUp(now)
	f(now)
	b.mu.Unlock()
	b.deliver(ctx)
}

// failed goes on with a failure that the window has counted. b.mu is held, as in all functions below.
func (b *Breaker) failed(now time.Duration, v verdict) {
	b.row++
	b.lastErr = v.err
	if b.state == Disabled {
		return
	}
	if b.machine == nil {
		b.machine = b.newMachine(0)
	}
	if report(b.machine, errFailed) != gobreaker.StateClosed {
		b.trip(now, v)
	}
}

func (b *Breaker) endRow() {
	if b.row > 0 {
		b.row = 0
		b.window.endRow()
	}
}
