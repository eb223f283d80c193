package saga

// A Status is the status of a saga.
type Status string

// A Running saga becomes Completed, Compensating or Stuck. A Compensating one becomes
// Compensated or Stuck. An operator can let a Stuck saga go on in its direction, turn it
// back, or make any saga Abandoned that has not ended. Completed, Compensated and
// Abandoned are final, except that a completed child turns back with its parent: see
// [Child].
const (
	Running      Status = "running"
	Compensating Status = "compensating"
	Completed    Status = "completed"
	Compensated  Status = "compensated"
	Stuck        Status = "stuck"
	Abandoned    Status = "abandoned"
)

// Ended reports whether the status is final.
func (s Status) Ended() bool { return s == Completed || s == Compensated || s == Abandoned }

// unfinished are the statuses that are not final.
var unfinished = []Status{Running, Compensating, Stuck}

// A StepStatus is the status of a step, or of one of its alternatives.
type StepStatus string

// An idle step becomes StepStarted, first StepWaiting if it has a Delay or an Await, and then
// StepDone, StepNoEffect or StepFailed. A step that may have taken effect becomes
// StepUndoing if the saga turns back or goes on to the next alternative, and then StepUndone
// or StepUndoFailed. An operator can make it StepSkipped.
const (
	StepIdle       StepStatus = "idle"
	StepWaiting    StepStatus = "waiting" // for its Delay or Await; nothing is begun
	StepStarted    StepStatus = "started"
	StepDone       StepStatus = "done"
	StepNoEffect   StepStatus = "no effect" // certainly without effect: nothing to undo
	StepFailed     StepStatus = "failed"    // not tried again, and may have taken effect
	StepUndoing    StepStatus = "undoing"
	StepUndone     StepStatus = "undone"
	StepUndoFailed StepStatus = "undo failed"
	StepSkipped    StepStatus = "skipped"
)
