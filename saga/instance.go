package saga

import (
	"encoding/json"
	"slices"
	"time"
)

// An Instance is a saga as it was when it was looked at.
type Instance struct {
	ID      string
	Saga    string // the definition's Name
	Version int
	Status  Status
	State   []byte      // as the definition's Codec has encoded it
	Steps   []StepState // every step and alternative, in the definition's order
	Back    bool        // it has turned back: what is left is to be undone

	Step  string // where it turned back or got stuck; "": at no step
	Cause string // why it did

	Owner      string // the runner that holds it; "": none
	Epoch      int64  // how often it was claimed
	Seq        int64  // entries in its log
	WakeAt     time.Time
	CompleteBy time.Time // zero: no deadline

	Failures        int // attempts that have failed since a step last succeeded
	Takeovers       int // from crashed owners since a step last had a result
	LastError       string
	CancelRequested bool
	CancelNote      string

	CreatedAt  time.Time
	ProgressAt time.Time // when a step last changed its status, or the saga turned back
	UpdatedAt  time.Time // when the record was last written
	Now        time.Time // when it was looked at, by the store's clock as all of these

	// Actions are those that a person may take now: "cancel", "retry", "skip",
	// "compensate", "abandon".
	Actions []string
}

// Since returns for how long the saga has made no progress.
func (in *Instance) Since() time.Duration { return in.Now.Sub(in.ProgressAt) }

// CommandID returns the id of the command with which a step's participant was,
// or will be, asked to do or to undo it.
func (in *Instance) CommandID(step string, op Op) string {
	for _, u := range in.Steps {
		if u.Name == step {
			return in.ID + "/" + u.Step + "/" + u.Name + "/" + string(op)
		}
	}
	return ""
}

// newInstance shows a record. Without its definition (a nil plan) the
// alternatives of a step are not known to be its.
func newInstance(rec Record, p *plan) *Instance {
	var pr progress
	_ = json.Unmarshal(rec.Steps, &pr) // what cannot be read is not shown
	in := &Instance{
		ID: rec.ID, Saga: rec.Saga, Version: rec.Version, Status: rec.Status, State: rec.Data,
		Steps: pr.Steps, Back: pr.Back, Step: pr.Step, Cause: pr.Cause,
		Owner: rec.Owner, Epoch: rec.Epoch, Seq: rec.Seq, WakeAt: rec.WakeAt, CompleteBy: rec.CompleteBy,
		Failures: rec.Failures, Takeovers: rec.Takeovers, LastError: rec.LastError,
		CancelRequested: rec.CancelRequested, CancelNote: rec.CancelNote,
		CreatedAt: rec.CreatedAt, ProgressAt: pr.Since, UpdatedAt: rec.UpdatedAt, Now: rec.Now,
	}
	if in.ProgressAt.IsZero() {
		in.ProgressAt = rec.CreatedAt
	}
	past := false
	for i := range in.Steps {
		u := &in.Steps[i]
		u.Step = u.Name
		if p != nil && i < len(p.units) && p.units[i].name == u.Name {
			n := p.units[i].node
			u.Step = p.nodes[n].name
			past = past || n == p.pivot && (u.Status == StepDone || u.Status == StepSkipped)
		}
	}
	in.Actions = actions(rec, &pr, past && !pr.Back)
	return in
}

// actions returns what a person may do with a saga.
func actions(rec Record, pr *progress, past bool) []string {
	var a []string
	if rec.Status == Running && !past && !rec.CancelRequested {
		a = append(a, "cancel")
	}
	switch {
	case rec.Status.Ended():
		return a
	case rec.Owner != "":
		return append(a, "abandon")
	}
	a = append(a, "retry")
	if slices.ContainsFunc(pr.Steps, func(u StepState) bool { return skippable(u.Status) }) {
		a = append(a, "skip")
	}
	if !pr.Back && !past {
		a = append(a, "compensate")
	}
	return append(a, "abandon")
}

// failure is why a saga did not complete, from what is recorded of it.
func (in *Instance) failure(log []Entry) *Error {
	e := &Error{Name: in.Saga, ID: in.ID, Status: in.Status, Step: in.Step}
	if in.Cause != "" {
		e.Err = recordedError(in.Cause)
	}
	if in.Status == Abandoned && len(log) > 0 {
		e.Err = recordedError(log[len(log)-1].Error)
	}
	for _, entry := range log {
		if entry.Event == EventUndone {
			e.Undone = append(e.Undone, entry.Step)
		}
	}
	for _, u := range in.Steps {
		switch {
		case u.Status == StepUndoFailed:
			e.Failed = append(e.Failed, Failure{u.Name, OpUndo, recordedError(u.Error)})
		case in.Status == Stuck && !in.Back && u.Status == StepFailed:
			e.Failed = append(e.Failed, Failure{u.Name, OpDo, recordedError(u.Error)})
		}
	}
	return e
}
