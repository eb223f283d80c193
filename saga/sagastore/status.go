package sagastore

// A Status is the status of a saga. A store compares statuses in [Store].Claim, Post, Counts, Children, List and
// DeleteEnded. It does not check whether a Commit may change one status into another.
type Status string

// The statuses. A saga that turns back stops going forward and compensates.
//
// A Running saga becomes Completed, Compensating or Stuck. A Compensating saga becomes Compensated or Stuck. An
// operator can let a Stuck saga continue in its direction, or make it turn back. An operator can also make any saga
// that has not ended Abandoned. Completed, Compensated and Abandoned are final, except that a Completed child becomes
// Compensating if its parent turns back.
const (
	Running      Status = "running"      // the saga goes forward; a runner may claim it
	Compensating Status = "compensating" // the saga undoes its steps; a runner may claim it
	Completed    Status = "completed"    // final: all steps are done
	Compensated  Status = "compensated"  // final: all steps are undone
	Stuck        Status = "stuck"        // the saga waits for an operator; no runner claims it
	Abandoned    Status = "abandoned"    // final: an operator ended the saga; its steps remain as they are
)

// Ended reports whether the status is final: Completed, Compensated or Abandoned.
func (s Status) Ended() bool { return s == Completed || s == Compensated || s == Abandoned }
