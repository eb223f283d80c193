package machine_test

import (
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	store "github.com/go-resilience/resilience/internal/sagastore"
	"github.com/go-resilience/resilience/saga/internal/machine"
	"github.com/go-resilience/resilience/saga/internal/plan"
)

const (
	idle       = machine.StepIdle
	waiting    = machine.StepWaiting
	started    = machine.StepStarted
	done       = machine.StepDone
	noEffect   = machine.StepNoEffect
	failed     = machine.StepFailed
	undoing    = machine.StepUndoing
	undone     = machine.StepUndone
	undoFailed = machine.StepUndoFailed
	skipped    = machine.StepSkipped
)

var now = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func step(name string) plan.Step {
	backoff := func(attempt int) time.Duration { return time.Duration(attempt) * time.Second }
	return plan.Step{Name: name, Do: true, Undo: true, Backoff: backoff}
}

func with(s plan.Step, change func(*plan.Step)) plan.Step {
	change(&s)
	return s
}

func machineOf(t *testing.T, statuses []machine.StepStatus, steps ...plan.Step) *machine.Machine {
	p, err := plan.New(&plan.Definition{Name: "trip", Steps: steps})
	require.NoError(t, err)
	m := machine.New(p)
	for i, s := range statuses {
		m.Units[i].Status = s
	}
	return m
}

func statuses(m *machine.Machine) (list []machine.StepStatus) {
	for i := range m.Units {
		list = append(list, m.Units[i].Status)
	}
	return list
}

// TestAdvance has a row for each decision about a step.
func TestAdvance(t *testing.T) {
	type is = []machine.StepStatus
	a, b, c := step("a"), step("b"), step("c")
	pivot := with(step("p"), func(s *plan.Step) { s.Pivot, s.Undo = true, false })
	delayed := with(step("d"), func(s *plan.Step) { s.Delay = time.Hour })
	readOnly := with(step("r"), func(s *plan.Step) { s.ReadOnly, s.Undo = true, false })
	beside := with(step("b"), func(s *plan.Step) { s.Parallel = true })
	for name, c := range map[string]struct {
		steps  []plan.Step
		before is
		back   bool
		after  is
		status store.Status
	}{
		"the first starts":           {[]plan.Step{a, b, c}, is{idle, idle, idle}, false, is{started, idle, idle}, store.Running},
		"the next starts":            {[]plan.Step{a, b, c}, is{done, idle, idle}, false, is{done, started, idle}, store.Running},
		"after one that was skipped": {[]plan.Step{a, b}, is{skipped, idle}, false, is{skipped, started}, store.Running},
		"one at work is waited for":  {[]plan.Step{a, b}, is{started, idle}, false, is{started, idle}, store.Running},
		"two beside each other":      {[]plan.Step{a, beside}, is{idle, idle}, false, is{started, started}, store.Running},
		"a wait begins":              {[]plan.Step{a, delayed}, is{done, idle}, false, is{done, waiting}, store.Running},
		"all are done":               {[]plan.Step{a, b}, is{done, done}, false, is{done, done}, store.Completed},
		"one failed: back":           {[]plan.Step{a, b}, is{done, failed}, false, is{done, undoing}, store.Compensating},
		"one took no effect: back":   {[]plan.Step{a, b}, is{done, noEffect}, false, is{undoing, noEffect}, store.Compensating},
		"the first took none: over":  {[]plan.Step{a, b}, is{noEffect, idle}, false, is{noEffect, idle}, store.Compensated},
		"back, in reverse":           {[]plan.Step{a, b, c}, is{done, done, idle}, true, is{done, undoing, idle}, store.Compensating},
		"back, one waits no more":    {[]plan.Step{a, delayed}, is{done, waiting}, true, is{undoing, noEffect}, store.Compensating},
		"back, one that has read":    {[]plan.Step{a, readOnly}, is{done, done}, true, is{undoing, noEffect}, store.Compensating},
		"back, all undone":           {[]plan.Step{a, b}, is{undone, undone}, true, is{undone, undone}, store.Compensated},
		"back, one cannot be":        {[]plan.Step{a, b}, is{done, undoFailed}, true, is{done, undoFailed}, store.Stuck},
		"back, one has no undo":      {[]plan.Step{a, pivot}, is{done, done}, true, is{done, undoFailed}, store.Stuck},
	} {
		t.Run(name, func(t *testing.T) {
			m := machineOf(t, c.before, c.steps...)
			if c.back {
				m.Revert("the parent turned back")
			}
			m.Advance(now)
			require.Equal(t, c.after, statuses(m))
			require.Equal(t, c.status, m.Status)
		})
	}
}

// TestRelease has a row for each reason to write a saga back, and not to.
func TestRelease(t *testing.T) {
	delayed := with(step("a"), func(s *plan.Step) { s.Delay = time.Hour })
	signaled := with(step("a"), func(s *plan.Step) { s.Await = "paid" })
	child := plan.Step{Name: "a", Child: true, ChildOf: true}
	waits := machine.Waits{Longest: time.Minute, Least: 15 * time.Second}
	stops := machine.Waits{Longest: time.Minute, Least: 15 * time.Second, Stops: true}
	for name, c := range map[string]struct {
		step    plan.Step
		before  func(*machine.Machine)
		waits   machine.Waits
		release bool
		wakeIn  time.Duration
		kind    store.EventKind
	}{
		"an attempt may begin":    {step("a"), func(*machine.Machine) {}, waits, false, 0, ""},
		"so it may, but not here": {step("a"), func(*machine.Machine) {}, stops, true, 0, machine.EventReleased},
		"an attempt is running":   {step("a"), func(m *machine.Machine) { m.Begin(0) }, stops, false, 0, ""},
		"it has ended":            {step("a"), func(m *machine.Machine) { m.Units[0].Status = done; m.Advance(now) }, waits, true, 0, machine.EventCompleted},
		"a short wait":            {step("a"), func(m *machine.Machine) { m.Units[0].NotBefore = now.Add(time.Minute) }, waits, false, 0, ""},
		"a longer one":            {step("a"), func(m *machine.Machine) { m.Units[0].NotBefore = now.Add(time.Minute + 1) }, waits, true, time.Minute + 1, machine.EventParked},
		"a short wait elsewhere":  {step("a"), func(m *machine.Machine) { m.Units[0].NotBefore = now.Add(time.Minute) }, stops, true, time.Minute, machine.EventReleased},
		"a delay":                 {delayed, func(*machine.Machine) {}, waits, true, time.Hour, machine.EventParked},
		"a look at a child":       {child, func(m *machine.Machine) { m.Begin(0); m.Wait(0, 1, now, now) }, waits, false, 0, ""},
		"a signal":                {signaled, func(*machine.Machine) {}, waits, true, 15 * time.Second, machine.EventParked},
	} {
		t.Run(name, func(t *testing.T) {
			m := machineOf(t, nil, c.step)
			m.Advance(now)
			c.before(m)
			release, wakeIn := m.Release(now, c.waits)
			require.Equal(t, c.release, release)
			require.Equal(t, c.wakeIn, wakeIn)
			var kind store.EventKind
			if len(m.Log) > 0 {
				kind = m.Log[len(m.Log)-1].Kind
			}
			require.Equal(t, c.kind, kind)
		})
	}
}

func TestJudge(t *testing.T) {
	type are = []store.Status
	for name, c := range map[string]struct {
		children are
		canUndo  bool
		verdict  machine.Verdict
		failed   int
	}{
		"none":                            {nil, true, machine.ChildrenDone, -1},
		"all completed":                   {are{store.Completed, store.Completed}, true, machine.ChildrenDone, -1},
		"one runs":                        {are{store.Completed, store.Running}, true, machine.ChildrenWait, -1},
		"one is stuck":                    {are{store.Completed, store.Stuck}, true, machine.ChildrenWait, -1},
		"one failed, one runs":            {are{store.Running, store.Compensated}, true, machine.ChildrenFailed, 1},
		"the same, without an undo":       {are{store.Running, store.Compensated}, false, machine.ChildrenWait, 1},
		"one failed, one completed":       {are{store.Compensated, store.Completed}, false, machine.ChildrenFailed, 0},
		"all compensated":                 {are{store.Compensated, store.Compensated}, false, machine.ChildrenVoid, 0},
		"all compensated, with an undo":   {are{store.Compensated, store.Compensated}, true, machine.ChildrenFailed, 0},
		"one abandoned, one compensated":  {are{store.Abandoned, store.Compensated}, false, machine.ChildrenFailed, 0},
		"one turns back after completion": {are{store.Completed, store.Compensating}, true, machine.ChildrenWait, -1},
	} {
		t.Run(name, func(t *testing.T) {
			verdict, failed := machine.Judge(c.children, c.canUndo)
			require.Equal(t, c.verdict, verdict)
			require.Equal(t, c.failed, failed)
		})
	}
}

func TestText(t *testing.T) {
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
		require.Equal(t, want, machine.Text(text))
	}
	m := machineOf(t, nil, step("a"))
	m.Cancel("by \x00")
	require.Equal(t, "by \uFFFD", m.Log[0].Error)
}

// TestLoad has a row for each record that is not one of the plan.
func TestLoad(t *testing.T) {
	for steps, want := range map[string]string{
		`{"steps": [{"n": "a"}, {"n": "b"}]}`:               "",
		`{"steps": [{"n": "a"}, {"n": "b"}], "pivot": ""}`:  "",
		`{"steps": [{"n": "a"}, {"n": "b"}], "pivot": "b"}`: `saga: the pivot of trip version 0 is "", that of the record was "b"`,
		`{"steps": [{"n": "a"}]}`:                           "saga: the steps of trip version 0 are not those of the record",
		`{"steps": [{"n": "c"}, {"n": "b"}]}`:               "saga: the steps of trip version 0 are not those of the record",
		`{"steps": [{"n": "b"}, {"n": "b"}, {"n": "c"}]}`:   "saga: the steps of trip version 0 are not those of the record",
		`{"steps": 1}`: "saga: the record's steps cannot be read: json: cannot unmarshal number into Go struct field Progress.steps of type []machine.state",
	} {
		p, err := plan.New(&plan.Definition{Name: "trip", Steps: []plan.Step{step("a"), step("b")}})
		require.NoError(t, err)
		if _, err = machine.Load(p, &store.Record{Steps: []byte(steps)}); want == "" {
			require.NoError(t, err)
		} else {
			require.EqualError(t, err, want)
		}
	}
}

// TestRetryAfter has jitter behind the time that an error asks for, of which an hour counts.
func TestRetryAfter(t *testing.T) {
	for _, after := range []time.Duration{0, time.Second, time.Minute, math.MaxInt64} {
		m := machineOf(t, nil, step("a"))
		m.Advance(now)
		m.Begin(0)
		m.Did(0, machine.End{Err: errors.New("busy"), RetryAfter: after}, time.Time{})
		wait := m.Units[0].NotBefore.Sub(time.Time{})
		after = min(after, time.Hour)
		require.GreaterOrEqual(t, wait, max(after, time.Second))
		require.LessOrEqual(t, wait, max(after+after/10+1, time.Second))
	}
}
