package saga_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/describe"
	store "github.com/go-resilience/resilience/internal/sagastore"
	"github.com/go-resilience/resilience/saga"
)

var _ interface {
	describe.Kinder
	describe.Namer
	describe.Figurer
	describe.Setter
	describe.Observer
	Health(context.Context) error
} = (*saga.Runner)(nil)

func figuresOf(r *saga.Runner) map[string]float64 {
	all := map[string]float64{}
	for _, f := range r.Figures() {
		all[f.Name] = f.Value
	}
	return all
}

// An alert on a gauge that is no longer told goes on with its last value.
func TestFiguresOfTheStoreGoBackToZero(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := saga.NewMemory()
		charge := step("charge")
		charge.Pivot = true
		sg := sequence(charge, failing("flight", saga.Abort(errors.New("full"))))
		worker, _ := begin(t, st, saga.RunnerConfig{OnEvent: silent}, sg)
		mustStart(t, worker, sg)
		onlooker := saga.NewRunner(st, saga.RunnerConfig{})
		figures := func() map[string]float64 {
			time.Sleep(time.Minute)
			_ = figuresOf(onlooker) // which looks in the background
			synctest.Wait()
			return figuresOf(onlooker)
		}
		require.Contains(t, figuresOf(worker), "saga.stored{saga=trip,status=stuck}", "before the store has answered")
		require.Equal(t, 1.0, figures()["saga.stored{saga=trip,status=stuck}"])
		require.Zero(t, figures()["saga.due.age_seconds{saga=trip}"])
		require.EqualError(t, worker.Health(t.Context()), "stuck: 1 saga")
		require.NoError(t, worker.Operate(t.Context(), "trip-1", saga.Operation{Action: saga.ActionAbandon}))
		for _, name := range []string{"saga.stored{saga=trip,status=stuck}", "saga.due{saga=trip}", "saga.due.age_seconds{saga=trip}"} {
			is, told := figures()[name]
			require.True(t, told, name)
			require.Zero(t, is, name)
		}
		require.NoError(t, worker.Health(t.Context()))
		require.Equal(t, 1.0, figuresOf(worker)["saga.sagas{saga=trip,status=abandoned}"])
	})
}

func TestHealthSaysThatSagasAreOverdue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sg := sequence(step("flight"))
		st := &uncounted{Store: saga.NewMemory()}
		r := saga.NewRunner(st, saga.RunnerConfig{OnEvent: silent}) // no Run is under way
		saga.Register(r, sg)
		mustStart(t, r, sg)
		time.Sleep(time.Minute - time.Nanosecond)
		require.NoError(t, r.Health(t.Context()))
		time.Sleep(time.Nanosecond)
		err := r.Health(t.Context())
		require.EqualError(t, err, "overdue: 1 saga due, the first for 1m0s")
		require.False(t, err.(interface{ Failed() bool }).Failed())
		st.down = true
		err = r.Health(t.Context())
		require.ErrorIs(t, err, errDown)
		require.True(t, err.(interface{ Failed() bool }).Failed())
	})
}

// TestHealthCountsUpToALimit, which stands for so many or more.
func TestHealthCountsUpToALimit(t *testing.T) {
	for n, want := range map[int]string{1: "stuck: 1 saga", 9999: "stuck: 9999 sagas", 10000: "stuck: 10000 sagas or more"} {
		r := saga.NewRunner(&crowded{stuck: n}, saga.RunnerConfig{})
		require.EqualError(t, r.Health(t.Context()), want)
	}
}

// A crowded store has so many sagas that are stuck, and one that turns back.
type crowded struct {
	store.Store
	stuck int
}

func (s *crowded) Counts(context.Context) (store.Counts, error) {
	return store.Counts{Sagas: []store.Count{{Saga: "trip", Compensating: 1, Stuck: s.stuck}}}, nil
}

func TestFiguresOfTheStoreHaveTheStatus(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := saga.NewRunner(&crowded{stuck: 2}, saga.RunnerConfig{})
		r.Figures()
		synctest.Wait()
		require.Equal(t, 1.0, figuresOf(r)["saga.stored{saga=trip,status=compensating}"])
		require.Equal(t, 2.0, figuresOf(r)["saga.stored{saga=trip,status=stuck}"])
	})
}

func TestSettingsHaveNoFunctions(t *testing.T) {
	r := saga.NewRunner(saga.NewMemory(), saga.RunnerConfig{
		Name: "one", OnEvent: silent, Inject: trace, Extract: withTrace,
	})
	cfg := r.Settings().(saga.RunnerConfig)
	require.Equal(t, "one", cfg.Name)
	require.Nil(t, cfg.OnEvent)
	require.Nil(t, cfg.Inject)
	require.Nil(t, cfg.Extract)
}

type uncounted struct {
	store.Store
	down bool
}

func (s *uncounted) Counts(ctx context.Context) (store.Counts, error) {
	if s.down {
		return store.Counts{}, errDown
	}
	return s.Store.Counts(ctx)
}

func TestEventsDescribeThemselves(t *testing.T) {
	fields := map[string]any{}
	e := saga.Event{Kind: saga.EventStuck, Saga: "trip", ID: "trip-1", Status: saga.Stuck, Step: "flight", Err: errDown}
	e.Fields(func(name string, value any) { fields[name] = value })
	require.Equal(t, map[string]any{"event": "stuck", "saga": "trip", "id": "trip-1", "status": "stuck", "step": "flight", "err": errDown}, fields)
	e = saga.Event{Kind: saga.EventAttempted, Op: saga.OpDo, Attempt: 1, Outcome: "done", Took: time.Second}
	clear(fields)
	e.Fields(func(name string, value any) { fields[name] = value })
	require.Equal(t, map[string]any{"event": "attempted", "op": "do", "attempt": 1, "outcome": "done", "took": time.Second}, fields)
	for kind, level := range map[saga.EventKind]int{
		saga.EventStuck: 4, saga.EventStalled: 4, saga.EventLost: 4, saga.EventTakenOver: 4, saga.EventStoreFailed: 4, saga.EventDone: -4,
	} {
		require.Equal(t, level, saga.Event{Kind: kind}.Level())
	}
}
