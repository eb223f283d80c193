package registry_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/registry"
	"github.com/go-resilience/resilience/retry"
	"github.com/go-resilience/resilience/throttle"
)

var errDown = errors.New("down")

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
	ended := s.FirstTry + s.Recovered + s.Exhausted + s.Permanent + s.OverBudget + s.Deadline + s.Canceled
	require.EqualValues(t, callers*calls, ended)
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
	require.Empty(t, slices.Collect(reg.All()))
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

func TestParseReadsTheNameOfAFigure(t *testing.T) {
	for name, want := range map[string][]any{
		"breaker.calls":                              {"breaker.calls", "", []registry.Attr(nil)},
		"bulkhead.wait.time_seconds":                 {"bulkhead.wait.time", "s", []registry.Attr(nil)},
		"breaker.failure_ratio":                      {"breaker.failure", "1", []registry.Attr(nil)},
		"bulkhead.calls{outcome=admitted,reason=}":   {"bulkhead.calls", "", []registry.Attr{{Key: "outcome", Value: "admitted"}, {Key: "reason", Value: ""}}},
		"saga.life.time_seconds{saga=buy, then pay}": {"saga.life.time", "s", []registry.Attr{{Key: "saga", Value: "buy, then pay"}}},
	} {
		what, unit, attrs := registry.Parse(name)
		require.Equal(t, want, []any{what, unit, attrs}, name)
	}
}

// A healer is a member that is as its health says.
type healer struct {
	name  string
	calls float64
	err   error
}

func (h *healer) Do(ctx context.Context, fn resilience.Func) error { h.calls++; return fn(ctx) }
func (h *healer) Kind() string                                     { return "healer" }
func (h *healer) Name() string                                     { return h.name }
func (h *healer) Health() error                                    { return h.err }
func (h *healer) Figures() []registry.Figure {
	return []registry.Figure{{Name: "healer.calls{outcome=ok}", Counter: true, Value: h.calls}, {Name: "healer.others", Counter: true, Value: 7}, {Name: "healer.calls_waiting", Value: 99}}
}

type ailing struct {
	error
	failed bool
}

func (a ailing) Failed() bool { return a.failed }

func TestGroupTellsItsMembersTheWorstFirst(t *testing.T) {
	g := resilience.NewGroup(func(key string) *healer {
		switch key {
		case "ill":
			return &healer{name: "shards", err: errDown}
		case "dead":
			return &healer{name: "shards", err: ailing{errDown, true}}
		case "slow":
			return &healer{name: "shards", err: ailing{errDown, false}}
		}
		return &healer{name: "shards"}
	}, resilience.GroupConfig{})
	reg := registry.New()
	reg.MustAdd(g)
	for key, n := range map[string]int{"busy": 5, "idle": 1, "ill": 2, "slow": 3, "dead": 1} {
		for range n {
			require.NoError(t, g.Do(t.Context(), key, func(context.Context) error { return nil }))
		}
	}
	e, ok := reg.Get("healer", "shards")
	require.True(t, ok)
	var keys []string
	for _, m := range e.Members(9) {
		keys = append(keys, fmt.Sprint(m.Key, " ", m.Calls, " ", len(m.Figures())))
	}
	require.Equal(t, []string{"dead 1 3", "slow 3 3", "ill 2 3", "busy 5 3", "idle 1 3"}, keys)
	require.Len(t, e.Members(2), 2)
	require.Empty(t, e.Members(0))
	require.Empty(t, e.Members(-1))
	require.Equal(t, registry.Figure{Name: "healer.calls{outcome=ok}", Counter: true, Value: 12}, e.Figures()[0])
	require.Error(t, e.Health(t.Context()))
}

// Of policies whose method All is another one.
type (
	allOf   struct{ foreign }
	allAnd  struct{ foreign }
	allThat struct{ foreign }
)

func (allOf) All(string) iter.Seq2[string, registry.Policy]     { return nil }
func (allAnd) All() (iter.Seq2[string, registry.Policy], error) { return nil, nil }
func (allThat) All() int                                        { return 0 }

func TestOnlyAGroupHasMembers(t *testing.T) {
	for _, p := range []registry.Policy{allOf{}, allAnd{}, allThat{}} {
		require.Nil(t, registry.Entry{Policy: p}.Members(9), "%T", p)
	}
}

func TestEventTellsItsDetails(t *testing.T) {
	e := registry.Event{Attrs: []slog.Attr{slog.Int("n", 1), slog.String("reason", "full")}}
	require.Equal(t, "full", e.Attr("reason").String())
	require.Equal(t, slog.Value{}, e.Attr("outcome"))
}

// An asked is a policy whose health depends on a server, and whose Observe is of the form that a
// registry knows.
type asked struct{ observers []func(context.Context, any) }

func (a *asked) Kind() string                     { return "asked" }
func (a *asked) Name() string                     { return "a" }
func (a *asked) Health(ctx context.Context) error { return ctx.Err() }
func (a *asked) Observe(f func(context.Context, any)) func() {
	a.observers = append(a.observers, f)
	return func() { a.observers = nil }
}

// slow answers after a time, or when its ctx has ended.
type slow struct {
	healer
	takes time.Duration
}

func (s *slow) Health(ctx context.Context) error {
	select {
	case <-time.After(s.takes):
		return s.err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// A store that hangs does not take the time of another, which would seem to be down, too.
func TestHealthAsksAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		reg := registry.New()
		reg.MustAdd(
			&slow{healer{name: "a"}, time.Hour}, &slow{healer{name: "b"}, time.Millisecond}, &panicky{healer{name: "c"}})
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		got := maps.Collect(reg.Health(ctx))
		require.ErrorIs(t, got["healer/a"], context.DeadlineExceeded)
		require.NoError(t, got["healer/b"])
		require.EqualError(t, got["healer/c"], "registry: healer/c: Health panicked: boom")
	})
}

type panicky struct{ healer }

func (*panicky) Health(context.Context) error { panic("boom") }

func TestPolicyMayAskAServerForItsHealth(t *testing.T) {
	reg := registry.New()
	a := &asked{}
	reg.MustAdd(a)
	ctx, cancel := context.WithCancel(t.Context())
	for path, err := range reg.Health(ctx) {
		require.Equal(t, "asked/a", path)
		require.NoError(t, err)
	}
	cancel()
	for _, err := range reg.Health(ctx) {
		require.ErrorIs(t, err, context.Canceled)
	}
	var told registry.Event
	defer reg.Observe(func(_ context.Context, e registry.Event) { told = e })()
	a.observers[0](t.Context(), "anything")
	require.Equal(t, registry.Event{Kind: "asked", Name: "a", What: "anything", Level: slog.LevelDebug}, told)
}

// A beacon tells its state to whoever begins to observe it.
type beacon struct{ name string }

func (b *beacon) Kind() string { return "beacon" }
func (b *beacon) Name() string { return b.name }

func (b *beacon) Observe(f func(context.Context, any)) func() {
	f(context.Background(), "lit")
	return func() { f(context.Background(), "dark") }
}

func TestAnObserverMayAskTheRegistryWhateverTellsIt(t *testing.T) {
	reg := registry.New()
	reg.MustAdd(&beacon{"a"})
	var told []string
	stop := reg.Observe(func(_ context.Context, e registry.Event) {
		_, there := reg.Get(e.Kind, e.Name)
		told = append(told, fmt.Sprint(e.Name, " ", e.What, " ", there, " ", len(slices.Collect(reg.All()))))
	})
	reg.MustAdd(&beacon{"b"})
	stop()
	require.Equal(t, []string{"a lit true 1", "b lit true 2"}, told[:2])
}
