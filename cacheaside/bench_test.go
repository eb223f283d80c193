package cacheaside_test

import (
	"context"
	"testing"

	"github.com/go-resilience/resilience/cacheaside"
)

func identity(_ context.Context, key int) (int, error) { return key, nil }

func BenchmarkHit(b *testing.B) {
	c := cacheaside.New(cacheaside.Config[int, int]{Load: identity})
	defer c.Close()
	ctx := b.Context()
	_, _ = c.Get(ctx, 1)
	b.ReportAllocs()
	for b.Loop() {
		_, _ = c.Get(ctx, 1)
	}
}

func BenchmarkHitParallel(b *testing.B) {
	c := cacheaside.New(cacheaside.Config[int, int]{Load: identity})
	defer c.Close()
	ctx := b.Context()
	_, _ = c.Get(ctx, 1)
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			_, _ = c.Get(ctx, 1)
		}
	})
}

func BenchmarkMiss(b *testing.B) {
	c := cacheaside.New(cacheaside.Config[int, int]{Load: identity})
	defer c.Close()
	ctx := context.Background()
	b.ReportAllocs()
	i := 0
	for b.Loop() {
		i++
		_, _ = c.Get(ctx, i)
	}
}

func BenchmarkWrite(b *testing.B) {
	c := cacheaside.New(cacheaside.Config[int, int]{Load: identity})
	defer c.Close()
	ctx := b.Context()
	b.ReportAllocs()
	for b.Loop() {
		_ = c.Write(ctx, 1, func(context.Context) error { return nil })
	}
}

func TestHitDoesNotAllocate(t *testing.T) {
	c := cacheaside.New(cacheaside.Config[int, int]{Load: identity, Ahead: 1, Stale: 1, StaleOnError: 1})
	defer c.Close()
	ctx := t.Context()
	if _, err := c.Get(ctx, 1); err != nil {
		t.Fatal(err)
	}
	if n := testing.AllocsPerRun(1000, func() { _, _ = c.Get(ctx, 1) }); n > 0 {
		t.Errorf("a hit makes %v allocations", n)
	}
}
