package retry

import (
	"cmp"
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
	// Name appears in errors and events. It may be empty.
	Name string

	// Delay is how long a call may take before another is made beside it. It must be
	// more than 0; the 95th percentile of the latency is usual.
	Delay time.Duration

	// Quantile, in (0, 1), takes the place of Delay once Latencies has seen 20 calls: at
	// 0.95, the slowest twentieth of the calls is hedged. Zero means that Delay always
	// counts.
	Quantile float64

	// Latencies remembers how long the first calls took. Share one among the hedges of
	// one operation. Quantile needs it.
	Latencies *Latencies

	// Max is the most calls of fn for each call of Do, the first included. Zero means 2;
	// 1 means no hedging.
	Max int

	// Budget limits the further calls to a fraction of the first ones. A further call is
	// charged whether or not it succeeds, unless a policy further in refuses it. Do not
	// share the Budget of a Retrier around the Hedger, since each call would count
	// twice. Nil means no limit.
	Budget *Budget

	// Discard is called with each value that Do does not return, to close a body or to
	// give back a connection. It is called before Do returns, on the goroutine of Do. A
	// panic in it passes through after it was called with the other values.
	//
	// A value that needs Discard often lives no longer than its ctx. If Discard is set,
	// Do does not cancel the ctx of the call that won; it ends with the ctx of Do. So do
	// not call Do with a ctx that lives as long as the program.
	Discard func(value any)
}

// Validate returns an error that names each field of c that cannot mean anything.
func (c HedgeConfig) Validate() error {
	f := invalid.Fields{Type: "retry.HedgeConfig"}
	f.Need(c.Delay > 0, "Delay", c.Delay, "more than 0")
	f.Need(c.Quantile >= 0 && c.Quantile < 1, "Quantile", c.Quantile, "0 (for Delay alone) or less than 1") // false for NaN
	f.Need(c.Quantile == 0 || c.Latencies != nil, "Latencies", "nil", "set for Quantile")
	f.Need(c.Max >= 0, "Max", c.Max, "0 (for 2) or more")
	return f.Err()
}

func (c HedgeConfig) withDefaults() HedgeConfig {
	c.Max = cmp.Or(c.Max, 2)
	return c
}

// A Hedger makes calls that return a T, and makes another call beside one that takes too
// long (Dean and Barroso, "The Tail at Scale", Communications of the ACM, 2013). It is
// safe for concurrent use.
type Hedger[T any] struct {
	cfg  HedgeConfig // with its defaults
	lost error       // a lostError

	called, hedged, won, failed, overBudget atomic.Int64
}

// NewHedger returns a Hedger. It panics if cfg is not valid: see
// [HedgeConfig.Validate].
func NewHedger[T any](cfg HedgeConfig) *Hedger[T] {
	if err := cfg.Validate(); err != nil {
		panic(err)
	}
	return &Hedger[T]{cfg: cfg.withDefaults(), lost: lostError(cfg.Name)}
}

// A lostError is the cause of the ctx of a call that has lost the race. It is the name of
// the Hedger.
type lostError string

func (name lostError) Error() string {
	return prefix(string(name)) + "the hedge is over: this call is not needed any more"
}

// HedgeStats is a snapshot of what a [Hedger] has done since it was made.
type HedgeStats struct {
	Called     int64         // calls of Do that called fn
	Hedged     int64         // calls of fn that were made beside another
	Won        int64         // calls of Do that returned the value of such a call
	Failed     int64         // calls of Do that called fn and returned an error
	OverBudget int64         // calls of fn that Budget did not allow
	Delay      time.Duration // how long a call may take now before another is made
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
			return d + 1 // a call that takes exactly as long is not slower
		}
	}
	return h.cfg.Delay
}

// Hedge is [Hedger.Do] of a new Hedger, which keeps no figures. It panics if cfg is not
// valid.
func Hedge[T any](ctx context.Context, cfg HedgeConfig, fn func(context.Context) (T, error)) (T, error) {
	return NewHedger[T](cfg).Do(ctx, fn)
}

// Do calls fn and, if that takes longer than a delay, calls it again beside the first. It
// returns the first success and cancels the ctx of the other calls.
//
// Hedge only what may safely be done twice, at the same time too. Do makes the first call
// on the caller's goroutine and each other call on a goroutine of its own. It returns when
// all of them have returned, so that fn may use the caller's data. fn must heed its ctx,
// or nothing is gained.
//
// A failure is not a reason for another call: use a [Retrier] around Do. If all calls have
// failed, Do returns their errors, joined if there are several. Do does not call fn if
// ctx has already ended.
//
// If a call panics or ends its goroutine, the others are canceled, and the panic or exit
// continues on the goroutine of the caller. The panic of a further call becomes a
// [*PanicError], which has the stack of that call.
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

	others   sync.WaitGroup // of a timer that has not fired, or of the call that it makes
	returned bool           // Do returns the value

	mu      sync.Mutex
	timer   *time.Timer
	cancels []context.CancelCauseFunc // of the calls, in the order in which they began
	running int
	over    bool // no other call may begin, and no other success counts
	winner  int  // the index of the call that returned value, or -1
	value   T
	late    []T // values that came too late
	errs    []error
	crash   func() // continues the panic or the exit of a call
}

// call makes one call, unless the race is over.
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

// begin returns the ctx and the index of a call that is to be made, and the epoch in which
// its budget was charged. It sets the timer for the next call. The first call is always
// made.
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

// A PanicError is the panic of [Hedger.Do] if a call on another goroutine than the
// caller's panicked.
type PanicError struct {
	Value any    // of the call's panic
	Stack []byte // of the call's goroutine
}

func (e *PanicError) Error() string {
	return fmt.Sprintf("retry: a hedged call panicked: %v\n\n%s", e.Value, e.Stack)
}

// Unwrap returns Value if it is an error.
func (e *PanicError) Unwrap() error {
	err, _ := e.Value.(error)
	return err
}

// end notes the outcome of call i.
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

// finish ends the race: it stops the timer and cancels the calls that run. It does not
// cancel the winner's ctx if the value may need it. The caller holds r.mu.
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

// tells reports whether the time of the first call counts as a latency: the call succeeded,
// or still ran when another call did.
func (r *race[T]) tells() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.winner >= 0
}

// clear waits for all calls and discards the values that Do does not return, also if it
// panics.
func (r *race[T]) clear() {
	r.others.Wait()
	if r.winner >= 0 && !r.returned {
		r.late = append(r.late, r.value)
	}
	r.discard()
}

// discard calls Discard with each value that came too late, even if it panics.
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
