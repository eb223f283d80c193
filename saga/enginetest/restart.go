package enginetest

import (
	"context"
	"time"

	"github.com/go-resilience/resilience/saga"
)

// attemptTimeout limits the attempts of a step that a test interrupts. An engine that does not detect the death of a
// process starts the next attempt after this time.
const attemptTimeout = 5 * time.Second

func restartWaiting(s *suite) {
	h := s.start("trip-1", step("flight"), awaiting("hotel", "paid"))
	s.until("trip-1", "hotel", saga.StepWaiting)
	s.restart()
	s.until("trip-1", "hotel", saga.StepWaiting)
	s.noError(h.Signal(s.ctx, "trip-1", "paid", []byte("by card")))
	s.done(h, "trip-1", saga.Completed, "do flight", "do hotel")
	s.paid(h, "by card")
}

// restartSignals restarts the process after a signal was sent and before the step that awaits it starts.
func restartSignals(s *suite) {
	h := s.start("trip-1", awaiting("hotel", "ready"), awaiting("charge", "paid"))
	s.noError(h.Signal(s.ctx, "trip-1", "paid", []byte("by card")))
	s.restart()
	s.noError(h.Signal(s.ctx, "trip-1", "paid", []byte("in cash")))
	s.noError(h.Signal(s.ctx, "trip-1", "ready", nil))
	s.done(h, "trip-1", saga.Completed, "do hotel", "do charge")
	s.paid(h, "by card")
}

// hanging returns a Do or Undo whose first attempt does not return until its ctx is done or the test ends. ids receives
// the command ids of all attempts.
func (s *suite) hanging(name string) (call func(context.Context, *trip) error, ids chan string) {
	ids = make(chan string, 100)
	first := make(chan struct{}, 1)
	first <- struct{}{}
	end := make(chan struct{})
	s.Cleanup(func() { close(end) })
	return func(ctx context.Context, t *trip) error {
		ids <- saga.CommandFrom(ctx).ID
		select {
		case <-first:
			select {
			case <-ctx.Done():
			case <-end:
			}
			return errBroken
		default:
			t.Calls = append(t.Calls, name)
			return nil
		}
	}, ids
}

// sameCommand checks that the interrupted call was repeated with the same command. first is the command id of the first
// attempt.
func (s *suite) sameCommand(first string, ids chan string) {
	s.Helper()
	s.need(first != "", "the first attempt had no command id")
	select {
	case again := <-ids:
		s.need(again == first, "the command id of the second attempt is %q, that of the first was %q", again, first)
	default:
		s.Fatal("the attempt that was interrupted was not made again")
	}
}

// receive returns the command id of the next attempt.
func (s *suite) receive(ids chan string) (id string) {
	s.Helper()
	select {
	case id = <-ids:
	case <-time.After(s.patience):
		s.Fatal("the step was not called")
	}
	return id
}

// restartDo restarts the process while a Do runs. The steps that were done before must not be done again.
func restartDo(s *suite) {
	hotel := step("hotel")
	do, ids := s.hanging("do hotel")
	hotel.Do, hotel.Timeout = do, attemptTimeout
	h := s.start("trip-1", step("flight"), hotel, step("car"))
	first := s.receive(ids)
	s.restart()
	in := s.done(h, "trip-1", saga.Completed, "do flight", "do hotel", "do car")
	s.statuses(in, saga.StepDone, saga.StepDone, saga.StepDone)
	s.sameCommand(first, ids)
}

func restartUndo(s *suite) {
	flight := step("flight")
	undo, ids := s.hanging("undo flight")
	flight.Undo, flight.Timeout = undo, attemptTimeout
	h := s.start("trip-1", flight, failing("hotel", saga.Declined(errBroken)))
	first := s.receive(ids)
	s.restart()
	in := s.done(h, "trip-1", saga.Compensated, "do flight", "do hotel", "undo flight")
	s.statuses(in, saga.StepUndone, saga.StepNoEffect)
	s.sameCommand(first, ids)
}

func restartStuck(s *suite) {
	mail, repair := mending("mail")
	h := s.start("trip-1", pivot(step("charge")), mail)
	s.wait("trip-1", saga.Stuck)
	s.restart()
	s.wait("trip-1", saga.Stuck)
	repair()
	s.operate("trip-1", saga.Operation{Action: saga.ActionRetry})
	s.done(h, "trip-1", saga.Completed, "do charge", "do mail", "do mail")
}
