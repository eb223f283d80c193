package registry_test

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"expvar"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/cacheaside"
	"github.com/go-resilience/resilience/faults"
	"github.com/go-resilience/resilience/lease"
	"github.com/go-resilience/resilience/registry"
	"github.com/go-resilience/resilience/resiliencesql"
	"github.com/go-resilience/resilience/retry"
	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/throttle"
)

var errDown = errors.New("down")

type state struct{ N int }

// house has one policy of each kind.
type house struct {
	reg      *registry.Registry
	retries  *retry.Retrier
	budget   *retry.Budget
	budgets  *retry.BudgetGroup[string]
	hedger   *retry.Hedger[int]
	circuit  *breaker.Breaker
	circuits *breaker.Group[string]
	slots    *bulkhead.Bulkhead
	rooms    *bulkhead.Group[int]
	rate     *throttle.Limiter
	tenants  *throttle.Group[string]
	shared   *throttle.Shared
	adaptive *throttle.Adaptive
	users    *cacheaside.Cache[int, string]
	runner   *saga.Runner
	leader   *lease.Candidate
	trips    *saga.Saga[state]
	script   *faults.Script
	pool     registry.Policy
}

func newHouse() *house {
	h := &house{
		reg:      registry.New(),
		retries:  retry.New(retry.Config{Name: "users", Backoff: retry.Constant(time.Millisecond)}),
		budget:   retry.NewBudget(retry.BudgetConfig{Name: "users"}),
		budgets:  retry.NewBudgetGroup(retry.BudgetGroupConfig[string]{Config: retry.BudgetConfig{Name: "hosts", Ratio: -1, PerSecond: -1}}),
		hedger:   retry.NewHedger[int](retry.HedgeConfig{Name: "users", Delay: time.Millisecond, Quantile: 0.95}),
		circuit:  breaker.New(breaker.Config{Name: "users", Failures: 3}),
		circuits: breaker.NewGroup(breaker.GroupConfig[string]{Config: breaker.Config{Name: "shards", Failures: 1}}),
		slots:    bulkhead.New(bulkhead.Config{Name: "users", Limit: 2}),
		rooms:    bulkhead.NewGroup(bulkhead.GroupConfig[int]{Config: bulkhead.Config{Name: "rooms", Limit: 1}}),
		rate:     throttle.New(throttle.Config{Name: "users", Rate: 10, Burst: 1}),
		tenants:  throttle.NewGroup(throttle.GroupConfig[string]{Config: throttle.Config{Name: "tenants", Rate: 10, Burst: 2}}),
		shared: throttle.NewShared(throttle.SharedConfig{Name: "fleet", Rate: 10, Burst: 1, Instances: 1,
			Eval: func(context.Context, string, []string, ...any) (any, error) { return nil, errDown }}),
		adaptive: throttle.NewAdaptive(throttle.AdaptiveConfig{Name: "adaptive"}),
		users: cacheaside.New(cacheaside.Config[int, string]{Name: "users", TTL: time.Minute,
			Load: func(_ context.Context, id int) (string, error) {
				if id < 0 {
					return "", errDown
				}
				return fmt.Sprint(id), nil
			}}),
		trips: &saga.Saga[state]{Name: "trip", Steps: []saga.Step[state]{
			{Name: "book", Do: func(_ context.Context, s *state) error { s.N++; return nil }, Undo: func(context.Context, *state) error { return nil }},
		}},
		pool:   resiliencesql.Pool("orders", new(sql.DB)),
		script: faults.New(faults.Config{Name: "backend"}),
	}
	h.runner = saga.NewRunner(saga.NewMemory(), saga.RunnerConfig{Name: "worker"})
	saga.Register(h.runner, h.trips)
	h.leader = lease.New(lease.NewMemory(), lease.Config{Name: "billing"})
	h.reg.MustAdd(h.retries, h.budget, h.budgets, h.hedger, h.circuit, h.circuits, h.slots, h.rooms, h.rate, h.tenants,
		h.shared, h.adaptive, h.users, h.runner, h.leader, h.pool, h.script)
	return h
}

func (h *house) close() {
	_ = h.users.Close()
	_ = h.circuit.Close()
	_ = h.circuits.Close()
}

// figures returns the figures of one policy by their labels.
func (h *house) figures(t *testing.T, kind, name string) map[string]float64 {
	t.Helper()
	e, ok := h.reg.Get(kind, name)
	require.True(t, ok, "%s/%s", kind, name)
	all := map[string]float64{}
	for f := range e.Figures() {
		label := strings.TrimSuffix(f.String(), fmt.Sprintf(" %v", f.Value))
		require.NotContains(t, all, label, "a figure is there once")
		all[label] = f.Value
	}
	return all
}

func TestEveryKindOfPolicyIsThere(t *testing.T) {
	h := newHouse()
	defer h.close()
	var paths []string
	for e := range h.reg.All() {
		paths = append(paths, e.String())
	}
	require.Equal(t, []string{
		"breaker/shards", "breaker/users", "budget/hosts", "budget/users", "bulkhead/rooms", "bulkhead/users", "cache/users", "faults/backend",
		"hedge/users", "lease/billing", "pool/orders", "retry/users", "saga/worker",
		"throttle/adaptive", "throttle/fleet", "throttle/tenants", "throttle/users",
	}, paths)
}

func TestFiguresTellWhatHappened(t *testing.T) {
	h := newHouse()
	defer h.close()
	ctx := t.Context()
	fail := func(context.Context) error { return errDown }
	ok := func(context.Context) error { return nil }

	_ = h.retries.Do(ctx, fail)
	_ = h.retries.Do(ctx, ok)
	f := h.figures(t, "retry", "users")
	require.Equal(t, 1.0, f["retry.calls{outcome=exhausted}"])
	require.Equal(t, 1.0, f["retry.calls{outcome=first_try}"])
	require.Equal(t, 4.0, f["retry.attempts"])

	for _, host := range []string{"a", "b", "b"} {
		_ = retry.New(retry.Config{BudgetFor: h.budgets.By(func(context.Context) string { return host })}).Do(ctx, fail)
	}
	f = h.figures(t, "budget", "hosts")
	require.Equal(t, 3.0, f["budget.retries{outcome=over_budget}"])
	require.Equal(t, 3.0, f["budget.window.calls"])
	require.Equal(t, 2.0, f["budget.keys"])
	require.Equal(t, 2.0, f["budget.empty"])
	e, _ := h.reg.Get("budget", "hosts")
	require.Equal(t, "b", e.Members(1)[0].Key)
	require.Equal(t, int64(2), e.Members(1)[0].Calls)

	for range 4 {
		_ = h.circuit.Do(ctx, fail)
	}
	f = h.figures(t, "breaker", "users")
	require.Equal(t, 3.0, f["breaker.calls{outcome=failure}"])
	require.Equal(t, 1.0, f["breaker.calls{outcome=refused}"])
	require.Equal(t, 1.0, f["breaker.transitions{state=open}"])
	require.Equal(t, 1.0, f["breaker.state{state=open}"])
	require.Zero(t, f["breaker.state{state=closed}"])
	require.Positive(t, f["breaker.open.left"])

	_ = h.circuits.Do(ctx, "a", fail)
	_ = h.circuits.Do(ctx, "b", ok)
	f = h.figures(t, "breaker", "shards")
	require.Equal(t, 1.0, f["breaker.state{state=open}"])
	require.Equal(t, 1.0, f["breaker.state{state=closed}"])
	require.Equal(t, 2.0, f["breaker.keys"])

	_ = h.slots.Do(ctx, func(ctx context.Context) error {
		return h.slots.Do(ctx, func(ctx context.Context) error { return h.slots.Do(ctx, ok) })
	})
	f = h.figures(t, "bulkhead", "users")
	require.Equal(t, 2.0, f["bulkhead.calls{outcome=admitted,reason=}"])
	require.Equal(t, 1.0, f["bulkhead.calls{outcome=refused,reason=no_slot}"])
	require.Equal(t, 2.0, f["bulkhead.limit"])

	_ = h.rate.Do(ctx, ok)
	_ = h.rate.Do(ctx, ok)
	f = h.figures(t, "throttle", "users")
	require.Equal(t, 1.0, f["throttle.calls{outcome=admitted,reason=}"])
	require.Equal(t, 1.0, f["throttle.calls{outcome=refused,reason=over_the_limit}"])
	require.Equal(t, 1.0, f["throttle.tokens"])

	_ = h.shared.Do(ctx, "", ok)
	f = h.figures(t, "throttle", "fleet")
	require.Equal(t, 0.0, f["throttle.store.up"])
	require.Equal(t, 1.0, f["throttle.alone_calls"])

	_, _ = h.users.Get(ctx, 1)
	_, _ = h.users.Get(ctx, 1)
	_, _ = h.users.Get(ctx, -1)
	f = h.figures(t, "cache", "users")
	require.Equal(t, 1.0, f["cache.requests{result=hit}"])
	require.Equal(t, 2.0, f["cache.requests{result=miss}"])
	require.Equal(t, 1.0, f["cache.loads{outcome=loaded}"])
	require.Equal(t, 1.0, f["cache.loads{outcome=failed}"])
	require.Equal(t, 1.0, f["cache.entries"])

	require.NoError(t, h.leader.Run(ctx, func(context.Context, lease.Term) error { return nil }))
	f = h.figures(t, "lease", "billing")
	require.Equal(t, 1.0, f["lease.terms{state=elected}"])
	require.Equal(t, 1.0, f["lease.terms{state=resigned}"])
	require.Zero(t, f["lease.leading"])

	_ = h.adaptive.Do(ctx, ok)
	f = h.figures(t, "throttle", "adaptive")
	require.Equal(t, 1.0, f["throttle.calls{outcome=admitted,reason=}"])
	require.Equal(t, 1.0, f["throttle.answers{outcome=accepted}"])

	running, stop := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() { _ = h.runner.Run(running) })
	_, err := saga.Start(ctx, h.runner, h.trips, "1", state{})
	require.NoError(t, err)
	_, err = h.trips.Result(ctx, h.runner, "1")
	require.NoError(t, err)
	stop()
	wg.Wait()
	f = h.figures(t, "saga", "worker")
	require.Equal(t, 1.0, f["saga.sagas{saga=trip,status=completed}"])
	require.Equal(t, 1.0, f["saga.step.attempts{saga=trip,step=book,op=do,outcome=done}"])
}

// Every figure of one name is described in one way, whatever policy it comes from.
func TestFiguresAreDescribedOnce(t *testing.T) {
	h := newHouse()
	defer h.close()
	described := map[string]string{}
	for e := range h.reg.All() {
		if e.Kind == "faults" {
			continue
		}
		n := 0
		for f := range e.Figures() {
			n++
			var keys []string
			for _, a := range f.Attrs {
				keys = append(keys, a.Key)
				if a.Key != "saga" && a.Key != "step" { // names that the program gives
					require.Regexp(t, `^[a-z0-9_]*$`, a.Value, f.Name)
				}
			}
			as := fmt.Sprint(f.Unit, f.Counter, f.Help, keys)
			if was, ok := described[f.Name]; ok {
				require.Equal(t, was, as, f.Name)
			}
			described[f.Name] = as
			require.True(t, strings.HasPrefix(f.Name, e.Kind+"."), "%s of %s", f.Name, e.Kind)
			require.NotEmpty(t, f.Unit)
			require.True(t, strings.HasSuffix(f.Help, "."), f.Help)
		}
		require.NotZero(t, n, e.String())
		for range e.Figures() {
			break
		}
	}
}

func TestGroupTellsItsBusiestMembers(t *testing.T) {
	h := newHouse()
	defer h.close()
	ok := func(context.Context) error { return nil }
	for key, n := range map[string]int{"a": 3, "b": 5, "c": 1} {
		for range n {
			_ = h.circuits.Do(t.Context(), key, ok)
			_ = h.tenants.Do(t.Context(), key, ok)
			_ = h.rooms.Do(t.Context(), n, ok)
		}
	}
	members := func(kind, name string, n int) (keys []string) {
		e, _ := h.reg.Get(kind, name)
		for _, m := range e.Members(n) {
			keys = append(keys, fmt.Sprint(m.Key, " ", m.Calls))
		}
		return keys
	}
	require.Equal(t, []string{"b 5", "a 3"}, members("breaker", "shards", 2))
	require.Equal(t, []string{"5 5", "3 3", "1 1"}, members("bulkhead", "rooms", 10))
	require.Equal(t, []string{"b 5", "a 3", "c 1"}, members("throttle", "tenants", 10))
	require.Empty(t, members("breaker", "users", 10))
	require.Empty(t, members("breaker", "shards", 0))
	require.Empty(t, members("breaker", "shards", -1))
}

// What is wrong comes first, however rarely it is called.
func TestGroupTellsTheMembersThatAreNotWell(t *testing.T) {
	h := newHouse()
	defer h.close()
	ok := func(context.Context) error { return nil }
	for key, n := range map[string]int{"busy": 5, "closed": 1, "half-open": 2, "open": 1, "forced": 2} {
		for range n {
			_ = h.circuits.Do(t.Context(), key, ok)
		}
	}
	for key, b := range h.circuits.All() {
		switch key {
		case "half-open":
			b.Trip(errDown, time.Nanosecond)
		case "open":
			b.Trip(errDown, time.Hour)
		case "forced":
			b.ForceOpen(errDown)
		}
	}
	first, err := h.rooms.Begin(t.Context(), 7) // the only slot
	require.NoError(t, err)
	defer first(nil)
	for range 3 {
		_ = h.rooms.Do(t.Context(), 8, ok)
	}
	members := func(kind, name string) (keys []string) {
		e, _ := h.reg.Get(kind, name)
		for _, m := range e.Members(9) {
			keys = append(keys, m.Key)
		}
		return keys
	}
	require.Equal(t, []string{"forced", "open", "half-open", "busy", "closed"}, members("breaker", "shards"))
	require.Equal(t, []string{"7", "8"}, members("bulkhead", "rooms"))
}

// The settings of every policy can be dumped, and applied as they are.
func TestSettingsOfEveryPolicyAreWhatApplyReads(t *testing.T) {
	h := newHouse()
	defer h.close()
	dump := h.reg.Settings()
	report, err := h.reg.Apply(dump)
	require.NoError(t, err)
	require.Empty(t, report)
	for e := range h.reg.All() {
		if e.Kind != "pool" { // it has none
			require.Contains(t, string(dump), fmt.Sprintf("%q: {", e.String()))
		}
	}
	require.NotContains(t, string(dump), `"Name"`)
}

func TestApplyChangesEveryKindOfPolicy(t *testing.T) {
	h := newHouse()
	defer h.close()
	report, err := h.reg.Apply([]byte(`{
		"retry/users": {"Attempts": 7},
		"budget/users": {"Ratio": 0.5},
		"hedge/users": {"Delay": "2s"},
		"breaker/users": {"Failures": 10, "OpenFor": "45s"},
		"breaker/shards": {"Config": {"Failures": 4}, "MaxKeys": 77, "IdleAfter": "5m"},
		"bulkhead/users": {"Limit": 32},
		"bulkhead/rooms": {"Config": {"Limit": 3}},
		"throttle/users": {"Rate": 200, "Burst": 40},
		"throttle/tenants": {"Config": {"Rate": 5, "Burst": 5}},
		"throttle/fleet": {"Rate": 20, "OnOutage": "admit all"},
		"cache/users": {"TTL": "2m"},
		"saga/worker": {"Poll": "3s"},
		"lease/billing": {"TTL": "30s"},
		"faults/backend": {"Enabled": true}
	}`))
	require.NoError(t, err)
	require.Len(t, report, 20, "%s", report)
	require.Equal(t, 7, h.retries.Config().Attempts)
	require.Equal(t, 0.5, h.budget.Config().Ratio)
	require.Equal(t, 2*time.Second, h.hedger.Config().Delay)
	require.Equal(t, 45*time.Second, h.circuit.Config().OpenFor)
	require.Equal(t, 4, h.circuits.Config().Config.Failures)
	require.Equal(t, 5*time.Minute, h.circuits.Config().IdleAfter)
	require.Equal(t, 32, h.slots.Config().Limit)
	require.Equal(t, 3, h.rooms.Config().Config.Limit)
	require.Equal(t, 200.0, h.rate.Config().Rate)
	require.Equal(t, 5.0, h.tenants.Config().Config.Rate)
	require.Equal(t, throttle.AdmitAll, h.shared.Config().OnOutage)
	require.Equal(t, 2*time.Minute, h.users.Config().TTL)
	require.Equal(t, 3*time.Second, h.runner.Config().Poll)
	require.Equal(t, 30*time.Second, h.leader.Config().TTL)
	require.Equal(t, 10*time.Second, h.leader.Config().Poll, "a default that follows")
	require.True(t, h.script.Config().Enabled)
}

func TestApplyToRealPoliciesNamesTheFieldAndChangesNothing(t *testing.T) {
	h := newHouse()
	defer h.close()
	before := string(h.reg.Settings())
	for _, c := range []struct{ data, err string }{
		{`{"retry/users": {"Attempts": 7}, "breaker/users": {"FailureRate": 2}}`, "breaker/users: breaker.Config.FailureRate is 2: must be"},
		{`{"breaker/users": {"OpenFor": 45}}`, "breaker/users.OpenFor: is 45: must be a duration in quotes"},
		{`{"breaker/users": {"OnChange": null}}`, "breaker/users.OnChange: a file cannot hold"},
		{`{"throttle/fleet": {"Eval": "x"}}`, "throttle/fleet.Eval: a file cannot hold"},
		{`{"retry/users": {"Attempts": 7}, "throttle/fleet": {"Prefix": "x"}}`, "throttle/fleet: "},
		{`{"retry/users": {"Budget": {}}}`, "retry/users.Budget: a file cannot hold"},
		{`{"retry/users": {"Attempts": 7}, "retry/user": {}}`, "retry/user: no such policy is registered"},
	} {
		_, err := h.reg.Apply([]byte(c.data))
		require.ErrorContains(t, err, c.err)
		require.Equal(t, before, string(h.reg.Settings()), c.data)
	}
}

// The settings of each member of a Group are those of its Config.
func TestApplyTellsWhereTheFieldOfAGroupIs(t *testing.T) {
	h := newHouse()
	defer h.close()
	_, err := h.reg.Apply([]byte(`{"breaker/shards": {"OpenFor": "1s", "OpenFore": "1s"}, "budget/hosts": {"Ratio": 1}, "breaker/users": {"Config": 1}}`))
	require.EqualError(t, err, strings.Join([]string{
		`breaker/shards.OpenFor: breaker.GroupConfig[string] has no such field, but its Config has: {"Config": {"OpenFor": ...}}`,
		`breaker/shards.OpenFore: breaker.GroupConfig[string] has no such field`,
		`budget/hosts.Ratio: retry.BudgetGroupConfig[string] has no such field, but its Config has: {"Config": {"Ratio": ...}}`,
		`breaker/users.Config: breaker.Config has no such field`,
	}, "\n"))
}

func TestObserveSeesEveryPolicyAndLogWritesWords(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHouse()
		defer h.close()
		var lines strings.Builder
		defer h.reg.Observe(registry.Log(newLogger(&lines)))()
		fail := func(context.Context) error { return errDown }
		ok := func(context.Context) error { return nil }
		_ = h.circuits.Do(t.Context(), "shard 3", fail)
		_ = h.circuits.Do(t.Context(), "shard 3", ok)
		_ = h.retries.Do(t.Context(), fail)
		_ = h.rate.Do(t.Context(), ok)
		for range 5 {
			_ = h.rate.Do(t.Context(), ok)
		}
		require.NoError(t, h.slots.SetLimit(9))
		_, _ = h.users.Get(t.Context(), -1)
		got := lines.String()
		for _, want := range []string{
			`level=WARN msg="breaker changed" name=shards key="shard 3" from=closed to=open for=`,
			`level=WARN msg="breaker refused" name=shards key="shard 3" reason="circuit open" err=`,
			`level=DEBUG msg="retry retried" name=users attempt=1 in=`,
			`level=WARN msg="retry ended" name=users attempts=3`,
			`level=WARN msg="throttle refused" name=users reason=`,
			`level=DEBUG msg="bulkhead limit changed" name=users from=2 to=9`,
			`level=WARN msg="cache load failed" name=users key=-1`,
		} {
			require.Contains(t, got, want)
		}
		require.Equal(t, 1, strings.Count(got, "throttle refused"), "one line for a burst of refusals")
		for range 9 {
			_ = h.retries.Do(t.Context(), fail)
			_, _ = h.users.Get(t.Context(), -1)
		}
		got = lines.String()
		require.Equal(t, 1, strings.Count(got, "retry ended"), "in a storm too")
		require.Equal(t, 1, strings.Count(got, "cache load failed"))
	})
}

func TestExpvarShowsTheFigures(t *testing.T) {
	h := newHouse()
	defer h.close()
	name := fmt.Sprintf("resilience of %p", h.reg) // a name can be published once
	expvar.Publish(name, h.reg)
	_ = h.circuit.Do(t.Context(), func(context.Context) error { return nil })
	text := expvar.Get(name).String()
	require.Contains(t, text, `"breaker.calls{outcome=success}": 1`)
	require.True(t, json.Valid([]byte(text)), text)
}

// While settings change under load, no call is lost and no limit is passed: in flight
// never more than the larger limit, and when all has ended, no slot is taken.
func TestApplyUnderLoad(t *testing.T) {
	reg := registry.New()
	retries := retry.New(retry.Config{Name: "a", Attempts: 2, Backoff: retry.Constant(time.Microsecond)})
	circuit := breaker.New(breaker.Config{Name: "a", Failures: 1 << 30})
	slots := bulkhead.New(bulkhead.Config{Name: "a", Limit: 2, Queue: 1000, MaxWait: -1})
	rate := throttle.New(throttle.Config{Name: "a", Rate: 1e9, Burst: 1e6, MaxWait: -1})
	reg.MustAdd(retries, circuit, slots, rate)
	defer reg.Observe(func(context.Context, registry.Event) {})()

	var inFlight, most, made, failed atomic.Int64
	call := retries.Wrap(circuit.Wrap(rate.Wrap(slots.Wrap(func(context.Context) error {
		n := inFlight.Add(1)
		defer inFlight.Add(-1)
		for m := most.Load(); n > m && !most.CompareAndSwap(m, n); m = most.Load() {
		}
		if made.Add(1)%7 == 0 {
			return errDown
		}
		return nil
	}))))
	var wg sync.WaitGroup
	done := make(chan struct{})
	wg.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-done:
				return
			default:
			}
			_, err := reg.Apply([]byte(fmt.Sprintf(`{
				"retry/a": {"Attempts": %d}, "breaker/a": {"OpenFor": "%dms", "WindowCalls": %d},
				"bulkhead/a": {"Limit": %d}, "throttle/a": {"Burst": %d}}`, 2+i%3, 1+i%9, 50+i%5, 1+i%4, 1000000+i%2)))
			if err != nil {
				t.Error(err)
				return
			}
		}
	})
	const callers, calls = 8, 2000
	var callersDone sync.WaitGroup
	for range callers {
		callersDone.Go(func() {
			for range calls {
				if err := call(t.Context()); err != nil {
					if !errors.Is(err, errDown) {
						t.Error(err)
						return
					}
					failed.Add(1)
				}
			}
		})
	}
	callersDone.Wait()
	close(done)
	wg.Wait()
	require.LessOrEqual(t, most.Load(), int64(4))
	require.Zero(t, slots.Stats().InFlight)
	s := retries.Stats()
	require.EqualValues(t, callers*calls, s.Calls())
	require.Equal(t, made.Load(), s.Attempts)
	require.Equal(t, made.Load(), slots.Stats().Admitted)
	require.Equal(t, made.Load(), circuit.Stats().Succeeded+circuit.Stats().Failed)

	_, err := reg.Apply([]byte(`{"bulkhead/a": {"Limit": 1}}`))
	require.NoError(t, err)
	most.Store(0)
	for range callers {
		callersDone.Go(func() {
			for range 100 {
				_ = call(t.Context())
			}
		})
	}
	callersDone.Wait()
	require.EqualValues(t, 1, most.Load(), "the new limit holds once Apply has returned")
}

func TestAddAndRemoveWhileObserving(t *testing.T) {
	reg := registry.New()
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for n := range 200 {
				b := breaker.New(breaker.Config{Name: fmt.Sprint(i), Failures: 1})
				if err := reg.Add(b); err != nil {
					t.Error(err)
				}
				stop := reg.Observe(registry.Log(slog.New(slog.NewTextHandler(io.Discard, nil))))
				for range 2 { // to open it, and to be refused
					_ = b.Do(t.Context(), func(context.Context) error { return errDown })
				}
				reg.Get("breaker", "0")
				if n%2 == 0 {
					_ = reg.String()
				}
				stop()
				if !reg.Remove(b) {
					t.Error("not there")
				}
			}
		})
	}
	wg.Wait()
	require.Empty(t, slices.Collect(maps.Keys(maps.Collect(func(yield func(string, bool) bool) {
		for e := range reg.All() {
			if !yield(e.String(), true) {
				return
			}
		}
	}))))
}

func TestReloadAppliesAFile(t *testing.T) {
	circuit := breaker.New(breaker.Config{Name: "users"})
	reg := registry.New()
	reg.MustAdd(circuit)
	path := filepath.Join(t.TempDir(), "settings.json")
	_, err := reg.Reload(path)
	require.ErrorIs(t, err, fs.ErrNotExist)
	require.NoError(t, os.WriteFile(path, []byte(`{"breaker/users": {"Failures": 7}}`), 0o600))
	report, err := reg.Reload(path)
	require.NoError(t, err)
	require.Len(t, report, 1)
	require.Equal(t, 7, circuit.Config().Failures)
}
