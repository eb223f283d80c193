// Package linger lets a policy hold a slot or a time-out for longer than the function
// that it wraps. A response, for example, is still being read, and needs its slot,
// after RoundTrip has returned.
//
// The code that begins such work runs the policies under a ctx whose value for [Key]
// is a [Work]. A policy gives back what it holds like this:
//
//	if work := linger.Of(ctx); work != nil {
//		return work.Hold(ctx, fn, release)
//	}
//	defer release()
//	return fn(ctx)
//
// Only slots and time-outs are held. A policy judges a call when its function returns.
// What breaks off after that is one more failure, and [Work.OnBroken] tells of it.
package linger

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

// A Work is what policies are run for. It is safe for concurrent use. A nil Work ends
// when its function returns.
type Work struct {
	mu     sync.Mutex
	state  state
	ends   []func()
	broken []func(error)
	err    error // that it ended with
}

type state int

const (
	inside state = iota // the functions of the policies run
	goesOn              // the innermost of them has returned, and the work goes on
	over
)

// Key is the key of a [*Work] among the values of a ctx.
type Key struct{}

// Begin returns ctx with new work.
func Begin(ctx context.Context) (context.Context, *Work) {
	Use()
	w := new(Work)
	return context.WithValue(ctx, Key{}, w), w
}

// inUse spares programs without such work the search for it.
var inUse atomic.Bool

// Use is called once before any work is begun other than by Begin.
func Use() { inUse.Store(true) }

// Of returns the work that a policy is about to do under ctx. It returns nil if there
// is none, or if the work no longer depends on what the policy is about to do.
func Of(ctx context.Context) *Work {
	if !inUse.Load() {
		return nil
	}
	return find(ctx)
}

func find(ctx context.Context) *Work {
	w, _ := ctx.Value(Key{}).(*Work)
	if w == nil || !w.is(inside) {
		return nil
	}
	return w
}

func (w *Work) is(s state) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.state == s
}

// Hold calls fn and returns its error. If fn succeeds and the work goes on, release is
// called at the end of the work; otherwise when fn returns or panics. A policy further
// in that turns success into an error has ended the work for all policies outside it.
func (w *Work) Hold(ctx context.Context, fn func(context.Context) error, release func()) error {
	held := false
	defer func() {
		if !held {
			release()
		}
	}()
	err := fn(ctx)
	held = err == nil && w.keep(release)
	return err
}

// keep has release called at the end of the work. It returns false, and release is not
// called, if the work does not go on.
func (w *Work) keep(release func()) bool {
	if w == nil {
		return false
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.state != goesOn {
		return false
	}
	w.ends = append(w.ends, release)
	return true
}

// OnBroken has f called once if the work, which goes on after the function of a policy
// has succeeded, breaks off: with how it did. A cancel by the caller does not break it
// off. A deadline or a time-out does if the caller was waiting for the dependency when
// it passed. The ctx of the policy may long have been canceled by then, which says
// nothing: policies cancel a ctx that they derived when they return. Its deadline tells
// whether the end was the caller's.
func (w *Work) OnBroken(f func(error)) {
	if w == nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.state == goesOn {
		w.broken = append(w.broken, f)
	}
}

// GoOn is called by the innermost function before it returns, if the work goes on
// after that.
func (w *Work) GoOn() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.state = goesOn
}

// Held reports whether anything is to be called when the work ends or breaks off.
func (w *Work) Held() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.ends)+len(w.broken) > 0
}

// End ends the work. An err that is not nil is how it broke off. End gives back what is
// held, in the order in which the policies returned, and then calls the functions of
// OnBroken, all of them even if one panics. A second call, perhaps from one of these
// functions, does what is left of that.
func (w *Work) End(err error) {
	w.mu.Lock()
	if w.state != over {
		w.state, w.err = over, err
	}
	f := w.next()
	w.mu.Unlock()
	if f != nil {
		defer w.End(nil)
		f()
	}
}

// next takes the next function that is to be called at the end; nil if there is none.
// It runs under the lock.
func (w *Work) next() func() {
	if len(w.ends) > 0 {
		f := w.ends[0]
		w.ends = w.ends[1:]
		return f
	}
	if w.err == nil || len(w.broken) == 0 {
		return nil
	}
	f := w.broken[0]
	w.broken = w.broken[1:]
	return func() { f(w.err) }
}

// A Limit is when a time-out ends work that goes on, and the cause that it gives. The
// ctx of the time-out cannot tell: a policy further out may have canceled it by then.
type Limit struct {
	At    time.Time
	Cause error
}

// WithLimit returns ctx with a limit for the work that it belongs to. It returns ctx as
// it is if there is no work, or an earlier limit.
func WithLimit(ctx context.Context, at time.Time, cause error) context.Context {
	if Of(ctx) == nil {
		return ctx
	}
	if l := LimitOf(ctx); l != nil && l.At.Before(at) {
		return ctx
	}
	return &limited{ctx, Limit{at, cause}}
}

// LimitOf returns the limit of ctx, or nil.
func LimitOf(ctx context.Context) *Limit {
	l, _ := ctx.Value(limitKey{}).(*Limit)
	return l
}

type limited struct {
	context.Context
	limit Limit
}

type limitKey struct{}

func (l *limited) Value(key any) any {
	if key == (limitKey{}) {
		return &l.limit
	}
	return l.Context.Value(key)
}
