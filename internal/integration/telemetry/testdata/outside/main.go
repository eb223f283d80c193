// Program outside implements its own policy, and shows it in a registry, on a console page, in a health endpoint and
// as metrics. It belongs to no module of this repository: TestPolicyOfAnotherModule builds it in a separate module.
package main

import (
	"context"
	"fmt"
	"log/slog"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"sync"

	"go.opentelemetry.io/otel/attribute"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/go-resilience/resilience/console"
	"github.com/go-resilience/resilience/policy"
	"github.com/go-resilience/resilience/registry"
	"github.com/go-resilience/resilience/resiliencehttp"
	"github.com/go-resilience/resilience/resilienceotel"
)

// Config configures a gate.
type Config struct{ Limit int }

// A gate admits Limit calls in total.
type gate struct {
	mu        sync.Mutex
	cfg       Config
	stats     Stats
	observers []func(context.Context, Event)
}

var _ policy.Describer = (*gate)(nil)

// Stats are the statistics of a gate.
type Stats struct {
	Passed  int     `counter:"calls{outcome=passed}"`
	Refused int     `counter:"calls{outcome=refused}"`
	Full    float64 `gauge:"full_ratio"`
}

// An Event reports a refused call.
type Event struct{ Passed int }

// Describe returns the description of g.
func (g *gate) Describe() policy.Description {
	return policy.Description{
		Kind:    "gate",
		Name:    "visitors",
		Metrics: func() []policy.Metric { return policy.Metrics("gate", g.Stats()) },
		Health:  g.health,
		Config:  func() any { return g.config() },
		Update:  g.update,
		Observe: policy.Events(g.Observe, describe),
	}
}

func describe(e Event) policy.Event {
	return policy.Event{
		Kind: "gate", Name: "visitors", What: "refused", Level: slog.LevelWarn,
		Attrs: []slog.Attr{slog.Int("passed", e.Passed)},
	}
}

func (g *gate) Stats() Stats {
	g.mu.Lock()
	defer g.mu.Unlock()
	s := g.stats
	s.Full = float64(s.Passed) / float64(g.cfg.Limit)
	return s
}

func (g *gate) health(context.Context) policy.Health {
	if s := g.Stats(); s.Full >= 1 {
		return policy.Health{Status: policy.Warn, State: "full", Detail: fmt.Sprintf("all of %d have passed", s.Passed)}
	}
	return policy.Health{}
}

func (g *gate) config() Config {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.cfg
}

func (g *gate) update(dryRun bool, change func(cfg any) error) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	next := g.cfg
	if err := change(&next); err != nil {
		return err
	}
	if next.Limit < 1 {
		return fmt.Errorf("Limit is %d: must be 1 or more", next.Limit)
	}
	if !dryRun {
		g.cfg = next
	}
	return nil
}

func (g *gate) Observe(f func(context.Context, Event)) (stop func()) {
	g.observers = append(g.observers, f)
	return func() { g.observers = nil }
}

func (g *gate) pass(ctx context.Context) {
	g.mu.Lock()
	full := g.stats.Passed == g.cfg.Limit
	if full {
		g.stats.Refused++
	} else {
		g.stats.Passed++
	}
	e := Event{g.stats.Passed}
	g.mu.Unlock()
	for _, f := range g.observers {
		if full {
			f(ctx, e)
		}
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	return v
}

func main() {
	ctx := context.Background()
	g := &gate{cfg: Config{Limit: 1}}
	reg := registry.New()
	reg.MustAdd(g)
	reg.Observe(func(_ context.Context, e policy.Event) {
		fmt.Println("event:", e.Kind, e.Name, e.What, e.Level, e.Attrs)
	})
	reader := sdkmetric.NewManualReader()
	meters := sdkmetric.NewMeterProvider(sdkmetric.WithReader(reader))
	defer must(resilienceotel.Observe(reg, resilienceotel.Config{MeterProvider: meters}))()

	fmt.Println("settings:", must(reg.Apply([]byte(`{"gate/visitors": {"Limit": 2}}`))))
	_, err := reg.Apply([]byte(`{"gate/visitors": {"Limit": 0}}`))
	fmt.Println("settings:", err)
	for range 3 {
		g.pass(ctx)
	}
	fmt.Println("metrics:", reg)
	for name, h := range reg.Health(ctx) {
		fmt.Println("health:", name, h.Status, h.State, h.Detail)
	}
	health := httptest.NewRecorder()
	resiliencehttp.Health(reg).ServeHTTP(health, httptest.NewRequest("GET", "/health", nil))
	fmt.Print("health: ", health.Body)

	page := console.New(reg, console.Config{Show: console.Show{Errors: true}})
	defer page.Close()
	w := httptest.NewRecorder()
	page.ServeHTTP(w, httptest.NewRequest("GET", "/policy?kind=gate&name=visitors", nil))
	for _, text := range []string{
		"visitors", "full", "all of 2 have passed", "gate.calls", "outcome = passed",
		"&#34;Limit&#34;: 2", "gate.full",
	} {
		fmt.Println("console:", text, strings.Contains(w.Body.String(), text))
	}

	var rm metricdata.ResourceMetrics
	if err := reader.Collect(ctx, &rm); err != nil {
		fmt.Println(err)
	}
	for _, scope := range rm.ScopeMetrics {
		for _, m := range scope.Metrics {
			switch data := m.Data.(type) {
			case metricdata.Sum[float64]:
				var lines []string // the order of the data points is not defined
				for _, p := range data.DataPoints {
					attrs := p.Attributes.Encoded(attribute.DefaultEncoder())
					lines = append(lines, fmt.Sprintln("metric:", m.Name, m.Unit, attrs, p.Value))
				}
				slices.Sort(lines)
				fmt.Print(strings.Join(lines, ""))
			case metricdata.Gauge[float64]:
				fmt.Println("metric:", m.Name, m.Unit, data.DataPoints[0].Value)
			}
		}
	}
}
