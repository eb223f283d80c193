package telemetry_test

import (
	"context"
	"errors"
	"fmt"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"time"

	prom "github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/exporters/prometheus"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/cacheaside"
	"github.com/go-resilience/resilience/internal/integration/services"
	"github.com/go-resilience/resilience/lease"
	"github.com/go-resilience/resilience/registry"
	"github.com/go-resilience/resilience/resilienceotel"
	"github.com/go-resilience/resilience/retry"
	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/throttle"
)

var errDown = errors.New("down")

// A plant is a program with each kind of policy twice: one is well, and one, named
// ailing, has the fault that its alert is for, from the moment of fail on.
type plant struct {
	failing atomic.Bool
	reg     *registry.Registry
	doing   []func(ctx context.Context) // all of it, again and again
}

// newPlant starts a plant and returns the URL of its metrics.
func newPlant(t *testing.T) (*plant, string) {
	p := &plant{reg: registry.New()}
	collected := prom.NewRegistry()
	exporter, err := prometheus.New(prometheus.WithRegisterer(collected))
	require.NoError(t, err)
	provider := sdkmetric.NewMeterProvider(sdkmetric.WithReader(exporter))
	cfg := resilienceotel.Config{MeterProvider: provider}
	stop, err := resilienceotel.Observe(p.reg, cfg)
	require.NoError(t, err)
	t.Cleanup(stop)

	p.chain(resilienceotel.New(cfg))
	p.breakers()
	p.retries()
	p.bulkheads()
	p.limits(t)
	p.caches()
	p.sagas(t)
	p.leader(t)

	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	go func() {
		for ctx.Err() == nil {
			for _, do := range p.doing {
				do(ctx)
			}
			time.Sleep(2 * time.Millisecond)
		}
	}()
	server := httptest.NewServer(promhttp.HandlerFor(collected, promhttp.HandlerOpts{ErrorHandling: promhttp.HTTPErrorOnError}))
	t.Cleanup(server.Close)
	return p, server.URL
}

func (p *plant) fail() { p.failing.Store(true) }

// work fails while the plant does.
func (p *plant) work(context.Context) error {
	if p.failing.Load() {
		return errDown
	}
	return nil
}

func fine(context.Context) error { return nil }

func (p *plant) does(do func(ctx context.Context)) { p.doing = append(p.doing, do) }

func (p *plant) chain(tel *resilienceotel.Telemetry) {
	retries := retry.New(retry.Config{Name: "well", Backoff: retry.Constant(time.Microsecond)})
	circuit := breaker.New(breaker.Config{Name: "well"})
	slots := bulkhead.New(bulkhead.Config{Name: "well", Limit: 4})
	rate := throttle.New(throttle.Config{Name: "well", Rate: 100_000})
	p.reg.MustAdd(retries, circuit, slots, rate)
	n := 0
	call := resilience.Chain(tel.Call("well"), retries.Wrap, circuit.Wrap, rate.Wrap, slots.Wrap, tel.Attempt("well"))(func(context.Context) error {
		if n++; n%10 == 1 {
			return errDown
		}
		return nil
	})
	p.does(func(ctx context.Context) { _ = call(ctx) })
}

func (p *plant) breakers() {
	circuit := breaker.New(breaker.Config{Name: "ailing", Failures: 1, OpenFor: time.Hour})
	p.reg.MustAdd(circuit)
	p.does(func(ctx context.Context) { _ = circuit.Do(ctx, p.work) })

	circuits := breaker.NewGroup(breaker.GroupConfig[string]{Config: breaker.Config{Name: "shards", Failures: 1, OpenFor: time.Hour}})
	idle := breaker.New(breaker.Config{Name: "idle"}) // half-open, and nobody calls
	idle.Trip(errDown, time.Nanosecond)
	p.reg.MustAdd(circuits, idle)
	p.does(func(ctx context.Context) { _ = circuits.Do(ctx, "ailing", p.work) })
	p.does(func(ctx context.Context) { _ = circuits.Do(ctx, "well", fine) })
}

func (p *plant) retries() {
	retries := retry.New(retry.Config{Name: "ailing", Attempts: 4, Backoff: retry.Constant(time.Microsecond)})
	budget := retry.NewBudget(retry.BudgetConfig{Name: "ailing", Ratio: -1, PerSecond: -1})
	budgeted := retry.New(retry.Config{Name: "budgeted", Backoff: retry.Constant(time.Microsecond), Budget: budget})
	hedger := retry.NewHedger[int](retry.HedgeConfig{Name: "well", Delay: time.Microsecond})
	p.reg.MustAdd(retries, budget, budgeted, hedger)
	p.does(func(ctx context.Context) { _ = retries.Do(ctx, p.work) })
	p.does(func(ctx context.Context) { _ = budgeted.Do(ctx, p.work) })
	p.does(func(ctx context.Context) {
		_, _ = hedger.Do(ctx, func(context.Context) (int, error) { time.Sleep(100 * time.Microsecond); return 0, nil })
	})
}

func (p *plant) bulkheads() {
	slots := bulkhead.New(bulkhead.Config{Name: "ailing", Limit: 1, MaxWait: time.Millisecond})
	p.reg.MustAdd(slots)
	held := false
	p.does(func(ctx context.Context) {
		if p.failing.Load() && !held {
			held = true
			go func() {
				_ = slots.Do(ctx, func(ctx context.Context) error { <-ctx.Done(); return nil })
			}()
			time.Sleep(time.Millisecond)
		}
		_ = slots.Do(ctx, fine)
	})
}

func (p *plant) limits(t *testing.T) {
	search := throttle.New(throttle.Config{Name: "search", Rate: 1000, Burst: 1, MaxWait: -1})
	adaptive := throttle.NewAdaptive(throttle.AdaptiveConfig{Name: "adaptive"})
	rdb := redis.NewClient(&redis.Options{Addr: services.Redis(t), ContextTimeoutEnabled: true, MaxRetries: -1})
	t.Cleanup(func() { _ = rdb.Close() })
	shared := func(name string, down func() bool) *throttle.Shared {
		return throttle.NewShared(throttle.SharedConfig{
			Name: name, Prefix: fmt.Sprintf("telemetry-%d:", time.Now().UnixNano()), Rate: 100_000, Burst: 100_000, Instances: 2, Timeout: 10 * time.Second,
			Eval: func(ctx context.Context, script string, keys []string, args ...any) (any, error) {
				if down() {
					return nil, errDown
				}
				return redis.NewScript(script).Run(ctx, rdb, keys, args...).Result()
			},
		})
	}
	well := shared("shared", func() bool { return false })
	ailing := shared("ailing", p.failing.Load)
	p.reg.MustAdd(search, adaptive, well, ailing)
	for range 3 {
		p.does(func(ctx context.Context) { _ = search.Do(ctx, fine) })
	}
	p.does(func(ctx context.Context) { _ = adaptive.Do(ctx, fine) })
	p.does(func(ctx context.Context) { _ = well.Do(ctx, "", fine) })
	p.does(func(ctx context.Context) { _ = ailing.Do(ctx, "", fine) })
}

func (p *plant) caches() {
	cache := func(name string, ttl time.Duration, load resilience.Func) {
		c := cacheaside.New(cacheaside.Config[int, int]{Name: name, TTL: ttl, StaleOnError: time.Hour,
			Load: func(ctx context.Context, n int) (int, error) { return n, load(ctx) }})
		p.reg.MustAdd(c)
		p.does(func(ctx context.Context) { _, _ = c.Get(ctx, 1) })
	}
	cache("well", time.Hour, fine)
	cache("ailing", time.Millisecond, p.work)
}

type trip struct{ Legs int }

func (p *plant) sagas(t *testing.T) {
	store := saga.NewMemory()
	quiet := saga.RunnerConfig{Name: "worker", LeaseTTL: 500 * time.Millisecond, Poll: 10 * time.Millisecond,
		OnStuck: func(context.Context, saga.StuckSaga) {}, OnUnregistered: func(context.Context, saga.Unregistered) {}}
	runner, other := saga.NewRunner(store, quiet), saga.NewRunner(store, saga.RunnerConfig{})
	done := func(context.Context, *trip) error { return nil }
	fails := func(context.Context, *trip) error { return saga.Abort(errDown) }
	well := &saga.Saga[trip]{Name: "well", Steps: []saga.Step[trip]{{Name: "flight", Do: done, Undo: done}}}
	stuck := &saga.Saga[trip]{Name: "ailing", Steps: []saga.Step[trip]{
		{Name: "flight", Do: done, Undo: fails, UndoAttempts: 1}, {Name: "hotel", Do: fails, Undo: done},
	}}
	orphan := &saga.Saga[trip]{Name: "orphan", Steps: well.Steps} // of a runner that does not run
	saga.Register(runner, well, stuck)
	saga.Register(other, orphan)
	idle := saga.NewRunner(saga.NewMemory(), saga.RunnerConfig{Name: "idle"}) // nobody runs it
	waiting := &saga.Saga[trip]{Name: "waiting", Steps: well.Steps}
	saga.Register(idle, waiting)
	p.reg.MustAdd(runner, idle)
	n, wrong := 0, 0
	start := func(ctx context.Context, r *saga.Runner, sg *saga.Saga[trip]) {
		if _, err := saga.Start(ctx, r, sg, fmt.Sprint(sg.Name, "-", n), trip{}); err != nil && ctx.Err() == nil {
			t.Error(err)
		}
	}
	p.does(func(ctx context.Context) {
		if n++; n%50 == 1 {
			start(ctx, runner, well)
		}
		if p.failing.Load() && wrong < 5 {
			wrong++
			start(ctx, runner, stuck)
			start(ctx, other, orphan)
			start(ctx, idle, waiting)
		}
	})
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() { defer close(ended); _ = runner.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-ended })
}

func (p *plant) leader(t *testing.T) {
	lead := func(name string) lease.Term {
		c := lease.New(lease.NewMemory(), lease.Config{Name: name})
		p.reg.MustAdd(c)
		term, err := c.Campaign(context.Background())
		require.NoError(t, err)
		t.Cleanup(func() { _ = term.Resign(context.Background()) })
		return term
	}
	lead("leader")
	term := lead("ailing")
	lock := lease.New(lease.NewMemory(), lease.Config{Name: "lock"})
	p.reg.MustAdd(lock)
	p.does(func(ctx context.Context) {
		if p.failing.Load() {
			_ = term.Resign(ctx)
		}
		if locked, err := lock.TryCampaign(ctx); err == nil {
			_ = locked.Resign(ctx)
		}
	})
}
