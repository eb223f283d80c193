package resilience

import (
	"context"
	"fmt"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/linger"
)

// A TimeoutError reports that a call did not succeed within the limit of a [Timeout]. It matches
// [context.DeadlineExceeded].
type TimeoutError struct {
	Name  string        // the name that was passed to NamedTimeout, or ""
	After time.Duration // the limit
	Err   error         // the call's own error; nil if the call returned only the cause of its ctx
}

func (e *TimeoutError) Error() string {
	text := fmt.Sprintf("timed out after %v", e.After)
	if e.Name != "" {
		text = e.Name + ": " + text
	}
	if e.Err != nil {
		text += ": " + e.Err.Error()
	}
	return "resilience: " + text
}

// Unwrap returns Err.
func (e *TimeoutError) Unwrap() error { return e.Err }

// Is reports whether target is [context.DeadlineExceeded].
func (e *TimeoutError) Is(target error) bool { return target == context.DeadlineExceeded }

// Timeout returns true.
func (e *TimeoutError) Timeout() bool { return true }

// Timeout returns a Middleware that cancels the ctx of each call after d. The cause of the cancellation is a
// [*TimeoutError]. The Middleware waits until the call returns, so the call must return when its ctx is done.
// If d is zero, there is no limit. Timeout panics if d is negative.
//
// If the call fails after the limit has expired, its error is wrapped in a *TimeoutError. A call that
// succeeds after the limit has expired is still a success. If the caller's own ctx is done before the limit,
// the call's error is returned unchanged.
//
// The ctx is also canceled when the call returns. A call that receives a response from [net/http.Client.Do]
// must therefore read the whole body before it returns. The unread rest of the body is cut off. In a
// resiliencehttp.Transport, the call may return before the body is read, because the limit also covers the
// reading of the body.
func Timeout(d time.Duration) Middleware { return NamedTimeout("", d) }

// NamedTimeout is like [Timeout], but its errors contain name.
func NamedTimeout(name string, d time.Duration) Middleware {
	if d < 0 {
		panic(fmt.Errorf("resilience: Timeout is %v: must be 0 (no limit) or more", d))
	}
	return func(next Func) Func {
		return func(ctx context.Context) error {
			if ctx.Err() != nil {
				return ended.Error(ctx)
			}
			if d == 0 {
				return next(ctx)
			}
			passed := &TimeoutError{Name: name, After: d}
			late, err := linger.Timed(ctx, d, passed, next)
			if !late || err == error(passed) {
				return err
			}
			return &TimeoutError{Name: name, After: d, Err: err}
		}
	}
}
