package resilience

import (
	"context"
	"errors"

	"github.com/go-resilience/resilience/internal/ended"
)

// Fallback returns a Middleware that calls fn with each error that comes out of
// what it wraps. What fn returns is returned: nil to answer in the place of
// the failed call, err to leave things as they are, or another error, to which
// err is joined unless it is already in it.
//
// A ctx that has already ended is an error like any other: fn sees it, and ctx,
// and decides; what is wrapped is not called. A fallback is the outermost of a
// chain, so that it answers for every way in which the rest can fail. Fallback
// panics if fn is nil.
func Fallback(fn func(ctx context.Context, err error) error) Middleware {
	if fn == nil {
		panic(errors.New("resilience: Fallback needs a function, not nil"))
	}
	return func(next Func) Func {
		return func(ctx context.Context) error {
			err := ended.Error(ctx)
			if err == nil {
				err = next(ctx)
			}
			if err == nil {
				return nil
			}
			instead := fn(ctx, err)
			if instead == nil || errors.Is(instead, err) {
				return instead
			}
			return errors.Join(instead, err)
		}
	}
}
