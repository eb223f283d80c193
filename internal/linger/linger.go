// Package linger lets a policy hold a slot or a timeout until the work of a call has ended, even if the call's
// function has returned earlier. For example, the body of an HTTP response is read after RoundTrip has returned, and
// the call needs its slot until then.
//
// An adapter that starts such work, such as a resiliencehttp.Transport, runs the policies under a ctx whose value for
// [Key] is a [Work]. A policy calls Hold to hold a resource until the work ends:
//
//	return linger.WorkOf(ctx).Hold(ctx, fn, release, nil)
//
// The work continues after the functions have returned only if the innermost function calls [Work.Continue]. A policy
// records the result of a call when its function returns. If the work fails later, the policy records an additional
// failure: see [Work.OnEnd].
package linger

import (
	"context"
	"sync"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
)

// A Work represents a call whose work may continue after the call's function has returned. A Work is safe for
// concurrent use, and the zero value is ready to use. The work of a nil *Work ends when the function returns.
type Work struct {
	mu     sync.Mutex
	phase  phase
	stream stream         // nil unless the work is a stream
	ends   []func(error)  // the functions to call when the work ends
	few    [6]func(error) // the backing array of ends; the policies of resiliencehttp.NewTransport add five functions
	err    error          // the error that was passed to End
}

// A phase is a state of a Work. A Work enters the phases in order.
type phase int

const (
	inside    phase = iota // the functions of the policies are running
	continues              // the innermost function has called Continue
	over                   // End was called
)

// Key is the key of a [*Work] among the values of a ctx.
type Key struct{}

// A stream is the ctx of a call whose work is a stream. A stream may be open for too long to hold a slot or to be
// limited by a timeout. Policies observe the outcome of the work, but release slots and timeouts when their functions
// return. The functions return when the stream is open, and the server may not have answered by then.
//
// resiliencegrpc implements this interface. It does so with a method of ctx, because resiliencegrpc must not import
// an internal package.
type stream interface {
	// OnAnswer calls f once when the server has answered. f is not called if the stream ends without an answer.
	OnAnswer(f func())
}

// Begin returns ctx with new work. If ctx implements stream, the work is a stream.
func Begin(ctx context.Context) (context.Context, *Work) {
	w := new(Work)
	w.stream, _ = ctx.(stream)
	return context.WithValue(ctx, Key{}, w), w
}

// WorkOf returns the work of the call that ctx belongs to, or nil if ctx has no work. It also returns nil after the
// innermost function has called Continue: a later call under the same ctx, such as a call by a fallback, is a
// separate call.
func WorkOf(ctx context.Context) *Work {
	w, _ := ctx.Value(Key{}).(*Work)
	if w == nil || !w.is(inside) {
		return nil
	}
	return w
}

// Under reports whether WorkOf may return work. Under is short enough to be inlined, because every call uses it.
func Under(ctx context.Context) bool { return ctx.Value(Key{}) != nil }

// Apart returns ctx without its work and its limit. It is for a function that runs in parallel with ctx's call and may
// take longer than the call. Such a function holds a slot until the function itself returns.
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

// Hold calls fn and returns fn's error. It calls end exactly once:
//
//   - If fn succeeds and the work continues, Hold calls end when the work ends, with the work's error. If the work has
//     ended before fn returns, Hold calls end when fn returns.
//   - Otherwise, Hold calls end when fn returns, with fn's error.
//   - If fn panics or exits its goroutine, Hold calls end with crashed.
//
// If an inner policy turns success into an error, the work has ended for all outer policies.
func (w *Work) Hold(ctx context.Context, fn func(context.Context) error, end func(error), crashed error) error {
	held, result := false, crashed
	defer func() {
		if !held {
			end(result)
		}
	}()
	err := fn(ctx)
	if result = err; err == nil {
		held, result = w.hold(end)
	}
	return err
}

// Observe is like [Work.Hold], but if the work is a stream, it calls end when the stream ends. If fn panics or exits
// its goroutine, Observe calls end with nil.
func (w *Work) Observe(ctx context.Context, fn func(context.Context) error, end func(error)) (err error) {
	p, result := inside, error(nil)
	defer func() {
		if p != continues {
			end(result)
		}
	}()
	err = fn(ctx)
	if result = err; err == nil {
		p, result = w.add(end)
	}
	return err
}

// Release calls f when the work ends. If the work does not continue, or if it is a stream, Release calls f
// immediately. A policy calls Release after the policy's function has returned nil.
func (w *Work) Release(f func()) {
	if held, _ := w.hold(func(error) { f() }); !held {
		f()
	}
}

// hold adds f to the functions to call when the work ends, unless the work is a stream. If the work has already ended,
// err is the work's error.
func (w *Work) hold(f func(error)) (held bool, err error) {
	if w.IsStream() {
		return false, nil
	}
	p, err := w.add(f)
	return p == continues, err
}

// IsStream reports whether the work is a stream. The server may not have answered when the functions of the policies
// return.
func (w *Work) IsStream() bool { return w != nil && w.stream != nil }

// OnAnswer calls f once when the server has answered. f may run on any goroutine, even after the work has ended. If
// the stream ends without an answer, f is not called. The work must be a stream. A policy calls OnAnswer after the
// policy's function has returned nil.
func (w *Work) OnAnswer(f func()) { w.stream.OnAnswer(f) }

// OnEnd calls f once when the work ends. If the work has already ended, OnEnd calls f before it returns. If w is nil or
// does not continue, OnEnd returns false and does not call f. A policy calls OnEnd after the policy's function has
// returned nil. If the work ended normally, f receives nil. Otherwise f receives the reason why the work was cut off.
// The reason wraps [context.Canceled] if the caller canceled. The work is also cut off if a deadline or a timeout
// passes while the caller waits for the dependency.
//
// The policy's ctx does not show how the work ended, because each policy that derived a ctx cancels it when the
// policy returns. The deadline of the ctx shows whether the caller's time had run out.
func (w *Work) OnEnd(f func(error)) bool {
	p, err := w.add(f)
	if p == over {
		f(err)
	}
	return p != inside
}

// add adds f to the functions to call when the work ends, if the work continues. It returns the phase and the error of
// the work.
func (w *Work) add(f func(error)) (phase, error) {
	if w == nil {
		return inside, nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.phase == continues {
		if w.ends == nil {
			w.ends = w.few[:0]
		}
		w.ends = append(w.ends, f)
	}
	return w.phase, w.err
}

// Continue makes the work continue after the innermost function has returned. The innermost function calls
// Continue before it returns nil.
func (w *Work) Continue() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.phase == inside {
		w.phase = continues
	}
}

// Held reports whether any function will be called when the work ends.
func (w *Work) Held() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.ends) > 0
}

// End ends the work. A non-nil err is the reason why the work was cut off. End calls the functions that were added by
// OnEnd, in the order in which the policies returned. It calls all of them even if one of them panics. A second call
// to End, perhaps by one of these functions, calls the functions that remain.
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

// A Limit is the deadline of a timeout for work that continues. The ctx of the timeout does not show whether the
// deadline has ended the work, because an outer policy may have canceled this ctx.
type Limit struct {
	At    time.Time // the time at which the timeout ends the work
	Cause error     // the cause of the cancellation at that time
}

// LimitOf returns the earliest limit of all timeouts that apply to ctx, or nil.
func LimitOf(ctx context.Context) *Limit {
	l, _ := ctx.Value(limitKey{}).(*Limit)
	return l
}

// Timed calls fn and returns fn's error. The ctx of fn is canceled after d with the given cause. If the work
// continues after fn has returned, the timeout continues to apply. late is true if fn returned an error after this
// timeout had passed; other timeouts do not matter.
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

// withLimit returns ctx with a limit. If ctx already has an earlier limit, withLimit returns ctx unchanged.
func withLimit(ctx context.Context, at time.Time, cause error) context.Context {
	if l := LimitOf(ctx); l != nil && l.At.Before(at) {
		return ctx
	}
	return context.WithValue(ctx, limitKey{}, &Limit{at, cause})
}

type limitKey struct{}
