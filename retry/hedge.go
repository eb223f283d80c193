package retry

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/invalid"
)

// HedgeConfig says when [Hedge] makes another call. It may be shared.
type HedgeConfig struct {
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
	// charged whether or not they succeed. It should not be the Budget of a
	// Retrier around the Hedge: each call would count twice. Nil means no limit.
	Budget *Budget

	// Discard is called with each value that is not returned, to close a body or
	// give back a connection. It is called before Hedge returns and on its
	// goroutine.
	//
	// A value that needs this often lives no longer than its ctx does. So with
	// Discard, the ctx of the call that won is not canceled when Hedge returns
	// but ends with the ctx given to Hedge, which should not be one that lives as
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

// Hedge calls fn and, if that takes longer than a delay, calls it again beside
// the first: the tail at scale (Dean and Barroso, "The Tail at Scale",
// Communications of the ACM, 2013). The first success is returned, and the
// ctx of the other calls is canceled.
//
// Hedge is for calls that may safely be made twice, also at the same time. The
// first is made on the caller's goroutine, the others each on their own. Hedge
// returns when all of them have, so that fn may use what belongs to the caller;
// fn is to heed its ctx, or nothing is gained.
//
// A failure is not a reason for another call. If all calls that were made have
// failed, their errors are returned, joined if there are several; use a
// [Retrier] around Hedge. A panic in any call, and runtime.Goexit, ends the
// others and goes on in the goroutine of the caller.
//
// Hedge panics if cfg is not valid.
func Hedge[T any](ctx context.Context, cfg HedgeConfig, fn func(context.Context) (T, error)) (T, error) {
	if err := cfg.Validate(); err != nil {
		panic(err)
	}
	var zero T
	if ctx.Err() != nil {
		return zero, ended.Error(ctx)
	}
	if cfg.Max == 0 {
		cfg.Max = 2
	}
	if cfg.Budget != nil {
		cfg.Budget.call()
	}
	h := &hedge[T]{ctx: ctx, cfg: cfg, fn: fn, delay: cfg.Delay, winner: -1}
	if cfg.Quantile > 0 {
		if d, ok := cfg.Latencies.Quantile(cfg.Quantile); ok {
			h.delay = d + 1 // a call that takes just as long is not slower
		}
	}
	defer h.discard()
	var start time.Time
	if cfg.Latencies != nil {
		start = time.Now()
	}
	h.call()
	if cfg.Latencies != nil && h.tells() {
		cfg.Latencies.observe(time.Since(start))
	}
	h.others.Wait()
	if h.crash != nil {
		h.crash()
	}
	if h.winner < 0 {
		return zero, join(h.errs)
	}
	h.returned = true
	return h.value, nil
}

// A hedge is one call of Hedge.
type hedge[T any] struct {
	ctx   context.Context
	cfg   HedgeConfig
	fn    func(context.Context) (T, error)
	delay time.Duration

	others   sync.WaitGroup // a timer that has not fired, or the call that it makes
	returned bool           // the value: it is the caller's now

	mu      sync.Mutex
	timer   *time.Timer
	cancels []context.CancelCauseFunc // of the calls made, in that order
	running int
	over    bool // no other call may begin, and no success counts any more
	winner  int  // the call that returned value; -1: none
	value   T
	lost    []T // by calls that succeeded too late
	errs    []error
	crash   func() // goes on with the panic or the exit of a call
}

// call makes one call, unless it is too late for it.
func (h *hedge[T]) call() {
	ctx, i, ok := h.begin()
	if !ok {
		return
	}
	crashed := true
	defer func() {
		if crashed {
			h.mu.Lock()
			h.finish(-1)
			h.mu.Unlock()
		}
	}()
	value, err := h.fn(ctx)
	crashed = false
	h.end(i, value, err)
}

// begin returns the ctx and the number of a call that is to be made, and sets
// the timer for the one after it.
func (h *hedge[T]) begin() (ctx context.Context, i int, ok bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	i = len(h.cancels)
	if h.over || h.ctx.Err() != nil {
		return nil, 0, false
	}
	if i > 0 && h.cfg.Budget != nil {
		if _, ok := h.cfg.Budget.charge(); !ok {
			return nil, 0, false
		}
	}
	ctx, cancel := context.WithCancelCause(h.ctx)
	h.cancels = append(h.cancels, cancel)
	h.running++
	if len(h.cancels) < h.cfg.Max {
		h.others.Add(1)
		h.timer = time.AfterFunc(h.delay, h.callBeside)
	}
	return ctx, i, true
}

// callBeside makes a call on a goroutine of its own.
func (h *hedge[T]) callBeside() {
	defer h.others.Done()
	crashed := true
	defer func() {
		if !crashed {
			return
		}
		crash := runtime.Goexit
		if p := recover(); p != nil {
			crash = func() { panic(p) }
		}
		h.mu.Lock()
		defer h.mu.Unlock()
		if h.crash == nil {
			h.crash = crash
		}
	}()
	h.call()
	crashed = false
}

// end takes the outcome of call i.
func (h *hedge[T]) end(i int, value T, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.running--
	switch {
	case h.over && err == nil:
		h.lost = append(h.lost, value)
	case h.over:
	case err == nil:
		h.winner, h.value = i, value
		h.finish(i)
	default:
		h.errs = append(h.errs, err)
		if h.running == 0 {
			h.finish(-1)
		}
	}
}

// finish sees to it that no other call begins, and cancels those that run, but
// not the winner's ctx if its value may need that. h.mu is held.
func (h *hedge[T]) finish(winner int) {
	h.over = true
	if h.timer != nil && h.timer.Stop() {
		h.others.Done()
	}
	for i, cancel := range h.cancels {
		if i != winner || h.cfg.Discard == nil {
			cancel(errLost)
		}
	}
}

var errLost = errors.New("retry: the hedge is over: this call is not needed any more")

// tells reports whether the time that the first call took says how long such
// calls take: it succeeded, or was still at it when another did.
func (h *hedge[T]) tells() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.winner >= 0
}

// discard waits for all calls and gives the values that are not returned to
// Discard, however Hedge ends.
func (h *hedge[T]) discard() {
	h.others.Wait()
	if h.cfg.Discard == nil {
		return
	}
	if h.winner >= 0 && !h.returned {
		h.lost = append(h.lost, h.value)
	}
	for _, value := range h.lost {
		h.cfg.Discard(value)
	}
}

func join(errs []error) error {
	if len(errs) == 1 {
		return errs[0]
	}
	return errors.Join(errs...)
}
