package bulkhead_test

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"

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
	require.EqualError(t, plain.SetLimit(0), "bulkhead.Config.Limit is 0: must be 1 to 1073741823")
	require.Error(t, plain.SetLimit(-3))
	require.Error(t, plain.SetLimit(1<<30))
	require.Equal(t, 5, plain.Stats().Limit)
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
