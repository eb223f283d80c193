// Package enginetest provides the tests that every [saga.Engine] must pass. The tests check that sagas complete, turn
// back, wait, are canceled, get stuck, and obey an operator in the same way as with a [saga.Runner]. The tests also
// check that no saga is lost if the process dies.
//
//	func TestEngine(t *testing.T) {
//		enginetest.Run(t, func(t *testing.T) enginetest.Environment {
//			engine := newEngine(t)
//			return enginetest.Environment{Engine: engine, Restart: engine.restart}
//		})
//	}
//
// The tests run in real time. A test polls a saga every few milliseconds until the saga has the expected state. The
// test fails if a saga does not reach the expected state within a minute, or within a quarter of the time left before
// go test's -timeout, whichever is shorter. A slow engine can therefore also pass. In the tests' sagas, the pauses
// between attempts are 1 millisecond, and the waits of steps are 20 milliseconds.
//
// # Limits
//
// The package does not test the following properties of an engine, which need other tests:
//
//   - DoTx, UndoTx and the methods of a [saga.TxEngine]
//   - children
//   - several processes that run sagas at the same time
//   - Saga.Timeout, and limits on the length of states, payloads and notes
//   - snapshots of an earlier version of the module
//
// # Stability
//
// The package is unstable until 1.0.0, as [saga.Engine] is. A minor version may add tests.
package enginetest

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/go-resilience/resilience/saga"
)

const (
	look  = 3 * time.Millisecond  // the interval at which a test polls a saga
	pause = time.Millisecond      // the pause between attempts
	wait  = 20 * time.Millisecond // the duration of a step's wait
)

// An Environment is an engine under test. The engine has no sagas and no definitions.
type Environment struct {
	// Engine is the engine. Several goroutines use it concurrently. After Restart, the engine must still work, with the
	// definitions that were registered before Restart.
	Engine saga.Engine
	// Restart stops the process that runs sagas, at any time, and starts another one. Restart may return before the
	// attempts in progress have returned. If Restart is nil, the tests that need Restart are skipped.
	Restart func()
}

// Run runs the tests, each as a subtest of t with a new environment. Run calls newEnvironment with the subtest's t, so
// newEnvironment can register a cleanup.
//
// If the engine's List returns an error that matches [errors.ErrUnsupported], the tests of List are skipped.
func Run(t *testing.T, newEnvironment func(t *testing.T) Environment) {
	t.Helper()
	for _, st := range stories {
		t.Run("Saga"+st.name, func(t *testing.T) {
			newSuite(t, newEnvironment).tell(st)
		})
	}
	for _, c := range []struct {
		name string
		test func(*suite)
	}{
		{"ParallelStatesAreMerged", parallelStates},
		{"VersionsRunTheirSteps", versions},
		{"RegisterRepeated", registerRepeated},
		{"RegisterOtherDefinition", registerOther},
		{"StartRepeated", startRepeated},
		{"StartAfterTheEnd", startAfterEnd},
		{"StartOnceOfMany", startOnceOfMany},
		{"StartOfAnotherDefinition", startOther},
		{"StartNeedsAnID", startID},
		{"UnknownID", unknown},
		{"WaitEndsWithItsContext", waitEnds},
		{"SignalBeforeTheWait", signalEarly},
		{"SignalDuringTheWait", signalLate},
		{"SignalIsKeptOnce", signalOnce},
		{"SignalNoStepAwaits", signalUnknown},
		{"SignalAfterTheEnd", signalAfterEnd},
		{"CancelDuringTheWait", cancelWaiting},
		{"CancelDuringAnAttempt", cancelAttempt},
		{"CancelAfterThePivot", cancelAfterPivot},
		{"CancelAfterTheEnd", cancelAfterEnd},
		{"RetryOfADo", retryDo},
		{"RetryOfAnUndo", retryUndo},
		{"Skip", skip},
		{"Compensate", compensate},
		{"Abandon", abandon},
		{"OperationOfAnOldInstance", oldInstance},
		{"List", list},
		{"ListPages", listPages},
		{"RestartDuringTheWait", restartWaiting},
		{"RestartKeepsSignals", restartSignals},
		{"RestartDuringADo", restartDo},
		{"RestartDuringAnUndo", restartUndo},
		{"RestartOfAStuckSaga", restartStuck},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.test(newSuite(t, newEnvironment))
		})
	}
}

// A suite is a test of an engine. The package uses no assertion library, so the tests of an engine need no more
// dependencies than the engine.
type suite struct {
	*testing.T
	Environment
	ctx      context.Context
	patience time.Duration // the maximum time that a test waits for a saga
}

func newSuite(t *testing.T, newEnvironment func(t *testing.T) Environment) *suite {
	t.Helper()
	patience := time.Minute
	if deadline, ok := t.Deadline(); ok {
		patience = min(patience, time.Until(deadline)/4)
	}
	return &suite{T: t, Environment: newEnvironment(t), ctx: t.Context(), patience: patience}
}

// need ends the test unless ok is true.
func (s *suite) need(ok bool, format string, args ...any) {
	s.Helper()
	if !ok {
		s.Fatalf(format, args...)
	}
}

func (s *suite) noError(err error) {
	s.Helper()
	s.need(err == nil, "error: %v", err)
}

func (s *suite) matches(err, want error) {
	s.Helper()
	s.need(errors.Is(err, want), "error: %v, want one that matches: %v", err, want)
}

// restart restarts the process that runs sagas. It skips the test if the environment has no Restart.
func (s *suite) restart() {
	s.Helper()
	if s.Restart == nil {
		s.Skip("the environment has no Restart")
	}
	s.Restart()
}

// A trip is the state of most sagas in the tests.
type trip struct {
	Calls []string // the names of the calls that have changed the state, in their order
	Paid  []byte   // the payload of a signal
	A, B  string
}

var errBroken = errors.New("broken")

// note returns a Do or an Undo that records its name and returns err.
func note(name string, err error) func(context.Context, *trip) error {
	return func(_ context.Context, s *trip) error {
		s.Calls = append(s.Calls, name)
		return err
	}
}

func backoff(int) time.Duration { return pause }

// step returns a step that succeeds.
func step(name string) saga.Step[trip] {
	return saga.Step[trip]{Name: name, Do: note("do "+name, nil), Undo: note("undo "+name, nil), Backoff: backoff}
}

// failing returns a step whose Do returns err.
func failing(name string, err error) saga.Step[trip] {
	st := step(name)
	st.Do = note("do "+name, err)
	return st
}

// awaiting returns a step that waits for a signal and records the signal's payload.
func awaiting(name, signal string) saga.Step[trip] {
	st := step(name)
	st.Await = signal
	st.Do = func(ctx context.Context, s *trip) error {
		s.Calls = append(s.Calls, "do "+name)
		s.Paid, _ = saga.SignalFrom(ctx, signal)
		return nil
	}
	return st
}

// pivot returns st as a pivot (the point of no return) without Undo.
func pivot(st saga.Step[trip]) saga.Step[trip] {
	st.Pivot, st.Undo = true, nil
	return st
}

func define(steps ...saga.Step[trip]) *saga.Saga[trip] {
	return &saga.Saga[trip]{Name: "trip", Version: 1, Steps: steps}
}

// register registers a definition with these steps.
func (s *suite) register(steps ...saga.Step[trip]) *saga.Handle[trip] {
	s.Helper()
	return registered(s, define(steps...))
}

func registered[S any](s *suite, sg *saga.Saga[S]) *saga.Handle[S] {
	s.Helper()
	d, err := saga.Define(sg)
	s.noError(err)
	s.noError(s.Engine.Register(d)) // saga.Register would panic
	return saga.Register(s.Engine, sg)
}

// start registers a definition with these steps and starts a saga with the id.
func (s *suite) start(id string, steps ...saga.Step[trip]) *saga.Handle[trip] {
	s.Helper()
	h := s.register(steps...)
	in, err := h.Start(s.ctx, id, trip{})
	s.noError(err)
	s.need(in.ID == id && in.Saga == "trip" && in.Version == 1, "Start returned another saga: %+v", in)
	return h
}

// wait waits until the saga has ended or is stuck, and checks its status.
func (s *suite) wait(id string, want saga.Status) *saga.Instance {
	s.Helper()
	ctx, cancel := context.WithTimeout(s.ctx, s.patience)
	defer cancel()
	in, err := s.Engine.Wait(ctx, id)
	s.noError(err)
	s.need(in.Status == want, "saga %s is %s at %q because of %q, want %s", id, in.Status, in.Step, in.Cause, want)
	return in
}

// until waits until a step of the saga has the status want.
func (s *suite) until(id, step string, want saga.StepStatus) *saga.Instance {
	s.Helper()
	for end := time.Now().Add(s.patience); ; time.Sleep(look) {
		in, err := s.Engine.Get(s.ctx, id)
		s.noError(err)
		i := slices.IndexFunc(in.Steps, func(st saga.StepState) bool { return st.Name == step })
		s.need(i >= 0, "saga %s has no step %s: %+v", id, step, in.Steps)
		if in.Steps[i].Status == want {
			return in
		}
		s.need(time.Now().Before(end), "step %s is %s, want %s", step, in.Steps[i].Status, want)
	}
}

// done waits until a saga has ended or is stuck, and checks its status and the calls in its state.
func (s *suite) done(h *saga.Handle[trip], id string, want saga.Status, calls ...string) *saga.Instance {
	s.Helper()
	in := s.wait(id, want)
	_, state, err := h.Get(s.ctx, id)
	s.noError(err)
	s.need(slices.Equal(state.Calls, calls), "calls of saga %s:\ngot  %q\nwant %q", id, state.Calls, calls)
	return in
}

// statuses checks the statuses of all steps.
func (s *suite) statuses(in *saga.Instance, want ...saga.StepStatus) {
	s.Helper()
	var got []saga.StepStatus
	for _, st := range in.Steps {
		got = append(got, st.Status)
	}
	s.need(slices.Equal(got, want), "steps of saga %s:\ngot  %q\nwant %q", in.ID, got, want)
}
