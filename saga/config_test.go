package saga_test

import (
	"context"
	"math"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga"
	store "github.com/go-resilience/resilience/saga/sagastore"
)

func TestConfigDefaults(t *testing.T) {
	const month = 30 * 24 * time.Hour
	r := saga.NewRunner(saga.NewMemory(), saga.RunnerConfig{Name: "worker", Concurrency: 3})
	require.Equal(t, "worker", r.Config().Name)
	require.Equal(t, saga.RunnerConfig{
		Name: "worker", LeaseTTL: 15 * time.Second, Poll: time.Second, Concurrency: 3,
		Drain: 10 * time.Second, MaxTakeovers: 10,
		Retention: saga.Retention{Completed: month, Compensated: month, Abandoned: month},
	}, r.Config())
}

// slow returns a saga of one step that takes the duration d.
func slow(d time.Duration) *saga.Saga[trip] {
	st := step("flight")
	st.Timeout = 24 * time.Hour
	st.Do = func(ctx context.Context, _ *trip) error {
		select {
		case <-time.After(d):
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return sequence(st)
}

// idle returns a runner that starts sagas and runs none.
func idle(st store.Store, sg *saga.Saga[trip]) *saga.Runner {
	r := saga.NewRunner(st, saga.RunnerConfig{})
	saga.Register(r, sg)
	return r
}

func TestLongestDurationsDoNotOverflow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		flight := step("flight")
		flight.Timeout = math.MaxInt64
		flight.Do = func(context.Context, *trip) error { time.Sleep(time.Hour); return nil }
		sg := sequence(flight)
		sweeps := &countedSweeps{Store: saga.NewMemory()}
		r, _ := observed(t, sweeps, saga.RunnerConfig{LeaseTTL: math.MaxInt64},
			on(saga.EventStalled, func(e saga.Event) { t.Error(e.Err) }), sg)
		mustStart(t, r, sg)
		requireEnd(t, r, "trip-1", nil)
		require.EqualValues(t, 1, sweeps.n.Load())
	})
}

// A countedSweeps store counts the sweeps of a runner.
type countedSweeps struct {
	saga.Store
	n atomic.Int64
}

func (s *countedSweeps) DeleteEnded(ctx context.Context, status saga.Status, age time.Duration, n int) (int, error) {
	if status == saga.Completed && s.n.Add(1) > 100 {
		panic("the runner sweeps without a pause")
	}
	return s.Store.DeleteEnded(ctx, status, age, n)
}
