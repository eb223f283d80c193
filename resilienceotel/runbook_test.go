package resilienceotel_test

import (
	"context"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"

	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/bulkhead/adaptive"
	"github.com/go-resilience/resilience/policy"
	"github.com/go-resilience/resilience/registry"
	"github.com/go-resilience/resilience/resiliencehttp"
	"github.com/go-resilience/resilience/resilienceotel"
	"github.com/go-resilience/resilience/retry"
	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/throttle"
)

// A roll notes the names of the instruments that are made.
type roll struct {
	noop.Meter
	names map[string]bool
}

// A provider of one meter.
type provider struct {
	noop.MeterProvider
	meter metric.Meter
}

func (p provider) Meter(string, ...metric.MeterOption) metric.Meter { return p.meter }

func (r *roll) Float64Histogram(name string, _ ...metric.Float64HistogramOption) (metric.Float64Histogram, error) {
	r.names[name] = true
	return noop.Float64Histogram{}, nil
}

func (r *roll) Float64ObservableCounter(
	name string, _ ...metric.Float64ObservableCounterOption,
) (metric.Float64ObservableCounter, error) {
	r.names[name] = true
	return noop.Float64ObservableCounter{}, nil
}

func (r *roll) Float64ObservableGauge(
	name string, _ ...metric.Float64ObservableGaugeOption,
) (metric.Float64ObservableGauge, error) {
	r.names[name] = true
	return noop.Float64ObservableGauge{}, nil
}

// instruments returns the names of all instruments.
func instruments(t *testing.T) map[string]bool {
	r := &roll{names: map[string]bool{}}
	reg := registry.New()
	reg.MustAdd(everyKind()...)
	cfg := resilienceotel.Config{MeterProvider: provider{meter: r},
		Keys: func(string, string, string) bool { return true }}
	stop, err := resilienceotel.Observe(reg, cfg)
	require.NoError(t, err)
	stop()
	resilienceotel.New(cfg)
	return r.names
}

func readDoc(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	return string(text)
}

// Each metric and each metric that the runbook and the package comment name is there.
func TestDocsNameWhatThereIs(t *testing.T) {
	known := instruments(t)
	attributes := map[string]bool{}
	for _, m := range regexp.MustCompile(`namespace \+ "(\w+)"`).FindAllStringSubmatch(readDoc(t, "attributes.go"), -1) {
		attributes["resilience."+m[1]] = true
	}
	for _, name := range []string{ // of sagas in a store
		"saga.stored{saga=,status=}", "saga.due", "saga.due.age_seconds",
	} {
		note(known, attributes, name)
	}
	reg := registry.New()
	reg.MustAdd(everyKind()...)
	for e := range reg.All() {
		for _, f := range e.Metrics() {
			note(known, attributes, f.Name)
		}
	}
	inProse := map[string]bool{} // as Prometheus has them
	for name := range known {
		for _, suffix := range []string{"", "_total", "_seconds", "_seconds_total"} {
			inProse[strings.ReplaceAll(name, ".", "_")+suffix] = true
		}
	}
	for name := range attributes {
		inProse[strings.ReplaceAll(name, ".", "_")] = true
	}

	runbook := readDoc(t, "../docs/runbook.md")
	metric := regexp.MustCompile("`((?:retry|budget|hedge|breaker|bulkhead|throttle|cache|lease|saga|resilience)" +
		"(?:\\.[a-z_]+)+)")
	named := metric.FindAllStringSubmatch(runbook, -1)
	require.Greater(t, len(named), 20)
	for _, m := range named {
		require.True(t, known[m[1]], "the runbook: %s", m[1])
	}
	comment := readDoc(t, "doc.go")
	for _, name := range regexp.MustCompile(`\bresilience(\.[a-z_]+)+`).FindAllString(comment, -1) {
		if name != "resilience.member" {
			require.True(t, known[name] || attributes[name], "the package comment: %s", name)
		}
	}
	for _, name := range regexp.MustCompile(`\bresilience(_[a-z]+)+`).FindAllString(comment+runbook, -1) {
		require.True(t, inProse[name], name)
	}
	for name := range known {
		if strings.HasSuffix(name, ".duration") || name == "resilience.retry.call.attempts" {
			require.Contains(t, comment, name, "the package comment lists the histograms")
		}
	}
}

// Each change of settings that the runbook advises can be applied.
func TestRunbookSettings(t *testing.T) {
	runbook := readDoc(t, "../docs/runbook.md")
	snippets := regexp.MustCompile(`\{"\w+/\w+": .*\}\}+`).FindAllString(runbook, -1)
	require.Len(t, snippets, 7)
	for _, snippet := range snippets {
		reg := registry.New()
		reg.MustAdd(
			breaker.New(breaker.Config{Name: "users"}),
			retry.New(retry.Config{Name: "users"}),
			retry.New(retry.Config{Name: "NAME"}),
			throttle.NewGroup(throttle.GroupConfig[string]{Config: throttle.Config{Name: "NAME", Rate: 1, Burst: 1}}),
		)
		for _, p := range resiliencehttp.NewTransport(resiliencehttp.ClientConfig{Name: "payments"}).Policies() {
			reg.MustAdd(p)
		}
		if strings.Contains(snippet, `"Max"`) {
			reg.MustAdd(adaptive.New(adaptive.Config{Bulkhead: bulkhead.Config{Name: "NAME"}}))
		} else {
			reg.MustAdd(bulkhead.New(bulkhead.Config{Name: "NAME", Limit: 8}))
		}
		report, err := reg.Apply([]byte(snippet))
		require.NoError(t, err, snippet)
		require.NotEmpty(t, report.String(), snippet)
	}
}

// metricsOf returns the metrics of a policy that are not zero.
func metricsOf(t *testing.T, reg *registry.Registry, kind, name string) (lines []string) {
	t.Helper()
	e, found := reg.Get(kind, name)
	require.True(t, found)
	for _, f := range e.Metrics() {
		if f.Value != 0 {
			lines = append(lines, fmt.Sprint(f.Name, " ", f.Value))
		}
	}
	return lines
}

// What the runbook says of a tenant that has spent its quota.
func TestRunbookQuota(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		reg := registry.New()
		tenants := throttle.NewGroup(throttle.GroupConfig[string]{Config: throttle.Config{Name: "tenants",
			Quotas: []throttle.Quota{{N: 2, Window: throttle.Window{Per: throttle.Day}}}}})
		reg.MustAdd(tenants)
		use := func(calls int) (made int) {
			for range calls {
				if tenants.Do(t.Context(), "a", func(context.Context) error { return nil }) == nil {
					made++
				}
			}
			return made
		}
		require.Equal(t, 2, use(5))
		require.Contains(t, metricsOf(t, reg, "throttle", "tenants"), "throttle.calls{outcome=refused,reason=over_quota} 3")
		require.EqualValues(t, 2, tenants.Stats().Spent, "refused calls spend nothing")
		e, _ := reg.Get("throttle", "tenants")
		require.Equal(t, policy.Health{}, e.Health(t.Context()))

		_, err := reg.Apply([]byte(`{"throttle/tenants": {"Config": {"Quotas": [{"N": 5, "Window": {"Per": "day"}}]}}}`))
		require.NoError(t, err)
		require.Equal(t, 3, use(5), "what was spent stays spent")
		time.Sleep(24 * time.Hour)
		require.Equal(t, 5, use(6))
	})
}

// What the runbook says of a saga that makes no progress.
func TestRunbookStalledSaga(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		closed := true
		order := &saga.Saga[trip]{Name: "order", Steps: []saga.Step[trip]{
			{Name: "pay", Pivot: true, Do: done},
			{Name: "ship", Backoff: func(int) time.Duration { return 40 * time.Second }, Do: func(context.Context, *trip) error {
				if closed {
					return errDown
				}
				return nil
			}},
		}}
		runner := saga.NewRunner(saga.NewMemory(), saga.RunnerConfig{Name: "worker"})
		runner.Observe(func(context.Context, saga.Event) {})
		orders := saga.Register(runner, order)
		reg := registry.New()
		reg.MustAdd(runner)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- runner.Run(ctx) }()
		defer func() { cancel(); <-ended }()
		for _, id := range []string{"waits", "retried", "by-hand"} {
			_, err := orders.Start(t.Context(), id, trip{})
			require.NoError(t, err)
		}
		status := func(id string) saga.Status {
			in, err := runner.Get(t.Context(), id)
			require.NoError(t, err)
			return in.Status
		}

		time.Sleep(6 * time.Minute)
		metrics := metricsOf(t, reg, "saga", "worker")
		require.Contains(t, metrics, "saga.stalls 3")
		require.NotContains(t, strings.Join(metrics, "\n"), "saga.held", "it holds no place while it waits")
		require.Equal(t, saga.Running, status("waits"))
		time.Sleep(5 * time.Minute)
		require.Contains(t, metricsOf(t, reg, "saga", "worker"), "saga.stalls 6", "after twice the attempts")
		require.NoError(t, runner.Operate(t.Context(), "by-hand",
			saga.Operation{Action: saga.ActionSkip, Step: "ship", Note: "shipped by hand"}))
		closed = false
		require.NoError(t, runner.Operate(t.Context(), "retried",
			saga.Operation{Action: saga.ActionRetry, Note: "the warehouse is open"}))
		time.Sleep(time.Second)
		require.Equal(t, saga.Completed, status("by-hand"))
		require.Equal(t, saga.Completed, status("retried"))
		time.Sleep(time.Minute)
		require.Equal(t, saga.Completed, status("waits"), "the next attempt goes through")
		require.ErrorIs(t, runner.Operate(t.Context(), "waits", saga.Operation{Action: saga.ActionCompensate}),
			saga.ErrNotAllowed)
	})
}

// What the runbook says of an adaptive limit.
func TestRunbookAdaptiveLimit(t *testing.T) {
	reg := registry.New()
	slots := adaptive.New(adaptive.Config{Bulkhead: bulkhead.Config{Name: "users"}, Initial: 100})
	reg.MustAdd(slots)
	_, err := reg.Apply([]byte(`{"bulkhead/users": {"Initial": 20, "Max": 50}}`))
	require.NoError(t, err)
	require.Equal(t, 50, slots.Stats().Limit, "immediately")
	_, err = reg.Apply([]byte(`{"bulkhead/users": {"Initial": 32, "Min": 32, "Max": 32}}`))
	require.NoError(t, err)
	require.Equal(t, 32, slots.Stats().Limit)
}

// note adds the name of a metric, with and without its unit, to known, and its attributes to attributes.
func note(known, attributes map[string]bool, name string) {
	what, _, attrs := policy.Metric{Name: name}.Parse()
	known[what] = true
	with, _, _ := strings.Cut(name, "{")
	known[with] = true
	for _, a := range attrs {
		attributes["resilience."+a.Key] = true
	}
}
