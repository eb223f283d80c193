package resilienceotel_test

import (
	"context"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/attribute"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/registry"
	"github.com/go-resilience/resilience/resilienceotel"
)

// points returns the numbers of the monotonic sums and gauges that a reader collects, by
// instrument and attributes.
func points(t testing.TB, reader *sdkmetric.ManualReader) map[string]map[attribute.Set]float64 {
	t.Helper()
	var rm metricdata.ResourceMetrics
	require.NoError(t, reader.Collect(context.Background(), &rm))
	all := map[string]map[attribute.Set]float64{}
	for _, scope := range rm.ScopeMetrics {
		for _, m := range scope.Metrics {
			var data []metricdata.DataPoint[float64]
			switch d := m.Data.(type) {
			case metricdata.Sum[float64]:
				data = d.DataPoints
			case metricdata.Gauge[float64]:
				data = d.DataPoints
			}
			all[m.Name] = map[attribute.Set]float64{}
			for _, p := range data {
				all[m.Name][p.Attributes] = p.Value
			}
		}
	}
	return all
}

// TestAThousandBreakers holds what the package comment says about the SDK's limit.
func TestAThousandBreakers(t *testing.T) {
	reg := registry.New()
	for i := range 1000 {
		circuit := breaker.New(breaker.Config{Name: strconv.Itoa(i), ConsecutiveFailures: 1, OpenFor: time.Hour})
		for _, err := range []error{nil, context.Canceled, errDown, nil} { // the last one is refused
			ctx, leave := context.WithCancel(t.Context())
			_ = circuit.Do(ctx, func(context.Context) error {
				if err == context.Canceled {
					leave()
				}
				return err
			})
			leave()
		}
		circuit.Disable()
		circuit.ForceOpen(errDown)
		circuit.Reset()
		reg.MustAdd(circuit)
	}
	sets := func(options ...sdkmetric.Option) (overflowed []string, most int) {
		reader := sdkmetric.NewManualReader()
		stop, err := resilienceotel.Observe(reg, resilienceotel.Config{
			MeterProvider: sdkmetric.NewMeterProvider(append(options, sdkmetric.WithReader(reader))...)})
		require.NoError(t, err)
		defer stop()
		for name, sets := range points(t, reader) {
			most = max(most, len(sets))
			for set := range sets {
				if set.HasValue("otel.metric.overflow") {
					overflowed = append(overflowed, name)
				}
			}
		}
		return overflowed, most
	}
	overflowed, most := sets()
	require.ElementsMatch(t, []string{"resilience.breaker.calls", "resilience.breaker.state",
		"resilience.breaker.transitions"}, overflowed)
	require.Equal(t, 2000, most)
	overflowed, most = sets(sdkmetric.WithCardinalityLimit(20_000))
	require.Empty(t, overflowed)
	require.Equal(t, 5*1000, most)
}

// TestAttributeSetsOfAPolicy holds how many attribute sets a policy of each kind can have
// for an instrument, by the package comment.
func TestAttributeSetsOfAPolicy(t *testing.T) {
	most := map[string]int{}
	for _, p := range everyKind() {
		reg := registry.New()
		reg.MustAdd(p)
		for e := range reg.All() {
			sets := map[string]int{}
			for _, f := range e.Metrics() {
				what, _, _ := f.Parse()
				sets[what]++
			}
			for _, n := range sets {
				most[e.Kind] = max(most[e.Kind], n)
			}
		}
	}
	require.Equal(t, 5, most["breaker"])
	require.Equal(t, 6, most["saga"], "one definition")
	delete(most, "saga")
	for kind, n := range most {
		require.LessOrEqual(t, n, 11, kind)
	}
}
