package retry_test

import (
	"context"
	"testing"
	"time"

	"github.com/cenkalti/backoff/v4"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/linger"
	"github.com/go-resilience/resilience/retry"
)

func TestNestedRetriersDoNotMultiply(t *testing.T) {
	type key struct{}
	for name, parent := range map[string]context.Context{
		"background":           context.Background(),
		"cancelable":           t.Context(),
		"comparable":           structCtx{t.Context(), 1},
		"panics when compared": sliceCtx{t.Context(), []string{"not comparable"}},
	} {
		t.Run(name, func(t *testing.T) {
			fn, calls := failing(forever, errDown)
			retried := []int{0, 0, 0}
			for layer := range retried {
				inner := onRetry(retry.New(retry.Config{Backoff: retry.Constant(0)}),
					func(context.Context, retry.Event) { retried[layer]++ }).Wrap(fn)
				// A ctx that is derived between two layers still has the mark.
				fn = func(ctx context.Context) error {
					ctx, cancel := context.WithCancel(context.WithValue(ctx, key{}, layer))
					defer cancel()
					return inner(ctx)
				}
			}
			require.NoError(t, retry.New(retry.Config{}).Do(parent, succeed))
			require.NoError(t, retry.New(retry.Config{}).Do(parent, succeed))
			for n := range 3 {
				require.ErrorIs(t, fn(parent), retry.ErrExhausted)
				require.Equal(t, 3*(n+1), *calls)
				require.Equal(t, []int{0, 0, 2 * (n + 1)}, retried, "only the outermost retries")
			}
		})
	}
}

// structCtx and sliceCtx are contexts by value. Comparing two sliceCtx panics.
type structCtx struct {
	context.Context
	_ int
}

type sliceCtx struct {
	context.Context
	_ []string
}

func TestNestedRetrierReturnsErrorUnchanged(t *testing.T) {
	inner := retry.New(retry.Config{})
	outer := retry.New(retry.Config{Backoff: retry.Constant(0)})
	var seen []error
	calls := 0
	err := outer.Do(t.Context(), func(ctx context.Context) error {
		err := inner.Do(ctx, func(context.Context) error {
			calls++
			if calls == 1 {
				return errDown
			}
			return retry.Permanent(errDown)
		})
		seen = append(seen, err)
		return err
	})
	require.Equal(t, 2, calls, "an inner Permanent is permanent")
	require.Equal(t, []error{errDown, retry.Permanent(errDown)}, seen)
	require.Equal(t, errDown, err)
	require.Equal(t, retry.Stats{Nested: 2, Attempts: 2}, inner.Stats())
}

func TestAttemptTimeoutCoversContinuedWork(t *testing.T) {
	for _, continues := range []bool{true, false} {
		ctx, work := linger.Begin(t.Context()) // like a request until its response has been read
		var attempt context.Context
		r := retry.New(retry.Config{AttemptTimeout: time.Minute})
		require.NoError(t, r.Do(ctx, func(ctx context.Context) error {
			attempt = ctx
			if continues {
				work.Continue()
			}
			return nil
		}))
		require.Equal(t, continues, attempt.Err() == nil)
		work.End(nil)
		require.ErrorIs(t, attempt.Err(), context.Canceled)
	}
}

func TestRetrierWithOneAttemptSetsNoMark(t *testing.T) {
	fn, calls := failing(forever, errDown)
	once := retry.New(retry.Config{Attempts: 1})
	inner := retry.New(retry.Config{Attempts: 4, Backoff: retry.Constant(0)})
	err := once.Wrap(func(ctx context.Context) error {
		_, ok := retry.AttemptFrom(ctx)
		require.False(t, ok)
		return inner.Do(ctx, fn)
	})(t.Context())
	require.ErrorIs(t, err, errDown)
	require.Equal(t, 4, *calls)

	// It does not hide the mark of an outer Retrier.
	outer := retry.New(retry.Config{Attempts: 2, Backoff: retry.Constant(0)})
	fn, calls = failing(forever, errDown)
	_ = outer.Wrap(once.Wrap(inner.Wrap(fn)))(t.Context())
	require.Equal(t, 2, *calls)
}

func TestFreshStartsANewOperation(t *testing.T) {
	type key struct{}
	outer := retry.New(retry.Config{Attempts: 2, Backoff: retry.Constant(0)})
	budget := retry.NewBudget(retry.BudgetConfig{Ratio: 10, PerSecond: retry.None})
	inner := retry.New(retry.Config{Attempts: 4, Backoff: retry.Constant(0), Budget: budget})
	innermost := retry.New(retry.Config{Attempts: 8, Backoff: retry.Constant(0)})
	fn, calls := failing(forever, errDown)
	ctx, cancel := context.WithCancel(context.WithValue(t.Context(), key{}, "value"))
	err := outer.Do(ctx, func(ctx context.Context) error {
		ctx = retry.Fresh(ctx)
		_, ok := retry.AttemptFrom(ctx)
		require.False(t, ok)
		require.Equal(t, "value", ctx.Value(key{}))
		return inner.Do(ctx, innermost.Wrap(fn))
	})
	require.ErrorIs(t, err, errDown)
	require.Equal(t, 2*4, *calls)
	require.Equal(t, int64(2*10-2*3), budget.Stats().Left, "two calls with three retries each")

	fresh := retry.Fresh(ctx)
	require.Equal(t, ctx, fresh, "no Retrier retries it")
	cancel()
	require.ErrorIs(t, fresh.Err(), context.Canceled)
}

func TestPermanentSurvivesNestedRetriers(t *testing.T) {
	for _, mark := range []func(error) error{
		retry.Permanent,
		func(err error) error { return retry.Permanent(retry.Permanent(err)) },
		func(err error) error { return backoff.Permanent(err) },
	} {
		fn, calls := failing(forever, mark(errDown))
		for range 4 {
			fn = retry.New(retry.Config{Backoff: retry.Constant(0)}).Wrap(fn)
		}
		require.Equal(t, errDown, fn(t.Context()), "the outermost Retrier removes the mark")
		require.Equal(t, 1, *calls)
	}
}
