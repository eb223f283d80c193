package saga_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga"
	store "github.com/go-resilience/resilience/saga/sagastore"
)

// TestChildrenEndDuringParallelWait: the parent records the end of its children immediately, is parked once, and
// costs nothing more while the other step waits.
func TestChildrenEndDuringParallelWait(t *testing.T) {
	for name, beside := range map[string]saga.Step[trip]{
		"delay": {Name: "beside", Delay: 10 * time.Minute},
		"backoff": {Name: "beside", Undo: note("", nil), Backoff: func(int) time.Duration { return 10 * time.Minute },
			Do: func(ctx context.Context, _ *trip) error {
				if saga.CommandFrom(ctx).Attempt == 1 {
					return errDeclined
				}
				return nil
			}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				store := &limited{Store: saga.NewMemory(), most: 100, end: cancel}
				hold := make(chan struct{})
				time.AfterFunc(30*time.Second, func() { close(hold) })
				parcels := (&warehouse{hold: map[string]chan struct{}{"do pack order-1/parcels/0": hold}}).parcels(1)
				beside.Parallel = true
				sg := sequence(parcels, beside)
				r, _ := begin[trip](t, store, saga.RunnerConfig{}, sg)
				startOrder(t, r, sg)
				_, err := saga.Register(r, sg).Result(ctx, "order-1")
				require.NoError(t, err)
				require.Less(t, store.writes, 20)
				require.Less(t, len(events(t, r, "order-1")), 20)
				require.Less(t, r.Stats().Claimed, int64(16), "it looks around less and less often")
			})
		})
	}
}

// TestEndedChildrenHastenNoRetry: the parent failed to record the end of its children. It waits for its next
// attempt, and for a signal in parallel.
func TestEndedChildrenHastenNoRetry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fails := 1
		parcels := saga.Step[trip]{Name: "parcels", Child: saga.ChildOf((&warehouse{}).parcel(),
			func(*trip) (parcel, error) { return parcel{}, nil },
			func(*trip, parcel) error {
				if fails--; fails >= 0 {
					return errDeclined
				}
				return nil
			})}
		parcels.Backoff = func(int) time.Duration { return time.Hour }
		sg := sequence(parcels, saga.Step[trip]{Name: "beside", Delay: 2 * time.Hour, Parallel: true})
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		store := &limited{Store: saga.NewMemory(), most: 100, end: cancel}
		r, _ := begin[trip](t, store, saga.RunnerConfig{}, sg)
		startOrder(t, r, sg)
		_, err := saga.Register(r, sg).Result(ctx, "order-1")
		require.NoError(t, err)
		require.Less(t, store.writes, 40)
	})
}

// A limited store counts the commits of the order. If there are too many, it calls end and fails them.
type limited struct {
	store.Store
	writes, most int
	end          func()
}

func (s *limited) Commit(ctx context.Context, req store.CommitRequest) (store.Receipt, error) {
	if req.ID == "order-1" {
		if s.writes++; s.writes > s.most {
			s.end()
			time.Sleep(time.Second) // in a busy loop of a runner, no virtual time would pass
		}
	}
	return s.Store.Commit(ctx, req)
}

// TestWaitReturnsWhatGetReturns, even if the runner that has completed the saga passes it to Wait.
func TestWaitReturnsWhatGetReturns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st, sg := saga.NewMemory(), sequence(taking(5500*time.Millisecond, step("flight")))
		r, _ := observed(t, st, saga.RunnerConfig{}, silent, sg)
		abandoned(t, st, "trip-1", "crashed")
		got, err := r.Wait(t.Context(), "trip-1")
		require.NoError(t, err)
		want, err := r.Get(t.Context(), "trip-1")
		require.NoError(t, err)
		require.Equal(t, want, got)
		require.Empty(t, got.Owner)
		require.Zero(t, got.Takeovers)
		require.Zero(t, got.IdleFor())
	})
}
