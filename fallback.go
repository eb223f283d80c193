package resilience

import (
	"context"
	"errors"
	"reflect"
	"slices"

	"github.com/go-resilience/resilience/internal/ended"
)

// Fallback returns a Middleware that calls fn with the error of a failed call, or with the end of
// ctx in place of a call, and returns the result of fn: nil if fn has answered, err to leave the
// error as it is, or another error, to which err is joined unless it wraps err already. It is first
// in a chain, to answer whenever the rest fails. Fallback panics if fn is nil.
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

// contains reports whether err is tree or an error that tree wraps. errors.Is does not
// find an error whose type is not comparable (such as a slice), and panics on a comparable
// type that holds such a value: contains compares these errors by their contents.
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
