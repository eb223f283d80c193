package retry_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/retry"
)

// total returns the number of calls to Do that have ended, except for those that lost a hedge.
func total(s retry.Stats) int64 {
	return s.FirstTry + s.Recovered + s.Exhausted + s.Permanent + s.OverBudget + s.Deadline + s.Canceled + s.Nested
}

// The model checks the counters of all other calls.
func TestStatsCountCallsAfterContextIsDone(t *testing.T) {
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	late, cancel := context.WithTimeout(t.Context(), -time.Second)
	defer cancel()
	r := retry.New(retry.Config{})
	require.ErrorIs(t, r.Do(canceled, succeed), context.Canceled)
	require.ErrorIs(t, r.Do(late, succeed), context.DeadlineExceeded)
	require.Equal(t, retry.Stats{Canceled: 1, Deadline: 1}, r.Stats())
}

func TestStatsCountNestedCalls(t *testing.T) {
	outer := retry.New(retry.Config{Backoff: retry.Constant(0)})
	inner := retry.New(retry.Config{})
	fn, _ := failing(2, errDown)
	require.NoError(t, outer.Wrap(inner.Wrap(fn))(t.Context()))
	require.Equal(t, retry.Stats{Recovered: 1, Attempts: 3, Retried: 2}, outer.Stats())
	require.Equal(t, retry.Stats{FirstTry: 1, Nested: 2, Attempts: 3}, inner.Stats())
}

func TestStatsAreExactUnderContention(t *testing.T) {
	const goroutines, each = 64, 500
	r := retry.New(retry.Config{Backoff: retry.Constant(0)})
	var wg sync.WaitGroup
	for range goroutines {
		wg.Go(func() {
			for i := range each {
				fn, _ := failing(i%5, errDown) // 0: first try; 1, 2: recovers; 3, 4: exhausted
				_ = r.Do(context.Background(), fn)
				if i%50 == 0 {
					if s := r.Stats(); total(s) > s.Attempts {
						t.Errorf("%+v", s)
					}
				}
			}
		})
	}
	wg.Wait()
	const fifth = goroutines * each / 5
	require.Equal(t, retry.Stats{
		FirstTry: fifth, Recovered: 2 * fifth, Exhausted: 2 * fifth,
		Attempts: (1 + 2 + 3 + 3 + 3) * fifth, Retried: (1 + 2 + 2 + 2) * fifth,
	}, r.Stats())
}

func TestStatsOmitCallsThatPanic(t *testing.T) {
	broken := onRetry(retry.New(retry.Config{}), func(context.Context, retry.Event) { panic("broken") })
	for name, c := range map[string]struct {
		r  *retry.Retrier
		fn func(context.Context) error
	}{
		"fn":       {retry.New(retry.Config{}), func(context.Context) error { panic("broken") }},
		"observer": {broken, fail},
	} {
		t.Run(name, func(t *testing.T) {
			require.PanicsWithValue(t, "broken", func() { _ = c.r.Do(t.Context(), c.fn) })
			require.Zero(t, total(c.r.Stats()))
		})
	}
	r := retry.New(retry.Config{Backoff: retry.Constant(0)})
	r.Observe(func(_ context.Context, e retry.Event) {
		if e.Kind == retry.EventEnded {
			panic("broken")
		}
	})
	require.PanicsWithValue(t, "broken", func() { _ = r.Do(t.Context(), fail) })
	require.Equal(t, retry.Stats{Attempts: 3, Retried: 2}, r.Stats())
}
