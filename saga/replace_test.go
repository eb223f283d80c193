package saga_test

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga"
)

var errNoAddress = errors.New("no such address")

func TestOperatorEntersTheState(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hotel := failing("hotel", saga.Permanent(errNoAddress))
		pivot := step("charge")
		pivot.Pivot = true
		sg := sequence(pivot, hotel, step("car"))
		r, _ := observed(t, saga.NewMemory(), saga.RunnerConfig{}, silent, sg)
		mustStart(t, r, sg)
		requireEnd(t, r, "trip-1", saga.ErrStuck)
		state := []byte(`{"Calls":["do charge","hotel by hand"],"New":1}`)
		for want, op := range map[string]saga.Operation{
			"replacing State or Version needs a Note with the reason": {Action: saga.ActionSkip, State: state},
			"state does not decode": {
				Action: saga.ActionSkip, Note: "by hand", State: []byte(`{"Calls":1}`),
			},
			"needs the Action retry, skip or compensate, not \"abandon\"": {
				Action: saga.ActionAbandon, Note: "by hand", State: state,
			},
			"needs the Action retry, skip or compensate, not \"cancel\"": {
				Action: saga.ActionCancel, Note: "by hand", Version: 9,
			},
			"there is no such step": {Action: saga.ActionSkip, Step: "x", Note: "by hand", State: state},
		} {
			err := r.Operate(t.Context(), "trip-1", op)
			require.ErrorIs(t, err, saga.ErrNotAllowed)
			require.ErrorContains(t, err, want)
		}
		in := instance(t, r, "trip-1")
		require.Equal(t, saga.Stuck, in.Status)
		require.JSONEq(t, `{"Calls":["do charge","do hotel"]}`, string(in.State))
		operate(t, r, "trip-1", saga.Operation{Action: saga.ActionSkip, Note: "booked by phone", State: state})
		s, err := result[trip](t.Context(), r, "trip-1")
		require.NoError(t, err)
		require.Equal(t, []string{"do charge", "hotel by hand", "do car"}, s.Calls)
		log, err := r.History(t.Context(), "trip-1", 0, 0)
		require.NoError(t, err)
		require.Contains(t, notes(log), "step_skipped: booked by phone (the state was replaced)")
		in = instance(t, r, "trip-1")
		require.Contains(t, string(in.State), `"New":1`, "a field that this build does not know")
	})
}

func notes(log []saga.Entry) (list []string) {
	for _, e := range log {
		list = append(list, string(e.Kind)+": "+e.Error)
	}
	return list
}

// TestOperatorMovesASaga that is stuck to a version that fixes it.
func TestOperatorMovesASaga(t *testing.T) {
	charge, fixed := step("charge"), step("address")
	charge.Pivot = true
	pivots := func(st saga.Step[trip]) saga.Step[trip] { st.Pivot = true; return st }
	versions := func(steps ...saga.Step[trip]) *saga.Saga[trip] {
		sg := sequence(steps...)
		sg.Version = 2
		return sg
	}
	for name, c := range map[string]struct {
		fix   *saga.Saga[trip]
		error string
		want  []string
	}{
		"a step before it": {
			versions(step("flight"), charge, fixed, step("hotel")), "",
			[]string{"do flight", "do charge", "do hotel", "do address", "do hotel"},
		},
		"the step renamed": {
			versions(step("flight"), charge, step("hotel")), "step tickets is failed, and version 2 lacks it", nil,
		},
		"a finished step moved": {
			versions(charge, step("flight"), step("tickets")), "step charge is done, and has another place in version 2", nil,
		},
		"a finished step gone": {versions(charge, step("tickets")), "step flight is done, and version 2 lacks it", nil},
		"another pivot": {
			versions(step("flight"), step("charge"), pivots(step("tickets"))),
			"its pivot charge is done, and the pivot of version 2 is not", nil,
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				tickets := failing("tickets", saga.Permanent(errNoAddress))
				if c.error == "" {
					tickets = failing("hotel", saga.Permanent(errNoAddress))
				}
				sg := sequence(step("flight"), charge, tickets)
				r, _ := observed(t, saga.NewMemory(), saga.RunnerConfig{}, silent, sg)
				mustStart(t, r, sg)
				_, err := result[trip](t.Context(), r, "trip-1")
				require.ErrorIs(t, err, saga.ErrStuck)
				op := saga.Operation{Action: saga.ActionRetry, Note: "fixed in 2", Version: 2}
				require.ErrorIs(t, r.Operate(t.Context(), "trip-1", op), saga.ErrNotRegistered)
				saga.Register(r, c.fix, sg)
				err = r.Operate(t.Context(), "trip-1", op)
				if c.error != "" {
					require.ErrorIs(t, err, saga.ErrNotAllowed)
					require.ErrorContains(t, err, c.error)
					return
				}
				require.NoError(t, err)
				s, err := result[trip](t.Context(), r, "trip-1")
				require.NoError(t, err)
				require.Equal(t, c.want, s.Calls)
				require.Equal(t, 2, instance(t, r, "trip-1").Version)
				log, err := r.History(t.Context(), "trip-1", 0, 0)
				require.NoError(t, err)
				require.Contains(t, notes(log), "retried: fixed in 2 (moved from version 1 to 2)")
			})
		})
	}
}

// TestOperatorMovesAWaitingSaga whose step waits for a signal that never comes.
func TestOperatorMovesAWaitingSaga(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		wait, hotel := step("approval"), step("hotel")
		wait.Await = "approved"
		flight := step("flight")
		do := flight.Do
		flight.Do = func(ctx context.Context, t *trip) error { time.Sleep(time.Second); return do(ctx, t) }
		sg, fix := sequence(flight, wait), sequence(flight, hotel)
		fix.Version = 2
		r := saga.NewRunner(saga.NewMemory(), saga.RunnerConfig{})
		saga.Register(r, fix, sg)
		go func() { _ = r.Run(t.Context()) }()
		_, err := saga.Register(r, sg, fix).Start(t.Context(), "trip-1", trip{})
		require.NoError(t, err)
		r.Wake()
		synctest.Wait() // the runner has the saga, whose flight takes a second
		op := saga.Operation{
			Action: saga.ActionRetry, Note: "not needed", Version: 2,
			State: []byte(`{"Calls":["do flight","approved by hand"]}`),
		}
		require.ErrorIs(t, r.Operate(t.Context(), "trip-1", op), saga.ErrNotAllowed, "a runner holds it")
		time.Sleep(time.Minute)
		require.NoError(t, r.Operate(t.Context(), "trip-1", op))
		s, err := result[trip](t.Context(), r, "trip-1")
		require.NoError(t, err)
		require.Equal(t, []string{"do flight", "approved by hand", "do hotel"}, s.Calls)
		log, err := r.History(t.Context(), "trip-1", 0, 0)
		require.NoError(t, err)
		require.Contains(t, notes(log), "retried: not needed (moved from version 1 to 2, and the state was replaced)")
	})
}

// TestEngineReplacesStateAndVersion in Decide, of another engine.
func TestEngineReplacesStateAndVersion(t *testing.T) {
	first, err := saga.Define(sequence(step("flight"), failing("hotel", saga.Declined(errNoAddress)), step("car")))
	require.NoError(t, err)
	sg := sequence(step("flight"), step("car"))
	sg.Version = 2
	second, err := saga.Define(sg)
	require.NoError(t, err)
	wait := sequence(step("flight"))
	wait.Steps[0].Await = "go"
	waits, err := saga.Define(wait)
	require.NoError(t, err)
	through := func(s saga.Snapshot) (out saga.Snapshot) {
		data, err := json.Marshal(s)
		require.NoError(t, err)
		require.NoError(t, json.Unmarshal(data, &out))
		return out
	}
	now := time.Unix(1e9, 0)
	snap, err := waits.Begin("trip-1", []byte(`{}`), now)
	require.NoError(t, err)
	d, err := waits.Decide(snap, saga.Input{Now: now})
	require.NoError(t, err)
	require.Empty(t, d.Calls)
	op := saga.Operation{Action: saga.ActionRetry, Version: 2, State: []byte(`{"Calls":["by hand"]}`)}
	refused, err := second.Decide(through(d.Snapshot), saga.Input{Now: now, Operation: &op})
	require.NoError(t, err)
	require.Equal(t, "replacing State or Version needs a Note with the reason", refused.NotAllowed)
	require.Equal(t, 1, waits.Instance(refused.Snapshot).Version)
	op.Note = "no need to wait"
	for _, in := range []saga.Input{{Signals: map[string][]byte{"go": nil}}, {Answers: make([]saga.Answer, 1)}} {
		in.Now, in.Operation = now, &op
		_, err = second.Decide(d.Snapshot, in)
		require.ErrorContains(t, err, "Answers or Signals beside an Operation")
	}
	refused, err = waits.Decide(through(d.Snapshot), saga.Input{Now: now, Operation: &op})
	require.NoError(t, err)
	require.Equal(t, "version 2 is not the one that decides", refused.NotAllowed)
	refused, err = waits.Decide(through(d.Snapshot), saga.Input{Now: now, Operation: &saga.Operation{
		Action: saga.ActionSkip, Step: "x", Note: "x", State: op.State,
	}})
	require.NoError(t, err)
	require.NotEmpty(t, refused.NotAllowed)
	require.JSONEq(t, `{}`, string(waits.Instance(refused.Snapshot).State))
	cruise := sequence(step("flight"))
	cruise.Name, cruise.Version = "cruise", 2
	other, err := saga.Define(cruise)
	require.NoError(t, err)
	_, err = other.Decide(through(d.Snapshot), saga.Input{Now: now, Operation: &op})
	require.ErrorContains(t, err, "Snapshot is one of trip version 1, not of cruise version 2")
	moved, err := second.Decide(through(d.Snapshot), saga.Input{Now: now, Operation: &op})
	require.NoError(t, err)
	require.Empty(t, moved.NotAllowed)
	require.Len(t, moved.Calls, 1)
	require.JSONEq(t, `{"Calls":["by hand"]}`, string(moved.Calls[0].State))
	require.Equal(t, []string{
		"retried: no need to wait (moved from version 1 to 2, and the state was replaced)",
	}, notes(moved.Log))
	require.Equal(t, 2, second.Instance(through(moved.Snapshot)).Version)

	d, err = second.Decide(through(moved.Snapshot), saga.Input{Now: now, Operation: &saga.Operation{
		Action: saga.ActionSkip, Step: "flight", Note: "x", State: []byte(`{}`),
	}})
	require.NoError(t, err)
	require.Equal(t, "attempt is in progress", d.NotAllowed)
	d, err = second.Decide(through(moved.Snapshot), saga.Input{Now: now, Operation: &saga.Operation{
		Action: saga.ActionAbandon, Note: "x",
	}})
	require.NoError(t, err)
	require.Equal(t, []string{"flight"}, d.Stop)
	_, err = first.Decide(through(moved.Snapshot), saga.Input{Now: now})
	require.ErrorContains(t, err, "Snapshot is one of trip version 2, not of trip version 1")
}

// TestOperationBesideSignal in a saga of version 0, which is not a move to version 0.
func TestOperationBesideSignal(t *testing.T) {
	sg := sequence(step("flight"))
	sg.Version, sg.Steps[0].Await = 0, "go"
	def, err := saga.Define(sg)
	require.NoError(t, err)
	snap, err := def.Begin("trip-1", []byte(`{}`), time.Unix(1e9, 0))
	require.NoError(t, err)
	d, err := def.Decide(snap, saga.Input{
		Now: time.Unix(1e9, 0), Operation: &saga.Operation{Action: saga.ActionCancel}, Signals: map[string][]byte{"go": nil},
	})
	require.NoError(t, err)
	require.Equal(t, saga.Compensated, d.Status)
}

// TestAddedStepRunsBeforeStartedStep: the saga has parallel steps, of which several may start at once.
func TestAddedStepRunsBeforeStartedStep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		charge, car, slow, hotel := step("charge"), step("car"), step("address"), step("hotel")
		charge.Pivot, car.Parallel = true, true
		var order []string
		slow.Do = func(context.Context, *trip) error {
			time.Sleep(time.Second)
			order = append(order, "address")
			return nil
		}
		hotel.Do = func(context.Context, *trip) error { order = append(order, "hotel"); return nil }
		v1 := sequence(step("flight"), car, charge, failing("hotel", saga.Permanent(errNoAddress)))
		v2 := sequence(step("flight"), car, slow, charge, hotel)
		v2.Version = 2
		r, _ := observed(t, saga.NewMemory(), saga.RunnerConfig{}, silent, v1)
		mustStart(t, r, v1)
		_, err := result[trip](t.Context(), r, "trip-1")
		require.ErrorIs(t, err, saga.ErrStuck)
		saga.Register(r, v2, v1)
		operate(t, r, "trip-1", saga.Operation{Action: saga.ActionRetry, Note: "asks for the address", Version: 2})
		requireEnd(t, r, "trip-1", nil)
		require.Equal(t, []string{"address", "hotel"}, order)
	})
}

// TestMoveRestartsWaitAfterAddedStep: the step waits when the operator moves the saga. Its time passes while the added
// step runs, or waits for its next attempt.
func TestMoveRestartsWaitAfterAddedStep(t *testing.T) {
	for name, wait := range map[string]func(*saga.Step[trip]){
		"Delay":    func(st *saga.Step[trip]) { st.Delay = time.Hour },
		"AwaitFor": func(st *saga.Step[trip]) { st.Await, st.AwaitFor = "paid", time.Hour },
	} {
		t.Run(name, func(t *testing.T) {
			address, hotel := step("address"), step("hotel")
			wait(&hotel)
			v2 := sequence(step("flight"), address, hotel)
			v2.Version = 2
			first, err := saga.Define(sequence(step("flight"), hotel))
			require.NoError(t, err)
			second, err := saga.Define(v2)
			require.NoError(t, err)
			now := time.Unix(1e9, 0)
			snap, err := first.Begin("trip-1", []byte(`{}`), now)
			require.NoError(t, err)
			d, err := first.Decide(snap, saga.Input{Now: now})
			require.NoError(t, err)
			decide := func(def *saga.Definition, in saga.Input) {
				t.Helper()
				in.Now = now
				d, err = def.Decide(copied(d.Snapshot), in)
				require.NoError(t, err)
				require.Empty(t, d.NotAllowed)
				require.True(t, d.WakeAt.IsZero() || d.WakeAt.After(now), "WakeAt is %v before Now", now.Sub(d.WakeAt))
			}
			perform := func(def *saga.Definition) {
				t.Helper()
				require.Len(t, d.Calls, 1)
				decide(def, saga.Input{Answers: []saga.Answer{def.Perform(t.Context(), d.Calls[0])}})
			}
			perform(first)
			require.Equal(t, now.Add(time.Hour), d.WakeAt)
			decide(second, saga.Input{Operation: &saga.Operation{Action: saga.ActionRetry, Version: 2, Note: "the address"}})
			lost := d.Calls[0].Interrupted(errNoAddress)
			lost.RetryAfter = 3 * time.Hour
			now = now.Add(2 * time.Hour)
			decide(second, saga.Input{})
			decide(second, saga.Input{Answers: []saga.Answer{lost}})
			require.Equal(t, now.Add(3*time.Hour), d.WakeAt)
			now = d.WakeAt
			decide(second, saga.Input{})
			perform(second)
			require.Equal(t, saga.Running, d.Status)
			require.Equal(t, now.Add(time.Hour), d.WakeAt)
		})
	}
}

func TestLongNoteKeepsReplacement(t *testing.T) {
	sg := sequence(step("flight"))
	r := saga.NewRunner(saga.NewMemory(), saga.RunnerConfig{})
	mustStart(t, r, sg)
	require.NoError(t, r.Operate(t.Context(), "trip-1", saga.Operation{
		Action: saga.ActionRetry, State: []byte(`{}`), Version: 1, Note: strings.Repeat("n", 5000),
	}))
	log, err := r.History(t.Context(), "trip-1", 0, 0)
	require.NoError(t, err)
	note := log[len(log)-1].Error
	require.Len(t, note, 4000)
	require.True(t, strings.HasSuffix(note, "n... (moved from version 1 to 1, and the state was replaced)"), note[3900:])
}
