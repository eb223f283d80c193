package saga_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga"
	store "github.com/go-resilience/resilience/saga/sagastore"
)

// A crew counts the running steps of each definition.
type crew struct {
	mu   sync.Mutex
	now  map[string]map[string]int // by definition and command
	most map[string]int
}

func newCrew() *crew {
	return &crew{now: map[string]map[string]int{}, most: map[string]int{}}
}

// works returns a definition of one slow step.
func (c *crew) works(name string, takes func() time.Duration) *saga.Saga[trip] {
	st := step("work")
	st.Attempts = saga.Unlimited
	st.Do = func(ctx context.Context, _ *trip) error {
		id := saga.CommandFrom(ctx).ID
		c.mu.Lock()
		if c.now[name] == nil {
			c.now[name] = map[string]int{}
		}
		c.now[name][id]++
		c.most[name] = max(c.most[name], len(c.now[name]))
		c.mu.Unlock()
		defer func() {
			c.mu.Lock()
			defer c.mu.Unlock()
			if c.now[name][id]--; c.now[name][id] == 0 {
				delete(c.now[name], id)
			}
		}()
		select {
		case <-time.After(takes()):
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return &saga.Saga[trip]{Name: name, Steps: []saga.Step[trip]{st}}
}

func (c *crew) mostOf(name string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.most[name]
}

func lasting(d time.Duration) func() time.Duration { return func() time.Duration { return d } }

// enqueue starts sagas that no runner holds.
func enqueue(t *testing.T, st store.Store, sg *saga.Saga[trip], first, n int) {
	t.Helper()
	idle := saga.NewRunner(st, saga.RunnerConfig{})
	sagas := saga.Register(idle, sg)
	for i := first; i < first+n; i++ {
		_, err := sagas.Start(t.Context(), fmt.Sprint(sg.Name, "-", i), trip{})
		require.NoError(t, err)
	}
}

func requireCompleted(t *testing.T, r *saga.Runner, id string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
	defer cancel()
	_, err := result[trip](ctx, r, id)
	require.NoError(t, err, id)
}

// A forgetting store ends leases while their steps run.
type forgetting struct {
	store.Store
	rng func(n int) int
}

func (f *forgetting) Heartbeat(ctx context.Context, req store.HeartbeatRequest) ([]store.Renewed, error) {
	if f.rng(3) == 0 {
		return nil, errTooLong
	}
	return f.Store.Heartbeat(ctx, req)
}

// TestFreePlaceIsTakenAtOnce: the runner has filled all its places with sagas that it started. It claims the waiting
// ones as soon as a place is free.
func TestFreePlaceIsTakenAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, store := newCrew(), saga.NewMemory()
		sg := c.works("trip", lasting(10*time.Second))
		r, _ := begin(t, store, saga.RunnerConfig{Poll: 3 * time.Second, Concurrency: 1}, sg)
		_, err := saga.Register(r, sg).Start(t.Context(), "trip-0", trip{})
		require.NoError(t, err)
		begun := time.Now()
		enqueue(t, store, sg, 1, 1)
		requireCompleted(t, r, "trip-1")
		require.Less(t, time.Since(begun), 20*time.Second+time.Millisecond)
	})
}

// A startless store blocks each Start until the test releases it. Then the Start fails.
type startless struct {
	store.Store
	asked, fail chan struct{}
}

func (s *startless) Start(ctx context.Context, req store.StartRequest) (store.Record, bool, error) {
	if req.ID != "lost" {
		return s.Store.Start(ctx, req)
	}
	close(s.asked)
	<-s.fail
	return store.Record{}, false, errTooLong
}

// TestFailedStartFreesPlaceAtOnce: a claim leaves a saga behind because a Start has the last place. The Start fails,
// and the saga gets the place immediately.
func TestFailedStartFreesPlaceAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCrew()
		st := &startless{saga.NewMemory(), make(chan struct{}), make(chan struct{})}
		sg := c.works("trip", lasting(time.Minute))
		r, _ := begin(t, store.Store(st), saga.RunnerConfig{Concurrency: 2, Poll: time.Hour, LeaseTTL: time.Hour}, sg)
		_, err := saga.Register(r, sg).Start(t.Context(), "held", trip{})
		require.NoError(t, err)
		go func() { _, _ = saga.Register(r, sg).Start(t.Context(), "lost", trip{}) }()
		<-st.asked
		enqueue(t, st, sg, 0, 1)
		r.Wake()
		synctest.Wait()
		require.Equal(t, 1, c.mostOf("trip"))
		close(st.fail)
		synctest.Wait()
		require.Equal(t, 2, c.mostOf("trip"))
	})
}

// TestSagaEndedDuringClaimFreesPlaceAtOnce: claimed sagas end before the claim returns. The sagas that the claim
// left behind do not wait for the next Poll.
func TestSagaEndedDuringClaimFreesPlaceAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n = 400
		begun, st := time.Now(), saga.NewMemory()
		nothing := saga.Step[trip]{Name: "nothing", Do: func(context.Context, *trip) error { return nil }, ReadOnly: true}
		sg := &saga.Saga[trip]{Name: "trip", Steps: []saga.Step[trip]{nothing}}
		enqueue(t, st, sg, 0, n)
		r, _ := begin(t, st, saga.RunnerConfig{Concurrency: 1, Poll: time.Hour, LeaseTTL: 4 * time.Hour}, sg)
		for total(r, "status=completed") < n {
			time.Sleep(time.Second)
		}
		require.Less(t, time.Since(begun), time.Minute)
	})
}

// TestFullRunnerClaimsInBatches: a full runner claims several sagas with one call, instead of one saga whenever
// another one ends.
func TestFullRunnerClaimsInBatches(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n = 40
		var limits []int
		g := &gate{Store: saga.NewMemory()}
		g.claim = func(ctx context.Context, req store.ClaimRequest) ([]store.Record, error) {
			limits = append(limits, req.Limit)
			return g.Store.Claim(ctx, req)
		}
		var takes atomic.Int64 // makes each saga longer than the one before
		sg := newCrew().works("trip", func() time.Duration { return time.Duration(takes.Add(1)) * time.Second })
		enqueue(t, g, sg, 0, n)
		r, _ := begin(t, store.Store(g), saga.RunnerConfig{Concurrency: 8, Poll: time.Hour}, sg)
		time.Sleep(n * n * time.Second)
		require.Equal(t, n, total(r, "status=completed"))
		require.Equal(t, append([]int{8}, slices.Repeat([]int{2}, (n-8)/2+1)...), limits)
	})
}

// TestReclaimEndsEarlierAttempt: the store's clock ends the lease of a saga while the runner's clock does not, as
// after a suspension. The runner claims the saga again, and the earlier attempt ends.
func TestReclaimEndsEarlierAttempt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st, sg := saga.NewMemory(), slow(time.Hour)
		r, _ := observed(t, st, saga.RunnerConfig{}, silent, sg)
		in := mustStart(t, r, sg)
		_, err := st.Heartbeat(t.Context(),
			store.HeartbeatRequest{Owner: in.Owner, LeaseTTL: 1, Held: []store.Held{{ID: in.ID, Epoch: in.Epoch}}})
		require.NoError(t, err)
		time.Sleep(time.Millisecond)
		r.Wake()
		synctest.Wait()
		stats := r.Stats()
		require.Equal(t, []int64{1, 1, 1}, []int64{stats.Held, stats.InFlight, stats.Lost})
	})
}

// TestSagaTakenOverFromItselfHasOnePlace: the lease of a saga has expired while an attempt that ignores its ctx
// runs. The runner that takes its own saga over needs one place for it.
func TestSagaTakenOverFromItselfHasOnePlace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, st := newCrew(), &forgetting{saga.NewMemory(), func(int) int { return 0 }}
		sg := c.works("trip", lasting(500*time.Millisecond))
		var attempts atomic.Int64
		do := sg.Steps[0].Do
		sg.Steps[0].Do = func(ctx context.Context, s *trip) error {
			if attempts.Add(1) == 1 {
				time.Sleep(10 * time.Second)
			}
			return do(ctx, s)
		}
		r, _ := observed(t, store.Store(st), saga.RunnerConfig{Concurrency: 2, LeaseTTL: time.Second}, silent, sg)
		for round := range 3 {
			attempts.Store(0)
			_, err := saga.Register(r, sg).Start(t.Context(), fmt.Sprint("trip-", round), trip{})
			require.NoError(t, err)
			requireCompleted(t, r, fmt.Sprint("trip-", round))
			time.Sleep(20 * time.Second)
			require.Zero(t, r.Stats().Held)
		}
		for i := range 2 {
			_, err := saga.Register(r, sg).Start(t.Context(), fmt.Sprint("last-", i), trip{})
			require.NoError(t, err)
		}
		synctest.Wait()
		require.Equal(t, 2, c.mostOf("trip"))
	})
}
