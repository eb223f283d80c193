package saga_test

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/policy"
	"github.com/go-resilience/resilience/saga"
	store "github.com/go-resilience/resilience/saga/sagastore"
)

var _ policy.Describer = (*saga.Runner)(nil)

func metricsOf(r *saga.Runner) map[string]float64 {
	all := map[string]float64{}
	for _, m := range r.Describe().Metrics() {
		all[m.Name] = m.Value
	}
	return all
}

func healthOf(t *testing.T, r *saga.Runner) policy.Health { return r.Describe().Health(t.Context()) }

// TestStoreMetricsReturnToZero: an alert on a gauge that is no longer reported would continue with its last value.
func TestStoreMetricsReturnToZero(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := saga.NewMemory()
		charge := step("charge")
		charge.Pivot = true
		sg := sequence(charge, failing("flight", saga.Permanent(errors.New("full"))))
		worker, _ := observed(t, st, saga.RunnerConfig{}, silent, sg)
		mustStart(t, worker, sg)
		onlooker := saga.NewRunner(st, saga.RunnerConfig{})
		metrics := func() map[string]float64 {
			time.Sleep(time.Minute)
			_ = metricsOf(onlooker) // starts the query in the background
			synctest.Wait()
			return metricsOf(onlooker)
		}
		require.Contains(t, metricsOf(worker), "saga.stored{saga=trip,status=stuck}", "before the store has answered")
		require.Equal(t, 1.0, metrics()["saga.stored{saga=trip,status=stuck}"])
		require.Zero(t, metrics()["saga.due.age_seconds{saga=trip}"])
		require.Equal(t, policy.Health{Status: policy.Fail, State: "stuck", Detail: "1 saga"}, healthOf(t, worker))
		operate(t, worker, "trip-1", saga.Operation{Action: saga.ActionAbandon})
		for _, name := range []string{"saga.stored{saga=trip,status=stuck}", "saga.due{saga=trip}",
			"saga.due.age_seconds{saga=trip}"} {
			is, told := metrics()[name]
			require.True(t, told, name)
			require.Zero(t, is, name)
		}
		require.Zero(t, healthOf(t, worker))
		require.Equal(t, 1.0, metricsOf(worker)["saga.sagas{saga=trip,status=abandoned}"])
	})
}

func TestHealthReportsOverdueSagas(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sg := sequence(step("flight"))
		st := &counted{Store: saga.NewMemory()}
		r := saga.NewRunner(st, saga.RunnerConfig{})
		r.Observe(silent) // no Run is active
		saga.Register(r, sg)
		mustStart(t, r, sg)
		time.Sleep(time.Minute - time.Nanosecond)
		require.Zero(t, healthOf(t, r))
		time.Sleep(time.Nanosecond)
		require.Equal(t, policy.Health{
			Status: policy.Warn, State: "overdue", Detail: "1 saga due, the first for 1m0s",
		}, healthOf(t, r))
		st.fails.Store(true)
		health := healthOf(t, r)
		require.ErrorIs(t, health.Err, errDown)
		require.Equal(t, policy.Fail, health.Status)
		require.Equal(t, "store_down", health.State)
	})
}

// TestHealthCountsUpToALimit: the limit means that many or more.
func TestHealthCountsUpToALimit(t *testing.T) {
	for n, want := range map[int]string{1: "1 saga", 9999: "9999 sagas", 10000: "10000 sagas or more"} {
		r := saga.NewRunner(&crowded{stuck: n}, saga.RunnerConfig{})
		require.Equal(t, want, healthOf(t, r).Detail)
	}
}

// A crowded store has n stuck sagas and one that compensates.
type crowded struct {
	store.Store
	stuck int
}

func (s *crowded) Counts(context.Context) (store.Counts, error) {
	return store.Counts{Sagas: []store.Count{{Saga: "trip", Compensating: 1, Stuck: s.stuck}}}, nil
}

func TestStoreMetricsHaveStatus(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := saga.NewRunner(&crowded{stuck: 2}, saga.RunnerConfig{})
		r.Describe().Metrics()
		synctest.Wait()
		require.Equal(t, 1.0, metricsOf(r)["saga.stored{saga=trip,status=compensating}"])
		require.Equal(t, 2.0, metricsOf(r)["saga.stored{saga=trip,status=stuck}"])
	})
}

func TestEventsAreDescribed(t *testing.T) {
	for _, test := range []struct {
		event saga.Event
		want  policy.Event
	}{
		{
			saga.Event{Kind: saga.EventStuck, Saga: "trip", ID: "trip-1", Status: saga.Stuck, Step: "flight", Err: errDown},
			policy.Event{What: "stuck", Level: slog.LevelWarn, Err: errDown, Attrs: []slog.Attr{
				slog.String("saga", "trip"), slog.String("id", "trip-1"), slog.String("status", "stuck"),
				slog.String("step", "flight"),
			}},
		},
		{
			saga.Event{Kind: saga.EventAttempted, Op: saga.OpDo, Attempt: 1, Outcome: saga.OutcomeDeclined, Took: time.Second},
			policy.Event{What: "attempted", Level: slog.LevelDebug, Attrs: []slog.Attr{
				slog.String("op", "do"), slog.String("outcome", "declined"), slog.Int("attempt", 1),
				slog.Duration("took", time.Second),
			}},
		},
		{saga.Event{Kind: saga.EventTakenOver}, policy.Event{What: "taken_over", Level: slog.LevelWarn}},
		{saga.Event{Kind: saga.EventStoreFailed}, policy.Event{What: "store_failed", Level: slog.LevelWarn}},
		{saga.Event{Kind: saga.EventStalled}, policy.Event{What: "stalled", Level: slog.LevelWarn}},
		{saga.Event{Kind: saga.EventLost}, policy.Event{What: "lost", Level: slog.LevelWarn}},
		{saga.Event{Kind: saga.EventStepDone}, policy.Event{What: "step_done", Level: slog.LevelDebug}},
	} {
		test.want.Kind, test.want.Name = "saga", "worker"
		require.Equal(t, test.want, saga.DescribeEvent(test.event, "worker"))
	}
}
