package breaker

import (
	"cmp"
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/linger"
)

// A pass is what admits a call.
type pass struct {
	phase  *phase        // in which the call began
	permit uint64        // of a probe; 0 for other calls
	begun  time.Duration // 0 where it does not matter
}

// Do calls fn unless the breaker refuses it, and returns fn's error as it is. The
// error of a refusal is an [*OpenError]; fn has not been called then, nor if ctx
// had ended already.
func (b *Breaker) Do(ctx context.Context, fn func(context.Context) error) error {
	if ctx.Err() != nil {
		return ended.Error(ctx)
	}
	admitted, refusal := b.admit(ctx)
	if refusal != nil {
		return b.refuse(ctx, refusal)
	}
	result := ignored // of a call that ends its goroutine
	defer func() {
		if r := recover(); r != nil {
			// The same panic goes on from here, with its stack still below.
			b.settle(ctx, admitted, &verdict{err: fmt.Errorf("%v", r), failed: true})
			panic(r)
		}
		b.settle(ctx, admitted, result)
	}()
	work := linger.Of(ctx)
	err := fn(ctx)
	result = b.judge(ctx, admitted, err)
	if work != nil && err == nil {
		result = cmp.Or(result, new(verdict))
		success := result
		work.OnBroken(func(err error) { b.broken(ctx, admitted, success, err) })
	}
	return err
}

// Wrap returns a function that calls next under the breaker.
func (b *Breaker) Wrap(next func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error { return b.Do(ctx, next) }
}

// Allow asks for a call that is not a single function: done is to be called with
// its error when it has ended, from any goroutine. Calling it again does nothing.
// If err is not nil the call is refused, as by [Breaker.Do], and done is nil.
//
// ctx is to live until then: an error that is reported after ctx was canceled is
// ignored. A probe whose done is not called loses its permit after MaxHalfOpen.
func (b *Breaker) Allow(ctx context.Context) (done func(error), err error) {
	if ctx.Err() != nil {
		return nil, ended.Error(ctx)
	}
	admitted, refusal := b.admit(ctx)
	if refusal != nil {
		return nil, b.refuse(ctx, refusal)
	}
	var over atomic.Bool
	return func(err error) {
		if over.Swap(true) {
			return
		}
		result := ignored // if Classify panics
		defer func() { b.settle(ctx, admitted, result) }()
		result = b.judge(ctx, admitted, err)
	}, nil
}

// admit returns the pass of a call that arrives now, or the refusal.
func (b *Breaker) admit(ctx context.Context) (pass, *OpenError) {
	for {
		p := b.phase.Load()
		if p.refusal == nil {
			return pass{phase: p, begun: b.stopwatch(ctx)}, nil
		}
		now := b.now()
		switch {
		case now < p.until:
			return pass{}, p.refusal
		case p.state == Open:
			b.advance()
		case int64(now) < max(b.busy.Load(), b.pingDue.Load()):
			return pass{}, p.refusal
		default:
			if permit, ok := b.take(p, now); ok {
				return pass{p, permit, now}, nil
			}
			if b.phase.Load() == p {
				return pass{}, p.refusal
			}
		}
	}
}

func (b *Breaker) refuse(ctx context.Context, refusal *OpenError) error {
	b.deliver(ctx)
	if b.cfg.OnReject != nil {
		b.cfg.OnReject(ctx, refusal)
	}
	return refusal
}

// stopwatch returns the instant at which a call begins. It reads the clock only for a
// call that may turn out to be slow, or to outlast its caller's deadline.
func (b *Breaker) stopwatch(ctx context.Context) time.Duration {
	if b.cfg.SlowAfter == 0 {
		if b.cfg.Patience < 0 {
			return 0
		}
		if _, ok := ctx.Deadline(); !ok {
			return 0
		}
	}
	return b.now()
}

// A verdict is what a circuit is told of a call, in the place of its error. Most are
// those of a fast success, and nil.
type verdict struct {
	err    error // the error of the call; nil for a success
	failed bool
	slow   bool
	trips  bool          // whatever the counts are
	hold   time.Duration // of a trip: for exactly that long, unless 0
	undoes *verdict      // the success of the same call, which has broken off since

	// What the circuit notes when it counts the verdict.
	counted bool
	ended   int // of a success: the row of failures that it ended
	nth     int // and which success it was
}

// ignored is the verdict that changes nothing.
var ignored = &verdict{}

func (v *verdict) Error() string { return "breaker: verdict" }

// judge returns the verdict on a call that has ended with err.
func (b *Breaker) judge(ctx context.Context, admitted pass, err error) *verdict {
	slow := b.cfg.SlowAfter > 0 && b.now()-admitted.begun >= b.cfg.SlowAfter
	if err == nil {
		return succeeded(slow)
	}
	return b.judgeError(ctx, admitted, err, behavior.ReadUnder(ctx, err), slow)
}

// judgeError returns the verdict on a call whose error says end.
func (b *Breaker) judgeError(ctx context.Context, admitted pass, err error, end behavior.End, slow bool) *verdict {
	outcome := classify(end)
	switch {
	case end.Kind == behavior.Canceled:
		return ignored
	case end.Kind == behavior.Overran:
		if !b.outlasted(ctx, admitted) {
			return ignored
		}
		slow = true
	}
	if b.cfg.Classify != nil && outcome.isFailure() {
		outcome = b.cfg.Classify(err)
	}
	switch outcome.kind {
	case success:
		return succeeded(slow)
	case ignore:
		return ignored
	default:
		return &verdict{err: err, failed: true, slow: slow, trips: outcome.kind == trip, hold: outcome.hold}
	}
}

func succeeded(slow bool) *verdict {
	if slow {
		return &verdict{slow: true}
	}
	return nil
}

// outlasted reports whether a call had run for Patience when the deadline of its
// caller passed.
func (b *Breaker) outlasted(ctx context.Context, admitted pass) bool {
	deadline, ok := ctx.Deadline()
	return ok && b.cfg.Patience >= 0 && deadline.Sub(b.start)-admitted.begun >= b.cfg.Patience
}

// broken counts one more failure in the phase of a call that had succeeded when what
// it returned, such as a response's body, breaks off. ctx may have been canceled by
// policies that have returned since; its deadline still says whether the caller's time
// was up.
func (b *Breaker) broken(ctx context.Context, admitted pass, success *verdict, err error) {
	admitted.permit = 0 // given back
	result := ignored   // if Classify panics
	defer func() { b.settle(context.WithoutCancel(ctx), admitted, result) }()
	end := behavior.Read(err)
	if deadline, ok := ctx.Deadline(); end.Kind == behavior.Failed && ok && !time.Now().Before(deadline) {
		end.Kind = behavior.Overran
	}
	result = b.judgeError(ctx, admitted, err, end, false)
	if result != nil && result.failed {
		result.undoes = success
	}
}

// settle counts the verdict on a call for the phase in which the call began, if that
// lasts, gives the permit of a probe back, and tells of the changes of state.
func (b *Breaker) settle(ctx context.Context, admitted pass, v *verdict) {
	p := admitted.phase
	switch {
	case p.state == HalfOpen:
		b.settleProbe(p, admitted.permit, v)
	case v == nil:
		p.circuit.report(nil)
	case v != ignored:
		p.circuit.report(v)
		if (v.failed || v.slow) && b.opensWhen(p) {
			v.trips = true
			p.circuit.report(v)
		}
		if p.circuit.tripped.Load() != nil {
			b.advance()
		}
	}
	b.deliver(ctx)
}

// opensWhen asks Config.OpenWhen about phase p.
func (b *Breaker) opensWhen(p *phase) bool {
	if b.cfg.OpenWhen == nil || p.state != Closed {
		return false
	}
	f, ok := p.circuit.look()
	return ok && b.cfg.OpenWhen(f.Counts)
}
