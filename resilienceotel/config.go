package resilienceotel

import (
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"
)

// scope is the name of the instrumentation scope of all instruments and spans.
const scope = "github.com/go-resilience/resilience/resilienceotel"

// Config configures [Observe] and [New]. The zero Config uses the global providers and exports no keys.
type Config struct {
	// MeterProvider creates the instruments. Nil means otel.GetMeterProvider().
	MeterProvider metric.MeterProvider
	// TracerProvider creates the spans. Nil means otel.GetTracerProvider().
	TracerProvider trace.TracerProvider

	// Keys reports whether a key of a Group may appear in metrics. kind is the kind of the Group's policy, such as
	// "breaker", and name is the name of the Group. Observe exports the metrics of each member whose key is allowed, as
	// instruments resilience.member.*. Each time the SDK collects metrics, Observe reads the metrics of all members. Keys
	// must allow only a limited number of keys, because each key adds attribute sets to the instruments. Nil means that no
	// key is exported.
	Keys func(kind, name, key string) bool
}

func (c Config) meter() metric.Meter {
	p := c.MeterProvider
	if p == nil {
		p = otel.GetMeterProvider()
	}
	return p.Meter(scope)
}

func (c Config) tracer() trace.Tracer {
	p := c.TracerProvider
	if p == nil {
		p = otel.GetTracerProvider()
	}
	return p.Tracer(scope)
}

// Boundaries of the histograms: in seconds, except for attemptBuckets, which are numbers of attempts. The semantic
// conventions for HTTP recommend the boundaries for calls.
var (
	callBuckets    = []float64{0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10}
	waitBuckets    = []float64{0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5}
	stepBuckets    = []float64{0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60}
	sagaBuckets    = []float64{0.1, 0.5, 1, 5, 10, 30, 60, 300, 1800, 3600, 21600, 86400}
	attemptBuckets = []float64{1, 2, 3, 5, 8}
)

// histogram creates a histogram. If that fails, it passes the error to otel's error handler, and returns a histogram
// that records nothing.
func histogram(m metric.Meter, name, unit, help string, buckets []float64) metric.Float64Histogram {
	h, err := m.Float64Histogram(name, metric.WithUnit(unit), metric.WithDescription(help),
		metric.WithExplicitBucketBoundaries(buckets...))
	if err != nil {
		otel.Handle(err)
	}
	return h
}
