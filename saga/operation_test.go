package saga_test

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga"
	store "github.com/go-resilience/resilience/saga/sagastore"
)

// TestSkipAfterCancelTurnsBack turns the saga back now, although its remaining step waits.
func TestSkipAfterCancelTurnsBack(t *testing.T) {
	for name, c := range map[string]struct {
		cancel bool
		want   saga.Status
	}{
		"no runner does":  {want: saga.Running},
		"the saga is due": {cancel: true, want: saga.Compensated},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := &gate{Store: saga.NewMemory()}
				flight, hotel := failing("flight", errDeclined), failing("hotel", errDeclined)
				hotel.Parallel = true
				flight.Backoff, hotel.Backoff = constant(time.Hour), constant(2*time.Hour)
				sg := sequence(flight, hotel)
				worker, _ := begin(t, g.Store, saga.RunnerConfig{}, sg)
				mustStart(t, worker, sg)
				time.Sleep(time.Minute)
				commits := 0
				r, other := saga.NewRunner(g, saga.RunnerConfig{}), saga.NewRunner(g.Store, saga.RunnerConfig{})
				saga.Register(r, sg)
				g.commit = func(ctx context.Context, req store.CommitRequest) (store.Receipt, error) {
					commits++
					if commits == 1 && c.cancel {
						require.NoError(t, other.Operate(ctx, "trip-1", saga.Operation{Action: saga.ActionCancel, Note: "ill"}))
					}
					return g.Store.Commit(ctx, req)
				}
				operate(t, r, "trip-1", saga.Operation{Action: saga.ActionSkip, Step: "flight"})
				time.Sleep(2 * time.Second)
				require.Equal(t, c.want, instance(t, r, "trip-1").Status)
				if !c.cancel {
					require.Equal(t, 1, commits, "it is not made due before hotel is")
				}
			})
		})
	}
}

// TestRetryKeepsLeaseOfNewOwner: another runner, or the same one, claims the saga during the retry.
func TestRetryKeepsLeaseOfNewOwner(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &gate{Store: saga.NewMemory()}
		var late atomic.Bool
		g.commit = func(ctx context.Context, req store.CommitRequest) (store.Receipt, error) {
			receipt, err := g.Store.Commit(ctx, req)
			if late.Load() {
				time.Sleep(2 * time.Second) // another runner claims it
			}
			return receipt, err
		}
		calls := 0
		st := step("flight")
		st.Backoff = constant(time.Hour)
		st.Do = func(ctx context.Context, _ *trip) error {
			if calls++; calls == 1 {
				return errDeclined
			}
			time.Sleep(3 * time.Second)
			return ctx.Err()
		}
		sg := sequence(st)
		r, _ := begin(t, g, saga.RunnerConfig{}, sg)
		mustStart(t, r, sg)
		time.Sleep(time.Minute)
		late.Store(true)
		operate(t, r, "trip-1", saga.Operation{Action: saga.ActionRetry})
		requireEnd(t, r, "trip-1", nil)
		require.Zero(t, r.Stats().Lost)
		require.Equal(t, 2, calls)
	})
}

// TestAbandonEndsLocalAttemptAtOnce checks that an attempt in progress ends and Result returns.
func TestAbandonEndsLocalAttemptAtOnce(t *testing.T) {
	hang := step("flight")
	hang.Do = func(ctx context.Context, _ *trip) error { <-ctx.Done(); return ctx.Err() }
	hang.Timeout = time.Hour
	parked := failing("flight", errDeclined)
	parked.Backoff = constant(time.Hour)
	for name, st := range map[string]saga.Step[trip]{"running": hang, "parked": parked} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				sg := sequence(st)
				r, _ := begin(t, saga.NewMemory(), saga.RunnerConfig{Poll: 20 * time.Minute}, sg)
				mustStart(t, r, sg)
				time.Sleep(time.Minute + time.Second) // between two heartbeats
				begun := time.Now()
				time.AfterFunc(time.Minute, func() {
					assert.NoError(t, r.Operate(t.Context(), "trip-1", saga.Operation{Action: saga.ActionAbandon}))
				})
				requireEnd(t, r, "trip-1", saga.ErrAbandoned)
				synctest.Wait()
				require.Zero(t, r.Stats().Held)
				require.Equal(t, time.Minute, time.Since(begun))
			})
		})
	}
}

// A counted store counts the calls to Counts, which may fail or be slow.
type counted struct {
	store.Store
	calls atomic.Int64
	fails atomic.Bool
	takes time.Duration
}

func (c *counted) Counts(ctx context.Context) (store.Counts, error) {
	c.calls.Add(1)
	time.Sleep(c.takes)
	if c.fails.Load() {
		return store.Counts{}, errDown
	}
	return c.Store.Counts(ctx)
}

// TestMetricsQueryStoreAtIntervals: metrics are read often and by many. The store is queried every five seconds at
// most, and the last answer remains if the store fails.
func TestMetricsQueryStoreAtIntervals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sg, store := sequence(step("flight")), &counted{Store: saga.NewMemory()}
		var failed atomic.Int64
		r := saga.NewRunner(store, saga.RunnerConfig{})
		r.Observe(on(saga.EventStoreFailed, func(saga.Event) { failed.Add(1) }))
		saga.Register(r, sg)
		mustStart(t, r, sg)
		running := func() float64 {
			n := metricsOf(r)["saga.stored{saga=trip,status=running}"]
			synctest.Wait()
			return n
		}
		require.Zero(t, running())
		require.NotZero(t, running())
		for range 60 {
			running()
			time.Sleep(time.Second)
		}
		require.EqualValues(t, 12, store.calls.Load())

		store.fails.Store(true)
		for minute := range 10 { // the last query that succeeded was 5s before the first minute
			time.Sleep(time.Minute)
			require.Equal(t, minute < 4, running() != 0, "old numbers are dropped")
		}
		require.EqualValues(t, 10, failed.Load())
		store.fails.Store(false)
		time.Sleep(time.Minute)
		running()
		require.NotZero(t, running())
	})
}

func TestMetricsQuerySlowStoreOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &counted{Store: saga.NewMemory(), takes: 10 * time.Second}
		r := saga.NewRunner(store, saga.RunnerConfig{})
		for range 9 {
			r.Describe().Metrics()
			time.Sleep(time.Second)
		}
		require.EqualValues(t, 1, store.calls.Load())
		time.Sleep(time.Minute)
	})
}
