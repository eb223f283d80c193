package saga_test

import (
	"context"
	"errors"
	"runtime"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga"
	store "github.com/go-resilience/resilience/saga/sagastore"
)

// A countingLoads store counts the records that are read.
type countingLoads struct {
	store.Store
	loads atomic.Int64
}

func (s *countingLoads) Load(ctx context.Context, id string) (store.Record, error) {
	s.loads.Add(1)
	return s.Store.Load(ctx, id)
}

// TestResultOfHeldSagaReadsNoStore: the runner knows how the saga ends. A saga that takes longer than Poll is read,
// since an operator in another process may have ended it.
func TestResultOfHeldSagaReadsNoStore(t *testing.T) {
	for _, test := range []struct {
		takes time.Duration
		fails error
		loads int64 // of three calls
		want  error
	}{
		{takes: 900 * time.Millisecond},
		{takes: 2500 * time.Millisecond, loads: 6},
		{takes: 900 * time.Millisecond, fails: saga.Declined(errors.New("full")), want: saga.ErrCompensated},
	} {
		synctest.Test(t, func(t *testing.T) {
			st := &countingLoads{Store: saga.NewMemory()}
			slow := step("hotel")
			slow.Do = func(_ context.Context, s *trip) error {
				time.Sleep(test.takes)
				s.Calls = append(s.Calls, "do hotel")
				return test.fails
			}
			sg := sequence(step("flight"), slow)
			r, _ := begin(t, st, saga.RunnerConfig{}, sg)
			mustStart(t, r, sg)
			results := make(chan trip, 3)
			for range 3 {
				go func() {
					s, err := saga.Register(r, sg).Result(t.Context(), "trip-1")
					assert.ErrorIs(t, err, test.want)
					results <- s
				}()
			}
			for range 3 {
				require.Subset(t, (<-results).Calls, []string{"do flight", "do hotel"})
			}
			require.Equal(t, test.loads, st.loads.Load())
		})
	}
}

// TestResultForgetsPastStoreError: the error returned after ctx is done does not include it.
func TestResultForgetsPastStoreError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, sg := &gate{Store: saga.NewMemory()}, sequence(awaits("paid"))
		client := idle(g, sg)
		mustStart(t, client, sg)
		g.set(true)
		time.AfterFunc(1500*time.Millisecond, func() { g.set(false) })
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		_, err := saga.Register(client, sg).Result(ctx, "trip-1")
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.NotErrorIs(t, err, errDown)
	})
}

// TestCanceledResultKeepsOtherWaiters: the ctx of one Result is done before the others return.
func TestCanceledResultKeepsOtherWaiters(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sg := slow(time.Minute)
		r, _ := begin(t, saga.NewMemory(), saga.RunnerConfig{Poll: time.Hour, LeaseTTL: 4 * time.Hour}, sg)
		mustStart(t, r, sg)
		begun, done := time.Now(), make(chan time.Duration, 3)
		for i := range 3 {
			time.Sleep(time.Second)
			go func() {
				ctx, cancel := context.WithTimeout(t.Context(), []time.Duration{2 * time.Hour, 10 * time.Second, 2 * time.Hour}[i])
				defer cancel()
				_, _ = saga.Register(r, sg).Result(ctx, "trip-1")
				done <- time.Since(begun)
			}()
		}
		require.Equal(t, 12*time.Second, <-done)
		require.Equal(t, time.Minute, <-done)
		require.Equal(t, time.Minute, <-done)
	})
}

// An aliasing Codec retains the bytes that it decodes.
type aliasing struct{}

func (aliasing) Encode(s *[]byte) ([]byte, error) { return *s, nil }

func (aliasing) Decode(data []byte, s *[]byte) error { *s = data; return nil }

func TestResultIsNotShared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		do := func(context.Context, *[]byte) error { time.Sleep(time.Millisecond); return nil }
		sg := &saga.Saga[[]byte]{Name: "bytes", Codec: aliasing{},
			Steps: []saga.Step[[]byte]{{Name: "wait", Do: do, ReadOnly: true}}}
		r, _ := begin(t, saga.NewMemory(), saga.RunnerConfig{}, sg)
		_, err := saga.Register(r, sg).Start(t.Context(), "bytes-1", []byte("paid"))
		require.NoError(t, err)
		results := make(chan []byte)
		for range 2 {
			go func() {
				s, err := saga.Register(r, sg).Result(t.Context(), "bytes-1")
				assert.NoError(t, err)
				results <- s
			}()
		}
		for range 2 {
			s := <-results
			require.Equal(t, "paid", string(s))
			s[0] = 'm'
		}
	})
}

// TestResultInObserverOfEnd: the saga waits for its observers, and has ended nevertheless.
func TestResultInObserverOfEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sg := sequence(step("flight"))
		var r *saga.Runner
		var took time.Duration
		r, _ = observed(t, saga.NewMemory(), saga.RunnerConfig{}, func(ctx context.Context, e saga.Event) {
			if e.Kind == saga.EventCompleted {
				begun := time.Now()
				_, err := saga.Register(r, sg).Result(ctx, e.ID)
				assert.NoError(t, err)
				took = time.Since(begun)
			}
		}, sg)
		mustStart(t, r, sg)
		requireEnd(t, r, "trip-1", nil)
		require.Zero(t, took)
	})
}

// TestLongResultNeedsConstantMemory waits for a saga that no runner of this process holds.
func TestLongResultNeedsConstantMemory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const polls = 100_000
		sg := sequence(step("flight"))
		r := idle(saga.NewMemory(), sg)
		mustStart(t, r, sg)
		inUse := func() int {
			var m runtime.MemStats
			runtime.GC()
			runtime.ReadMemStats(&m)
			return int(m.HeapAlloc)
		}
		before := inUse()
		_, err := saga.Register(r, sg).Result(canceledAfter(t, polls*time.Second), "trip-1")
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Less(t, inUse()-before, 100*polls)
		runtime.KeepAlive(r)
	})
}
