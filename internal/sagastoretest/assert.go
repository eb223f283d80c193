package sagastoretest

import (
	"errors"
	"fmt"
	"reflect"
	"testing"
	"time"
)

// checks ends a test at the first failed check. It replaces a library, so that the tests of
// a store link no more than the store does.
type checks struct{ t *testing.T }

func (c checks) need(ok bool, words []any, format string, args ...any) {
	c.t.Helper()
	if ok {
		return
	}
	message := fmt.Sprintf(format, args...)
	if len(words) > 0 {
		message += ": " + fmt.Sprint(words...)
	}
	c.t.Fatal(message)
}

func (c checks) True(ok bool, words ...any) {
	c.t.Helper()
	c.need(ok, words, "should be true")
}

func (c checks) False(ok bool, words ...any) {
	c.t.Helper()
	c.need(!ok, words, "should be false")
}

func (c checks) Equal(want, got any, words ...any) {
	c.t.Helper()
	c.need(reflect.DeepEqual(want, got), words, "is %#v, not %#v", got, want)
}

// EqualValues is Equal for numbers of different types.
func (c checks) EqualValues(want, got any, words ...any) {
	c.t.Helper()
	c.need(reflect.ValueOf(want).CanConvert(reflect.TypeOf(got)) &&
		reflect.DeepEqual(reflect.ValueOf(want).Convert(reflect.TypeOf(got)).Interface(), got), words, "is %v, not %v", got, want)
}

func (c checks) Zero(got any, words ...any) {
	c.t.Helper()
	c.need(got == nil || reflect.ValueOf(got).IsZero(), words, "is %v, not zero", got)
}

func (c checks) Empty(got any, words ...any) {
	c.t.Helper()
	c.need(got == nil || reflect.ValueOf(got).Len() == 0, words, "is %v, not empty", got)
}

func (c checks) Len(got any, want int, words ...any) {
	c.t.Helper()
	c.need(reflect.ValueOf(got).Len() == want, words, "has %d elements, not %d: %v", reflect.ValueOf(got).Len(), want, got)
}

func (c checks) NoError(err error, words ...any) {
	c.t.Helper()
	c.need(err == nil, words, "unexpected error: %v", err)
}

func (c checks) Error(err error, words ...any) {
	c.t.Helper()
	c.need(err != nil, words, "an error is missing")
}

func (c checks) ErrorIs(err, target error, words ...any) {
	c.t.Helper()
	c.need(errors.Is(err, target), words, "error is %v, not %v", err, target)
}

func (c checks) NotErrorIs(err, target error, words ...any) {
	c.t.Helper()
	c.need(!errors.Is(err, target), words, "error is %v", err)
}

func (c checks) WithinDuration(want, got time.Time, within time.Duration, words ...any) {
	c.t.Helper()
	c.need(got.Sub(want).Abs() <= within, words, "is %v, not within %v of %v", got, within, want)
}
