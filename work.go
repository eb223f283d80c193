package resilience

import (
	"context"
	"errors"

	"github.com/go-resilience/resilience/internal/linger"
)

// A Work represents the work of one call. The work may continue after the call's function has returned. For
// example, the body of an HTTP response is read after RoundTrip has returned. Until the work ends, bulkheads
// hold the call's slot, and timeouts still apply. If the work ends with an error, breakers classify the error like
// the error of a call. For a stream of package resiliencegrpc, bulkheads release the slot and timeouts stop when
// the stream is open. A Work is safe for concurrent use.
//
// An adapter, such as an HTTP transport, calls [BeginWork] before it runs the policies. The innermost
// function, which opens the connection, calls Continue:
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

// BeginWork returns a new Work and a ctx that carries it. The work ends when the policies have returned,
// unless Continue was called. Calls under the original ctx are not part of the work.
func BeginWork(ctx context.Context) (context.Context, *Work) {
	ctx, w := linger.Begin(ctx)
	return ctx, (*Work)(w)
}

// WorkOf returns the work of the call that ctx belongs to, or nil if ctx has no work. After Continue was
// called, WorkOf also returns nil, because a later call under the same ctx is a separate call. A policy calls
// OnEnd to be notified when the work ends. OnEnd accepts a nil Work. The function [AtEnd] combines WorkOf and
// OnEnd.
func WorkOf(ctx context.Context) *Work { return (*Work)(linger.WorkOf(ctx)) }

// Continue makes the work continue after the innermost function has returned. The innermost function must
// call Continue before it returns nil.
//
// Only one call can continue a Work. For example, suppose that a first attempt calls Continue and succeeds, that
// middleware turns the success into an error, and that a retrier makes a second attempt. The second attempt is not part
// of the work: when its function returns, bulkheads release the slot, and timeouts cancel the ctx. Therefore, put
// middleware that turns a success into an error outside the retrier, or call BeginWork inside the retrier.
func (w *Work) Continue() { (*linger.Work)(w).Continue() }

// End ends the work. A nil err means that the work ended normally. A non-nil err is the reason why the work
// was cut off. If the caller canceled the work, err must wrap [context.Canceled]. Only the first call to End
// has an effect. End may be called from any goroutine after Continue, even before the policies have returned.
func (w *Work) End(err error) { (*linger.Work)(w).End(err) }

// OnEnd calls f once when the work ends, with the error that was passed to End. f may run on any goroutine.
// If the work has already ended, OnEnd calls f before it returns. If w is nil or the work does not continue,
// OnEnd never calls f and returns false. Otherwise OnEnd returns true. A policy must call OnEnd only after the
// policy's function has returned nil.
func (w *Work) OnEnd(f func(error)) bool { return (*linger.Work)(w).OnEnd(f) }

// AtEnd calls next and returns its error. When the work of next has ended, AtEnd calls f once. f may run on any
// goroutine. Middleware uses AtEnd to release a resource or to measure time:
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
// Usually the work ends when next returns, and f receives the error of next. If next panics or exits its
// goroutine, f receives an error that reports the panic or the exit. If next calls Continue, the work ends
// later, and f receives the error that was passed to [Work.End]. For a stream of package resiliencegrpc, AtEnd
// calls f when next returns.
func AtEnd(ctx context.Context, next Func, f func(error)) error {
	return linger.WorkOf(ctx).Hold(ctx, next, f, errCrashed)
}

var errCrashed = errors.New("resilience: call panicked or exited its goroutine")
