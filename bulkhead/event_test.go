package bulkhead_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/bulkhead"
)

type observed interface {
	Observe(func(context.Context, bulkhead.Event)) (stop func())
}

// onRefuse calls f with each refusal.
func onRefuse(b observed, f func(context.Context, *bulkhead.FullError)) {
	b.Observe(func(ctx context.Context, e bulkhead.Event) {
		if e.Refusal != nil {
			f(ctx, e.Refusal)
		}
	})
}

func TestObserversReceiveWaitsAndRefusals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := bulkhead.New(bulkhead.Config{
			Name: "x", Limit: 1, MaxWait: time.Second, Levels: 2, Priority: levelOf, Cost: costOf,
		})
		var events []bulkhead.Event
		stop := b.Observe(func(ctx context.Context, e bulkhead.Event) {
			events = append(events, e)
			require.Equal(t, "mine", shareOf(ctx))
			b.Stats()
		})
		ctx := ofShare(t.Context(), "mine")
		require.NoError(t, setLimit(b, 2))
		require.NoError(t, b.Do(t.Context(), nothing), "a call that does not wait is no event")
		done, err := b.Begin(costing(t.Context(), 2))
		require.NoError(t, err)
		time.AfterFunc(300*time.Millisecond, func() { done(nil) })
		require.NoError(t, b.Do(atLevel(ctx, 1), func(context.Context) error {
			require.Len(t, events, 1, "the wait is told of before the call runs")
			return nil
		}))
		refusal := b.Do(costing(ctx, 3), nothing)
		require.Equal(t, []bulkhead.Event{
			{Kind: bulkhead.EventWaited, Name: "x", Waited: 300 * time.Millisecond},
			{Kind: bulkhead.EventRefused, Name: "x", Refusal: refusal.(*bulkhead.FullError)},
		}, events)
		stop()
		require.Error(t, b.Do(costing(t.Context(), 3), nothing))
		require.Len(t, events, 2)
		requireIdle(t, b)
	})
}

func TestPanickingObserverReleasesSlot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := bulkhead.New(bulkhead.Config{Limit: 1, MaxWait: time.Second})
		b.Observe(func(context.Context, bulkhead.Event) { panic("boom") })
		release := hold(t, b)
		time.AfterFunc(time.Second/2, release)
		require.PanicsWithValue(t, "boom", func() { _ = b.Do(t.Context(), nothing) })
		requireIdle(t, b)
		release = hold(t, b)
		require.PanicsWithValue(t, "boom", func() { _ = b.Do(t.Context(), nothing) })
		require.Equal(t, 1, b.Stats().InFlight, "a call that was refused has none to give back")
		release()
	})
}

func TestStatsSumTheWaitsOfAdmittedCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := bulkhead.New(bulkhead.Config{Limit: 1, MaxWait: 5 * time.Second})
		release := hold(t, b)
		time.AfterFunc(2*time.Second, release)
		require.NoError(t, b.Do(t.Context(), nothing))
		release = hold(t, b)
		time.AfterFunc(3*time.Second, release)
		require.NoError(t, b.Do(t.Context(), nothing))
		release = hold(t, b)
		require.Error(t, b.Do(t.Context(), nothing), "after 5 s")
		s := b.Stats()
		require.Error(t, b.Do(t.Context(), nothing), "which does not change a snapshot")
		require.EqualValues(t, 5, s.Admitted)
		require.EqualValues(t, 2, s.Waited)
		require.Equal(t, 5*time.Second, s.WaitTime)
		require.EqualValues(t, 1, s.Refused)
		require.Equal(t, map[bulkhead.Reason]int64{
			bulkhead.NoSlot: 0, bulkhead.QueueFull: 0, bulkhead.Displaced: 0, bulkhead.WaitTooLong: 1,
			bulkhead.DeadlineTooClose: 0, bulkhead.ContextEnded: 0, bulkhead.TooCostly: 0,
		}, s.Refusals, "every reason has an entry")
		release()
	})
}
