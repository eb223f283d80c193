package breaker_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/breaker"
)

func BenchmarkDo(b *testing.B) {
	ctx := context.Background()
	for _, c := range []struct {
		name string
		cfg  breaker.Config
	}{
		{"in-a-row", breaker.Config{}},
		{"rate-last-calls", breaker.Config{FailureRate: 0.5, WindowCalls: 100}},
		{"rate-window", breaker.Config{FailureRate: 0.5}},
		{"slow-rate-window", breaker.Config{SlowRate: 0.5, SlowAfter: time.Second}},
	} {
		b.Run(c.name, func(b *testing.B) {
			circuit := breaker.New(c.cfg)
			b.ReportAllocs()
			for b.Loop() {
				_ = circuit.Do(ctx, ok)
			}
		})
	}
	b.Run("open", func(b *testing.B) {
		circuit := breaker.New(breaker.Config{})
		circuit.Trip(nil, time.Hour)
		b.ReportAllocs()
		for b.Loop() {
			_ = circuit.Do(ctx, ok)
		}
	})
	b.Run("failing", func(b *testing.B) {
		circuit := breaker.New(breaker.Config{Failures: 1 << 40})
		b.ReportAllocs()
		for b.Loop() {
			_ = circuit.Do(ctx, down)
		}
	})
}

func BenchmarkBegin(b *testing.B) {
	ctx := context.Background()
	circuit := breaker.New(breaker.Config{})
	b.ReportAllocs()
	for b.Loop() {
		done, err := circuit.Begin(ctx)
		if err != nil {
			b.Fatal(err)
		}
		done(nil)
	}
}

func BenchmarkGroupDo(b *testing.B) {
	ctx := context.Background()
	for _, n := range []int{1, 10_000} {
		b.Run(fmt.Sprint("keys=", n), func(b *testing.B) {
			keys := make([]string, n)
			g := breaker.NewGroup(breaker.GroupConfig[string]{MaxKeys: n})
			before := heap()
			for i := range keys {
				keys[i] = fmt.Sprint("tenant-", i)
				require.NoError(b, g.Do(ctx, keys[i], ok))
			}
			size := float64(heap()-before) / float64(n)
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				_ = g.Do(ctx, keys[i%n], ok)
			}
			b.ReportMetric(size, "B/key")
		})
	}
}

// With a deadline, Do reads the clock: see Config.Patience.
func BenchmarkDoWithADeadline(b *testing.B) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Hour)
	defer cancel()
	circuit := breaker.New(breaker.Config{})
	b.ReportAllocs()
	for b.Loop() {
		_ = circuit.Do(ctx, ok)
	}
}
