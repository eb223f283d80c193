package breaker

import (
	"context"
	"errors"
	"runtime/debug"
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
	if p.state == Open && b.cfg.Ping != nil && !b.closed && (b.groupDone == nil || !b.groupDone.Load()) {
		ctx, cancel := context.WithCancel(context.Background())
		b.stopPing = cancel
		b.pingDue.Store(int64(p.until + b.cfg.MaxHalfOpen))
		go b.ping(ctx, p)
	}
}

// ping waits until the open phase p is over and pings until ctx ends, which it does with
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
		b.advance()
		b.deliver(context.Background())
		p := b.phase.Load()
		if p.state != HalfOpen {
			return
		}
		b.pingOnce(ctx, p)
	}
}

// errPingExited is what a Ping fails with that ends its goroutine.
var errPingExited = errors.New("breaker: Ping called runtime.Goexit")

// pingOnce counts a Ping as a probe of phase p. It needs no permit: no other call is let
// through for as long as a Ping may take.
func (b *Breaker) pingOnce(ctx context.Context, p *phase) {
	began := pass{phase: p, begun: b.now()}
	if !b.holdForPing(ctx, began.begun) {
		return
	}
	result := &verdict{err: errPingExited, failed: true}
	defer func() {
		if r := recover(); r != nil {
			result = &verdict{err: &PanicError{r, debug.Stack()}, failed: true}
		}
		if ctx.Err() != nil {
			result = ignored // it was stopped
		}
		b.settle(context.Background(), began, result)
	}()
	limited, cancel := context.WithTimeout(ctx, b.cfg.MaxHalfOpen)
	defer cancel()
	err := b.cfg.Ping(limited)
	if err == nil {
		err = limited.Err()
	}
	result = b.judge(ctx, began, err)
	if result == ignored {
		// What Classify would ignore in a call is no reason to close either, and to
		// ping again without a pause would be a busy loop.
		result = &verdict{err: err, failed: true}
	}
}

// holdForPing keeps probes out while a Ping may take its time, from now on. It reports
// false if the Ping has been stopped.
func (b *Breaker) holdForPing(ctx context.Context, now time.Duration) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if ctx.Err() != nil {
		return false
	}
	b.pingDue.Store(int64(now + b.cfg.MaxHalfOpen))
	return true
}

// Close stops the [Config].Ping goroutine, if there is one, and none is started again:
// from then on calls are the probes. It does not wait for a Ping that is under way,
// whose ctx it ends. It returns nil.
func (b *Breaker) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closed = true
	if b.stopPing != nil {
		b.stopPing()
		b.stopPing = nil
		b.pingDue.Store(0)
	}
	return nil
}
