package breaker

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"time"

	"github.com/go-resilience/resilience/internal/panics"
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
	if p.cfg.Ping == nil || b.closed || b.groupDone != nil && b.groupDone.Load() {
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	b.stopPing = cancel
	if b.pinging == nil {
		b.pinging = make(chan struct{}, 1)
	}
	b.pingDue.Store(int64(max(p.until, b.now()) + p.cfg.MaxHalfOpen))
	go b.ping(ctx, b.pinging, p)
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
func (b *Breaker) ping(ctx context.Context, pinging chan struct{}, p *phase) {
	timer := time.NewTimer(p.until - b.now())
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
		return
	}
	b.mu.Lock()
	b.catchUp() // half-open
	b.mu.Unlock()
	b.deliverAlone()
	for {
		select { // a Ping of an earlier phase may still run
		case pinging <- struct{}{}:
		case <-ctx.Done():
			return
		}
		if !b.pingOnce(ctx, pinging) {
			return
		}
	}
}

// errPingExited is the error of a Ping that ends its goroutine.
var errPingExited = errors.New("breaker: Ping called runtime.Goexit")

// pingOnce calls Ping as a probe of the present phase. It needs no permit, because no other
// call passes for as long as a Ping may take. When Ping has returned, it empties pinging. It
// reports false if the goroutine has been stopped.
func (b *Breaker) pingOnce(ctx context.Context, pinging chan struct{}) bool {
	c, ok := b.holdForPing(ctx)
	if !ok {
		<-pinging
		return false
	}
	p := c.phase
	v := verdict{end: failed, err: errPingExited}
	defer func() {
		<-pinging
		if r := recover(); r != nil {
			v = verdict{end: failed, err: panics.New(fmt.Sprintf("breaker: Ping panicked: %v", r), r, debug.Stack())}
		}
		if ctx.Err() != nil {
			return // it was stopped
		}
		counted := b.settleProbe(c, v)
		b.deliverAlone()
		if !counted {
			time.Sleep(leastProbe) // until calls have ended that began before there was a Ping
		}
	}()
	limited, cancel := context.WithTimeout(ctx, p.cfg.MaxHalfOpen)
	defer cancel()
	err := p.cfg.Ping(limited)
	if err == nil {
		err = limited.Err()
	}
	v = b.judge(ctx, c, err)
	if v.end == ignored {
		// An error that Classify ignores does not close the breaker either, and to
		// ping again without a pause would be a busy loop.
		v = verdict{end: failed, err: err}
	}
	return true
}

// holdForPing returns the call of a Ping, and keeps other probes out for its MaxHalfOpen. It
// reports false if the goroutine has been stopped.
func (b *Breaker) holdForPing(ctx context.Context) (call, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if ctx.Err() != nil {
		return call{}, false
	}
	c := call{phase: b.phase.Load(), begun: b.now()}
	b.pingDue.Store(int64(c.begun + c.phase.cfg.MaxHalfOpen))
	return c, true
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
