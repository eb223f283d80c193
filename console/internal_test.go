package console

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"math"
	"net/http"
	"net/url"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/policy"
	"github.com/go-resilience/resilience/registry"
	"github.com/go-resilience/resilience/saga"
)

func TestSagaView(t *testing.T) {
	now := time.Now()
	step := func(name string, status saga.StepStatus, err string) saga.StepState {
		return saga.StepState{Name: name, Status: status, Error: err}
	}
	steps := []saga.StepState{step("a", saga.StepDone, ""), step("b", saga.StepSkipped, ""), step("c", saga.StepIdle, "")}
	begun := func(status saga.StepStatus) []saga.StepState {
		return append(steps[:2:2], step("c", status, ""), step("d", status, ""))
	}
	undo := func(a, c saga.StepStatus) []saga.StepState {
		return []saga.StepState{step("a", a, "cannot undo"), step("b", saga.StepDone, "old"), step("c", c, "")}
	}
	for _, test := range []struct {
		in                saga.Instance
		step, error, tone string
		done, steps       int
	}{
		{saga.Instance{Status: saga.Running, Steps: steps}, "", "", "blue", 2, 3},
		{saga.Instance{Status: saga.Running, Steps: begun(saga.StepStarted)}, "c", "", "blue", 2, 4},
		{saga.Instance{Status: saga.Running, Steps: begun(saga.StepWaiting), Failures: 1, LastError: "last",
			Cause: "cause"}, "c", "last", "warn", 2, 4},
		{saga.Instance{Status: saga.Running, Step: "a", Steps: steps}, "a", "", "blue", 2, 3},
		{saga.Instance{Status: saga.Compensating, TurnedBack: true, Steps: begun(saga.StepUndoing), Cause: "cause"}, "c",
			"cause", "warn", 2, 4},
		{saga.Instance{Status: saga.Compensating, TurnedBack: true, Step: "c",
			Steps: undo(saga.StepUndoFailed, saga.StepIdle),
			Cause: "cause"}, "c", "cause", "warn", 1, 3},
		{saga.Instance{Status: saga.Completed, Steps: steps, Failures: 1}, "", "", "ok", 2, 3},
		{saga.Instance{Status: saga.Compensated, Failures: 1}, "", "", "idle", 0, 0},
		{saga.Instance{Status: saga.Abandoned}, "", "", "idle", 0, 0},
		{saga.Instance{Status: saga.Stuck, Step: "b", Steps: undo(saga.StepUndoFailed, saga.StepIdle), Cause: "cause"},
			"b", "old", "fail", 1, 3},
		{saga.Instance{Status: saga.Stuck, Step: "c", Steps: undo(saga.StepDone, saga.StepFailed), LastError: "last"},
			"c", "", "fail", 2, 3},
		{saga.Instance{Status: saga.Stuck, TurnedBack: true, Step: "c", Steps: undo(saga.StepUndoFailed, saga.StepNoEffect),
			Cause: "cause"}, "a", "cannot undo", "fail", 1, 3},
		{saga.Instance{Status: saga.Stuck, TurnedBack: true, Step: "b", Steps: undo(saga.StepDone, saga.StepUndoFailed),
			Cause: "cause"}, "c", "", "fail", 2, 3},
		{saga.Instance{Status: saga.Stuck, TurnedBack: true, Step: "b", Steps: undo(saga.StepDone, saga.StepDone),
			Cause: "cause"}, "b", "cause", "fail", 3, 3},
	} {
		test.in.CreatedAt, test.in.Now = now, now.Add(1500*time.Millisecond)
		c := &Console{cfg: Config{Show: Show{Errors: true}}}
		v := c.sagaView(&test.in)
		require.Equal(t, []any{test.step, test.error, test.tone, test.done, test.steps, 1.5},
			[]any{v.Step, v.Error, string(v.Tone), v.StepsDone, v.Steps, v.Age}, "%+v", test.in)
		c.cfg.Show.Errors = false
		require.Equal(t, test.error != "", c.sagaView(&test.in).Error == "hidden")
	}
	for n, want := range map[int]string{9999: "9999", 10000: "10000+"} {
		var b strings.Builder
		require.NoError(t, pages.ExecuteTemplate(&b, "count", n))
		require.Equal(t, want, b.String())
	}
	asked, err := url.ParseQuery("runner=x&saga=order&status=stuck&text=a+b%0A&age=10m&after=x&done=retry")
	require.NoError(t, err)
	require.Equal(t, "after=x&age=10m&runner=r&saga=order&status=stuck&text=a+b", string(formOf(asked, "r").Query()))
}

func TestOperationLogValue(t *testing.T) {
	op := Operation{Action: Skip, Policy: "saga/worker", Key: "k", For: time.Second, Settings: json.RawMessage("{}"),
		ID: "1", Step: "s", Seq: 2, Note: "why", State: json.RawMessage("1"), Version: 3}
	want := []slog.Attr{slog.String("action", "skip"), slog.String("policy", "saga/worker"), slog.String("key", "k"),
		slog.Duration("for", time.Second),
		slog.String("settings", "{}"), slog.String("id", "1"), slog.String("step", "s"), slog.Int64("seq", 2),
		slog.String("note", "why"), slog.String("state", "1"), slog.Int("version", 3)}
	require.Equal(t, want, op.LogValue().Group())
	require.Equal(t, want[:2], Operation{Action: Skip, Policy: "saga/worker"}.LogValue().Group())
}

func TestCacheKeys(t *testing.T) {
	for f, want := range map[any]bool{
		new(func(context.Context, ...int) error): true, new(func(context.Context, int) error): false,
		new(func(int, ...int) error):                  false,
		new(func(context.Context, int, ...int) error): false, new(func(...context.Context) error): false,
		new(func(context.Context, ...int)):     false,
		new(func(context.Context, ...int) int): false, new(func(context.Context, ...int) (error, error)): false,
	} {
		require.Equal(t, want, byKeys(reflect.Zero(reflect.TypeOf(f).Elem())), "%T", f)
	}
	require.False(t, byKeys(reflect.Value{}))
	type name string
	for _, c := range []struct {
		of   any
		text string
		want any
	}{
		{"", "a b", "a b"}, {name(""), "7", name("7")}, {0, "7", 7},
		{time.Time{}, "2026-05-01T12:00:00Z", time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)},
		{[2]int{}, "[1,2]", [2]int{1, 2}}, {0, "x", `key: is "x": must be JSON of type int`}, {"", "", "key: is empty"},
		{time.Time{}, "soon", `key: parsing time "soon" as "2006-01-02T15:04:05Z07:00": cannot parse "soon" as "2006"`},
	} {
		key, err := keyOf(reflect.TypeOf(c.of), c.text)
		if err != nil {
			require.EqualError(t, err, fmt.Sprint(c.want))
			continue
		}
		require.Equal(t, c.want, key.Interface())
	}
}

func TestSeries(t *testing.T) {
	for v, want := range map[float64]float64{
		0: 0, 1: 1, 0.123456: 0.1235, 12345.6: 12350, -98765: -98760, 1234: 1234, 1e9 + 1: 1e9, 1234.4: 1234, 9999.6: 10000,
		math.Inf(1): 0, math.Inf(-1): 0,
	} {
		require.Equal(t, want, round(v), v)
	}
	require.Zero(t, round(math.NaN()))
	add := func(sr *series, values ...float64) *series {
		for i, v := range values {
			if i > 0 {
				sr.add(v, i)
				continue
			}
			if sr.Value = v; !sr.Counter {
				sr.flat = float32(v)
			}
		}
		return sr
	}
	counter := func() *series { return &series{Metric: policy.Metric{Counter: true}} }
	for name, test := range map[string]struct {
		sr      *series
		last, n int
		total   float64
		samples int
	}{
		"a counter's first sample is no growth": {add(counter(), 5, 8, 9), 2, 3, 4, 2},
		"other samples count":                   {add(counter(), 5, 8, 9), 2, 2, 4, 2},
		"the last of them":                      {add(counter(), 5, 8, 9), 2, 1, 1, 1},
		"a gauge's first sample counts":         {add(&series{}, 3, 3, 3), 2, 3, 9, 3},
		"a gauge that changes":                  {add(&series{}, 3, 4, 3), 2, 2, 7, 2},
		"a gauge that has gone":                 {add(&series{}, 3, 3), 3, 4, 6, 4},
		"nothing yet":                           {add(counter(), 5), 0, 1, 0, 0},
	} {
		total, samples := test.sr.sum(test.last, test.n)
		require.Equal(t, []any{test.total, test.samples}, []any{total, samples}, name)
	}
	m := metricsNamed("f", "a", "c")[0]
	for name, admitted := range map[string]bool{"f{outcome=a}": true, "f{outcome=b}": false, "f{x=a}": false,
		"g{outcome=a}": false} {
		require.Equal(t, admitted, m.admits(newSeries(policy.Metric{Name: name}, 0)), name)
	}
}

func TestJudgeStatus(t *testing.T) {
	r := rulesOf("meter")
	r.calls, r.failed, r.refused = metricsNamed("calls"), metricsNamed("failed"), metricsNamed("refused")
	count := func(what string, growth float64) *series {
		sr := &series{Metric: policy.Metric{Counter: true}, name: what}
		sr.add(growth, 1)
		return sr
	}
	for _, c := range []struct {
		health                 policy.Health
		calls, failed, refused float64
		tone                   tone
		state, detail          string
	}{
		{policy.Health{}, 0, 0, 0, well, "healthy", ""},
		{policy.Health{}, 100, 4, 0, well, "healthy", ""},
		{policy.Health{}, 100, 5, 0, warn, "failing", ""},
		{policy.Health{}, 100, 5, 1, warn, "refusing", ""},
		{policy.Health{}, 0, 5, 0, well, "healthy", ""},
		{policy.Health{State: "half_open"}, 0, 0, 0, well, "half_open", ""},
		{policy.Health{State: "half_open"}, 100, 5, 0, warn, "half_open", ""},
		{policy.Health{Status: policy.Warn, Err: errOperator}, 100, 50, 1, warn, "degraded", ""},
		{policy.Health{Status: policy.Fail, Err: errOperator}, 0, 0, 0, fail, "failing", ""},
		{policy.Health{Status: policy.Warn, State: "full", Detail: "all"}, 0, 0, 0, warn, "full", "all"},
		{policy.Health{Status: policy.Fail, State: "open"}, 0, 0, 0, fail, "open", ""},
	} {
		tr := &track{rules: r, health: c.health,
			series: []*series{count("calls", c.calls), count("failed", c.failed), count("refused", c.refused)}}
		s := tr.judge(1)
		require.Equal(t, []any{c.tone, c.state, c.detail}, []any{s.tone, s.state, s.detail}, "%+v", c)
		require.Equal(t, c.health.Err, s.err)
	}
	for want, s := range map[string]status{
		"8% failing":             {calls: 100, failed: 8, problem: "failing"},
		"3% refused":             {calls: 100, refused: 3, problem: "limiting"},
		"11% failing or refused": {calls: 100, failed: 8, refused: 3, problem: "refusing"}, "": {calls: 100, failed: 8},
	} {
		require.Equal(t, want, s.trouble())
	}
	for share, s := range map[float64]status{0: {failed: 1}, 0.5: {calls: 4, failed: 1, refused: 1},
		1: {calls: 1, failed: 2}} {
		require.Equal(t, share, s.share())
	}
	words := map[tone]string{fail: "broken", warn: "needs attention", well: "healthy", "blue": ""}
	for tone, want := range words {
		require.Equal(t, want, tone.Word())
	}
}

func TestVerdictNamesTheWorst(t *testing.T) {
	is := func(name string, tone tone, state string) *track {
		return &track{entry: registry.Entry{Description: policy.Description{Kind: "meter", Name: name}},
			status: status{tone: tone, state: state}}
	}
	a, b, c, d, e := is("a", warn, "full"), is("b", fail, "open"), is("c", warn, "giving_up"), is("d", warn, "full"),
		is("e", well, "healthy")
	for want, tracks := range map[string][]*track{
		"ok No policy is registered.":                       {},
		"ok The only policy is healthy.":                    {e},
		"ok All 2 policies are healthy.":                    {e, e},
		"warn The meter a is full.":                         {e, a},
		"fail The meter b is open and the meter a is full.": {a, e, b},
		"fail The meter b is open, the meter a is full, and one more policy needs attention.": {a, b, c},
		"fail The meter b is open, the meter a is full, and 2 more policies need attention.":  {a, b, c, d},
	} {
		tone, sentence := verdict(tracks)
		for _, p := range sentence {
			switch {
			case strings.HasPrefix(p.Text, "meter "):
				require.EqualValues(t, "policy?kind=meter&name="+p.Text[len("meter "):], p.Link)
			case strings.Contains(p.Text, " more "):
				require.EqualValues(t, "#"+c.anchor(), p.Link)
			default:
				require.Empty(t, p.Link)
			}
		}
		require.Equal(t, want, string(tone)+" "+textOf(sentence))
	}
	for _, t := range []*track{a, b, c, d, e} {
		t.rules, t.path = rulesOf("meter"), t.entry.Name
	}
	ill := is("e", fail, "open")
	ill.rules = rulesOf("breaker")
	require.Equal(t, []*track{b, ill, e, a, c}, inOrder([]*track{c, e, ill, b, a}),
		"a broken policy moves its whole group")
	require.Equal(t, []*track{b, ill, e, a, c}, inOrder([]*track{ill, c, b, a, e}))
	o, page := overview{}, &Console{sampler: sampler{tracks: []*track{a, b, a}}}
	page.cards(&o)
	var names []string
	for _, g := range o.Groups {
		names = append(names, fmt.Sprint(g.Name, len(g.Cards)))
	}
	require.Equal(t, []string{"b1", "a2"}, names)
}

func TestProgress(t *testing.T) {
	const done, skipped, idle = saga.StepDone, saga.StepSkipped, saga.StepIdle
	for _, c := range []struct {
		back  bool
		steps []saga.StepStatus
		want  string
	}{
		{false, []saga.StepStatus{done, skipped, saga.StepStarted, idle}, "2 of 4 done"},
		{false, []saga.StepStatus{saga.StepWaiting, idle}, "0 of 2 done"},
		{true, []saga.StepStatus{saga.StepUndone, saga.StepUndone, saga.StepUndone, saga.StepUndoFailed, idle, idle},
			"3 of 4 undone"},
		{true, []saga.StepStatus{done, saga.StepUndoing, saga.StepUndone, saga.StepNoEffect}, "1 of 3 undone"},
		{true, []saga.StepStatus{skipped, saga.StepUndone, saga.StepNoEffect}, "1 of 2 undone"},
		{true, []saga.StepStatus{saga.StepNoEffect, idle}, "nothing to undo"},
	} {
		in := &saga.Instance{TurnedBack: c.back}
		for _, s := range c.steps {
			in.Steps = append(in.Steps, saga.StepState{Status: s})
		}
		require.Equal(t, c.want, (&Console{}).sagaView(in).Progress())
	}
}

func TestGroupsOf(t *testing.T) {
	v := func(id, step, text string) sagaView { return sagaView{ID: id, Saga: "order", Step: step, Error: text} }
	groups := groupsOf([]sagaView{
		v("o-1", "ship", "no ship"),
		v("o-2", "charge", "bank: payment 4711 of o-2 failed with 503 after 2.0041s"),
		v("o-3", "charge", "bank: payment 4712 of o-3 failed with 503 after 2.0032s"),
		v("o-4", "charge", "bank: payment 4713 of o-4 failed with 400 after 2.0032s"),
		v("o-5", "ship", "bank: payment 4713 of o-5 failed with 503 after 2.0032s"),
		v("o-6", "charge", "hidden"),
	})
	var got []string
	for _, g := range groups {
		got = append(got, fmt.Sprint(g.Count, " ", g.Step, " ", g.Error))
		require.Len(t, g.Sagas, g.Count)
	}
	require.Equal(t, []string{
		"2 charge bank: payment 4711 of o-2 failed with 503 after 2.0041s",
		"1 ship no ship",
		"1 charge bank: payment 4713 of o-4 failed with 400 after 2.0032s",
		"1 ship bank: payment 4713 of o-5 failed with 503 after 2.0032s",
		"1 charge hidden",
	}, got)
}

func TestTimeLimits(t *testing.T) {
	now := time.Now()
	for _, c := range []struct{ writeTimeout, deadline, lastStart, end time.Duration }{
		{0, 0, 0, 0},
		{10 * time.Second, 0, 6 * time.Second, 8 * time.Second},
		{0, 10 * time.Second, 6 * time.Second, 8 * time.Second},
		{10 * time.Second, 20 * time.Second, 6 * time.Second, 8 * time.Second},
		{20 * time.Second, 10 * time.Second, 6 * time.Second, 8 * time.Second},
	} {
		ctx := context.WithValue(t.Context(), http.ServerContextKey, &http.Server{WriteTimeout: c.writeTimeout})
		if c.deadline > 0 {
			var cancel func()
			ctx, cancel = context.WithDeadline(ctx, now.Add(c.deadline))
			defer cancel()
		}
		r, _ := http.NewRequestWithContext(ctx, "POST", "/act", nil)
		lastStart, end := timeLimits(now, r)
		if c.end == 0 {
			require.True(t, lastStart.IsZero() && end.IsZero())
			continue
		}
		require.Equal(t, []time.Duration{c.lastStart, c.end}, []time.Duration{lastStart.Sub(now), end.Sub(now)}, "%+v", c)
	}
}
