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

// A refusal is what a policy further in returns in the place of a call: an open
// breaker, if it is not retryable; a full bulkhead, if it is.
type refusal struct {
	retryable bool
	after     time.Duration
}

func (refusal) Error() string               { return "refused" }
func (refusal) Refused() bool               { return true }
func (r refusal) Retryable() bool           { return r.retryable }
func (r refusal) RetryAfter() time.Duration { return r.after }

// An answered error is the answer of a dependency that works.
type answered struct{ retryable bool }

func (answered) Error() string     { return "answered" }
func (answered) Answered() bool    { return true }
func (a answered) Retryable() bool { return a.retryable }

var (
	open        = refusal{after: 30 * time.Second}
	full        = refusal{retryable: true}
	notFound    = answered{}
	tooMany     = answered{retryable: true}
	plainAnswer = errPlainAnswer{}
)

// errPlainAnswer does not say whether to retry.
type errPlainAnswer struct{}

func (errPlainAnswer) Error() string  { return "answered" }
func (errPlainAnswer) Answered() bool { return true }

// returning returns a function whose calls return errs in turn, and the last of them
// from then on.
func returning(errs ...error) (fn func(context.Context) error, calls *int) {
	calls = new(int)
	return func(context.Context) error {
		*calls++
		return at(errs, *calls-1)
	}, calls
}

func TestAnswerEndsTheRetrying(t *testing.T) {
	for _, c := range []struct {
		name string
		err  error
		want int // calls
	}{
		{"an answer", plainAnswer, 1},
		{"an answer that says no", notFound, 1},
		{"an answer that is wrapped", fmt.Errorf("users: %w", plainAnswer), 1},
		{"an answer beside a refusal", errors.Join(notFound, full), 1},
		{"an answer that says to retry", tooMany, 3},
		{"an answer beside a failure that says nothing", errors.Join(plainAnswer, errDown), 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			fn, calls := returning(c.err)
			err := retry.New(retry.Config{Backoff: retry.Constant(0)}).Do(t.Context(), fn)
			require.Equal(t, c.want, *calls)
			if c.want == 1 {
				require.Equal(t, c.err, err)
			} else {
				require.ErrorIs(t, err, retry.ErrExhausted)
			}

			fn, calls = returning(errDown, c.err)
			_ = retry.New(retry.Config{
				Backoff: retry.Constant(0),
				If:      func(err error) bool { return behavior.Read(err).Kind == behavior.Failed },
			}).Do(t.Context(), fn)
			require.Equal(t, min(c.want+1, 3), *calls, "If has no say")
		})
	}
}

func TestAnswerComesBackThoughTheCallerHasLeft(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	err := retry.New(retry.Config{}).Do(ctx, func(context.Context) error { cancel(); return notFound })
	require.Equal(t, notFound, err)
}

func TestRefusalIsWaitedOut(t *testing.T) {
	for _, c := range []struct {
		name   string
		cfg    retry.Config
		errs   []error
		within time.Duration // deadline of ctx
		calls  int
		took   time.Duration // at least, and a tenth more at most
		want   error         // in what is returned; nil: success
	}{
		{"full", retry.Config{}, []error{full, nil}, 0, 2, time.Second, nil},
		{"for as long as it says", retry.Config{}, []error{refusal{true, 5 * time.Second}, nil}, 0, 2, 5 * time.Second, nil},
		{"not longer than MaxRetryAfter", retry.Config{MaxRetryAfter: time.Second}, []error{refusal{true, 5 * time.Second}}, 0, 1, 0, retry.ErrExhausted},
		{"not longer than the default", retry.Config{}, []error{refusal{true, 61 * time.Second}}, 0, 1, 0, retry.ErrExhausted},
		{"not past the deadline", retry.Config{}, []error{refusal{true, 5 * time.Second}}, 4 * time.Second, 1, 0, context.DeadlineExceeded},
		{"not more often than Attempts", retry.Config{}, []error{full}, 0, 3, 2 * time.Second, retry.ErrExhausted},
		{"open", retry.Config{}, []error{open}, 0, 1, 0, open},
		{"open, with a limit that is set", retry.Config{MaxRetryAfter: time.Minute}, []error{open}, 0, 1, 0, open},
		{"refused for good", retry.Config{MaxRetryAfter: time.Minute}, []error{refusal{}}, 0, 1, 0, refusal{}},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx := t.Context()
				if c.within > 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, c.within)
					defer cancel()
				}
				c.cfg.Backoff = retry.Constant(time.Second)
				c.cfg.If = func(error) bool { panic("a refusal is not asked about") }
				fn, calls := returning(c.errs...)
				start := time.Now()
				err := retry.New(c.cfg).Do(ctx, fn)
				require.Equal(t, c.calls, *calls)
				require.GreaterOrEqual(t, time.Since(start), c.took)
				require.LessOrEqual(t, time.Since(start), c.took+c.took/10)
				if c.want == nil {
					require.NoError(t, err)
					return
				}
				require.ErrorIs(t, err, c.want)
				require.ErrorIs(t, err, at(c.errs, c.calls-1))
				require.Equal(t, behavior.Refused, behavior.Read(err).Kind)
				if c.want == c.errs[0] {
					require.Equal(t, c.want, err, "it comes back as it is")
				}
			})
		})
	}
}

func TestRefusalAfterAFailureKeepsWhatWentWrong(t *testing.T) {
	fn, _ := returning(errDown, open)
	err := retry.New(retry.Config{Backoff: retry.Constant(0)}).Do(t.Context(), fn)
	var e *retry.Error
	require.ErrorAs(t, err, &e)
	require.Equal(t, 1, e.Attempts)
	require.Equal(t, errDown, e.Err)
	require.Equal(t, open, e.Cause)
	require.ErrorIs(t, err, errDown)
	require.ErrorIs(t, err, open)
	require.NotErrorIs(t, err, retry.ErrExhausted)
	require.Equal(t, behavior.Failed, behavior.Read(err).Kind)
}

func TestErrorSpeaksForAllItsAttempts(t *testing.T) {
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
			require.Regexp(t, "no attempts left: "+regexp.QuoteMeta(c.text)+"$", err.Error())
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

			// With a reason that is a refusal, or the end of ctx.
			fn, _ = returning(append(c.errs, open)...)
			err = retry.New(retry.Config{Attempts: 4, Backoff: retry.Constant(0)}).Do(t.Context(), fn)
			require.Equal(t, c.kind, behavior.Read(err).Kind)
			ctx, cancel := context.WithCancel(t.Context())
			fn, calls := returning(c.errs...)
			err = retry.New(retry.Config{Attempts: 4, Backoff: retry.Constant(0), OnRetry: func(context.Context, retry.Attempt) {
				if *calls == 3 {
					cancel()
				}
			}}).Do(ctx, fn)
			require.ErrorIs(t, err, context.Canceled)
			require.Equal(t, c.kind, behavior.Read(err).Kind)
		})
	}
}

func TestErrorsOfAttemptsNeedNotBeComparable(t *testing.T) {
	gone := uncomparable{"gone"}
	fn, _ := returning(gone, gone, full)
	err := retry.New(retry.Config{Backoff: retry.Constant(0)}).Do(t.Context(), fn)
	require.ErrorContains(t, err, "no attempts left: refused (earlier: uncomparable: [gone])")
	fn, _ = returning(gone, gone, gone)
	err = retry.New(retry.Config{Backoff: retry.Constant(0)}).Do(t.Context(), fn)
	require.ErrorContains(t, err, "no attempts left: uncomparable: [gone]")
}

func TestErrorIsAsRetryableAsItsAttempts(t *testing.T) {
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
		{[]error{errDown, rejected}, true}, // the Reason
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

func TestRefusalsCostNoBudget(t *testing.T) {
	nothing := retry.BudgetConfig{Ratio: -1, PerSecond: -1}
	one := retry.BudgetConfig{Ratio: 1, PerSecond: -1}
	for _, c := range []struct {
		errs   []error
		budget retry.BudgetConfig
		calls  int
		want   retry.BudgetStats
	}{
		{[]error{full, full, full, nil}, nothing, 4, retry.BudgetStats{}},
		{[]error{full, full, full, full}, nothing, 4, retry.BudgetStats{}},
		{[]error{full, full, full, full}, one, 4, retry.BudgetStats{}},
		{[]error{full, full, errDown, errDown}, nothing, 3, retry.BudgetStats{OverBudget: 1}},
		{[]error{full, full, errDown, errDown}, one, 4, retry.BudgetStats{}},
		{[]error{full, errDown, full, errDown}, one, 4, retry.BudgetStats{}},
		{[]error{errDown, full, full, errDown}, one, 4, retry.BudgetStats{}},
		{[]error{errDown, full, full, full}, one, 4, retry.BudgetStats{Left: 1}},
		{[]error{errDown, full, full, nil}, one, 4, retry.BudgetStats{}},
		{[]error{errDown, errDown, full, full}, one, 2, retry.BudgetStats{OverBudget: 1}},
		{[]error{errDown, open}, one, 2, retry.BudgetStats{Left: 1}},
		{[]error{tooMany, errDown}, one, 2, retry.BudgetStats{OverBudget: 1}},
		{[]error{open}, one, 1, retry.BudgetStats{}},
		{[]error{nil}, one, 1, retry.BudgetStats{Left: 1}},
	} {
		t.Run(fmt.Sprint(c.errs), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := retry.NewBudget(c.budget)
				fn, calls := returning(c.errs...)
				_ = retry.New(retry.Config{Attempts: 4, Backoff: retry.Constant(0), Budget: b}).Do(t.Context(), fn)
				require.Equal(t, c.calls, *calls)
				require.Equal(t, c.want, balance(b))
			})
		})
	}
}

func TestNestedRetrierCountsOnlyCallsThatWereMade(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := retry.NewBudget(retry.BudgetConfig{Ratio: 1, PerSecond: -1})
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
		require.Equal(t, int64(2), b.Stats().Left, "a repetition is no new call")
	})
}
