// Package breaker stops calling a dependency that keeps failing, and finds out
// when the dependency has recovered.
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
// A [Breaker] is closed at first, and every call passes. It opens when calls fail as
// its [Config] says: several in a row, too many in a window, or too many slow ones. It
// also opens when an error says how long to stay away. An open breaker refuses every call
// with an [*OpenError]. When its open time has passed it is half-open: a few calls pass,
// as probes. If they succeed, the breaker closes. If one fails, or does not end, it opens
// again, for longer if MaxOpenFor allows.
//
// The end of a call says this about the dependency:
//
//   - An answer (an error whose method Answered() bool returns true, such as the result of
//     resilience.Answer) is a success: the dependency worked, and its answer is no.
//   - A refusal (Refused() bool) is ignored: a policy further in made no call.
//   - An error that is returned after the caller's ctx was canceled is ignored. After
//     its deadline has passed, it is a failure if the call had run for
//     [Config].Patience by then, and ignored otherwise.
//   - Any other error is what [Config].Classify says, by default a failure. An error
//     with a RetryAfter() time.Duration opens the breaker for exactly that time.
//   - A panic is a failure and passes through. A call that ends its goroutine with
//     runtime.Goexit is ignored.
//
// Further rules:
//
//   - Each result counts for the period in which its call began. A result that
//     arrives after the breaker has opened, closed or been reset changes nothing.
//   - Within a resiliencehttp.Transport a call ends with the headers of the
//     response. A body that breaks off later is one more failure. A success ends a row of
//     failures when its body has ended well.
//   - Use one breaker for one dependency. Shards, hosts and tenants that fail
//     independently have one each, in a [Group].
//   - Do not run a call under the same breaker twice. Consider a method that is
//     guarded by a breaker and whose client is guarded by the same one: while it is
//     half-open, the method holds the only permit, the client's call is refused, and the
//     breaker never closes.
//   - A breaker without a [Config].Ping has no goroutine and no timer. It becomes
//     half-open when a call arrives after the open time, or when the program calls
//     [Breaker.State] or [Breaker.Stats].
//
// The pattern is Circuit Breaker of the Cloud Design Patterns catalog
// (https://learn.microsoft.com/azure/architecture/patterns/circuit-breaker), after
// Michael T. Nygard, Release It! The engine is github.com/sony/gobreaker.
package breaker

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience/internal/notify"
	"github.com/go-resilience/resilience/internal/settings"
)

// A Breaker refuses calls to a dependency that keeps failing. [New] makes one. It is safe
// for concurrent use.
//
// A call takes no lock while the Breaker is open, and none while it is closed and calls
// succeed, except for about ten calls in each Window.
type Breaker struct {
	start   time.Time // instants are durations since then
	phase   atomic.Pointer[phase]
	pingDue atomic.Int64 // only the Ping probes before this instant
	refused atomic.Int64 // calls

	name      string
	key       string       // in a group
	groupDone *atomic.Bool // whether the group is closed; nil outside a group
	changes   notify.Queue[Event]
	observers notify.Observers[Event]
	panics    notify.Panics            // of hooks, on the goroutine that pings
	setting   settings.Setting[Config] // whose lock is taken before mu

	// mu guards every change of phase, and the circuit. The lock of its gobreaker, and that
	// of changes, may be taken while mu is held, never the other way round. No user code runs
	// under mu.
	mu       sync.Mutex
	opens    int // in a row, without closing
	probes   probes
	stopPing context.CancelFunc
	pinging  chan struct{} // full while a Ping runs; made with the first goroutine that pings
	closed   bool          // Close was called
	totals   Totals        // but for refused, and for successes that the circuit counts
}

// New returns a closed Breaker. It panics with the error of cfg.Validate, if there is
// one.
func New(cfg Config) *Breaker {
	b := &Breaker{}
	b.make(newVersion(cfg))
	return b
}

func newVersion(cfg Config) *settings.Version[Config] {
	return settings.NewVersion(cfg, Config.withDefaults)
}

func (b *Breaker) make(v *settings.Version[Config]) {
	cfg := v.Filled()
	b.name, b.start = cfg.Name, time.Now()
	b.setting.Adopt(v, Config.withDefaults, nil)
	b.phase.Store(&phase{state: Closed, cfg: cfg, circuit: newCircuit(cfg, 0).close(0), since: b.start})
}

// Name returns the name of the breaker, or of its group.
func (b *Breaker) Name() string { return b.name }

func (b *Breaker) now() time.Duration { return time.Since(b.start) }
