package bulkhead_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/internal/linger"
)

func TestSlotsAreHeldUntilTheWorkIsOver(t *testing.T) {
	policies := map[string]func() (do func(context.Context, func(context.Context) error) error, inFlight func() int){
		"Bulkhead": func() (func(context.Context, func(context.Context) error) error, func() int) {
			b := bulkhead.New(bulkhead.Config{Limit: 5, Cost: costOf})
			return b.Do, func() int { return b.Stats().InFlight }
		},
		"Adaptive": func() (func(context.Context, func(context.Context) error) error, func() int) {
			b := bulkhead.New(bulkhead.Config{Adaptive: &bulkhead.AdaptiveLimit{}, Cost: costOf})
			return b.Do, func() int { return b.Stats().InFlight }
		},
		"Group": func() (func(context.Context, func(context.Context) error) error, func() int) {
			g := bulkhead.NewGroup(bulkhead.GroupConfig[int]{Config: bulkhead.Config{Limit: 5, Cost: costOf}})
			do := func(ctx context.Context, fn func(context.Context) error) error { return g.Do(ctx, 1, fn) }
			return do, func() int {
				for _, b := range g.All() {
					return b.Stats().InFlight
				}
				return 0
			}
		},
	}
	broken := errors.New("broken")
	for name, policy := range policies {
		for cost := 1; cost <= 2; cost++ {
			t.Run(name, func(t *testing.T) {
				do, inFlight := policy()
				ctx, work := linger.Begin(t.Context())
				if cost > 1 {
					ctx = costing(ctx, cost)
				}
				require.NoError(t, do(ctx, func(context.Context) error { work.GoOn(); return nil }))
				require.Equal(t, cost, inFlight())
				work.End(nil)
				require.Zero(t, inFlight())

				ctx, _ = linger.Begin(t.Context())
				require.Equal(t, broken, do(ctx, func(context.Context) error { return broken }))
				require.Zero(t, inFlight(), "the work did not go on")

				ctx, work = linger.Begin(t.Context())
				require.Equal(t, broken, do(ctx, func(context.Context) error { work.GoOn(); return broken }))
				require.Zero(t, inFlight(), "the next attempt may need the slot")

				ctx, work = linger.Begin(t.Context())
				require.Panics(t, func() { _ = do(ctx, func(context.Context) error { work.GoOn(); panic("oops") }) })
				require.Zero(t, inFlight())

				ctx, work = linger.Begin(t.Context())
				work.GoOn()
				require.NoError(t, do(ctx, nothing))
				require.Zero(t, inFlight(), "the work began to go on before this call")
			})
		}
	}
}

func TestGroupKeepsABulkheadWhoseWorkGoesOn(t *testing.T) {
	g := bulkhead.NewGroup(bulkhead.GroupConfig[int]{Config: bulkhead.Config{Limit: 1}, MaxKeys: 1})
	ctx, work := linger.Begin(t.Context())
	require.NoError(t, g.Do(ctx, 1, func(context.Context) error { work.GoOn(); return nil }))
	require.NoError(t, g.Do(t.Context(), 2, nothing))
	require.ErrorIs(t, g.Do(t.Context(), 1, nothing), bulkhead.ErrFull, "the group has forgotten it")
	work.End(nil)
	require.NoError(t, g.Do(t.Context(), 1, nothing))
}

// A slow reader says nothing about the server, though it holds its slot.
func TestAdaptiveMeasuresUntilTheFunctionReturns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const latency = 50 * time.Millisecond
		var changes []bulkhead.Event
		b := bulkhead.New(bulkhead.Config{
			Adaptive: &bulkhead.AdaptiveLimit{Initial: 10},
		})
		onLimit(b, func(_ context.Context, c bulkhead.Event) { changes = append(changes, c) })
		// call makes ten calls at once, again and again, that are read for a time.
		call := func(times int, read time.Duration) {
			for range times {
				var wg sync.WaitGroup
				for range 10 {
					wg.Go(func() {
						ctx, work := linger.Begin(t.Context())
						_ = b.Do(ctx, func(context.Context) error {
							time.Sleep(latency)
							work.GoOn()
							return nil
						})
						time.Sleep(read)
						work.End(nil)
					})
				}
				wg.Wait()
			}
		}
		call(100, 0)
		require.NotEmpty(t, changes)
		before := b.Stats().Limit
		call(100, 20*latency)
		require.GreaterOrEqual(t, b.Stats().Limit, before)
		for _, c := range changes {
			require.InDelta(t, latency, c.Latency, float64(latency)/10)
		}
	})
}

func TestHoldingASlotAllocatesOnce(t *testing.T) {
	g := bulkhead.NewGroup(bulkhead.GroupConfig[string]{Config: bulkhead.Config{Limit: 1}})
	var work *linger.Work
	goOn := func(context.Context) error { work.GoOn(); return nil }
	begin := func() (ctx context.Context) {
		ctx, work = linger.Begin(context.Background())
		return ctx
	}
	without := testing.AllocsPerRun(100, func() { begin(); work.End(nil) })
	with := testing.AllocsPerRun(100, func() {
		if err := g.Do(begin(), "a", goOn); err != nil {
			t.Error(err)
		}
		work.End(nil)
	})
	require.Equal(t, without+1, with)
}
