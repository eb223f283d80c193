package resilience

import (
	"context"
	"errors"

	"github.com/go-resilience/resilience/internal/linger"
)

// A Work is a call whose work may continue after its function has returned, as the body of an HTTP response
// is read after RoundTrip. Until the work ends, bulkheads keep its slot and timeouts apply; if it ends with
// an error, breakers count a failure. A Work is safe for concurrent use.
//
// An adapter begins the work, and the function that has the connection continues it:
//
//	ctx, work := resilience.BeginWork(ctx)
//	err := policies(func(ctx context.Context) error {
//		stream, err = open(ctx)
//		if err == nil {
//			work.Continue()
//			stream.onClose = work.End
//		}
//		return err
//	})(ctx)
//	if err != nil {
//		work.End(nil)
//	}
type Work linger.Work

// BeginWork returns a ctx with new work. The work ends when the policies have returned, unless Continue is
// called. Other calls that are made under ctx do not become part of it.
func BeginWork(ctx context.Context) (context.Context, *Work) {
	ctx, w := linger.Begin(ctx)
	return ctx, (*Work)(w)
}

// WorkOf returns the work that a function called under ctx belongs to, or nil. It also returns nil once
// Continue was called, because a later call under the same ctx is a separate one. Policies use WorkOf to
// learn of the end, with OnEnd; [AtEnd] is simpler.
func WorkOf(ctx context.Context) *Work { return (*Work)(linger.WorkOf(ctx)) }

// Continue says that the work continues after its function has returned. The innermost function calls it
// before it returns nil.
func (w *Work) Continue() { (*linger.Work)(w).Continue() }

// End ends the work. err is nil if it ended well; otherwise it says how it broke off, and wraps
// [context.Canceled] if the caller left. Only the first call has an effect.
func (w *Work) End(err error) { (*linger.Work)(w).End(err) }

// OnEnd calls f once when the work ends, with the error passed to End, on any goroutine. It reports false,
// and does not call f, if w is nil or does not continue. A policy calls it after its function has returned
// nil.
func (w *Work) OnEnd(f func(error)) bool { return (*linger.Work)(w).OnEnd(f) }

// AtEnd calls next and returns its error, and calls f once when the work of next has really ended, on any
// goroutine. It is for middleware that holds something or measures time:
//
//	func Slots(n int) resilience.Middleware {
//		slots := make(chan struct{}, n)
//		return func(next resilience.Func) resilience.Func {
//			return func(ctx context.Context) error {
//				select {
//				case slots <- struct{}{}:
//				case <-ctx.Done():
//					return resilience.ContextErr(ctx)
//				}
//				return resilience.AtEnd(ctx, next, func(error) { <-slots })
//			}
//		}
//	}
//
// Most work ends when next returns, and f gets its error. If next panics or exits its goroutine, f gets an
// error that says so. Work that continues ends later: see [Work].
func AtEnd(ctx context.Context, next Func, f func(error)) error {
	return linger.WorkOf(ctx).Hold(ctx, next, f, errCrashed)
}

var errCrashed = errors.New("resilience: the call panicked or exited its goroutine")
