package resilienceotel_test

import (
	"context"
	"iter"
	"slices"
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

func deltas(sdkmetric.InstrumentKind) metricdata.Temporality { return metricdata.DeltaTemporality }

// Counters of a policy that is replaced under its name go on where they were, for readers
// of both temporalities at once; those of a policy that comes back after a collection
// without it begin anew.
func TestReplacedPolicyGoesOnCounting(t *testing.T) {
	cumulative := sdkmetric.NewManualReader()
	delta := sdkmetric.NewManualReader(sdkmetric.WithTemporalitySelector(deltas))
	reg := registry.New()
	stop, err := resilienceotel.Observe(reg, resilienceotel.Config{
		MeterProvider: sdkmetric.NewMeterProvider(sdkmetric.WithReader(cumulative), sdkmetric.WithReader(delta)),
		Keys:          func(string, string, string) bool { return true },
	})
	require.NoError(t, err)
	defer stop()

	made := func(failures, successes int) *breaker.Breaker {
		circuit := breaker.New(breaker.Config{Name: "users", Failures: 100})
		for range failures {
			_ = circuit.Do(t.Context(), func(context.Context) error { return errDown })
		}
		for range successes {
			require.NoError(t, circuit.Do(t.Context(), func(context.Context) error { return nil }))
		}
		return circuit
	}
	check := func(reader *sdkmetric.ManualReader, failures, successes float64) {
		t.Helper()
		calls := points(t, reader)["resilience.breaker.calls"]
		got := map[string]float64{"failure": -1, "success": -1} // none
		for set, n := range calls {
			outcome, _ := set.Value("resilience.outcome")
			got[outcome.AsString()] = n
		}
		require.Equal(t, map[string]float64{"failure": failures, "success": successes}, got)
	}
	const none = -1

	first := made(5, 0)
	reg.MustAdd(first)
	check(cumulative, 5, none)
	check(delta, 5, none)
	second := made(2, 3) // in another order, and with another outcome
	reg.Remove(first)
	reg.MustAdd(second)
	check(delta, 2, 3)
	check(cumulative, 7, 3)
	third := made(0, 9) // without an outcome that was there
	reg.Remove(second)
	reg.MustAdd(third)
	check(cumulative, 7, 12)
	check(delta, 0, 9)
	_ = third.Do(t.Context(), func(context.Context) error { return errDown })
	check(delta, 1, 0)
	check(cumulative, 8, 12)

	reg.Remove(third)
	check(delta, none, none)
	check(cumulative, none, none)
	reg.MustAdd(third)
	check(delta, 1, 9)
	check(cumulative, 1, 9)
}

// A member of a Group that is evicted and comes back is another policy with its key.
func TestReplacedMemberGoesOnCounting(t *testing.T) {
	delta := sdkmetric.NewManualReader(sdkmetric.WithTemporalitySelector(deltas))
	shards := breaker.NewGroup(breaker.GroupConfig[string]{Config: breaker.Config{Name: "shards"}, MaxKeys: 1})
	reg := registry.New()
	reg.MustAdd(shards)
	stop, err := resilienceotel.Observe(reg, resilienceotel.Config{
		MeterProvider: sdkmetric.NewMeterProvider(sdkmetric.WithReader(delta)),
		Keys:          func(string, string, string) bool { return true },
	})
	require.NoError(t, err)
	defer stop()
	use := func(key string, n int) {
		for range n {
			require.NoError(t, shards.Do(t.Context(), key, func(context.Context) error { return nil }))
		}
	}
	eu := func() (n float64) {
		for set, v := range points(t, delta)["resilience.member.breaker.calls"] {
			if key, _ := set.Value("resilience.key"); key.AsString() == "eu" {
				n += v
			}
		}
		return n
	}
	use("eu", 5)
	require.Equal(t, 5.0, eu())
	use("us", 1)
	use("eu", 2)
	require.Equal(t, 2.0, eu())
}

// A tally counts things, in an order of its own.
type tally struct {
	custom
	counts []registry.Figure
}

func (p *tally) Figures() iter.Seq[registry.Figure] { return slices.Values(p.counts) }

func tallyOf(things ...any) *tally { // "a", 5, "b", 7
	p := new(tally)
	for i := 0; i < len(things); i += 2 {
		p.counts = append(p.counts, registry.Figure{Name: "tally.things", Unit: "{thing}", Help: "Things.", Counter: true, Additive: true,
			Attrs: []registry.Attr{{Key: "thing", Value: things[i].(string)}}, Value: float64(things[i+1].(int))})
	}
	return p
}

func TestReplacedPolicyMayShowOtherFigures(t *testing.T) {
	delta := sdkmetric.NewManualReader(sdkmetric.WithTemporalitySelector(deltas))
	p := tallyOf("a", 5, "b", 7, "c", 9)
	reg := registry.New()
	reg.MustAdd(p)
	stop, err := resilienceotel.Observe(reg, resilienceotel.Config{MeterProvider: sdkmetric.NewMeterProvider(sdkmetric.WithReader(delta))})
	require.NoError(t, err)
	defer stop()
	collect := func() map[string]float64 {
		things := map[string]float64{}
		for set, n := range points(t, delta)["resilience.tally.things"] {
			thing, _ := set.Value("resilience.thing")
			things[thing.AsString()] = n
		}
		return things
	}
	replace := func(by *tally) {
		require.True(t, reg.Remove(p))
		reg.MustAdd(by)
		p = by
	}
	require.Equal(t, map[string]float64{"a": 5, "b": 7, "c": 9}, collect())
	replace(tallyOf("c", 1, "b", 2))
	require.Equal(t, map[string]float64{"b": 2, "c": 1}, collect())
	replace(tallyOf("a", 3, "b", 1, "c", 1))
	require.Equal(t, map[string]float64{"a": 3, "b": 1, "c": 1}, collect(), "what was not there begins anew")
}

// TestAThousandBreakers holds what the package comment says about the SDK's limit.
func TestAThousandBreakers(t *testing.T) {
	reg := registry.New()
	for i := range 1000 {
		circuit := breaker.New(breaker.Config{Name: strconv.Itoa(i), Failures: 1, OpenFor: time.Hour})
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
	require.ElementsMatch(t, []string{"resilience.breaker.calls", "resilience.breaker.state", "resilience.breaker.transitions"}, overflowed)
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
			for f := range e.Figures() {
				sets[f.Name]++
			}
			for _, n := range sets {
				most[e.Kind] = max(most[e.Kind], n)
			}
		}
	}
	require.Equal(t, 5, most["breaker"])
	require.Equal(t, 2*6, most["saga"], "one step, done and undone")
	delete(most, "saga")
	for kind, n := range most {
		require.LessOrEqual(t, n, 11, kind)
	}
}
