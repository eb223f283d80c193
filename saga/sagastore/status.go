package sagastore

// A Status is the status of a saga.
type Status string

// A Running saga becomes Completed, Compensating or Stuck. A Compensating one becomes
// Compensated or Stuck. An operator can let a Stuck saga go on in its direction, turn it
// back, or make any saga Abandoned that has not ended. Completed, Compensated and
// Abandoned are final, except that a completed child turns back with its parent.
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
