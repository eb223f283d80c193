package telemetry_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	prom "github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/exporters/prometheus"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/cacheaside"
	"github.com/go-resilience/resilience/hedge"
	"github.com/go-resilience/resilience/lease"
	"github.com/go-resilience/resilience/registry"
	"github.com/go-resilience/resilience/resilienceotel"
	"github.com/go-resilience/resilience/retry"
	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/saga/sagastore"
	"github.com/go-resilience/resilience/throttle"
	"github.com/go-resilience/resilience/throttle/adaptive"
	"github.com/go-resilience/resilience/throttle/fleet"
)

var errDown = errors.New("down")

// A plant is a program with every policy, under a load of its own. Its faults come from
// outside, one by one.
type plant struct {
	t    *testing.T
	ctx  context.Context
	reg  *registry.Registry
	tel  *resilienceotel.Telemetry
	pace time.Duration // how often each call is made
	eval func(ctx context.Context, script string, keys []string, args ...any) (any, error)

	down, slow  atomic.Bool // what the chain "users" and the cache call
	mailDown    atomic.Bool // what the retriers "mail" and "news" call, without a breaker
	shardDown   atomic.Bool // one of 300
	redisAway   atomic.Bool
	leaseLocked atomic.Bool // the store gives the lease to no process
	sagasLost   atomic.Bool // the store of sagas is down
	hotelClosed atomic.Bool // a step cannot be done, nor the one before it undone

	circuit *breaker.Breaker // users
	runner  *saga.Runner
	stop    func() // of its Run
	resign  func() // ends the campaign and the term
}

// newPlant starts a plant and returns its metrics. The plant asks eval for what Redis says.
func newPlant(
	t *testing.T, pace time.Duration,
	eval func(ctx context.Context, script string, keys []string, args ...any) (any, error),
) (*plant, *prom.Registry) {
	ctx, cancel := context.WithCancel(context.Background())
	p := &plant{t: t, ctx: ctx, reg: registry.New(), pace: pace, eval: eval}
	collected := prom.NewRegistry()
	exporter, err := prometheus.New(prometheus.WithRegisterer(collected))
	require.NoError(t, err)
	provider := sdkmetric.NewMeterProvider(sdkmetric.WithReader(exporter))
	cfg := resilienceotel.Config{MeterProvider: provider}
	p.tel = resilienceotel.New(cfg)
	all := [][]func(){p.users(), p.mail(), p.shards(), p.limits(), p.waits(), p.sagas(), p.leases()}
	stop, err := resilienceotel.Observe(p.reg, cfg)
	require.NoError(t, err)

	var wg sync.WaitGroup
	for _, jobs := range all {
		for _, do := range jobs {
			wg.Go(func() {
				for ctx.Err() == nil {
					do()
					time.Sleep(pace)
				}
			})
		}
	}
	t.Cleanup(func() {
		cancel()
		wg.Wait()
		p.stop()
		p.resign()
		stop()
	})
	return p, collected
}

// users is a chain of all policies that a call can have, and a cache, around a dependency
// that fails once in 50 times. While the dependency is slow, more callers come.
func (p *plant) users() (jobs []func()) {
	var calls atomic.Int64
	dependency := func(ctx context.Context) error {
		if p.slow.Load() {
			select {
			case <-time.After(3 * p.pace):
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		}
		if p.down.Load() || calls.Add(1)%50 == 1 {
			return errDown
		}
		return nil
	}
	const usual = 4
	retries := retry.New(retry.Config{Name: "users", Attempts: 2, Backoff: retry.Constant(time.Millisecond)})
	p.circuit = breaker.New(breaker.Config{Name: "users", OpenFor: time.Hour})
	rate := throttle.New(throttle.Config{Name: "users", Rate: 1e6})
	slots := bulkhead.New(bulkhead.Config{Name: "users", Limit: usual})
	p.reg.MustAdd(retries, p.circuit, rate, slots)
	call := resilience.Chain(p.tel.Call("users"), retries.Wrap, p.circuit.Wrap, rate.Wrap, slots.Wrap,
		p.tel.Attempt("users"))(dependency)
	for n := range 4 * usual {
		jobs = append(jobs, func() {
			if n < usual || p.slow.Load() {
				_ = call(p.ctx)
			}
		})
	}

	cache := cacheaside.New(cacheaside.Config[int, int]{Name: "users", TTL: time.Millisecond, StaleIfError: time.Hour,
		Load: func(ctx context.Context, n int) (int, error) {
			if p.down.Load() {
				return 0, errDown
			}
			return n, nil
		}})
	hedger := hedge.New[int](hedge.Config{Name: "users", Delay: time.Microsecond, Ratio: hedge.Unlimited})
	idle := breaker.New(breaker.Config{Name: "idle"}) // half-open, and nobody calls
	idle.Trip(errDown, time.Nanosecond)
	p.reg.MustAdd(cache, hedger, idle)
	return append(jobs,
		func() { _, _ = cache.Get(p.ctx, 1) },
		func() {
			_, _ = hedger.Do(p.ctx, func(context.Context) (int, error) { time.Sleep(100 * time.Microsecond); return 0, nil })
		})
}

// mail is retried without a breaker, and news under a budget besides.
func (p *plant) mail() []func() {
	budget := retry.NewBudget(retry.BudgetConfig{Name: "news", Ratio: retry.None, PerSecond: retry.None})
	mail := retry.New(retry.Config{Name: "mail", Attempts: 4, Backoff: retry.Constant(time.Microsecond)})
	news := retry.New(retry.Config{Name: "news", Attempts: 4, Backoff: retry.Constant(time.Microsecond), Budget: budget})
	p.reg.MustAdd(mail, budget, news)
	send := func(context.Context) error {
		if p.mailDown.Load() {
			return errDown
		}
		return nil
	}
	return []func(){
		func() { _ = mail.Do(p.ctx, send) },
		func() { _ = news.Do(p.ctx, send) },
	}
}

func (p *plant) shards() []func() {
	const keys = 300
	shards := resilience.NewGroup(func(int) *breaker.Breaker {
		return breaker.New(breaker.Config{Name: "shards", ConsecutiveFailures: 1, OpenFor: 15 * p.pace})
	}, resilience.GroupConfig{})
	p.reg.MustAdd(shards)
	return []func(){func() {
		for key := range keys {
			_ = shards.Do(p.ctx, key, func(context.Context) error {
				if key == 17 && p.shardDown.Load() {
					return errDown
				}
				return nil
			})
		}
	}}
}

func (p *plant) limits() []func() {
	// which refuses most of the time
	tenants := throttle.NewGroup(throttle.GroupConfig[string]{Config: throttle.Config{Name: "tenants",
		Rate: 0.1 / p.pace.Seconds(), Burst: 1}})
	shed := adaptive.New(adaptive.Config{Name: "adaptive"})
	tag := fmt.Sprintf("telemetry-%d", time.Now().UnixNano())
	limits := fleet.New(fleet.Config{
		Name: "fleet", Instances: 2, OnOutage: fleet.Local, Timeout: 10 * time.Second,
		Meters: func(context.Context) []fleet.Meter { return []fleet.Meter{fleet.Rate(tag, 100_000, 1)} },
		Eval: func(ctx context.Context, script string, keys []string, args ...any) (any, error) {
			if p.redisAway.Load() {
				return nil, errDown
			}
			return p.eval(ctx, script, keys, args...)
		},
	})
	p.reg.MustAdd(tenants, shed, limits)
	fine := func(context.Context) error { return nil }
	return []func(){
		func() { _ = tenants.Do(p.ctx, "free", fine) },
		func() { _ = shed.Do(p.ctx, fine) },
		func() { _ = limits.Do(p.ctx, fine) },
	}
}

// waits are calls that wait for a slot or a token, and get it.
func (p *plant) waits() []func() {
	slots := bulkhead.New(bulkhead.Config{Name: "exports", Limit: 1, MaxWait: -1})
	rate := throttle.New(throttle.Config{Name: "exports", Rate: 2 / p.pace.Seconds(), Burst: 1, MaxWait: -1})
	p.reg.MustAdd(slots, rate)
	return []func(){func() {
		done, err := slots.Begin(p.ctx)
		if err != nil {
			return
		}
		time.AfterFunc(p.pace/10, func() { done(nil) })
		_ = slots.Do(p.ctx, func(context.Context) error { return nil })
		for range 2 {
			_ = rate.Do(p.ctx, func(context.Context) error { return nil })
		}
	}}
}

type trip struct{ Legs int }

// sagas book a flight and a hotel ten times a second. While the hotel is closed, they can
// go neither on nor back.
func (p *plant) sagas() []func() {
	p.runner = saga.NewRunner(lostSagas{saga.NewMemory(), &p.sagasLost},
		saga.RunnerConfig{Name: "worker", LeaseTTL: 30 * p.pace, Poll: p.pace})
	p.runner.Observe(func(context.Context, saga.Event) {})
	idle := saga.NewRunner(saga.NewMemory(), saga.RunnerConfig{Name: "idle"}) // nobody runs it, and nothing is due
	book := func(context.Context, *trip) error {
		if p.hotelClosed.Load() {
			return saga.Permanent(errDown)
		}
		return nil
	}
	booking := &saga.Saga[trip]{Name: "trip", Steps: []saga.Step[trip]{
		{Name: "flight", Do: func(context.Context, *trip) error { return nil }, Undo: book, UndoAttempts: 1},
		{Name: "hotel", Do: book, Undo: book},
	}}
	bookings := saga.Register(p.runner, booking)
	p.reg.MustAdd(p.runner, idle)
	p.run()
	n := 0
	return []func(){func() {
		if n++; n%5 == 1 {
			_, _ = bookings.Start(p.ctx, fmt.Sprint("trip-", n), trip{})
		}
	}}
}

// lostSagas is a store that cannot be read while lost is true.
type lostSagas struct {
	sagastore.Store
	lost *atomic.Bool
}

func (s lostSagas) Claim(ctx context.Context, r sagastore.ClaimRequest) ([]sagastore.Record, error) {
	if s.lost.Load() {
		return nil, errDown
	}
	return s.Store.Claim(ctx, r)
}

func (s lostSagas) Counts(ctx context.Context) (sagastore.Counts, error) {
	if s.lost.Load() {
		return sagastore.Counts{}, errDown
	}
	return s.Store.Counts(ctx)
}

// run runs sagas until p.stop is called.
func (p *plant) run() {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() { defer close(ended); _ = p.runner.Run(ctx) }()
	p.stop = func() { cancel(); <-ended }
}

// retryStuck is what an operator does when the cause is gone.
func (p *plant) retryStuck() {
	stuck, _, err := p.runner.List(p.ctx, saga.Filter{Status: []saga.Status{saga.Stuck}, Limit: 10_000})
	require.NoError(p.t, err)
	for _, in := range stuck {
		require.NoError(p.t, p.runner.Operate(p.ctx, in.ID, saga.Operation{Action: saga.ActionRetry, Note: "open again"}))
	}
}

func (p *plant) leases() []func() {
	leader := lease.New(lockedLeases{lease.NewMemory(), &p.leaseLocked}, lease.Config{Name: "billing"})
	lock := lease.New(lease.NewMemory(), lease.Config{Name: "lock"})
	unused := lease.New(lease.NewMemory(), lease.Config{Name: "nightly"})
	once := lease.New(lease.NewMemory(), lease.Config{Name: "migration"})
	p.reg.MustAdd(leader, lock, unused, once)
	require.NoError(p.t, once.Run(p.ctx, func(context.Context, lease.Term) error { return nil }))
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = leader.Loop(ctx, func(ctx context.Context, _ lease.Term) error { <-ctx.Done(); return nil })
	}()
	p.resign = func() { cancel(); <-ended }
	return []func(){func() {
		if held, err := lock.TryCampaign(p.ctx); err == nil {
			_ = held.Resign(p.ctx)
		}
	}}
}

// lockedLeases is a store that ends each term and starts none while locked is true.
type lockedLeases struct {
	lease.Store
	locked *atomic.Bool
}

func (s lockedLeases) Acquire(ctx context.Context, r lease.Request) (lease.Record, error) {
	if s.locked.Load() {
		return s.Load(ctx, r.Name)
	}
	return s.Store.Acquire(ctx, r)
}

func (s lockedLeases) Renew(ctx context.Context, r lease.Request) error {
	if s.locked.Load() {
		return errors.Join(lease.ErrLost, s.Release(ctx, r.Name, r.Token))
	}
	return s.Store.Renew(ctx, r)
}
