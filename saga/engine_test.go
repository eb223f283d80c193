package saga_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga"
)

// A journal is an engine for one saga. It encodes all values as JSON, as between processes.
type journal struct {
	t       *testing.T
	d       *saga.Definition
	snap    saga.Snapshot
	in      saga.Input
	answers chan saga.Answer
	running map[string]context.CancelFunc
	log     []saga.Entry
	refused []string
}

// copied returns v after a round trip through JSON.
func copied[T any](t *testing.T, v T) (back T) {
	data, err := json.Marshal(v)
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(data, &back))
	return back
}

func newJournal(t *testing.T, sg *saga.Saga[trip]) *journal {
	d, err := saga.Define(sg)
	require.NoError(t, err)
	snap, err := d.Begin("trip-1", []byte(`{"Calls":null}`), time.Now())
	require.NoError(t, err)
	return &journal{
		t: t, d: d, snap: copied(t, snap), answers: make(chan saga.Answer), running: make(map[string]context.CancelFunc),
	}
}

// step decides once, makes the calls and waits for the next event. It reports whether the saga continues.
func (j *journal) step() bool {
	j.in.Now = time.Now()
	was, err := json.Marshal(j.snap)
	require.NoError(j.t, err)
	d, err := j.d.Decide(j.snap, copied(j.t, j.in))
	require.NoError(j.t, err)
	again, err := j.d.Decide(j.snap, copied(j.t, j.in))
	require.NoError(j.t, err)
	require.Equal(j.t, copied(j.t, d), copied(j.t, again), "a decision depends only on its arguments")
	now, err := json.Marshal(j.snap)
	require.NoError(j.t, err)
	require.JSONEq(j.t, string(was), string(now), "a decision changes no snapshot")

	d = copied(j.t, d)
	j.snap, j.in = d.Snapshot, saga.Input{}
	j.log = append(j.log, d.Log...)
	for name, why := range d.SignalsRefused {
		j.refused = append(j.refused, name+": "+why)
	}
	if d.NotAllowed != "" {
		j.refused = append(j.refused, d.NotAllowed)
	}
	for _, c := range d.Calls {
		ctx, cancel := context.WithCancel(j.t.Context())
		j.running[c.Step] = cancel
		go func() { j.answers <- copied(j.t, j.d.Perform(ctx, c)) }()
	}
	for _, step := range d.Stop {
		j.running[step]()
	}
	if d.Status != saga.Running && d.Status != saga.Compensating && len(j.running) == 0 {
		return false
	}
	var alarm <-chan time.Time
	if !d.WakeAt.IsZero() {
		alarm = time.After(time.Until(d.WakeAt))
	}
	select {
	case a := <-j.answers:
		j.running[a.Step]()
		delete(j.running, a.Step)
		j.in.Answers = append(j.in.Answers, a)
	case <-alarm:
	case <-time.After(time.Hour):
		return false // the saga waits
	}
	return true
}

func (j *journal) run() {
	for j.step() {
	}
}

func (j *journal) end() *saga.Instance { return j.d.Instance(j.snap) }

// told returns the log without the entries that only a runner makes.
func told(log []saga.Entry) (list []string) {
	for _, e := range log {
		switch e.Kind {
		case saga.EventKind("parked"), saga.EventKind("resumed"), saga.EventKind("released"):
			continue
		}
		list = append(list, fmt.Sprint(e.Kind, " ", e.Step, " ", e.Op, " ", e.Attempt, " ", e.Error))
	}
	return list
}

func beside(steps ...saga.Step[trip]) []saga.Step[trip] {
	for i := range steps[1:] {
		steps[i+1].Parallel = true
	}
	return steps
}

func engineStories() map[string][]saga.Step[trip] {
	doubtful := step("hotel")
	doubtful.Undo = note("undo hotel", errDeclined)
	doubtful.Do, doubtful.UndoAttempts = note("do hotel", saga.Permanent(errDeclined)), 2
	pivot := step("charge")
	pivot.Pivot, pivot.Undo = true, nil
	late := failing("mail", errDeclined)
	late.Undo, late.Do = nil, note("do mail", saga.Permanent(errDeclined))
	delayed, awaits := step("hotel"), step("hotel")
	delayed.Delay = time.Minute
	awaits.Await, awaits.AwaitFor = "paid", 10*time.Second
	panics := step("hotel")
	panics.Do = func(context.Context, *trip) error { panic("oops") }
	refused := step("hotel")
	tries := 0
	refused.Do = func(context.Context, *trip) error {
		if tries++; tries%3 != 0 {
			return refusal{}
		}
		return nil
	}
	car := step("car")
	car.Do = func(ctx context.Context, _ *trip) error { <-ctx.Done(); return ctx.Err() }
	return map[string][]saga.Step[trip]{
		"completes":            {step("flight"), step("hotel")},
		"is declined":          {step("flight"), failing("hotel", saga.Declined(errDeclined))},
		"fails":                {step("flight"), failing("hotel", errDeclined)},
		"gets stuck undoing":   {step("flight"), doubtful},
		"gets stuck after":     {pivot, late},
		"waits":                {step("flight"), delayed},
		"waits for no signal":  {step("flight"), awaits},
		"panics":               {step("flight"), panics},
		"is refused":           {step("flight"), refused, step("car")},
		"parallel, one failed": beside(failing("flight", saga.Declined(errDeclined)), car),
	}
}

// TestEngineMatchesRunner compares log, steps and state of the same definitions on a Runner and on an engine that
// stores nothing but JSON.
func TestEngineMatchesRunner(t *testing.T) {
	for name := range engineStories() {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				sg := sequence(engineStories()[name]...)
				r, _ := observed(t, saga.NewMemory(), saga.RunnerConfig{}, silent, sg)
				d, err := saga.Define(sg)
				require.NoError(t, err)
				_, err = r.Start(t.Context(), d, "trip-1", []byte(`{"Calls":null}`))
				require.NoError(t, err)
				want, err := r.Wait(t.Context(), "trip-1")
				require.NoError(t, err)
				log, err := r.History(t.Context(), "trip-1", 0, 0)
				require.NoError(t, err)

				j := newJournal(t, sequence(engineStories()[name]...))
				j.run()
				got := j.end()
				require.Equal(t, told(log), told(j.log))
				require.Equal(t, want.Status, got.Status)
				require.Equal(t, want.Cause, got.Cause)
				require.JSONEq(t, string(want.State), string(got.State))
				for i := range want.Steps {
					want.Steps[i].NotBefore, got.Steps[i].NotBefore = time.Time{}, time.Time{}
					want.Steps[i].WaitingSince, got.Steps[i].WaitingSince = time.Time{}, time.Time{}
				}
				require.Equal(t, want.Steps, got.Steps)
				require.Equal(t, int64(len(j.log)), got.Seq)
			})
		})
	}
}

// TestEngineMergesParallelStates runs parallel steps that each change a copy of the state.
func TestEngineMergesParallelStates(t *testing.T) {
	type both struct{ A, B string }
	steps := []saga.Step[both]{
		{Name: "a", Do: func(_ context.Context, s *both) error { s.A = "a"; return nil }, ReadOnly: true},
		{Name: "b", Do: func(_ context.Context, s *both) error { s.B = "b"; return nil }, ReadOnly: true, Parallel: true},
	}
	d, err := saga.Define(&saga.Saga[both]{Name: "both", Steps: steps})
	require.NoError(t, err)
	snap, err := d.Begin("1", []byte(`{}`), time.Now())
	require.NoError(t, err)
	first, err := d.Decide(copied(t, snap), saga.Input{Now: time.Now()})
	require.NoError(t, err)
	require.Len(t, first.Calls, 2)
	in := saga.Input{Now: time.Now()}
	for _, c := range first.Calls {
		in.Answers = append(in.Answers, copied(t, d.Perform(t.Context(), copied(t, c))))
	}
	last, err := d.Decide(copied(t, first.Snapshot), in)
	require.NoError(t, err)
	require.Equal(t, saga.Completed, last.Status)
	require.JSONEq(t, `{"A":"a","B":"b"}`, string(d.Instance(last.Snapshot).State))
	twice, err := d.Decide(last.Snapshot, in)
	require.NoError(t, err)
	require.Empty(t, twice.Log, "an answer that comes twice")
}

// TestEngineInput passes signals, operations and lost calls to an engine.
func TestEngineInput(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		awaits := step("hotel")
		awaits.Await = "paid"
		awaits.Do = func(ctx context.Context, s *trip) error {
			payload, _ := saga.SignalFrom(ctx, "paid")
			s.Calls = append(s.Calls, "paid by "+string(payload), saga.CommandFrom(ctx).ID)
			return nil
		}
		j := newJournal(t, sequence(step("flight"), awaits))
		j.run()
		require.Equal(t, saga.Running, j.end().Status)
		j.in.Signals = map[string][]byte{"paid": []byte("card"), "other": nil}
		j.step()
		j.in.Signals = map[string][]byte{"paid": []byte("cash")} // the first payload is stored
		j.run()
		require.Equal(t, saga.Completed, j.end().Status)
		require.JSONEq(t, `{"Calls":["do flight","paid by card","trip-1/hotel/do"]}`, string(j.end().State))
		require.Equal(t, []string{"other: no step of trip version 1 awaits it"}, j.refused)
		j.in.Operation = &saga.Operation{Action: saga.ActionCancel}
		j.in.Signals = map[string][]byte{"other": nil}
		j.run()
		require.Equal(t, []string{"no step of trip version 1 awaits it", "it is completed"},
			[]string{strings.TrimPrefix(j.refused[1], "other: "), j.refused[2]})

		j = newJournal(t, sequence(step("flight"), awaits))
		j.run()
		j.in.Operation = &saga.Operation{Action: saga.ActionCancel, Note: "ill"}
		j.run()
		require.Equal(t, saga.Compensated, j.end().Status)
		require.Equal(t, "saga: canceled", j.end().Cause)

		d, err := saga.Define(sequence(step("flight")))
		require.NoError(t, err)
		snap, err := d.Begin("trip-1", []byte(`{}`), time.Now())
		require.NoError(t, err)
		lost, err := d.Decide(snap, saga.Input{Now: time.Now()})
		require.NoError(t, err)
		answer := copied(t, lost.Calls[0].Interrupted(errors.New("the process died")))
		next, err := d.Decide(copied(t, lost.Snapshot), saga.Input{Now: time.Now(), Answers: []saga.Answer{answer}})
		require.NoError(t, err)
		require.Empty(t, next.Calls)
		next, err = d.Decide(copied(t, next.Snapshot), saga.Input{Now: next.WakeAt})
		require.NoError(t, err)
		require.Equal(t, 1, next.Calls[0].Command.Attempt, "it does not count as an attempt")
		require.True(t, d.Instance(next.Snapshot).Steps[0].MaybeApplied)
	})
}

// TestEngineRejectsForeignSnapshots: a snapshot of another definition, or of a later version of this package.
func TestEngineRejectsForeignSnapshots(t *testing.T) {
	d, err := saga.Define(sequence(step("flight")))
	require.NoError(t, err)
	other, err := saga.Define(&saga.Saga[trip]{Name: "trip", Version: 1, Steps: []saga.Step[trip]{step("car")}})
	require.NoError(t, err)
	renamed, err := saga.Define(&saga.Saga[trip]{Name: "tour", Version: 1, Steps: []saga.Step[trip]{step("flight")}})
	require.NoError(t, err)
	snap, err := d.Begin("trip-1", []byte(`{}`), time.Now())
	require.NoError(t, err)
	_, err = other.Decide(snap, saga.Input{})
	require.ErrorContains(t, err, "the steps of trip version 1 are not those of the record")
	_, err = renamed.Decide(snap, saga.Input{})
	require.ErrorContains(t, err, "the Snapshot is one of trip version 1, not of tour version 1")
	_, err = d.Decide(saga.Snapshot{}, saga.Input{})
	require.ErrorContains(t, err, "the Snapshot is empty")
	require.ErrorContains(t, json.Unmarshal([]byte(`{"v": 2}`), &snap), "a Snapshot of version 2")
	_, err = d.Begin("", nil, time.Now())
	require.Error(t, err)
	_, err = d.Begin("trip-1", []byte("{"), time.Now())
	require.ErrorContains(t, err, "does not decode")
	_, err = saga.Define(&saga.Saga[trip]{})
	require.Error(t, err)
	unknown := other.Perform(t.Context(), saga.Call{Saga: "trip", Version: 1, Step: "flight"})
	require.Equal(t, saga.OutcomeInterrupted, unknown.Outcome)
}

// TestSnapshotOfTheFirstRelease checks that every later version can read it.
func TestSnapshotOfTheFirstRelease(t *testing.T) {
	data, err := os.ReadFile("testdata/snapshot-1.json")
	require.NoError(t, err)
	var snap saga.Snapshot
	require.NoError(t, json.Unmarshal(data, &snap))
	again, err := json.Marshal(snap)
	require.NoError(t, err)
	require.JSONEq(t, string(data), string(again))
	d, err := saga.Define(sequence(step("flight"), step("hotel")))
	require.NoError(t, err)
	next, err := d.Decide(snap, saga.Input{Now: d.Instance(snap).Now})
	require.NoError(t, err)
	require.Equal(t, saga.Running, next.Status)
	require.Empty(t, next.Calls, "the call of hotel is in progress")
}
