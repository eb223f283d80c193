package saga_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/saga/store"
)

func TestConfigHasItsDefaults(t *testing.T) {
	r := saga.NewRunner(saga.NewMemory(), saga.RunnerConfig{Name: "worker", Concurrency: 3})
	require.Equal(t, "worker", r.Name())
	require.Equal(t, saga.RunnerConfig{
		Name: "worker", LeaseTTL: 15 * time.Second, Poll: time.Second, Concurrency: 3, Park: 5 * time.Second,
		Drain: 10 * time.Second, MaxTakeovers: 10, StalledAfter: 10 * time.Minute, DueAfter: time.Minute,
	}, r.Config())
	require.NoError(t, r.Update(func(c *saga.RunnerConfig) { c.Concurrency, c.Park = 0, time.Minute }))
	require.Equal(t, 64, r.Config().Concurrency, "zero means the default again")
	require.Equal(t, time.Minute, r.Config().Park)
}

func TestUpdateRefusesAnInvalidConfig(t *testing.T) {
	r := saga.NewRunner(saga.NewMemory(), saga.RunnerConfig{Name: "worker"})
	before := r.Config()
	for want, change := range map[string]func(*saga.RunnerConfig){
		`saga.RunnerConfig.LeaseTTL is 1ms: must be 0 (for 15s), or 10ms or more`: func(c *saga.RunnerConfig) { c.LeaseTTL, c.Poll = time.Millisecond, time.Hour },
		`saga.RunnerConfig.Concurrency is -1: must be 0 (for 64) or more`:         func(c *saga.RunnerConfig) { c.Concurrency = -1 },
		`saga.RunnerConfig.Name is "other": must be "worker" as before: it cannot change`: func(c *saga.RunnerConfig) {
			c.Name, c.Poll = "other", time.Hour
		},
	} {
		require.EqualError(t, r.Update(change), want)
		require.Equal(t, before, r.Config())
	}
	require.PanicsWithValue(t, "oops", func() {
		_ = r.Update(func(c *saga.RunnerConfig) { c.Poll = time.Hour; panic("oops") })
	})
	require.Equal(t, before, r.Config())
	require.NoError(t, r.Update(func(c *saga.RunnerConfig) { c.Poll = time.Hour }), "no lock is left held")
	require.Equal(t, time.Hour, r.Config().Poll)
}

// slow returns a sequence of one step that takes so long.
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

func TestUpdateKeepsSagasFiguresAndObservers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sg := slow(time.Minute)
		r, _ := begin(t, saga.NewMemory(), saga.RunnerConfig{}, sg)
		var told atomic.Int64
		r.Observe(func(context.Context, saga.Event) { told.Add(1) })
		mustStart(t, r, sg)
		time.Sleep(30 * time.Second)
		before := told.Load()
		require.NoError(t, r.Update(func(c *saga.RunnerConfig) {
			*c = saga.RunnerConfig{LeaseTTL: time.Second, Poll: time.Minute, Concurrency: 1, Park: time.Second, Drain: -1}
		}))
		stats := r.Stats()
		require.EqualValues(t, 1, stats.Held)
		require.EqualValues(t, 1, stats.InFlight)
		require.EqualValues(t, 1, total(r).Started)
		_, err := sg.Result(t.Context(), r, "trip-1")
		require.NoError(t, err)
		synctest.Wait()
		require.EqualValues(t, 1, total(r).Completed)
		require.Zero(t, r.Stats().Lost)
		require.Equal(t, []string{"created", "done flight", "completed"}, events(t, r, "trip-1"), "in one attempt")
		require.Greater(t, told.Load(), before)
	})
}

// heartbeats records the heartbeats of a store.
type heartbeats struct {
	store.Store
	mu   sync.Mutex
	at   []time.Time
	down atomic.Bool
}

func (h *heartbeats) Heartbeat(ctx context.Context, req store.HeartbeatRequest) ([]store.Renewed, error) {
	h.mu.Lock()
	h.at = append(h.at, time.Now())
	h.mu.Unlock()
	if h.down.Load() {
		return nil, errDown
	}
	return h.Store.Heartbeat(ctx, req)
}

// since returns the times of the heartbeats after begun.
func (h *heartbeats) since(begun time.Time) []time.Time {
	synctest.Wait()
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(h.at), func(at time.Time) bool { return at.Before(begun) })
}

func TestUpdateOfTheLease(t *testing.T) {
	for name, c := range map[string]struct{ from, to time.Duration }{
		"longer":  {3 * time.Second, time.Minute},
		"shorter": {time.Minute, 3 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store := &heartbeats{Store: saga.NewMemory()}
				sg := slow(time.Hour)
				r, _ := begin(t, store, saga.RunnerConfig{LeaseTTL: c.from}, sg)
				mustStart(t, r, sg)
				time.Sleep(c.from + time.Second/2)
				begun := time.Now()
				require.NoError(t, r.Update(func(cfg *saga.RunnerConfig) { cfg.LeaseTTL = c.to }))
				synctest.Wait()
				in, err := r.Get(t.Context(), "trip-1")
				require.NoError(t, err)
				require.Equal(t, c.to, in.WakeAt.Sub(begun), "a heartbeat at once gives it the new lease")
				time.Sleep(10 * c.to)
				beats := store.since(begun)
				require.GreaterOrEqual(t, len(beats), 30)
				require.LessOrEqual(t, len(beats), 32, "a third of a lease apart")
				require.Equal(t, 0, int(r.Stats().Lost))
				require.EqualValues(t, 1, r.Stats().Held)

				t.Log("and without heartbeats it ends when it says")
				store.down.Store(true)
				lost := make(chan time.Duration, 1)
				last := beats[len(beats)-1]
				r.Observe(func(_ context.Context, e saga.Event) {
					if e.Kind == saga.EventLost {
						lost <- time.Since(last)
					}
				})
				require.Equal(t, c.to, <-lost)
			})
		})
	}
}

// Consider a lease that becomes longer while the store does not answer. The leases in the
// store are still the short ones, so the heartbeats must not wait for the long one.
func TestUpdateToALongerLeaseLosesNoSagaWhenItsHeartbeatFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &heartbeats{Store: saga.NewMemory()}
		sg := slow(time.Hour)
		r, _ := begin(t, store, saga.RunnerConfig{LeaseTTL: 3 * time.Second, OnEvent: silent}, sg)
		mustStart(t, r, sg)
		time.Sleep(10 * time.Second)
		store.down.Store(true)
		require.NoError(t, r.Update(func(c *saga.RunnerConfig) { c.LeaseTTL = time.Hour }))
		synctest.Wait()
		store.down.Store(false)
		time.Sleep(time.Minute)
		require.EqualValues(t, 1, r.Stats().Held)
		require.Zero(t, r.Stats().Lost)
	})
}

// A claim may take its lease from the configuration before an Update, and return after the
// heartbeat of that Update.
func TestUpdateOfTheLeaseDuringAClaim(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := saga.NewMemory()
		sg := slow(time.Hour)
		_, err := saga.Start(t.Context(), idle(st, sg), sg, "trip-1", trip{})
		require.NoError(t, err)
		answer := make(chan struct{})
		g := &gate{Store: st, claim: func(ctx context.Context, req store.ClaimRequest) ([]store.Record, error) {
			recs, err := st.Claim(ctx, req)
			<-answer
			return recs, err
		}}
		r, _ := begin(t, g, saga.RunnerConfig{LeaseTTL: 3 * time.Second}, sg)
		require.NoError(t, r.Update(func(c *saga.RunnerConfig) { c.LeaseTTL = time.Hour }))
		synctest.Wait()
		close(answer)
		time.Sleep(time.Minute)
		require.EqualValues(t, 1, r.Stats().Held)
		require.Zero(t, r.Stats().Lost)
	})
}

// idle returns a runner that only starts sagas.
func idle(st store.Store, sg *saga.Saga[trip]) *saga.Runner {
	r := saga.NewRunner(st, saga.RunnerConfig{})
	saga.Register(r, sg)
	return r
}

func TestUpdateOfConcurrency(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := saga.NewMemory()
		sg := slow(time.Minute)
		client := idle(store, sg)
		for i := range 20 {
			_, err := saga.Start(t.Context(), client, sg, fmt.Sprint("trip-", i), trip{})
			require.NoError(t, err)
		}
		r, _ := begin(t, store, saga.RunnerConfig{Concurrency: 2, Poll: time.Hour}, sg)
		held := func() int { synctest.Wait(); return int(r.Stats().Held) }
		require.Equal(t, 2, held())
		require.NoError(t, r.Update(func(c *saga.RunnerConfig) { c.Concurrency = 10 }))
		require.Equal(t, 10, held(), "more at once")

		time.Sleep(time.Second)
		require.NoError(t, r.Update(func(c *saga.RunnerConfig) { c.Concurrency = 3 }))
		require.Equal(t, 10, held(), "none is interrupted")
		time.Sleep(time.Minute)
		for range 3 {
			require.LessOrEqual(t, held(), 3, "and none is claimed while they are too many")
			time.Sleep(time.Minute)
		}
		time.Sleep(time.Hour)
		require.EqualValues(t, 20, total(r).Completed)
		require.Zero(t, r.Stats().Lost)
	})
}

func TestUpdateOfPoll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := saga.NewMemory()
		sg := sequence(step("flight"))
		r, _ := begin(t, store, saga.RunnerConfig{Poll: time.Hour}, sg)
		require.NoError(t, r.Update(func(c *saga.RunnerConfig) { c.Poll = time.Second }))
		synctest.Wait()
		client := idle(store, sg)
		_, err := saga.Start(t.Context(), client, sg, "trip-1", trip{})
		require.NoError(t, err)
		begun := time.Now()
		_, err = sg.Result(t.Context(), client, "trip-1")
		require.NoError(t, err)
		require.LessOrEqual(t, time.Since(begun), 2*time.Second)
	})
}

func TestUpdateOfStalledAfterAndItsHookReachesHeldSagas(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sg := slow(20 * time.Hour)
		sg.Steps[0].Timeout = time.Minute
		sg.Steps[0].Do = func(context.Context, *trip) error { time.Sleep(20 * time.Hour); return nil }
		r, _ := begin(t, saga.NewMemory(), saga.RunnerConfig{StalledAfter: -1}, sg)
		mustStart(t, r, sg)
		time.Sleep(time.Hour)
		var told atomic.Int64
		require.NoError(t, r.Update(func(c *saga.RunnerConfig) {
			c.StalledAfter = 2 * time.Hour
			c.OnEvent = on(saga.EventStalled, func(saga.Event) { told.Add(1) })
		}))
		time.Sleep(59 * time.Minute)
		require.Zero(t, told.Load())
		time.Sleep(2 * time.Minute)
		require.EqualValues(t, 1, told.Load())
	})
}

func TestUpdateOfPark(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := failing("flight", errDeclined)
		st.Backoff = func(int) time.Duration { return time.Minute }
		sg := sequence(st)
		r, _ := begin(t, saga.NewMemory(), saga.RunnerConfig{Park: time.Hour}, sg)
		mustStart(t, r, sg)
		time.Sleep(time.Second)
		require.EqualValues(t, 1, r.Stats().Held)
		require.NoError(t, r.Update(func(c *saga.RunnerConfig) { c.Park = time.Second }))
		synctest.Wait()
		require.Zero(t, r.Stats().Held, "the wait under way is parked")
		require.Equal(t, []string{"created", "parked"}, events(t, r, "trip-1"))
		_, err := sg.Result(t.Context(), r, "trip-1")
		require.ErrorIs(t, err, saga.ErrCompensated)
	})
}

// TestUpdateUnderLoad changes every setting all the time while many sagas run: no saga is
// lost, no step runs twice, and no runner holds more sagas than the largest Concurrency.
func TestUpdateUnderLoad(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const sagas, most = 300, 12
		store := saga.NewMemory()
		var calls, now, peak atomic.Int64
		st := step("flight")
		st.Do = func(ctx context.Context, _ *trip) error {
			calls.Add(1)
			n := now.Add(1)
			defer now.Add(-1)
			for old := peak.Load(); n > old && !peak.CompareAndSwap(old, n); old = peak.Load() {
			}
			select {
			case <-time.After(rand.N(2 * time.Second)):
			case <-ctx.Done():
				return context.Cause(ctx)
			}
			return nil
		}
		sg := sequence(st, st)
		sg.Steps[1].Name = "hotel"
		r, _ := begin(t, store, saga.RunnerConfig{Concurrency: most}, sg)
		stop := make(chan struct{})
		var updates, work sync.WaitGroup
		for range 2 {
			updates.Go(func() {
				for {
					select {
					case <-stop:
						return
					case <-time.After(rand.N(200 * time.Millisecond)):
					}
					assert.NoError(t, r.Update(func(c *saga.RunnerConfig) {
						c.Concurrency = 1 + rand.N(most)
						c.LeaseTTL = 100*time.Millisecond + rand.N(time.Minute)
						c.Poll = rand.N(time.Second) + 1
						c.Park = rand.N(time.Second) + 1
						c.StalledAfter = time.Hour + rand.N(time.Hour)
					}))
					_ = r.Stats()
					_ = r.Config()
				}
			})
		}
		for i := range sagas {
			work.Go(func() {
				id := fmt.Sprint("trip-", i)
				_, err := saga.Start(t.Context(), r, sg, id, trip{})
				assert.NoError(t, err)
				_, err = sg.Result(t.Context(), r, id)
				assert.NoError(t, err)
			})
		}
		work.Wait()
		close(stop)
		updates.Wait()
		synctest.Wait()
		stats := r.Stats()
		require.EqualValues(t, sagas, total(r).Completed)
		require.EqualValues(t, 2*sagas, calls.Load(), "each step ran once")
		require.Zero(t, stats.Lost)
		require.Zero(t, stats.TakenOver)
		require.Zero(t, stats.Held)
		require.Zero(t, stats.InFlight)
		require.LessOrEqual(t, peak.Load(), int64(most))

		t.Log("and against the last one when it has returned")
		require.NoError(t, r.Update(func(c *saga.RunnerConfig) { c.Concurrency = 2 }))
		peak.Store(0)
		for i := range 20 {
			_, err := saga.Start(t.Context(), r, sg, fmt.Sprint("late-", i), trip{})
			require.NoError(t, err)
		}
		for i := range 20 {
			_, err := sg.Result(t.Context(), r, fmt.Sprint("late-", i))
			require.NoError(t, err)
		}
		require.LessOrEqual(t, peak.Load(), int64(2))
	})
}
