package saga

import (
	"context"
	"log/slog"
	"time"
)

// An EventKind says what happened to a saga.
type EventKind string

// The kinds of the entries of a saga's log. Those about a step have its name, and
// those about an attempt its Op and number.
const (
	EventCreated      EventKind = "created"
	EventDone         EventKind = "done"
	EventNoEffect     EventKind = "no effect"
	EventFailed       EventKind = "failed"
	EventUndone       EventKind = "undone"
	EventUndoFailed   EventKind = "undo failed"
	EventSkipped      EventKind = "skipped"      // by an operator
	EventRefused      EventKind = "refused"      // a policy of this module did not make the call
	EventParked       EventKind = "parked"       // written back until the next attempt
	EventReleased     EventKind = "released"     // handed over by a runner that stops
	EventResumed      EventKind = "resumed"      // steps that were ready have started
	EventTakenOver    EventKind = "taken over"   // from an owner that crashed or was cut off
	EventCanceled     EventKind = "canceled"     // the request reached the owner
	EventRetried      EventKind = "retried"      // by an operator
	EventCompensating EventKind = "compensating" // the saga has turned back for good
	EventCompleted    EventKind = "completed"
	EventCompensated  EventKind = "compensated"
	EventStuck        EventKind = "stuck"
	EventAbandoned    EventKind = "abandoned" // by an operator
)

// EventRetry is the kind of an attempt that failed and will be repeated. It is in no
// log.
const EventRetry EventKind = "retry"

// An Event is something that happened to a saga.
type Event struct {
	Kind    EventKind
	Runner  string // the runner's Name
	Saga    string // the definition's Name
	Version int    // the definition's Version
	ID      string

	Seq     int64  // the entry's number in the saga's log; zero for an EventRetry
	Step    string // the step or alternative; "" for the saga itself
	Op      Op
	Attempt int
	Epoch   int64
	Err     error // the reason, or an operator's note
	At      time.Time
}

// happened counts an entry of a log and calls the hook.
func (r *Runner) happened(ctx context.Context, rec *Record, entry Entry) {
	switch entry.Kind {
	case EventCompleted:
		r.count.completed.Add(1)
	case EventCompensated:
		r.count.compensated.Add(1)
	case EventStuck:
		r.count.stuck.Add(1)
	case EventParked:
		r.count.parked.Add(1)
	case EventReleased:
		r.count.released.Add(1)
	}
	hook(ctx, "OnEvent", r.cfg.OnEvent, Event{
		Kind: entry.Kind, Runner: r.cfg.Name, Saga: rec.Saga, Version: rec.Version, ID: rec.ID,
		Seq: entry.Seq, Step: entry.Step, Op: entry.Op, Attempt: entry.Attempt, Epoch: entry.Epoch,
		Err: recordedReason(entry.Error), At: entry.At,
	})
}

// hook calls a hook of the user. It logs a panic instead of passing it on: the panic
// would end the process, and then the next process that takes the saga over.
func hook[T any](ctx context.Context, name string, fn func(context.Context, T), arg T) {
	if fn == nil {
		return
	}
	var err error
	func() {
		defer caught(&err)
		fn(ctx, arg)
	}()
	if err != nil {
		slog.ErrorContext(ctx, "saga: "+name+" panicked", "panic", err.(*PanicError).Value, "stack", string(err.(*PanicError).Stack))
	}
}
