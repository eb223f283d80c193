package bulkhead_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/bulkhead"
)

func TestGrowingWakesWaitingCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCallers(t, bulkhead.New(bulkhead.Config{Limit: 1, MaxWait: -1, Queue: 9}))
		for i := range 5 {
			c.start(t.Context(), fmt.Sprint(i))
		}
		require.NoError(t, c.b.SetLimit(3))
		synctest.Wait()
		require.ElementsMatch(t, []string{"0", "1", "2"}, c.ran)
		require.Equal(t, 3, c.b.Stats().InFlight)
		c.finishAll()
	})
}

func TestShrinkingLetsCallsInFlightFinish(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCallers(t, bulkhead.New(bulkhead.Config{Limit: 4, Cost: costOf, MaxWait: -1, Queue: 9}))
		for i := range 4 {
			c.start(t.Context(), fmt.Sprint("running ", i))
		}
		c.start(costing(t.Context(), 3), "costly")
		require.NoError(t, c.b.SetLimit(2))
		synctest.Wait()
		require.Equal(t, bulkhead.TooCostly, c.refusal("costly"))
		s := c.b.Stats()
		require.Equal(t, 2, s.Limit)
		require.Equal(t, 4, s.InFlight)
		c.start(t.Context(), "waits")
		c.finish("running 0", "running 1")
		require.NotContains(t, c.ran, "waits")
		c.finish("running 2")
		require.Contains(t, c.ran, "waits")
		require.Equal(t, 2, c.b.Stats().InFlight)
		c.finishAll()
	})
}

func TestSetLimitNamesTheRange(t *testing.T) {
	plain := bulkhead.New(bulkhead.Config{Name: "x", Limit: 5})
	require.EqualError(t, plain.SetLimit(0), "bulkhead: x: SetLimit(0): must be 1 to 1073741823")
	require.Error(t, plain.SetLimit(-3))
	require.Error(t, plain.SetLimit(1<<30))
	require.Equal(t, 5, plain.Stats().Limit)

	adaptive := bulkhead.New(bulkhead.Config{Adaptive: &bulkhead.AdaptiveLimit{Min: 3, Max: 30}})
	require.EqualError(t, adaptive.SetLimit(31), "bulkhead: SetLimit(31): must be 3 to 30")
	require.NoError(t, adaptive.SetLimit(30))
	require.Equal(t, 30, adaptive.Stats().Limit)
	require.NoError(t, adaptive.Do(t.Context(), nothing))
	require.Equal(t, 30, adaptive.Stats().Limit)
}

func TestObserversAreToldOfEachChangeInOrder(t *testing.T) {
	var b *bulkhead.Bulkhead
	var told []bulkhead.Event
	b = bulkhead.New(bulkhead.Config{Name: "x", Limit: 1})
	onLimit(b, func(_ context.Context, c bulkhead.Event) {
		told = append(told, c)
		if c.To == 2 { // a hook may call back; it is told of that afterwards
			require.NoError(t, b.SetLimit(3))
			require.Len(t, told, 1)
		}
	})
	require.NoError(t, b.SetLimit(1)) // no change
	require.NoError(t, b.SetLimit(2))
	require.Equal(t, []bulkhead.Event{
		{Kind: bulkhead.EventLimitChanged, Name: "x", From: 1, To: 2},
		{Kind: bulkhead.EventLimitChanged, Name: "x", From: 2, To: 3},
	}, told)
}

// The ctx is that of the call with which an adaptive limit changes.
func TestAChangeOfTheLimitHasTheContextOfTheCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var of any
		b := bulkhead.New(bulkhead.Config{
			Adaptive: &bulkhead.AdaptiveLimit{Initial: 1, Max: 40},
		})
		onLimit(b, func(ctx context.Context, _ bulkhead.Event) { of = ctx.Value(levelKey{}) })
		require.NoError(t, b.SetLimit(2))
		require.Nil(t, of)
		ctx := context.WithValue(t.Context(), levelKey{}, "of the call")
		for b.Stats().Limit == 2 {
			var calls sync.WaitGroup
			for range 10 {
				calls.Go(func() { _ = b.Do(ctx, taking(10*time.Millisecond, nil)) })
			}
			calls.Wait()
		}
		require.Equal(t, "of the call", of)
	})
}

func TestChangesOfTheLimitAreToldOneAtATime(t *testing.T) {
	at := 100
	b := bulkhead.New(bulkhead.Config{Limit: 100})
	onLimit(b, func(_ context.Context, c bulkhead.Event) {
		if c.From != at { // the race detector watches at
			t.Errorf("from %d, was at %d", c.From, at)
		}
		at = c.To
	})
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for j := range 500 {
				_ = b.SetLimit(1 + i*500 + j)
			}
		})
	}
	wg.Wait()
	require.Equal(t, at, b.Stats().Limit)
}

func TestAPanicInAnObserverOfTheLimitDoesNotStopTheNextOnes(t *testing.T) {
	told := 0
	b := bulkhead.New(bulkhead.Config{Limit: 1})
	onLimit(b, func(context.Context, bulkhead.Event) {
		if told++; told == 1 {
			panic("boom")
		}
	})
	require.PanicsWithValue(t, "boom", func() { _ = b.SetLimit(2) })
	require.NoError(t, b.SetLimit(3))
	require.Equal(t, 2, told)
	requireIdle(t, b)
}

// The word that holds the state counts some of the calls that were admitted. When
// it cannot count more, none is lost.
func TestAdmittedIsCountedBeyondTheWord(t *testing.T) {
	b := bulkhead.New(bulkhead.Config{Limit: 3})
	defer hold(t, b)()
	for range 2 {
		bulkhead.SkipAdmitted(b, 1<<31-2)
		for range 5 {
			require.NoError(t, b.Do(t.Context(), nothing))
		}
	}
	s := b.Stats()
	require.EqualValues(t, 1<<32-4+10+1, s.Admitted)
	require.Equal(t, 1, s.InFlight)
	again := b.Stats()
	require.Equal(t, s.Admitted, again.Admitted)
}

// Nothing but TryBegin folds here.
func TestTryBeginIsCountedBeyondTheWord(t *testing.T) {
	b := bulkhead.New(bulkhead.Config{Limit: 1})
	for range 2 {
		bulkhead.SkipAdmitted(b, 1<<31-2)
		for range 5 {
			done, err := b.TryBegin(t.Context())
			require.NoError(t, err)
			done(nil)
		}
	}
	require.EqualValues(t, 1<<32-4+10, b.Stats().Admitted)
}

// A refusal tells the slots in flight at one moment, also while the limit changes.
func TestARefusalCountsTheSlotsInFlightWhileTheLimitChanges(t *testing.T) {
	const held = 4
	b := bulkhead.New(bulkhead.Config{Limit: held})
	for range held {
		defer hold(t, b)()
	}
	var stop atomic.Bool
	var setter sync.WaitGroup
	setter.Go(func() {
		for i := 0; !stop.Load(); i++ {
			if err := b.SetLimit(1 + i%held); err != nil {
				t.Error(err)
			}
		}
	})
	for range 200_000 {
		var full *bulkhead.FullError
		if err := b.Do(t.Context(), nothing); !errors.As(err, &full) || full.InFlight != held {
			t.Errorf("%v", err)
			break
		}
	}
	stop.Store(true)
	setter.Wait()
}

func TestARefusalCostsNoAllocation(t *testing.T) {
	b := bulkhead.New(bulkhead.Config{Limit: 1, MaxWait: -1, Queue: 1})
	defer hold(t, b)()
	ctx, cancel := context.WithCancel(t.Context())
	go func() { _ = b.Do(ctx, nothing) }()
	for b.Stats().Queued[0] == 0 {
		runtime.Gosched()
	}
	defer cancel()
	require.Zero(t, testing.AllocsPerRun(100, func() { _ = b.Do(ctx, nothing) }))
	first, second := b.Do(ctx, nothing), b.Do(ctx, nothing)
	require.Same(t, first, second)
	_, third := b.TryBegin(ctx)
	require.ErrorIs(t, third, bulkhead.ErrFull)

	free := bulkhead.New(bulkhead.Config{Limit: 1})
	require.Zero(t, testing.AllocsPerRun(100, func() { _ = free.Do(ctx, nothing) }))
}
