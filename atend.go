package resilience

import (
	"context"
	"errors"

	"github.com/go-resilience/resilience/internal/linger"
)

// AtEnd calls next and returns its error, and has f called once, when the work of next
// has really ended. It is for middleware that holds something during a call, or measures
// how long a call takes:
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
// Most work ends when next returns; f then gets the error of next, before AtEnd returns.
// Within a resiliencehttp.Transport, an attempt that succeeds ends when the body of its
// response has been read or closed, or when ctx ends. f then gets nil, or the error with
// which the body broke off: a connection was lost, or a timeout passed while the caller
// waited for the server. It matches [context.Canceled] if the caller has left. The policies of
// this module hold their slots and timeouts in the same way.
//
// If next panics or ends its goroutine, f gets an error that says so, and the panic goes
// on. f must be safe to call on another goroutine, since a ctx may end at any time.
func AtEnd(ctx context.Context, next Func, f func(error)) error {
	return linger.Of(ctx).Hold(ctx, next, f, errCrashed)
}

var errCrashed = errors.New("resilience: the call panicked or ended its goroutine")
