package registry_test

import (
	"context"
	"testing"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/registry"
)

// BenchmarkBreaker reads the metrics and the health of one breaker.
func BenchmarkBreaker(b *testing.B) {
	reg := registry.New()
	reg.MustAdd(breaker.New(breaker.Config{Name: "users"}))
	e, _ := reg.Get("breaker", "users")
	b.Run("metrics", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			e.Metrics()
		}
	})
	b.Run("health", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			e.Health(context.Background())
		}
	})
}

// BenchmarkGroup reads a group of 10,000 breakers that have admitted calls.
func BenchmarkGroup(b *testing.B) {
	shards := resilience.NewGroup(func(int) *breaker.Breaker {
		return breaker.New(breaker.Config{Name: "shards"})
	}, resilience.GroupConfig{MaxKeys: 10_000})
	for shard := range 10_000 {
		_ = shards.Do(context.Background(), shard, func(context.Context) error { return nil })
	}
	reg := registry.New()
	reg.MustAdd(shards)
	e, _ := reg.Get("breaker", "shards")
	b.Run("metrics", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			e.Metrics()
		}
	})
	b.Run("health", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			e.Health(context.Background())
		}
	})
	b.Run("worst20", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			e.Worst(20)
		}
	})
}
