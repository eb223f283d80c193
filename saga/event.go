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

// The statuses of a saga. A Running saga becomes Completed, Compensating or Stuck, and a Compensating saga becomes
// Compensated or Stuck. An operator lets a Stuck saga continue, turns it back, or makes it Abandoned. The other
// statuses are final, except that a Completed child turns back with its parent.
const (
	Running      = store.Running      // steps are being done
	Compensating = store.Compensating // steps are being undone
	Completed    = store.Completed    // every step is done
	Compensated  = store.Compensated  // every step is undone
	Stuck        = store.Stuck        // an operator must act
	Abandoned    = store.Abandoned    // an operator ended the saga as it was
)

// A StepStatus is the status of a step.
type StepStatus string

const (
	StepIdle       StepStatus = "idle"        // no attempt has started
	StepWaiting    StepStatus = "waiting"     // for its Delay or Await
	StepStarted    StepStatus = "started"     // an attempt of Do may have started, and the step has not ended
	StepDone       StepStatus = "done"        // Do has taken effect
	StepNoEffect   StepStatus = "no_effect"   // Do took no effect: there is nothing to undo
	StepFailed     StepStatus = "failed"      // Do failed for good; it may have taken effect
	StepUndoing    StepStatus = "undoing"     // attempts of Undo have started
	StepUndone     StepStatus = "undone"      // Undo has taken effect
	StepUndoFailed StepStatus = "undo_failed" // Undo failed for good
	StepSkipped    StepStatus = "skipped"     // an operator settled the step
)

// An Op is an operation of a step.
type Op = store.Op

const (
	OpDo   Op = store.OpDo   // Do, DoTx or children
	OpUndo Op = store.OpUndo // Undo or UndoTx
)

// An EventKind says what an [Event] or an [Entry] is.
type EventKind = store.EventKind

// Events of a saga. They are in its log and go to observers.
const (
	EventCreated     EventKind = "created"     // the saga was started; see [Handle.StartTx]
	EventTakenOver   EventKind = "taken_over"  // from an owner that crashed or was cut off
	EventTurnedBack  EventKind = "turned_back" // for good
	EventCanceled    EventKind = "canceled"    // the request to cancel reached the owner
	EventCompleted   EventKind = "completed"   // every step is done
	EventCompensated EventKind = "compensated" // every step is undone
	EventStuck       EventKind = "stuck"       // an operator must act
	EventAbandoned   EventKind = "abandoned"   // by an operator
	EventRetried     EventKind = "retried"     // by an operator
	EventParked      EventKind = "parked"      // written back to wait
	EventResumed     EventKind = "resumed"     // steps that were ready have started
	EventReleased    EventKind = "released"    // by a runner that stops

	EventStepDone       EventKind = "step_done"        // Do took effect
	EventStepFailed     EventKind = "step_failed"      // for good; the step may have taken effect
	EventStepNoEffect   EventKind = "step_no_effect"   // the step failed for good, without effect
	EventStepRefused    EventKind = "step_refused"     // by a policy; only the first of consecutive refusals
	EventStepSkipped    EventKind = "step_skipped"     // by an operator
	EventStepUndone     EventKind = "step_undone"      // Undo took effect
	EventStepUndoFailed EventKind = "step_undo_failed" // for good
)

// Events that only go to observers. They are in no log.
const (
	EventAttempted EventKind = "attempted" // an attempt has ended
	// EventStalled reports that a step has failed or been refused 8, 16, 32, ... times, or that it has not returned a
	// LeaseTTL after its Timeout. The latter is in the log, too. Without a Step, it reports that this runner cannot read
	// the saga, and leaves it to another build of the program.
	EventStalled     EventKind = "stalled"
	EventLost        EventKind = "lost"         // another runner has the saga, or may have, or it was abandoned
	EventStoreFailed EventKind = "store_failed" // the runner tries again
)

// An Outcome is the result of an attempt of a step.
type Outcome string

const (
	OutcomeDone         Outcome = "done"          // the attempt returned nil
	OutcomeDeclined     Outcome = "declined"      // see [Declined]
	OutcomeMaybeApplied Outcome = "maybe_applied" // the attempt may have taken effect
	OutcomeFailed       Outcome = "failed"        // without effect: of an Undo, a DoTx or a ReadOnly step
	OutcomeRefused      Outcome = "refused"       // by a policy, or because no transaction could start
	OutcomeInterrupted  Outcome = "interrupted"   // the runner stopped, or lost the saga
)

// An Event is something that happened to a saga, or in a [Runner].
type Event struct {
	Kind    EventKind
	Saga    string // the Name of the definition
	Version int    // of the definition
	ID      string // of the saga; empty with EventStoreFailed
	Status  Status // after the event
	Seq     int64  // the number of the log's entry, or 0 if the event is in no log
	Step    string // or "" if the event is not about a step
	Op      Op     // of the step
	Attempt int    // the number of the attempt, from 1, or 0

	Outcome Outcome       // of EventAttempted
	Took    time.Duration // of EventAttempted, or the life of a saga that has ended
	Err     error         // the reason, or an operator's note
	At      time.Time     // according to the store's clock; the local clock with EventStoreFailed
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

// Observe calls f with each event until stop is called. The events of a saga come in order, and the saga waits for f.
// An event in the log is reported once it is recorded, and not at all if the process dies before that. A panic in f is
// logged, and does not pass to the caller of a method. Call Observe before Run. While a runner has no observer,
// slog.Default warns of EventStuck, EventStalled and, at most once a second, EventStoreFailed.
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

// reportEntry counts a log entry and notifies the observers. rec is the saga after the entry.
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

// hook calls a hook of the user. Its panic does not pass on. On a goroutine of the runner it would end the process, and
// then the next one that takes the saga over. A caller of Start would not learn that its saga has started.
func hook[T any](ctx context.Context, name string, fn func(context.Context, T), arg T) {
	defer func() {
		if v := recover(); v != nil {
			log.Printf("saga: %s panicked: %v\n%s", name, v, debug.Stack())
		}
	}()
	fn(ctx, arg)
}

// reportCreated reports the creation of a saga that StartTx started. The first runner with the saga does so, before its
// first commit, unless its previous owner has done so.
func (r *Runner) reportCreated(ctx context.Context, rec *store.Record, unreported bool) {
	if unreported && rec.Previous == "" {
		r.reportEntry(ctx, rec, store.Entry{Kind: EventCreated, Seq: 1, At: rec.CreatedAt})
	}
}

// reportLog notifies the observers of the log entries of a commit.
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

// describe returns e in the form in which a registry receives it. runner is the name of the runner.
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
