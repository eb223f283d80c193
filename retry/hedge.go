package retry

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/invalid"
)

// HedgeConfig says when a [Hedger] makes another call. It may be shared.
type HedgeConfig struct {
	// Name appears in errors. It may be empty.
	Name string

	// Delay is how long a call may take before another is made beside it. It must
	// be more than 0; about the 95th percentile of the latency is usual.
	Delay time.Duration

	// Quantile, in (0, 1), takes the place of Delay once Latencies has seen 20
	// calls: 0.95 makes another call beside the slowest twentieth. Zero means
	// that Delay always counts.
	Quantile  float64
	Latencies *Latencies // of the first calls; shared by all hedges of one operation

	// Max is how many calls there may be at most, the first included. Zero means
	// 2; one, no hedging.
	Max int

	// Budget limits the further calls to a fraction of the first ones. They are
	// charged whether or not they succeed, unless they are refused. It should not be
	// the Budget of a Retrier around the hedge: each call would count twice. Nil
	// means no limit.
	Budget *Budget

	// Discard is called with each value that is not returned, to close a body or
	// give back a connection. It is called before Do returns and on its goroutine.
	// A panic in it passes through, after it was called with the other values.
	//
	// A value that needs this often lives no longer than its ctx does. So with
	// Discard, the ctx of the call that won is not canceled when Do returns
	// but ends with the ctx given to Do, which should not be one that lives as
	// long as the program does.
	Discard func(value any)
}

// Validate reports what in c cannot mean anything.
func (c HedgeConfig) Validate() error {
	f := invalid.Fields{Type: "retry.HedgeConfig"}
	f.Need(c.Delay > 0, "Delay", c.Delay, "more than 0")
	f.Need(c.Quantile >= 0 && c.Quantile < 1, "Quantile", c.Quantile, "0 (for Delay alone) or less than 1") // NaN is neither
	f.Need(c.Quantile == 0 || c.Latencies != nil, "Latencies", "nil", "set for Quantile")
	f.Need(c.Max >= 0, "Max", c.Max, "0 (for 2) or more")
	return f.Err()
}

// A Hedger makes calls that return a T, and another call beside one that takes too
// long: the tail at scale (Dean and Barroso, "The Tail at Scale", Communications of
// the ACM, 2013). It is safe for concurrent use.
type Hedger[T any] struct {
	cfg  HedgeConfig
	lost error // a lostError

	called, hedged, won, failed, overBudget atomic.Int64
}

// NewHedger returns a Hedger. It panics if cfg is not valid: see
// [HedgeConfig.Validate].
func NewHedger[T any](cfg HedgeConfig) *Hedger[T] {
	if err := cfg.Validate(); err != nil {
		panic(err)
	}
	if cfg.Max == 0 {
		cfg.Max = 2
	}
	return &Hedger[T]{cfg: cfg, lost: lostError(cfg.Name)}
}

// lostError is the cause of the ctx of calls that are not needed any more: the name of
// their Hedger.
type lostError string

func (name lostError) Error() string {
	return prefix(string(name)) + "the hedge is over: this call is not needed any more"
}

// HedgeStats is a snapshot of what a [Hedger] has done since it was made.
type HedgeStats struct {
	Called     int64         // calls of Do that called fn
	Hedged     int64         // calls of fn that were made beside another
	Won        int64         // calls of Do that returned the value of one of those
	Failed     int64         // calls of Do that called fn and returned an error
	OverBudget int64         // calls of fn that Budget refused
	Delay      time.Duration // after which another call would be made now
}

// Stats returns the figures of h.
func (h *Hedger[T]) Stats() HedgeStats {
	return HedgeStats{
		Called:     h.called.Load(),
		Hedged:     h.hedged.Load(),
		Won:        h.won.Load(),
		Failed:     h.failed.Load(),
		OverBudget: h.overBudget.Load(),
		Delay:      h.delay(),
	}
}

func (h *Hedger[T]) delay() time.Duration {
	if h.cfg.Quantile > 0 {
		if d, ok := h.cfg.Latencies.Quantile(h.cfg.Quantile); ok {
			return d + 1 // a call that takes just as long is not slower
		}
	}
	return h.cfg.Delay
}

// Hedge is [Hedger.Do] without a Hedger to keep and its figures. It panics if cfg is
// not valid.
func Hedge[T any](ctx context.Context, cfg HedgeConfig, fn func(context.Context) (T, error)) (T, error) {
	return NewHedger[T](cfg).Do(ctx, fn)
}

// Do calls fn and, if that takes longer than a delay, calls it again beside the
// first. It returns the first success and cancels the ctx of the other calls.
//
// Hedge calls that may safely be made twice, also at the same time. The first is
// made on the caller's goroutine, the others each on their own. Do returns when all
// of them have, so that fn may use what belongs to the caller; fn must heed its ctx,
// or nothing is gained.
//
// A failure is not a reason for another call. If all calls that were made have
// failed, their errors are returned, joined if there are several; use a
// [Retrier] around Do. Do does not call fn if ctx has already ended.
//
// A panic in any call, and runtime.Goexit, ends the others and goes on in the
// goroutine of the caller: a panic of a further call as a [*PanicError], which has the
// stack of that call.
func (h *Hedger[T]) Do(ctx context.Context, fn func(context.Context) (T, error)) (T, error) {
	var zero T
	if ctx.Err() != nil {
		return zero, ended.Error(ctx)
	}
	h.called.Add(1)
	r := &race[T]{Hedger: h, ctx: ctx, fn: fn, after: h.delay(), winner: -1}
	defer r.clear()
	var start time.Time
	if h.cfg.Latencies != nil {
		start = time.Now()
	}
	r.call()
	if h.cfg.Latencies != nil && r.tells() {
		h.cfg.Latencies.observe(time.Since(start))
	}
	r.others.Wait()
	if r.crash != nil {
		r.crash()
	}
	if r.winner < 0 {
		h.failed.Add(1)
		return zero, join(r.errs)
	}
	r.discard()
	if r.winner > 0 {
		h.won.Add(1)
	}
	r.returned = true
	return r.value, nil
}

// A race is one call of Do.
type race[T any] struct {
	*Hedger[T]
	ctx   context.Context
	fn    func(context.Context) (T, error)
	after time.Duration

	others   sync.WaitGroup // a timer that has not fired, or the call that it makes
	returned bool           // the value: it is the caller's now

	mu      sync.Mutex
	timer   *time.Timer
	cancels []context.CancelCauseFunc // of the calls made, in that order
	running int
	over    bool // no other call may begin, and no success counts any more
	winner  int  // the call that returned value; -1: none
	value   T
	late    []T // of calls that succeeded too late
	errs    []error
	crash   func() // goes on with the panic or the exit of a call
}

// call makes one call, unless it is too late for it.
func (r *race[T]) call() {
	ctx, i, epoch, ok := r.begin()
	if !ok {
		return
	}
	crashed := true
	defer func() {
		if crashed {
			r.mu.Lock()
			r.finish(-1)
			r.mu.Unlock()
		}
	}()
	value, err := r.fn(ctx)
	crashed = false
	if r.cfg.Budget != nil && behavior.IsRefused(err) { // nothing was sent
		if i == 0 {
			r.cfg.Budget.uncall(epoch)
		} else {
			r.cfg.Budget.refund(epoch)
		}
	}
	r.end(i, value, err)
}

// begin returns the ctx and the number of a call that is to be made, with the epoch in
// which its budget was charged, and sets the timer for the one after it. The first call
// is always made.
func (r *race[T]) begin() (ctx context.Context, i int, epoch uint64, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	i = len(r.cancels)
	switch {
	case i == 0:
		if r.cfg.Budget != nil {
			epoch = r.cfg.Budget.call()
		}
	case r.over || r.ctx.Err() != nil:
		return nil, 0, 0, false
	default:
		if r.cfg.Budget != nil {
			if epoch, ok = r.cfg.Budget.charge(); !ok {
				r.overBudget.Add(1)
				return nil, 0, 0, false
			}
		}
		r.hedged.Add(1)
	}
	ctx, cancel := context.WithCancelCause(r.ctx)
	r.cancels = append(r.cancels, cancel)
	r.running++
	if len(r.cancels) < r.cfg.Max {
		r.others.Add(1)
		r.timer = time.AfterFunc(r.after, r.callBeside)
	}
	return ctx, i, epoch, true
}

// callBeside makes a call on a goroutine of its own.
func (r *race[T]) callBeside() {
	defer r.others.Done()
	crashed := true
	defer func() {
		if !crashed {
			return
		}
		crash := runtime.Goexit
		if p := recover(); p != nil {
			e, ok := p.(*PanicError) // of a hedge within this one
			if !ok {
				e = &PanicError{Value: p, Stack: debug.Stack()}
			}
			crash = func() { panic(e) }
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.crash == nil {
			r.crash = crash
		}
	}()
	r.call()
	crashed = false
}

// A PanicError is what [Hedger.Do] panics with if a call panicked that was made
// beside the first, on another goroutine.
type PanicError struct {
	Value any    // what the call panicked with
	Stack []byte // of the call's goroutine
}

func (e *PanicError) Error() string {
	return fmt.Sprintf("retry: a hedged call panicked: %v\n\n%s", e.Value, e.Stack)
}

// Unwrap returns the value of the panic if it is an error.
func (e *PanicError) Unwrap() error {
	err, _ := e.Value.(error)
	return err
}

// end takes the outcome of call i.
func (r *race[T]) end(i int, value T, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.running--
	switch {
	case r.over && err == nil:
		r.late = append(r.late, value)
	case r.over:
	case err == nil:
		r.winner, r.value = i, value
		r.finish(i)
	default:
		r.errs = append(r.errs, err)
		if r.running == 0 {
			r.finish(-1)
		}
	}
}

// finish sees to it that no other call begins, and cancels those that run, but
// not the winner's ctx if its value may need that. r.mu is held.
func (r *race[T]) finish(winner int) {
	r.over = true
	if r.timer != nil && r.timer.Stop() {
		r.others.Done()
	}
	for i, cancel := range r.cancels {
		if i != winner || r.cfg.Discard == nil {
			cancel(r.lost)
		}
	}
}

// tells reports whether the time that the first call took says how long such
// calls take: it succeeded, or was still at it when another did.
func (r *race[T]) tells() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.winner >= 0
}

// clear waits for all calls and discards the values that are not returned, however
// Do ends.
func (r *race[T]) clear() {
	r.others.Wait()
	if r.winner >= 0 && !r.returned {
		r.late = append(r.late, r.value)
	}
	r.discard()
}

// discard gives the values that came too late to Discard: all of them, even if there
// is a panic.
func (r *race[T]) discard() {
	if r.cfg.Discard == nil || len(r.late) == 0 {
		return
	}
	value := r.late[0]
	r.late = r.late[1:]
	defer r.discard()
	r.cfg.Discard(value)
}

func join(errs []error) error {
	if len(errs) == 1 {
		return errs[0]
	}
	return errors.Join(errs...)
}
