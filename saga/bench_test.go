package saga_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/go-resilience/resilience/saga"
)

func BenchmarkRun(b *testing.B) {
	for _, n := range []int{1, 5, 20} {
		b.Run(fmt.Sprintf("steps=%d", n), func(b *testing.B) {
			nothing := func(context.Context, *int) error { return nil }
			sg := &saga.Saga[int]{Name: "bench"}
			for i := range n {
				sg.Steps = append(sg.Steps, saga.Step[int]{Name: fmt.Sprint("step-", i), Do: nothing, Undo: nothing})
			}
			var s int
			b.ReportAllocs()
			for b.Loop() {
				if err := saga.Run(context.Background(), sg, &s); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(n), "ns/step")
		})
	}
}

// BenchmarkRunner measures a saga of five steps in a runner with a store that costs almost nothing.
func BenchmarkRunner(b *testing.B) {
	nothing := func(context.Context, *int) error { return nil }
	sg := &saga.Saga[int]{Name: "bench"}
	for i := range 5 {
		sg.Steps = append(sg.Steps, saga.Step[int]{Name: fmt.Sprint("step-", i), Do: nothing, Undo: nothing})
	}
	r := saga.NewRunner(saga.NewMemory(), saga.RunnerConfig{})
	sagas := saga.Register(r, sg)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	b.ReportAllocs()
	var n atomic.Int64
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			id := fmt.Sprint("saga-", n.Add(1))
			if _, err := sagas.Start(ctx, id, 0); err != nil {
				b.Error(err)
			}
			if _, err := sagas.Result(ctx, id); err != nil {
				b.Error(err)
			}
		}
	})
	cancel()
	<-done
}
