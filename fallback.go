package resilience

import (
	"context"
	"errors"
	"reflect"
	"slices"

	"github.com/go-resilience/resilience/internal/ended"
)

// Fallback returns a Middleware that calls fn with the error of a failed call and returns what fn does:
// nil if fn has provided an answer, err to leave the error unchanged, or another error, which is joined
// with err unless it already wraps it. If ctx has ended, fn is called in place of the call. Put a
// Fallback first in a chain. Fallback panics if fn is nil.
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

// contains reports whether err is tree or an error that tree wraps. It compares errors that are not comparable
// by their contents: errors.Is does not find an error whose type is a slice, for example, and panics if a
// comparable type holds such a value.
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
