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
// What the end of a call says of the dependency:
//
//   - An answer (an error whose method Answered() bool returns true, such as that of
//     resilience.Answer) is a success: the dependency worked, and its answer is no.
//   - A refusal (Refused() bool) is ignored: a policy further in made no call.
//   - An error that is returned after the caller's ctx was canceled is ignored. After
//     its deadline has passed, it is a failure if the call had run for
//     [Config].Patience by then, and ignored if not.
//   - Any other error is what [Config].Classify says, and a failure by default. One
//     with a RetryAfter() time.Duration opens the breaker for exactly that time.
//   - A panic is a failure and passes through. A call that ends its goroutine with
//     runtime.Goexit is not counted.
//
// What else to know:
//
//   - Each result counts for the period in which its call began. A result that
//     arrives after a trip, a reset or a closing changes nothing.
//   - Within a resiliencehttp.Transport a call ends with the headers of the
//     response. A body that breaks off later is one more failure.
//   - Use one breaker for one dependency. Shards, hosts and tenants that fail on
//     their own have one each, in a [Group].
//   - Do not run a call under the same breaker twice, around a method and in the client
//     that it uses, say. Half-open, the outer call has the permit, the inner one is
//     refused, and the breaker never closes.
//   - Without a [Config].Ping there is no goroutine and no timer: the breaker becomes
//     half-open when a call arrives after the open time, or when the program asks for
//     [Breaker.State] or [Breaker.Stats].
//
// The pattern is Circuit Breaker of the Cloud Design Patterns catalogue
// (https://learn.microsoft.com/azure/architecture/patterns/circuit-breaker), after
// Michael T. Nygard, Release It! The engine is github.com/sony/gobreaker.
package breaker

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

// A Breaker refuses calls while what they call is failing. Make one with [New]
// and share it: it is safe for concurrent use.
//
// A closed Breaker takes one lock for a moment after each call; an open one takes
// none.
type Breaker struct {
	cfg       Config    // with its defaults filled in
	start     time.Time // instants are durations since then
	phase     atomic.Pointer[phase]
	groupDone *atomic.Bool // whether the group of a member is closed; nil for others

	busy    atomic.Int64 // no permit is free before this instant, unless one is given back
	pingDue atomic.Int64 // until this instant probing is left to the Ping
	waiting atomic.Bool  // events are to be delivered

	// mu guards every change of phase. The lock of a gobreaker may be taken while mu
	// is held, never the other way round. No user code runs under either.
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
	b.phase.Store(&phase{state: Closed, circuit: b.newCircuit(Closed), since: b.start})
	return b
}

func (b *Breaker) now() time.Duration { return time.Since(b.start) }
