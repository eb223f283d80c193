package resilienceotel_test

import (
	"context"
	"fmt"
	"net"
	"testing"

	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace/noop"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/policy"
	"github.com/go-resilience/resilience/registry"
	"github.com/go-resilience/resilience/resilienceotel"
	"github.com/go-resilience/resilience/retry"
	"github.com/go-resilience/resilience/throttle"
)

// BenchmarkCollect reads the metrics of 1000 policies that have admitted calls, 250 of each of
// four kinds.
func BenchmarkCollect(b *testing.B) {
	s := newSDK(b)
	reg := registry.New()
	for i := range 250 {
		name := fmt.Sprintf("policy-%d", i)
		for _, p := range []resilience.Policy{
			retry.New(retry.Config{Name: name}),
			breaker.New(breaker.Config{Name: name}),
			bulkhead.New(bulkhead.Config{Name: name, Limit: 2}),
			throttle.New(throttle.Config{Name: name, Rate: 10, Burst: 1}),
		} {
			reg.MustAdd(p.(policy.Describer))
			for range 2 {
				_ = p.Do(context.Background(), func(context.Context) error { return nil })
			}
		}
	}
	stop, err := resilienceotel.Observe(reg, s.Config)
	if err != nil {
		b.Fatal(err)
	}
	defer stop()
	var rm metricdata.ResourceMetrics
	b.ReportAllocs()
	for b.Loop() {
		if err := s.reader.Collect(context.Background(), &rm); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkCall is what Call adds to a call, with metrics.
func BenchmarkCall(b *testing.B) {
	unsampled := sdktrace.NewTracerProvider(sdktrace.WithSampler(sdktrace.NeverSample()))
	exported := sdktrace.NewTracerProvider(sdktrace.WithBatcher(discard{}))
	failing := &net.ParseError{}
	for name, run := range map[string]struct {
		tracer func(*resilienceotel.Config)
		err    error
	}{
		"noTracing": {tracer: func(c *resilienceotel.Config) { c.TracerProvider = noop.NewTracerProvider() }},
		"unsampled": {tracer: func(c *resilienceotel.Config) { c.TracerProvider = unsampled }},
		"recording": {tracer: func(c *resilienceotel.Config) { c.TracerProvider = exported }},
		"failed":    {tracer: func(c *resilienceotel.Config) { c.TracerProvider = unsampled }, err: failing},
	} {
		b.Run(name, func(b *testing.B) {
			cfg := newSDK(b).Config
			run.tracer(&cfg)
			call := resilienceotel.New(cfg).Call("users")(func(context.Context) error { return run.err })
			ctx := context.Background()
			b.ReportAllocs()
			for b.Loop() {
				_ = call(ctx)
			}
		})
	}
}

type discard struct{}

func (discard) ExportSpans(context.Context, []sdktrace.ReadOnlySpan) error { return nil }
func (discard) Shutdown(context.Context) error                             { return nil }
