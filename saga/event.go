package saga

import (
	"time"

	store "github.com/go-resilience/resilience/internal/sagastore"
	"github.com/go-resilience/resilience/saga/internal/machine"
)

// A Status is the status of a saga.
type Status = store.Status

// A Running saga becomes Completed, Compensating or Stuck. A Compensating one becomes
// Compensated or Stuck. An operator can let a Stuck saga go on in its direction, turn it
// back, or make any saga Abandoned that has not ended. Completed, Compensated and
// Abandoned are final, except that a completed child turns back with its parent: see
// [Child].
const (
	Running      = store.Running
	Compensating = store.Compensating
	Completed    = store.Completed
	Compensated  = store.Compensated
	Stuck        = store.Stuck
	Abandoned    = store.Abandoned
)

// unfinished are the statuses that are not final.
var unfinished = []Status{Running, Compensating, Stuck}

// A StepStatus is the status of a step.
type StepStatus = machine.StepStatus

// An idle step becomes StepStarted, first StepWaiting if it has a Delay or an Await, and then
// StepDone, StepNoEffect or StepFailed. A step that may have taken effect becomes
// StepUndoing if the saga turns back, and then StepUndone or StepUndoFailed. An operator can
// make it StepSkipped.
const (
	StepIdle       StepStatus = machine.StepIdle
	StepWaiting    StepStatus = machine.StepWaiting // for its Delay or Await; nothing is begun
	StepStarted    StepStatus = machine.StepStarted
	StepDone       StepStatus = machine.StepDone
	StepNoEffect   StepStatus = machine.StepNoEffect // certainly without effect: nothing to undo
	StepFailed     StepStatus = machine.StepFailed   // not tried again, and may have taken effect
	StepUndoing    StepStatus = machine.StepUndoing
	StepUndone     StepStatus = machine.StepUndone
	StepUndoFailed StepStatus = machine.StepUndoFailed
	StepSkipped    StepStatus = machine.StepSkipped
)

// An Op is an operation of a step.
type Op = store.Op

// The operations of a step.
const (
	OpDo   Op = store.OpDo
	OpUndo Op = store.OpUndo
)

// An EventKind says what happened to a saga.
type EventKind = store.EventKind

// The kinds of the entries of a saga's log. Those about a step have its name, and
// those about an attempt its Op and number.
const (
	EventCreated     EventKind = "created"
	EventDone        EventKind = machine.EventDone
	EventNoEffect    EventKind = machine.EventNoEffect
	EventFailed      EventKind = machine.EventFailed
	EventUndone      EventKind = machine.EventUndone
	EventUndoFailed  EventKind = machine.EventUndoFailed
	EventSkipped     EventKind = machine.EventSkipped    // by an operator
	EventRefused     EventKind = machine.EventRefused    // a policy of this module did not make the call
	EventParked      EventKind = machine.EventParked     // written back until the next attempt
	EventReleased    EventKind = machine.EventReleased   // handed over by a runner that stops
	EventResumed     EventKind = "resumed"               // steps that were ready have started, or the saga was made due
	EventTakenOver   EventKind = machine.EventTakenOver  // from an owner that crashed or was cut off
	EventCanceled    EventKind = machine.EventCanceled   // the request reached the owner
	EventRetried     EventKind = machine.EventRetried    // by an operator
	EventTurnedBack  EventKind = machine.EventTurnedBack // the saga has turned back for good
	EventCompleted   EventKind = machine.EventCompleted
	EventCompensated EventKind = machine.EventCompensated
	EventStuck       EventKind = machine.EventStuck
	EventAbandoned   EventKind = "abandoned" // by an operator
)

// The kinds of events that are in no log.
const (
	EventAttempted   EventKind = "attempted"    // an attempt has ended: Outcome, Err, Took
	EventStalled     EventKind = "stalled"      // a step fails, or is refused, for the 8th, 16th, 32nd time and so on: Attempt, Err
	EventLost        EventKind = "lost"         // another runner claimed the saga, an operator abandoned it, or its lease ended
	EventStoreFailed EventKind = "store failed" // with Err; the runner tries again
)

// An Outcome says how an attempt of Do or Undo has ended.
type Outcome string

// The outcomes. Each attempt has exactly one.
const (
	OutcomeDone        Outcome = "done"
	OutcomeNoEffect    Outcome = "no effect"   // a Do returned a Void
	OutcomeInDoubt     Outcome = "in doubt"    // a Do failed and may have taken effect
	OutcomeFailed      Outcome = "failed"      // an Undo failed, or a Do that leaves no doubt: DoTx, ReadOnly
	OutcomeRefused     Outcome = "refused"     // a policy of this module did not make the call
	OutcomeInterrupted Outcome = "interrupted" // the runner stopped, or dropped the result
)

// An Event is something that happened to a saga, or in a runner. Fields that do not apply
// are zero.
type Event struct {
	Kind EventKind

	Saga    string // the definition's Name
	Version int    // the definition's Version
	ID      string
	Status  Status // of the saga, after the event

	Seq     int64  // the entry's number in the saga's log; zero for a kind that is in no log
	Step    string // "" for the saga itself
	Op      Op
	Attempt int

	Outcome Outcome       // of an EventAttempted
	Took    time.Duration // of an EventAttempted; the life of a saga that has ended
	Err     error         // the reason, or an operator's note
	At      time.Time     // by the store's clock, as well as the runner knows it
}

// outcomeOf returns the outcome of an attempt. cut means that the runner has ended it.
func outcomeOf(e machine.End, op Op, cut bool) Outcome {
	switch {
	case e.Err == nil:
		return OutcomeDone
	case cut:
		return OutcomeInterrupted
	case e.Refused:
		return OutcomeRefused
	case op == OpUndo || e.Effect == machine.Failed:
		return OutcomeFailed
	case e.Effect == machine.InDoubt:
		return OutcomeInDoubt
	}
	return OutcomeNoEffect
}
