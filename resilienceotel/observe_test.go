package resilienceotel_test

import (
	"context"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"
	"weak"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/cacheaside"
	"github.com/go-resilience/resilience/hedge"
	"github.com/go-resilience/resilience/lease"
	"github.com/go-resilience/resilience/policy"
	"github.com/go-resilience/resilience/registry"
	"github.com/go-resilience/resilience/resilienceotel"
	"github.com/go-resilience/resilience/retry"
	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/throttle"
	"github.com/go-resilience/resilience/throttle/adaptive"
	"github.com/go-resilience/resilience/throttle/fleet"
)

type trip struct{ Legs int }

func done(context.Context, *trip) error { return nil }

// everyKind returns a policy of each kind.
func everyKind() []policy.Describer {
	runner := saga.NewRunner(saga.NewMemory(), saga.RunnerConfig{Name: "worker"})
	saga.Register(runner, &saga.Saga[trip]{Name: "trip", Steps: []saga.Step[trip]{{Name: "book", Do: done, Undo: done}}})
	return []policy.Describer{
		retry.New(retry.Config{Name: "users"}),
		retry.NewBudget(retry.BudgetConfig{Name: "users"}),
		resilience.NewGroup(func(string) *retry.Retrier { return retry.New(retry.Config{Name: "hosts"}) },
			resilience.GroupConfig{}),
		hedge.New[int](hedge.Config{Name: "users", Delay: time.Second}),
		breaker.New(breaker.Config{Name: "users"}),
		resilience.NewGroup(func(string) *breaker.Breaker { return breaker.New(breaker.Config{Name: "shards"}) },
			resilience.GroupConfig{}),
		bulkhead.New(bulkhead.Config{Name: "users", Limit: 2}),
		resilience.NewGroup(func(int) *bulkhead.Bulkhead {
			return bulkhead.New(bulkhead.Config{Name: "rooms",
				Limit: 1})
		}, resilience.GroupConfig{}),
		throttle.New(throttle.Config{Name: "users", Rate: 10, Burst: 1}),
		throttle.NewGroup(throttle.GroupConfig[string]{Config: throttle.Config{Name: "tenants", Rate: 10, Burst: 2}}),
		fleet.New(fleet.Config{Name: "fleet",
			Meters: func(context.Context) []fleet.Meter { return []fleet.Meter{fleet.Rate("all", 10, 1)} },
			Eval:   func(context.Context, string, []string, ...any) (any, error) { return nil, errDown }}),
		adaptive.New(adaptive.Config{Name: "adaptive"}),
		cacheaside.New(cacheaside.Config[int, int]{Name: "users", TTL: time.Minute,
			Load: func(context.Context, int) (int, error) { return 0, nil }}),
		lease.New(lease.NewMemory(), lease.Config{Name: "leader", TTL: time.Second}),
		runner,
	}
}

func TestEveryMetricIsAnInstrument(t *testing.T) {
	s := newSDK(t)
	reg := s.observe(t, everyKind()...)
	e, found := reg.Get("breaker", "users")
	require.True(t, found)
	require.NoError(t, e.Policy.(*breaker.Breaker).Do(t.Context(), func(context.Context) error { return nil }))

	metrics, values := s.metrics(t), s.values(t)
	n := 0
	for e := range reg.All() {
		for _, f := range e.Metrics() {
			what, unit, _ := f.Parse()
			n++
			m, exported := metrics["resilience."+what]
			require.True(t, exported, f)
			require.Equal(t, unit, m.Unit)
			switch data := m.Data.(type) {
			case metricdata.Sum[float64]:
				require.True(t, data.IsMonotonic, f)
				require.True(t, f.Counter, f)
			default:
				require.IsType(t, metricdata.Gauge[float64]{}, data)
				require.False(t, f.Counter, f)
			}
			require.Contains(t, linesOf(values), seriesOf(e, f), f)
		}
	}
	require.Len(t, values, n, "and nothing else")
	require.Equal(t, 1.0, values["resilience.breaker.calls{name=users,outcome=success}"])
	require.Equal(t, 1.0, values["resilience.breaker.state{name=users,state=closed}"])
	require.Zero(t, values["resilience.breaker.state{name=users,state=open}"])
}

// seriesOf returns the line of a metric.
func seriesOf(e registry.Entry, f policy.Metric) string {
	kv := []string{"name=" + e.Name}
	what, _, attrs := f.Parse()
	for _, a := range attrs {
		kv = append(kv, a.Key+"="+a.Value)
	}
	return line("resilience."+what, kv)
}

// line and linesOf write metrics with their attributes in the order of the alphabet.
func line(name string, kv []string) string {
	slices.Sort(kv)
	return name + "{" + strings.Join(kv, ",") + "}"
}

func linesOf(values map[string]float64) []string {
	var all []string
	for l := range maps.Keys(values) {
		name, kv, _ := strings.Cut(strings.TrimSuffix(l, "}"), "{")
		all = append(all, line(name, strings.Split(kv, ",")))
	}
	return all
}

func TestPoliciesComeAndGo(t *testing.T) {
	s := newSDK(t)
	reg := registry.New()
	_, err := resilienceotel.Observe(reg, s.Config)
	require.ErrorContains(t, err, "add the policies before Observe")
	circuit := breaker.New(breaker.Config{Name: "users"})
	reg.MustAdd(circuit)
	stop, err := resilienceotel.Observe(reg, s.Config)
	require.NoError(t, err)
	require.Contains(t, s.values(t), "resilience.breaker.state{name=users,state=closed}")
	reg.Remove(circuit)
	require.Empty(t, s.values(t))

	reg.MustAdd(breaker.New(breaker.Config{Name: "search"}))
	require.Contains(t, s.values(t), "resilience.breaker.state{name=search,state=closed}",
		"an earlier policy had its metrics")

	stop()
	stop()
	require.Empty(t, s.values(t))
}

var globalsAreSet atomic.Bool

// A program may set its providers after it has made what uses them.
func TestGlobalProvidersMayComeLater(t *testing.T) {
	if globalsAreSet.Swap(true) {
		t.Skip("otel takes the first providers of a process only, and a round before this (-count) has set them")
	}
	reg := registry.New()
	circuit := breaker.New(breaker.Config{Name: "users"})
	reg.MustAdd(circuit)
	stop, err := resilienceotel.Observe(reg, resilienceotel.Config{})
	require.NoError(t, err)
	call := resilienceotel.New(resilienceotel.Config{}).Call("users")(func(context.Context) error { return nil })
	require.NoError(t, call(t.Context()))

	s := newSDK(t)
	otel.SetMeterProvider(s.MeterProvider)
	otel.SetTracerProvider(s.TracerProvider)
	require.NoError(t, call(t.Context()))
	v := s.values(t)
	require.Equal(t, 1.0, v["resilience.call.duration{name=users,outcome=ok}"])
	require.Equal(t, 1.0, v["resilience.breaker.state{name=users,state=closed}"])
	require.Len(t, s.spans.GetSpans(), 1)
	stop()
	require.NotContains(t, s.values(t), "resilience.breaker.state{name=users,state=closed}")
}

// A hoarded policy has a metric with a new name each time, and weak pointers to the names.
type hoarded struct{ yielded []weak.Pointer[byte] }

func (h *hoarded) Describe() policy.Description {
	return policy.Description{Kind: "custom", Name: "mine", Metrics: h.metrics}
}

func (h *hoarded) metrics() []policy.Metric {
	name := strings.Clone("hoarded{thing=one}")
	h.yielded = append(h.yielded, weak.Make(unsafe.StringData(name)))
	return []policy.Metric{{Name: name, Value: 1}}
}

func TestRemovedPolicyIsForgotten(t *testing.T) {
	s := newSDK(t)
	p := new(hoarded)
	reg := s.observe(t, p)
	require.Equal(t, map[string]float64{"resilience.hoarded{name=mine,thing=one}": 1}, s.values(t))
	require.True(t, reg.Remove(p))
	require.Empty(t, s.values(t))
	runtime.GC()
	for _, name := range p.yielded[1:] { // the first one is the name of an instrument
		require.Nil(t, name.Value(), "a metric of the removed policy is referenced")
	}
	runtime.KeepAlive(reg)
}

// A custom policy has one more metric each time, in another order.
type custom struct{ calls atomic.Int64 }

func (c *custom) Describe() policy.Description {
	return policy.Description{Kind: "custom", Name: "mine", Metrics: c.metrics}
}

func (c *custom) metrics() (all []policy.Metric) {
	n := c.calls.Add(1)
	for i := range n {
		all = append(all, policy.Metric{Name: fmt.Sprintf("custom.count{thing=%d}", n-i), Counter: true,
			Value: float64(n - i)})
	}
	return all
}

// A fickle policy has one metric, and later another.
type fickle struct{ later atomic.Bool }

func (f *fickle) Describe() policy.Description {
	return policy.Description{Kind: "custom", Name: "mine", Metrics: f.metrics}
}

func (f *fickle) metrics() []policy.Metric {
	name := "fickle.before"
	if f.later.Load() {
		name = "fickle.later"
	}
	return []policy.Metric{{Name: name, Value: 1}}
}

// handled has the errors that otel's error handler received.
type handled struct {
	mu  sync.Mutex
	all []string
}

func (h *handled) Handle(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.all = append(h.all, err.Error())
}

func TestLaterMetricIsReportedOnce(t *testing.T) {
	told := new(handled)
	otel.SetErrorHandler(told)
	s := newSDK(t)
	p := new(fickle)
	reg := s.observe(t, p)
	require.Equal(t, map[string]float64{"resilience.fickle.before{name=mine}": 1}, s.values(t))
	p.later.Store(true)
	reg.MustAdd(bulkhead.New(bulkhead.Config{Name: "users", Limit: 3}))
	for range 3 {
		require.Empty(t, s.values(t))
	}
	once := 0
	for _, text := range told.all {
		if text == "resilienceotel: resilience.fickle.later of custom/mine is not exported: "+
			"no policy had this metric when Observe was called" {
			once++
		}
	}
	require.Equal(t, 1, once, told.all)
	p.later.Store(false)
	require.Equal(t, map[string]float64{"resilience.fickle.before{name=mine}": 1}, s.values(t))
}

func TestCustomPolicy(t *testing.T) {
	s := newSDK(t)
	s.observe(t, new(custom)) // asked once by Observe
	require.Equal(t, map[string]float64{
		"resilience.custom.count{name=mine,thing=1}": 1,
		"resilience.custom.count{name=mine,thing=2}": 2,
	}, s.values(t))
}

func TestKeysAppearOnlyIfAllowed(t *testing.T) {
	members := func(cfg func(*resilienceotel.Config)) map[string]float64 {
		s := newSDK(t)
		cfg(&s.Config)
		hosts := resilience.NewGroup(func(string) *breaker.Breaker {
			return breaker.New(breaker.Config{Name: "hosts", ConsecutiveFailures: 1})
		}, resilience.GroupConfig{})
		tenants := throttle.NewGroup(throttle.GroupConfig[string]{Config: throttle.Config{Name: "tenants", Rate: 1000,
			Burst: 1, MaxWait: -1}})
		s.observe(t, hosts, tenants)
		for _, host := range []string{"a.example", "b.example"} {
			require.ErrorIs(t, hosts.Do(t.Context(), host, func(context.Context) error { return errDown }), errDown)
			for range 3 { // some of them wait
				require.NoError(t, tenants.Do(t.Context(), host, func(context.Context) error { return nil }))
			}
		}
		return s.values(t)
	}
	none := members(func(*resilienceotel.Config) {})
	for name := range none {
		require.NotContains(t, name, "example")
		require.NotContains(t, name, "member")
	}
	require.Equal(t, 2.0, none["resilience.breaker.state{name=hosts,state=open}"])
	one := members(func(c *resilienceotel.Config) {
		c.Keys = func(kind, name, key string) bool {
			require.Contains(t, []string{"breaker/hosts", "throttle/tenants"}, kind+"/"+name)
			return key == "a.example"
		}
	})
	for name := range one {
		require.NotContains(t, name, "b.example")
	}
	require.Equal(t, 2.0, one["resilience.breaker.state{name=hosts,state=open}"], "the Group is as it was")
	require.Equal(t, 1.0, one["resilience.member.breaker.state{key=a.example,name=hosts,state=open}"])
	require.Contains(t, one, "resilience.breaker.calls{name=hosts,outcome=success}", "a zero")
	require.NotContains(t, one, "resilience.member.breaker.calls{key=a.example,name=hosts,outcome=success}", "a zero")
	require.Contains(t, one, "resilience.throttle.wait.duration{key=a.example,name=tenants,outcome=admitted}")
	require.Contains(t, one, "resilience.throttle.wait.duration{name=tenants,outcome=admitted}")
}

func TestPoliciesChangeDuringCollections(t *testing.T) {
	s := newSDK(t)
	reg := s.observe(t, breaker.New(breaker.Config{Name: "first"}))
	stop := make(chan struct{})
	changed := make(chan struct{})
	go func() {
		defer close(changed)
		for {
			for _, p := range everyKind() {
				reg.MustAdd(p)
				defer reg.Remove(p)
			}
			reg.MustAdd(new(custom))
			select {
			case <-stop:
				return
			default:
			}
			for e := range reg.All() {
				reg.Remove(e.Policy)
			}
		}
	}()
	for range 20 {
		s.values(t)
	}
	close(stop)
	<-changed
}
