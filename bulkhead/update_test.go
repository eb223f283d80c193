package bulkhead_test

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/bulkhead"
)

func TestConfigHasDefaultsFilledIn(t *testing.T) {
	b := bulkhead.New(bulkhead.Config{Name: "x", Limit: 8})
	require.Equal(t, bulkhead.Config{Name: "x", Limit: 8, Levels: 1}, b.Config())
	require.NoError(t, setLimit(b, 5))
	require.Equal(t, 5, b.Config().Limit)

	b = bulkhead.New(bulkhead.Config{Limit: 30, MaxWait: -1, Levels: 2, Priority: zero})
	cfg := b.Config()
	cfg.Priority = nil // functions are not equal
	require.Equal(t, bulkhead.Config{Limit: 30, MaxWait: -1, Queue: 1000, Levels: 2}, cfg)
	require.NoError(t, bulkhead.New(b.Config()).Do(t.Context(), nothing))
}

// Update gets the Config as it was given, so that a default stays one.
func TestUpdateShowsEffectiveValues(t *testing.T) {
	b := bulkhead.New(bulkhead.Config{Limit: 3})
	require.NoError(t, b.Update(func(c *bulkhead.Config) {
		require.Equal(t, b.Config(), *c)
		c.MaxWait = time.Second
	}))
	require.Equal(t, 1000, b.Config().Queue)
	require.NoError(t, b.Update(func(c *bulkhead.Config) { c.Queue += 10 }))
	require.Equal(t, 1010, b.Config().Queue)
}

func TestUpdateChangesNothingIfItFails(t *testing.T) {
	for want, change := range map[string]func(*bulkhead.Config){
		"bulkhead.Config.Limit is 0: must be 1 to 1073741823":                     func(c *bulkhead.Config) { c.Limit = 0 },
		`bulkhead.Config.Name is "y": must be "x" as before: it cannot change`:    func(c *bulkhead.Config) { c.Name = "y" },
		"bulkhead.Config.Levels is 3: must be 2 as before: it cannot change":      func(c *bulkhead.Config) { c.Levels = 3 },
		"bulkhead.Config.Queue is 7: must be 0 where MaxWait is 0: no call waits": func(c *bulkhead.Config) { c.MaxWait = 0 },
	} {
		b := bulkhead.New(bulkhead.Config{Name: "x", Limit: 5, MaxWait: -1, Queue: 7, Levels: 2, Priority: zero})
		err := b.Update(func(c *bulkhead.Config) { c.Cost = zero; change(c) })
		require.ErrorContains(t, err, want)
		got := b.Config()
		got.Priority = nil
		require.Equal(t, bulkhead.Config{
			Name: "x", Limit: 5, MaxWait: -1, Queue: 7, Levels: 2,
		}, got)
	}
}

func TestUpdateKeepsSlotsQueueAndCounts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := bulkhead.New(bulkhead.Config{Limit: 2, MaxWait: -1, Queue: 1})
		first, second := hold(t, b), hold(t, b)
		go func() { _ = b.Do(t.Context(), nothing) }()
		synctest.Wait()
		require.ErrorIs(t, b.Do(t.Context(), nothing), bulkhead.ErrFull)
		before := b.Stats()
		require.NoError(t, b.Update(func(c *bulkhead.Config) { c.Queue = 50 }))
		require.Equal(t, before, b.Stats())
		require.NoError(t, b.Update(func(c *bulkhead.Config) { c.Limit = 3 }))
		synctest.Wait()
		require.EqualValues(t, 3, b.Stats().Admitted, "growing wakes the waiting call")
		require.NoError(t, b.Update(func(c *bulkhead.Config) { c.Limit = 1 }))
		require.Equal(t, 2, b.Stats().InFlight)
		first()
		_, err := tryBegin(b, t.Context())
		require.ErrorIs(t, err, bulkhead.ErrFull)
		second()
		requireIdle(t, b)
	})
}

func TestUpdateKeepsWaitingCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := bulkhead.New(bulkhead.Config{Limit: 1, MaxWait: time.Minute})
		release := hold(t, b)
		results := make(chan error, 3)
		for range 3 {
			go func() { results <- b.Do(t.Context(), nothing) }()
		}
		synctest.Wait()
		require.NoError(t, b.Update(func(c *bulkhead.Config) { c.Queue = 1 }))
		var full *bulkhead.FullError
		require.ErrorAs(t, b.Do(t.Context(), nothing), &full)
		require.Equal(t, bulkhead.QueueFull, full.Reason)
		require.NoError(t, b.Update(func(c *bulkhead.Config) { c.MaxWait, c.Queue = 0, 0 }))
		require.ErrorAs(t, b.Do(t.Context(), nothing), &full)
		require.Equal(t, bulkhead.NoSlot, full.Reason)
		require.Equal(t, []int{3}, b.Stats().Queued)
		time.Sleep(30 * time.Second)
		require.Equal(t, []int{3}, b.Stats().Queued, "they wait as long as they began to")
		release()
		for range 3 {
			require.NoError(t, <-results)
		}
		require.EqualValues(t, 3, b.Stats().Waited)
		requireIdle(t, b)
	})
}

func TestWaitKeepsItsConfig(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var b *bulkhead.Bulkhead
		b = bulkhead.New(bulkhead.Config{Limit: 1, MaxWait: time.Minute, Cost: func(ctx context.Context) int {
			if ctx.Value(levelKey{}) != nil {
				require.NoError(t, b.Update(func(c *bulkhead.Config) { c.MaxWait = 0 }))
			}
			return 1
		}})
		release := hold(t, b)
		time.AfterFunc(time.Second, release)
		require.NoError(t, b.Do(atLevel(t.Context(), 1), nothing))
		require.EqualValues(t, 1, b.Stats().Waited)
		requireIdle(t, b)
	})
}

func TestUpdateOfFunctionsAppliesToNextCall(t *testing.T) {
	var told []string
	b := bulkhead.New(bulkhead.Config{Limit: 4, Levels: 2, Priority: zero})
	onRefuse(b, func(_ context.Context, e *bulkhead.FullError) { told = append(told, fmt.Sprint(e.Level, " ", e.Cost)) })
	_ = b.Do(t.Context(), func(ctx context.Context) error {
		require.NoError(t, b.Update(func(c *bulkhead.Config) {
			c.Priority = func(context.Context) int { return 1 }
			c.Cost = func(context.Context) int { return 3 }
			c.Limit = 8
		}))
		return b.Do(ctx, func(ctx context.Context) error {
			require.Equal(t, 4, b.Stats().InFlight)
			return b.Do(ctx, func(ctx context.Context) error { return b.Do(ctx, nothing) })
		})
	})
	require.Equal(t, []string{"1 3"}, told)
	requireSlots(t, b, 0)
}

func requireSlots(t *testing.T, b *bulkhead.Bulkhead, inFlight int) {
	t.Helper()
	require.Equal(t, inFlight, b.Stats().InFlight)
}
