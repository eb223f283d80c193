package registry_test

import (
	"context"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/cacheaside"
	"github.com/go-resilience/resilience/lease"
	"github.com/go-resilience/resilience/registry"
	"github.com/go-resilience/resilience/retry"
	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/saga/store"
	"github.com/go-resilience/resilience/throttle"
)

// A told is a policy that is as a test says.
type told[S, E any] struct {
	stats S
	tell  func(context.Context, E)
}

func (*told[S, E]) Name() string { return "x" }
func (p *told[S, E]) Stats() S   { return p.stats }
func (p *told[S, E]) Observe(f func(context.Context, E)) func() {
	p.tell = f
	return func() {}
}

// entryOf returns the entry of a policy with these Stats.
func entryOf[S, E any](t *testing.T, stats S) registry.Entry {
	return only(t, &told[S, E]{stats: stats})
}

func only(t *testing.T, p registry.Policy) (e registry.Entry) {
	t.Helper()
	reg := registry.New()
	require.NoError(t, reg.Add(p))
	for e = range reg.All() {
	}
	return e
}

// number gives each number in v a value of its own, and notes its path by this value.
func number(v reflect.Value, path string, paths map[float64]string) {
	n := float64(len(paths) + 2) // 0 and 1 are what states are
	switch v.Kind() {
	case reflect.Int, reflect.Int64:
		if v.Type() == reflect.TypeFor[time.Duration]() {
			v.SetInt(int64(n) * int64(time.Second))
		} else {
			v.SetInt(int64(n))
		}
		paths[n] = path
	case reflect.Float64:
		v.SetFloat(n)
		paths[n] = path
	case reflect.Struct:
		for i := range v.NumField() {
			if f := v.Type().Field(i); f.IsExported() {
				number(v.Field(i), path+"."+f.Name, paths)
			}
		}
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		number(v.Index(0), path, paths)
	}
}

// hidden returns the numbers of S that no figure shows.
func hidden[S, E any](t *testing.T) []string {
	var stats S
	paths := map[float64]string{}
	number(reflect.ValueOf(&stats).Elem(), reflect.TypeFor[S]().String(), paths)
	n := len(paths)
	for f := range entryOf[S, E](t, stats).Figures() {
		delete(paths, f.Value)
	}
	var left []string
	for i := range n {
		if path, ok := paths[float64(i+2)]; ok {
			left = append(left, path)
		}
	}
	return left
}

// A number that is new in the Stats of a package gets a figure, or a place here.
func TestFiguresShowTheNumbersOfStats(t *testing.T) {
	require.Empty(t, hidden[retry.Stats, retry.Event](t))
	require.Empty(t, hidden[retry.BudgetStats, retry.Event](t))
	require.Empty(t, hidden[retry.BudgetGroupStats, retry.Event](t))
	require.Empty(t, hidden[retry.HedgeStats, retry.Event](t))
	require.Equal(t, []string{ // of a window, which rates sum up
		"breaker.Stats.Window.Calls", "breaker.Stats.Window.Succeeded", "breaker.Stats.Window.Failed", "breaker.Stats.Window.Slow",
		"breaker.Stats.Window.FailedInARow", "breaker.Stats.OpensInARow",
	}, hidden[breaker.Stats, breaker.Event](t))
	require.Empty(t, hidden[breaker.GroupStats, breaker.Event](t))
	refused := func(of string) []string { return []string{of + ".Refused"} } // shown by reason
	require.Equal(t, append(refused("bulkhead.Stats.Totals"),                // and tenants, of which there may be many
		"bulkhead.Stats.Shares.InFlight", "bulkhead.Stats.Shares.Queued"), hidden[bulkhead.Stats, bulkhead.Event](t))
	require.Equal(t, refused("bulkhead.GroupStats.Totals"), hidden[bulkhead.GroupStats, bulkhead.Event](t))
	require.Equal(t, refused("throttle.Stats.Totals"), hidden[throttle.Stats, throttle.Event](t))
	require.Equal(t, refused("throttle.GroupStats.Totals"), hidden[throttle.GroupStats, throttle.Event](t))
	require.Equal(t, refused("throttle.SharedStats"), hidden[throttle.SharedStats, throttle.Event](t))
	require.Empty(t, hidden[throttle.AdaptiveStats, throttle.Event](t))
	require.Empty(t, hidden[cacheaside.Stats, cacheaside.Event](t))
	require.Empty(t, hidden[lease.Stats, lease.Event](t))
	require.Equal(t, []string{ // of sagas that have ended
		"saga.Stats.Stored.Sagas.Completed", "saga.Stats.Stored.Sagas.Compensated", "saga.Stats.Stored.Sagas.Abandoned",
	}, hidden[saga.Stats, saga.Event](t))
}

func TestFiguresOfStates(t *testing.T) {
	has := func(e registry.Entry, line string) {
		t.Helper()
		var lines []string
		for f := range e.Figures() {
			lines = append(lines, f.String())
		}
		require.Contains(t, lines, line)
	}
	has(entryOf[throttle.SharedStats, throttle.Event](t, throttle.SharedStats{}), "throttle.store.up 1")
	has(entryOf[throttle.SharedStats, throttle.Event](t, throttle.SharedStats{Down: true}), "throttle.store.up 0")
	now := time.Now()
	due := func(since time.Time) registry.Entry {
		return entryOf[saga.Stats, saga.Event](t, saga.Stats{Stored: store.Counts{Now: now, Sagas: []store.Count{{Saga: "a", OldestDue: since}}}})
	}
	has(due(now.Add(-time.Minute)), "saga.due.age{saga=a} 60")
	has(due(time.Time{}), "saga.due.age{saga=a} 0")
}

// lineOf returns what Log writes of an event.
func lineOf[S, E any](t *testing.T, e E) string {
	var lines strings.Builder
	p := &told[S, E]{}
	reg := registry.New()
	require.NoError(t, reg.Add(p))
	defer reg.Observe(registry.Log(newLogger(&lines)))()
	p.tell(t.Context(), e)
	return strings.TrimSuffix(lines.String(), "\n")
}

func TestLogOfEachKindOfEvent(t *testing.T) {
	const s = time.Second
	var want, got []string
	for _, c := range []struct{ want, got string }{
		{`WARN msg="breaker changed" name=x from=closed to="forced open"`,
			lineOf[breaker.Stats](t, breaker.Event{Kind: breaker.EventChanged, From: breaker.Closed, To: breaker.ForcedOpen})},
		{`DEBUG msg="breaker changed" name=x from=half-open to=closed`,
			lineOf[breaker.Stats](t, breaker.Event{Kind: breaker.EventChanged, From: breaker.HalfOpen, To: breaker.Closed})},
		{`WARN msg="bulkhead refused" name=x key=k reason="queue full" waited=1s err=down`,
			lineOf[bulkhead.Stats](t, bulkhead.Event{Kind: bulkhead.EventRefused, Key: "k", Reason: bulkhead.QueueFull, Waited: s, Err: errDown})},
		{`WARN msg="cache load failed" name=x key=7 took=1s err=down`,
			lineOf[cacheaside.Stats](t, cacheaside.Event{Kind: cacheaside.EventLoadFailed, Key: 7, Took: s, Err: errDown})},
		{`WARN msg="cache store lost" name=x`, lineOf[cacheaside.Stats](t, cacheaside.Event{Kind: cacheaside.EventStoreLost})},
		{`DEBUG msg="lease elected" name=x holder=me epoch=7 waited=1s`,
			lineOf[lease.Stats](t, lease.Event{Kind: lease.EventElected, Holder: "me", Epoch: 7, Waited: s})},
		{`WARN msg="lease lost" name=x holder=me epoch=7 took=1s`,
			lineOf[lease.Stats](t, lease.Event{Kind: lease.EventLost, Holder: "me", Epoch: 7, Took: s})},
		{`DEBUG msg="lease resigned" name=x holder=me epoch=7`, lineOf[lease.Stats](t, lease.Event{Kind: lease.EventResigned, Holder: "me", Epoch: 7})},
		{`WARN msg="lease resigned" name=x holder=me epoch=7 err=down`,
			lineOf[lease.Stats](t, lease.Event{Kind: lease.EventResigned, Holder: "me", Epoch: 7, Err: errDown})},
		{`DEBUG msg="retry retried" name=x attempt=1 in=1s retrying_for=1s err=down`,
			lineOf[retry.Stats](t, retry.Event{Kind: retry.EventRetried, Attempt: 1, Delay: s, RetryingFor: s, Err: errDown})},
		{`DEBUG msg="retry ended" name=x attempts=2 outcome=recovered`,
			lineOf[retry.Stats](t, retry.Event{Kind: retry.EventEnded, Attempts: 2, Outcome: retry.OutcomeRecovered})},
		{`WARN msg="retry ended" name=x attempts=2 outcome=exhausted err=down`,
			lineOf[retry.Stats](t, retry.Event{Kind: retry.EventEnded, Attempts: 2, Outcome: retry.OutcomeExhausted, Err: errDown})},
		{`WARN msg="budget over budget" name=x`, lineOf[retry.BudgetStats](t, retry.Event{Kind: retry.EventOverBudget})},
		{`WARN msg="saga stuck" name=x saga=a id=1 status=stuck step=b op=undo outcome="in doubt" attempt=2 took=1s count=3 err=down`,
			lineOf[saga.Stats](t, saga.Event{Kind: saga.EventStuck, Saga: "a", ID: "1", Status: saga.Stuck, Step: "b", Op: saga.OpUndo,
				Outcome: saga.OutcomeInDoubt, Attempt: 2, Took: s, Count: 3, Err: errDown})},
		{`DEBUG msg="saga completed" name=x status=completed`, lineOf[saga.Stats](t, saga.Event{Kind: saga.EventCompleted, Status: saga.Completed})},
		{`DEBUG msg="throttle waited" name=x waited=1s`, lineOf[throttle.Stats](t, throttle.Event{Kind: throttle.EventWaited, Waited: s})},
		{`WARN msg="throttle outage began" name=x err=down`,
			lineOf[throttle.SharedStats](t, throttle.Event{Kind: throttle.EventOutageBegan, Err: errDown})},
		{`WARN msg="throttle recovered" name=x`, lineOf[throttle.SharedStats](t, throttle.Event{Kind: throttle.EventRecovered})},
	} {
		want, got = append(want, "level="+c.want), append(got, c.got)
	}
	require.Equal(t, want, got)
}

// A counting is a Runner with these numbers in its store.
type counting struct {
	told[saga.Stats, saga.Event]
	stuck    int
	due      []time.Duration // since then, one of each definition
	dueAfter time.Duration
	err      error
}

func (c *counting) Counts(context.Context) (store.Counts, error) {
	now := time.Now()
	counts := store.Counts{Now: now, Sagas: []store.Count{{Stuck: c.stuck}}}
	for _, d := range c.due {
		counts.Sagas = append(counts.Sagas, store.Count{Due: 1, OldestDue: now.Add(-d)})
	}
	return counts, c.err
}

func (c *counting) Config() saga.RunnerConfig { return saga.RunnerConfig{DueAfter: c.dueAfter} }

func TestHealthOfEachState(t *testing.T) {
	circuit := func(s breaker.State) registry.Entry {
		return entryOf[breaker.Stats, breaker.Event](t, breaker.Stats{State: s})
	}
	circuits := func(in map[breaker.State]int) registry.Entry {
		return entryOf[breaker.GroupStats, breaker.Event](t, breaker.GroupStats{Keys: 2, States: in})
	}
	budget := func(left, charged int64) registry.Entry {
		return entryOf[retry.BudgetStats, retry.Event](t, retry.BudgetStats{Left: left, Charged: charged})
	}
	budgets := func(empty int, charged int64) registry.Entry {
		return entryOf[retry.BudgetGroupStats, retry.Event](t, retry.BudgetGroupStats{Keys: 2, Empty: empty, Charged: charged})
	}
	for _, c := range []struct {
		e     registry.Entry
		want  string
		fails bool
	}{
		{circuit(breaker.Closed), "<nil>", false},
		{circuit(breaker.ForcedOpen), "forced open", true},
		{circuit(breaker.Disabled), "disabled", false},
		{circuits(map[breaker.State]int{breaker.Open: 1, breaker.HalfOpen: 1}), "partly open: 1 of 2 open", false},
		{circuits(map[breaker.State]int{breaker.Open: 1, breaker.ForcedOpen: 1}), "open: 2 of 2 open", true},
		{budget(1, 1), "<nil>", false},
		{budget(0, 0), "<nil>", false}, // it allows none, and none was wanted
		{budget(0, 1), "spent: 1 retries in 10 s", false},
		{budgets(0, 1), "<nil>", false},
		{budgets(1, 0), "<nil>", false},
		{budgets(1, 1), "spent: 1 of 2 spent", false},
		{entryOf[cacheaside.Stats, cacheaside.Event](t, cacheaside.Stats{Untold: 3}), "invalidations untold: 3 keys", false},
		{only(t, &counting{stuck: 1}), "stuck: 1 saga", true},
		{only(t, &counting{stuck: 2}), "stuck: 2 sagas", true},
		{only(t, &counting{stuck: store.CountLimit}), fmt.Sprintf("stuck: %d sagas or more", store.CountLimit), true},
		{only(t, &counting{err: errDown}), "store down: down", true},
		{only(t, &counting{due: []time.Duration{59 * time.Second}, dueAfter: time.Minute}), "<nil>", false},
		{only(t, &counting{due: []time.Duration{time.Second, time.Minute}, dueAfter: time.Minute}), "overdue: 2 sagas due, the first for 1m0s", false},
		{only(t, &counting{due: []time.Duration{time.Hour}, dueAfter: -1}), "<nil>", false},
		{only(t, &counting{stuck: 1, due: []time.Duration{time.Hour}}), "stuck: 1 saga; 1 saga due, the first for 1h0m0s", true},
	} {
		err := c.e.Health(t.Context())
		require.Equal(t, c.want, fmt.Sprint(err))
		if err != nil {
			require.Equal(t, c.fails, err.(*registry.HealthError).Fails, c.want)
		}
	}
}

// A refusal names the share of the call in its event, and no figure has an attribute for it:
// there may be as many as there are tenants.
func TestSharesAreInEventsAndInNoFigure(t *testing.T) {
	b := bulkhead.New(bulkhead.Config{Name: "api", Limit: 1, MaxWait: time.Millisecond, Share: func(context.Context) string { return "tenant 7" }})
	reg := registry.New()
	reg.MustAdd(b)
	var told []string
	defer reg.Observe(func(_ context.Context, e registry.Event) { told = append(told, fmt.Sprint(e.Attrs)) })()
	done, err := b.Begin(t.Context())
	require.NoError(t, err)
	_, err = b.TryBegin(t.Context())
	require.Error(t, err)
	e, _ := reg.Get("bulkhead", "api")
	for f := range e.Figures() {
		require.NotContains(t, f.String(), "tenant 7")
	}
	done(nil)
	require.Equal(t, []string{"[reason=no slot share=tenant 7]"}, told)
}
