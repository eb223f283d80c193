package bulkhead_test

import (
	"context"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/policy"
)

func TestDescribe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := bulkhead.New(bulkhead.Config{
			Name: "x", Limit: 2, MaxWait: time.Minute, Levels: 2, Priority: levelOf, Cost: costOf,
		})
		d := b.Describe()
		require.Equal(t, "bulkhead", d.Kind)
		require.Equal(t, "x", d.Name)
		require.Zero(t, d.Health(t.Context()))
		require.False(t, d.InUse())
		first := hold(t, b)
		require.Zero(t, d.Health(t.Context()))
		require.True(t, d.InUse())
		second := hold(t, b)
		require.Equal(t, policy.Health{Status: policy.Warn, State: "full", Detail: "2 of 2 in flight"}, d.Health(t.Context()))
		go func() { _ = b.Do(atLevel(t.Context(), 1), nothing) }()
		time.Sleep(3 * time.Second)
		require.NoError(t, setLimit(b, 1))
		require.Error(t, b.Do(costing(t.Context(), 2), nothing))
		metrics := map[string]float64{}
		counters := 0
		for _, m := range d.Metrics() {
			metrics[m.Name] = m.Value
			if m.Counter {
				counters++
			}
		}
		require.Equal(t, 10, counters)
		require.Equal(t, map[string]float64{
			"bulkhead.calls{outcome=admitted,reason=}":                  2,
			"bulkhead.calls{outcome=refused,reason=no_slot}":            0,
			"bulkhead.calls{outcome=refused,reason=queue_full}":         0,
			"bulkhead.calls{outcome=refused,reason=displaced}":          0,
			"bulkhead.calls{outcome=refused,reason=wait_too_long}":      0,
			"bulkhead.calls{outcome=refused,reason=deadline_too_close}": 0,
			"bulkhead.calls{outcome=refused,reason=context_ended}":      0,
			"bulkhead.calls{outcome=refused,reason=too_costly}":         1,
			"bulkhead.queued{level=0}":                                  0,
			"bulkhead.queued{level=1}":                                  1,
			"bulkhead.waits":                                            0,
			"bulkhead.wait.time_seconds":                                0,
			"bulkhead.wait.longest_seconds":                             3,
			"bulkhead.limit":                                            1,
			"bulkhead.in_flight":                                        2,
		}, metrics)
		first()
		second()
		synctest.Wait()
		require.False(t, d.InUse())
		require.Equal(t, 3*time.Second, b.Stats().WaitTime)
	})
}

func TestDescribedConfigAndUpdate(t *testing.T) {
	b := bulkhead.New(bulkhead.Config{Limit: 3, MaxWait: time.Second})
	d := b.Describe()
	require.Equal(t, b.Config(), d.Config())
	setTo := func(limit int) func(any) error {
		return func(cfg any) error {
			require.Equal(t, bulkhead.Config{Limit: 3, MaxWait: time.Second}, *cfg.(*bulkhead.Config), "as it was given")
			cfg.(*bulkhead.Config).Limit = limit
			return nil
		}
	}
	require.NoError(t, d.Update(true, setTo(4)))
	require.Equal(t, 3, b.Stats().Limit, "a dry run")
	require.ErrorContains(t, d.Update(false, setTo(0)), "Limit is 0")
	rename := func(cfg any) error { cfg.(*bulkhead.Config).Name = "y"; return nil }
	require.ErrorContains(t, d.Update(true, rename), "cannot change")
	require.NoError(t, d.Update(false, setTo(4)))
	require.Equal(t, 4, b.Stats().Limit)
}

func TestDescribedEvents(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := bulkhead.New(bulkhead.Config{Name: "x", Limit: 1, MaxWait: time.Second, Share: shareOf})
		var events []policy.Event
		var mu sync.Mutex
		stop := b.Describe().Observe(func(_ context.Context, e policy.Event) {
			mu.Lock()
			defer mu.Unlock()
			events = append(events, e)
		})
		release := hold(t, b)
		late := b.Do(ofShare(t.Context(), "a"), nothing)
		require.EqualError(t, late, "bulkhead: x: full (wait_too_long): 1 of 1 in flight, 0 waiting, waited 1s")
		require.NoError(t, b.Update(func(c *bulkhead.Config) { c.Queue = 1 }))
		time.AfterFunc(500*time.Millisecond, release)
		go func() {
			time.Sleep(time.Millisecond)
			require.ErrorIs(t, b.Do(t.Context(), nothing), bulkhead.ErrFull)
		}()
		require.NoError(t, b.Do(t.Context(), nothing))
		require.Len(t, events, 3)
		require.Equal(t, policy.Event{
			Kind: "bulkhead", Name: "x", What: "refused", Level: slog.LevelWarn, Err: late,
			Attrs: []slog.Attr{
				slog.String("reason", "wait_too_long"), slog.String("share", "a"), slog.Duration("waited", time.Second),
			},
		}, events[0])
		require.Equal(t, []slog.Attr{slog.String("reason", "queue_full")}, events[1].Attrs, "no wait")
		require.Equal(t, policy.Event{
			Kind: "bulkhead", Name: "x", What: "waited", Level: slog.LevelDebug,
			Attrs: []slog.Attr{slog.Duration("waited", 500*time.Millisecond)},
		}, events[2])
		stop()
		release = hold(t, b)
		require.Error(t, b.Do(t.Context(), nothing))
		require.Len(t, events, 3)
		release()
	})
}
