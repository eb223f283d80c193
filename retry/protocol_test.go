package retry_test

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/internal/attempt"
	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/retry"
)

// A refusal is an inner policy's error instead of a call: an open breaker's if it is not retryable, a full
// bulkhead's if it is.
type refusal struct {
	retryable bool
	after     time.Duration
}

func (refusal) Error() string               { return "refused" }
func (refusal) Refused() bool               { return true }
func (r refusal) Retryable() bool           { return r.retryable }
func (r refusal) RetryAfter() time.Duration { return r.after }

// An answered error is an answer of a working dependency.
type answered struct{ retryable bool }

func (answered) Error() string     { return "answered" }
func (answered) Answered() bool    { return true }
func (a answered) Retryable() bool { return a.retryable }

var (
	open     = refusal{after: 30 * time.Second}
	full     = refusal{retryable: true}
	notFound = answered{}
	tooMany  = answered{retryable: true}
)

// returning returns a function whose calls return errs in turn, and then the last of them each time.
func returning(errs ...error) (fn func(context.Context) error, calls *int) {
	calls = new(int)
	return func(context.Context) error {
		*calls++
		return at(errs, *calls-1)
	}, calls
}

func TestErrorClassifiesAllAttempts(t *testing.T) {
	const failed, answer, refused = behavior.Failed, behavior.Answered, behavior.Refused
	errOther := errors.New("backend: other")
	for _, c := range []struct {
		errs  []error
		kind  behavior.Kind
		finds []error
		text  string
	}{
		{[]error{full, full, full}, refused, []error{full}, "refused"},
		{[]error{errDown, full, full}, failed, []error{errDown, full}, "refused (earlier: backend: down)"},
		{[]error{full, full, errDown}, failed, []error{errDown}, "backend: down"},
		{[]error{errDown, full, errOther}, failed, []error{errOther}, "backend: other"},
		{[]error{errDown, errOther, full}, failed, []error{errOther, full}, "refused (earlier: backend: other)"},
		{[]error{tooMany, tooMany, tooMany}, answer, []error{tooMany}, "answered"},
		{[]error{tooMany, full, full}, answer, []error{tooMany, full}, "refused (earlier: answered)"},
		{[]error{full, full, tooMany}, answer, []error{tooMany}, "answered"},
		{[]error{errDown, tooMany, full}, failed, []error{errDown, full}, "refused (earlier: backend: down)"},
		{[]error{errDown, full, tooMany}, failed, []error{errDown, tooMany}, "answered (earlier: backend: down)"},
		{[]error{tooMany, errDown, full}, failed, []error{errDown, full}, "refused (earlier: backend: down)"},
	} {
		t.Run(fmt.Sprint(c.errs), func(t *testing.T) {
			fn, _ := returning(c.errs...)
			err := retry.New(retry.Config{Backoff: retry.Constant(0)}).Do(t.Context(), fn)
			require.Regexp(t, "attempts?: "+regexp.QuoteMeta(c.text)+"$", err.Error())
			require.ErrorIs(t, err, retry.ErrExhausted)
			for _, each := range c.finds {
				require.ErrorIs(t, err, each)
			}
			var e *retry.Error
			require.ErrorAs(t, err, &e)
			require.Equal(t, c.errs[2], e.Err)
			require.Equal(t, c.kind == refused, e.Refused())
			require.Equal(t, c.kind == answer, e.Answered())
			for _, err := range []error{err, fmt.Errorf("users: %w", err), errors.Join(err, full)} {
				require.Equal(t, c.kind, behavior.Read(err).Kind)
			}
		})
	}
}

func TestUncomparableErrors(t *testing.T) {
	gone := uncomparable{"gone"}
	fn, _ := returning(gone, gone, full)
	err := retry.New(retry.Config{Backoff: retry.Constant(0)}).Do(t.Context(), fn)
	require.ErrorContains(t, err, "attempts: refused (earlier: uncomparable: [gone])")
	fn, _ = returning(gone, gone, gone)
	err = retry.New(retry.Config{Backoff: retry.Constant(0)}).Do(t.Context(), fn)
	require.ErrorContains(t, err, "attempts: uncomparable: [gone]")
}

func TestErrorRetryable(t *testing.T) {
	rejected := refusal{}
	for _, c := range []struct {
		errs []error
		want bool
	}{
		{[]error{errDown, errDown}, true},
		{[]error{full, full}, true},
		{[]error{tooMany, tooMany}, true},
		{[]error{errDown, open}, true},
		{[]error{tooMany, open}, true},
		{[]error{errDown, rejected}, true}, // the Cause
	} {
		t.Run(fmt.Sprint(c.errs), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				fn, _ := returning(c.errs...)
				err := retry.New(retry.Config{Attempts: 2, MaxRetryAfter: time.Minute}).Do(t.Context(), fn)
				require.ErrorAs(t, err, new(*retry.Error))
				require.Equal(t, c.want, behavior.Read(err).Retryable)
				require.Equal(t, c.want, resilience.Retryable(fmt.Errorf("users: %w", err)))
			})
		})
	}
}

func TestNestedRetrierCreditsFirstAttempts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := retry.NewBudget(retry.BudgetConfig{Ratio: 1, PerSecond: retry.None})
		inner := retry.New(retry.Config{Budget: b})
		under := func(n int, err error) {
			_ = inner.Do(attempt.With(t.Context(), n), func(context.Context) error { return err })
		}
		under(1, full)
		require.Zero(t, b.Stats().Left)
		under(1, errDown)
		under(1, nil)
		require.Equal(t, int64(2), b.Stats().Left)
		under(2, nil)
		require.Equal(t, int64(2), b.Stats().Left, "a retry is no new call")
	})
}
