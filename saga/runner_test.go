package saga_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga"
)

// start runs a runner until the test, or its bubble, ends.
func start(t *testing.T, store saga.Store, cfg saga.RunnerConfig, sagas ...*saga.Saga[trip]) *saga.Runner {
	t.Helper()
	r := saga.NewRunner(store, cfg)
	saga.Register(r, sagas...)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	stop := sync.OnceFunc(func() {
		cancel()
		require.NoError(t, <-done)
	})
	t.Cleanup(stop)
	synctest.Wait()
	return r
}

func events(t *testing.T, r *saga.Runner, id string) []string {
	t.Helper()
	log, err := r.History(context.Background(), id)
	require.NoError(t, err)
	var list []string
	for i, e := range log {
		require.EqualValues(t, i+1, e.Seq, "log gap")
		if e.Step == "" {
			list = append(list, e.Event)
		} else {
			list = append(list, fmt.Sprint(e.Event, " ", e.Step))
		}
	}
	return list
}

func TestRunnerCompletesInNPlusOneCommits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sg := &saga.Saga[trip]{Name: "trip", Steps: []saga.Step[trip]{step("flight"), step("hotel"), step("car")}}
		store := saga.NewMemory()
		r := start(t, store, saga.RunnerConfig{}, sg)
		_, err := saga.Start(t.Context(), r, sg, "trip-1", trip{Calls: []string{"begin"}})
		require.NoError(t, err)
		s, err := saga.Result[trip](t.Context(), r, "trip-1")
		require.NoError(t, err)
		require.Equal(t, []string{"begin", "do flight", "do hotel", "do car"}, s.Calls)
		require.Equal(t, []string{"created", "done flight", "done hotel", "done car", "completed"}, events(t, r, "trip-1"))
		require.EqualValues(t, 3, r.Stats().Commits)
		require.EqualValues(t, 1, r.Stats().Completed)
		require.Zero(t, r.Stats().Held)
	})
}

func TestRunnerCompensates(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hotel := step("hotel")
		hotel.Do = note("do hotel", saga.NoEffect(errors.New("full")))
		sg := &saga.Saga[trip]{Name: "trip", Steps: []saga.Step[trip]{step("flight"), step("car"), hotel}}
		r := start(t, saga.NewMemory(), saga.RunnerConfig{}, sg)
		_, err := saga.Start(t.Context(), r, sg, "trip-1", trip{})
		require.NoError(t, err)
		s, err := saga.Result[trip](t.Context(), r, "trip-1")
		require.ErrorIs(t, err, saga.ErrCompensated)
		require.EqualError(t, err, `saga: trip "trip-1": compensated: step hotel: full`)
		require.Equal(t, []string{"do flight", "do car", "do hotel", "undo car", "undo flight"}, s.Calls)
		require.Equal(t, []string{
			"created", "done flight", "done car", "noeffect hotel", "compensating hotel",
			"undone car", "undone flight", "compensated",
		}, events(t, r, "trip-1"))
		e, _ := errors.AsType[*saga.Error](err)
		require.Equal(t, []string{"car", "flight"}, e.Undone)
	})
}

func TestRunnerTakesOverFromACrashedOwner(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sg := &saga.Saga[trip]{Name: "trip", Steps: []saga.Step[trip]{step("flight")}}
		store := saga.NewMemory()
		r := start(t, store, saga.RunnerConfig{}, sg)
		steps := `{"steps":[{"n":"flight","s":"started"}]}`
		_, created, err := store.Start(t.Context(), saga.StartRequest{
			ID: "trip-1", Saga: "trip", Status: saga.Running, Data: []byte(`{}`), Steps: []byte(steps),
			Owner: "dead", Lease: 15 * time.Second, Log: []saga.Entry{{Event: saga.EventCreated}},
		})
		require.NoError(t, err)
		require.True(t, created)
		begun := time.Now()
		_, err = saga.Result[trip](t.Context(), r, "trip-1")
		require.NoError(t, err)
		require.LessOrEqual(t, time.Since(begun), 16*time.Second)
		require.Equal(t, []string{"created", "takenover", "done flight", "completed"}, events(t, r, "trip-1"))
		require.EqualValues(t, 1, r.Stats().TakenOver)
	})
}
