package saga_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga"
)

// A trip is the state in most tests: the calls in order.
type trip struct{ Calls []string }

var errDeclined = errors.New("declined")

// note returns a Do or an Undo that appends its name to the state.
func note(name string, err error) func(context.Context, *trip) error {
	return func(_ context.Context, s *trip) error {
		s.Calls = append(s.Calls, name)
		return err
	}
}

func step(name string) saga.Step[trip] {
	return saga.Step[trip]{
		Name: name, Do: note("do "+name, nil), Undo: note("undo "+name, nil),
		Backoff: func(int) time.Duration { return time.Second },
	}
}

func failing(name string, err error) saga.Step[trip] {
	st := step(name)
	st.Do = note("do "+name, err)
	return st
}

// constant is a Backoff without jitter, since a test relies on the length of the wait.
func constant(d time.Duration) func(int) time.Duration { return func(int) time.Duration { return d } }

func sequence(steps ...saga.Step[trip]) *saga.Saga[trip] {
	return &saga.Saga[trip]{Name: "trip", Version: 1, Steps: steps}
}

func detail(t *testing.T, err error) *saga.Error {
	t.Helper()
	e, ok := errors.AsType[*saga.Error](err)
	require.True(t, ok, "%v", err)
	return e
}

func TestRunHonorsCanceledContext(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errDeclined)
	var s trip
	err := saga.Run(ctx, sequence(step("flight")), &s)
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorIs(t, err, errDeclined)
	require.Empty(t, s.Calls)
}

type hint struct {
	after time.Duration
	retry bool
}

func (hint) Error() string               { return "hint" }
func (h hint) RetryAfter() time.Duration { return h.after }
func (h hint) Retryable() bool           { return h.retry }

// An answer is the error of a participant that answered no, with or without a RetryAfter.
type answer struct{ hint error }

func (answer) Error() string   { return "no" }
func (answer) Answered() bool  { return true }
func (a answer) Unwrap() error { return a.hint }

// A refusal is the error of a policy that refused the call.
type refusal struct{ after time.Duration }

func (refusal) Error() string               { return "refused" }
func (refusal) Refused() bool               { return true }
func (refusal) Retryable() bool             { return false }
func (r refusal) RetryAfter() time.Duration { return r.after }

func TestRunClassifiesErrors(t *testing.T) {
	for _, c := range []struct {
		name  string
		err   error
		calls []string
		took  time.Duration
	}{
		{"plain", errDeclined, []string{"do x", "do x", "do x", "undo x"}, 2 * time.Second},
		{"abort", saga.Permanent(errDeclined), []string{"do x", "undo x"}, 0},
		{"no effect", saga.Declined(errDeclined), []string{"do x"}, 0},
		{"not retryable", hint{}, []string{"do x", "do x", "do x", "undo x"}, 2 * time.Second},
		{"answered", answer{}, []string{"do x", "undo x"}, 0},
		{"answered, to be retried", answer{hint{after: time.Minute, retry: true}},
			[]string{"do x", "do x", "do x", "undo x"}, 2 * time.Minute},
		{"no effect joined with a timeout", errors.Join(saga.Declined(errDeclined), context.DeadlineExceeded),
			[]string{"do x", "undo x"}, 0},
		{"no effect joined with a refusal", errors.Join(saga.Declined(errDeclined), refusal{}), []string{"do x"}, 0},
		{"no effect around a timeout", saga.Declined(errors.Join(errDeclined, context.DeadlineExceeded)), []string{"do x"},
			0},
		{"a child without effect", &saga.Error{Status: saga.Compensated, Err: saga.Declined(errDeclined)},
			[]string{"do x", "undo x"}, 0},
		{"in doubt, whatever it wraps", saga.MaybeApplied(saga.Declined(errDeclined)), []string{"do x", "undo x"}, 0},
		{"a refusal in doubt", saga.MaybeApplied(refusal{}), []string{"do x", "do x", "do x", "undo x"}, 2 * time.Second},
		{"a refusal joined with a failure", errors.Join(refusal{}, errDeclined), []string{"do x", "do x", "do x", "undo x"},
			2 * time.Second},
		{"not retryable now", hint{after: time.Minute}, []string{"do x", "do x", "do x", "undo x"}, 2 * time.Minute},
		{"not retryable for years", hint{after: math.MaxInt64}, []string{"do x", "do x", "do x", "undo x"}, 2 * time.Hour},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				begun := time.Now()
				var s trip
				err := saga.Run(t.Context(), sequence(failing("x", c.err)), &s)
				require.ErrorIs(t, err, saga.ErrCompensated)
				require.ErrorIs(t, err, c.err)
				require.Equal(t, c.calls, s.Calls)
				// The jitter on the RetryAfter of a server is up to a tenth.
				require.GreaterOrEqual(t, time.Since(begun), c.took)
				require.LessOrEqual(t, time.Since(begun), c.took+c.took/10+2*time.Nanosecond)
			})
		})
	}
	require.NoError(t, saga.Permanent(nil))
	require.NoError(t, saga.Declined(nil))
	require.NoError(t, saga.MaybeApplied(nil))
}

// TestRunIsStuckAtPivotInDoubt: ctx ends while a pivot without Undo is retried.
func TestRunIsStuckAtPivotInDoubt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		charge := failing("charge", errDeclined)
		charge.Pivot, charge.Undo, charge.Backoff = true, nil, constant(25*time.Second)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		var s trip
		begun := time.Now()
		err := saga.Run(ctx, sequence(step("flight"), charge), &s)
		require.ErrorIs(t, err, saga.ErrStuck)
		require.ErrorIs(t, err, errDeclined)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.NotErrorIs(t, err, saga.ErrCompensated)
		require.Equal(t, time.Minute, time.Since(begun))
		require.Equal(t, []string{"do flight", "do charge", "do charge", "do charge"}, s.Calls)
	})
}

func TestRunUndoesOnDetachedContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		type key struct{}
		ctx, cancel := context.WithCancelCause(context.WithValue(t.Context(), key{}, "value"))
		hung := step("hotel")
		hung.Do = func(ctx context.Context, _ *trip) error {
			cancel(errors.New("user left"))
			<-ctx.Done()
			return ctx.Err()
		}
		flight, tries := step("flight"), 0
		flight.Timeout = 7 * time.Second
		flight.Undo = func(ctx context.Context, s *trip) error {
			require.NoError(t, ctx.Err())
			require.Equal(t, "value", ctx.Value(key{}))
			deadline, ok := ctx.Deadline()
			require.True(t, ok)
			require.Equal(t, 7*time.Second, time.Until(deadline))
			if tries++; tries < 3 {
				return errDeclined // its own failures do not end it either
			}
			return note("undo flight", nil)(ctx, s)
		}
		var s trip
		err := saga.Run(ctx, sequence(flight, hung), &s)
		require.ErrorIs(t, err, saga.ErrCompensated)
		require.ErrorIs(t, err, context.Canceled)
		require.ErrorContains(t, err, "user left")
		require.Equal(t, []string{"do flight", "undo hotel", "undo flight"}, s.Calls)
	})
}

func TestRunStopsWaitingAfterCancel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 90*time.Second)
		defer cancel()
		slow := failing("flight", errDeclined)
		slow.Backoff = func(int) time.Duration { return time.Minute }
		begun := time.Now()
		err := saga.Run(ctx, sequence(slow), &trip{})
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.ErrorIs(t, err, saga.ErrCompensated)
		require.Equal(t, 90*time.Second, time.Since(begun))

		t.Log("after the pivot it is stuck, but every step was tried")
		ctx, cancel = context.WithCancel(t.Context())
		charge := step("charge")
		charge.Pivot = true
		charge.Do = func(context.Context, *trip) error { cancel(); return nil }
		last := step("mail")
		last.Do = func(ctx context.Context, s *trip) error {
			require.NoError(t, ctx.Err())
			return note("do mail", errDeclined)(ctx, s)
		}
		var s trip
		err = saga.Run(ctx, sequence(charge, step("tickets"), last), &s)
		require.ErrorIs(t, err, saga.ErrStuck)
		require.ErrorIs(t, err, context.Canceled)
		require.ErrorIs(t, err, errDeclined)
		require.Equal(t, []string{"do tickets", "do mail"}, s.Calls)

		t.Log("even while it waits")
		ctx, cancel = context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		charge.Do = note("do charge", nil)
		slow.Backoff = func(int) time.Duration { return time.Minute }
		begun = time.Now()
		err = saga.Run(ctx, sequence(charge, slow), &trip{})
		require.ErrorIs(t, err, saga.ErrStuck)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Equal(t, 30*time.Second, time.Since(begun))
	})
}

// TestRunCanceledDuringStep: the error has the step, its error and ctx's cause.
func TestRunCanceledDuringStep(t *testing.T) {
	errLeft := errors.New("user left")
	for name, c := range map[string]struct {
		pivot  bool // the step is the pivot, and has no Undo
		after  bool // the step is after the pivot
		answer func(ctx context.Context) error
		status error
		calls  []string
	}{
		"before the pivot": {false, false, func(context.Context) error { return errDeclined },
			saga.ErrCompensated, []string{"do flight", "do hotel", "undo hotel", "undo flight"}},
		"an answer": {false, false, func(context.Context) error { return saga.Declined(errDeclined) },
			saga.ErrCompensated, []string{"do flight", "do hotel", "undo flight"}},
		"the end itself": {false, false, func(ctx context.Context) error {
			return fmt.Errorf("%w: %w",
				errDeclined, ctx.Err())
		}, saga.ErrCompensated, []string{"do flight", "do hotel", "undo hotel", "undo flight"}},
		"its cause": {false, false, func(ctx context.Context) error {
			return fmt.Errorf("%w: %w", errDeclined, context.Cause(ctx))
		}, saga.ErrCompensated, []string{"do flight", "do hotel", "undo hotel", "undo flight"}},
		"the pivot": {true, false, func(context.Context) error { return errDeclined }, saga.ErrStuck,
			[]string{"do flight", "do hotel"}},
		"the pivot has no effect": {true, false, func(context.Context) error { return saga.Declined(errDeclined) },
			saga.ErrCompensated, []string{"do flight", "do hotel", "undo flight"}},
		"after the pivot": {false, true, func(context.Context) error { return errDeclined }, saga.ErrStuck,
			[]string{"do flight", "do hotel"}},
		"after the pivot, permanently": {false, true, func(context.Context) error { return saga.Permanent(errDeclined) },
			saga.ErrStuck, []string{"do flight", "do hotel"}},
		"after the pivot, a refusal": {false, true, func(context.Context) error {
			return errors.Join(errDeclined,
				refusal{})
		}, saga.ErrStuck, []string{"do flight", "do hotel"}},
		"before the pivot, a refusal": {false, false, func(context.Context) error {
			return errors.Join(errDeclined,
				refusal{})
		}, saga.ErrCompensated, []string{"do flight", "do hotel", "undo hotel", "undo flight"}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancelCause(t.Context())
				flight, hotel := step("flight"), step("hotel")
				flight.Pivot, hotel.Pivot = c.after, c.pivot
				hotel.Backoff = func(int) time.Duration { return 0 }
				if c.pivot {
					hotel.Undo = nil
				}
				hotel.Do = func(ctx context.Context, s *trip) error {
					cancel(errLeft)
					return note("do hotel", c.answer(ctx))(ctx, s)
				}
				var s trip
				err := saga.Run(ctx, sequence(flight, hotel, step("car")), &s)
				require.Equal(t, c.calls, s.Calls)
				require.ErrorIs(t, err, c.status)
				require.ErrorIs(t, err, errDeclined)
				require.ErrorIs(t, err, context.Canceled)
				require.ErrorIs(t, err, errLeft)
				require.Equal(t, "hotel", detail(t, err).Step)
			})
		})
	}
}

func TestRunCancelsAttemptsAtDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		heeds := step("hotel")
		heeds.Do = func(ctx context.Context, _ *trip) error {
			<-ctx.Done()
			require.ErrorIs(t, context.Cause(ctx), saga.ErrDeadline)
			return ctx.Err()
		}
		beside := step("car")
		beside.Parallel, beside.Undo = true, func(context.Context, *trip) error { return nil }
		for _, sg := range []*saga.Saga[trip]{sequence(step("flight"), heeds), sequence(step("flight"), heeds, beside)} {
			sg.Timeout = 30 * time.Second
			begun := time.Now()
			err := saga.Run(t.Context(), sg, &trip{})
			require.ErrorIs(t, err, saga.ErrDeadline)
			require.ErrorIs(t, err, saga.ErrCompensated)
			require.Equal(t, "hotel", detail(t, err).Step)
			require.Equal(t, 30*time.Second, time.Since(begun))
		}

		t.Log("not for a pivot without Undo, whose outcome decides")
		pivot := step("charge")
		pivot.Pivot, pivot.Undo = true, nil
		pivot.Do = func(ctx context.Context, _ *trip) error {
			time.Sleep(time.Minute)
			return ctx.Err()
		}
		sg := sequence(step("flight"), pivot)
		sg.Timeout = 30 * time.Second
		require.NoError(t, saga.Run(t.Context(), sg, &trip{}))
	})
}

func TestRunCancelsParallelStepsAfterFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var cause error
		hang := step("b")
		hang.Do = func(ctx context.Context, _ *trip) error {
			<-ctx.Done()
			cause = context.Cause(ctx)
			return cause
		}
		fail := failing("c", saga.Declined(errDeclined))
		fail.Parallel = true
		var s trip
		err := saga.Run(t.Context(), sequence(step("a"), hang, fail), &s)
		require.Equal(t, "c", detail(t, err).Step)
		require.ErrorIs(t, cause, errDeclined)
		require.Equal(t, []string{"do a", "do c", "undo b", "undo a"}, s.Calls)
	})
}

// TestRunRetriesParallelStepIndependently does not wait for the other step.
func TestRunRetriesParallelStepIndependently(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		again, slow := step("a"), step("b")
		slow.Parallel = true
		begun, tried := time.Now(), []time.Duration(nil)
		var kept context.Context
		again.Do = func(ctx context.Context, _ *trip) error {
			kept = ctx
			if tried = append(tried, time.Since(begun)); len(tried) < 3 {
				return errDeclined
			}
			return nil
		}
		slow.Do = func(context.Context, *trip) error { time.Sleep(time.Minute); return nil }
		require.NoError(t, saga.Run(t.Context(), sequence(again, slow), &trip{}))
		require.Equal(t, []time.Duration{0, time.Second, 2 * time.Second}, tried)
		require.Error(t, kept.Err(), "the ctx of an attempt ends with it")
	})
}

// TestRunWaitsForParallelSteps, even if the saga is stuck before they return.
func TestRunWaitsForParallelSteps(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		pivot, fails, slow := step("a"), step("b"), step("c")
		pivot.Pivot, slow.Parallel = true, true
		fails.Do = func(context.Context, *trip) error { time.Sleep(time.Second); cancel(); return errDeclined }
		slow.Do = func(context.Context, *trip) error { time.Sleep(time.Minute); return errors.New("late") }
		begun := time.Now()
		err := saga.Run(ctx, sequence(pivot, fails, slow), &trip{})
		require.ErrorIs(t, err, saga.ErrStuck)
		require.ErrorIs(t, err, errDeclined)
		require.Equal(t, "b", detail(t, err).Step)
		require.Equal(t, time.Minute, time.Since(begun))
	})
}

func TestRunRepanicsAfterUndo(t *testing.T) {
	for _, parallel := range []bool{false, true} {
		var s trip
		bad := step("hotel")
		bad.Do = func(context.Context, *trip) error { panic("boom") }
		sg := sequence(step("flight"), bad)
		if parallel {
			sg = sequence(step("flight"), bad, step("mail"), step("car"))
			sg.Steps[2].Parallel = true
			sg.Steps[2].Do = func(ctx context.Context, _ *trip) error { <-ctx.Done(); return saga.Declined(ctx.Err()) }
		}
		require.PanicsWithValue(t, "boom", func() { _ = saga.Run(t.Context(), sg, &s) })
		require.Equal(t, []string{"do flight", "undo hotel", "undo flight"}, s.Calls)

		s = trip{}
		sg.Steps[1].Do = func(context.Context, *trip) error { runtime.Goexit(); return nil }
		sg = &saga.Saga[trip]{Name: "trip", Steps: slices.Clone(sg.Steps)}
		done := make(chan struct{})
		go func() {
			defer close(done)
			_ = saga.Run(t.Context(), sg, &s)
			t.Error("Run returned")
		}()
		<-done
		require.Equal(t, []string{"do flight", "undo hotel", "undo flight"}, s.Calls)
	}
}

// TestRunUndoesAfterPanicOutsideStep: Run neither hangs nor repeats the step.
func TestRunUndoesAfterPanicOutsideStep(t *testing.T) {
	var none *saga.Error
	for name, err := range map[string]error{"in the Backoff": errDown, "of an error that is nil": none} {
		for _, parallel := range []bool{false, true} {
			t.Run(fmt.Sprint(name, " ", parallel), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					hotel, car := failing("hotel", err), step("car")
					hotel.Backoff = func(n int) time.Duration { return make([]time.Duration, 1)[n] }
					car.Do = func(ctx context.Context, _ *trip) error { <-ctx.Done(); return saga.Declined(ctx.Err()) }
					car.Parallel = true
					sg := sequence(step("flight"), hotel)
					if parallel {
						sg.Steps = append(sg.Steps, car)
					}
					var s trip
					require.Panics(t, func() { _ = saga.Run(t.Context(), sg, &s) })
					require.Equal(t, []string{"do flight", "do hotel", "undo hotel", "undo flight"}, s.Calls)
				})
			})
		}
	}
}

// TestRunStopsAfterPanicPastPivot: after the pivot there is nothing to undo.
func TestRunStopsAfterPanicPastPivot(t *testing.T) {
	pivot, mail := step("charge"), step("mail")
	pivot.Pivot = true
	mail.Do = func(context.Context, *trip) error { panic("boom") }
	var s trip
	require.PanicsWithValue(t, "boom", func() { _ = saga.Run(t.Context(), sequence(pivot, mail, step("tickets")), &s) })
	require.Equal(t, []string{"do charge"}, s.Calls)
}

func TestRunUndoesOtherStepsAfterUndoPanic(t *testing.T) {
	for _, exits := range []bool{false, true} {
		var mu sync.Mutex
		var undone []string
		undoable := func(name string, panics bool) saga.Step[trip] {
			st := step(name)
			st.Parallel = name != "a"
			st.Do = func(context.Context, *trip) error { return nil }
			st.Undo = func(context.Context, *trip) error {
				mu.Lock()
				undone = append(undone, name)
				mu.Unlock()
				if panics && exits {
					runtime.Goexit()
				}
				if panics {
					panic("boom")
				}
				return nil
			}
			return st
		}
		fails := failing("e", saga.Declined(errDeclined))
		sg := sequence(undoable("a", false), undoable("b", true), undoable("c", false), undoable("d", true), fails)
		done := make(chan any, 1)
		go func() {
			defer func() { done <- recover() }()
			_ = saga.Run(t.Context(), sg, &trip{})
			t.Error("Run returned")
		}()
		if got := <-done; exits {
			require.Nil(t, got)
		} else {
			require.Equal(t, "boom", got)
		}
		slices.Sort(undone)
		require.Equal(t, []string{"a", "b", "c", "d"}, undone)
	}
}

func TestRunCommandIDs(t *testing.T) {
	var ids []string
	keep := func(err error) func(context.Context, *trip) error {
		return func(ctx context.Context, _ *trip) error {
			ids = append(ids, saga.CommandFrom(ctx).ID)
			return err
		}
	}
	hotel := saga.Step[trip]{Name: "hotel", Do: keep(saga.Permanent(errDeclined)), Undo: keep(nil)}
	sg := sequence(saga.Step[trip]{Name: "inn", Do: keep(nil), Undo: keep(nil)}, hotel,
		failing("car", saga.Declined(errDeclined)))
	require.Error(t, saga.Run(t.Context(), sg, &trip{}))
	require.Len(t, ids, 4)
	id := ids[0][:26]
	require.Equal(t, []string{
		id + "/inn/do", id + "/hotel/do", id + "/hotel/undo", id + "/inn/undo",
	}, ids)
	first := id
	ids = nil
	require.Error(t, saga.Run(t.Context(), sg, &trip{}))
	require.NotEqual(t, first, ids[0][:26], "each Run is a separate saga")
	require.Zero(t, saga.CommandFrom(t.Context()))
	cmd := saga.Command{ID: "a/b/c/do", Epoch: 3}
	require.Equal(t, "a/b/c/do", cmd.DoID())
	require.Equal(t, "a/b/c/do", saga.Command{ID: "a/b/c/undo"}.DoID())
	require.Empty(t, saga.Command{}.DoID())
	require.Empty(t, saga.Command{ID: "a/b/c/redo"}.DoID())
	require.Equal(t, cmd, saga.CommandFrom(saga.WithCommand(t.Context(), cmd)))
}

func TestCopiedDefinitionIsSeparate(t *testing.T) {
	one := sequence(step("flight"))
	var s trip
	require.NoError(t, saga.Run(t.Context(), one, &s))
	two := *one
	two.Steps = append(slices.Clone(one.Steps), step("hotel"))
	s = trip{}
	require.NoError(t, saga.Run(t.Context(), &two, &s))
	require.Equal(t, []string{"do flight", "do hotel"}, s.Calls)
}

func TestExponential(t *testing.T) {
	backoff := saga.Exponential(time.Second, time.Minute)
	for attempt, most := range map[int]time.Duration{1: time.Second, 3: 4 * time.Second, 7: time.Minute,
		1000: time.Minute} {
		longest := time.Duration(0)
		for range 200 {
			d := backoff(attempt)
			require.Positive(t, d)
			require.LessOrEqual(t, d, most)
			longest = max(longest, d)
		}
		require.Greater(t, longest, most*3/4)
	}
	for _, none := range [][2]time.Duration{{0, 0}, {0, time.Minute}, {-1, time.Minute}, {time.Second, 0},
		{time.Second, -1}} {
		require.Zero(t, saga.Exponential(none[0], none[1])(3), none)
	}
	most := time.Duration(math.MaxInt64)
	for range 200 {
		require.Positive(t, saga.Exponential(most, most)(1<<20))
		require.Positive(t, saga.Exponential(1, most)(64))
		require.LessOrEqual(t, saga.Exponential(time.Minute, time.Second)(1), time.Second)
		require.LessOrEqual(t, backoff(0), time.Second)
	}
}

// TestErrorText lists each failure once, whatever the types of the errors are.
func TestErrorText(t *testing.T) {
	closed := errors.New("closed")
	err := &saga.Error{Saga: "trip", ID: "7", Status: saga.Stuck, Step: "hotel", Err: errDeclined, Failed: []saga.Failure{
		{Step: "hotel", Op: saga.OpDo, Err: errDeclined}, {Step: "hotel", Op: saga.OpUndo, Err: closed},
		{Step: "car", Op: saga.OpDo, Err: closed}, {Step: "mail", Op: saga.OpDo},
	}}
	require.EqualError(t, err, `saga: trip "7": stuck: step hotel: declined; undo of step hotel: closed; `+
		`do of step car: closed; do of step mail: <nil>`)
	require.Subset(t, err.Unwrap(), []error{errDeclined, closed})
	require.NotContains(t, err.Unwrap(), nil)

	t.Log("errors that cannot be compared")
	flight := step("flight")
	flight.Undo, flight.UndoAttempts = note("undo flight", parts{closed}), 1
	got := saga.Run(t.Context(), sequence(flight, failing("hotel", parts{saga.Declined(errDeclined)})), &trip{})
	require.ErrorIs(t, got, saga.ErrStuck)
	require.False(t, detail(t, got).Retryable())
	require.ErrorIs(t, got, closed)
	require.ErrorIs(t, got, errDeclined)

	t.Log("only a saga that is undone has answered")
	for status, answered := range map[saga.Status]bool{saga.Compensated: true, saga.Stuck: false, saga.Abandoned: false} {
		require.Equal(t, answered, (&saga.Error{Status: status, Err: saga.Permanent(errDeclined)}).Answered())
	}
	require.False(t, (&saga.Error{Status: saga.Compensated, Err: errDeclined}).Answered())
	require.False(t, saga.IsDeclined(nil))
}

// TestNestedRunErrorIsFinal: the inner saga has undone its steps, and would do so again.
func TestNestedRunErrorIsFinal(t *testing.T) {
	inner, outer := failing("room", errDeclined), step("hotel")
	inner.Attempts, outer.Attempts = 1, 3
	outer.Do = func(ctx context.Context, s *trip) error { return saga.Run(ctx, sequence(inner), s) }
	var s trip
	require.ErrorIs(t, saga.Run(t.Context(), sequence(outer), &s), errDeclined)
	require.Equal(t, []string{"do room", "undo room", "undo hotel"}, s.Calls)
}
