package storetest

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"testing"
	"time"

	store "github.com/go-resilience/resilience/saga/sagastore"
)

// A suite is a test of a store. The package uses no assertion library, so that the tests of a store need no more
// dependencies than the store. A check that fails ends the test, except in the method check.
type suite struct {
	*testing.T
	ctx   context.Context
	store store.Store
}

// check reports an error unless ok is true. It is for goroutines other than the test's, which must not end the test.
func (s *suite) check(ok bool, format string, args ...any) bool {
	s.Helper()
	if !ok {
		s.Errorf(format, args...)
	}
	return ok
}

// need ends the test unless ok is true. why has a format and its arguments, or is empty.
func (s *suite) need(ok bool, what string, why []any) {
	s.Helper()
	if ok {
		return
	}
	if len(why) > 0 {
		what += ": " + fmt.Sprintf(fmt.Sprint(why[0]), why[1:]...)
	}
	s.Fatal(what)
}

func (s *suite) true(ok bool, why ...any)  { s.Helper(); s.need(ok, "the condition is false", why) }
func (s *suite) false(ok bool, why ...any) { s.Helper(); s.need(!ok, "the condition is true", why) }

func (s *suite) equal(want, got any, why ...any) {
	s.Helper()
	s.need(reflect.DeepEqual(want, got), fmt.Sprintf("got  %+v\nwant %+v", got, want), why)
}

// equal64 is like equal, for an int64.
func (s *suite) equal64(want int, got int64, why ...any) {
	s.Helper()
	s.equal(int64(want), got, why...)
}

func (s *suite) zero(got any, why ...any) {
	s.Helper()
	s.need(reflect.ValueOf(got).IsZero(), fmt.Sprintf("got %+v, want the zero value", got), why)
}

// empty checks that the length of a string or a list is zero.
func (s *suite) empty(got any, why ...any) { s.Helper(); s.len(got, 0, why...) }

func (s *suite) len(got any, want int, why ...any) {
	s.Helper()
	n := reflect.ValueOf(got).Len()
	s.need(n == want, fmt.Sprintf("got %d elements, want %d: %+v", n, want, got), why)
}

func (s *suite) noError(err error, why ...any) {
	s.Helper()
	s.need(err == nil, fmt.Sprintf("error: %v", err), why)
}

func (s *suite) error(err error, why ...any) { s.Helper(); s.need(err != nil, "no error", why) }

func (s *suite) errorIs(err, want error, why ...any) {
	s.Helper()
	s.need(errors.Is(err, want), fmt.Sprintf("error: %v, want one that matches: %v", err, want), why)
}

func (s *suite) notErrorIs(err, other error, why ...any) {
	s.Helper()
	s.need(!errors.Is(err, other), fmt.Sprintf("error: %v, which matches: %v", err, other), why)
}

func (s *suite) withinDuration(want, got time.Time, by time.Duration, why ...any) {
	s.Helper()
	s.need(got.Sub(want).Abs() <= by, fmt.Sprintf("got %v, want %v up to %v", got, want, by), why)
}
