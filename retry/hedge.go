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
	"github.com/go-resilience/resilience/internal/notify"
	"github.com/go-resilience/resilience/internal/panics"
	"github.com/go-resilience/resilience/internal/settings"
)

// HedgeConfig says when a [Hedger] makes another call. It may be shared.
type HedgeConfig struct {
	// Name appears in errors and events. It may be empty.
	Name string

	// Delay is how long a call may take before another is made beside it. It must be
	// more than 0; the 95th percentile of the latency is usual.
	Delay time.Duration

	// Quantile, in (0, 1), takes the place of Delay once 20 calls have succeeded: at 0.95,
	// the slowest twentieth of the last 1000 calls would be hedged. Zero means that Delay
	// always counts.
	Quantile float64

	// Max is the most calls of fn for each call of Do, the first included. Zero means 2;
	// 1 means no hedging.
	Max int

	// Budget limits the further calls to a fraction of the first ones. A further call is
	// charged whether or not it succeeds, unless a policy further in refuses it. Do not
	// share the Budget of a Retrier around the Hedger, since each call would count
	// twice. Nil means no limit.
	Budget *Budget

	// BudgetFor returns the Budget of a call by its ctx, in place of Budget, as that of a
	// Retrier's [Config] does.
	BudgetFor func(context.Context) *Budget

	// Discard is called with each value that Do does not return, to close a body or to
	// give back a connection. It is called before Do returns, on the goroutine of Do. A
	// panic in it passes through after it was called with the other values.
	//
	// A value that needs Discard often lives no longer than its ctx. If Discard is set,
	// Do does not cancel the ctx of the call that won; it ends with the ctx of Do. So do
	// not call Do with a ctx that lives as long as the program.
	Discard func(value any)
}

// Validate returns an error that names each invalid field, or nil.
func (c HedgeConfig) Validate() error {
	f := invalid.Fields{Type: "retry.HedgeConfig"}
	f.Need(c.Delay > 0, "Delay", c.Delay, "more than 0")
	f.Need(c.Quantile >= 0 && c.Quantile < 1, "Quantile", c.Quantile, "0 (for Delay alone) or less than 1") // false for NaN
	f.Need(c.Max >= 0, "Max", c.Max, "0 (for 2) or more")
	f.Need(c.Budget == nil || c.BudgetFor == nil, "BudgetFor", "a function", "nil where Budget is set: one or the other")
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
	setting   settings.Setting[HedgeConfig]
	observers notify.Observers[Event]
	latencies latencies
	lost      error // a lostError

	firstWon, hedgeWon, failed, hedged, overBudget atomic.Int64
}

// NewHedger returns a Hedger. It panics if cfg is not valid: see
// [HedgeConfig.Validate].
func NewHedger[T any](cfg HedgeConfig) *Hedger[T] {
	h := &Hedger[T]{lost: lostError(cfg.Name)}
	h.setting.Init(cfg, HedgeConfig.withDefaults)
	return h
}

// Name returns the Name of h's HedgeConfig.
func (h *Hedger[T]) Name() string { return h.setting.Load().Name }

// Config returns the present HedgeConfig of h, with its defaults filled in.
func (h *Hedger[T]) Config() HedgeConfig { return h.setting.Config() }

// Update changes the HedgeConfig of h: it calls change with the present one as it was given, in
// which a zero field means its default, validates the
// result and makes it effective. If the result is not valid, Update returns the error of
// Validate and changes nothing.
//
// A call under way ends under the HedgeConfig that it began with, its Budget included. The
// figures and latencies are kept. The Name cannot change. change must not call h.
func (h *Hedger[T]) Update(change func(*HedgeConfig)) error {
	return h.setting.Update(change, (*HedgeConfig).fixed, nil)
}

// Change is Update for a program that does not know the type of the configuration: f gets a
// pointer to it, as Update's change does. If f returns an error, or dry is true, nothing
// changes; dry returns the error that the change would have.
func (h *Hedger[T]) Change(dry bool, f func(cfg any) error) error {
	return h.setting.Change(dry, f, (*HedgeConfig).fixed, nil)
}

// Observe calls f with each event from now on, until stop is called: synchronously, with the
// ctx of Do, and while no lock is held. An [EventHedged] or [EventOverBudget] comes on the
// goroutine of the further call. A panic in f passes on to the caller of Do, as a panic of
// the call does. A second call of stop does nothing.
func (h *Hedger[T]) Observe(f func(context.Context, Event)) (stop func()) {
	return h.observers.Observe(f)
}

// A lostError is the cause of the ctx of a call that has lost the race. It is the name of
// the Hedger.
type lostError string

func (name lostError) Error() string {
	return prefix(string(name)) + "the hedge is over: this call is not needed any more"
}

// HedgeStats is a snapshot of what a [Hedger] has done since it was made.
type HedgeStats struct {
	// Calls of Do that have called fn and returned:
	FirstWon int64 // with the value of the first call of fn
	HedgeWon int64 // with the value of a further call of fn
	Failed   int64 // with an error

	Hedged     int64         // further calls of fn
	OverBudget int64         // further calls of fn that Budget did not allow
	Delay      time.Duration // how long a call may take now before another is made
}

// Stats returns a snapshot.
func (h *Hedger[T]) Stats() HedgeStats {
	return HedgeStats{
		FirstWon:   h.firstWon.Load(),
		HedgeWon:   h.hedgeWon.Load(),
		Failed:     h.failed.Load(),
		Hedged:     h.hedged.Load(),
		OverBudget: h.overBudget.Load(),
		Delay:      h.delay(h.setting.Load()),
	}
}

func (h *Hedger[T]) delay(c *HedgeConfig) time.Duration {
	if c.Quantile > 0 {
		if d, ok := h.latencies.quantile(c.Quantile); ok {
			return d + 1 // a call that takes exactly as long is not slower
		}
	}
	return c.Delay
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
// continues on the goroutine of the caller. The panic of a further call becomes one with an
// error, whose method Stack() []byte has the stack of that call, and which wraps the value of
// the panic if that is an error.
func (h *Hedger[T]) Do(ctx context.Context, fn func(context.Context) (T, error)) (T, error) {
	var zero T
	if ctx.Err() != nil {
		return zero, ended.Error(ctx)
	}
	cfg := h.setting.Load()
	r := &race[T]{Hedger: h, cfg: cfg, ctx: ctx, fn: fn, after: h.delay(cfg), winner: -1}
	defer r.clear()
	var start time.Time
	if cfg.Quantile > 0 {
		start = time.Now()
	}
	r.call(false)
	if cfg.Quantile > 0 && r.tells() {
		h.latencies.observe(time.Since(start))
	}
	r.others.Wait()
	if r.crash != nil {
		r.crash()
	}
	if r.winner < 0 {
		err := join(r.errs)
		h.failed.Add(1)
		r.tellEnd(OutcomeFailed, err)
		return zero, err
	}
	r.discard()
	if r.winner == 0 {
		h.firstWon.Add(1)
		r.tellEnd(OutcomeFirstWon, nil)
	} else {
		h.hedgeWon.Add(1)
		r.tellEnd(OutcomeHedgeWon, nil)
	}
	r.returned = true
	return r.value, nil
}

// A race is one call of Do.
type race[T any] struct {
	*Hedger[T]
	cfg   *HedgeConfig // with its defaults
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

// budget returns the Budget of a call, or nil.
func (c *HedgeConfig) budget(ctx context.Context) *Budget {
	if c.BudgetFor != nil {
		return c.BudgetFor(ctx)
	}
	return c.Budget
}

// call makes the first call, or one beside it: unless the budget does not allow it or the
// race is over.
func (r *race[T]) call(beside bool) {
	budget, epoch := r.cfg.budget(r.ctx), int64(0)
	switch {
	case !beside:
		epoch = budget.earn()
	case r.isOver():
		return
	case budget != nil:
		var ok bool
		if budget, epoch, ok = budget.charge(); !ok {
			r.overBudget.Add(1)
			r.tellOverBudget(budget)
			return
		}
	}
	ctx, i, ok := r.begin()
	if !ok {
		if budget != nil {
			budget.refund(epoch)
		}
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
	if i > 0 && r.observers.Any() {
		r.observers.Tell(r.ctx, Event{Kind: EventHedged, Name: r.cfg.Name, Attempt: i + 1})
	}
	value, err := r.fn(ctx)
	crashed = false
	if budget != nil && behavior.IsRefused(err) { // nothing was sent
		if i == 0 {
			budget.unearn(epoch)
		} else {
			budget.refund(epoch)
		}
	}
	r.end(i, value, err)
}

// isOver reports whether no further call is to begin.
func (r *race[T]) isOver() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.over || r.ctx.Err() != nil
}

// begin returns the ctx and the index of a call that is to be made, and sets the timer for
// the next one. It reports false if the race is over; the first call is always made.
func (r *race[T]) begin() (ctx context.Context, i int, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if i = len(r.cancels); i > 0 {
		if r.over || r.ctx.Err() != nil {
			return nil, 0, false
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
	return ctx, i, true
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
			e, ok := p.(*panics.Error) // of a hedge within this one
			if !ok {
				stack := debug.Stack()
				e = panics.New(fmt.Sprintf("retry: a hedged call panicked: %v\n\n%s", p, stack), p, stack)
			}
			crash = func() { panic(e) }
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.crash == nil {
			r.crash = crash
		}
	}()
	r.call(true)
	crashed = false
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

func (r *race[T]) tellOverBudget(budget *Budget) {
	budget.tellOverBudget(r.ctx)
	if r.observers.Any() {
		r.observers.Tell(r.ctx, Event{Kind: EventOverBudget, Name: r.cfg.Name})
	}
}

// tellEnd tells the observers of the end of Do if there was a further call.
func (r *race[T]) tellEnd(o Outcome, err error) {
	if len(r.cancels) > 1 && r.observers.Any() {
		r.observers.Tell(r.ctx, Event{Kind: EventEnded, Name: r.cfg.Name, Attempts: len(r.cancels), Outcome: o, Err: err})
	}
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

// fixed returns an error if Name has changed.
func (c *HedgeConfig) fixed(next *HedgeConfig) error {
	f := invalid.Fields{Type: "retry.HedgeConfig"}
	f.Same("Name", c.Name, next.Name)
	return f.Err()
}
