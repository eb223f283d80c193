package retry_test

import (
	"context"
	"testing"
	"time"

	"github.com/go-resilience/resilience/retry"
)

func BenchmarkDo(b *testing.B) {
	type key struct{}
	b.Run("background", func(b *testing.B) {
		r := retry.New(retry.Config{})
		ctx := context.Background()
		b.ReportAllocs()
		for b.Loop() {
			_ = r.Do(ctx, succeed)
		}
	})
	b.Run("cancelable", func(b *testing.B) {
		r := retry.New(retry.Config{})
		ctx := b.Context()
		b.ReportAllocs()
		for b.Loop() {
			_ = r.Do(ctx, succeed)
		}
	})
	b.Run("parallel", func(b *testing.B) {
		r := retry.New(retry.Config{})
		b.ReportAllocs()
		b.RunParallel(func(pb *testing.PB) {
			ctx := context.WithValue(b.Context(), key{}, pb)
			for pb.Next() {
				_ = r.Do(ctx, succeed)
			}
		})
	})
	b.Run("nested", func(b *testing.B) {
		do := retry.New(retry.Config{}).Wrap(retry.New(retry.Config{}).Wrap(succeed))
		ctx := b.Context()
		b.ReportAllocs()
		for b.Loop() {
			_ = do(ctx)
		}
	})
	b.Run("budget", func(b *testing.B) {
		r := retry.New(retry.Config{Budget: retry.NewBudget(retry.BudgetConfig{})})
		ctx := context.Background()
		b.ReportAllocs()
		for b.Loop() {
			_ = r.Do(ctx, succeed)
		}
	})
	b.Run("attempt-timeout", func(b *testing.B) {
		r := retry.New(retry.Config{AttemptTimeout: time.Minute})
		ctx := context.Background()
		b.ReportAllocs()
		for b.Loop() {
			_ = r.Do(ctx, succeed)
		}
	})
	b.Run("give-up", func(b *testing.B) {
		r := retry.New(retry.Config{Backoff: retry.Constant(0)})
		ctx := context.Background()
		b.ReportAllocs()
		for b.Loop() {
			_ = r.Do(ctx, fail)
		}
	})
}

func BenchmarkBudget(b *testing.B) {
	r := retry.New(retry.Config{
		Attempts: 2,
		Backoff:  retry.Constant(0),
		Budget:   retry.NewBudget(retry.BudgetConfig{}),
	})
	ctx := context.Background()
	b.ReportAllocs()
	for b.Loop() {
		_ = r.Do(ctx, fail) // nearly all retries are over budget
	}
}
