package breaker_test

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/internal/linger"
)

// hang returns when ctx ends, like a client whose server does not answer.
func hang(ctx context.Context) error {
	<-ctx.Done()
	return fmt.Errorf("query: %w", ctx.Err())
}

// hangFor makes a call that hangs until its caller's deadline.
func hangFor(b *breaker.Breaker, d time.Duration) error {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	defer cancel()
	return b.Do(ctx, hang)
}

func TestDeadlineAfterPatienceIsFailure(t *testing.T) {
	const sec = time.Second
	for name, test := range map[string]struct {
		cfg     breaker.Config
		took    time.Duration
		counted bool
	}{
		"a second, by default":          {breaker.Config{}, sec, true},
		"nine tenths of a second":       {breaker.Config{}, sec * 9 / 10, true},
		"less than that":                {breaker.Config{}, sec*9/10 - 1, false},
		"a stranger's millisecond":      {breaker.Config{}, time.Millisecond, false},
		"long":                          {breaker.Config{}, time.Hour, true},
		"SlowAfter":                     {breaker.Config{SlowAfter: 2 * sec}, 2 * sec, true},
		"nine tenths of SlowAfter":      {breaker.Config{SlowAfter: 2 * sec}, 2 * sec * 9 / 10, true},
		"less than that of SlowAfter":   {breaker.Config{SlowAfter: 2 * sec}, 2*sec*9/10 - 1, false},
		"Patience before SlowAfter":     {breaker.Config{SlowAfter: 2 * sec, Patience: sec}, sec, true},
		"Patience":                      {breaker.Config{Patience: 50 * time.Millisecond}, 50 * time.Millisecond, true},
		"less than Patience":            {breaker.Config{Patience: 50 * time.Millisecond}, 50*time.Millisecond - 1, false},
		"never":                         {breaker.Config{Patience: breaker.Unlimited}, time.Hour, false},
		"never, though slow is counted": {breaker.Config{Patience: breaker.Unlimited, SlowAfter: sec}, time.Hour, false},
	} {
		want := breaker.Counts{}
		if test.counted {
			want = breaker.Counts{Failed: 1, ConsecutiveFailures: 1}
		}
		calls := map[string]func(t *testing.T, b *breaker.Breaker){
			"Do": func(t *testing.T, b *breaker.Breaker) {
				require.ErrorIs(t, hangFor(b, test.took), context.DeadlineExceeded)
			},
			"Begin": func(t *testing.T, b *breaker.Breaker) {
				ctx, cancel := context.WithTimeout(t.Context(), test.took)
				defer cancel()
				done, err := b.Begin(ctx)
				require.NoError(t, err)
				done(hang(ctx))
			},
			"with any error": func(t *testing.T, b *breaker.Breaker) {
				ctx, cancel := context.WithTimeout(t.Context(), test.took)
				defer cancel()
				require.Equal(t, errDown, b.Do(ctx, func(ctx context.Context) error { <-ctx.Done(); return errDown }))
			},
			"late, heedless of ctx": func(t *testing.T, b *breaker.Breaker) {
				ctx, cancel := context.WithTimeout(t.Context(), test.took)
				defer cancel()
				require.Equal(t, errDown, b.Do(ctx, taking(2*time.Hour, errDown)))
			},
		}
		for how, call := range calls {
			t.Run(name+", "+how, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					b := breaker.New(test.cfg)
					time.Sleep(time.Minute)
					call(t, b)
					require.Equal(t, want, b.Stats().Window)
				})
			})
		}
	}
}

// Classify judges a deadline like any failure.
func TestClassifyGetsDeadlines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var asked []error
		b := breaker.New(breaker.Config{ConsecutiveFailures: 1, Classify: func(err error) breaker.Verdict {
			asked = append(asked, err)
			return breaker.Ignore
		}})
		err := hangFor(b, time.Second)
		_ = hangFor(b, time.Millisecond)
		require.Equal(t, []error{err}, asked)
		require.Zero(t, b.Stats().Window)
	})
}

// A connection with the deadline of its ctx may return before or after ctx is canceled.
func TestDeadlineCountsFromItsTime(t *testing.T) {
	for range 100 {
		synctest.Test(t, func(t *testing.T) {
			b := breaker.New(breaker.Config{})
			ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
			defer cancel()
			require.Equal(t, errDown, b.Do(ctx, taking(time.Millisecond, errDown)))
			require.Zero(t, b.Stats().Window, "the caller had no patience")
		})
	}
}

// The wall clock is set forward by an hour. The deadline has no monotonic clock reading, because another process has
// sent it.
func TestPatienceIgnoresTheWallClock(t *testing.T) { // not in a bubble, which has no monotonic clock
	b := breaker.New(breaker.Config{ConsecutiveFailures: 1})
	b.StepWallClock(time.Hour)
	ctx, cancel := context.WithDeadline(t.Context(), time.Now().Round(0).Add(5*time.Millisecond))
	defer cancel()
	err := b.Do(ctx, func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() })
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.Equal(t, breaker.Closed, b.State())
}

func TestDistantDeadlineDoesNotOverflow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(breaker.Config{ConsecutiveFailures: 1})
		time.Sleep(time.Hour)
		ctx, cancel := context.WithDeadline(t.Context(), time.Now().AddDate(500, 0, 0))
		defer cancel()
		ctx, work := linger.Begin(ctx)
		require.NoError(t, b.Do(ctx, func(context.Context) error { work.Continue(); return nil }))
		work.End(errDown)
		require.Equal(t, breaker.Open, b.State())
	})
}
