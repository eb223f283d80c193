package resilience_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/resiliencehttp"
	"github.com/go-resilience/resilience/retry"
	"github.com/go-resilience/resilience/throttle"
)

func TestAnswerAtAnyDepth(t *testing.T) {
	declined := errors.New("card declined")
	err := fmt.Errorf("pay: %w", resilience.Answer(declined))

	require.ErrorIs(t, err, declined)
	require.EqualError(t, err, "pay: card declined")
	require.True(t, resilience.Answered(err))
	require.False(t, resilience.Retryable(err))
	require.False(t, resilience.Refused(err))

	require.True(t, resilience.Answered(errors.Join(errors.New("timeout"), err)), "the first part that says something")
	passed := resilience.Timeout(0)(func(context.Context) error { return declined })(t.Context())
	require.False(t, resilience.Answered(errors.Join(passed, declined)))
	require.False(t, resilience.Answered(declined))
	require.NoError(t, resilience.Answer(nil))
	require.False(t, resilience.Answered(nil))
}

func TestRefused(t *testing.T) {
	b := breaker.New(breaker.Config{Name: "users"})
	b.Trip(errors.New("down"), time.Minute)
	refusal := b.Do(t.Context(), func(context.Context) error { return nil })

	require.True(t, resilience.Refused(refusal))
	require.True(t, resilience.Refused(fmt.Errorf("users: %w", refusal)))
	require.False(t, resilience.Retryable(refusal))
	require.Positive(t, resilience.RetryAfter(refusal))
	require.False(t, resilience.Refused(errors.Join(refusal, errors.New("reset by peer"))), "another call was made")
	require.True(t, resilience.Retryable(errors.Join(refusal, errors.New("reset by peer"))))
}

func TestThrottled(t *testing.T) {
	require.True(t, resilience.Throttled(fmt.Errorf("search: %w", &resiliencehttp.StatusError{StatusCode: 429})))
	require.False(t, resilience.Throttled(&resiliencehttp.StatusError{StatusCode: 500}))
	require.False(t, resilience.Throttled(throttle.ErrLimited), "a refusal of this module is not the dependency's")
	require.False(t, resilience.Throttled(nil))
}

// An answer is not retried, whatever the error that it marks reports.
func TestAnswerIsNotRetryable(t *testing.T) {
	for _, err := range []error{
		&resiliencehttp.StatusError{StatusCode: 429},
		&retry.Error{Err: errors.New("reset by peer")},
	} {
		require.True(t, resilience.Retryable(err))
		err = fmt.Errorf("pay: %w", resilience.Answer(err))
		require.True(t, resilience.Answered(err))
		require.False(t, resilience.Retryable(err))
		calls := 0
		r := retry.New(retry.Config{Backoff: retry.Constant(0)})
		require.Equal(t, err, r.Do(t.Context(), func(context.Context) error { calls++; return err }))
		require.Equal(t, 1, calls)
	}
}
