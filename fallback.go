package resilience

import (
	"context"
	"errors"
	"reflect"
	"slices"

	"github.com/go-resilience/resilience/internal/ended"
)

// Fallback returns a Middleware that calls fn with the error of a failed call and returns fn's result. If fn
// has provided a result for the caller, fn must return nil. To leave the error unchanged, fn must return
// err. If fn returns a new error, the Middleware joins the new error with err, unless the new error already
// wraps err. If ctx is already done, the Middleware skips the call and calls fn with ctx's error.
//
// Put a Fallback first in a chain, because it handles only the errors of the policies inside it. Fallback
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
			if instead == nil || contains(instead, err) {
				return instead
			}
			return errors.Join(instead, err)
		}
	}
}

// contains reports whether tree is err or wraps err. If err is not comparable, contains compares the contents
// of errors, because errors.Is compares them only with ==. It would never find an err whose type is a slice,
// for example. It would panic for an err that holds a slice in a field of an interface type.
func contains(tree, err error) bool {
	if reflect.ValueOf(err).Comparable() {
		return errors.Is(tree, err)
	}
	if reflect.DeepEqual(tree, err) {
		return true
	}
	switch e := tree.(type) {
	case interface{ Unwrap() error }:
		inner := e.Unwrap()
		return inner != nil && contains(inner, err)
	case interface{ Unwrap() []error }:
		return slices.ContainsFunc(e.Unwrap(), func(part error) bool { return part != nil && contains(part, err) })
	}
	return false
}
