package breaker

import (
	"context"
	"errors"
	"runtime/debug"
	"time"
)

// repoint stops the goroutine that pinged for an earlier phase and starts one for phase p,
// if that is open; b.mu is held.
func (b *Breaker) repoint(p *phase) {
	if p.state == HalfOpen {
		return // the goroutine of the open phase goes on
	}
	b.stopPinging()
	if p.state == Open {
		b.startPinging(p)
	}
}

// startPinging starts the goroutine that pings after phase p, which is open, or in it, if
// it is half-open; b.mu is held.
func (b *Breaker) startPinging(p *phase) {
	if p.rules.Ping == nil || b.closed || b.groupDone != nil && b.groupDone.Load() {
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	b.stopPing = cancel
	b.pingDue.Store(int64(max(p.until, b.now()) + p.rules.MaxHalfOpen))
	go b.ping(ctx, p)
}

// stopPinging stops the goroutine that pings, if there is one; b.mu is held.
func (b *Breaker) stopPinging() {
	if b.stopPing != nil {
		b.stopPing()
		b.stopPing = nil
		b.pingDue.Store(0)
	}
}

// ping waits for the end of phase p, if it is open, and then pings while the breaker is
// half-open.
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

// errPingExited is the error of a Ping that ends its goroutine.
var errPingExited = errors.New("breaker: Ping called runtime.Goexit")

// pingOnce calls Ping as a probe of phase p. It needs no permit, because no other call
// passes for as long as a Ping may take.
func (b *Breaker) pingOnce(ctx context.Context, p *phase) {
	c := call{phase: p, begun: b.now()}
	if !b.holdForPing(ctx, c) {
		return
	}
	v := &verdict{err: errPingExited, failed: true}
	defer func() {
		if r := recover(); r != nil {
			v = &verdict{err: &PanicError{r, debug.Stack()}, failed: true}
		}
		if ctx.Err() != nil {
			v = ignored // it was stopped
		}
		b.settleProbe(p, c.permit, v)
		b.deliver(context.Background())
	}()
	limited, cancel := context.WithTimeout(ctx, p.rules.MaxHalfOpen)
	defer cancel()
	err := p.rules.Ping(limited)
	if err == nil {
		err = limited.Err()
	}
	v = b.judge(ctx, c, err)
	if v == ignored {
		// An error that Classify ignores does not close the breaker either, and to
		// ping again without a pause would be a busy loop.
		v = &verdict{err: err, failed: true}
	}
}

// holdForPing keeps other probes out for the MaxHalfOpen of the Ping c. It reports false if
// the goroutine has been stopped.
func (b *Breaker) holdForPing(ctx context.Context, c call) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if ctx.Err() != nil {
		return false
	}
	b.pingDue.Store(int64(c.begun + c.phase.rules.MaxHalfOpen))
	return true
}

// Close stops the [Config].Ping goroutine, if there is one, and cancels the ctx of a Ping
// under way, without waiting for it. After that the breaker goes on without Ping: calls
// are the probes. Close does not change the state; to close the circuit, use
// [Breaker.Reset]. It returns nil.
func (b *Breaker) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closed = true
	b.stopPinging()
	return nil
}
