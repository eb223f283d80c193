package saga

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	store "github.com/go-resilience/resilience/saga/sagastore"
)

const (
	started = StepStarted
	undoing = StepUndoing
)

var now = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func doable(name string) shape {
	backoff := func(attempt int) time.Duration { return time.Duration(attempt) * time.Second }
	return shape{Name: name, Do: true, Undo: true, Backoff: backoff}
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

// TestNoDoStartsWhileCompensating, even for steps that ran in parallel and whose turn to be undone has not come.
func TestNoDoStartsWhileCompensating(t *testing.T) {
	m := machineOf(t, []StepStatus{started, started}, doable("a"), doable("b"))
	m.doubt(true)
	require.NoError(t, m.compensate("ill"))
	m.advance(now)
	require.Equal(t, []StepStatus{started, undoing}, []StepStatus{m.Steps[0].Status, m.Steps[1].Status})
	require.Equal(t, 1, m.next(0, now))
}

// TestMoveToAnotherDefinition: the record does not show a crash during a step if no runner could read the record, or if
// the saga became stuck without a Cause.
func TestMoveToAnotherDefinition(t *testing.T) {
	to := func(steps ...shape) *program {
		p, err := newPlan(&shapes{Name: "trip", Version: 2, Steps: steps})
		require.NoError(t, err)
		return p
	}
	for name, c := range map[string]struct {
		in           Instance
		orphan       bool
		maybeApplied bool
	}{
		"running":                       {Instance{Status: Running, Takeovers: 1}, false, false},
		"running, left by other builds": {Instance{Status: Running}, true, true},
		"stuck":                         {Instance{Status: Stuck, Takeovers: 1, Cause: "a broke"}, false, false},
		"stuck without a crash":         {Instance{Status: Stuck}, false, false},
		"stuck after a crash":           {Instance{Status: Stuck, Takeovers: 1}, false, true},
	} {
		t.Run(name, func(t *testing.T) {
			m := machineOf(t, []StepStatus{started}, doable("a"))
			m.Status, m.Takeovers, m.Cause, m.orphan = c.in.Status, c.in.Takeovers, c.in.Cause, c.orphan
			require.NoError(t, m.move(to(doable("a"), doable("b"))))
			require.Equal(t, c.maybeApplied, m.Steps[0].MaybeApplied)
		})
	}
	t.Run("the wait of the current step continues", func(t *testing.T) {
		a := doable("a")
		a.Delay = time.Hour
		m := machineOf(t, []StepStatus{StepWaiting}, a)
		m.Steps[0].WaitingSince = now
		require.NoError(t, m.move(to(a, doable("b"))))
		require.Equal(t, StepWaiting, m.Steps[0].Status)
		require.Equal(t, now, m.Steps[0].WaitingSince)
	})
	t.Run("a step with children", func(t *testing.T) {
		a := shape{Name: "a", Child: true, ChildOf: true}
		m := machineOf(t, []StepStatus{StepDone}, a)
		m.Steps[0].Children = 1
		require.EqualError(t, m.clone().move(to(doable("a"))), "step a has children, and none in version 2")
		require.NoError(t, m.move(to(a, doable("b"))))
	})
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
		`{"steps": [{"n": "a"}, {"n": "b"}], "pivot": "b"}`: `saga: pivot of trip version 0 is "", ` +
			`that of the record was "b"`,
		`{"steps": [{"n": "a"}]}`:                         "saga: steps of trip version 0 are not those of the record",
		`{"steps": [{"n": "c"}, {"n": "b"}]}`:             "saga: steps of trip version 0 are not those of the record",
		`{"steps": [{"n": "b"}, {"n": "b"}, {"n": "c"}]}`: "saga: steps of trip version 0 are not those of the record",
		`{"steps": 1}`: "saga: record's steps cannot be read: " +
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
