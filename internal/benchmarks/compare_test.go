package benchmarks

import (
	"context"
	"testing"
)

// A comparison is one case of a side-by-side: the same work by several
// implementations. The first is ours, named "resilience".
type comparison struct {
	name  string // "first-try"
	impls []impl
}

// An impl does the work of a comparison b.N times (for b.Loop()), after setting
// up what it needs. Figures that it reports (b.ReportMetric) go into the table.
type impl struct {
	name string
	run  func(b *testing.B)
}

// A pattern is what one Benchmark function runs.
type pattern struct {
	name  string // "Retry"
	cases []comparison
	times int    // as many rounds as -rounds says: more where a network makes them differ
	by    string // the figure whose ratio is in the table; "" for the time
}

// patterns lists every side-by-side, in the order of the table.
var patterns = []pattern{
	{"Chain", chainCases, 1, ""},
	{"Retry", retryCases, 1, ""},
	{"Breaker", breakerCases, 1, ""},
	{"Bulkhead", bulkheadCases, 1, ""},
	{"Throttle", throttleCases, 1, ""},
	{"Cache", cacheCases, 1, ""},
	{"CacheInRedis", tierCases, 1, ""},
	{"Saga", sagaCases, 1, ""},
	{"Durable", durableCases, 1, "cpu-ms/saga"},
	{"HTTP", httpCases, 20, ""},
	{"Data", dataCases, 3, ""},
	{"Lease", leaseCases, 1, ""},
	{"GRPC", grpcCases, 3, ""},
	{"Telemetry", telemetryCases, 1, ""},
}

func benchmark(b *testing.B, cases []comparison) {
	for _, c := range cases {
		b.Run(c.name, func(b *testing.B) {
			for _, i := range c.impls {
				b.Run(i.name, func(b *testing.B) {
					b.ReportAllocs()
					i.run(b)
				})
			}
		})
	}
}

func succeeded(b *testing.B, err error) {
	if err != nil {
		b.Fatal(err)
	}
}

//go:noinline
func answer(context.Context) error { return nil }
