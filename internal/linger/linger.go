// Package linger lets a policy hold a slot or a timeout for longer than the function that it wraps. The
// body of an HTTP response, for example, is read after RoundTrip has returned, and needs its slot until
// then.
//
// An adapter that starts such work, as a resiliencehttp.Transport does, runs the policies under a ctx
// whose value for [Key] is a [Work]. A policy holds something in one call:
//
//	return linger.WorkOf(ctx).Hold(ctx, fn, release, nil)
//
// The work continues only if the innermost function calls [Work.Continue]. A policy judges a call when its
// function returns. If the work breaks off later, that is one more failure: see [Work.OnEnd].
package linger

import (
	"context"
	"sync"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
)

// A Work is a call whose work may continue after its function has returned. It is safe for concurrent use,
// and the zero value is ready to use. A nil Work ends when its function returns.
type Work struct {
	mu     sync.Mutex
	phase  phase
	unheld bool           // policies observe the end, but hold nothing until then
	ends   []func(error)  // the functions that wait for the end
	few    [4]func(error) // the backing array of ends, unless more than four wait
	err    error          // the error that End was called with
}

// A phase is a state of a Work. It only ever advances.
type phase int

const (
	inside    phase = iota // the functions of the policies run
	continues              // the innermost function has called Continue
	over                   // End was called
)

// Key is the key of a [*Work] among the values of a ctx.
type Key struct{}

// Begin returns ctx with new work. If ctx has a method UnheldWork() bool that returns true, policies
// observe the end of the work, but release slots and timeouts when their functions return. A method of ctx
// is used because resiliencegrpc, whose streams need this, must not import an internal package.
func Begin(ctx context.Context) (context.Context, *Work) {
	w := new(Work)
	if u, ok := ctx.(interface{ UnheldWork() bool }); ok {
		w.unheld = u.UnheldWork()
	}
	return context.WithValue(ctx, Key{}, w), w
}

// WorkOf returns the work that a function called under ctx belongs to. It returns nil if there is none, or
// if its innermost function has called Continue: a fallback, for example, makes a separate call under the
// same ctx.
func WorkOf(ctx context.Context) *Work {
	w, _ := ctx.Value(Key{}).(*Work)
	if w == nil || !w.is(inside) {
		return nil
	}
	return w
}

// Under reports whether WorkOf may return work. Every call needs it, so it is inlined.
func Under(ctx context.Context) bool { return ctx.Value(Key{}) != nil }

// Apart returns ctx without its work and its limit. It is for a function that runs in parallel with the
// function that ctx belongs to and may outlast it: such a function holds a slot until it returns.
func Apart(ctx context.Context) context.Context { return apart{ctx} }

type apart struct{ context.Context }

// Value hides the work and the limit.
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

// Hold calls fn and returns its error. It calls end exactly once: with the error of the work when the work
// ends, if fn succeeds and the work continues; otherwise when fn returns, with its error, or with crashed
// if fn panics or exits its goroutine. If an inner policy turns success into an error, the work has ended
// for all policies outside it.
func (w *Work) Hold(ctx context.Context, fn func(context.Context) error, end func(error), crashed error) error {
	held, err := false, crashed
	defer func() {
		if !held {
			end(err)
		}
	}()
	err = fn(ctx)
	held = err == nil && w.hold(end)
	return err
}

// Observe is like Hold, but calls end at the end of work even if policies hold nothing until then.
func (w *Work) Observe(ctx context.Context, fn func(context.Context) error, end func()) error {
	ended := true
	defer func() {
		if ended {
			end()
		}
	}()
	err := fn(ctx)
	ended = err != nil || !w.OnEnd(func(error) { end() })
	return err
}

// Release calls f at the end of the work if the work continues, otherwise immediately. A policy whose
// function has returned nil uses it to release what it holds.
func (w *Work) Release(f func()) {
	if !w.hold(func(error) { f() }) {
		f()
	}
}

// hold is like OnEnd, but only for work until whose end policies hold slots and timeouts.
func (w *Work) hold(f func(error)) bool { return w != nil && !w.unheld && w.OnEnd(f) }

// OnEnd calls f once when the work ends. It reports false, and does not call f, if w is nil or does not
// continue. A policy calls OnEnd after its function has returned nil. The error is nil if the work ended
// well; otherwise it says how the work broke off, and wraps [context.Canceled] if the caller canceled. A
// deadline or a timeout breaks the work off if the caller was waiting for the dependency when it passed.
//
// The ctx of the policy says nothing about the end: policies cancel a ctx that they have derived when they
// return. Its deadline tells whether the caller's time was over.
func (w *Work) OnEnd(f func(error)) bool {
	if w == nil {
		return false
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.phase != continues {
		return false
	}
	if w.ends == nil {
		w.ends = w.few[:0]
	}
	w.ends = append(w.ends, f)
	return true
}

// Continue is called by the innermost function before it returns nil if the work continues after that.
func (w *Work) Continue() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.phase == inside {
		w.phase = continues
	}
}

// Held reports whether any function waits for the end of the work.
func (w *Work) Held() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.ends) > 0
}

// End ends the work. A non-nil err says how it broke off. End calls the functions that wait for the end, in
// the order in which the policies returned, and calls all of them even if one panics. A second End, perhaps
// called by one of these functions, calls those that remain.
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

// A Limit is the time at which a timeout ends work that continues, and the cause of that end. The ctx of
// the timeout cannot tell: an outer policy may have canceled it.
type Limit struct {
	At    time.Time
	Cause error
}

// LimitOf returns the earliest limit of the timeouts that ctx is under, or nil.
func LimitOf(ctx context.Context) *Limit {
	l, _ := ctx.Value(limitKey{}).(*Limit)
	return l
}

// Timed calls fn with a ctx that is canceled after d with cause, and returns its error. If the work
// continues, so does the timeout. late reports whether fn failed after this limit had passed; a limit of
// another timeout does not count.
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

// withLimit returns ctx with a limit, or ctx itself if that has an earlier one.
func withLimit(ctx context.Context, at time.Time, cause error) context.Context {
	if l := LimitOf(ctx); l != nil && l.At.Before(at) {
		return ctx
	}
	return context.WithValue(ctx, limitKey{}, &Limit{at, cause})
}

type limitKey struct{}
