package registry_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/lease"
	"github.com/go-resilience/resilience/registry"
	"github.com/go-resilience/resilience/resiliencehttp"
	"github.com/go-resilience/resilience/retry"
	"github.com/go-resilience/resilience/saga"
)

// ill returns the states of the policies that are not well.
func ill(h *house) map[string]string {
	all := map[string]string{}
	for name, err := range h.reg.Health(context.Background()) {
		if err != nil {
			all[name] = err.(*registry.HealthError).State
		}
	}
	return all
}

// A fault is an error that a function may return as a nil pointer, whose Error panics.
type fault struct{ text string }

func (f *fault) Error() string { return f.text }

func TestHealthOfAnErrorThatHasNoText(t *testing.T) {
	var none *fault
	require.Equal(t, "open: <nil>", (&registry.HealthError{State: "open", Err: none}).Error())
}

func TestHealthTellsWhatIsWrong(t *testing.T) {
	h := newHouse()
	defer h.close()
	require.Empty(t, ill(h))
	fail := func(context.Context) error { return errDown }
	for range 3 {
		_ = h.circuit.Do(t.Context(), fail)
	}
	_ = h.circuits.Do(t.Context(), "a", fail)
	_ = h.circuits.Do(t.Context(), "b", func(context.Context) error { return nil })
	_ = h.shared.Do(t.Context(), "", fail)
	for range 2 {
		done, err := h.slots.Begin(t.Context())
		require.NoError(t, err)
		defer done(nil)
	}
	h.stick(t)
	require.Equal(t, map[string]string{
		"breaker/users":  "open",
		"breaker/shards": "partly open",
		"throttle/fleet": "store down",
		"bulkhead/users": "full",
		"saga/worker":    "stuck",
	}, ill(h))

	e, _ := h.reg.Get("breaker", "users")
	err := e.Health(t.Context())
	require.ErrorIs(t, err, errDown)
	require.EqualError(t, err, "open: down")
	require.Empty(t, err.(*registry.HealthError).Detail, "which has no texts of errors")
	e, _ = h.reg.Get("retry", "users")
	require.NoError(t, e.Health(t.Context()))
}

// A client of one host has a group of one breaker: that it is open is no less than of a
// breaker alone.
func TestHealthOfAGroupOfBreakers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		circuits := breaker.NewGroup(breaker.GroupConfig[string]{Config: breaker.Config{Name: "hosts", Failures: 1, OpenFor: time.Second}})
		reg := registry.New()
		reg.MustAdd(circuits)
		e, _ := reg.Get("breaker", "hosts")
		require.NoError(t, e.Health(t.Context()))
		use := func(key string, err error) {
			_ = circuits.Do(t.Context(), key, func(context.Context) error { return err })
		}
		check := func(text string, fails bool) {
			t.Helper()
			err := e.Health(t.Context())
			require.EqualError(t, err, text)
			require.Equal(t, fails, err.(*registry.HealthError).Fails)
		}

		use("a", errDown)
		check("open: 1 of 1 open", true)
		use("b", nil)
		check("partly open: 1 of 2 open", false)
		use("b", errDown)
		check("open: 2 of 2 open", true)
		time.Sleep(2 * time.Second)
		use("b", nil)
		begun, err := circuits.Begin(t.Context(), "a")
		require.NoError(t, err)
		check("half-open: 1 of 2 half-open", false)
		begun(nil)
		require.NoError(t, e.Health(t.Context()))
		for _, circuit := range circuits.All() {
			circuit.Disable()
		}
		check("disabled: 2 of 2 disabled", false)
	})
}

func TestHealthOfAGroupOfBudgets(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		budgets := retry.NewBudgetGroup(retry.BudgetGroupConfig[string]{Config: retry.BudgetConfig{Name: "hosts", Ratio: -1, PerSecond: 1}})
		reg := registry.New()
		reg.MustAdd(budgets)
		e, _ := reg.Get("budget", "hosts")
		require.NoError(t, e.Health(t.Context()))
		retries := retry.New(retry.Config{Attempts: 100, Backoff: retry.Constant(0), BudgetFor: budgets.By(func(context.Context) string { return "a" })})
		require.ErrorIs(t, retries.Do(t.Context(), func(context.Context) error { return errDown }), retry.ErrOverBudget)
		err := e.Health(t.Context())
		require.EqualError(t, err, "spent: 1 of 1 spent")
		require.False(t, err.(*registry.HealthError).Fails)
		time.Sleep(time.Minute)
		require.NoError(t, e.Health(t.Context()))
	})
}

// stick leaves a saga stuck.
func (h *house) stick(t *testing.T) {
	trip := &saga.Saga[state]{Name: "stuck", Steps: []saga.Step[state]{
		{Name: "a", Do: func(context.Context, *state) error { return nil },
			Undo: func(context.Context, *state) error { return errDown }, UndoAttempts: 1},
		{Name: "b", Do: func(context.Context, *state) error { return saga.Abort(errDown) },
			Undo: func(context.Context, *state) error { return nil }},
	}}
	saga.Register(h.runner, trip)
	ctx, stop := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { _ = h.runner.Run(ctx) })
	_, err := saga.Start(ctx, h.runner, trip, "1", state{})
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		in, err := h.runner.Get(ctx, "1")
		return err == nil && in.Status == saga.Stuck
	}, 30*time.Second, 5*time.Millisecond)
	stop()
	wg.Wait()
}

// A Runner that nobody runs, or that was stopped, is where an operator looks for sagas that
// nobody takes: its figures and its health say so.
func TestOverdueSagasAreSeenWithoutARunner(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHouse()
		defer h.close()
		for _, id := range []string{"a", "b"} {
			_, err := saga.Start(t.Context(), h.runner, h.trips, id, state{})
			require.NoError(t, err)
			time.Sleep(30 * time.Second)
		}
		due := func() (n, age float64) {
			h.figures(t, "saga", "worker") // has them looked up
			synctest.Wait()
			f := h.figures(t, "saga", "worker")
			return f["saga.due{saga=trip}"], f["saga.due.age{saga=trip}"]
		}
		n, age := due()
		require.Equal(t, []float64{2, 60}, []float64{n, age})
		e, _ := h.reg.Get("saga", "worker")
		require.EqualError(t, e.Health(t.Context()), "overdue: 2 sagas due, the first for 1m0s")

		require.NoError(t, h.runner.Update(func(c *saga.RunnerConfig) { c.DueAfter = 2 * time.Minute }))
		require.NoError(t, e.Health(t.Context()))
		time.Sleep(time.Minute)
		require.EqualError(t, e.Health(t.Context()), "overdue: 2 sagas due, the first for 2m0s")

		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		go func() { _ = h.runner.Run(ctx) }()
		time.Sleep(10 * time.Second)
		require.NoError(t, e.Health(t.Context()))
		n, age = due()
		require.Equal(t, []float64{0, 0}, []float64{n, age})
	})
}

// A lease that nobody holds is work that nobody does, whether this process campaigns or not.
func TestHealthOfALease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &shaky{Store: lease.NewMemory()}
		cfg := lease.Config{Name: "billing", Holder: "here", TTL: 10 * time.Second, OnStoreError: func(context.Context, error) {}}
		c, lock := lease.New(store, cfg), lease.New(store, lease.Config{Name: "lock", TTL: 10 * time.Second})
		reg := registry.New()
		reg.MustAdd(c, lock)
		health := func(name, want string) {
			t.Helper()
			e, _ := reg.Get("lease", name)
			require.Equal(t, want, fmt.Sprint(e.Health(t.Context())))
		}
		time.Sleep(10 * time.Second)
		health("billing", "<nil>")
		time.Sleep(time.Second)
		health("billing", "vacant: nobody has held it for 11s")

		term, err := c.Campaign(t.Context())
		require.NoError(t, err)
		time.Sleep(time.Hour)
		health("billing", "<nil>")
		held, err := c.Look(t.Context())
		require.NoError(t, err)
		require.Equal(t, "here", held.Holder)
		require.Equal(t, term.Epoch(), held.Epoch)
		require.True(t, held.Until.After(held.Now))
		require.NoError(t, term.Resign(t.Context()))
		time.Sleep(10 * time.Second)
		health("billing", "<nil>")
		time.Sleep(time.Second)
		health("billing", "vacant: nobody has held it for 11s")
		held, err = c.Look(t.Context())
		require.NoError(t, err)
		require.Zero(t, held.Until)

		got, err := lock.TryCampaign(t.Context())
		require.NoError(t, err)
		require.NoError(t, got.Resign(t.Context()))
		time.Sleep(time.Hour)
		health("lock", "<nil>")

		store.down.Store(true)
		health("billing", "store down: down")
	})
}

// A shaky store can be down.
type shaky struct {
	lease.Store
	down atomic.Bool
}

func (s *shaky) Load(ctx context.Context, name string) (lease.Record, error) {
	if s.down.Load() {
		return lease.Record{}, errDown
	}
	return s.Store.Load(ctx, name)
}

func TestHealthHandlerTakesARegistryByOneCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHouse()
		defer h.close()
		handler := resiliencehttp.HealthOf(h.reg.Health, resiliencehttp.Check{Name: "users", Breaker: h.circuit})
		get := func() (status string, checks map[string][2]string) {
			w := httptest.NewRecorder()
			handler.ServeHTTP(w, httptest.NewRequest("GET", "/", nil))
			require.Equal(t, 200, w.Code, "no policy is critical")
			var report struct {
				Status string
				Checks []struct{ Name, Status, State string }
			}
			require.NoError(t, json.Unmarshal(w.Body.Bytes(), &report))
			checks = map[string][2]string{}
			for _, c := range report.Checks {
				checks[c.Name] = [2]string{c.Status, c.State}
			}
			return report.Status, checks
		}
		status, checks := get()
		require.Equal(t, "pass", status)
		require.Len(t, checks, 18)
		require.Equal(t, [2]string{"pass", "ok"}, checks["throttle/fleet"])

		for range 3 {
			_ = h.circuit.Do(t.Context(), func(context.Context) error { return errDown })
		}
		_, checks = get()
		require.Equal(t, [2]string{"pass", "ok"}, checks["breaker/users"], "a result is kept for a second")
		time.Sleep(time.Second)
		status, checks = get()
		require.Equal(t, "warn", status)
		require.Equal(t, [2]string{"fail", "open"}, checks["breaker/users"])
	})
}
