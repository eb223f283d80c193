package saga_test

import (
	"context"
	"testing"
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
