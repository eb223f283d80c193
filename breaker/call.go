package breaker

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/sony/gobreaker/v2"

	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/linger"
)

// A call is one call that the breaker lets through: admitted, made, judged, settled.
type call struct {
	phase    *phase        // in which it began
	probe    *probe        // if the breaker was half-open
	begun    time.Duration // since Breaker.start; 0 if the time does not matter
	deadline time.Duration // of the caller's ctx, since Breaker.start; 0 if it has none
}

// A verdict is what the end of a call says about the dependency.
type verdict struct {
	end     end
	slow    bool
	goesOn  bool          // of a success: its work has not ended yet
	trips   bool          // of a failure: opens the breaker whatever the counts are
	openFor time.Duration // of one that trips: for exactly that long, unless 0
	err     error         // of a failure
	at      time.Duration // when the call ended, if the clock was read
}

type end uint8

const (
	ignored end = iota
	succeeded
	failed
)

// told is the error for gobreaker. A slow success that may open the breaker is a failure to it.
func (v verdict) told(slowFails bool) error {
	switch {
	case v.end == ignored:
		return errIgnored
	case v.slow && slowFails:
		return errSlow
	default:
		return v.err
	}
}

// Do calls fn unless the breaker refuses the call, and returns the error of fn
// unchanged. The error of a refusal is an [*OpenError]. If ctx has already ended, Do
// returns why, and fn is not called.
func (b *Breaker) Do(ctx context.Context, fn func(context.Context) error) error {
	if ctx.Err() != nil {
		return ended.Error(ctx)
	}
	c, refusal := b.admit(ctx)
	if refusal != nil {
		return b.refuse(ctx, refusal)
	}
	var v verdict // ignored, if fn ends its goroutine
	defer func() {
		if r := recover(); r != nil {
			b.settle(ctx, c, verdict{end: failed, err: fmt.Errorf("%v", r)})
			panic(r) // the stack below is still that of the first panic
		}
		b.settle(ctx, c, v)
	}()
	work := linger.Of(ctx)
	err := fn(ctx)
	v = b.judge(ctx, c, err)
	if work != nil && err == nil {
		v.goesOn = work.OnEnd(func(err error) { b.endWork(ctx, c, err) })
	}
	return err
}

// Wrap returns a function that calls next under the breaker.
func (b *Breaker) Wrap(next func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error { return b.Do(ctx, next) }
}

// Begin begins a call that is not a single function. When the call has ended, done is
// called with its error, from any goroutine; a second call of done does nothing. If the
// breaker refuses the call, err is an [*OpenError] and done is nil.
//
// An error that is reported after ctx was canceled is ignored, so ctx must live until
// done is called. A probe whose done is not called has failed after MaxHalfOpen.
func (b *Breaker) Begin(ctx context.Context) (done func(error), err error) {
	if ctx.Err() != nil {
		return nil, ended.Error(ctx)
	}
	c, refusal := b.admit(ctx)
	if refusal != nil {
		return nil, b.refuse(ctx, refusal)
	}
	var over atomic.Bool
	return func(err error) {
		if over.Swap(true) {
			return
		}
		var v verdict // ignored, if Classify panics
		defer func() { b.settle(ctx, c, v) }()
		v = b.judge(ctx, c, err)
	}, nil
}

// admit lets a call through, or returns its refusal.
func (b *Breaker) admit(ctx context.Context) (call, *OpenError) {
	for {
		p := b.phase.Load()
		if p.refusal == nil {
			return b.begin(ctx, p, nil), nil
		}
		if now := b.now(); now < p.until || p.state == HalfOpen && int64(now) < b.pingDue.Load() {
			return call{}, p.refusal
		}
		probe, err := b.take(p)
		b.deliver(ctx)
		switch {
		case probe != nil:
			return b.begin(ctx, p, probe), nil
		case err == gobreaker.ErrTooManyRequests:
			return call{}, p.refusal
		case err == gobreaker.ErrOpenState:
			time.Sleep(time.Nanosecond) // it has opened for no time: gobreaker waits for its clock to move on
		}
	}
}

// refuse counts a refusal, tells of it and returns it.
func (b *Breaker) refuse(ctx context.Context, refusal *OpenError) error {
	b.refused.Add(1)
	if b.observers.Any() {
		b.observers.Tell(ctx, refusal.event())
	}
	return refusal
}

// begin returns a call of phase p. It reads the clock only if the call could be slow, or
// could outlast its caller's deadline.
func (b *Breaker) begin(ctx context.Context, p *phase, probe *probe) call {
	c, r := call{phase: p, probe: probe}, p.cfg
	if deadline, ok := ctx.Deadline(); ok {
		c.deadline = deadline.Sub(b.start)
	}
	if r.SlowAfter > 0 || r.Patience > 0 && c.deadline != 0 {
		c.begun = b.now()
	}
	return c
}

// judge returns the verdict on a call that has ended with err.
func (b *Breaker) judge(ctx context.Context, c call, err error) verdict {
	v := verdict{end: succeeded}
	if after := c.phase.cfg.SlowAfter; after > 0 {
		v.at = b.now()
		v.slow = v.at-c.begun >= after
	}
	if err != nil {
		return c.judgeError(err, behavior.ReadUnder(ctx, err), v)
	}
	return v
}

// judgeError returns v, the verdict on a success, as that on a call whose error err says end.
func (c call) judgeError(err error, end behavior.End, v verdict) verdict {
	r := c.phase.cfg
	switch end.Kind {
	case behavior.Canceled:
		return verdict{}
	case behavior.Overran:
		if r.Patience < 0 || c.deadline-c.begun < r.Patience {
			return verdict{}
		}
		v.slow = true
	}
	outcome := classify(end)
	if r.Classify != nil && outcome.isFailure() {
		outcome = r.Classify(err)
	}
	switch outcome.kind {
	case success:
	case ignore:
		return verdict{}
	default:
		v.end, v.err, v.trips, v.openFor = failed, err, outcome.kind == opens, outcome.openFor
	}
	return v
}

// settle counts the verdict in the phase in which the call began, unless that phase is over,
// and tells of changes of state. OpenWhen is asked without a lock.
func (b *Breaker) settle(ctx context.Context, c call, v verdict) {
	switch p := c.phase; {
	case p.refusal != nil:
		b.settleProbe(c, v)
	case v.end == succeeded && !v.slow && p.circuit.succeed(b, v.at):
	default:
		if openWhen, counts := b.count(c, v); openWhen != nil && openWhen(counts) {
			b.operate(ctx, func(now *phase, _ figures) {
				if now.is(p) {
					b.trip(now, v)
				}
			})
		}
	}
	b.deliver(ctx)
}

// count counts the verdict in the window, tells gobreaker of what may change the state, and
// opens the breaker if gobreaker has opened. It returns OpenWhen if that is to be asked.
func (b *Breaker) count(c call, v verdict) (openWhen func(Counts) bool, counts Counts) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.totals.count(v)
	p := b.phase.Load()
	if v.end == ignored || !p.is(c.phase) {
		return nil, counts
	}
	p.circuit.count(v, b.now())
	switch {
	case p.state == Disabled || v.end == succeeded && !v.slow: // it does not open
	case !p.circuit.tell(v.told(true)) || v.trips:
		b.trip(p, v)
	case p.cfg.OpenWhen != nil:
		return p.cfg.OpenWhen, p.circuit.figures(b.now()).Counts
	}
	return nil, counts
}

// endWork counts the end of work that has gone on after its call succeeded: err says how it
// has broken off. A success ends a row of failures when its work has ended well. By now ctx may
// have been canceled by policies that have returned, so only its deadline is asked.
func (b *Breaker) endWork(ctx context.Context, c call, err error) {
	end := behavior.Read(err)
	if end.Kind == behavior.Failed && c.deadline != 0 && b.now() >= c.deadline {
		end.Kind = behavior.Overran
	}
	switch v := c.judgeError(err, end, verdict{end: succeeded}); {
	case v.end == failed:
		b.settle(context.WithoutCancel(ctx), c, v)
	case err == nil && c.phase.refusal == nil && c.phase.circuit.until.Load() == 0:
		b.operate(ctx, func(p *phase, _ figures) {
			if p.is(c.phase) {
				p.circuit.row = 0
				p.circuit.sync(b.now())
			}
		})
	}
}
