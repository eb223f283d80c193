// Package hedge makes a second call beside one that takes too long, and returns the first
// success (Dean and Barroso, "The Tail at Scale", Communications of the ACM, 2013).
//
//	lookups := hedge.New[string](hedge.Config{
//		Name:     "lookup",
//		Delay:    20 * time.Millisecond, // until it knows better
//		Quantile: 0.95,
//		Ratio:    0.1,
//	})
//	name, err := lookups.Do(ctx, func(ctx context.Context) (string, error) {
//		return lookup(ctx, 42)
//	})
//
// Hedge only what may safely be done twice, at the same time too. A failure is no reason for a
// second call: put a retry.Retrier around Do. To the policies in the call that loses, whose ctx is
// canceled, that is no failure.
package hedge

import (
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

// Config says when a [Hedger] makes a second call.
type Config struct {
	// Name appears in errors and events.
	Name string
	// Delay, more than 0, is how long a call may take before another is made beside it.
	Delay time.Duration
	// Quantile, in (0, 1), of the last 1000 calls takes the place of Delay once 20 have succeeded: at
	// 0.95, the slowest twentieth is hedged. Zero means Delay.
	Quantile float64
	// Ratio, in (0, 1], is how many second calls a first one allows; up to ten are kept. A call that
	// is refused neither allows nor uses one. Zero means no limit.
	Ratio float64
	// Discard is called with a value that Do does not return, to close a body, say, before Do
	// returns. If it is set, the ctx of the call that won ends with the ctx of Do and no sooner: do
	// not call Do with a ctx that lives as long as the program.
	Discard func(value any)
}

// Validate returns an error that names each invalid field, or nil.
func (c Config) Validate() error {
	f := invalid.Fields{Type: "hedge.Config"}
	f.Need(c.Delay > 0, "Delay", c.Delay, "more than 0")
	f.Need(c.Quantile >= 0 && c.Quantile < 1, "Quantile", c.Quantile, "0 (for Delay alone) or less than 1")
	f.Need(c.Ratio >= 0 && c.Ratio <= 1, "Ratio", c.Ratio, "0 (for no limit) to 1")
	return f.Err()
}

// A Hedger is safe for concurrent use.
type Hedger[T any] struct {
	cfg       Config
	observers notify.Observers[Event]
	lost      error // the cause of the end of a call that loses

	mu        sync.Mutex
	allowed   int64 // second calls, in millionths
	latencies latencies
	stats     Stats // but for Delay
}

// New panics if cfg is not valid.
func New[T any](cfg Config) *Hedger[T] {
	if err := cfg.Validate(); err != nil {
		panic(err)
	}
	name := cfg.Name
	if name != "" {
		name += ": "
	}
	lost := ended.LostError("hedge: " + name + "the hedge is over: this call is not needed any more")
	return &Hedger[T]{cfg: cfg, lost: lost}
}

// Do calls fn and, after a delay, again on a goroutine of its own. It returns the first success, and
// cancels the ctx of the other call, or it returns the errors, joined. It waits for both calls, so fn
// must heed its ctx.
//
// If a call panics or ends its goroutine, the other is canceled, and that continues on the caller's
// goroutine: the panic of a second call with an error that has a method Stack() []byte, and wraps the
// value of the panic if that is an error.
func (h *Hedger[T]) Do(ctx context.Context, fn func(context.Context) (T, error)) (T, error) {
	var zero T
	if ctx.Err() != nil {
		return zero, ended.Error(ctx)
	}
	r := &race[T]{Hedger: h, ctx: ctx, fn: fn, winner: -1, secondOver: make(chan struct{})}
	begun := time.Now()
	inner := r.enter(0)
	r.timer = time.AfterFunc(h.Stats().Delay, r.second)
	returned := -1 // the call whose value Do returns
	defer func() { // also if a call or an observer panics, or ends its goroutine
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
		h.spend(-int64(math.Round(h.cfg.Ratio * whole)))
	}
	if r.end(0, value, err) && h.cfg.Quantile > 0 { // how fast a failure is says nothing
		h.mu.Lock()
		h.latencies.observe(time.Since(begun))
		h.mu.Unlock()
	}
	r.wait()
	if r.crash != nil {
		r.crash()
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

// delay returns how long a call may take now before another is made. h.mu is held.
func (h *Hedger[T]) delay() time.Duration {
	n := len(h.latencies.sorted)
	if h.cfg.Quantile == 0 || n < leastLatencies {
		return h.cfg.Delay
	}
	slowest := h.latencies.sorted[int(math.Ceil(h.cfg.Quantile*float64(n)))-1]
	return slowest + 1 // a call that takes exactly as long is not slower
}

const whole = 1_000_000 // one second call

// spend takes n millionths of a second call, or gives them back if n is negative, and reports
// whether Ratio allows them.
func (h *Hedger[T]) spend(n int64) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.cfg.Ratio > 0 && h.allowed < n {
		return false
	}
	h.allowed = min(10*whole, h.allowed-n)
	return true
}

// count adds one to a figure of h.stats.
func (h *Hedger[T]) count(n *int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	*n++
}

// A race is one call of Do.
type race[T any] struct {
	*Hedger[T]
	ctx context.Context
	fn  func(context.Context) (T, error)

	timer      *time.Timer
	secondOver chan struct{} // closed when the second call has returned, or will not be made

	mu     sync.Mutex
	calls  [2]call[T]
	over   bool   // no other call may begin, and none may win
	winner int    // the index of the first call that succeeded before the race was over, or -1
	crash  func() // continues the panic or the exit of the second call
}

type call[T any] struct {
	cancel    context.CancelCauseFunc // nil before it begins
	succeeded bool
	value     T
	err       error
}

// enter returns the ctx of call i, which begins.
func (r *race[T]) enter(i int) context.Context {
	ctx, cancel := context.WithCancelCause(r.ctx)
	r.calls[i].cancel = cancel
	return ctx
}

// wait returns when the second call has returned. If it has not begun, it will not.
func (r *race[T]) wait() {
	if r.timer.Stop() {
		close(r.secondOver)
	}
	<-r.secondOver
}

// second makes the second call, on a goroutine of its own, unless there is no need or no
// allowance for it.
func (r *race[T]) second() {
	defer close(r.secondOver)
	returns := false
	defer func() {
		if !returns {
			r.crashed(recover())
		}
	}()
	r.mu.Lock()
	needed := !r.over && r.ctx.Err() == nil
	allowed := needed && r.spend(whole)
	var ctx context.Context
	if allowed {
		ctx = r.enter(1)
	}
	r.mu.Unlock()
	switch {
	case allowed:
		r.tell(EventHedged, &r.stats.Hedged)
		value, err := r.fn(ctx)
		if behavior.IsRefused(err) {
			r.spend(-whole)
		}
		r.end(1, value, err)
	case needed:
		r.tell(EventOverBudget, &r.stats.OverBudget)
	}
	returns = true
}

func (r *race[T]) tell(kind string, n *int64) {
	r.count(n)
	r.observers.Tell(r.ctx, Event{Kind: kind, Name: r.cfg.Name})
}

// crashed notes that the second call panicked with p, or ended its goroutine if p is nil.
func (r *race[T]) crashed(p any) {
	r.crash = runtime.Goexit
	if p != nil {
		e, ok := p.(*panics.Error) // of a hedge within this one
		if !ok {
			stack := debug.Stack()
			e = panics.New(fmt.Sprintf("hedge: the second call panicked: %v\n\n%s", p, stack), p, stack)
		}
		r.crash = func() { panic(e) }
	}
	r.finish(-1)
}

// end notes the result of call i, and reports whether a call has won.
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

// finishLocked ends the race: it cancels the calls that run. It does not cancel the winner's
// ctx if the value may need it.
func (r *race[T]) finishLocked(winner int) {
	r.over = true
	for i, c := range r.calls {
		if c.cancel != nil && (i != winner || r.cfg.Discard == nil) {
			c.cancel(r.lost)
		}
	}
}

// latencies remembers how long the last 1000 calls took.
type latencies struct {
	ring   []time.Duration // in the order of arrival
	next   int             // the index in ring of the oldest
	sorted []time.Duration // the same
}

const (
	mostLatencies  = 1000
	leastLatencies = 20 // fewer say little
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
