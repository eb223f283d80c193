package bulkhead_test

import (
	"context"
	"testing"

	"github.com/go-resilience/resilience/bulkhead"
)

func BenchmarkDo(b *testing.B) {
	slots := bulkhead.New(bulkhead.Config{Limit: 1})
	ctx := context.Background()
	b.ReportAllocs()
	for b.Loop() {
		_ = slots.Do(ctx, nothing)
	}
}

func BenchmarkBegin(b *testing.B) {
	slots := bulkhead.New(bulkhead.Config{Limit: 1})
	ctx := context.Background()
	b.ReportAllocs()
	for b.Loop() {
		done, _ := slots.Begin(ctx)
		done(nil)
	}
}

func BenchmarkRefusal(b *testing.B) {
	for name, cfg := range map[string]bulkhead.Config{
		"no slot":    {Limit: 1},
		"queue full": {Limit: 1, MaxWait: -1, Queue: 1},
	} {
		b.Run(name, func(b *testing.B) {
			slots := bulkhead.New(cfg)
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			_, _ = slots.Begin(ctx)
			go func() { _ = slots.Do(ctx, nothing) }()
			for cfg.Queue > 0 && slots.Stats().Queued[0] == 0 {
			}
			b.ReportAllocs()
			for b.Loop() {
				_ = slots.Do(context.Background(), nothing)
			}
		})
	}
}
