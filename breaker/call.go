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

// A call is one call that the breaker lets through: admitted, made, judged, settled.
type call struct {
	phase    *phase        // in which it began
	permit   uint64        // of a probe; 0 for other calls
	begun    time.Duration // since Breaker.start; 0 if the time does not matter
	deadline time.Duration // of the caller's ctx, since Breaker.start; 0 if it has none
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
		return b.refuse(ctx, c, refusal)
	}
	v := ignored // stays so if fn ends its goroutine
	defer func() {
		if r := recover(); r != nil {
			b.settle(ctx, c, &verdict{err: fmt.Errorf("%v", r), failed: true})
			panic(r) // the stack below is still that of the first panic
		}
		b.settle(ctx, c, v)
	}()
	work := linger.Of(ctx)
	err := fn(ctx)
	v = b.judge(ctx, c, err)
	if work != nil && err == nil {
		v = cmp.Or(v, new(verdict))
		success := v
		work.OnBroken(func(err error) { b.breakOff(ctx, c, success, err) })
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
// done is called. A probe whose done is not called loses its permit after MaxHalfOpen.
func (b *Breaker) Begin(ctx context.Context) (done func(error), err error) {
	if ctx.Err() != nil {
		return nil, ended.Error(ctx)
	}
	c, refusal := b.admit(ctx)
	if refusal != nil {
		return nil, b.refuse(ctx, c, refusal)
	}
	var over atomic.Bool
	return func(err error) {
		if over.Swap(true) {
			return
		}
		v := ignored // stays so if Classify panics
		defer func() { b.settle(ctx, c, v) }()
		v = b.judge(ctx, c, err)
	}, nil
}

// admit lets a call through, or returns its refusal and a call that has only a phase.
func (b *Breaker) admit(ctx context.Context) (call, *OpenError) {
	for {
		p := b.phase.Load()
		if p.refusal == nil {
			return b.begin(ctx, p, 0), nil
		}
		now := b.now()
		switch {
		case now < p.until:
			return call{phase: p}, p.refusal
		case p.state == Open:
			b.advance()
			b.deliver(ctx)
		case int64(now) < max(b.busy.Load(), b.pingDue.Load()):
			return call{phase: p}, p.refusal
		default:
			if permit, ok := b.take(p, now); ok {
				return b.begin(ctx, p, permit), nil
			}
			if b.phase.Load() == p {
				return call{phase: p}, p.refusal
			}
		}
	}
}

// refuse counts a refusal, tells of it and returns it.
func (b *Breaker) refuse(ctx context.Context, c call, refusal *OpenError) error {
	b.counters.refused.Add(1)
	if f := c.phase.rules.OnRefuse; f != nil {
		f(ctx, refusal)
	}
	if b.observers.Any() {
		b.observers.Tell(ctx, refusal.event())
	}
	return refusal
}

// begin returns a call of phase p. It reads the clock only if the call could be slow, or
// could outlast its caller's deadline.
func (b *Breaker) begin(ctx context.Context, p *phase, permit uint64) call {
	c, r := call{phase: p, permit: permit}, p.rules
	if deadline, ok := ctx.Deadline(); ok {
		c.deadline = deadline.Sub(b.start)
	}
	if r.SlowAfter > 0 || r.Patience >= 0 && c.deadline != 0 {
		c.begun = b.now()
	}
	return c
}

// judge returns the verdict on a call that has ended with err.
func (b *Breaker) judge(ctx context.Context, c call, err error) *verdict {
	r := c.phase.rules
	slow := r.SlowAfter > 0 && b.now()-c.begun >= r.SlowAfter
	if err == nil {
		return succeeded(slow)
	}
	return c.judgeError(err, behavior.ReadUnder(ctx, err), slow)
}

// judgeError returns the verdict on a call whose error err says end.
func (c call) judgeError(err error, end behavior.End, slow bool) *verdict {
	r := c.phase.rules
	switch end.Kind {
	case behavior.Canceled:
		return ignored
	case behavior.Overran:
		if r.Patience < 0 || c.deadline == 0 || c.deadline-c.begun < r.Patience {
			return ignored
		}
		slow = true
	}
	outcome := classify(end)
	if r.Classify != nil && outcome.isFailure() {
		outcome = r.Classify(err)
	}
	switch outcome.kind {
	case success:
		return succeeded(slow)
	case ignore:
		return ignored
	default:
		return &verdict{err: err, failed: true, slow: slow, trips: outcome.kind == opens, openFor: outcome.openFor}
	}
}

// settle counts the verdict in the phase in which the call began, unless that phase is
// over. It takes the permit of a probe back and tells of changes of state.
func (b *Breaker) settle(ctx context.Context, c call, v *verdict) {
	b.counters.add(v)
	p := c.phase
	switch {
	case p.state == HalfOpen:
		b.settleProbe(p, c.permit, v)
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

// opensWhen asks Config.OpenWhen whether phase p is to end.
func (b *Breaker) opensWhen(p *phase) bool {
	now := b.phase.Load() // p itself, or p with other rules, unless p is over
	if now.circuit != p.circuit || now.rules.OpenWhen == nil || now.state != Closed {
		return false
	}
	f, ok := now.circuit.look()
	return ok && now.rules.OpenWhen(f.Counts)
}

// breakOff counts one more failure for a call that has succeeded, because what it
// returned, such as the body of a response, has broken off. By now ctx may have been
// canceled by policies that have returned, so only its deadline is asked.
func (b *Breaker) breakOff(ctx context.Context, c call, success *verdict, err error) {
	end := behavior.Read(err)
	if end.Kind == behavior.Failed && c.deadline != 0 && b.now() >= c.deadline {
		end.Kind = behavior.Overran
	}
	v := c.judgeError(err, end, false)
	if v == nil || !v.failed {
		return
	}
	v.undoes = success
	c.permit = 0 // returned already
	b.settle(context.WithoutCancel(ctx), c, v)
}
