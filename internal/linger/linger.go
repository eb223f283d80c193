// Package linger lets a policy hold a slot or a timeout for longer than the function
// that it wraps. An HTTP response, for example, is still being read after RoundTrip has
// returned, and needs its slot until then.
//
// The code that begins such work, a resiliencehttp.Transport, runs the policies under a
// ctx whose value for [Key] is a [Work]. A policy holds something in one call:
//
//	return linger.WorkOf(ctx).Hold(ctx, fn, giveBack, nil)
//
// Only slots and timeouts are held, and only if the work says so: see [Work.GoOn]. A policy
// judges a call when its function returns. If the work breaks off later, that is one more
// failure: see [Work.OnEnd].
package linger

import (
	"context"
	"sync"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
)

// A Work is what policies are run for. It is safe for concurrent use, and the zero value
// is ready to use. A nil Work ends when its function returns.
type Work struct {
	mu    sync.Mutex
	phase phase
	holds bool // what policies hold is held until the end
	exact bool // see Exact
	ends  []func(error)
	few   [4]func(error) // the memory of ends, mostly
	err   error          // that it ended with
}

type phase int

const (
	inside phase = iota // the functions of the policies run
	goesOn              // the innermost of them has returned nil, and the work goes on
	over
)

// Key is the key of a [*Work] among the values of a ctx.
type Key struct{}

// Begin returns ctx with new work.
func Begin(ctx context.Context) (context.Context, *Work) {
	w := new(Work)
	return context.WithValue(ctx, Key{}, w), w
}

// WorkOf returns the work that a function called under ctx belongs to. It returns nil if
// there is none, or if its innermost function has returned: consider a fallback, which
// begins a call of its own under the same ctx.
func WorkOf(ctx context.Context) *Work {
	w, _ := ctx.Value(Key{}).(*Work)
	if w == nil || !w.is(inside) {
		return nil
	}
	return w
}

// Under reports whether WorkOf may return work. It is in the way of every call, and is inlined.
func Under(ctx context.Context) bool { return ctx.Value(Key{}) != nil }

// Apart returns ctx without its work and its limit. It is for a function that runs beside
// the one that ctx was made for, and may outlast it: what the function holds, it holds until
// it returns.
func Apart(ctx context.Context) context.Context { return apart{ctx} }

type apart struct{ context.Context }

func (a apart) Value(key any) any {
	if key == (Key{}) || key == (limitKey{}) {
		return nil
	}
	return a.Context.Value(key)
}

func (w *Work) is(p phase) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.phase == p
}

// Hold calls fn and returns its error. It has end called exactly once: with the error of the
// work at its end, if fn succeeds and the work goes on; otherwise, when fn returns, with its
// error, or with crashed if fn panics or ends its goroutine. A policy further in that turns
// success into an error has ended the work for all policies outside it.
func (w *Work) Hold(ctx context.Context, fn func(context.Context) error, end func(error), crashed error) error {
	held, err := false, crashed
	defer func() {
		if !held {
			end(err)
		}
	}()
	err = fn(ctx)
	held = err == nil && w != nil && w.atEnd(end, true)
	return err
}

// Release calls f at the end of the work if it goes on, otherwise now. A policy whose function has
// returned nil gives back by f what it holds.
func (w *Work) Release(f func()) {
	if !w.atEnd(func(error) { f() }, true) {
		f()
	}
}

// OnEnd has f called once when the work ends, and reports whether it does. It does not if the
// work is over. A policy calls it after its function has returned nil. The error is nil if the
// work ended well, and otherwise says how it broke off, or wraps [context.Canceled] if the
// caller has left. A deadline or a timeout breaks it off if the caller was waiting for the
// dependency when it passed. The ctx of the policy may have been canceled long before, which
// says nothing: policies cancel a ctx that they derived when they return. Its deadline tells
// whether the end was the caller's.
func (w *Work) OnEnd(f func(error)) bool { return w != nil && w.atEnd(f, false) }

// atEnd has f called when the work ends, and reports whether it does. It does not if the work is
// over, or if ifHeld is true and nothing is held until then.
func (w *Work) atEnd(f func(error), ifHeld bool) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.phase == over || ifHeld && !w.holds || w.exact && w.phase == inside {
		return false
	}
	w.phase = goesOn
	if w.ends == nil {
		w.ends = w.few[:0]
	}
	w.ends = append(w.ends, f)
	return true
}

// Exact is called before the functions run if the work goes on only where the innermost calls GoOn before it returns
// nil. Without it, a call of its own that one of them makes under a policy before that one would be taken for this
// work.
func (w *Work) Exact() { w.exact = true }

// GoOn is called by the innermost function before it returns, if policies are to hold what
// they hold until the work ends.
func (w *Work) GoOn() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.phase != over {
		w.phase, w.holds = goesOn, true
	}
}

// Held reports whether any function is to be called when the work ends.
func (w *Work) Held() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.ends) > 0
}

// End ends the work. A non-nil err says how it broke off. End calls the functions that
// wait for the end, in the order in which the policies returned, all of them even if one
// panics. A second call, perhaps by one of these functions, calls those that are left.
func (w *Work) End(err error) {
	w.mu.Lock()
	if w.phase != over {
		w.phase, w.err = over, err
	}
	if len(w.ends) == 0 {
		w.mu.Unlock()
		return
	}
	end := w.ends[0]
	w.ends = w.ends[1:]
	w.mu.Unlock()
	defer w.End(nil)
	end(w.err)
}

// A Limit is when a timeout ends work that goes on, and the cause that it gives. The
// ctx of the timeout cannot tell: a policy further out may have canceled it.
type Limit struct {
	At    time.Time
	Cause error
}

// LimitOf returns the earliest limit of the timeouts that ctx is under, or nil.
func LimitOf(ctx context.Context) *Limit {
	l, _ := ctx.Value(limitKey{}).(*Limit)
	return l
}

// Timed calls fn with a ctx that ends after d with cause, and returns its error. It
// holds the timeout for work that goes on. late reports whether fn failed and the limit
// had passed; it is this very limit that counts, not another one further up.
func Timed(ctx context.Context, d time.Duration, cause error, fn func(context.Context) error) (late bool, err error) {
	at := time.Now().Add(d)
	timed, cancel := context.WithDeadlineCause(ctx, at, cause)
	work := WorkOf(ctx)
	inner := timed
	if work != nil {
		inner = withLimit(timed, at, cause)
	}
	err = work.Hold(inner, func(ctx context.Context) error {
		err := fn(ctx)
		late = err != nil && ended.By(timed, at, cause)
		return err
	}, func(error) { cancel() }, nil)
	return late, err
}

// withLimit returns ctx with a limit, or as it is if it has an earlier one.
func withLimit(ctx context.Context, at time.Time, cause error) context.Context {
	if l := LimitOf(ctx); l != nil && l.At.Before(at) {
		return ctx
	}
	return context.WithValue(ctx, limitKey{}, &Limit{at, cause})
}

type limitKey struct{}
