// Program outside has a policy of its own, and shows it in a registry, in a console and as a
// metric. It is in no module of this repository: TestPolicyOfAnotherModule builds it in one of
// its own.
package main

import (
	"context"
	"fmt"
	"net/http/httptest"
	"os"
	"strings"
	"sync"

	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/go-resilience/resilience/console"
	"github.com/go-resilience/resilience/registry"
	"github.com/go-resilience/resilience/resilienceotel"
)

type Config struct{ Limit int }

// A gate lets so many calls through, ever.
type gate struct {
	mu        sync.Mutex
	cfg       Config
	passed    int
	observers []func(context.Context, any)
}

type refused struct{ passed int }

func (refused) Level() int { return 4 }
func (e refused) Fields(yield func(name string, value any)) {
	yield("event", "refused")
	yield("passed", e.passed)
}

func (g *gate) Kind() string { return "gate" }
func (g *gate) Name() string { return "visitors" }

func (g *gate) Figures() []registry.Figure {
	g.mu.Lock()
	defer g.mu.Unlock()
	return []registry.Figure{
		{Name: "gate.calls{outcome=passed}", Counter: true, Value: float64(g.passed)},
		{Name: "gate.full_ratio", Value: float64(g.passed) / float64(g.cfg.Limit)},
	}
}

func (g *gate) Health() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.passed < g.cfg.Limit {
		return nil
	}
	return fmt.Errorf("all of %d have passed", g.cfg.Limit)
}

func (g *gate) Settings() any {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.cfg
}

func (g *gate) Change(dry bool, f func(cfg any) error) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	next := g.cfg
	if err := f(&next); err != nil {
		return err
	}
	if next.Limit < 1 {
		return fmt.Errorf("Limit is %d: must be 1 or more", next.Limit)
	}
	if !dry {
		g.cfg = next
	}
	return nil
}

func (g *gate) Observe(f func(context.Context, any)) (stop func()) {
	g.observers = append(g.observers, f)
	return func() { g.observers = nil }
}

func (g *gate) pass(ctx context.Context) {
	g.mu.Lock()
	full := g.passed == g.cfg.Limit
	if !full {
		g.passed++
	}
	e := refused{g.passed}
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
	reg.Observe(func(_ context.Context, e registry.Event) {
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
	fmt.Println("figures:", reg)
	for name, err := range reg.Health(ctx) {
		fmt.Println("health:", name, err)
	}

	page := console.New(reg, console.Config{Show: console.Show{Errors: true}})
	defer page.Close()
	w := httptest.NewRecorder()
	page.ServeHTTP(w, httptest.NewRequest("GET", "/policy?kind=gate&name=visitors", nil))
	for _, text := range []string{
		"visitors", "ailing", "all of 2 have passed", "gate.calls", "outcome = passed",
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
				fmt.Println("metric:", m.Name, m.Unit, data.DataPoints[0].Value)
			case metricdata.Gauge[float64]:
				fmt.Println("metric:", m.Name, m.Unit, data.DataPoints[0].Value)
			}
		}
	}
}
