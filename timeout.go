package resilience

import (
	"context"
	"fmt"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/linger"
)

// TimeoutError reports that a [Timeout] passed before its call had succeeded.
// It is [context.DeadlineExceeded], and unwraps to what the call returned.
type TimeoutError struct {
	Name  string        // of the Timeout; empty if it has none
	After time.Duration // the limit that passed
	Err   error         // what the call returned; nil if that was no more than the cause of its ctx
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

// Unwrap returns the error of the call.
func (e *TimeoutError) Unwrap() error { return e.Err }

// Is reports whether target is [context.DeadlineExceeded].
func (e *TimeoutError) Is(target error) bool { return target == context.DeadlineExceeded }

// Timeout reports true, as [net.Error] has it.
func (e *TimeoutError) Timeout() bool { return true }

// Timeout returns a Middleware that gives each call d to finish: its ctx ends
// after d, with a [*TimeoutError] as its cause.
//
// It waits for the call to return, so the call must heed its ctx: no goroutine is
// left behind. An error that the call returns after the limit has passed is wrapped
// in a *TimeoutError. Success that comes late is success, and the end of the caller's
// own ctx is returned as it is. Within a resiliencehttp.Transport the call ends with
// the body of its response. Zero means no limit; Timeout panics if d is negative.
func Timeout(d time.Duration) Middleware { return NamedTimeout("", d) }

// NamedTimeout is [Timeout] with a name for its errors, which says what timed out.
func NamedTimeout(name string, d time.Duration) Middleware {
	if d < 0 {
		panic(fmt.Errorf("resilience: Timeout is %v: must be 0 (no limit) or more", d))
	}
	return func(next Func) Func {
		if d == 0 {
			return next
		}
		return func(ctx context.Context) error {
			if ctx.Err() != nil {
				return ended.Error(ctx)
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
