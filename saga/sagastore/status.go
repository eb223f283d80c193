package sagastore

// A Status is the status of a saga. A store compares statuses in [Store].Claim, Post, Counts, Children, List and
// DeleteEnded. A store does not check whether a Commit may change one status into another.
type Status string

// A saga has one of the statuses below. A saga that turns back stops going forward and compensates.
//
// A Running saga becomes Completed, Compensating or Stuck. A Compensating saga becomes Compensated or Stuck. An
// operator can let a Stuck saga continue. The saga then becomes Running, or Compensating if it has turned back. An
// operator can also make a Stuck saga turn back. An operator can also abandon any saga that has not ended. Completed,
// Compensated and Abandoned are final, except that a Completed child becomes Compensating if its parent turns back.
const (
	Running      Status = "running"      // the saga goes forward; a runner may claim it
	Compensating Status = "compensating" // the saga undoes its steps; a runner may claim it
	Completed    Status = "completed"    // all steps are done; final
	Compensated  Status = "compensated"  // all steps are undone; final
	Stuck        Status = "stuck"        // the saga waits for an operator; no runner claims it
	Abandoned    Status = "abandoned"    // an operator has ended the saga, and its steps remain as they are; final
)

// Ended reports whether the status is final: Completed, Compensated or Abandoned.
func (s Status) Ended() bool { return s == Completed || s == Compensated || s == Abandoned }
