package breaker

import (
	"context"
	"time"
)

// repoint starts the goroutine that pings for phase p and ends that of the phase
// before; b.mu is held.
func (b *Breaker) repoint(p *phase) {
	if p.state == HalfOpen {
		return // the goroutine of the open phase goes on
	}
	if b.stopPing != nil {
		b.stopPing()
		b.stopPing = nil
		b.pingDue.Store(0)
	}
	if p.state == Open && b.cfg.Ping != nil && !b.closed && (b.seat == nil || !b.seat.closed()) {
		ctx, cancel := context.WithCancel(context.Background())
		b.stopPing = cancel
		b.pingDue.Store(int64(p.until + b.cfg.MaxHalfOpen))
		go b.ping(ctx, p)
	}
}

// ping waits until phase p is over and pings until ctx ends, which it does with
// the half-open phase.
func (b *Breaker) ping(ctx context.Context, p *phase) {
	timer := time.NewTimer(p.until - b.now())
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
		return
	}
	for ctx.Err() == nil {
		p := b.advance(p)
		b.deliver(context.Background())
		if p.state != HalfOpen {
			return
		}
		now := b.now()
		id, ok := b.take(p, now)
		if !ok {
			// A probe from before still holds the permit.
			timer.Reset(max(0, time.Duration(b.busy.Load())-now))
			select {
			case <-timer.C:
			case <-ctx.Done():
			}
			continue
		}
		b.pingOnce(ctx, p, id)
	}
}

func (b *Breaker) pingOnce(ctx context.Context, p *phase, permit uint64) {
	result := errIgnored // of a Ping that ends the goroutine
	defer b.deliver(context.Background())
	defer func() { b.settle(p, permit, result) }()
	b.mu.Lock()
	if ctx.Err() == nil {
		b.pingDue.Store(int64(b.now() + b.cfg.MaxHalfOpen))
	}
	b.mu.Unlock()

	limited, cancel := context.WithTimeout(ctx, b.cfg.MaxHalfOpen)
	defer cancel()
	begun := b.stopwatch()
	err := b.cfg.Ping(limited)
	result = b.judge(ctx, err, begun)
	if result == errIgnored && ctx.Err() == nil {
		// What Classify would ignore in a call is no reason to close either, and to
		// ping again without a pause would be a busy loop.
		result = &verdict{err: err, failed: true}
	}
}

// Close stops the [Config].Ping goroutine, if there is one, and sees to it that
// none is started again: from then on the breaker probes with calls. It does not
// wait for a Ping that is under way, whose ctx it ends. It returns nil.
func (b *Breaker) Close() error {
	b.operate((*Breaker).stop)
	return nil
}

func (b *Breaker) stop() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closed = true
	if b.stopPing != nil {
		b.stopPing()
		b.stopPing = nil
		b.pingDue.Store(0)
	}
}
