package saga

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/go-resilience/resilience/internal/behavior"
)

// An EventKind says what happened to a saga.
type EventKind string

// The kinds of the entries of a saga's log. Those about a step have its name, and
// those about an attempt its Op and number.
const (
	EventCreated     EventKind = "created"
	EventDone        EventKind = "done"
	EventNoEffect    EventKind = "no effect"
	EventFailed      EventKind = "failed"
	EventUndone      EventKind = "undone"
	EventUndoFailed  EventKind = "undo failed"
	EventSkipped     EventKind = "skipped"     // by an operator
	EventRefused     EventKind = "refused"     // a policy of this module did not make the call
	EventParked      EventKind = "parked"      // written back until the next attempt
	EventReleased    EventKind = "released"    // handed over by a runner that stops
	EventResumed     EventKind = "resumed"     // steps that were ready have started, or the saga was made due
	EventTakenOver   EventKind = "taken over"  // from an owner that crashed or was cut off
	EventCanceled    EventKind = "canceled"    // the request reached the owner
	EventRetried     EventKind = "retried"     // by an operator
	EventTurnedBack  EventKind = "turned back" // the saga has turned back for good
	EventCompleted   EventKind = "completed"
	EventCompensated EventKind = "compensated"
	EventStuck       EventKind = "stuck"
	EventAbandoned   EventKind = "abandoned" // by an operator
)

// The kinds of events that are in no log.
const (
	EventAttempted     EventKind = "attempted"      // an attempt has ended: Outcome, Err, Took
	EventAttemptFailed EventKind = "attempt failed" // the attempt failed and will be repeated
	EventEnded         EventKind = "ended"          // the saga has ended: Status, Took is its whole life
	EventStalled       EventKind = "stalled"        // the saga has made no progress for Took; see OnStalled
	EventLost          EventKind = "lost"           // another runner claimed the saga, an operator abandoned it, or its lease ended
	EventUnregistered  EventKind = "unregistered"   // Count sagas are due; see OnUnregistered
	EventStoreFailed   EventKind = "store failed"   // see OnStoreError
)

// An Outcome says how an attempt of Do or Undo has ended.
type Outcome string

// The outcomes. Each attempt has exactly one.
const (
	OutcomeDone        Outcome = "done"
	OutcomeNoEffect    Outcome = "no effect"   // a Do returned a NoEffect
	OutcomeInDoubt     Outcome = "in doubt"    // a Do failed and may have taken effect
	OutcomeFailed      Outcome = "failed"      // an Undo failed, or a Do that leaves no doubt: DoTx, ReadOnly, Idempotent
	OutcomeRefused     Outcome = "refused"     // a policy of this module did not make the call
	OutcomeInterrupted Outcome = "interrupted" // the runner stopped, or dropped the result
)

// An Event is something that happened to a saga, or in a runner. Fields that do not apply
// are zero.
type Event struct {
	Kind   EventKind
	Runner string // the runner's Name

	Saga    string // the definition's Name
	Version int    // the definition's Version
	ID      string
	Status  Status // of the saga, after the event
	Epoch   int64

	Seq     int64  // the entry's number in the saga's log; zero for a kind that is in no log
	Step    string // the step or alternative; "" for the saga itself
	Op      Op
	Attempt int

	Outcome Outcome       // of an EventAttempted
	Took    time.Duration // of an EventAttempted, EventEnded or EventStalled
	Count   int           // of an EventUnregistered
	Err     error         // the reason, or an operator's note
	At      time.Time     // by the store's clock, as well as the runner knows it
}

// Observe calls f for each event of this runner, until stop is called. There may be any
// number of observers, added at any time. Each call of f has a goroutine of its own, for
// which the runner, or the caller of its method or of Start, waits. There may be several at
// the same time. The events of a saga that the runner holds come in order, and the saga
// waits for f. A panic and a runtime.Goexit in f are logged by slog's default logger.
//
// An event of the log is told after its entry is recorded. No runner tells the EventCreated
// of a StartTx. An EventStuck may be told again: a runner that reports a stuck saga of
// another runner tells it.
func (r *Runner) Observe(f func(context.Context, Event)) (stop func()) {
	return r.observers.Observe(func(ctx context.Context, e Event) { hook(ctx, "an observer", f, e) })
}

// tell tells the observers of an event.
func (r *Runner) tell(ctx context.Context, e Event) {
	if r.observers.Any() {
		e.Runner = r.Name()
		r.observers.Tell(ctx, e)
	}
}

// tellOf tells the observers of an event of a saga.
func (r *Runner) tellOf(ctx context.Context, rec *Record, e Event) {
	if r.observers.Any() {
		r.tell(ctx, e.of(rec))
	}
}

// tellHook calls OnEvent for an event of a saga.
func (r *Runner) tellHook(ctx context.Context, rec *Record, e Event) {
	if onEvent := r.config().OnEvent; onEvent != nil {
		e.Runner = r.Name()
		hook(ctx, "OnEvent", onEvent, e.of(rec))
	}
}

// of returns e as an event of a saga.
func (e Event) of(rec *Record) Event {
	e.Saga, e.Version, e.ID, e.Status, e.Epoch = rec.Saga, rec.Version, rec.ID, rec.Status, rec.Epoch
	return e
}

// happened counts an entry of a log, and calls OnEvent and the observers. rec is the saga
// after the entry.
func (r *Runner) happened(ctx context.Context, rec *Record, entry Entry) {
	life := entry.At.Sub(rec.CreatedAt)
	r.countEntry(rec, entry.Kind, life)
	e := Event{
		Kind: entry.Kind, Seq: entry.Seq, Step: entry.Step, Op: entry.Op, Attempt: entry.Attempt,
		Err: recordedReason(entry.Error), At: entry.At,
	}
	r.tellHook(ctx, rec, e)
	r.tellOf(ctx, rec, e)
	switch entry.Kind {
	case EventCompleted, EventCompensated, EventAbandoned:
		r.tellOf(ctx, rec, Event{Kind: EventEnded, Took: life, At: entry.At})
	}
}

// countEntry counts an entry of a log. life is how old the saga is.
func (r *Runner) countEntry(rec *Record, kind EventKind, life time.Duration) {
	r.mu.Lock()
	counts := r.sagas[rec.Saga]
	r.mu.Unlock()
	if counts == nil {
		counts = new(sagaCounts) // not registered: only the totals count it
	}
	switch kind {
	case EventCreated:
		r.count.started.Add(1)
		counts.started.Add(1)
	case EventCompleted:
		r.count.completed.Add(1)
		counts.completed.Add(1)
		counts.took.Add(int64(life))
	case EventCompensated:
		r.count.compensated.Add(1)
		counts.compensated.Add(1)
		counts.took.Add(int64(life))
	case EventAbandoned:
		r.count.abandoned.Add(1)
		counts.abandoned.Add(1)
		counts.took.Add(int64(life))
	case EventStuck:
		r.count.stuck.Add(1)
		counts.stuck.Add(1)
	case EventParked:
		r.count.parked.Add(1)
	case EventReleased:
		r.count.released.Add(1)
	}
}

// attempted counts an attempt that has ended, and tells the observers of it.
func (e *execution) attempted(res *result, outcome Outcome) {
	e.p.steps[res.unit].op(res.op).count(outcome, res.took)
	if outcome == OutcomeRefused {
		e.r.count.refused.Add(1)
	}
	if e.r.observers.Any() {
		e.r.tellOf(e.ctx, &e.rec, Event{
			Kind: EventAttempted, Step: e.plan.units[res.unit].name, Op: res.op, Attempt: res.attempt,
			Outcome: outcome, Took: res.took, Err: res.err, At: e.now(),
		})
	}
}

// outcome returns the outcome of an attempt whose result is taken in.
func (e *execution) outcome(res *result) Outcome {
	switch {
	case res.err == nil:
		return OutcomeDone
	case res.cut:
		return OutcomeInterrupted
	case behavior.IsRefused(res.err):
		return OutcomeRefused
	case res.op == OpUndo:
		return OutcomeFailed
	case knownOf(res.err) != inDoubt:
		return OutcomeNoEffect
	case e.plan.units[res.unit].noDoubt && !errors.Is(res.err, errTxEnded):
		return OutcomeFailed
	}
	return OutcomeInDoubt
}

// hook calls a hook of the user, and returns when it has. It logs a panic and a
// runtime.Goexit, as of a failed test, instead of passing them on: either would end the
// process or the goroutine of the saga, and then that of the next one that takes it over.
func hook[T any](ctx context.Context, name string, fn func(context.Context, T), arg T) {
	if fn == nil {
		return
	}
	done := make(chan struct{})
	err := errExited
	go func() {
		defer close(done)
		defer caught(&err)
		fn(ctx, arg)
		err = nil
	}()
	<-done
	if p, ok := err.(*PanicError); ok {
		slog.ErrorContext(ctx, "saga: "+name+" panicked", "panic", p.Value, "stack", string(p.Stack))
	} else if err != nil {
		slog.ErrorContext(ctx, "saga: "+name+" called runtime.Goexit")
	}
}
