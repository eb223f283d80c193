package saga_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga"
	store "github.com/go-resilience/resilience/saga/sagastore"
)

var errDisk = errors.New("disk full")

// A neglected store fails the calls that only the runner itself makes.
type neglected struct{ store.Store }

func (neglected) Check(context.Context) error                { return errDisk }
func (neglected) Listen(ctx context.Context, _ func()) error { return errDisk }
func (neglected) DeleteEnded(context.Context, store.Status, time.Duration, int) (int, error) {
	return 0, errDisk
}

// TestUpkeepErrorsAreReported, and the sagas end nevertheless.
func TestUpkeepErrorsAreReported(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		told := map[string]int{}
		sg := sequence(step("flight"))
		r, stop := observed(t, neglected{saga.NewMemory()}, saga.RunnerConfig{
			Poll: time.Second, LeaseTTL: 10 * time.Second,
			Retention: saga.Retention{Compensated: saga.Unlimited, Abandoned: saga.Unlimited},
		}, on(saga.EventStoreFailed, func(e saga.Event) {
			mu.Lock()
			defer mu.Unlock()
			told[e.Err.Error()]++
		}), sg)
		mustStart(t, r, sg)
		requireEnd(t, r, "trip-1", nil)
		time.Sleep(5 * time.Minute)
		stop()
		require.Equal(t, 1, told["saga: run: disk full"], "%v", told)
		require.InDelta(t, 300, told["saga: listen: disk full"], 5)
		require.InDelta(t, 10, told["saga: sweep: disk full"], 2)
		require.Len(t, told, 3)
	})
}

// A tardy store answers one of its calls a second after its ctx is done.
type tardy struct {
	store.Store
	call string
}

func (s tardy) do(ctx context.Context, call string) error {
	if call != s.call {
		return nil
	}
	<-ctx.Done()
	time.Sleep(time.Second)
	return ctx.Err()
}

func (s tardy) Check(ctx context.Context) error { return s.do(ctx, "check") }
func (s tardy) Listen(ctx context.Context, _ func()) error {
	err := s.do(ctx, "listen")
	<-ctx.Done()
	return err
}
func (s tardy) DeleteEnded(ctx context.Context, _ store.Status, _ time.Duration, _ int) (int, error) {
	return 0, s.do(ctx, "sweep")
}

// TestStoreCallCutShortByStopIsNoFailure checks also that Run waits for the call.
func TestStoreCallCutShortByStopIsNoFailure(t *testing.T) {
	for _, call := range []string{"check", "listen", "sweep"} {
		t.Run(call, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r, stop := observed(t, tardy{saga.NewMemory(), call}, saga.RunnerConfig{
					Poll: time.Second, Retention: saga.Retention{Completed: time.Minute}}, silent, sequence(step("flight")))
				time.Sleep(2 * time.Second)
				begun := time.Now()
				stop()
				require.Equal(t, time.Second, time.Since(begun))
				require.Zero(t, r.Stats().StoreErrors)
			})
		})
	}
}

// TestSlowLocalHeartbeatIsNoFailure: with another database, the connection may be half open.
func TestSlowLocalHeartbeatIsNoFailure(t *testing.T) {
	for exclusive, failures := range map[bool]int64{true: 0, false: 2} {
		synctest.Test(t, func(t *testing.T) {
			tx := newTxMemory(t)
			tx.exclusive = exclusive
			memory := tx.Store
			tx.Store = &gate{Store: memory,
				heartbeat: func(ctx context.Context, req store.HeartbeatRequest) ([]store.Renewed, error) {
					select {
					case <-ctx.Done():
						return nil, ctx.Err()
					case <-time.After(4 * time.Second):
					}
					return memory.Heartbeat(ctx, req)
				}}
			sg := slow(16 * time.Second)
			r, _ := observed(t, tx, saga.RunnerConfig{LeaseTTL: 15 * time.Second}, silent, sg)
			mustStart(t, r, sg)
			requireEnd(t, r, "trip-1", nil)
			require.Equal(t, failures, r.Stats().StoreErrors)
		})
	}
}

// A brimming store deletes full batches several times.
type brimming struct {
	store.Store
	left []int
	at   []time.Time
}

func (b *brimming) DeleteEnded(_ context.Context, status store.Status, _ time.Duration, limit int) (int, error) {
	if status != store.Completed || len(b.left) == 0 {
		return 0, nil
	}
	n := min(limit, b.left[0])
	b.left, b.at = b.left[1:], append(b.at, time.Now())
	return n, nil
}

// TestRetentionContinuesWithNextBatch soon, while there is more to delete.
func TestRetentionContinuesWithNextBatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &brimming{Store: saga.NewMemory(), left: []int{1e6, 1e6, 1e6, 1, 1}}
		_, stop := begin(t, b, saga.RunnerConfig{Poll: time.Second, LeaseTTL: 10 * time.Second,
			Retention: saga.Retention{Completed: time.Minute, Compensated: time.Minute}}, sequence(step("flight")))
		time.Sleep(5 * time.Minute)
		stop()
		require.Len(t, b.at, 5)
		for i := range 3 {
			require.LessOrEqual(t, b.at[i+1].Sub(b.at[i]), time.Second)
		}
		require.Equal(t, 30*time.Second, b.at[4].Sub(b.at[3]))
	})
}

// TestStoppingRunnerSkipsNextAttempt does not wait for the next attempt of a saga that it holds.
func TestStoppingRunnerSkipsNextAttempt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		slow := failing("flight", errDeclined)
		slow.Attempts, slow.Backoff = 9, constant(8*time.Second)
		sg := sequence(slow)
		r, stop := begin(t, saga.NewMemory(), saga.RunnerConfig{LeaseTTL: time.Hour, Drain: time.Minute}, sg)
		mustStart(t, r, sg)
		synctest.Wait()
		begun := time.Now()
		stop()
		require.Zero(t, time.Since(begun))
		require.Equal(t, "released", events(t, r, "trip-1")[1])
		require.Equal(t, 8*time.Second, time.Until(instance(t, r, "trip-1").WakeAt))
	})
}

// A childless store does not return a saga's children once one has ended, and never makes a parent due.
type childless struct{ store.Store }

func (c childless) Children(ctx context.Context, req store.ChildrenRequest) ([]store.ChildRecord, error) {
	if req.Limit == 1 {
		return nil, errDisk
	}
	return c.Store.Children(ctx, req)
}

func (childless) Post(context.Context, store.PostRequest) (store.Record, error) {
	return store.Record{}, errDisk
}

// TestParentPollsWithoutNotification: the failed notification is reported.
func TestParentPollsWithoutNotification(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		var told []string
		w := &warehouse{hold: map[string]chan struct{}{"do pack order-1/parcels/0": make(chan struct{})}}
		sg := sequence(w.parcels(1))
		r, _ := observed(t, childless{saga.NewMemory()}, saga.RunnerConfig{}, on(saga.EventStoreFailed, func(e saga.Event) {
			mu.Lock()
			defer mu.Unlock()
			told = append(told, e.Err.Error())
		}), sg)
		startOrder(t, r, sg)
		time.Sleep(time.Hour)
		close(w.hold["do pack order-1/parcels/0"])
		synctest.Wait()
		mu.Lock()
		require.Contains(t, told, `saga: children of "order-1": disk full`)
		require.Contains(t, told, `saga: wake "order-1": disk full`)
		mu.Unlock()
		requireEnd(t, r, "order-1", nil)
	})
}
