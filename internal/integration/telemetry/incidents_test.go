package telemetry_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	prom "github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/integration/services"
)

// An incident is a fault from outside that lasts for a quarter of an hour.
type incident struct {
	what       string
	begin, end func(p *plant)
	// fires are the alerts that fire, each with the name of the policy and of the saga, and
	// in which minutes of the incident, the first and the last.
	fires map[string][2]int
}

func incidents() []incident {
	fault := func(what string, of func(p *plant) *atomic.Bool, fires map[string][2]int) incident {
		return incident{what, func(p *plant) { of(p).Store(true) }, func(p *plant) { of(p).Store(false) }, fires}
	}
	then := func(in incident, mend func(p *plant)) incident {
		end := in.end
		in.end = func(p *plant) { end(p); mend(p) }
		return in
	}
	return []incident{
		then(fault("an outage", func(p *plant) *atomic.Bool { return &p.down }, map[string][2]int{
			"ResilienceBreakerRefusing users": {7, 18},
			"ResilienceBreakerOpen users":     {5, 22},
			"ResilienceCacheStale users":      {7, 19},
		}), func(p *plant) { p.circuit.Reset() }),
		fault("a slow dependency", func(p *plant) *atomic.Bool { return &p.slow }, map[string][2]int{
			"ResilienceBulkheadFull users": {7, 19},
			"ResilienceRetryStorm users":   {7, 18}, // what the bulkhead refuses is retried
		}),
		fault("a retry storm", func(p *plant) *atomic.Bool { return &p.mailDown }, map[string][2]int{
			"ResilienceRetryStorm mail":       {6, 19},
			"ResilienceRetryBudgetSpent news": {7, 19},
		}),
		fault("Redis away", func(p *plant) *atomic.Bool { return &p.redisAway }, map[string][2]int{
			"ResilienceSharedLimitAlone fleet": {2, 15},
		}),
		fault("one of 300 shards", func(p *plant) *atomic.Bool { return &p.shardDown }, map[string][2]int{
			"ResilienceBreakerKeyOpen shards": {11, 17},
		}),
		then(fault("a step that can be neither done nor undone", func(p *plant) *atomic.Bool { return &p.hotelClosed },
			map[string][2]int{
				"ResilienceSagaStuck worker trip": {3, 16},
			}), (*plant).retryStuck),
		{"no runner runs", func(p *plant) { p.stop() }, func(p *plant) { p.run() }, map[string][2]int{
			"ResilienceSagaDue worker trip": {8, 16},
		}},
		fault("an unreadable store of sagas", func(p *plant) *atomic.Bool { return &p.sagasLost }, map[string][2]int{
			"ResilienceSagaStoreFailing worker": {6, 16},
		}),
		fault("a lease that no process can get", func(p *plant) *atomic.Bool { return &p.leaseLocked }, map[string][2]int{
			"ResilienceLeaseVacant billing": {2, 15},
		}),
	}
}

// TestIncidents runs a program with every policy through one incident after the other, in
// virtual time, and has promtool evaluate the alerts over its metrics: at each minute those
// of the incident fire, and no other. A minute earlier or later is as good.
func TestIncidents(t *testing.T) {
	const lasts, calm = 15, 15 // minutes
	all := incidents()
	var metrics recording
	synctest.Test(t, func(t *testing.T) {
		plant, collected := newPlant(t, 5*time.Second, func(context.Context, string, []string, ...any) (any, error) {
			return []any{int64(1), int64(0), int64(0)}, nil
		})
		pass := func(minutes int) {
			for range minutes {
				time.Sleep(time.Minute)
				metrics.sample(t, collected)
			}
		}
		time.Sleep(time.Second) // beside all that happens each minute
		pass(calm)
		for _, in := range all {
			in.begin(plant)
			pass(lasts)
			in.end(plant)
			pass(calm)
		}
	})

	rules, err := filepath.Abs(alerts + "/resilience.rules.yml")
	require.NoError(t, err)
	var test strings.Builder
	fmt.Fprintf(&test, "rule_files: [%q]\nevaluation_interval: 1m\ntests:\n- interval: 1m\n  input_series:\n", rules)
	for series := range metrics.series {
		fmt.Fprintf(&test, "  - {series: '%s', values: '%s'}\n", series, strings.Join(metrics.values(series), " "))
	}
	test.WriteString("  promql_expr_test:\n")
	by := []string{"alertname", "resilience_name", "resilience_saga"}
	for sample := range metrics.samples {
		var firing []string
		sure := true
		if n := (sample - calm) / (lasts + calm); sample >= calm {
			minute := (sample-calm)%(lasts+calm) + 1
			for alert, fires := range all[n].fires {
				from, to := fires[0], fires[1]
				if from <= minute && minute <= to {
					var labels []string
					for i, word := range strings.Fields(alert) {
						labels = append(labels, fmt.Sprintf("%s=%q", by[i], word))
					}
					firing = append(firing, fmt.Sprintf("{labels: '{%s}', value: 1}", strings.Join(labels, ", ")))
				}
				sure = sure && minute != from-1 && minute != from && minute != to && minute != to+1
			}
		}
		if sure {
			fmt.Fprintf(&test, "  - {eval_time: %dm, expr: 'count by (%s) (ALERTS{alertstate=\"firing\"})', "+
				"exp_samples: [%s]}\n", sample, strings.Join(by, ", "), strings.Join(firing, ", "))
		}
	}
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "incidents.yml"), []byte(test.String()), 0o600))
	services.Promtool(t, dir, "test", "rules", "incidents.yml")
}

// A recording is what a Prometheus would have scraped.
type recording struct {
	series  map[string]map[int]float64 // by name and labels: the values of samples
	samples int
}

func (r *recording) sample(t *testing.T, from prom.Gatherer) {
	t.Helper()
	if r.series == nil {
		r.series = map[string]map[int]float64{}
	}
	families, err := from.Gather()
	require.NoError(t, err)
	for _, f := range families {
		for _, m := range f.GetMetric() {
			var value float64
			switch {
			case m.GetCounter() != nil:
				value = m.GetCounter().GetValue()
			case m.GetGauge() != nil:
				value = m.GetGauge().GetValue()
			default:
				continue // no alert looks at a histogram
			}
			labels := []string{`job="plant"`, `instance="a"`}
			for _, l := range m.GetLabel() {
				labels = append(labels, fmt.Sprintf("%s=%q", l.GetName(), l.GetValue()))
			}
			name := f.GetName() + "{" + strings.Join(labels, ",") + "}"
			if r.series[name] == nil {
				r.series[name] = map[int]float64{}
			}
			r.series[name][r.samples] = value
		}
	}
	r.samples++
}

// values returns the samples of a series as promtool reads them.
func (r *recording) values(series string) (all []string) {
	for sample := range r.samples {
		v, there := r.series[series][sample]
		if there {
			all = append(all, fmt.Sprint(v))
			continue
		}
		all = append(all, "_")
	}
	return all
}
