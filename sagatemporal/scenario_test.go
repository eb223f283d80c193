package sagatemporal_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/sagatemporal"
)

type trip struct {
	Calls []string
	Note  string
}

var errBroken = errors.New("broken")

func note(name string, err error) func(context.Context, *trip) error {
	return func(_ context.Context, t *trip) error {
		t.Calls = append(t.Calls, name)
		return err
	}
}

func step(name string) saga.Step[trip] {
	return saga.Step[trip]{Name: name, Do: note("do "+name, nil), Undo: note("undo "+name, nil)}
}

func define(steps ...saga.Step[trip]) *saga.Saga[trip] {
	return &saga.Saga[trip]{Name: "trip", Version: 1, Steps: steps}
}

// start registers a definition of the steps in a new environment and starts trip-1.
func start(t *testing.T, steps ...saga.Step[trip]) (*environment, *saga.Handle[trip]) {
	t.Helper()
	env := newEnvironment()
	h := saga.Register(sagatemporal.New(env, env, "sagas"), define(steps...))
	_, err := h.Start(t.Context(), "trip-1", trip{})
	require.NoError(t, err)
	return env, h
}

func end(t *testing.T, h *saga.Handle[trip], want saga.Status) (*saga.Instance, trip) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	_, _ = h.Result(ctx, "trip-1")
	in, s, err := h.Get(ctx, "trip-1")
	require.NoError(t, err)
	require.Equal(t, want, in.Status, "at %q because of %q", in.Step, in.Cause)
	return in, s
}

// until waits until a step of trip-1 has the status.
func until(t *testing.T, h *saga.Handle[trip], step string, want saga.StepStatus) {
	t.Helper()
	require.Eventually(t, func() bool {
		in, _, err := h.Get(t.Context(), "trip-1")
		require.NoError(t, err)
		return slices.ContainsFunc(in.Steps, func(st saga.StepState) bool { return st.Name == step && st.Status == want })
	}, time.Minute, time.Millisecond)
}

func TestContinuesAsNew(t *testing.T) {
	count := 1000
	if testing.Short() {
		count = 200
	}
	var steps []saga.Step[trip]
	var calls atomic.Int32
	for i := range count {
		st := step(fmt.Sprint(i))
		st.Do = func(context.Context, *trip) error { calls.Add(1); return nil }
		steps = append(steps, st)
	}
	env, h := start(t, steps...)
	end(t, h, saga.Completed)
	require.EqualValues(t, count, calls.Load())
	require.Equal(t, count/64+1, env.executions["trip-1"].runs)
}

// A run does not end while an attempt is in progress, whose answer would be lost.
func TestRunEndsWithoutAttempts(t *testing.T) {
	slow, failing := step("slow"), step("failing")
	var slowCalls, failures atomic.Int32
	enough := make(chan struct{})
	slow.Do = func(context.Context, *trip) error { slowCalls.Add(1); <-enough; return nil }
	failing.Parallel, failing.Attempts = true, saga.Unlimited
	failing.Backoff = func(int) time.Duration { return time.Millisecond }
	failing.Do = func(context.Context, *trip) error {
		if n := failures.Add(1); n == 50 { // two decisions each
			close(enough)
		} else if n == 60 {
			return nil
		}
		return errBroken
	}
	env, h := start(t, slow, failing)
	end(t, h, saga.Completed)
	require.EqualValues(t, 1, slowCalls.Load())
	require.Equal(t, 2, env.executions["trip-1"].runs)
}

// A signal that an earlier run received is known in the later ones, and after the end.
func TestSignalIsKnownInLaterRuns(t *testing.T) {
	first, last := step("first"), step("last")
	first.Await, last.Await = "ready", "paid"
	steps := []saga.Step[trip]{first}
	for i := range 100 {
		steps = append(steps, step(fmt.Sprint(i)))
	}
	last.Do = func(ctx context.Context, s *trip) error {
		paid, _ := saga.SignalFrom(ctx, "paid")
		s.Note = string(paid)
		return nil
	}
	env, h := start(t, append(steps, last)...)
	require.NoError(t, h.Signal(t.Context(), "trip-1", "paid", []byte("by card")))
	require.NoError(t, h.Signal(t.Context(), "trip-1", "ready", nil))
	_, s := end(t, h, saga.Completed)
	require.Equal(t, "by card", s.Note)
	require.Equal(t, 2, env.executions["trip-1"].runs)
	require.NoError(t, h.Signal(t.Context(), "trip-1", "paid", []byte("in cash")))
	require.ErrorIs(t, h.Signal(t.Context(), "trip-1", "other", nil), saga.ErrNotAllowed)
}

// An attempt whose worker died is made again with the same command, and does not count.
func TestLostAttemptIsMadeAgain(t *testing.T) {
	var ids []string
	flight := step("flight")
	flight.Attempts = 1
	flight.Do = func(ctx context.Context, _ *trip) error {
		c := saga.CommandFrom(ctx)
		ids = append(ids, fmt.Sprintf("%s %d", c.ID, c.Attempt))
		return nil
	}
	env := newEnvironment()
	env.lose = func(c saga.Call) bool { return c.Op == saga.OpDo && len(ids) <= 3 }
	h := saga.Register(sagatemporal.New(env, env, "sagas"), define(flight, step("hotel")))
	_, err := h.Start(t.Context(), "trip-1", trip{})
	require.NoError(t, err)
	in, _ := end(t, h, saga.Completed)
	require.Len(t, ids, 4)
	require.Len(t, slices.Compact(slices.Clone(ids)), 1, ids)
	require.Equal(t, 1, in.Steps[0].Attempts)
	require.GreaterOrEqual(t, in.UpdatedAt.Sub(in.CreatedAt), 3*time.Second, "a second before each")
}

func TestCanceledWorkflowTurnsBack(t *testing.T) {
	hotel := step("hotel")
	hotel.Await = "paid"
	env, h := start(t, step("flight"), hotel)
	until(t, h, "hotel", saga.StepWaiting)
	require.NoError(t, env.CancelWorkflow(t.Context(), "trip-1", ""))
	in, s := end(t, h, saga.Compensated)
	require.Equal(t, []string{"do flight", "undo flight"}, s.Calls)
	require.Equal(t, saga.ErrCanceled.Error(), in.Cause)
}

// An operation moves a stuck saga to a version with corrected steps.
func TestOperationWithVersion(t *testing.T) {
	env := newEnvironment()
	engine := sagatemporal.New(env, env, "sagas")
	broken, works := step("charge"), step("charge")
	broken.Do, broken.Pivot, broken.Undo = note("do charge", saga.Permanent(errBroken)), true, nil
	works.Pivot, works.Undo = true, nil
	second := define(step("flight"), works)
	second.Version = 2
	first := define(step("flight"), broken)
	h := saga.Register(engine, first)
	_, err := h.Start(t.Context(), "trip-1", trip{})
	require.NoError(t, err)
	end(t, h, saga.Stuck)
	move := saga.Operation{Action: saga.ActionRetry, Version: 2, Note: "corrected"}
	err = engine.Operate(t.Context(), "trip-1", move)
	require.ErrorIs(t, err, saga.ErrNotAllowed)
	require.ErrorContains(t, err, "version 2")
	h = saga.Register(engine, second, first)
	require.NoError(t, engine.Operate(t.Context(), "trip-1", move))
	in, s := end(t, h, saga.Completed)
	require.Equal(t, 2, in.Version)
	require.Equal(t, []string{"do flight", "do charge", "do charge"}, s.Calls)
}

// A refused operation leaves the timer of a wait. Time is real here, since the other step is in progress.
func TestRefusedOperationKeepsTheTimer(t *testing.T) {
	for _, version := range []int{1, 7} { // the saga's own, and one that is not registered
		t.Run(fmt.Sprint(version), func(t *testing.T) {
			env := newEnvironment()
			engine := sagatemporal.New(env, env, "sagas")
			flight, hotel := step("flight"), step("hotel")
			called := make(chan struct{})
			flight.Do = func(context.Context, *trip) error { <-called; return nil }
			hotel.Do = func(context.Context, *trip) error { close(called); return nil }
			hotel.Delay, hotel.Parallel = 500*time.Millisecond, true
			h := saga.Register(engine, define(flight, hotel))
			_, err := h.Start(t.Context(), "trip-1", trip{})
			require.NoError(t, err)
			move := saga.Operation{Action: saga.ActionRetry, Version: version, Note: "while an attempt is in progress"}
			require.ErrorIs(t, engine.Operate(t.Context(), "trip-1", move), saga.ErrNotAllowed)
			end(t, h, saga.Completed)
		})
	}
}

func TestStateTooLong(t *testing.T) {
	flight := step("flight")
	flight.Do = func(_ context.Context, s *trip) error { s.Note = strings.Repeat("x", 300<<10); return nil }
	_, h := start(t, flight)
	in, _ := end(t, h, saga.Compensated)
	require.Contains(t, in.Cause, "state is longer than 262144 bytes")
	_, err := h.Start(t.Context(), "trip-2", trip{Note: strings.Repeat("x", 300<<10)})
	require.ErrorContains(t, err, "must be at most 262144")
	_, _, err = h.Get(t.Context(), "trip-2")
	require.ErrorIs(t, err, saga.ErrNotFound)
}

func TestErrorsOfUnknownSaga(t *testing.T) {
	env := newEnvironment()
	engine := sagatemporal.New(env, env, "sagas")
	_, err := engine.Get(t.Context(), "trip-1")
	require.EqualError(t, err, `sagatemporal: get "trip-1": saga: not found`)
	_, err = engine.Wait(t.Context(), "trip-1")
	require.EqualError(t, err, `sagatemporal: get "trip-1": saga: not found`)
	err = engine.Signal(t.Context(), "trip-1", "paid", nil)
	require.EqualError(t, err, `sagatemporal: signal "paid" of "trip-1": saga: not found`)
	err = engine.Operate(t.Context(), "trip-1", saga.Operation{Action: saga.ActionRetry})
	require.EqualError(t, err, `sagatemporal: retry of "trip-1": saga: not found`)
}

func TestRefusedDefinitions(t *testing.T) {
	engine := sagatemporal.New(newEnvironment(), nil, "sagas")
	tx := func(context.Context, *sql.Tx, *trip) error { return nil }
	for _, c := range []struct {
		name, text string
		is         error
		step       saga.Step[trip]
	}{
		{"DoTx", "DoTx or UndoTx", saga.ErrNoTx, saga.Step[trip]{Name: "a", DoTx: tx, UndoTx: tx}},
		{"UndoTx", "DoTx or UndoTx", saga.ErrNoTx, saga.Step[trip]{Name: "a", Do: note("do a", nil), UndoTx: tx}},
		{"Child", "a step with a Child", errors.ErrUnsupported, saga.Step[trip]{Name: "a", Child: saga.ChildOf(
			define(step("bus")), func(*trip) (trip, error) { return trip{}, nil }, nil)}},
	} {
		t.Run(c.name, func(t *testing.T) {
			d, err := saga.Define(define(c.step))
			require.NoError(t, err)
			err = engine.Register(d)
			require.ErrorIs(t, err, c.is)
			require.ErrorContains(t, err, "trip version 1 has a")
			require.ErrorContains(t, err, c.text)
		})
	}
	type lossy struct {
		Kept string
		Lost string `json:"-"`
	}
	do := func(context.Context, *lossy) error { return nil }
	require.PanicsWithError(t, "saga: lossy: s.Lost is not kept by JSON and would be lost when a saga is taken over: "+
		`export it without the tag "-" and with a name of its own in JSON, or set Codec`, func() {
		saga.Register(engine, &saga.Saga[lossy]{Name: "lossy", Steps: []saga.Step[lossy]{{Name: "a", Do: do, Undo: do}}})
	})
	h := saga.Register(engine, define(step("flight")))
	require.ErrorIs(t, h.StartTx(t.Context(), nil, "trip-1", trip{}), saga.ErrNoTx)
	require.ErrorIs(t, h.SignalTx(t.Context(), nil, "trip-1", "paid", nil), saga.ErrNoTx)
}

// A process without a worker only starts sagas.
func TestStartWithoutWorker(t *testing.T) {
	env := newEnvironment()
	saga.Register(sagatemporal.New(env, env, "sagas"), define(step("flight")))
	h := saga.Register(sagatemporal.New(env, nil, "sagas"), define(step("flight")))
	_, err := h.Start(t.Context(), "trip-1", trip{})
	require.NoError(t, err)
	end(t, h, saga.Completed)
}

func TestNewPanics(t *testing.T) {
	env := newEnvironment()
	require.Panics(t, func() { sagatemporal.New(nil, env, "sagas") })
	require.Panics(t, func() { sagatemporal.New(env, env, "") })
}
