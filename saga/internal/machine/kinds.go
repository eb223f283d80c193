package machine

import (
	"errors"

	store "github.com/go-resilience/resilience/internal/sagastore"
)

// A StepStatus is the status of a step: see saga.StepStatus.
type StepStatus string

// The statuses of a step.
const (
	StepIdle       StepStatus = "idle"
	StepWaiting    StepStatus = "waiting"
	StepStarted    StepStatus = "started"
	StepDone       StepStatus = "done"
	StepNoEffect   StepStatus = "no effect"
	StepFailed     StepStatus = "failed"
	StepUndoing    StepStatus = "undoing"
	StepUndone     StepStatus = "undone"
	StepUndoFailed StepStatus = "undo failed"
	StepSkipped    StepStatus = "skipped"
)

// The kinds of the entries that a machine logs.
const (
	EventDone        store.EventKind = "done"
	EventNoEffect    store.EventKind = "no effect"
	EventFailed      store.EventKind = "failed"
	EventUndone      store.EventKind = "undone"
	EventUndoFailed  store.EventKind = "undo failed"
	EventSkipped     store.EventKind = "skipped"
	EventRefused     store.EventKind = "refused"
	EventParked      store.EventKind = "parked"
	EventReleased    store.EventKind = "released"
	EventTakenOver   store.EventKind = "taken over"
	EventCanceled    store.EventKind = "canceled"
	EventRetried     store.EventKind = "retried"
	EventTurnedBack  store.EventKind = "turned back"
	EventCompleted   store.EventKind = "completed"
	EventCompensated store.EventKind = "compensated"
	EventStuck       store.EventKind = "stuck"
)

// The reasons for which a machine itself turns a saga back, or fails a step.
var (
	ErrCanceled = errors.New("saga: canceled")
	ErrDeadline = errors.New("saga: deadline passed")
	ErrNoSignal = errors.New("saga: no signal in time")
)
