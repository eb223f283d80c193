package saga

import (
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	store "github.com/go-resilience/resilience/saga/sagastore"
)

const (
	idle       = StepIdle
	waiting    = StepWaiting
	started    = StepStarted
	done       = StepDone
	without    = StepNoEffect
	failed     = StepFailed
	undoing    = StepUndoing
	undone     = StepUndone
	undoFailed = StepUndoFailed
	skipped    = StepSkipped
)

var now = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func doable(name string) shape {
	backoff := func(attempt int) time.Duration { return time.Duration(attempt) * time.Second }
	return shape{Name: name, Do: true, Undo: true, Backoff: backoff}
}

func with(s shape, change func(*shape)) shape {
	change(&s)
	return s
}

func machineOf(t *testing.T, statuses []StepStatus, steps ...shape) *machine {
	p, err := newPlan(&shapes{Name: "trip", Steps: steps})
	require.NoError(t, err)
	m := newMachine(p)
	for i, s := range statuses {
		m.Steps[i].Status = s
	}
	return m
}

// TestRelease has a row for each reason to park a saga or not.
func TestRelease(t *testing.T) {
	delayed := with(doable("a"), func(s *shape) { s.Delay = time.Hour })
	signaled := with(doable("a"), func(s *shape) { s.Await = "paid" })
	brief := with(signaled, func(s *shape) { s.AwaitFor = time.Second })
	child := shape{Name: "a", Child: true, ChildOf: true}
	const waits, stops = false, true
	for name, c := range map[string]struct {
		step    shape
		before  func(*machine)
		stops   bool
		release bool
		wakeIn  time.Duration
		kind    store.EventKind
	}{
		"an attempt may start":    {doable("a"), func(*machine) {}, waits, false, 0, ""},
		"so it may, but not here": {doable("a"), func(*machine) {}, stops, true, 0, EventReleased},
		"an attempt is running":   {doable("a"), func(m *machine) { m.begin(0) }, stops, false, 0, ""},
		"it has ended": {doable("a"), func(m *machine) { m.Steps[0].Status = done; m.advance(now) }, waits, true,
			0, ""},
		"a short wait": {doable("a"), func(m *machine) { m.Steps[0].NotBefore = now.Add(time.Minute) }, waits,
			false, 0, ""},
		"a longer one": {doable("a"), func(m *machine) { m.Steps[0].NotBefore = now.Add(time.Minute + 1) }, waits,
			true, time.Minute + 1, EventParked},
		"a short wait elsewhere": {doable("a"), func(m *machine) { m.Steps[0].NotBefore = now.Add(time.Minute) }, stops,
			true, time.Minute, EventReleased},
		"a delay":           {delayed, func(*machine) {}, waits, true, time.Hour, EventParked},
		"a read of a child": {child, func(m *machine) { m.begin(0); m.wait(0, 1, now, now) }, waits, false, 0, ""},
		"a child": {child, func(m *machine) { m.begin(0); m.wait(0, 1, now, now.Add(1)) }, waits, true,
			3 * time.Minute, EventParked},
		"a signal":              {signaled, func(*machine) {}, waits, true, 6 * time.Hour, EventParked},
		"a signal for a moment": {brief, func(*machine) {}, waits, true, time.Second, EventParked},
	} {
		t.Run(name, func(t *testing.T) {
			m := machineOf(t, nil, c.step)
			m.advance(now)
			c.before(m)
			e, wakeIn, ok := m.release(now, c.stops, 3*time.Minute)
			require.Equal(t, c.release, ok)
			if ok {
				require.Equal(t, c.wakeIn, wakeIn)
				require.Equal(t, c.kind, e.Kind)
			}
		})
	}
}

// TestNoDoStartsWhileCompensating, even for steps that ran in parallel and whose turn to be undone has not come.
func TestNoDoStartsWhileCompensating(t *testing.T) {
	m := machineOf(t, []StepStatus{started, started}, doable("a"), doable("b"))
	m.doubt(true)
	require.NoError(t, m.compensate("ill"))
	m.advance(now)
	require.Equal(t, []StepStatus{started, undoing}, []StepStatus{m.Steps[0].Status, m.Steps[1].Status})
	require.Equal(t, 1, m.next(0, now))
}

func TestJudge(t *testing.T) {
	type are = []store.Status
	for name, c := range map[string]struct {
		children are
		canUndo  bool
		verdict  verdict
		failed   int
	}{
		"none":                            {nil, true, childrenDone, -1},
		"all completed":                   {are{store.Completed, store.Completed}, true, childrenDone, -1},
		"one runs":                        {are{store.Completed, store.Running}, true, childrenWait, -1},
		"one is stuck":                    {are{store.Completed, store.Stuck}, true, childrenWait, -1},
		"one failed, one runs":            {are{store.Running, store.Compensated}, true, childrenFailed, 1},
		"the same, without an undo":       {are{store.Running, store.Compensated}, false, childrenWait, 1},
		"one failed, one completed":       {are{store.Compensated, store.Completed}, false, childrenFailed, 0},
		"all compensated":                 {are{store.Compensated, store.Compensated}, false, childrenDeclined, 0},
		"all compensated, with an undo":   {are{store.Compensated, store.Compensated}, true, childrenFailed, 0},
		"one abandoned, one compensated":  {are{store.Abandoned, store.Compensated}, false, childrenFailed, 0},
		"one turns back after completion": {are{store.Completed, store.Compensating}, true, childrenWait, -1},
	} {
		t.Run(name, func(t *testing.T) {
			var children []childState
			for _, s := range c.children {
				children = append(children, childState{ChildRecord: store.ChildRecord{Status: s}})
			}
			verdict, failed := judge(children, c.canUndo)
			require.Equal(t, c.verdict, verdict)
			require.Equal(t, c.failed, failed)
		})
	}
}

func TestStorableText(t *testing.T) {
	long := strings.Repeat("a", 4000)
	for text, want := range map[string]string{
		"":                    "",
		"full":                "full",
		"\x00a\x00":           "\uFFFDa\uFFFD",
		"a\xff":               "a\uFFFD",
		long:                  long,
		long + "b":            long + "...",
		long[1:] + "\xc3\xa9": long[1:] + "\uFFFD...",
	} {
		require.Equal(t, want, storable(text))
	}
	m := machineOf(t, nil, doable("a"))
	m.cancel("by \x00")
	require.Equal(t, "by \uFFFD", m.log[0].Error)
}

// TestLoad has a row for each record that does not match the definition.
func TestLoad(t *testing.T) {
	for steps, want := range map[string]string{
		`{"steps": [{"n": "a"}, {"n": "b"}]}`:              "",
		`{"steps": [{"n": "a"}, {"n": "b"}], "pivot": ""}`: "",
		`{"steps": [{"n": "a"}, {"n": "b"}], "pivot": "b"}`: `saga: the pivot of trip version 0 is "", ` +
			`that of the record was "b"`,
		`{"steps": [{"n": "a"}]}`:                         "saga: the steps of trip version 0 are not those of the record",
		`{"steps": [{"n": "c"}, {"n": "b"}]}`:             "saga: the steps of trip version 0 are not those of the record",
		`{"steps": [{"n": "b"}, {"n": "b"}, {"n": "c"}]}`: "saga: the steps of trip version 0 are not those of the record",
		`{"steps": 1}`: "saga: the record's steps cannot be read: " +
			"json: cannot unmarshal number into Go struct field stored.steps of type []saga.StepState",
	} {
		p, err := newPlan(&shapes{Name: "trip", Steps: []shape{doable("a"), doable("b")}})
		require.NoError(t, err)
		m, err := load(p, &store.Record{Progress: []byte(steps)})
		require.Equal(t, &p.pivotName, m.pivot, "also if the record has none")
		require.Len(t, m.Steps, 2, "as the plan has")
		if want == "" {
			require.NoError(t, err)
		} else {
			require.EqualError(t, err, want)
		}
	}
}

// TestRetryAfter adds jitter to the time that an error requests, which is capped at one hour.
func TestRetryAfter(t *testing.T) {
	st := doable("a").step()
	for _, after := range []time.Duration{0, time.Second, time.Minute, math.MaxInt64} {
		bound := bind(&st)
		wait := pauseAfter(&bound, 1, after)
		after = min(after, time.Hour)
		require.GreaterOrEqual(t, wait, max(after, time.Second))
		require.LessOrEqual(t, wait, max(after+after/10+1, time.Second))
	}
}
