package resilienceotel_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/attribute"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/go-resilience/resilience/policy"
	"github.com/go-resilience/resilience/registry"
	"github.com/go-resilience/resilience/resilienceotel"
)

var errDown = errors.New("down")

// An otelSDK is what a program sets up, with everything exported to memory.
type otelSDK struct {
	resilienceotel.Config
	reader *sdkmetric.ManualReader
	spans  *tracetest.InMemoryExporter
	tracer *sdktrace.TracerProvider
}

func newSDK(t testing.TB) *otelSDK {
	s := &otelSDK{reader: sdkmetric.NewManualReader(), spans: tracetest.NewInMemoryExporter()}
	s.tracer = sdktrace.NewTracerProvider(sdktrace.WithSyncer(s.spans))
	s.Config = resilienceotel.Config{
		MeterProvider:  sdkmetric.NewMeterProvider(sdkmetric.WithReader(s.reader), sdkmetric.WithCardinalityLimit(0)),
		TracerProvider: s.tracer,
	}
	return s
}

func (s *otelSDK) observe(t testing.TB, policies ...policy.Describer) *registry.Registry {
	t.Helper()
	reg := registry.New()
	reg.MustAdd(policies...)
	stop, err := resilienceotel.Observe(reg, s.Config)
	require.NoError(t, err)
	t.Cleanup(stop)
	return reg
}

// metrics returns the metrics that are there, by name.
func (s *otelSDK) metrics(t testing.TB) map[string]metricdata.Metrics {
	t.Helper()
	var rm metricdata.ResourceMetrics
	require.NoError(t, s.reader.Collect(context.Background(), &rm))
	all := map[string]metricdata.Metrics{}
	for _, scope := range rm.ScopeMetrics {
		require.Equal(t, "github.com/go-resilience/resilience/resilienceotel", scope.Scope.Name)
		for _, m := range scope.Metrics {
			require.NotContains(t, all, m.Name)
			all[m.Name] = m
		}
	}
	return all
}

// values returns each number as a line: `resilience.breaker.calls{...}`; of a
// histogram the count.
func (s *otelSDK) values(t testing.TB) map[string]float64 {
	t.Helper()
	all := map[string]float64{}
	put := func(name string, set attribute.Set, v float64) { all[name+labels(set)] = v }
	for name, m := range s.metrics(t) {
		switch data := m.Data.(type) {
		case metricdata.Sum[float64]:
			for _, p := range data.DataPoints {
				put(name, p.Attributes, p.Value)
			}
		case metricdata.Gauge[float64]:
			for _, p := range data.DataPoints {
				put(name, p.Attributes, p.Value)
			}
		case metricdata.Histogram[float64]:
			for _, p := range data.DataPoints {
				put(name, p.Attributes, float64(p.Count))
			}
		default:
			t.Fatalf("%s is a %T", name, data)
		}
	}
	return all
}

func labels(set attribute.Set) string {
	var all []string
	for _, kv := range set.ToSlice() {
		if _, found := strings.CutPrefix(string(kv.Key), "resilience."); !found && kv.Key != "error.type" &&
			kv.Key != "http.request.resend_count" {
			panic(kv.Key + " has no namespace")
		}
		all = append(all, fmt.Sprintf("%s=%s", strings.TrimPrefix(string(kv.Key), "resilience."), kv.Value.String()))
	}
	return "{" + strings.Join(all, ",") + "}"
}

// attrs returns the attributes of a span as text.
func attrs(s tracetest.SpanStub) string {
	return labels(attribute.NewSet(s.Attributes...))
}

func named(spans tracetest.SpanStubs, name string) tracetest.SpanStubs {
	return slices.DeleteFunc(slices.Clone(spans), func(s tracetest.SpanStub) bool { return s.Name != name })
}
