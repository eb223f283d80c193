package saga_test

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	store "github.com/go-resilience/resilience/internal/sagastore"
	"github.com/go-resilience/resilience/saga"
)

// TestEndedSagasAreKeptForSoLong, each status for its own time, in more batches than one.
func TestEndedSagasAreKeptForSoLong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		good := sequence(step("flight"))
		bad := sequence(step("flight"), failing("car", saga.Void(errDeclined)))
		bad.Name = "bad"
		cfg := saga.RunnerConfig{Keep: saga.Keep{Completed: time.Hour, Compensated: 3 * time.Hour}}
		r, _ := begin(t, saga.NewMemory(), cfg, good, bad)
		const sagas = 450
		for i := range sagas {
			_, err := saga.Start(t.Context(), r, good, fmt.Sprint("good-", i), trip{})
			require.NoError(t, err)
		}
		_, err := saga.Start(t.Context(), r, bad, "bad", trip{})
		require.NoError(t, err)
		left := func() (good, bad int) {
			page, _, err := r.List(t.Context(), saga.Filter{Limit: 2 * sagas, WithoutState: true})
			require.NoError(t, err)
			for _, in := range page {
				if in.Status == saga.Completed {
					good++
				} else {
					bad++
				}
			}
			return good, bad
		}
		for _, c := range []struct {
			sleep     time.Duration
			good, bad int
		}{{30 * time.Minute, sagas, 1}, {35 * time.Minute, 0, 1}, {3 * time.Hour, 0, 0}} {
			time.Sleep(c.sleep)
			synctest.Wait()
			good, bad := left()
			require.Equal(t, []int{c.good, c.bad}, []int{good, bad})
		}
		require.EqualValues(t, sagas+1, r.Stats().Deleted)
		require.EqualError(t, saga.RunnerConfig{Keep: saga.Keep{Abandoned: -1}}.Validate(),
			"saga.RunnerConfig.Keep.Abandoned is -1ns: must be 0 (forever) or more")
	})
}

// TestABusyRunnerDeletesAsMany as one that has nothing to do: otherwise it would end more sagas
// than it deletes.
func TestABusyRunnerDeletesAsMany(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store, good, hangs := saga.NewMemory(), sequence(step("flight")), sequence(step("flight"))
		hangs.Name = "hangs"
		hangs.Steps[0].Do = func(ctx context.Context, _ *trip) error { <-ctx.Done(); return ctx.Err() }
		start := func(r *saga.Runner, sg *saga.Saga[trip], n int) {
			for i := range n {
				_, err := saga.Start(t.Context(), r, sg, fmt.Sprint(sg.Name, "-", i), trip{})
				require.NoError(t, err)
			}
		}
		before, stop := begin(t, store, saga.RunnerConfig{}, good, hangs)
		start(before, good, 1000)
		time.Sleep(time.Minute)
		stop()
		start(before, hangs, 10)
		r, _ := begin(t, store, saga.RunnerConfig{Concurrency: 2, Keep: saga.Keep{Completed: time.Second}}, good, hangs)
		time.Sleep(2500 * time.Millisecond)
		synctest.Wait()
		require.EqualValues(t, 2, r.Stats().Held)
		require.EqualValues(t, 1000, r.Stats().Deleted)
	})
}

// TestADeletedSagaCanBeStartedAgain, with the children that it had: none is left of them,
// however they ended.
func TestADeletedSagaCanBeStartedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &warehouse{}
		sg := sequence(step("charge"), w.parcels(2))
		deleted := make(chan struct{})
		store := &swept{Store: saga.NewMemory(), id: "order-1", gone: deleted}
		r, _ := begin[trip](t, store, saga.RunnerConfig{Keep: saga.Keep{Completed: time.Hour}}, sg)
		for range 3 {
			startOrder(t, r, sg)
			_, err := result[trip](t.Context(), r, "order-1")
			require.NoError(t, err)
			<-deleted
			page, _, err := r.List(t.Context(), saga.Filter{})
			require.NoError(t, err)
			require.Empty(t, page)
		}
		require.Len(t, w.did, 3*4)
		require.EqualValues(t, 9, total(r).Started)
	})
}

// A swept store says when a saga was deleted.
type swept struct {
	store.Store
	id   string
	gone chan struct{}
}

func (s *swept) DeleteEnded(ctx context.Context, status saga.Status, age time.Duration, limit int) (int, error) {
	n, err := s.Store.DeleteEnded(ctx, status, age, limit)
	if _, lerr := s.Load(ctx, s.id); n > 0 && lerr != nil {
		s.gone <- struct{}{}
	}
	return n, err
}
