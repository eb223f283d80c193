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

// onLimit calls f with each change of a limit.
func onLimit(b observed, f func(context.Context, bulkhead.Event)) {
	b.Observe(func(ctx context.Context, e bulkhead.Event) {
		if e.Kind == bulkhead.EventLimitChanged {
			f(ctx, e)
		}
	})
}

// onRefuse calls f with each refusal.
func onRefuse(b observed, f func(context.Context, *bulkhead.FullError)) {
	b.Observe(func(ctx context.Context, e bulkhead.Event) {
		if e.Kind == bulkhead.EventRefused {
			f(ctx, e.Err.(*bulkhead.FullError))
		}
	})
}

func TestObserversAreToldOfWaitsRefusalsAndLimits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := bulkhead.New(bulkhead.Config{
			Name: "x", Limit: 1, MaxWait: time.Second, Levels: 2, Priority: levelOf, Cost: costOf,
		})
		var events []bulkhead.Event
		stop := b.Observe(func(ctx context.Context, e bulkhead.Event) {
			events = append(events, e)
			b.Stats()
		})
		require.NoError(t, b.SetLimit(2))
		require.NoError(t, b.Do(t.Context(), nothing), "a call that does not wait is no event")
		done, err := b.Begin(costing(t.Context(), 2))
		require.NoError(t, err)
		time.AfterFunc(300*time.Millisecond, func() { done(nil) })
		require.NoError(t, b.Do(atLevel(t.Context(), 1), func(context.Context) error {
			require.Len(t, events, 2, "the wait is told of before the call runs")
			return nil
		}))
		refusal := b.Do(costing(t.Context(), 3), nothing)
		require.Equal(t, []bulkhead.Event{
			{Kind: bulkhead.EventLimitChanged, Name: "x", From: 1, To: 2},
			{Kind: bulkhead.EventWaited, Name: "x", Level: 1, Cost: 1, Waited: 300 * time.Millisecond},
			{Kind: bulkhead.EventRefused, Name: "x", Cost: 3, Reason: bulkhead.TooCostly, Err: refusal},
		}, events)
		stop()
		require.NoError(t, b.SetLimit(1))
		require.Len(t, events, 3)
		requireIdle(t, b)
	})
}

func TestAnObserverThatPanicsGivesTheSlotBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := bulkhead.New(bulkhead.Config{Limit: 1, MaxWait: -1})
		b.Observe(func(context.Context, bulkhead.Event) { panic("boom") })
		release := hold(t, b)
		time.AfterFunc(time.Second, release)
		require.PanicsWithValue(t, "boom", func() { _ = b.Do(t.Context(), nothing) })
		requireIdle(t, b)
	})
}

func TestObserversOfAGroupAreToldTheKey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := bulkhead.NewGroup(bulkhead.GroupConfig[int]{Config: bulkhead.Config{Name: "api", Limit: 1, MaxWait: time.Second}, MaxKeys: 1})
		type told struct {
			kind bulkhead.EventKind
			key  string
		}
		var events []told
		g.Observe(func(_ context.Context, e bulkhead.Event) {
			require.Equal(t, "api", e.Name)
			events = append(events, told{e.Kind, e.Key})
		})
		done, err := g.Begin(t.Context(), 7)
		require.NoError(t, err)
		go func() { _ = g.Do(t.Context(), 7, nothing) }()
		synctest.Wait()
		done(nil)
		synctest.Wait()
		done, err = g.Begin(t.Context(), 7)
		require.NoError(t, err)
		require.Error(t, g.Do(t.Context(), 7, nothing))
		require.NoError(t, g.Do(t.Context(), 8, func(ctx context.Context) error { return nil }))
		shared, err := g.Begin(t.Context(), 8)
		require.NoError(t, err)
		require.Error(t, g.Do(t.Context(), 9, nothing))
		shared(nil)
		done(nil)
		require.Equal(t, []told{
			{bulkhead.EventWaited, "7"}, {bulkhead.EventRefused, "7"}, {bulkhead.EventRefused, "(other keys)"},
		}, events)
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
		release()
		require.Equal(t, bulkhead.Totals{
			Admitted: 5, Waited: 2, WaitTime: 5 * time.Second, Refused: 1, Refusals: map[bulkhead.Reason]int64{bulkhead.WaitTooLong: 1},
		}, b.Stats().Totals)
	})
}

func TestGroupStatsNeverGoBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := bulkhead.NewGroup(bulkhead.GroupConfig[int]{
			Config:  bulkhead.Config{Limit: 1, MaxWait: time.Second},
			MaxKeys: 2,
		})
		for key := range 50 {
			done, err := g.Begin(t.Context(), key)
			require.NoError(t, err)
			time.AfterFunc(100*time.Millisecond, func() { done(nil) })
			require.NoError(t, g.Do(t.Context(), key, nothing))
		}
		var dones []func(error)
		for key := range 2 {
			done, err := g.Begin(t.Context(), key)
			require.NoError(t, err)
			dones = append(dones, done)
			time.Sleep(time.Minute)
		}
		require.Error(t, g.Do(t.Context(), 0, nothing))
		go func() { _ = g.Do(t.Context(), 1, nothing) }()
		synctest.Wait()
		time.Sleep(500 * time.Millisecond)
		require.Equal(t, bulkhead.GroupStats{
			Totals: bulkhead.Totals{
				Admitted: 102, Waited: 50, WaitTime: 5 * time.Second,
				Refused: 1, Refusals: map[bulkhead.Reason]int64{bulkhead.WaitTooLong: 1},
			},
			Keys: 2, Limit: 3, InFlight: 2, Queued: []int{1},
			LongestWait: 500 * time.Millisecond,
			LongestHeld: 2*time.Minute + 1500*time.Millisecond,
		}, g.Stats())
		for _, done := range dones {
			done(nil)
		}
	})
}
