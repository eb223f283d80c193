package console_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/cacheaside"
	"github.com/go-resilience/resilience/console"
	"github.com/go-resilience/resilience/hedge"
	"github.com/go-resilience/resilience/lease"
	"github.com/go-resilience/resilience/policy"
	"github.com/go-resilience/resilience/retry"
	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/throttle"
	"github.com/go-resilience/resilience/throttle/adaptive"
	"github.com/go-resilience/resilience/throttle/fleet"
)

// A works is a program with every kind of policy, whose dependencies can fail.
type works struct {
	*shop
	bankDown, bankSlow, bankFlaky, redisDown, warehouseDown atomic.Bool
	leaseRefused                                            atomic.Bool
	leader                                                  *lease.Candidate
	term                                                    lease.Term
	runner                                                  *saga.Runner
	orders                                                  *saga.Saga[order]
	stop                                                    context.CancelFunc // stops the runner
}

func newWorks(t *testing.T) *works {
	w := &works{}
	budget := retry.NewBudget(retry.BudgetConfig{Name: "bank", PerSecond: 2})
	retries := retry.New(retry.Config{Name: "bank", Attempts: 3, Backoff: retry.Constant(10 * time.Millisecond),
		Budget: budget})
	hedger := hedge.New[int](hedge.Config{Name: "prices", Delay: 50 * time.Millisecond, Quantile: 0.95})
	circuit := breaker.New(breaker.Config{Name: "bank", ConsecutiveFailures: 5})
	rate := throttle.New(throttle.Config{Name: "bank", Rate: 1000})
	slots := bulkhead.New(bulkhead.Config{Name: "bank", Limit: 8, MaxWait: -1})
	shards := resilience.NewGroup(func(string) *breaker.Breaker {
		return breaker.New(breaker.Config{Name: "shards", ConsecutiveFailures: 3})
	}, resilience.GroupConfig{})
	rooms := resilience.NewGroup(func(string) *bulkhead.Bulkhead {
		return bulkhead.New(bulkhead.Config{Name: "tenants", Limit: 4})
	}, resilience.GroupConfig{})
	tenants := throttle.NewGroup(throttle.GroupConfig[string]{Config: throttle.Config{Name: "tenants", Rate: 1000}})
	shed := adaptive.New(adaptive.Config{Name: "search"})
	meters := func(context.Context) []fleet.Meter { return []fleet.Meter{fleet.Rate("all", 1000, 1)} }
	quota := fleet.New(fleet.Config{Name: "quota", Meters: meters, Instances: 2, OnOutage: fleet.Local,
		Eval: func(context.Context, string, []string, ...any) (any, error) {
			if w.redisDown.Load() {
				return nil, errDown
			}
			return []any{int64(1), time.Now().UnixMicro(), int64(1)}, nil
		}})
	users := cacheaside.New(cacheaside.Config[int, string]{Name: "users", TTL: time.Second,
		Load: func(_ context.Context, id int) (string, error) { return fmt.Sprint(id), nil }})
	w.leader = lease.New(leases{lease.NewMemory(), &w.leaseRefused}, lease.Config{Name: "billing", Holder: "host-1"})
	w.orders = &saga.Saga[order]{Name: "order", Steps: []saga.Step[order]{
		{Name: "reserve", Do: ok, UndoAttempts: 1, Undo: func(context.Context, *order) error {
			if w.warehouseDown.Load() {
				return errDown
			}
			return nil
		}},
		{Name: "charge", Undo: ok, Do: func(context.Context, *order) error {
			if w.warehouseDown.Load() {
				return saga.Declined(errors.New("card declined"))
			}
			return nil
		}},
	}}
	w.runner = saga.NewRunner(saga.NewMemory(),
		saga.RunnerConfig{Name: "orders"})
	w.runner.Observe(func(context.Context, saga.Event) {})
	orders := saga.Register(w.runner, w.orders)
	w.run(t)
	var err error
	w.term, err = w.leader.Campaign(t.Context())
	require.NoError(t, err)

	w.shop = pageOf(t, console.Config{Allow: allow, Show: console.Show{Errors: true, Keys: true}},
		budget, retries, hedger, circuit, rate, slots, shards, rooms, tenants, shed, quota, users, w.leader, w.runner)

	calls := 0
	bank := resilience.Chain(retries.Wrap, circuit.Wrap, rate.Wrap, slots.Wrap)(func(ctx context.Context) error {
		switch {
		case w.bankSlow.Load():
			time.Sleep(5 * time.Second)
		case w.bankDown.Load(), w.bankFlaky.Load() && time.Now().UnixMilli()/100%3 == 0:
			return errDown
		}
		time.Sleep(3 * time.Millisecond)
		return nil
	})
	traffic, end := context.WithCancel(t.Context())
	t.Cleanup(func() {
		end()
		w.stop()
		_ = users.Close()
		_ = shards.Close()
		_ = w.term.Resign(context.Background())
		time.Sleep(time.Minute)
	})
	go func() {
		for ; traffic.Err() == nil; time.Sleep(100 * time.Millisecond) {
			calls++
			go func() { _ = bank(traffic) }()
			for i := range 10 {
				_ = shards.Do(traffic, fmt.Sprint("shard-", calls%30*10+i), working)
			}
			tenant := fmt.Sprint("tenant-", calls%5)
			_ = rooms.Do(traffic, tenant, working)
			_ = tenants.Do(traffic, tenant, working)
			_ = shed.Do(traffic, working)
			_ = quota.Do(traffic, working)
			_, _ = users.Get(traffic, calls%7)
			_, _ = hedger.Do(traffic, func(context.Context) (int, error) { return 0, nil })
			if calls%100 == 1 {
				_, _ = orders.Start(traffic, fmt.Sprint("order-", calls), order{})
			}
		}
	}()
	return w
}

// run runs the sagas until stop is called.
func (w *works) run(t *testing.T) {
	var ctx context.Context
	ctx, w.stop = context.WithCancel(context.Background())
	go func() { _ = w.runner.Run(ctx) }()
}

// after waits for d, then checks the page's verdict and the health of the policies.
func (w *works) after(d time.Duration, verdict string, health ...string) overview {
	w.t.Helper()
	time.Sleep(d)
	synctest.Wait()
	var o overview
	w.get("/", &o)
	var ill []string
	for path, h := range w.reg.Health(w.t.Context()) {
		if h.Status == policy.Pass {
			continue
		}
		text := path + " " + h.State
		if h.Detail != "" {
			text += ": " + h.Detail
		}
		ill = append(ill, numbers.ReplaceAllString(text, "#"))
	}
	require.Equal(w.t, verdict, o.Verdict)
	require.Equal(w.t, health, ill)

	return o
}

var numbers = regexp.MustCompile(`[0-9][0-9ms]*`)

const allWell = "All 14 policies are healthy."

// card returns the texts of a policy's card without the rates.
func (o overview) card(path string) string {
	for _, p := range o.Policies {
		if p.Path == path {
			return strings.Join([]string{p.State, numbers.ReplaceAllString(p.Words.Since, "#"), p.Detail, p.Error}, "|")
		}
	}
	return "is not there"
}

func incident(t *testing.T, f func(t *testing.T, w *works)) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorks(t)
		w.after(20*time.Second, allWell)
		f(t, w)
	})
}

func TestIncidentOutage(t *testing.T) {
	incident(t, func(t *testing.T, w *works) {
		w.bankDown.Store(true)
		o := w.after(20*time.Second, "The breaker bank is open and the retry bank has failing calls.", "breaker/bank open")
		require.Equal(t, "open|for # s||password=hunter2: connection refused", o.card("breaker/bank"))
		w.bankDown.Store(false)
		w.after(2*time.Minute, allWell)
	})
}

func TestIncidentSlowDependency(t *testing.T) {
	incident(t, func(t *testing.T, w *works) {
		w.bankSlow.Store(true)
		o := w.after(20*time.Second, "The bulkhead bank is full.", "bulkhead/bank full: # of # in flight")
		require.Equal(t, "full|for # s|8 of 8 in flight|", o.card("bulkhead/bank"))
		w.bankSlow.Store(false)
		w.after(time.Minute, allWell)
	})
}

func TestIncidentRetryStorm(t *testing.T) {
	incident(t, func(t *testing.T, w *works) {
		w.bankFlaky.Store(true)
		o := w.after(20*time.Second, "The breaker bank has failing calls, the budget bank has no retries left, "+
			"and one more policy needs attention.", "budget/bank spent", "retry/bank spent")
		require.Contains(t, o.card("budget/bank"), "|for # ")
		w.bankFlaky.Store(false)
		w.after(time.Minute, allWell)
	})
}

// Sagas become overdue without a runner. Then a runner starts while the warehouse is down, and they get stuck.
func TestIncidentSagas(t *testing.T) {
	incident(t, func(t *testing.T, w *works) {
		w.stop()
		w.after(30*time.Second, allWell)
		o := w.after(2*time.Minute, "The runner orders has overdue sagas.",
			"saga/orders overdue: # sagas due, the first for #")
		require.Contains(t, o.card("saga/orders"), "|for # ")
		w.warehouseDown.Store(true)
		w.run(t)
		o = w.after(time.Minute, "The runner orders has stuck sagas.", "saga/orders stuck: # sagas")
		require.Contains(t, o.card("saga/orders"), "|for # ")
		w.warehouseDown.Store(false)
		for { // until none is left
			var p found
			w.get("/sagas?status=stuck", &p)
			if len(p.Sagas) == 0 {
				break
			}
			form := []string{"action", "retry", "policy", "saga/orders", "note", "the warehouse is back"}
			for _, s := range p.Sagas {
				form = append(form, "ids", s.target())
			}
			require.Equal(t, http.StatusSeeOther, w.post(form...).Code)
		}
		w.after(time.Minute, allWell)
	})
}

func TestIncidentRedisAway(t *testing.T) {
	incident(t, func(t *testing.T, w *works) {
		w.redisDown.Store(true)
		o := w.after(20*time.Second, "The throttle quota cannot reach its store.", "throttle/quota store_down")
		require.Equal(t, "store_down|for # s||throttle: shared limit cannot be reached: password=hunter2: connection refused",
			o.card("throttle/quota"))
		w.redisDown.Store(false)
		w.after(time.Minute, allWell)
	})
}

func TestIncidentVacantLease(t *testing.T) {
	incident(t, func(t *testing.T, w *works) {
		require.NoError(t, w.term.Resign(t.Context()))
		w.after(time.Minute, allWell) // no call waits for the lease
		w.leaseRefused.Store(true)
		led := make(chan struct{})
		go func() {
			defer close(led)
			var err error
			w.term, err = w.leader.Campaign(t.Context())
			assert.NoError(t, err)
		}()
		w.after(10*time.Second, allWell)
		o := w.after(time.Minute, "The lease billing has no holder.", "lease/billing vacant: no process has held it for #")
		require.Contains(t, o.card("lease/billing"), "|for # ")
		w.leaseRefused.Store(false)
		<-led
		w.after(time.Minute, allWell)
	})
}

// leases is a lease.Store that gives no lease while refused is true, as if a transaction of the last leader were open.
type leases struct {
	lease.Store
	refused *atomic.Bool
}

func (s leases) Acquire(ctx context.Context, r lease.Request) (lease.Record, error) {
	if s.refused.Load() {
		return s.Load(ctx, r.Name)
	}
	return s.Store.Acquire(ctx, r)
}
