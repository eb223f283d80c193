package console

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"math"
	"reflect"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/lease"
	"github.com/go-resilience/resilience/registry"
	"github.com/go-resilience/resilience/saga"
)

func TestGraphOfSteps(t *testing.T) {
	unit := func(name string, after ...string) unitView {
		return unitView{Name: name, Status: saga.StepIdle, Tone: "idle", After: after}
	}
	pivot := unit("c", "a", "b", "gone")
	pivot.Pivot = true
	at := func(x, y int, name string) box {
		return box{X: x, Y: y, W: 150, H: 48, Name: name, Title: name, State: "idle", Tone: "idle"}
	}
	c := at(206, 12, "c")
	c.Pivot = true
	require.Equal(t, graph{
		Width: 390, Height: 136, PivotAt: 378, // beyond which there is a margin
		Boxes: []box{c, at(12, 12, "a"), at(12, 76, "b")},
		Lines: []edge{
			{"M162 36H206", "idle"}, {"M162 100H162C184 100 184 36 206 36", "idle"},
		},
	}, newGraph([]unitView{pivot, unit("a"), unit("b")}), "a step stands right of those it comes after, in whatever order they are")

	g := newGraph([]unitView{unit("a"), unit("b", "a"), unit("c", "b"), unit("d", "a", "c")})
	require.Equal(t, []box{at(12, 12, "a"), at(206, 12, "b"), at(400, 12, "c"), at(594, 12, "d")}, g.Boxes)
	require.Equal(t, []int{756, 72, 0}, []int{g.Width, g.Height, g.PivotAt})
	pivot.After = nil
	g = newGraph([]unitView{pivot, unit("d", "c")})
	require.Equal(t, []int{184, 368}, []int{g.PivotAt, g.Width}, "the last step ends the graph")
	require.Equal(t, "seventeen letters", clip("seventeen letters"))
	require.Equal(t, "eighteen letters…", clip("eighteen letters,,"))
}

func TestTimelineOfALog(t *testing.T) {
	t0 := time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)
	s := func(n int) time.Time { return t0.Add(time.Duration(n) * time.Second) }
	units := []unitView{{Name: "a"}, {Name: "unbegun"}, {Name: "b"}}
	log := []entryView{
		{Seq: 1, Kind: "created", At: s(0)},
		{Seq: 2, Kind: "done", Step: "b", Op: "do", Attempt: 1, At: s(1)},
		{Seq: 3, Kind: "failed", Step: "a", Op: "do", Attempt: 1, At: s(2)},
		{Seq: 4, Kind: "undone", Step: "b", Op: "undo", Attempt: 1, At: s(3)},
		{Seq: 5, Kind: "done", Step: "a", Op: "do", Attempt: 2, At: s(4)},
		{Seq: 6, Kind: "skipped", Step: "a", At: s(4)},
	}
	in := &saga.Instance{Status: saga.Running, CreatedAt: t0, UpdatedAt: s(4), Now: s(8)}
	dot := func(x, y int, text string, tone tone) mark { return mark{x, y, text, tone} }
	tl := newTimeline(units, log, in)
	require.Equal(t, []lane{
		{Name: "saga", Title: "the saga itself", Y: 21, Marks: []mark{dot(150, 21, "created after 0 s", "blue")}},
		{Name: "a", Title: "a", Y: 47,
			Bars:  []bar{{250, 43, 100, fail}, {350, 43, 200, well}, {550, 43, 1, well}},
			Marks: []mark{dot(350, 47, "do 1: failed after 2 s", fail), dot(550, 47, "do 2: done after 4 s", well), dot(550, 47, "skipped after 4 s", well)}},
		{Name: "b", Title: "b", Y: 73,
			Bars:  []bar{{150, 69, 100, well}, {250, 69, 200, "idle"}},
			Marks: []mark{dot(250, 73, "do 1: done after 1 s", well), dot(450, 73, "undo 1: undone after 3 s", "idle")}},
	}, tl.Rows, "an attempt begins when the one before has ended: that of its step, or of any")
	require.Equal(t, []int{970, 110}, []int{tl.Width, tl.Height})
	require.Equal(t, dot(950, 102, "+8 s", ""), tl.Ticks[len(tl.Ticks)-1])
	last := func(tl timeline) string { return fmt.Sprint(tl.Ticks[0].Text, " ", tl.Ticks[len(tl.Ticks)-1].Text) }
	for status, want := range map[saga.Status]string{saga.Running: "+0 s +8 s", saga.Stuck: "+0 s +4 s", saga.Completed: "+0 s +4 s"} {
		in.Status = status
		require.Equal(t, want, last(newTimeline(units, log, in)), status)
	}
	in.Status = saga.Stuck
	require.Equal(t, "+2000 ms +4000 ms", last(newTimeline(units, log[2:], in)), "the entries before are not shown")
	require.Equal(t, "+0 s +4 s", last(newTimeline(units, nil, in)))
	early := []entryView{{Seq: 1, Kind: "created", At: s(1)}} // of another clock than CreatedAt
	require.Equal(t, "+0 s +4 s", last(newTimeline(units, early, in)), "the first entry is no start of its own")
}

func TestASagaInAList(t *testing.T) {
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
		{saga.Instance{Status: saga.Running, Steps: begun(saga.StepWaiting), Failures: 1, LastError: "last", Cause: "cause"}, "c", "last", "warn", 2, 4},
		{saga.Instance{Status: saga.Running, Step: "a", Steps: steps}, "a", "", "blue", 2, 3},
		{saga.Instance{Status: saga.Compensating, Back: true, Steps: begun(saga.StepUndoing), Cause: "cause"}, "c", "cause", "warn", 2, 4},
		{saga.Instance{Status: saga.Compensating, Back: true, Step: "c", Steps: undo(saga.StepUndoFailed, saga.StepIdle), Cause: "cause"}, "c", "cause", "warn", 1, 3},
		{saga.Instance{Status: saga.Completed, Steps: steps, Failures: 1}, "", "", "ok", 2, 3},
		{saga.Instance{Status: saga.Compensated, Failures: 1}, "", "", "idle", 0, 0},
		{saga.Instance{Status: saga.Abandoned}, "", "", "idle", 0, 0},
		{saga.Instance{Status: saga.Stuck, Step: "b", Steps: undo(saga.StepUndoFailed, saga.StepIdle), Cause: "cause"}, "b", "old", "fail", 1, 3},
		{saga.Instance{Status: saga.Stuck, Step: "c", Steps: undo(saga.StepDone, saga.StepFailed), LastError: "last"}, "c", "", "fail", 2, 3},
		{saga.Instance{Status: saga.Stuck, Back: true, Step: "c", Steps: undo(saga.StepUndoFailed, saga.StepNoEffect), Cause: "cause"}, "a", "cannot undo", "fail", 1, 3},
		{saga.Instance{Status: saga.Stuck, Back: true, Step: "b", Steps: undo(saga.StepDone, saga.StepUndoFailed), Cause: "cause"}, "c", "", "fail", 2, 3},
		{saga.Instance{Status: saga.Stuck, Back: true, Step: "b", Steps: undo(saga.StepDone, saga.StepDone), Cause: "cause"}, "b", "cause", "fail", 3, 3},
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
		require.Equal(t, want, sagaRow{}.Count(n))
	}
	for age, want := range map[string]int{"": 5, "10m": 5, "3h": 6} {
		ages := sagasPage{Form: sagaForm{Age: age}}.Ages()
		require.Len(t, ages, want)
		if age != "" {
			require.Contains(t, ages, age)
		}
	}
	form := sagaForm{Saga: "order", Status: "stuck", ID: "a b", Age: "10m", After: "x"}
	require.Equal(t, "after=x&age=10m&runner=r&saga=order&status=stuck&text=a+b", form.values("r").Encode())
	require.Equal(t, form, sagaFormOf(form.values("r")))
	require.Empty(t, sagaForm{}.values(""))
}

func TestAnOperationInALog(t *testing.T) {
	op := Operation{Action: Skip, Policy: "saga/worker", Key: "k", For: time.Second, Settings: json.RawMessage("{}"), ID: "1", Step: "s", Seq: 2, Note: "why"}
	want := []slog.Attr{slog.String("action", "skip"), slog.String("policy", "saga/worker"), slog.String("key", "k"), slog.Duration("for", time.Second),
		slog.String("settings", "{}"), slog.String("id", "1"), slog.String("step", "s"), slog.Int64("seq", 2), slog.String("note", "why")}
	require.Equal(t, want, op.LogValue().Group())
	require.Equal(t, want[:2], Operation{Action: Skip, Policy: "saga/worker"}.LogValue().Group())
}

func TestKeysOfACache(t *testing.T) {
	for f, want := range map[any]bool{
		new(func(context.Context, ...int) error): true, new(func(context.Context, int) error): false, new(func(int, ...int) error): false,
		new(func(context.Context, int, ...int) error): false, new(func(...context.Context) error): false, new(func(context.Context, ...int)): false,
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
		{"", "a b", "a b"}, {name(""), "7", name("7")}, {0, "7", 7}, {time.Time{}, "2026-05-01T12:00:00Z", time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)},
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

// A told cache notes what it is told.
type told []string

func (c *told) InvalidateAll(context.Context) error { *c = append(*c, "all"); return nil }
func (c *told) Invalidate(_ context.Context, keys ...string) error {
	*c = append(*c, fmt.Sprint("invalidate ", keys))
	return nil
}
func (c *told) Expire(_ context.Context, keys ...string) error {
	*c = append(*c, fmt.Sprint("expire ", keys))
	return nil
}
func (c *told) Name() string { return "told" }

func TestWhatACacheIsTold(t *testing.T) {
	var all told
	c, ok := cacheOf(&all)
	require.True(t, ok)
	for _, action := range []Action{Invalidate, Expire, InvalidateAll} {
		require.NoError(t, c.do(t.Context(), Operation{Action: action, Key: "k"}))
	}
	require.Equal(t, told{"invalidate [k]", "expire [k]", "all"}, all)
}

func TestSettingsOfAForm(t *testing.T) {
	all := fields("", []byte(`{"Name": "a\"b", "N": 1, "In": {"Min": 2, "Deep": {"D": "1s"}}, "Last": [1]}`))
	require.Equal(t, []settingField{{"Name", `a"b`, true}, {"N", "1", false}, {"In.Min", "2", false}, {"In.Deep.D", "1s", true}, {"Last", "[1]", false}}, all)
	require.Nil(t, fields("", nil))
	was := map[string]string{"Name": `a"b`, "N": "1", "In.Min": "2", "In.Deep.D": "1s"}
	for _, c := range []struct {
		is          map[string]string
		want, error string
	}{
		{map[string]string{"Name": "x", "N": "1", "In.Min": "3", "In.Deep.D": "2s"}, `{"Name":"x","In":{"Min":3,"Deep":{"D":"2s"}}}`, ""},
		{map[string]string{"Last": "[2]"}, `{}`, ""}, // which the page did not show
		{was, `{}`, ""},
		{map[string]string{"N": "x", "In.Min": "-"}, "", "N: is \"x\": must be like 1\nIn.Min: is \"-\": must be like 2"},
	} {
		of := func(m map[string]string) func(string) (string, bool) {
			return func(path string) (string, bool) { v, ok := m[path]; return v, ok }
		}
		got, err := changes(all, of(was), of(c.is))
		if c.error != "" {
			require.EqualError(t, err, c.error)
			continue
		}
		require.NoError(t, err)
		require.JSONEq(t, c.want, string(got))
	}
}

func TestSeriesInNumbers(t *testing.T) {
	for v, want := range map[float64]float64{
		0: 0, 1: 1, 0.123456: 0.1235, 12345.6: 12350, -98765: -98770, 1234: 1234, 1e9 + 1: 1e9, 1234.4: 1234, 9999.6: 10000,
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
	counter := func() *series { return &series{Figure: registry.Figure{Counter: true}} }
	for name, test := range map[string]struct {
		sr      *series
		last, n int
		total   float64
		samples int
	}{
		"a counter's first sample is no growth": {add(counter(), 5, 8, 9), 2, 3, 4, 2},
		"but it has any other":                  {add(counter(), 5, 8, 9), 2, 2, 4, 2},
		"the last of them":                      {add(counter(), 5, 8, 9), 2, 1, 1, 1},
		"a gauge's first sample counts":         {add(&series{}, 3, 3, 3), 2, 3, 9, 3},
		"a gauge that changes":                  {add(&series{}, 3, 4, 3), 2, 2, 7, 2},
		"a gauge that has gone":                 {add(&series{}, 3, 3), 3, 4, 6, 4},
		"nothing yet":                           {add(counter(), 5), 0, 1, 0, 0},
	} {
		total, samples := test.sr.sum(test.last, test.n)
		require.Equal(t, []any{test.total, test.samples}, []any{total, samples}, name)
	}
	m := with("f", "k", "a", "c")[0]
	for name, admitted := range map[string]bool{"f{k=a}": true, "f{k=b}": false, "f{x=a}": false, "g{k=a}": false} {
		require.Equal(t, admitted, m.admits(newSeries(registry.Figure{Name: name}, 0)), name)
	}
}

// An ill is an error of a policy's method Health.
type ill struct {
	state, detail string
	fails         bool
}

func (e ill) Error() string        { return e.state }
func (e ill) HealthState() string  { return e.state }
func (e ill) HealthDetail() string { return e.detail }
func (e ill) Failed() bool         { return e.fails }

func TestAStatusIsJudged(t *testing.T) {
	r := rulesOf("meter")
	count := func(growth float64) []*series {
		sr := &series{Figure: registry.Figure{Counter: true}}
		sr.add(growth, 1)
		return []*series{sr}
	}
	held := &lease.State{Holder: "me"}
	for _, c := range []struct {
		health                 error
		calls, failed, refused float64
		held                   *lease.State
		tone                   tone
		state, detail          string
	}{
		{nil, 0, 0, 0, nil, well, "running", ""},
		{nil, 100, 4, 0, nil, well, "running", ""},
		{nil, 100, 5, 0, nil, warn, "failing", ""},
		{nil, 100, 5, 1, nil, warn, "refusing", ""},
		{nil, 0, 5, 0, nil, well, "running", ""},
		{errOperator, 100, 50, 1, nil, warn, "ailing", ""},
		{ill{"full", "all", false}, 0, 0, 0, held, warn, "full", "all"},
		{ill{"open", "", true}, 0, 0, 0, held, fail, "open", "held by me"},
		{nil, 0, 0, 0, &lease.State{}, well, "running", ""},
	} {
		tr := &track{rules: r, health: c.health, held: c.held, traffic: traffic{count(c.calls), count(c.failed), count(c.refused)}}
		s := tr.judge(1)
		require.Equal(t, []any{c.tone, c.state, c.detail}, []any{s.tone, s.state, s.detail}, "%+v", c)
		require.Equal(t, c.health == errOperator, s.err == errOperator)
	}
	for share, s := range map[float64]status{0: {failed: 1}, 0.5: {calls: 4, failed: 1, refused: 1}, 1: {calls: 1, failed: 2}} {
		require.Equal(t, share, s.share())
	}
	words := map[tone]string{fail: "broken", warn: "needs attention", well: "well", "blue": ""}
	for tone, want := range words {
		require.Equal(t, want, tone.Word())
	}
}

func TestTheVerdictNamesTheWorst(t *testing.T) {
	is := func(name string, tone tone, state string) *track {
		return &track{entry: registry.Entry{Kind: "meter", Name: name}, status: status{tone: tone, state: state}}
	}
	a, b, c, d, e := is("a", warn, "full"), is("b", fail, "open"), is("c", warn, "giving up"), is("d", warn, "full"), is("e", well, "running")
	for want, tracks := range map[string][]*track{
		"ok No policy is registered.":                       {},
		"ok The only policy is well.":                       {e},
		"ok All 2 policies are well.":                       {e, e},
		"warn The meter a is full.":                         {e, a},
		"fail The meter b is open and the meter a is full.": {a, e, b},
		"fail The meter b is open, the meter a is full, and one more policy needs attention.": {a, b, c},
		"fail The meter b is open, the meter a is full, and 2 more policies need attention.":  {a, b, c, d},
	} {
		tone, sentence := verdict(tracks)
		require.Equal(t, want, string(tone)+" "+sentence)
	}
	for _, t := range []*track{a, b, c, d, e} {
		t.rules, t.path = rulesOf("meter"), t.entry.Name
	}
	ill := is("e", fail, "open")
	ill.rules = rulesOf("breaker")
	require.Equal(t, []*track{b, ill, e, a, c}, inOrder([]*track{c, e, ill, b, a}), "what is broken draws those of its name with it")
	require.Equal(t, []*track{b, ill, e, a, c}, inOrder([]*track{ill, c, b, a, e}))
	groups := groups([]policyCard{{Name: "a", Tone: warn}, {Name: "a", Tone: well}, {Name: "b", Tone: well}, {Name: "c", Tone: well}, {Name: "c", Tone: fail}})
	for i, want := range []tone{warn, well, fail} {
		require.Equal(t, want, groups[i].Tone)
	}
}

func TestMembersOfAGroup(t *testing.T) {
	c := &Console{cfg: Config{Show: Show{Errors: true, Keys: true}}}
	b := breaker.New(breaker.Config{Name: "b", Failures: 1})
	is := func(m memberView) string { return fmt.Sprint(m.Key, " ", m.State, " ", m.Tone, " ", m.Error) }
	view := func() string { return is(c.member(registry.Member{Key: "a", Policy: b})) }
	require.Equal(t, "a closed ok ", view())
	_ = b.Do(t.Context(), func(context.Context) error { return errOperator })
	require.Equal(t, "a open fail "+errOperator.Error(), view())
	b.ForceOpen(errClosed)
	require.Equal(t, "a forced open fail "+errClosed.Error(), view())
	b.Disable()
	require.Contains(t, view(), "a disabled warn")
	slots := bulkhead.New(bulkhead.Config{Name: "s", Limit: 2})
	want := []string{"a 0 of 2 in flight ok ", "a 1 of 2 in flight ok ", "a 2 of 2 in flight warn "}
	var next func(context.Context) error
	next = func(ctx context.Context) error {
		require.Equal(t, want[0], is(c.member(registry.Member{Key: "a", Policy: slots})))
		if want = want[1:]; len(want) == 0 {
			return nil
		}
		return slots.Do(ctx, next)
	}
	require.NoError(t, next(t.Context()))
}
