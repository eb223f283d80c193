package resilience

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/linger"
)

// A TimeoutError reports that a [Timeout] passed before its call had succeeded.
type TimeoutError struct {
	Name  string        // of the Timeout; empty if it has none
	After time.Duration // the limit that passed
	Err   error         // of the call; nil if it returned the cause of its ctx
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

// Timeout returns true.
func (e *TimeoutError) Timeout() bool { return true }

// Timeout returns a Middleware that ends the ctx of each call after d, with a [*TimeoutError] as its
// cause. Zero means no limit; Timeout panics if d is negative. A name says in errors what timed out.
//
// It waits for the call to return, so the call must heed its ctx. An error that the call returns
// after the limit is wrapped in a *TimeoutError; a late success is a success, and the end of the
// caller's ctx is returned as it is. Within a resiliencehttp.Transport the limit covers the body.
func Timeout(d time.Duration, name ...string) Middleware {
	if d < 0 {
		panic(fmt.Errorf("resilience: Timeout is %v: must be 0 (no limit) or more", d))
	}
	label := strings.Join(name, " ")
	return func(next Func) Func {
		return func(ctx context.Context) error {
			if ctx.Err() != nil {
				return ended.Error(ctx)
			}
			if d == 0 {
				return next(ctx)
			}
			passed := &TimeoutError{Name: label, After: d}
			late, err := linger.Timed(ctx, d, passed, next)
			if !late || err == error(passed) {
				return err
			}
			return &TimeoutError{Name: label, After: d, Err: err}
		}
	}
}
