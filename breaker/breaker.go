// Package breaker stops calling a dependency that keeps failing, and finds out
// when it is well again.
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
// A [Breaker] is closed while all is well, and every call passes. It opens when
// calls fail as its [Config] says: in a row, too many of those in a window, or
// too many slow ones; or at once, when an error says how long to stay away. While
// open it refuses every call with an [*OpenError]. After that it is half-open: a
// few calls are let through as probes. If they succeed it closes; if one fails it
// opens again, for longer where MaxOpenFor allows.
//
// What to know:
//
//   - An error that comes after the caller's own ctx has ended is not counted: it
//     says nothing about the dependency. Give calls a limit of their own inside
//     the breaker (resilience.Timeout), or one that only ever hangs will not open it.
//   - Success and failure are those of [Config].Classify: not every error means
//     that the dependency is ill.
//   - Each result counts for the period in which its call began. What comes back
//     after a trip, a reset or a closing changes nothing. Within a
//     resiliencehttp.Transport a success is judged, and its time taken, when the
//     response has been read.
//   - A panic in the call is a failure and passes through. A call that ends its
//     goroutine with runtime.Goexit is not counted.
//   - One dependency, one breaker; shards, hosts and tenants that fail on their
//     own have one each, in a [Group].
//   - Without a [Config].Ping there is no goroutine and no timer: the change to
//     half-open happens when a call comes by, or somebody asks for [Breaker.State]
//     or [Breaker.Stats].
//
// The pattern is Circuit Breaker of the Cloud Design Patterns catalogue
// (https://learn.microsoft.com/azure/architecture/patterns/circuit-breaker), after
// Michael T. Nygard, Release It! The state machine is github.com/sony/gobreaker.
package breaker

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sony/gobreaker/v2"

	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/linger"
)

// A Breaker refuses calls while what they call is failing. Make one with [New]
// and share it: it is safe for concurrent use.
//
// A closed Breaker takes one lock for a moment, before and after the call; an
// open one takes none.
type Breaker struct {
	cfg   Config    // with its defaults filled in
	start time.Time // instants are durations since then
	phase atomic.Pointer[phase]
	seat  seat // of a member of a Group, or nil

	busy    atomic.Int64 // half-open calls need not ask for a permit before this instant
	pingDue atomic.Int64 // until this instant probing is left to the Ping
	waiting atomic.Bool  // events are to be delivered

	// mu is a leaf: it is taken while the lock of the gobreaker in use is held,
	// never the other way round, and no user code runs under it.
	mu         sync.Mutex
	opens      int // in a row, without closing
	permits    []permit
	lastPermit uint64
	events     []event
	delivering bool
	stopPing   context.CancelFunc
	closed     bool // Close was called
}

// New returns a closed Breaker. It panics with the error of cfg.Validate if that
// is not nil.
func New(cfg Config) *Breaker {
	if err := cfg.Validate(); err != nil {
		panic(err)
	}
	b := &Breaker{cfg: cfg.withDefaults(), start: time.Now()}
	b.phase.Store(&phase{state: Closed, circuit: b.newCircuit(), since: b.start})
	return b
}

// Do calls fn unless the breaker refuses it, and returns fn's error as it is. The
// error of a refusal is an [*OpenError]; fn has not been called then, nor if ctx
// had ended already.
func (b *Breaker) Do(ctx context.Context, fn func(context.Context) error) error {
	if b.seat != nil {
		return b.seat.do(ctx, fn)
	}
	return b.do(ctx, fn)
}

// Wrap returns a function that calls next under the breaker.
func (b *Breaker) Wrap(next func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error { return b.Do(ctx, next) }
}

func (b *Breaker) do(ctx context.Context, fn func(context.Context) error) error {
	if ctx.Err() != nil {
		return ended.Error(ctx)
	}
	defer b.deliver(ctx)
	work := linger.Of(ctx)
	for {
		p := b.phase.Load()
		if p.refusal != nil || work != nil {
			var permit uint64
			var refusal *OpenError
			if p, permit, refusal = b.admit(p); refusal != nil {
				return b.refuse(ctx, refusal)
			}
			if p.state == HalfOpen || work != nil {
				return b.beside(ctx, fn, p, permit, work)
			}
		}
		err, verdict := p.circuit.gb.Execute(func() (error, error) {
			if b.phase.Load() != p {
				return nil, errMoved
			}
			begun := b.stopwatch()
			err := fn(ctx)
			return err, b.judge(ctx, err, begun)
		})
		switch verdict {
		case errMoved, gobreaker.ErrOpenState, gobreaker.ErrTooManyRequests:
			continue // fn was not called: the phase changed after it was looked at
		}
		return err
	}
}

// Allow asks for a call that is not a single function: done is to be called with
// its error when it has ended, from any goroutine. Calling it again does nothing.
// If err is not nil the call is refused, as by [Breaker.Do], and done is nil.
//
// A probe whose done is not called loses its permit after MaxHalfOpen.
func (b *Breaker) Allow(ctx context.Context) (done func(error), err error) {
	if b.seat != nil {
		return b.seat.allow(ctx)
	}
	return b.allow(ctx)
}

func (b *Breaker) allow(ctx context.Context) (func(error), error) {
	if ctx.Err() != nil {
		return nil, ended.Error(ctx)
	}
	defer b.deliver(ctx)
	p, permit, refusal := b.admit(b.phase.Load())
	if refusal != nil {
		return nil, b.refuse(ctx, refusal)
	}
	begun := b.stopwatch()
	var over atomic.Bool
	return func(err error) {
		if over.Swap(true) {
			return
		}
		b.conclude(ctx, p, permit, begun, err)
	}, nil
}

// admit finds the phase in which a call that comes now is let through, beginning
// with p, and the permit that it holds if it is a probe; or else the refusal.
func (b *Breaker) admit(p *phase) (*phase, uint64, *OpenError) {
	for {
		if p.refusal == nil {
			return p, 0, nil
		}
		now := b.now()
		if now < p.until || int64(now) < b.pingDue.Load() {
			return nil, 0, p.refusal
		}
		if p.state == HalfOpen {
			if int64(now) < b.busy.Load() {
				return nil, 0, p.refusal
			}
			permit, ok := b.take(p, now)
			if ok {
				return p, permit, nil
			}
		}
		next := b.advance(p)
		if next == p {
			return nil, 0, p.refusal
		}
		p = next
	}
}

// advance returns the phase after p, if its time has come.
func (b *Breaker) advance(p *phase) *phase {
	if p.state == Open && b.now() >= p.until {
		p.circuit.gb.State() // to half-open
	}
	return b.phase.Load()
}

func (b *Breaker) refuse(ctx context.Context, refusal *OpenError) error {
	if b.cfg.OnReject != nil {
		b.cfg.OnReject(ctx, refusal)
	}
	return refusal
}

func (b *Breaker) now() time.Duration { return time.Since(b.start) }

// stopwatch returns the instant at which a call begins, if it matters.
func (b *Breaker) stopwatch() time.Duration {
	if b.cfg.SlowAfter == 0 {
		return 0
	}
	return b.now()
}
