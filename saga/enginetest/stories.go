package enginetest

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience/saga"
)

// A story is a saga that needs no signal, operator or restart.
type story struct {
	name     string
	steps    func() []saga.Step[trip]
	status   saga.Status
	at       string // the step at which the saga turned back or got stuck
	cause    string // a part of the expected cause; "" means that there is no cause
	answered bool   // the cause is a participant's answer
	calls    []string
	statuses []saga.StepStatus
}

func (s *suite) tell(st story) {
	steps := st.steps()
	h := s.start("trip-1", steps...)
	in := s.wait("trip-1", st.status)
	s.statuses(in, st.statuses...)
	s.need(in.Step == st.at, "the saga ended at step %q, want %q", in.Step, st.at)
	s.need(strings.Contains(in.Cause, st.cause), "the cause is %q, want one with %q", in.Cause, st.cause)
	s.need(st.cause != "" || in.Cause == "", "the cause is %q, want none", in.Cause)
	s.need(in.IdleFor() < time.Hour, "the saga has made no progress for %v", in.IdleFor())
	for i := range steps {
		s.need(in.Steps[i].Pivot == steps[i].Pivot && in.Steps[i].Parallel == steps[i].Parallel,
			"step %s has Pivot %t and Parallel %t", steps[i].Name, in.Steps[i].Pivot, in.Steps[i].Parallel)
	}
	if st.status != saga.Completed {
		_, err := h.Result(s.ctx, "trip-1")
		e, _ := errors.AsType[*saga.Error](err)
		s.need(e != nil && e.Answered() == st.answered, "Answered is not %t: %v", st.answered, err)
	}
	if st.calls != nil {
		s.done(h, "trip-1", st.status, st.calls...)
	}
}

// A refusal is the error of a policy that has not made the call.
type refusal struct{ error }

func (refusal) Refused() bool   { return true }
func (refusal) Retryable() bool { return false }

// firstRefused returns a step whose first n attempts are refused by a policy. The next attempt succeeds.
func firstRefused(name string, n int32) saga.Step[trip] {
	st := step(name)
	var tries atomic.Int32
	st.Do = func(_ context.Context, s *trip) error {
		if tries.Add(1) <= n {
			return refusal{errBroken}
		}
		s.Calls = append(s.Calls, "do "+name)
		return nil
	}
	return st
}

// interruptible returns a step that runs until its ctx is done.
func interruptible(name string) saga.Step[trip] {
	st := step(name)
	st.Do = func(ctx context.Context, _ *trip) error { <-ctx.Done(); return ctx.Err() }
	return st
}

func parallel(st saga.Step[trip]) saga.Step[trip] {
	st.Parallel = true
	return st
}

var stories = []story{
	{
		name:     "Completes",
		steps:    func() []saga.Step[trip] { return []saga.Step[trip]{step("flight"), step("hotel")} },
		status:   saga.Completed,
		calls:    []string{"do flight", "do hotel"},
		statuses: []saga.StepStatus{saga.StepDone, saga.StepDone},
	}, {
		name: "Declined",
		steps: func() []saga.Step[trip] {
			return []saga.Step[trip]{step("flight"), failing("hotel", saga.Declined(errBroken))}
		},
		status: saga.Compensated, at: "hotel", cause: "broken", answered: true,
		calls:    []string{"do flight", "do hotel", "undo flight"},
		statuses: []saga.StepStatus{saga.StepUndone, saga.StepNoEffect},
	}, {
		name:   "Fails",
		steps:  func() []saga.Step[trip] { return []saga.Step[trip]{step("flight"), failing("hotel", errBroken)} },
		status: saga.Compensated, at: "hotel", cause: "broken",
		calls:    []string{"do flight", "do hotel", "do hotel", "do hotel", "undo hotel", "undo flight"},
		statuses: []saga.StepStatus{saga.StepUndone, saga.StepUndone},
	}, {
		name: "StuckInAnUndo",
		steps: func() []saga.Step[trip] {
			hotel := failing("hotel", saga.Permanent(errBroken))
			hotel.Undo, hotel.UndoAttempts = note("undo hotel", errBroken), 2
			return []saga.Step[trip]{step("flight"), hotel}
		},
		status: saga.Stuck, at: "hotel", cause: "broken",
		calls:    []string{"do flight", "do hotel", "undo hotel", "undo hotel"},
		statuses: []saga.StepStatus{saga.StepDone, saga.StepUndoFailed},
	}, {
		name: "StuckAfterThePivot",
		steps: func() []saga.Step[trip] {
			mail := failing("mail", saga.Permanent(errBroken))
			mail.Undo = nil
			return []saga.Step[trip]{pivot(step("charge")), mail}
		},
		status: saga.Stuck, at: "mail", cause: "broken",
		calls:    []string{"do charge", "do mail"},
		statuses: []saga.StepStatus{saga.StepDone, saga.StepFailed},
	}, {
		name: "Waits",
		steps: func() []saga.Step[trip] {
			hotel := step("hotel")
			hotel.Delay = wait
			return []saga.Step[trip]{step("flight"), hotel}
		},
		status:   saga.Completed,
		calls:    []string{"do flight", "do hotel"},
		statuses: []saga.StepStatus{saga.StepDone, saga.StepDone},
	}, {
		name: "HasNoSignalInTime",
		steps: func() []saga.Step[trip] {
			hotel := awaiting("hotel", "paid")
			hotel.AwaitFor = wait
			return []saga.Step[trip]{step("flight"), hotel}
		},
		status: saga.Compensated, at: "hotel", cause: saga.ErrNoSignal.Error(),
		calls:    []string{"do flight", "undo flight"},
		statuses: []saga.StepStatus{saga.StepUndone, saga.StepNoEffect},
	}, {
		name: "Panics",
		steps: func() []saga.Step[trip] {
			hotel := step("hotel")
			hotel.Do = func(context.Context, *trip) error { panic("oops") }
			return []saga.Step[trip]{step("flight"), hotel}
		},
		status: saga.Compensated, at: "hotel", cause: "oops",
		calls:    []string{"do flight", "undo hotel", "undo flight"},
		statuses: []saga.StepStatus{saga.StepUndone, saga.StepUndone},
	}, {
		name: "IsRefused", // it is refused more often than Attempts
		steps: func() []saga.Step[trip] {
			return []saga.Step[trip]{step("flight"), firstRefused("hotel", 5), step("car")}
		},
		status:   saga.Completed,
		calls:    []string{"do flight", "do hotel", "do car"},
		statuses: []saga.StepStatus{saga.StepDone, saga.StepDone, saga.StepDone},
	}, {
		name: "ParallelStepFails",
		steps: func() []saga.Step[trip] {
			return []saga.Step[trip]{failing("flight", saga.Declined(errBroken)), parallel(interruptible("car"))}
		},
		status: saga.Compensated, at: "flight", cause: "broken", answered: true,
		statuses: []saga.StepStatus{saga.StepNoEffect, saga.StepUndone},
	},
}
