package policy_test

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/policy"
)

type state string

type level int

func (l level) String() string { return "level " + string(rune('0'+l)) }

type common struct {
	Limit int `gauge:"limit"`
}

type stats struct {
	Admitted int64 `counter:"calls{outcome=admitted}"`
	common
	Refusals map[state]int64           `counter:"calls{outcome=refused,reason=*}"`
	Nested   map[state]map[level]int   `gauge:"queued{reason=*,level=*}"`
	Queued   []uint8                   `gauge:"queued{level=*}"`
	WaitTime time.Duration             `counter:"wait.time_seconds"`
	Longest  map[state]time.Duration   `gauge:"longest{of=*}_seconds"`
	Share    float32                   `gauge:"share_ratio"`
	Up       bool                      `gauge:"up"`
	State    state                     `gauge:"state{kind=a,state=closed|half_open}"`
	States   map[string]state          `gauge:"states{key=*,state=on|off}"`
	Later    *int                      `gauge:"later"`
	Now      *int                      `gauge:"now"`
	Err      error                     // has no tag
	LastCall map[string]map[int]string // has no tag either
}

func TestMetricsFollowTheTags(t *testing.T) {
	seven := 7
	s := stats{
		Admitted: 3,
		common:   common{Limit: 4},
		Refusals: map[state]int64{"queue_full": 2, "full": 1},
		Nested:   map[state]map[level]int{"x": {1: 5}},
		Queued:   []uint8{8, 9},
		WaitTime: 1500 * time.Millisecond,
		Longest:  map[state]time.Duration{"x": time.Minute},
		Share:    0.5,
		Up:       true,
		State:    "half_open",
		States:   map[string]state{"k": "on"},
		Now:      &seven,
	}
	want := []policy.Metric{
		{"gate.calls{outcome=admitted}", true, 3},
		{"gate.limit", false, 4},
		{"gate.calls{outcome=refused,reason=full}", true, 1},
		{"gate.calls{outcome=refused,reason=queue_full}", true, 2},
		{"gate.queued{reason=x,level=level 1}", false, 5},
		{"gate.queued{level=0}", false, 8},
		{"gate.queued{level=1}", false, 9},
		{"gate.wait.time_seconds", true, 1.5},
		{"gate.longest{of=x}_seconds", false, 60},
		{"gate.share_ratio", false, 0.5},
		{"gate.up", false, 1},
		{"gate.state{kind=a,state=closed}", false, 0},
		{"gate.state{kind=a,state=half_open}", false, 1},
		{"gate.states{key=k,state=on}", false, 1},
		{"gate.states{key=k,state=off}", false, 0},
		{"gate.now", false, 7},
	}
	for range 2 { // the second call finds the tags in the cache
		require.Equal(t, want, policy.Metrics("gate", s))
		require.Equal(t, want, policy.Metrics("gate", &s))
	}
	require.Equal(t, "other.calls{outcome=admitted}", policy.Metrics("other", s)[0].Name, "cached by kind")
	require.Empty(t, policy.Metrics("gate", struct{ N int }{1}))
}

func TestMetricsIncludeEmbeddedPointers(t *testing.T) {
	type Common struct {
		N int `gauge:"n"`
	}
	type stats struct {
		*Common
		M int `gauge:"m"`
	}
	require.Equal(t, []policy.Metric{{"x.m", false, 2}}, policy.Metrics("x", stats{M: 2}))
	require.Equal(t, []policy.Metric{{"x.n", false, 1}, {"x.m", false, 2}},
		policy.Metrics("x", stats{Common: &Common{1}, M: 2}))
}

func TestMetricsPanicOnWrongTags(t *testing.T) {
	for text, stats := range map[string]any{
		"not a struct":          7,
		"which is not a struct": (*stats)(nil),
		"cannot be a metric": struct {
			N struct{} `gauge:"n"`
		}{},
		"cannot be a metric: its type": struct {
			N []error `counter:"n{i=*}"`
		}{},
		"n cannot be": struct {
			n int `gauge:"n"`
		}{},
		"as a counter and as a gauge": struct {
			N int `gauge:"n" counter:"n"`
		}{},
		"lists no values": struct {
			N string `gauge:"n"`
		}{},
		"N lists no values": struct {
			N string `gauge:"n{state=a"`
		}{},
	} {
		func() {
			defer func() { require.Contains(t, recover(), text) }()
			policy.Metrics("x", stats)
		}()
	}
}

func TestMetricParse(t *testing.T) {
	for name, want := range map[string]struct {
		what, unit string
		attrs      []policy.Attr
	}{
		"breaker.calls{outcome=failure}": {"breaker.calls", "", []policy.Attr{{"outcome", "failure"}}},
		"bulkhead.wait.time_seconds":     {"bulkhead.wait.time", "s", nil},
		"breaker.failure_ratio":          {"breaker.failure", "1", nil},
		"x_seconds{a=b,c=d}":             {"x", "s", []policy.Attr{{"a", "b"}, {"c", "d"}}},
		"x{a=b,c}":                       {"x", "", []policy.Attr{{"a", "b,c"}}},
		"x{a=b=c}":                       {"x", "", []policy.Attr{{"a", "b=c"}}},
		"x{}":                            {"x", "", nil},
		"x":                              {"x", "", nil},
		"":                               {"", "", nil},
	} {
		what, unit, attrs := policy.Metric{Name: name}.Parse()
		require.Equal(t, want.what, what, name)
		require.Equal(t, want.unit, unit, name)
		require.Equal(t, want.attrs, attrs, name)
	}
}

func TestEventsConvertsEachEvent(t *testing.T) {
	var f func(context.Context, int)
	stopped := false
	observe := policy.Events(func(g func(context.Context, int)) func() {
		f = g
		return func() { stopped = true }
	}, func(n int) policy.Event { return policy.Event{Attrs: []slog.Attr{slog.Int("n", n)}} })

	type key struct{}
	var got []int64
	stop := observe(func(ctx context.Context, e policy.Event) {
		require.Equal(t, "v", ctx.Value(key{}))
		got = append(got, e.Attr("n").Int64())
	})
	ctx := context.WithValue(t.Context(), key{}, "v")
	f(ctx, 1)
	f(ctx, 2)
	stop()
	require.Equal(t, []int64{1, 2}, got)
	require.True(t, stopped)
}

func TestEventAttrOfAnUnknownKeyIsZero(t *testing.T) {
	e := policy.Event{Attrs: []slog.Attr{slog.Any("err", errors.New("x"))}}
	require.Equal(t, slog.Value{}, e.Attr("reason"))
}

func TestHealthStatusHasATextForEachValue(t *testing.T) {
	require.Equal(t, policy.Pass, policy.Health{}.Status)
	for status, text := range map[policy.HealthStatus]string{
		policy.Pass: "pass", policy.Warn: "warn", policy.Fail: "fail", -1: "pass", 3: "fail",
	} {
		require.Equal(t, text, status.String())
	}
}
