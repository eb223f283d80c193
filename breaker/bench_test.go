package breaker_test

import (
	"context"
	"testing"
	"time"

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
		{"rate-window-slow", breaker.Config{FailureRate: 0.5, SlowAfter: time.Second}},
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
		circuit := breaker.New(breaker.Config{ConsecutiveFailures: 1 << 40})
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
