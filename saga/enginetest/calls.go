package enginetest

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience/saga"
)

// parallelStates tests two parallel steps, each of which changes its own copy of the state.
func parallelStates(s *suite) {
	a, b := step("a"), parallel(step("b"))
	a.Do = func(_ context.Context, s *trip) error { s.A = "a"; return nil }
	b.Do = func(_ context.Context, s *trip) error { s.B = "b"; return nil }
	h := s.start("trip-1", a, b)
	s.wait("trip-1", saga.Completed)
	_, state, err := h.Get(s.ctx, "trip-1")
	s.noError(err)
	s.need(state.A == "a" && state.B == "b", "the state is %+v, without the change of each step", state)
}

func versions(s *suite) {
	first := define(step("flight"))
	second := define(step("train"))
	second.Version = 2
	old, next := registered(s, first), registered(s, second)
	_, err := old.Start(s.ctx, "trip-1", trip{})
	s.noError(err)
	_, err = next.Start(s.ctx, "trip-2", trip{})
	s.noError(err)
	s.done(old, "trip-1", saga.Completed, "do flight")
	in := s.done(next, "trip-2", saga.Completed, "do train")
	s.need(in.Version == 2, "the version of the saga is %d, want 2", in.Version)
}

func registerRepeated(s *suite) {
	d, err := saga.Define(define(step("flight")))
	s.noError(err)
	s.noError(s.Engine.Register(d))
	s.noError(s.Engine.Register(d))
}

func registerOther(s *suite) {
	d, err := saga.Define(define(step("flight")))
	s.noError(err)
	s.noError(s.Engine.Register(d))
	other, err := saga.Define(define(step("train")))
	s.noError(err)
	s.need(s.Engine.Register(other) != nil, "two definitions were registered with the same name and version")
}

// startRepeated calls Start again for the same ID, with another state, before the saga has ended.
func startRepeated(s *suite) {
	h := s.start("trip-1", step("flight"), awaiting("hotel", "paid"))
	s.until("trip-1", "hotel", saga.StepWaiting)
	in, err := h.Start(s.ctx, "trip-1", trip{Calls: []string{"another state"}})
	s.noError(err)
	s.need(in.ID == "trip-1", "Start returned saga %q", in.ID)
	s.need(!strings.Contains(string(in.State), "another state"), "Start has replaced the state: %s", in.State)
	s.noError(h.Signal(s.ctx, "trip-1", "paid", nil))
	s.done(h, "trip-1", saga.Completed, "do flight", "do hotel")
}

func startAfterEnd(s *suite) {
	h := s.start("trip-1", step("flight"))
	s.wait("trip-1", saga.Completed)
	in, err := h.Start(s.ctx, "trip-1", trip{Calls: []string{"another state"}})
	s.noError(err)
	s.need(in.Status == saga.Completed, "Start returned a saga that is %s, want the one that has completed", in.Status)
	s.done(h, "trip-1", saga.Completed, "do flight")
}

func startOnceOfMany(s *suite) {
	var calls atomic.Int32
	flight := step("flight")
	flight.Do = func(_ context.Context, s *trip) error {
		calls.Add(1)
		s.Calls = append(s.Calls, "do flight")
		return nil
	}
	h := s.register(flight)
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			if _, err := h.Start(s.ctx, "trip-1", trip{}); err != nil {
				s.Errorf("Start at the same time as others: %v", err)
			}
		})
	}
	all.Wait()
	s.done(h, "trip-1", saga.Completed, "do flight")
	s.need(calls.Load() == 1, "flight was done %d times", calls.Load())
}

func startOther(s *suite) {
	s.start("trip-1", awaiting("hotel", "paid"))
	tour := define(step("bus"))
	tour.Name = "tour"
	_, err := registered(s, tour).Start(s.ctx, "trip-1", trip{})
	s.matches(err, saga.ErrExists)
	in, err := s.Engine.Get(s.ctx, "trip-1")
	s.noError(err)
	s.need(in.Saga == "trip", "saga trip-1 is one of %s, want trip", in.Saga)
}

func startID(s *suite) {
	h := s.register(step("flight"))
	for _, id := range []string{"", strings.Repeat("x", 201), "\xff"} {
		_, err := h.Start(s.ctx, id, trip{})
		s.need(err != nil, "a saga has started with the id %q", id)
	}
	longest := strings.Repeat("x", 200)
	_, err := h.Start(s.ctx, longest, trip{})
	s.noError(err)
	s.wait(longest, saga.Completed)
}

func unknown(s *suite) {
	s.register(awaiting("hotel", "paid"))
	_, err := s.Engine.Get(s.ctx, "trip-1")
	s.matches(err, saga.ErrNotFound)
	_, err = s.Engine.Wait(s.ctx, "trip-1")
	s.matches(err, saga.ErrNotFound)
	s.matches(s.Engine.Signal(s.ctx, "trip-1", "paid", nil), saga.ErrNotFound)
	for _, a := range []saga.Action{
		saga.ActionCancel, saga.ActionRetry, saga.ActionSkip, saga.ActionCompensate, saga.ActionAbandon,
	} {
		s.matches(s.Engine.Operate(s.ctx, "trip-1", saga.Operation{Action: a}), saga.ErrNotFound)
	}
}

func waitEnds(s *suite) {
	s.start("trip-1", awaiting("hotel", "paid"))
	ctx, cancel := context.WithCancelCause(s.ctx)
	cause := errors.New("the caller left")
	time.AfterFunc(wait, func() { cancel(cause) })
	in, err := s.Engine.Wait(ctx, "trip-1")
	s.need(err != nil, "Wait returned a saga that is %v, and no error", in)
	s.matches(err, context.Canceled)
	s.matches(err, cause)
}

// signalEarly sends a signal before the saga has reached the step that awaits it.
func signalEarly(s *suite) {
	h := s.start("trip-1", awaiting("hotel", "ready"), awaiting("charge", "paid"))
	s.noError(h.Signal(s.ctx, "trip-1", "paid", []byte{0, 1, 255}))
	s.until("trip-1", "hotel", saga.StepWaiting)
	s.noError(h.Signal(s.ctx, "trip-1", "ready", nil))
	s.done(h, "trip-1", saga.Completed, "do hotel", "do charge")
	s.paid(h, "\x00\x01\xff")
}

func signalLate(s *suite) {
	h := s.start("trip-1", step("flight"), awaiting("charge", "paid"))
	s.until("trip-1", "charge", saga.StepWaiting)
	s.noError(h.Signal(s.ctx, "trip-1", "paid", []byte("by card")))
	s.done(h, "trip-1", saga.Completed, "do flight", "do charge")
	s.paid(h, "by card")
}

func signalOnce(s *suite) {
	h := s.start("trip-1", awaiting("hotel", "ready"), awaiting("charge", "paid"))
	s.noError(h.Signal(s.ctx, "trip-1", "paid", []byte("by card")))
	s.noError(h.Signal(s.ctx, "trip-1", "paid", []byte("in cash")))
	s.noError(h.Signal(s.ctx, "trip-1", "ready", nil))
	s.done(h, "trip-1", saga.Completed, "do hotel", "do charge")
	s.paid(h, "by card")
}

func (s *suite) paid(h *saga.Handle[trip], want string) {
	s.Helper()
	_, state, err := h.Get(s.ctx, "trip-1")
	s.noError(err)
	s.need(string(state.Paid) == want, "the payload of the signal is %q, want %q", state.Paid, want)
}

func signalUnknown(s *suite) {
	h := s.start("trip-1", awaiting("charge", "paid"))
	s.matches(h.Signal(s.ctx, "trip-1", "other", nil), saga.ErrNotAllowed)
	s.noError(h.Signal(s.ctx, "trip-1", "paid", nil))
	s.done(h, "trip-1", saga.Completed, "do charge")
}

func signalAfterEnd(s *suite) {
	h := s.start("trip-1", step("flight"), awaiting("charge", "paid"))
	s.noError(h.Cancel(s.ctx, "trip-1", ""))
	s.wait("trip-1", saga.Compensated)
	s.matches(h.Signal(s.ctx, "trip-1", "paid", nil), saga.ErrNotAllowed)
}

func cancelWaiting(s *suite) {
	h := s.start("trip-1", step("flight"), awaiting("hotel", "paid"))
	s.until("trip-1", "hotel", saga.StepWaiting)
	s.noError(h.Cancel(s.ctx, "trip-1", "ill"))
	in := s.done(h, "trip-1", saga.Compensated, "do flight", "undo flight")
	s.need(in.TurnedBack, "TurnedBack is false after the cancellation")
	_, err := h.Result(s.ctx, "trip-1")
	s.matches(err, saga.ErrCompensated)
	s.matches(err, saga.ErrCanceled)
}

// cancelAttempt cancels a saga while an attempt of a step runs, which returns when its ctx is done.
func cancelAttempt(s *suite) {
	hotel := interruptible("hotel")
	started := make(chan struct{}, 1)
	run := hotel.Do
	hotel.Do = func(ctx context.Context, t *trip) error {
		started <- struct{}{}
		return run(ctx, t)
	}
	h := s.start("trip-1", step("flight"), hotel)
	select {
	case <-started:
	case <-time.After(s.patience):
		s.Fatal("the step was not called")
	}
	s.noError(h.Cancel(s.ctx, "trip-1", "ill"))
	in := s.done(h, "trip-1", saga.Compensated, "do flight", "undo hotel", "undo flight")
	s.statuses(in, saga.StepUndone, saga.StepUndone)
	_, err := h.Result(s.ctx, "trip-1")
	s.matches(err, saga.ErrCanceled)
}

func cancelAfterPivot(s *suite) {
	mail := awaiting("mail", "sent")
	mail.Undo = nil
	h := s.start("trip-1", pivot(step("charge")), mail)
	s.until("trip-1", "mail", saga.StepWaiting)
	s.matches(h.Cancel(s.ctx, "trip-1", "too late"), saga.ErrNotAllowed)
	s.noError(h.Signal(s.ctx, "trip-1", "sent", nil))
	s.done(h, "trip-1", saga.Completed, "do charge", "do mail")
}

func cancelAfterEnd(s *suite) {
	h := s.start("trip-1", step("flight"))
	s.wait("trip-1", saga.Completed)
	s.matches(h.Cancel(s.ctx, "trip-1", "too late"), saga.ErrNotAllowed)
	s.done(h, "trip-1", saga.Completed, "do flight")
}

// repaired returns a Do or an Undo that fails permanently until repair is called.
func repaired(name string) (call func(context.Context, *trip) error, repair func()) {
	var works atomic.Bool
	return func(_ context.Context, s *trip) error {
		s.Calls = append(s.Calls, name)
		if works.Load() {
			return nil
		}
		return saga.Permanent(errBroken)
	}, func() { works.Store(true) }
}

// mending returns a step without Undo whose Do fails permanently until repair is called.
func mending(name string) (st saga.Step[trip], repair func()) {
	st = saga.Step[trip]{Name: name, Backoff: backoff}
	st.Do, repair = repaired("do " + name)
	return st, repair
}

func (s *suite) operate(id string, op saga.Operation) {
	s.Helper()
	s.noError(s.Engine.Operate(s.ctx, id, op))
}

func retryDo(s *suite) {
	mail, repair := mending("mail")
	h := s.start("trip-1", pivot(step("charge")), mail)
	in := s.wait("trip-1", saga.Stuck)
	s.need(slices.Contains(in.Actions, saga.ActionRetry), "a stuck saga cannot be retried: %q", in.Actions)
	repair()
	s.operate("trip-1", saga.Operation{Action: saga.ActionRetry, Note: "mended", Seq: in.Seq})
	s.done(h, "trip-1", saga.Completed, "do charge", "do mail", "do mail")
}

func retryUndo(s *suite) {
	undo, repair := repaired("undo flight")
	flight := step("flight")
	flight.Undo = undo
	flight.UndoAttempts = 1
	h := s.start("trip-1", flight, failing("hotel", saga.Declined(errBroken)))
	s.wait("trip-1", saga.Stuck)
	repair()
	s.operate("trip-1", saga.Operation{Action: saga.ActionRetry})
	in := s.done(h, "trip-1", saga.Compensated, "do flight", "do hotel", "undo flight", "undo flight")
	s.statuses(in, saga.StepUndone, saga.StepNoEffect)
}

func skip(s *suite) {
	mail, _ := mending("mail")
	survey := step("survey")
	survey.Undo = nil
	h := s.start("trip-1", pivot(step("charge")), mail, survey)
	s.wait("trip-1", saga.Stuck)
	s.operate("trip-1", saga.Operation{Action: saga.ActionSkip, Note: "sent by hand"})
	in := s.done(h, "trip-1", saga.Completed, "do charge", "do mail", "do survey")
	s.statuses(in, saga.StepDone, saga.StepSkipped, saga.StepDone)
}

// compensate makes a saga turn back that is stuck at a pivot that may have taken effect.
func compensate(s *suite) {
	h := s.start("trip-1", step("flight"), pivot(failing("charge", saga.Permanent(errBroken))))
	s.wait("trip-1", saga.Stuck)
	s.operate("trip-1", saga.Operation{Action: saga.ActionCompensate, Note: "was not charged"})
	in := s.done(h, "trip-1", saga.Compensated, "do flight", "do charge", "undo flight")
	s.statuses(in, saga.StepUndone, saga.StepSkipped)
}

func abandon(s *suite) {
	h := s.start("trip-1", step("flight"), pivot(failing("charge", saga.Permanent(errBroken))))
	s.wait("trip-1", saga.Stuck)
	s.operate("trip-1", saga.Operation{Action: saga.ActionAbandon, Note: "settled by phone"})
	in := s.done(h, "trip-1", saga.Abandoned, "do flight", "do charge")
	s.need(in.LastError == "settled by phone", "LastError is %q, want the operator's note", in.LastError)
	_, err := h.Result(s.ctx, "trip-1")
	s.matches(err, saga.ErrAbandoned)
	for _, a := range []saga.Action{saga.ActionRetry, saga.ActionSkip, saga.ActionCompensate, saga.ActionAbandon} {
		s.matches(s.Engine.Operate(s.ctx, "trip-1", saga.Operation{Action: a}), saga.ErrNotAllowed)
	}
}

// oldInstance tests an operation whose Seq is older than the saga's.
func oldInstance(s *suite) {
	charge := pivot(failing("charge", saga.Permanent(errBroken)))
	s.start("trip-1", charge)
	in := s.wait("trip-1", saga.Stuck)
	s.need(in.Seq > 1, "the log has %d entries, want at least 2", in.Seq)
	err := s.Engine.Operate(s.ctx, "trip-1", saga.Operation{Action: saga.ActionAbandon, Seq: in.Seq - 1})
	s.matches(err, saga.ErrNotAllowed)
	s.operate("trip-1", saga.Operation{Action: saga.ActionAbandon, Seq: in.Seq})
	s.wait("trip-1", saga.Abandoned)
}

// list returns the ids that the filter selects. It waits until there are want ids, or its patience is over. It skips
// the test if the engine has no List.
func (s *suite) list(f saga.Filter, want int) (ids []string, next string) {
	s.Helper()
	for end := time.Now().Add(s.patience); ; time.Sleep(look) {
		sagas, next, err := s.Engine.List(s.ctx, f)
		if errors.Is(err, errors.ErrUnsupported) {
			s.Skip("the engine does not list sagas: ", err)
		}
		s.noError(err)
		ids = nil
		for _, in := range sagas {
			ids = append(ids, in.ID)
		}
		if len(ids) == want || time.Now().After(end) {
			return ids, next
		}
	}
}

// startThree starts trip-1, tour-1 and trip-2, in this order.
func startThree(s *suite) {
	trips := s.register(step("flight"), awaiting("hotel", "paid"))
	tour := define(step("bus"))
	tour.Name = "tour"
	tours := registered(s, tour)
	for _, start := range []struct {
		handle *saga.Handle[trip]
		id     string
	}{{trips, "trip-1"}, {tours, "tour-1"}, {trips, "trip-2"}} {
		_, err := start.handle.Start(s.ctx, start.id, trip{})
		s.noError(err)
		time.Sleep(2 * time.Millisecond) // the sagas' CreatedAt must differ
	}
	s.wait("tour-1", saga.Completed)
}

func list(s *suite) {
	startThree(s)
	for _, c := range []struct {
		filter saga.Filter
		want   []string
	}{
		{saga.Filter{}, []string{"trip-2", "tour-1", "trip-1"}},
		{saga.Filter{Saga: "trip"}, []string{"trip-2", "trip-1"}},
		{saga.Filter{Status: []saga.Status{saga.Completed, saga.Stuck}}, []string{"tour-1"}},
		{saga.Filter{ID: "trip-1"}, []string{"trip-1"}},
		{saga.Filter{ID: "t", Saga: "tour", Status: []saga.Status{saga.Running}}, nil},
	} {
		got, next := s.list(c.filter, len(c.want))
		s.need(slices.Equal(got, c.want) && next == "", "List(%+v) returned %q and %q, want %q and no more",
			c.filter, got, next, c.want)
	}
}

func listPages(s *suite) {
	startThree(s)
	first, next := s.list(saga.Filter{Limit: 2}, 2)
	s.need(slices.Equal(first, []string{"trip-2", "tour-1"}) && next != "",
		"the first page is %q, the next %q", first, next)
	second, next := s.list(saga.Filter{Limit: 2, After: next}, 1)
	s.need(slices.Equal(second, []string{"trip-1"}) && next == "",
		"the second page is %q, the next %q", second, next)
}
