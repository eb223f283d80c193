package adaptive_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/bulkhead/adaptive"
	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/internal/linger"
)

func TestValidateNamesInvalidFields(t *testing.T) {
	for name, tc := range map[string]struct {
		cfg  adaptive.Config
		want string
	}{
		"huge Min": {adaptive.Config{Min: 1 << 30},
			"adaptive.Config.Min is 1073741824: must be 0 (for 1) to 1073741823"},
		"huge Max":            {adaptive.Config{Max: 1 << 30}, "Max is 1073741824"},
		"negative Min":        {adaptive.Config{Min: -1}, "Min is -1"},
		"negative Max":        {adaptive.Config{Max: -1}, "Max is -1"},
		"Min above Max":       {adaptive.Config{Min: 5, Max: 4}, "Min is 5: must be no more than Max"},
		"Initial below Min":   {adaptive.Config{Initial: 4, Min: 5}, "Initial is 4"},
		"Initial above Max":   {adaptive.Config{Initial: 9, Max: 8}, "Initial is 9"},
		"negative Tolerance":  {adaptive.Config{Tolerance: -0.1}, "Tolerance is -0.1"},
		"senseless Tolerance": {adaptive.Config{Tolerance: 25}, "Tolerance is 25"},
		"a limit":             {adaptive.Config{Bulkhead: bulkhead.Config{Limit: 1}}, "Bulkhead.Limit is 1: must be 0"},
		"the bulkhead":        {adaptive.Config{Bulkhead: bulkhead.Config{Queue: 5}}, "bulkhead.Config.Queue is 5"},
	} {
		t.Run(name, func(t *testing.T) {
			err := tc.cfg.Validate()
			require.ErrorContains(t, err, tc.want)
			require.PanicsWithError(t, err.Error(), func() { adaptive.New(tc.cfg) })
		})
	}
	for _, cfg := range []adaptive.Config{
		{},
		{Min: 5, Initial: 5, Max: 5, Tolerance: 10},
		{Min: 1<<30 - 1},
		{Max: 1<<30 - 1},
		{Min: 2000},
		{Max: 5},
	} {
		require.NoError(t, adaptive.New(cfg).Do(t.Context(), nothing))
	}
}

func TestConfigHasItsDefaults(t *testing.T) {
	b := adaptive.New(adaptive.Config{Bulkhead: bulkhead.Config{Name: "x", MaxWait: -1, Cost: costOf}, Min: 30})
	d := b.Describe()
	require.Equal(t, "x", d.Name)
	require.Equal(t, "bulkhead", d.Kind)
	slots := bulkhead.Config{Name: "x", MaxWait: -1, Queue: 1000, Levels: 1}
	want := adaptive.Config{Bulkhead: slots, Initial: 30, Min: 30, Max: 1000, Tolerance: 0.25}
	got := d.Config().(adaptive.Config)
	got.Bulkhead.Cost = nil // functions cannot be compared
	require.Equal(t, want, got)
	require.Equal(t, 30, b.Stats().Limit)
	require.NoError(t, b.Update(func(c *adaptive.Config) { c.Min = 2000 }))
	require.Equal(t, 2000, b.Config().Max)
	require.Equal(t, 2000, b.Stats().Limit)
	require.ErrorContains(t, b.Update(func(c *adaptive.Config) { c.Bulkhead.Name = "y" }), "cannot change")
	require.Equal(t, "x", b.Config().Bulkhead.Name)
	require.NoError(t, b.Update(func(c *adaptive.Config) { c.Bulkhead.Queue += 10 }))
	require.Equal(t, 1010, b.Config().Bulkhead.Queue)
	require.NoError(t, d.Update(true, func(cfg any) error { cfg.(*adaptive.Config).Max = 3000; return nil }))
	require.Equal(t, 2000, b.Config().Max, "a dry run")
	require.NoError(t, d.Update(false, func(cfg any) error { cfg.(*adaptive.Config).Max = 3000; return nil }))
	require.Equal(t, 3000, b.Config().Max)
}

// The bulkhead follows an Update in everything else.
func TestUpdateReachesTheBulkhead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := adaptive.New(adaptive.Config{Initial: 1, Max: 1})
		release := hold(t, b)
		require.ErrorContains(t, b.Do(t.Context(), nothing), "no_slot")
		require.NoError(t, b.Update(func(c *adaptive.Config) { c.Bulkhead.MaxWait, c.Bulkhead.Cost = time.Second, costOf }))
		start := time.Now()
		require.ErrorContains(t, b.Do(t.Context(), nothing), "wait_too_long")
		require.Equal(t, time.Second, time.Since(start))
		require.ErrorContains(t, b.Do(costing(t.Context(), 2), nothing), "too_costly")
		release()
		requireIdle(t, b)
	})
}

type costKey struct{}

func costing(ctx context.Context, n int) context.Context { return context.WithValue(ctx, costKey{}, n) }

func costOf(ctx context.Context) int {
	if n, ok := ctx.Value(costKey{}).(int); ok {
		return n
	}
	return 1
}

// A call takes as many slots as it costs, and Cost is asked once.
func TestCostIsCalledOnce(t *testing.T) {
	asked := 0
	b := adaptive.New(adaptive.Config{Initial: 5, Max: 5, Bulkhead: bulkhead.Config{Cost: func(ctx context.Context) int {
		asked++
		return costOf(ctx)
	}}})
	for cost, want := range map[int]int{-1: 0, 0: 0, 1: 1, 5: 5} {
		asked = 0
		require.NoError(t, b.Do(costing(t.Context(), cost), func(context.Context) error {
			require.Equal(t, want, b.Stats().InFlight)
			taken, _, _ := adaptive.Slots(b)
			require.Equal(t, want, taken)
			return nil
		}))
		done, err := b.Begin(costing(t.Context(), cost))
		require.NoError(t, err)
		require.Equal(t, want, b.Stats().InFlight)
		done(nil)
		require.Equal(t, 2, asked)
	}
	require.ErrorContains(t, b.Do(costing(t.Context(), 6), nothing), "too_costly")
	_, err := b.Begin(costing(t.Context(), 6))
	require.ErrorContains(t, err, "too_costly")
	requireIdle(t, b)
}

// Min is what a call may cost at any moment, also in a probe.
func TestCostOfMinIsNeverTooCostly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := adaptive.New(adaptive.Config{Initial: 20, Min: 8, Max: 20, Bulkhead: bulkhead.Config{Cost: costOf, MaxWait: -1}})
		probing(t, b)
		require.Equal(t, 8, b.Stats().Limit)
		require.NoError(t, b.Do(costing(t.Context(), 8), nothing))
		require.True(t, b.Stats().Probing, "it ends for nobody")
		for cost, mayFit := range map[int]bool{9: true, 20: true, 21: false} {
			err := b.Do(costing(t.Context(), cost), nothing)
			require.ErrorContains(t, err, "too_costly")
			require.Equal(t, mayFit, behavior.Read(err).Retryable, "the limit may grow to Max")
		}
		requireIdle(t, b)
	})
}

// What ended before it began gets no slot, and asks for none.
func TestEndedContextIsCheckedFirst(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	b := adaptive.New(adaptive.Config{Bulkhead: bulkhead.Config{Cost: func(context.Context) int { panic("asked") }}})
	require.ErrorIs(t, b.Wrap(nothing)(ctx), context.Canceled)
	_, err := b.Begin(ctx)
	require.ErrorIs(t, err, context.Canceled)
	requireIdle(t, b)
}

// A Priority that panics keeps nothing.
func TestPanicInPriorityKeepsNothing(t *testing.T) {
	b := adaptive.New(adaptive.Config{Bulkhead: bulkhead.Config{Levels: 2,
		Priority: func(context.Context) int { panic("boom") }}})
	require.Panics(t, func() { _ = b.Do(t.Context(), nothing) })
	require.Panics(t, func() { _, _ = b.Begin(t.Context()) })
	requireIdle(t, b)
}

// A response holds its slot until it has been read. How it breaks off is one more sample: where
// time ran out, the limit shrinks.
func TestTruncatedResponseIsSample(t *testing.T) {
	for name, tc := range map[string]struct {
		broke   error
		shrinks bool
	}{
		"read":     {nil, false},
		"reset":    {errors.New("connection reset"), false},
		"time out": {context.DeadlineExceeded, true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := adaptive.New(adaptive.Config{Initial: 20, Max: 20})
				keepCalling(b, 30, 3*time.Second, taking(10*time.Millisecond, nil))
				require.Equal(t, 20, b.Stats().Limit)
				lowest := 20
				for range 100 {
					for range 10 {
						ctx, work := linger.Begin(t.Context())
						_ = b.Do(ctx, func(context.Context) error { work.Continue(); return nil })
						work.End(tc.broke)
					}
					time.Sleep(20 * time.Millisecond)
					if s := b.Stats(); !s.Probing {
						lowest = min(lowest, s.Limit)
					}
				}
				require.Equal(t, tc.shrinks, lowest < 20)
				requireIdle(t, b)
			})
		})
	}
}

// Work of a call that fails or panics is over for the limit, as it is for the slots.
func TestFailedWorkHoldsNoSlot(t *testing.T) {
	broken := errors.New("broken")
	b := adaptive.New(adaptive.Config{})
	ctx, work := linger.Begin(t.Context())
	require.NoError(t, b.Do(ctx, func(context.Context) error { work.Continue(); return nil }))
	taken, reading, _ := adaptive.Slots(b)
	require.Equal(t, []int{1, 1}, []int{taken, reading})
	require.Equal(t, 1, b.Stats().InFlight)
	require.Error(t, adaptive.New(adaptive.Config{Initial: 1, Max: 1}).Do(t.Context(),
		func(context.Context) error { return broken }))
	work.End(nil)
	requireIdle(t, b)
	for _, fn := range []func(*linger.Work) error{
		func(*linger.Work) error { return nil },
		func(w *linger.Work) error { w.Continue(); return broken },
		func(w *linger.Work) error { w.Continue(); panic("boom") },
	} {
		ctx, work := linger.Begin(t.Context())
		func() {
			defer func() { _ = recover() }()
			_ = b.Do(ctx, func(context.Context) error { return fn(work) })
		}()
		requireIdle(t, b)
		work.End(nil)
		requireIdle(t, b)
	}
}
