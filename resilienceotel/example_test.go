package resilienceotel_test

import (
	"context"
	"fmt"
	"time"

	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/registry"
	"github.com/go-resilience/resilience/resilienceotel"
	"github.com/go-resilience/resilience/retry"
	"github.com/go-resilience/resilience/saga"
)

// A retried call has a span, and so has each of its attempts.
func ExampleNew() {
	spans := tracetest.NewInMemoryExporter()
	tracers := sdktrace.NewTracerProvider(sdktrace.WithSyncer(spans))

	t := resilienceotel.New(resilienceotel.Config{TracerProvider: tracers})
	retries := retry.New(retry.Config{Name: "users", Backoff: retry.Constant(time.Millisecond)})
	asked := 0
	call := resilience.Chain(t.Call("users"), retries.Wrap, t.Attempt("users"))(func(context.Context) error {
		if asked++; asked == 1 {
			return errDown
		}
		return nil
	})
	fmt.Println(call(context.Background()))
	for _, s := range spans.GetSpans() {
		fmt.Println(s.Name, s.Status.Code, s.ChildSpanCount)
	}
	// Output:
	// <nil>
	// users attempt Error 0
	// users attempt Unset 0
	// users Unset 2
}

// Observe exports the metrics of the policies in a registry.
func ExampleObserve() {
	reader := metric.NewManualReader()
	meters := metric.NewMeterProvider(metric.WithReader(reader))

	circuit := breaker.New(breaker.Config{Name: "users", ConsecutiveFailures: 1})
	reg := registry.New()
	reg.MustAdd(circuit)
	stop, err := resilienceotel.Observe(reg, resilienceotel.Config{MeterProvider: meters})
	if err != nil {
		panic(err)
	}
	defer stop()
	defer reg.Observe(registry.Log(nil))() // Observe logs nothing

	_ = circuit.Do(context.Background(), func(context.Context) error { return errDown })
	var metrics metricdata.ResourceMetrics
	if err := reader.Collect(context.Background(), &metrics); err != nil {
		panic(err)
	}
	for _, m := range metrics.ScopeMetrics[0].Metrics {
		if m.Name == "resilience.breaker.transitions" {
			for _, p := range m.Data.(metricdata.Sum[float64]).DataPoints {
				if state, _ := p.Attributes.Value("resilience.state"); p.Value > 0 {
					fmt.Println(m.Name, state.AsString(), p.Value)
				}
			}
		}
	}
	// Output: resilience.breaker.transitions open 1
}

// Each call of a step's Do or Undo has its own span.
func ExampleSteps() {
	spans := tracetest.NewInMemoryExporter()
	t := resilienceotel.New(resilienceotel.Config{TracerProvider: sdktrace.NewTracerProvider(sdktrace.WithSyncer(spans))})

	type order struct{ Paid bool }
	sg := &saga.Saga[order]{Name: "order", Steps: resilienceotel.Steps(t, []saga.Step[order]{
		{Name: "pay", Do: func(_ context.Context, o *order) error { o.Paid = true; return nil },
			Undo: func(context.Context, *order) error { return nil }},
		{Name: "ship", Do: func(context.Context, *order) error { return saga.Permanent(errDown) },
			Undo: func(context.Context, *order) error { return nil }},
	})}
	_ = saga.Run(context.Background(), sg, &order{})
	for _, s := range spans.GetSpans() {
		fmt.Println(s.Name)
	}
	// Output:
	// pay do
	// ship do
	// ship undo
	// pay undo
}
