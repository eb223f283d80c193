package hedge_test

import (
	"context"
	"testing"
	"time"

	"github.com/go-resilience/resilience/hedge"
)

func BenchmarkHedge(b *testing.B) {
	value := func(context.Context) (int, error) { return 1, nil }
	b.Run("hedger", func(b *testing.B) {
		h := hedge.New[int](hedge.Config{Name: "users", Delay: time.Minute})
		ctx := b.Context()
		b.ReportAllocs()
		for b.Loop() {
			_, _ = h.Do(ctx, value)
		}
	})
	b.Run("fast-quantile", func(b *testing.B) {
		h := hedge.New[int](hedge.Config{Delay: time.Minute, Quantile: 0.99})
		ctx := b.Context()
		b.ReportAllocs()
		for b.Loop() {
			_, _ = h.Do(ctx, value)
		}
	})
}
