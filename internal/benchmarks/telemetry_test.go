package benchmarks

import (
	"context"
	"net/http"
	"testing"

	"go.opentelemetry.io/contrib/instrumentation/net/http/otelhttp"
	"go.opentelemetry.io/otel/propagation"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/resilienceotel"
	"github.com/go-resilience/resilience/retry"
)

func BenchmarkTelemetry(b *testing.B) { benchmark(b, telemetryCases) }

// One request and its answer, in memory, each with a histogram of durations. What
// telemetry adds is the difference between resilience and chain, and between otelhttp and
// plain.
var telemetryCases = []comparison{
	{"recording", observers(sdktrace.NewTracerProvider(sdktrace.WithBatcher(discard{})))},
	{"unsampled", observers(sdktrace.NewTracerProvider(sdktrace.WithSampler(sdktrace.NeverSample())))},
	{"metrics-only", observers(noop.NewTracerProvider())},
}

func observers(tracers trace.TracerProvider) []impl {
	guarded := func(outside ...resilience.Middleware) func(*testing.B) {
		return func(b *testing.B) {
			retries := retry.New(retry.Config{})
			circuit := breaker.New(breaker.Config{})
			slots := bulkhead.New(bulkhead.Config{Limit: 16})
			req := newRequest(b)
			call := resilience.Chain(append(outside, retries.Wrap, circuit.Wrap, slots.Wrap)...)(func(context.Context) error {
				return send(answers{}, req)
			})
			ctx := context.WithValue(context.Background(), key{}, 1) // as in most programs
			for b.Loop() {
				succeeded(b, call(ctx))
			}
		}
	}
	transport := func(base http.RoundTripper) func(*testing.B) {
		return func(b *testing.B) {
			req := newRequest(b)
			for b.Loop() {
				succeeded(b, send(base, req))
			}
		}
	}
	meters := sdkmetric.NewMeterProvider(sdkmetric.WithReader(sdkmetric.NewManualReader()))
	t := resilienceotel.New(resilienceotel.Config{MeterProvider: meters, TracerProvider: tracers})
	return []impl{
		{"resilience", guarded(t.Call("users"))},
		{"chain", guarded()},
		{"otelhttp", transport(otelhttp.NewTransport(answers{}, otelhttp.WithMeterProvider(meters),
			otelhttp.WithTracerProvider(tracers), otelhttp.WithPropagators(propagation.TraceContext{})))},
		{"plain", transport(answers{})},
	}
}

type key struct{}

func newRequest(b *testing.B) *http.Request {
	req, err := http.NewRequest(http.MethodGet, "http://users.example/42", http.NoBody)
	succeeded(b, err)
	return req
}

func send(base http.RoundTripper, req *http.Request) error {
	resp, err := base.RoundTrip(req)
	if err != nil {
		return err
	}
	return resp.Body.Close()
}

type discard struct{}

func (discard) ExportSpans(context.Context, []sdktrace.ReadOnlySpan) error { return nil }
func (discard) Shutdown(context.Context) error                             { return nil }
