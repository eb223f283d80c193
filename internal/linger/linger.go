// Package linger lets what a policy holds for a call outlast the function that it
// wraps, where the work goes on after that: a response is read, and its slot
// needed, when RoundTrip has long returned.
//
// Who begins such work runs the policies under a ctx that has a [Work] for [Key].
// A policy that holds something gives it back like this:
//
//	return linger.Of(ctx).Do(ctx, fn, func(error) { release() })
//
// It is released when fn returns, as ever, unless fn succeeds and the work goes on.
package linger

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

// Work is what policies are run for. It is safe for concurrent use. A nil Work is
// over when its function returns, as are most.
type Work struct {
	mu    sync.Mutex
	state state
	ends  []func(error)
	err   error // that it ended with
}

type state int

const (
	inside state = iota // the functions of the policies
	goesOn              // after the innermost of them has returned
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

// Use is to be called once before any work is begun other than by Begin.
func Use() { inUse.Store(true) }

// Of returns the work that a policy is about to do under ctx: nil if there is none,
// or if it does not depend on what the policy is about to do.
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

// GoOn is called by the innermost function before it returns, if the work goes on
// after that.
func (w *Work) GoOn() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.state = goesOn
}

func (w *Work) is(s state) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.state == s
}

// Do calls fn, and release when it is over: at the end of the work, with the error
// that this ended with, if fn succeeds and the work goes on; and else, with nil, when
// fn returns or panics. A policy further in that makes an error of success has done
// with the work, whatever becomes of it.
func (w *Work) Do(ctx context.Context, fn func(context.Context) error, release func(error)) error {
	held := false
	defer func() {
		if !held {
			release(nil)
		}
	}()
	err := fn(ctx)
	held = err == nil && w.AtEnd(release)
	return err
}

// AtEnd has f called at the end of the work, with the error that it ended with. It
// returns false, and f is not called, if the work does not go on.
func (w *Work) AtEnd(f func(error)) bool {
	if w == nil {
		return false
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.state != goesOn {
		return false
	}
	w.ends = append(w.ends, f)
	return true
}

// Held reports whether anything is to be called at the end of the work.
func (w *Work) Held() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.ends) > 0
}

// End ends the work: it calls what is to be called then, in the order in which the
// policies returned, all of it even if there is a panic. Who ends it again, perhaps
// from within, helps to call what is left.
func (w *Work) End(err error) {
	w.mu.Lock()
	if w.state != over {
		w.state, w.err = over, err
	}
	if len(w.ends) == 0 {
		w.mu.Unlock()
		return
	}
	f := w.ends[0]
	w.ends = w.ends[1:]
	w.mu.Unlock()
	defer w.End(nil)
	f(w.err)
}

// A Limit is when a time-out ends work that goes on, and the cause that it gives. The
// ctx of a time-out does not tell: whoever is between may have canceled it by then.
type Limit struct {
	At    time.Time
	Cause error
}

// WithLimit returns ctx with a limit for the work that it belongs to, unless there is
// none, or an earlier limit.
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
