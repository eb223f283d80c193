package breaker_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/breaker"
)

// throttled is an error with a RetryAfter.
type throttled time.Duration

func (e throttled) Error() string             { return "throttled" }
func (e throttled) RetryAfter() time.Duration { return time.Duration(e) }

type refused bool

func (e refused) Error() string { return "refused" }
func (e refused) Refused() bool { return bool(e) }

type answered bool

func (e answered) Error() string  { return "not found" }
func (e answered) Answered() bool { return bool(e) }

// anOpenError is another breaker's refusal.
var anOpenError = &breaker.OpenError{State: breaker.Open, Until: time.Now().Add(time.Hour)}

func TestDefaultClassify(t *testing.T) {
	for _, test := range []struct {
		err  error
		want breaker.Verdict
	}{
		{nil, breaker.Success},
		{errDown, breaker.Failure},
		{context.Canceled, breaker.Failure},
		{context.DeadlineExceeded, breaker.Failure},
		{answered(true), breaker.Success},
		{answered(false), breaker.Failure},
		{refused(true), breaker.Ignore},
		{refused(false), breaker.Failure},
		{fmt.Errorf("get: %w", anOpenError), breaker.Ignore},
	} {
		require.Equal(t, test.want, breaker.DefaultClassify(test.err), "%v", test.err)
	}
	require.Zero(t, breaker.Failure)
}

func returning(err error) func(context.Context) error {
	return func(context.Context) error { return err }
}

// An answer is a success and a refusal is ignored; Classify is not called for them.
func TestOutcomeOfError(t *testing.T) {
	canceled := func(err error) func(context.Context) error {
		return func(ctx context.Context) error { ctx.Value(cancelKey{}).(context.CancelFunc)(); return err }
	}
	success := breaker.Counts{Succeeded: 1}
	failure := breaker.Counts{Failed: 1, ConsecutiveFailures: 1}
	ignored := breaker.Counts{}
	for name, test := range map[string]struct {
		fn    func(context.Context) error
		want  breaker.Counts
		asked bool // Classify
	}{
		"done":                        {ok, success, false},
		"answered":                    {returning(answered(true)), success, false},
		"refused":                     {returning(anOpenError), ignored, false},
		"failed":                      {down, failure, true},
		"not retryable":               {returning(final{}), failure, true},
		"canceled":                    {canceled(context.Canceled), ignored, false},
		"canceled, with any error":    {canceled(errDown), ignored, false},
		"canceled, and done":          {canceled(nil), success, false},
		"canceled, and answered":      {canceled(answered(true)), success, false},
		"canceled, and refused":       {canceled(anOpenError), ignored, false},
		"canceled further in":         {returning(context.Canceled), failure, true},
		"a deadline passed within it": {returning(context.DeadlineExceeded), failure, true},
	} {
		t.Run(name, func(t *testing.T) {
			asked := false
			b := breaker.New(breaker.Config{ConsecutiveFailures: 2, Classify: func(error) breaker.Verdict {
				asked = true
				return breaker.Failure
			}})
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			ctx = context.WithValue(ctx, cancelKey{}, cancel)
			_ = b.Do(ctx, test.fn)
			require.Equal(t, test.want, b.Stats().Window)
			require.Equal(t, test.asked, asked, "Classify was asked")
			require.Equal(t, breaker.Closed, b.State())
		})
	}
}

type cancelKey struct{}

type final struct{}

func (final) Error() string   { return "final" }
func (final) Retryable() bool { return false }

func TestBreakerClassify(t *testing.T) {
	errMissing := errors.New("missing")
	b := breaker.New(breaker.Config{ConsecutiveFailures: 2, Classify: func(err error) breaker.Verdict {
		switch err {
		case errMissing:
			return breaker.Success
		case errDown:
			return breaker.Failure
		}
		return breaker.Ignore
	}})
	do(b, down)
	require.Equal(t, errMissing, do(b, returning(errMissing)), "the error comes back all the same")
	do(b, down)
	do(b, returning(context.Canceled))
	require.Equal(t, breaker.Closed, b.State())
	require.Equal(t, breaker.Counts{Succeeded: 1, Failed: 2, ConsecutiveFailures: 1}, b.Stats().Window)
	do(b, down)
	require.Equal(t, breaker.Open, b.State())
}

func TestRetryAfterSetsOpenTime(t *testing.T) {
	const sec = time.Second
	for name, test := range map[string]struct {
		cfg  breaker.Config
		err  error
		want time.Duration
	}{
		"less than OpenFor":     {breaker.Config{}, throttled(sec), sec},
		"ten nanoseconds":       {breaker.Config{}, throttled(10), 10},
		"as long as OpenFor":    {breaker.Config{}, throttled(30 * sec), 30 * sec},
		"at most OpenFor":       {breaker.Config{}, throttled(31 * sec), 30 * sec},
		"at most MaxOpenFor":    {breaker.Config{MaxOpenFor: 40 * sec}, throttled(time.Hour), 40 * sec},
		"at most MaxRetryAfter": {breaker.Config{MaxRetryAfter: time.Hour}, throttled(1<<63 - 1), time.Hour},
		"a lower MaxRetryAfter": {breaker.Config{MaxRetryAfter: 2 * sec}, throttled(3 * sec), 2 * sec},
		"wrapped":               {breaker.Config{}, fmt.Errorf("get: %w", throttled(sec)), sec},
		"not that of a refusal": {breaker.Config{}, errors.Join(anOpenError, throttled(sec)), sec},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var seen changes
				test.cfg.ConsecutiveFailures = 1
				b := watched(&seen, test.cfg)
				require.Equal(t, test.err, do(b, returning(test.err)))
				require.Equal(t, test.want, seen.all[0].OpenFor)
				require.Equal(t, test.want, b.Stats().OpenLeft)
				refusal := requireRefused(t, do(b, ok), breaker.Open)
				require.Equal(t, time.Now().Add(test.want), refusal.Until)
				time.Sleep(test.want - 1)
				requireRefused(t, do(b, ok), breaker.Open)
				time.Sleep(time.Nanosecond)
				require.NoError(t, do(b, ok), "it is well: calls pass")
				require.Equal(t, breaker.Closed, b.State())
			})
		})
	}
}

// RetryAfter sets how long the breaker opens, not whether.
func TestRetryAfterAloneOpensNothing(t *testing.T) {
	b := breaker.New(breaker.Config{FailureRate: 0.5, ConsecutiveFailures: 5})
	for range 20 {
		for range 99 {
			require.NoError(t, do(b, ok))
		}
		do(b, returning(throttled(5*time.Second)))
	}
	require.Equal(t, breaker.Closed, b.State())
}

// An API whose every answer has a RetryAfter gets ConsecutiveFailures requests, and then none for that time.
func TestRetryAfterHoldsForProbes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(breaker.Config{ConsecutiveFailures: 5})
		var sent []time.Duration
		began := time.Now()
		for time.Since(began) < 12*time.Second {
			do(b, func(context.Context) error { sent = append(sent, time.Since(began)); return throttled(5 * time.Second) })
			time.Sleep(100 * time.Millisecond)
		}
		require.Len(t, sent, 5+2)
		require.Equal(t, sent[4]+5*time.Second, sent[5])
		require.Equal(t, sent[5]+5*time.Second, sent[6])
	})
}

// Classify is called for answers that shed load, and for no other answer.
func TestClassifyGetsThrottledAnswers(t *testing.T) {
	var asked []error
	b := breaker.New(breaker.Config{ConsecutiveFailures: 1, Classify: func(err error) breaker.Verdict {
		asked = append(asked, err)
		return breaker.Failure
	}})
	do(b, returning(answered(true)))
	require.Empty(t, asked)
	do(b, returning(shed{}))
	require.Equal(t, []error{shed{}}, asked)
	require.Equal(t, breaker.Open, b.State())

	b = breaker.New(breaker.Config{ConsecutiveFailures: 1})
	do(b, returning(shed{}))
	require.Equal(t, breaker.Closed, b.State(), "by default it is an answer like any other")
}

// shed is an answer that sheds load, such as 429.
type shed struct{}

func (shed) Error() string   { return "too many requests" }
func (shed) Answered() bool  { return true }
func (shed) Throttled() bool { return true }

// A value that is none of the three verdicts is a failure, and leaves no lock held.
func TestUnknownVerdictIsFailure(t *testing.T) {
	for _, unknown := range []breaker.Verdict{breaker.Failure - 1, breaker.Ignore + 1, breaker.Ignore + 2} {
		classify := func(error) breaker.Verdict { return unknown }
		b := breaker.New(breaker.Config{ConsecutiveFailures: 2, Classify: classify})
		for range 2 {
			require.ErrorIs(t, b.Do(t.Context(), down), errDown)
		}
		require.Equal(t, breaker.Open, b.State())
		require.EqualValues(t, 2, b.Stats().Failed)
	}
}
