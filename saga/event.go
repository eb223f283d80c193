package saga

import (
	"context"
	"log"
	"log/slog"
	"runtime/debug"
	"time"

	"github.com/go-resilience/resilience/policy"
	store "github.com/go-resilience/resilience/saga/sagastore"
)

// A Status is the status of a saga.
type Status = store.Status

// The statuses of a saga. A Running saga becomes Completed, Compensating or Stuck. A Compensating saga becomes
// Compensated or Stuck. An operator can let a Stuck saga continue, turn it back, or make it Abandoned. Completed,
// Compensated and Abandoned are final, with one exception: a Completed child becomes Compensating if its parent turns
// back.
const (
	Running      = store.Running      // the saga goes forward, and its steps are being done
	Compensating = store.Compensating // the saga has turned back, and its steps are being undone
	Completed    = store.Completed    // every step is done
	Compensated  = store.Compensated  // every step is undone
	Stuck        = store.Stuck        // the saga cannot continue without an operator
	Abandoned    = store.Abandoned    // an operator ended the saga without undoing its steps
)

// A StepStatus is the status of a step.
type StepStatus string

const (
	StepIdle       StepStatus = "idle"        // no attempt has started, and the step does not wait
	StepWaiting    StepStatus = "waiting"     // the step waits for its Delay or Await
	StepStarted    StepStatus = "started"     // an attempt of Do may have started, and Do has no final result yet
	StepDone       StepStatus = "done"        // Do has taken effect
	StepNoEffect   StepStatus = "no_effect"   // Do took no effect, so there is nothing to undo
	StepFailed     StepStatus = "failed"      // Do failed permanently; it may have taken effect
	StepUndoing    StepStatus = "undoing"     // the step is being undone
	StepUndone     StepStatus = "undone"      // Undo has taken effect
	StepUndoFailed StepStatus = "undo_failed" // Undo failed permanently
	StepSkipped    StepStatus = "skipped"     // an operator skipped the step; see ActionSkip
)

// An Op is an operation of a step.
type Op = store.Op

const (
	OpDo   Op = store.OpDo   // Do or DoTx, or the start of children
	OpUndo Op = store.OpUndo // Undo or UndoTx, or turning children back
)

// An EventKind is the kind of an [Event] or of an [Entry] in a saga's log.
type EventKind = store.EventKind

// Kinds of events that are written to the saga's log. Observers are also notified of these events.
const (
	EventCreated     EventKind = "created"     // the saga was started; [Handle.StartTx] delays this event
	EventTakenOver   EventKind = "taken_over"  // a runner took the saga over from an owner that did not release it
	EventTurnedBack  EventKind = "turned_back" // the saga turned back, and starts to undo its steps
	EventCanceled    EventKind = "canceled"    // the saga's owner received a request to cancel the saga
	EventCompleted   EventKind = "completed"   // every step is done
	EventCompensated EventKind = "compensated" // every step is undone
	EventStuck       EventKind = "stuck"       // the saga cannot continue without an operator
	EventAbandoned   EventKind = "abandoned"   // an operator ended the saga
	EventRetried     EventKind = "retried"     // an operator retried the saga
	EventParked      EventKind = "parked"      // the runner released the saga because the saga waits
	EventResumed     EventKind = "resumed"     // steps continued, for example after a wait
	EventReleased    EventKind = "released"    // the runner released the saga because the runner stops or cannot read it

	EventStepDone       EventKind = "step_done"        // Do took effect
	EventStepFailed     EventKind = "step_failed"      // Do failed permanently; it may have taken effect
	EventStepNoEffect   EventKind = "step_no_effect"   // Do failed permanently, without effect
	EventStepRefused    EventKind = "step_refused"     // a policy refused an attempt; only once for consecutive refusals
	EventStepSkipped    EventKind = "step_skipped"     // an operator skipped the step
	EventStepUndone     EventKind = "step_undone"      // Undo took effect
	EventStepUndoFailed EventKind = "step_undo_failed" // Undo failed permanently
)

// Kinds of events of which only observers are notified. These events are not written to the saga's log, with one
// exception: an EventStalled for an attempt that has not returned.
const (
	EventAttempted EventKind = "attempted" // an attempt has ended
	// EventStalled reports one of three problems:
	//
	//   - A step has failed or was refused 8 times, 16 times, 32 times, and so on.
	//   - An attempt has not returned within a LeaseTTL after its Timeout. In this case, EventStalled is also written to
	//     the log.
	//   - The runner cannot read the saga, and releases the saga for another build of the program. Event.Step is empty.
	EventStalled     EventKind = "stalled"
	EventLost        EventKind = "lost"         // the saga was abandoned, or another runner may hold it now
	EventStoreFailed EventKind = "store_failed" // a call to the store failed; the runner calls the store again later
)

// An Outcome is the result of an attempt of a step.
type Outcome string

const (
	OutcomeDone         Outcome = "done"          // the attempt returned nil
	OutcomeDeclined     Outcome = "declined"      // the participant declined the command; see [Declined]
	OutcomeMaybeApplied Outcome = "maybe_applied" // the attempt may have taken effect
	OutcomeFailed       Outcome = "failed"        // an Undo failed, or a Do (for example, a DoTx) failed without effect
	OutcomeRefused      Outcome = "refused"       // a policy refused the call, or no transaction could start
	OutcomeInterrupted  Outcome = "interrupted"   // the runner stopped, or lost the saga, and canceled the attempt
)

// An Event reports a change or a problem of a saga or of a [Runner].
type Event struct {
	Kind    EventKind
	Saga    string // the Name of the definition
	Version int    // the Version of the definition
	ID      string // the saga's id; empty with EventStoreFailed
	Status  Status // the saga's status after the event
	Seq     int64  // the number of the entry in the saga's log, or 0 if the event is in no log
	Step    string // the step's Name, or "" if the event is not about a step
	Op      Op     // the operation of the step
	Attempt int    // the number of the attempt, from 1; 0 if the event is not about an attempt

	Outcome Outcome       // the result of the attempt, with EventAttempted
	Took    time.Duration // the duration of the attempt, or of the saga if it has ended
	Err     error         // the reason for the event, or an operator's note; may be nil
	At      time.Time     // the time according to the store's clock or, with EventStoreFailed, the local clock
}

// outcomeOf returns the outcome of an attempt. cut reports whether the runner interrupted it.
func outcomeOf(e end, op Op, cut bool) Outcome {
	switch {
	case e.err == nil:
		return OutcomeDone
	case cut:
		return OutcomeInterrupted
	case e.refused:
		return OutcomeRefused
	case op == OpUndo || e.effect == noEffect:
		return OutcomeFailed
	case e.effect == mayHaveApplied:
		return OutcomeMaybeApplied
	}
	return OutcomeDeclined
}

// Observe calls f with each event until stop is called. f receives the events of a saga in order, and the saga does not
// continue until f returns. f is called concurrently with the events of different sagas. An event in the log is
// reported only after it was written. If the process crashes between the write and the report, the event is never
// reported. A panic in f is logged and otherwise ignored. Call Observe before Run. If neither the runner nor the
// registry.Registry that contains the runner has an observer, the runner logs warnings to slog.Default. The runner logs
// one warning for each EventStuck and EventStalled, and at most one warning per second for EventStoreFailed.
func (r *Runner) Observe(f func(context.Context, Event)) (stop func()) {
	return r.observers.Observe(func(ctx context.Context, e Event) { hook(ctx, "observer", f, e) })
}

// notify notifies the observers. If there are none, it logs an event that needs attention.
func (r *Runner) notify(ctx context.Context, e Event) {
	if r.observers.Any() {
		r.observers.Tell(ctx, e)
	} else {
		r.warn(ctx, e)
	}
}

// reportEvent notifies the observers of an event of a saga.
func (r *Runner) reportEvent(ctx context.Context, rec *store.Record, e Event) {
	e.Saga, e.Version, e.ID, e.Status = rec.Saga, rec.Version, rec.ID, rec.Status
	r.notify(ctx, e)
}

// warn logs an event that needs attention. It logs at most one EventStoreFailed per second.
func (r *Runner) warn(ctx context.Context, e Event) {
	var text string
	switch e.Kind {
	case EventStuck:
		text = "saga: stuck"
	case EventStalled:
		text = "saga: a step fails again and again"
		switch {
		case e.Step == "":
			text = "saga: left to another build of the program"
		case e.Seq > 0:
			text = "saga: a step does not return"
		}
	case EventStoreFailed:
		text = "saga: the store has failed"
		if !r.counters.warn() {
			return
		}
	default:
		return
	}
	attrs := append([]slog.Attr{slog.String("runner", r.cfg.Name)}, e.describe(r.cfg.Name).Attrs...)
	if e.Err != nil {
		attrs = append(attrs, slog.Any("err", e.Err))
	}
	slog.LogAttrs(ctx, slog.LevelWarn, text, attrs...)
}

// reportEntry counts a log entry and notifies the observers. rec is the saga's record after the entry.
func (r *Runner) reportEntry(ctx context.Context, rec *store.Record, entry store.Entry) {
	switch entry.Kind {
	case EventCreated:
		r.counters.countSaga(rec.Saga, "status=started")
	case EventStalled:
		r.counters.count(func(s *Stats) { s.Stalled++ })
	case EventCompleted, EventCompensated, EventStuck, EventAbandoned:
		r.counters.countSaga(rec.Saga, "status="+string(entry.Kind))
	}
	e := Event{
		Kind: entry.Kind, Seq: entry.Seq, Step: entry.Step, Op: entry.Op, Attempt: entry.Attempt,
		Err: reason(entry.Error), At: entry.At,
	}
	switch e.Kind {
	case EventCompleted, EventCompensated, EventAbandoned:
		e.Took = entry.At.Sub(rec.CreatedAt)
	}
	r.reportEvent(ctx, rec, e)
}

// hook calls a function of the program, such as an observer, and recovers its panic. On a goroutine of the runner, a
// panic would crash the process, and then each process that takes the saga over. In Start, a panic would hide from the
// caller that its saga has started.
func hook[T any](ctx context.Context, name string, fn func(context.Context, T), arg T) {
	defer func() {
		if v := recover(); v != nil {
			log.Printf("saga: %s panicked: %v\n%s", name, v, debug.Stack())
		}
	}()
	fn(ctx, arg)
}

// reportCreated notifies the observers of a saga that StartTx started: StartTx cannot do so, because its transaction
// may be rolled back. The first runner that claims the saga does so before its first commit. If the saga had an owner
// before, that owner has done so already.
func (r *Runner) reportCreated(ctx context.Context, rec *store.Record, unreported bool) {
	if unreported && rec.Previous == "" {
		r.reportEntry(ctx, rec, store.Entry{Kind: EventCreated, Seq: 1, At: rec.CreatedAt})
	}
}

// A once is a sync.Once whose callers wait for a channel. In a bubble of testing/synctest, time stands still while a
// goroutine waits for a sync.Once.
type once chan bool // holds true until do is called

func newOnce() once {
	o := make(once, 1)
	o <- true
	return o
}

func (o once) do(f func()) {
	first := <-o
	defer func() { o <- false }()
	if first {
		f()
	}
}

// reportLog counts the log entries of a commit, and notifies the observers of them.
func (r *Runner) reportLog(ctx context.Context, rec *store.Record, req store.CommitRequest, now time.Time) {
	for i, entry := range req.Log {
		entry.Seq, entry.Epoch, entry.At = req.Seq+1+int64(i), req.Epoch, now
		r.reportEntry(ctx, rec, entry)
	}
}

func (r *Runner) storeFailed(ctx context.Context, err error) {
	r.counters.count(func(s *Stats) { s.StoreErrors++ })
	r.notify(ctx, Event{Kind: EventStoreFailed, Err: err, At: time.Now()})
}

// describe converts e to a policy.Event, which a registry receives. runner is the name of the runner.
func (e Event) describe(runner string) policy.Event {
	d := policy.Event{Kind: "saga", Name: runner, What: string(e.Kind), Level: slog.LevelDebug, Err: e.Err}
	switch e.Kind {
	case EventStuck, EventStalled, EventLost, EventTakenOver, EventStoreFailed:
		d.Level = slog.LevelWarn
	}
	for _, f := range []struct{ name, value string }{
		{"saga", e.Saga}, {"id", e.ID}, {"status", string(e.Status)}, {"step", e.Step}, {"op", string(e.Op)},
		{"outcome", string(e.Outcome)},
	} {
		if f.value != "" {
			d.Attrs = append(d.Attrs, slog.String(f.name, f.value))
		}
	}
	if e.Attempt > 0 {
		d.Attrs = append(d.Attrs, slog.Int("attempt", e.Attempt))
	}
	if e.Took > 0 {
		d.Attrs = append(d.Attrs, slog.Duration("took", e.Took))
	}
	return d
}
