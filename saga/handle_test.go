package saga_test

import (
	"bytes"
	"context"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga"
)

// A plainEngine has no transactions.
type plainEngine struct{ saga.Engine }

func TestHandleKnowsItsVersions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v1, v2, other := sequence(step("flight")), sequence(step("train")), sequence(step("flight"))
		v2.Version, other.Name = 2, "other"
		r, _ := begin(t, saga.NewMemory(), saga.RunnerConfig{}, v1, v2, other)
		_, err := saga.Register(r, v1).Start(t.Context(), "one", trip{})
		require.NoError(t, err)
		trips := saga.Register(r, v2, v1)
		_, err = trips.Start(t.Context(), "two", trip{})
		require.NoError(t, err)
		for id, want := range map[string]string{"one": "do flight", "two": "do train"} {
			s, err := trips.Result(t.Context(), id)
			require.NoError(t, err)
			require.Equal(t, []string{want}, s.Calls)
		}
		_, _, err = saga.Register(r, v2).Get(t.Context(), "one")
		require.ErrorIs(t, err, saga.ErrNotRegistered)
		_, _, err = trips.Get(t.Context(), "none")
		require.ErrorIs(t, err, saga.ErrNotFound)
		_, err = saga.Register(r, other).Result(t.Context(), "one")
		require.ErrorIs(t, err, saga.ErrNotRegistered)
		require.ErrorContains(t, err, `"one" is of trip version 1, which the handle of other lacks`)
		require.ErrorIs(t, saga.Register(r, other).Cancel(t.Context(), "one", ""), saga.ErrNotRegistered)
		require.ErrorIs(t, trips.Cancel(t.Context(), "none", ""), saga.ErrNotFound)
		require.PanicsWithError(t, `saga: older definition is one of "other", not of "trip"`,
			func() { saga.Register(r, v2, other) })
		require.PanicsWithError(t, "saga: trip version 1 is registered already",
			func() { saga.Register(r, sequence(step("x"))) })
	})
}

func TestHandleWithoutTransactions(t *testing.T) {
	sg := sequence(awaits("paid"))
	trips := saga.Register(plainEngine{saga.NewRunner(saga.NewMemory(), saga.RunnerConfig{})}, sg)
	require.ErrorIs(t, trips.StartTx(t.Context(), nil, "trip-1", trip{}), saga.ErrNoTx)
	require.ErrorIs(t, trips.SignalTx(t.Context(), nil, "trip-1", "paid", nil), saga.ErrNoTx)
}

// An attempt without a Timeout ends after 1 minute, with Run as with a Runner.
func TestAttemptHasATimeout(t *testing.T) {
	for timeout, want := range map[time.Duration]time.Duration{0: time.Minute, time.Hour: time.Hour, saga.Unlimited: 0} {
		synctest.Test(t, func(t *testing.T) {
			var left time.Duration
			st := step("flight")
			st.Timeout = timeout
			st.Do = func(ctx context.Context, _ *trip) error {
				left = 0
				if at, ok := ctx.Deadline(); ok {
					left = time.Until(at)
				}
				return nil
			}
			sg := sequence(st)
			require.NoError(t, saga.Run(t.Context(), sg, &trip{}))
			require.Equal(t, want, left)
			left = -1
			r, _ := begin(t, saga.NewMemory(), saga.RunnerConfig{}, sg)
			mustStart(t, r, sg)
			requireCompleted(t, r, "trip-1")
			require.Equal(t, want, left)
		})
	}
}

func TestRunnerWarnsWhileUnobserved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var logged bytes.Buffer
		before := slog.Default()
		slog.SetDefault(slog.New(slog.NewTextHandler(&logged, nil)))
		defer slog.SetDefault(before)
		pivot := failing("charge", saga.Permanent(errDeclined))
		pivot.Pivot, pivot.Undo = true, nil
		sg := sequence(pivot)
		r, _ := begin(t, saga.NewMemory(), saga.RunnerConfig{}, sg)
		trips := saga.Register(r, sg)
		stop := r.Observe(silent)
		for _, id := range []string{"observed", "unobserved"} {
			_, err := trips.Start(t.Context(), id, trip{})
			require.NoError(t, err)
			_, err = trips.Result(t.Context(), id)
			require.ErrorIs(t, err, saga.ErrStuck)
			synctest.Wait()
			stop()
		}
		require.Contains(t, logged.String(), "id=unobserved")
		require.NotContains(t, logged.String(), "id=observed")
	})
}
