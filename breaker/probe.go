package breaker

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/go-resilience/resilience/internal/linger"
)

// A permit is what a probe holds from its admission to its end, so that there are
// at most Probes at once: those of an earlier half-open phase that still run, too.
type permit struct {
	id      uint64
	expires time.Duration
}

// beside calls fn outside gobreaker, as a call that was admitted in phase p: a
// probe, or one whose work may go on after fn and has its result when it ends.
func (b *Breaker) beside(ctx context.Context, fn func(context.Context) error, p *phase, permit uint64, work *linger.Work) error {
	result := errIgnored // of a call that ends its goroutine
	goesOn := false
	defer func() {
		if r := recover(); r != nil {
			// As gobreaker does for other calls: the same panic goes on from here,
			// with the stack still below.
			b.settle(p, permit, &verdict{err: fmt.Errorf("%v", r), failed: true})
			panic(r)
		}
		if !goesOn {
			b.settle(p, permit, result)
		}
	}()
	begun := b.stopwatch()
	err := fn(ctx)
	goesOn = err == nil && work.AtEnd(func(err error) {
		if ctx.Err() == context.Canceled && !errors.Is(err, context.Canceled) {
			// Not the caller has ended it, but a policy further out, on its return.
			ctx = context.WithoutCancel(ctx)
		}
		b.conclude(ctx, p, permit, begun, err)
	})
	if goesOn {
		return nil
	}
	result = b.judge(ctx, err, begun)
	return err
}

// conclude ends a call that was admitted in phase p, made outside gobreaker, and
// has ended with err.
func (b *Breaker) conclude(ctx context.Context, p *phase, permit uint64, begun time.Duration, err error) {
	defer b.deliver(ctx)
	result := errIgnored // if Classify panics
	defer func() { b.settle(p, permit, result) }()
	result = b.judge(ctx, err, begun)
}

// settle ends a call that was admitted in phase p and made outside gobreaker.
func (b *Breaker) settle(p *phase, permit uint64, result error) {
	if permit == 0 {
		p.circuit.report(p, result)
		return
	}
	if !b.holds(permit) {
		return // another call has it, and its result counts instead
	}
	p.circuit.report(p, result)
	b.release(p, permit, result == nil)
}

// take returns a permit for a probe of phase p, if one is free.
func (b *Breaker) take(p *phase, now time.Duration) (uint64, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.phase.Load() != p {
		return 0, false
	}
	most := min(b.cfg.Probes, b.cfg.Successes-p.successes)
	for len(b.permits) >= most && b.permits[0].expires <= now { // the oldest is first
		b.permits = slices.Delete(b.permits, 0, 1)
	}
	ok := len(b.permits) < most
	if ok {
		b.lastPermit++
		b.permits = append(b.permits, permit{b.lastPermit, now + b.cfg.MaxHalfOpen})
	}
	if len(b.permits) >= most {
		// Who comes next need not ask before one is released or expires.
		b.busy.Store(int64(b.permits[0].expires))
	}
	return b.lastPermit, ok
}

func (b *Breaker) holds(id uint64) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.indexOf(id) >= 0
}

func (b *Breaker) release(p *phase, id uint64, succeeded bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if i := b.indexOf(id); i >= 0 {
		b.permits = slices.Delete(b.permits, i, i+1)
		b.busy.Store(0)
	}
	if succeeded {
		p.successes++
	}
}

func (b *Breaker) indexOf(id uint64) int {
	return slices.IndexFunc(b.permits, func(q permit) bool { return q.id == id })
}
