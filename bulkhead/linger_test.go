package bulkhead_test

import (
	"context"
	"errors"
	"testing"

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

func TestHoldingASlotAllocatesOnce(t *testing.T) {
	b := bulkhead.New(bulkhead.Config{Limit: 1})
	var work *linger.Work
	goOn := func(context.Context) error { work.GoOn(); return nil }
	begin := func() (ctx context.Context) {
		ctx, work = linger.Begin(context.Background())
		return ctx
	}
	without := testing.AllocsPerRun(100, func() { begin(); work.End(nil) })
	with := testing.AllocsPerRun(100, func() {
		if err := b.Do(begin(), goOn); err != nil {
			t.Error(err)
		}
		work.End(nil)
	})
	require.Equal(t, without+1, with)
}
