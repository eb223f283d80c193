package bulkhead_test

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/internal/describe"
)

func TestBulkheadDescribesItself(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := bulkhead.New(bulkhead.Config{Name: "x", Limit: 2, MaxWait: time.Minute, Levels: 2, Priority: levelOf, Cost: costOf})
		require.Equal(t, "bulkhead", b.Kind())
		require.Equal(t, "x", b.Name())
		require.NoError(t, b.Health())
		require.False(t, b.Needed())
		first := hold(t, b)
		require.NoError(t, b.Health())
		require.True(t, b.Needed())
		second := hold(t, b)
		require.EqualError(t, b.Health(), "full: 2 of 2 in flight")
		go func() { _ = b.Do(atLevel(t.Context(), 1), nothing) }()
		time.Sleep(3 * time.Second)
		require.NoError(t, setLimit(b, 1))
		require.Error(t, b.Do(costing(t.Context(), 2), nothing))
		figures := map[string]float64{}
		counters := 0
		for _, f := range b.Figures() {
			figures[f.Name] = f.Value
			if f.Counter {
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
			"bulkhead.calls{outcome=refused,reason=context_ended}":      0,
			"bulkhead.calls{outcome=refused,reason=deadline_too_close}": 0,
			"bulkhead.calls{outcome=refused,reason=too_costly}":         1,
			"bulkhead.queued{level=0}":                                  0,
			"bulkhead.queued{level=1}":                                  1,
			"bulkhead.waits":                                            0,
			"bulkhead.wait.time_seconds":                                0,
			"bulkhead.wait.longest_seconds":                             3,
			"bulkhead.limit":                                            1,
			"bulkhead.in_flight":                                        2,
		}, figures)
		first()
		second()
		synctest.Wait()
		require.False(t, b.Needed())
		require.Equal(t, 3*time.Second, b.Stats().WaitTime)
	})
}

func TestEventsDescribeThemselves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := bulkhead.New(bulkhead.Config{Name: "x", Limit: 1, MaxWait: time.Second, Share: shareOf})
		var told []string
		stop := b.ObserveAny(func(_ context.Context, e any) {
			line := fmt.Sprint(e.(describe.Event).Level())
			e.(describe.Event).Fields(func(name string, value any) { line += fmt.Sprintf(" %s=%v", name, value) })
			told = append(told, line)
		})
		release := hold(t, b)
		require.Error(t, b.Do(ofShare(t.Context(), "a"), nothing))
		time.AfterFunc(500*time.Millisecond, release)
		require.NoError(t, b.Do(t.Context(), nothing))
		require.Equal(t, []string{
			"4 event=refused reason=wait_too_long share=a waited=1s err=bulkhead: x: full (wait_too_long): 1 of 1 in flight, 0 waiting, waited 1s",
			"-4 event=waited waited=500ms",
		}, told)
		stop()
		release = hold(t, b)
		require.Error(t, b.Do(t.Context(), nothing))
		require.Len(t, told, 2)
		release()
	})
}
