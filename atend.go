package resilience

import (
	"context"
	"errors"

	"github.com/go-resilience/resilience/internal/linger"
)

// AtEnd calls next and returns its error, and has f called once, on any goroutine, when the work of
// next has really ended. It is for middleware that holds something, or measures time:
//
//	func Slots(n int) resilience.Middleware {
//		slots := make(chan struct{}, n)
//		return func(next resilience.Func) resilience.Func {
//			return func(ctx context.Context) error {
//				select {
//				case slots <- struct{}{}:
//				case <-ctx.Done():
//					return context.Cause(ctx)
//				}
//				return resilience.AtEnd(ctx, next, func(error) { <-slots })
//			}
//		}
//	}
//
// Most work ends when next returns; f gets its error then, or one that says that next panicked or
// ended its goroutine. Within a resiliencehttp.Transport, a success ends when the body has been read
// or closed, or when ctx ends. f then gets nil, or the error with which the body broke off, which is
// [context.Canceled] if the caller has left.
func AtEnd(ctx context.Context, next Func, f func(error)) error {
	return linger.WorkOf(ctx).Hold(ctx, next, f, errCrashed)
}

var errCrashed = errors.New("resilience: the call panicked or ended its goroutine")
