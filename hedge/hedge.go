// Package hedge provides hedged calls: it starts a second call if the first call takes too long, and returns
// the result of the call that succeeds first. Hedging cuts the latency of the slowest calls. Hedging is
// described in Dean and Barroso, "The Tail at Scale", Communications of the ACM, 2013.
//
//	lookups := hedge.New[string](hedge.Config{
//		Name:     "lookup",
//		Delay:    20 * time.Millisecond, // used until enough latencies are known
//		Quantile: 0.95,
//	})
//	name, err := lookups.Do(ctx, func(ctx context.Context) (string, error) {
//		return lookup(ctx, 42)
//	})
//
// Hedge only operations that are safe to run twice, even concurrently. A failure of the first call does not
// start a second call. To retry failures, put a retry.Retrier around Do. When the first or the second call
// succeeds, Do cancels the other call. Policies inside the canceled call do not count the cancellation as a
// failure.
//
// A Hedger is not a resilience.Policy, because a Policy calls a func(context.Context) error. Two hedged calls
// to a func(context.Context) error would concurrently write their results to the same variable. A Hedger
// therefore calls functions that return their values.
package hedge

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/invalid"
	"github.com/go-resilience/resilience/internal/notify"
	"github.com/go-resilience/resilience/internal/panics"
)

// Unlimited means that there is no limit. Only fields whose documentation mentions Unlimited accept it.
const Unlimited = -1

// Config specifies when a [Hedger] starts a second call.
type Config struct {
	// Name appears in errors, events and metrics.
	Name string
	// Delay is the time that the first call may take before a second call starts. Required.
	Delay time.Duration
	// Quantile, in (0, 1), derives the delay from past latencies: the delay is the given quantile of the last
	// 1000 latencies. A latency is the time until the first call returned, if the first call succeeded or was
	// canceled because the second call had succeeded. For example, with a Quantile of 0.95, about 5% of calls
	// start a second call. Until 20 latencies are known, Delay is used. Zero means that Delay is always used.
	Quantile float64
	// Ratio, in (0, 1], limits the number of second calls: each first call allows Ratio second calls when it
	// returns. For example, with a Ratio of 0.1, every ten first calls allow one second call. A new Hedger
	// allows no second call: with a Ratio of 0.1, ten first calls must return before a second call starts. A
	// Hedger saves up at most ten allowed second calls. If an inner policy refuses a first call, the first call
	// allows no second calls. If an inner policy refuses a second call, the second call does not use up an
	// allowed second call. Zero means 0.1. [Unlimited] means no limit.
	Ratio float64
	// Discard, if not nil, is called with each unused value. A value is unused if a successful call returned
	// the value, but Do does not return it. For example, Discard can close the value. Do calls Discard before
	// it returns. If Discard is set, Do does not cancel the ctx of the winning call, because the returned
	// value may still need it. The resources of the winner's ctx are then released only when the ctx of Do is
	// done. Therefore, do not call Do with a ctx that is never canceled while the program runs.
	Discard func(value any)
}

// Validate returns an error that names each invalid field, or nil.
func (c Config) Validate() error {
	f := invalid.Fields{Type: "hedge.Config"}
	f.Need(c.Delay > 0, "Delay", c.Delay, "more than 0")
	f.Need(c.Quantile >= 0 && c.Quantile < 1, "Quantile", c.Quantile, "0 (for Delay) or less than 1")
	ratio := c.Ratio >= 0 && c.Ratio <= 1 || c.Ratio == Unlimited // false for NaN
	f.Need(ratio, "Ratio", c.Ratio, "0 (for 0.1) to 1, or Unlimited")
	return f.Err()
}

func (c Config) withDefaults() Config {
	c.Ratio = cmp.Or(c.Ratio, 0.1)
	return c
}

// A Hedger hedges calls that return a T. A Hedger is safe for concurrent use.
type Hedger[T any] struct {
	cfg       Config
	observers notify.Observers[Event]
	lost      error // the cancellation cause of a call that is no longer needed

	mu        sync.Mutex
	allowed   int64 // number of second calls that Ratio still allows, in millionths of a call
	latencies latencies
	stats     Stats // the counters; stats.Delay is not used
}

// New returns a Hedger. New panics if cfg is invalid; see [Config.Validate].
func New[T any](cfg Config) *Hedger[T] {
	if err := cfg.Validate(); err != nil {
		panic(err)
	}
	name := cfg.Name
	if name != "" {
		name += ": "
	}
	lost := ended.LostError("hedge: " + name + "call is no longer needed")
	return &Hedger[T]{cfg: cfg.withDefaults(), lost: lost}
}

// Do calls fn. If the first call takes longer than the delay that Config.Delay and Config.Quantile specify, and
// Config.Ratio allows a second call, Do calls fn again on another goroutine. Do returns the value of the call
// that succeeds first and cancels the other call. If both calls fail, Do returns both errors, joined. If the
// first call fails and no second call has started, Do returns the error of the first call. Do returns only after
// both calls have returned, so fn must respect its ctx. If ctx is already done, Do does not call fn, and returns
// an error that matches the error and the cause of ctx.
//
// If a call panics or exits its goroutine, Do cancels the other call. The panic or the exit then continues on
// the caller's goroutine. If the second call panicked, the value of the panic is an error whose method
// Stack() []byte returns the stack trace of the second call. If the original panic value is an error, the new
// panic value wraps it.
func (h *Hedger[T]) Do(ctx context.Context, fn func(context.Context) (T, error)) (T, error) {
	var zero T
	if ctx.Err() != nil {
		return zero, ended.Error(ctx)
	}
	r := &race[T]{Hedger: h, ctx: ctx, fn: fn, winner: -1, secondOver: make(chan struct{})}
	start := time.Now()
	inner := r.start(0)
	r.timer = time.AfterFunc(h.Stats().Delay, r.hedgedCall)
	returned := -1 // the index of the call whose value Do returns; -1 if Do returns no value
	defer func() { // runs even if a call or an observer panics or exits its goroutine
		r.finish(returned)
		r.wait()
		for i, c := range r.calls {
			if c.succeeded && i != returned && h.cfg.Discard != nil {
				h.cfg.Discard(c.value)
			}
		}
	}()
	value, err := fn(inner)
	if !behavior.IsRefused(err) {
		h.credit()
	}
	if r.end(0, value, err) && h.cfg.Quantile > 0 { // the latencies of failed calls are not recorded
		h.mu.Lock()
		h.latencies.observe(time.Since(start))
		h.mu.Unlock()
	}
	r.wait()
	if r.rethrow != nil {
		r.rethrow()
	}
	returned = r.winner
	switch returned {
	case 0:
		h.count(&h.stats.FirstWon)
		return value, nil
	case 1:
		h.count(&h.stats.HedgeWon)
		return r.calls[1].value, nil
	}
	h.count(&h.stats.Failed)
	if r.calls[1].err != nil {
		err = errors.Join(err, r.calls[1].err)
	}
	return zero, err
}

// delay returns the current delay before a second call. The caller holds h.mu.
func (h *Hedger[T]) delay() time.Duration {
	n := len(h.latencies.sorted)
	if h.cfg.Quantile == 0 || n < leastLatencies {
		return h.cfg.Delay
	}
	slowest := h.latencies.sorted[int(math.Ceil(h.cfg.Quantile*float64(n)))-1]
	return slowest + 1 // do not hedge a call that takes exactly slowest
}

const whole = 1_000_000 // millionths in one call

// credit adds the second calls that a first call allows.
func (h *Hedger[T]) credit() { h.add(int64(math.Round(max(0, h.cfg.Ratio) * whole))) }

// refund returns a second call to h.allowed after an inner policy refused the call.
func (h *Hedger[T]) refund() { h.add(whole) }

func (h *Hedger[T]) add(n int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.allowed = min(10*whole, h.allowed+n)
}

// take reports whether Ratio allows a second call. If so, take subtracts the second call from h.allowed.
func (h *Hedger[T]) take() bool {
	if h.cfg.Ratio == Unlimited {
		return true
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.allowed < whole {
		return false
	}
	h.allowed -= whole
	return true
}

// count adds one to a counter in h.stats.
func (h *Hedger[T]) count(n *int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	*n++
}

// A race is the state of one call to Do, in which a first call and a second call to fn compete.
type race[T any] struct {
	*Hedger[T]
	ctx context.Context
	fn  func(context.Context) (T, error)

	timer      *time.Timer
	secondOver chan struct{} // closed when the second call has returned, or will not start

	mu      sync.Mutex
	calls   [2]call[T]
	over    bool   // no call may start or win any more
	winner  int    // the index of the call that won; -1 if no call has won
	rethrow func() // repeats the panic or the exit of the second call; nil if there was neither
}

// A call is the first or the second call in a race.
type call[T any] struct {
	cancel    context.CancelCauseFunc // nil before the call starts
	succeeded bool
	value     T
	err       error
}

// start creates and returns the ctx of call i.
func (r *race[T]) start(i int) context.Context {
	ctx, cancel := context.WithCancelCause(r.ctx)
	r.calls[i].cancel = cancel
	return ctx
}

// wait waits until the second call has returned. If the second call has not started, wait prevents its start.
func (r *race[T]) wait() {
	if r.timer.Stop() {
		close(r.secondOver)
	}
	<-r.secondOver
}

// hedgedCall runs on the timer's goroutine. It runs the second call if the second call is needed and allowed.
func (r *race[T]) hedgedCall() {
	defer close(r.secondOver)
	returns := false
	defer func() {
		if !returns {
			r.crash(recover())
		}
	}()
	r.mu.Lock()
	needed := !r.over && r.ctx.Err() == nil
	allowed := needed && r.take()
	var ctx context.Context
	if allowed {
		ctx = r.start(1)
	}
	r.mu.Unlock()
	switch {
	case allowed:
		r.notify(EventHedged, &r.stats.Hedged)
		value, err := r.fn(ctx)
		if behavior.IsRefused(err) {
			r.refund()
		}
		r.end(1, value, err)
	case needed:
		r.notify(EventOverBudget, &r.stats.OverBudget)
	}
	returns = true
}

func (r *race[T]) notify(kind EventKind, n *int64) {
	r.count(n)
	r.observers.Tell(r.ctx, Event{Kind: kind, Name: r.cfg.Name})
}

// crash ends the race after the second call panicked with p. If p is nil, the second call exited its goroutine.
func (r *race[T]) crash(p any) {
	r.rethrow = runtime.Goexit
	if p != nil {
		e, ok := p.(*panics.Error) // fn itself uses a Hedger, whose second call panicked
		if !ok {
			stack := debug.Stack()
			e = panics.New(fmt.Sprintf("hedge: second call panicked: %v\n\n%s", p, stack), p, stack)
		}
		r.rethrow = func() { panic(e) }
	}
	r.finish(-1)
}

// end records the result of call i. It reports whether either call has won.
func (r *race[T]) end(i int, value T, err error) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	c := &r.calls[i]
	c.succeeded, c.value, c.err = err == nil, value, err
	if c.succeeded && !r.over {
		r.winner = i
		r.finishLocked(i)
	}
	return r.winner >= 0
}

func (r *race[T]) finish(winner int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.finishLocked(winner)
}

// finishLocked ends the race and cancels its calls. If Discard is set, the winner's ctx stays alive, because the
// winner's value may depend on that ctx. The caller holds r.mu.
func (r *race[T]) finishLocked(winner int) {
	r.over = true
	for i, c := range r.calls {
		if c.cancel != nil && (i != winner || r.cfg.Discard == nil) {
			c.cancel(r.lost)
		}
	}
}

// latencies stores the durations of the last 1000 successful calls.
type latencies struct {
	ring   []time.Duration // the durations in the order of arrival
	next   int             // the index of the oldest duration in ring, once ring is full
	sorted []time.Duration // the same durations in ascending order
}

const (
	mostLatencies  = 1000
	leastLatencies = 20 // a quantile of fewer latencies would be too inaccurate
)

func (l *latencies) observe(d time.Duration) {
	if len(l.ring) < mostLatencies {
		l.ring = append(l.ring, d)
	} else {
		i, _ := slices.BinarySearch(l.sorted, l.ring[l.next])
		l.sorted = slices.Delete(l.sorted, i, i+1)
		l.ring[l.next] = d
		l.next = (l.next + 1) % mostLatencies
	}
	i, _ := slices.BinarySearch(l.sorted, d)
	l.sorted = slices.Insert(l.sorted, i, d)
}
