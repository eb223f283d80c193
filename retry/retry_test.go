package retry_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/retry"
)

var errDown = errors.New("backend: down")

// failing returns a function that fails n times with err before it succeeds, and
// the number of its calls.
func failing(n int, err error) (fn func(context.Context) error, calls *int) {
	calls = new(int)
	return func(context.Context) error {
		*calls++
		if *calls <= n {
			return err
		}
		return nil
	}, calls
}

func TestRetrierCallsAgainUntilSuccess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fn, calls := failing(2, errDown)
		r := retry.New(retry.Config{Backoff: retry.Delays(time.Second, 3*time.Second)})
		start := time.Now()
		require.NoError(t, r.Do(t.Context(), fn))
		require.Equal(t, 3, *calls)
		require.Equal(t, 4*time.Second, time.Since(start))
	})
}

func TestRetrierReturnsLastErrorAndReason(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fn, calls := failing(9, errDown)
		r := retry.New(retry.Config{Name: "users", Backoff: retry.Constant(600 * time.Millisecond)})
		err := r.Do(t.Context(), fn)
		require.Equal(t, 3, *calls)
		require.ErrorIs(t, err, errDown)
		require.ErrorIs(t, err, retry.ErrExhausted)
		require.EqualError(t, err, "retry: users: gave up after 3 attempts in 1.2s: no attempts left: backend: down")
	})
}

func TestNestedRetriersDoNotMultiply(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fn, calls := failing(99, errDown)
		for range 3 {
			fn = retry.New(retry.Config{}).Wrap(fn)
		}
		require.ErrorIs(t, fn(t.Context()), errDown)
		require.Equal(t, 3, *calls)
	})
}
