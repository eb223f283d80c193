package saga

import (
	"slices"
	"time"

	store "github.com/go-resilience/resilience/internal/sagastore"
	"github.com/go-resilience/resilience/saga/internal/machine"
	"github.com/go-resilience/resilience/saga/internal/plan"
)

// An Instance is a saga as it was at Now.
type Instance struct {
	ID      string
	Saga    string // the definition's Name
	Version int    // the definition's Version
	Status  Status
	State   []byte      // encoded by the definition's Codec
	Steps   []StepState // in the definition's order
	Back    bool        // the saga has turned back for good
	Parent  string      // the id of the saga whose step has started this one; "" for none, or if that is deleted

	Step  string // the step at which it turned back or got stuck; "" for none
	Cause string // why it did

	Owner      string    // the runner that holds it; "" for none
	Epoch      int64     // how often it was claimed
	Seq        int64     // the number of entries in its log
	WakeAt     time.Time // when the owner's lease ends; without an owner, when it is due
	CompleteBy time.Time // zero for no deadline

	Failures        int // attempts that failed since a step last succeeded
	Takeovers       int // takeovers from crashed owners since a step last succeeded
	LastError       string
	CancelRequested bool

	CreatedAt time.Time
	UpdatedAt time.Time // of the latest Start, Commit or Cancel
	Now       time.Time // the store's clock, as are all times of an Instance

	// Actions are allowed now. ActionRetry, ActionSkip and ActionCompensate also need a
	// runner with which the definition is registered.
	Actions []Action

	answered   bool      // Cause is the text of an answer
	progressed time.Time // when a step last changed its status, or the saga turned back
}

// A StepState is the progress of a step.
type StepState struct {
	Name      string
	Status    StepStatus
	Attempts  int       // of Do, as far as is known
	Undos     int       // attempts of Undo
	Refusals  int       // refused attempts since the last attempt that was made
	InDoubt   bool      // an attempt of Do may have taken effect
	Error     string    // of the latest failure
	NotBefore time.Time // when the next attempt may begin, or the wait for a time or a signal ends

	// WaitingSince is when the step began to wait for its Delay, its Await or its
	// children; zero if it does not wait.
	WaitingSince time.Time
	// Children is how many sagas the step has started (see ChildID). Zero if that is not
	// known yet.
	Children int

	// Of a step of a definition that is registered with the runner.
	Parallel bool // it runs beside the step before it
	Pivot    bool
}

// An Action is an operator's way to change the course of a saga.
type Action string

// The actions of [Runner.Operate]. While a runner holds the saga, only ActionCancel and
// ActionAbandon are allowed.
const (
	// ActionCancel is [Runner.Cancel].
	ActionCancel Action = "cancel"

	// ActionRetry lets a stuck saga continue in its direction: the steps that have failed get
	// all their attempts again. A saga whose steps wait for their next attempt makes it now;
	// Delay and AwaitFor stay as they are. Of a step with children that has failed, those that were
	// compensated or abandoned are started again, under new ids (see [ChildID]): mend first
	// what they failed for.
	ActionRetry Action = "retry"

	// ActionSkip leaves a step as it is: an operator has done it, or undone it, or decided
	// that there is no need to. A saga that goes forward continues after the step, and does
	// not undo it if it turns back later. The step must be waiting or have been started, and
	// be neither done nor undone.
	ActionSkip Action = "skip"

	// ActionCompensate turns back a saga whose pivot is not done, such as a stuck one. A pivot
	// in doubt that has no Undo counts as not done: the operator is assumed to know.
	ActionCompensate Action = "compensate"

	// ActionAbandon ends a saga as it is. Nothing more is done or undone. The definition need
	// not be registered. If a runner holds the saga, the ctx of its attempts ends, at the
	// latest at the next heartbeat, and their results are dropped. Consider an attempt that
	// never returns: this is the way to give up its saga.
	ActionAbandon Action = "abandon"
)

// Since returns for how long the saga has made no progress: no step has changed its status,
// and the saga has not turned back.
func (in *Instance) Since() time.Duration { return in.Now.Sub(in.progressed) }

// newInstance returns the Instance of a record. p is its definition, or nil if that is not known.
func newInstance(rec store.Record, p *plan.Plan) *Instance {
	pr, _ := machine.ReadProgress(rec.Steps) // an Instance without Steps if they cannot be read
	in := &Instance{
		ID: rec.ID, Saga: rec.Saga, Version: rec.Version, Status: rec.Status, State: rec.Data,
		Back: pr.Back, Parent: rec.Parent, Step: pr.Step, Cause: pr.Cause,
		Owner: rec.Owner, Epoch: rec.Epoch, Seq: rec.Seq, WakeAt: rec.WakeAt, CompleteBy: rec.CompleteBy,
		Failures: rec.Failures, Takeovers: rec.Takeovers, LastError: rec.LastError,
		CancelRequested: rec.CancelRequested,
		CreatedAt:       rec.CreatedAt, progressed: pr.Since, UpdatedAt: rec.UpdatedAt, Now: rec.Now, answered: pr.Answered,
	}
	if in.Status == Stuck && in.Cause == "" {
		in.Cause = in.LastError // its record could not be read, and was left as it was
	}
	if in.progressed.IsZero() {
		in.progressed = rec.CreatedAt
	}
	past := false
	for i := range pr.Steps {
		u := &pr.Steps[i]
		s := StepState{
			Name: u.Name, Status: u.Status, Attempts: u.Attempts, Undos: u.Undos, Refusals: u.Refusals,
			InDoubt: u.InDoubt, Error: u.Error, NotBefore: u.NotBefore, WaitingSince: u.WaitingSince, Children: u.Children,
		}
		if p != nil && i < len(p.Units) && p.Units[i].Name == u.Name {
			s.Parallel, s.Pivot = p.Units[i].Parallel, i == p.Pivot
			past = past || s.Pivot && (u.Status == StepDone || u.Status == StepSkipped)
		}
		in.Steps = append(in.Steps, s)
	}
	in.Actions = actions(rec, in, past)
	return in
}

// actions returns the actions that are allowed now. past means that the pivot is done.
func actions(rec store.Record, in *Instance, past bool) []Action {
	var a []Action
	if rec.Status == Running && !past && !rec.CancelRequested {
		a = append(a, ActionCancel)
	}
	switch {
	case rec.Status.Ended():
		return a
	case rec.Owner != "":
		return append(a, ActionAbandon)
	}
	a = append(a, ActionRetry)
	if slices.ContainsFunc(in.Steps, func(u StepState) bool { return machine.Skippable(u.Status) }) {
		a = append(a, ActionSkip)
	}
	if !in.Back && !past {
		a = append(a, ActionCompensate)
	}
	return append(a, ActionAbandon)
}

// failure returns the error of a recorded saga that did not complete. log ends with the
// operator's note of a saga that was abandoned, and is empty for all others.
func (in *Instance) failure(log []store.Entry) *Error {
	e := &Error{Saga: in.Saga, ID: in.ID, Status: in.Status, Step: in.Step, Err: recordedCause(in.Cause, in.answered)}
	if len(log) > 0 {
		e.Err = machine.Reason(log[len(log)-1].Error)
	}
	for _, u := range in.Steps {
		switch {
		case u.Status == StepUndoFailed:
			e.Failed = append(e.Failed, Failure{u.Name, OpUndo, machine.Recorded(u.Error)})
		case in.Status == Stuck && !in.Back && u.Status == StepFailed:
			e.Failed = append(e.Failed, Failure{u.Name, OpDo, machine.Recorded(u.Error)})
		}
	}
	return e
}

// recordedCause returns the recorded cause of a saga. It is an answer if the original was.
func recordedCause(text string, answered bool) error {
	if answered {
		return Abort(machine.Reason(text))
	}
	return machine.Reason(text)
}
