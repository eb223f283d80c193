package registry_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"log"
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

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/policy"
	"github.com/go-resilience/resilience/registry"
	"github.com/go-resilience/resilience/retry"
	"github.com/go-resilience/resilience/throttle"
)

var errDown = errors.New("down")

// While settings change under load, no call is lost and no limit is exceeded: calls in flight never exceed the
// larger limit, and no slot is taken at the end.
func TestApplyUnderLoad(t *testing.T) {
	reg := registry.New()
	retries := retry.New(retry.Config{Name: "a", Attempts: 2, Backoff: retry.Constant(time.Microsecond)})
	circuit := breaker.New(breaker.Config{Name: "a", ConsecutiveFailures: 1 << 30})
	slots := bulkhead.New(bulkhead.Config{Name: "a", Limit: 2, Queue: 1000, MaxWait: -1})
	rate := throttle.New(throttle.Config{Name: "a", Rate: 1e9, Burst: 1e6, MaxWait: -1})
	reg.MustAdd(retries, circuit, slots, rate)
	defer reg.Observe(func(context.Context, policy.Event) {})()

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
	require.EqualValues(t, 1, most.Load(), "the new limit is in force when Apply returns")
}

func TestAddAndRemoveWhileObserving(t *testing.T) {
	reg := registry.New()
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for n := range 200 {
				b := breaker.New(breaker.Config{Name: fmt.Sprint(i), ConsecutiveFailures: 1})
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
	require.NoError(t, os.WriteFile(path, []byte(`{"breaker/users": {"ConsecutiveFailures": 7}}`), 0o600))
	report, err := reg.Reload(path)
	require.NoError(t, err)
	require.Len(t, report, 1)
	require.Equal(t, 7, circuit.Config().ConsecutiveFailures)
}

// A member is a policy of a group with this health.
type member struct {
	calls  int
	health policy.Health
}

func (m *member) Describe() policy.Description {
	return policy.Description{
		Kind: "member", Name: "shards",
		Metrics: func() []policy.Metric {
			return []policy.Metric{
				{Name: "member.calls{outcome=ok}", Counter: true, Value: float64(m.calls)},
				{Name: "member.calls{outcome=refused}", Counter: true, Value: 1},
				{Name: "member.calls_made", Counter: true, Value: 7},
				{Name: "member.calls", Value: 99},
			}
		},
		Health: func(context.Context) policy.Health { return m.health },
	}
}

func TestWorstSortsMembers(t *testing.T) {
	fail := policy.Health{Status: policy.Fail, State: "open", Err: errDown}
	warn := policy.Health{Status: policy.Warn, State: "full"}
	members := map[string]*member{
		"busy": {calls: 5}, "idle": {calls: 1}, "also_idle": {calls: 1},
		"worse": {calls: 1, health: policy.Health{Status: 7}},
		"warn":  {calls: 2, health: warn}, "slow": {calls: 3, health: warn}, "dead": {calls: 0, health: fail},
	}
	reg := registry.New()
	reg.MustAdd(&describer{policy.Description{
		Kind: "member", Name: "shards",
		Members: func() iter.Seq2[string, policy.Describer] {
			return func(yield func(string, policy.Describer) bool) {
				for key, m := range members {
					if !yield(key, m) {
						return
					}
				}
			}
		},
	}})
	e, ok := reg.Get("member", "shards")
	require.True(t, ok)
	var keys []string
	for _, m := range e.Worst(9) {
		keys = append(keys, fmt.Sprint(m.Key, " ", m.Calls, " ", m, " ", m.Health(t.Context()).Status))
		require.Same(t, members[m.Key], m.Policy)
		require.False(t, m.InUse(), "every function can be called")
	}
	require.Equal(t, []string{
		"worse 2 member/shards fail", "dead 1 member/shards fail",
		"slow 4 member/shards warn", "warn 3 member/shards warn",
		"busy 6 member/shards pass", "also_idle 2 member/shards pass", "idle 2 member/shards pass",
	}, keys)
	require.Len(t, e.Worst(2), 2)
	require.Empty(t, e.Worst(0))
	require.Empty(t, e.Worst(-1))
	require.Empty(t, registry.Entry{}.Worst(1))
}

func TestWorstOfAGroup(t *testing.T) {
	g := resilience.NewGroup(func(string) *breaker.Breaker {
		return breaker.New(breaker.Config{Name: "shards", ConsecutiveFailures: 1})
	}, resilience.GroupConfig{})
	reg := registry.New()
	reg.MustAdd(g)
	for range 3 {
		require.NoError(t, g.Do(t.Context(), "fine", func(context.Context) error { return nil }))
	}
	require.Error(t, g.Do(t.Context(), "broken", func(context.Context) error { return errDown }))
	e, _ := reg.Get("breaker", "shards")
	worst := e.Worst(2)
	require.Equal(t, "broken", worst[0].Key)
	require.Equal(t, "open", worst[0].Health(t.Context()).State)
	require.IsType(t, (*breaker.Breaker)(nil), worst[0].Policy)
	require.EqualValues(t, 3, worst[1].Calls)
}

// hanging returns a policy whose Health takes a time, or until its ctx is done.
func hanging(name string, takes time.Duration) policy.Describer {
	return &describer{policy.Description{Kind: "store", Name: name, Health: func(ctx context.Context) policy.Health {
		select {
		case <-time.After(takes):
			return policy.Health{}
		case <-ctx.Done():
			return policy.Health{Status: policy.Fail, State: "store_down", Err: ctx.Err()}
		}
	}}}
}

// A server that does not respond must not make Worst, and so the export of metrics, hang.
func TestWorstQueriesHealthForASecond(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		reg := registry.New()
		reg.MustAdd(&describer{policy.Description{
			Kind: "store", Name: "shards",
			Members: func() iter.Seq2[string, policy.Describer] {
				return maps.All(map[string]policy.Describer{"a": hanging("a", time.Hour), "b": hanging("b", time.Hour)})
			},
		}})
		e, _ := reg.Get("store", "shards")
		start := time.Now()
		require.Len(t, e.Worst(2), 2)
		require.Equal(t, time.Second, time.Since(start))
	})
}

func TestHealthQueriesConcurrently(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		reg := registry.New()
		reg.MustAdd(hanging("a", time.Hour), hanging("b", time.Millisecond))
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		require.Equal(t, map[string]policy.Health{
			"store/a": {Status: policy.Fail, State: "store_down", Err: context.DeadlineExceeded},
			"store/b": {},
		}, maps.Collect(reg.Health(ctx)))
	})
}

func TestHealthReportsAPanic(t *testing.T) {
	reg := registry.New()
	reg.MustAdd(&describer{policy.Description{
		Kind: "store", Name: "a", Health: func(context.Context) policy.Health { panic("boom") },
	}})
	for path, h := range reg.Health(t.Context()) {
		require.Equal(t, "store/a", path)
		require.Equal(t, policy.Fail, h.Status)
		require.Equal(t, "panicked", h.State)
		require.EqualError(t, h.Err, "registry: store/a: Health panicked: boom")
	}
}

// Background goroutines read metrics. A panic there would end the program.
func TestPanicOfMetricsIsRecovered(t *testing.T) {
	var text strings.Builder
	defer log.SetOutput(log.Writer())
	log.SetOutput(&text)
	reg := registry.New()
	reg.MustAdd(&describer{policy.Description{
		Kind: "store", Name: "a", Metrics: func() []policy.Metric { panic("boom") },
	}})
	for range 2 {
		require.JSONEq(t, `{"store/a": {}}`, reg.String())
	}
	require.Equal(t, 1, strings.Count(text.String(), "registry: store/a: Metrics panicked: boom"))
}

func TestEventsHaveTheKindAndNameOfTheirPolicy(t *testing.T) {
	reg, f := newFakes("users")
	var events []policy.Event
	defer reg.Observe(func(_ context.Context, e policy.Event) { events = append(events, e) })()
	f[0].notify(policy.Event{What: "changed"})
	f[0].notify(policy.Event{Kind: "inner", Name: "own", What: "changed"})
	require.Equal(t, []policy.Event{
		{Kind: "fake", Name: "users", What: "changed"}, {Kind: "inner", Name: "own", What: "changed"},
	}, events)
}

// beacon returns a policy that has an event when its observation starts and when it stops.
func beacon(name string) policy.Describer {
	return &describer{policy.Description{
		Kind: "beacon", Name: name,
		Observe: func(f func(context.Context, policy.Event)) (stop func()) {
			f(context.Background(), policy.Event{What: "lit"})
			return func() { f(context.Background(), policy.Event{What: "dark"}) }
		},
	}}
}

func TestObserverMayReadTheRegistry(t *testing.T) {
	reg := registry.New()
	reg.MustAdd(beacon("a"))
	var events []string
	stop := reg.Observe(func(_ context.Context, e policy.Event) {
		_, there := reg.Get(e.Kind, e.Name)
		events = append(events, fmt.Sprint(e.Name, " ", e.What, " ", there, " ", len(slices.Collect(reg.All()))))
	})
	reg.MustAdd(beacon("b"))
	stop()
	require.Equal(t, []string{"a lit true 1", "b lit true 2"}, events[:2])
}
