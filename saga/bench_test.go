package saga_test

import (
	"context"
	"fmt"
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
