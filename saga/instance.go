package saga

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	store "github.com/go-resilience/resilience/saga/sagastore"
)

// An Instance describes a saga at the time in the field Now. All times in an Instance are from the store's clock.
type Instance struct {
	ID      string // 1 to 200 bytes
	Saga    string // the Name of the definition
	Version int    // the Version of the definition
	Status  Status
	State   []byte      // the state, encoded by the definition's Codec
	Steps   []StepState // the progress of the steps, in the definition's order
	Parent  string      // the id of the saga that started this one, or ""

	TurnedBack bool   // the saga has turned back, so it is being undone or was undone
	Step       string // the step at which the saga turned back or got stuck
	Cause      string // the reason why the saga turned back or got stuck

	Owner      string    // the runner that holds the saga, or ""
	Epoch      int64     // the number of times that a runner claimed the saga
	Seq        int64     // the number of entries in the saga's log
	WakeAt     time.Time // the end of the owner's lease or, without an owner, the time when the saga is due
	CompleteBy time.Time // the time when the saga turns back because of Saga.Timeout; zero means never

	Failures        int    // attempts that failed since a step last succeeded
	Takeovers       int    // takeovers from crashed owners since a step last succeeded
	LastError       string // the latest failure, even if an attempt succeeded later, or the note of ActionAbandon
	CancelRequested bool   // a request to cancel was recorded

	CreatedAt time.Time
	UpdatedAt time.Time
	Now       time.Time // the time when the saga was read

	// Actions are the actions that are allowed now. All actions except ActionCancel and ActionAbandon need a runner with
	// which the definition is registered.
	Actions []Action

	progress
}

// A StepState is the progress of a step. While a runner holds the saga, a StepState lacks the attempts since the
// runner's last write. So a step with the status StepStarted may have taken effect even if MaybeApplied is false.
type StepState struct {
	Name         string     `json:"n"`
	Status       StepStatus `json:"s"`
	Attempts     int        `json:"a,omitempty"` // recorded attempts of Do
	Undos        int        `json:"u,omitempty"` // attempts of Undo
	Refusals     int        `json:"r,omitempty"` // consecutive refusals by a policy
	MaybeApplied bool       `json:"m,omitempty"` // an attempt of Do may have taken effect
	Error        string     `json:"e,omitempty"` // the error of the latest failed attempt
	NotBefore    time.Time  `json:"t,omitzero"`  // the time when the next attempt may start, or when the step's wait ends

	WaitingSince time.Time `json:"w,omitzero"`  // the time when the wait for a Delay, an Await or children started
	Children     int       `json:"c,omitempty"` // the recorded number of sagas that the step has started

	// Parallel and Pivot are copied from the Step. Both are false if the definition is not registered with the runner.
	Parallel bool `json:"-"`
	Pivot    bool `json:"-"`
}

// attempts returns the counter of the attempts of Do or Undo.
func (st *StepState) attempts(op Op) *int {
	if op == OpUndo {
		return &st.Undos
	}
	return &st.Attempts
}

// progress contains the unexported fields of an Instance that the store keeps.
type progress struct {
	canceled bool      // a request to turn back has reached the owner
	carried  string    // the text that RunnerConfig.Inject returned
	since    time.Time // the time of the last progress
	answered bool      // Cause is the text of a participant's answer
	pivot    *string   // the name of the pivot; "" if there is none, nil if it is not known
	hung     []string  // steps with an attempt that does not return after its timeout; never changed in place

	// A runner that cannot read the record sets these fields in it. The first commit of a runner that can read it clears
	// them.
	unread time.Time // the time since which no runner could read the record
	orphan bool      // a previous owner crashed, so started steps may have taken effect

	// StartTx started the saga, and no runner has reported EventCreated yet. StartTx cannot report it, because its
	// transaction may be rolled back.
	unreported bool
}

// stored is the JSON form of those fields of an Instance that are in the Progress of a Record.
type stored struct {
	V          int         `json:"v,omitempty"` // see progressVersion
	TurnedBack bool        `json:"turned_back,omitempty"`
	Canceled   bool        `json:"canceled,omitempty"`
	Carried    string      `json:"carried,omitempty"`
	Since      time.Time   `json:"since,omitzero"`
	Pivot      *string     `json:"pivot,omitempty"`
	Step       string      `json:"step,omitempty"`
	Cause      string      `json:"cause,omitempty"`
	Answered   bool        `json:"answered,omitempty"`
	Hung       []string    `json:"hung,omitempty"`
	Steps      []StepState `json:"steps"`
	Unread     time.Time   `json:"unread,omitzero"`
	Orphan     bool        `json:"orphan,omitempty"`
	Unreported bool        `json:"unreported,omitempty"`
}

// progressVersion is the version of the JSON in a Progress. A new field does not need a new version, unless older
// versions of this package, which do not know the field, must not read the Progress.
const progressVersion = 0

// encode returns the Progress of a Record.
func (in *Instance) encode() []byte {
	data, err := json.Marshal(&stored{
		V: progressVersion, TurnedBack: in.TurnedBack, Canceled: in.canceled, Carried: in.carried, Since: in.since,
		Pivot: in.pivot, Step: in.Step, Cause: in.Cause, Answered: in.answered, Hung: in.hung, Steps: in.Steps,
	})
	if err != nil {
		panic(err) // strings, numbers and times can be encoded
	}
	return data
}

// decode returns the Instance of a record. If its steps cannot be read, it returns an error and an Instance without
// Steps.
func decode(rec *store.Record) (*Instance, error) {
	var was stored
	err := json.Unmarshal(rec.Progress, &was)
	if err == nil && was.V > progressVersion {
		err = fmt.Errorf("their version is %d, and this version of the package reads up to %d", was.V, progressVersion)
	}
	if err != nil {
		was, err = stored{}, fmt.Errorf("saga: record's steps cannot be read: %w", err)
	}
	in := &Instance{
		ID: rec.ID, Saga: rec.Saga, Version: rec.Version, Status: rec.Status, State: rec.State, Steps: was.Steps,
		TurnedBack: was.TurnedBack, Parent: rec.Parent, Step: was.Step, Cause: was.Cause,
		Owner: rec.Owner, Epoch: rec.Epoch, Seq: rec.Seq, WakeAt: rec.WakeAt, CompleteBy: rec.CompleteBy,
		Failures: rec.Failures, Takeovers: rec.Takeovers, LastError: rec.LastError, CancelRequested: rec.CancelRequested,
		CreatedAt: rec.CreatedAt, UpdatedAt: rec.UpdatedAt, Now: rec.Now,
		progress: progress{
			was.Canceled, was.Carried, was.Since, was.Answered, was.Pivot, was.Hung, was.Unread, was.Orphan, was.Unreported,
		},
	}
	if in.since.IsZero() {
		in.since = rec.CreatedAt
	}
	return in, err
}

// An instanceJSON is the JSON form of an Instance. It has the data from which IdleFor and [Error.Answered] are
// computed, and the fields of the steps that a Record does not have, since another engine may send an Instance as
// JSON.
type instanceJSON struct {
	*instanceFields
	Steps    []stepJSON
	Since    time.Time `json:",omitzero"`
	Answered bool      `json:",omitempty"`
}

type instanceFields Instance // an Instance without its methods

type stepJSON struct {
	StepState
	Parallel bool `json:"parallel,omitempty"`
	Pivot    bool `json:"pivot,omitempty"`
}

// MarshalJSON implements json.Marshaler.
func (in Instance) MarshalJSON() ([]byte, error) {
	j := instanceJSON{instanceFields: (*instanceFields)(&in), Since: in.since, Answered: in.answered}
	for _, st := range in.Steps {
		j.Steps = append(j.Steps, stepJSON{st, st.Parallel, st.Pivot})
	}
	return json.Marshal(&j)
}

// UnmarshalJSON implements json.Unmarshaler.
func (in *Instance) UnmarshalJSON(data []byte) error {
	j := instanceJSON{instanceFields: (*instanceFields)(in)}
	if err := json.Unmarshal(data, &j); err != nil {
		return err
	}
	in.since, in.answered, in.Steps = j.Since, j.Answered, nil
	for _, st := range j.Steps {
		st.StepState.Parallel, st.StepState.Pivot = st.Parallel, st.Pivot
		in.Steps = append(in.Steps, st.StepState)
	}
	return nil
}

// show returns the Instance of a record for programs and operators. p is the saga's definition, or nil if it is not
// known.
func show(rec *store.Record, p *program) *Instance {
	in, _ := decode(rec)
	in.complete(p)
	return in
}

// complete sets the fields that are derived from other fields and from the definition p, which may be nil.
func (in *Instance) complete(p *program) {
	if in.Status == Stuck && in.Cause == "" {
		in.Cause = in.LastError // a runner that could not read the record has not set a Cause
	}
	if in.pivot == nil && p != nil {
		in.pivot = &p.pivotName
	}
	for i := range in.Steps {
		if st := &in.Steps[i]; p != nil && i < len(p.steps) && p.steps[i].name == st.Name {
			st.Parallel, st.Pivot = p.steps[i].parallel, i == p.pivot
		}
	}
	in.CancelRequested = in.CancelRequested || in.canceled
	in.Actions = in.actions()
}

// pivotDone reports whether the pivot is done. If the pivot is done, the saga no longer turns back. pivotDone needs no
// definition, because the record has the name of the pivot.
func (in *Instance) pivotDone() bool {
	return !in.TurnedBack && in.pivot != nil && slices.ContainsFunc(in.Steps, func(st StepState) bool {
		return st.Name == *in.pivot && complete(st.Status)
	})
}

// IdleFor returns the time for which the saga has made no progress.
func (in *Instance) IdleFor() time.Duration { return in.Now.Sub(in.since) }

// An Action is an operator's intervention in a saga. See [Runner.Operate]. While a runner holds the saga, only
// ActionCancel and ActionAbandon are allowed, with one exception: if EventStalled has reported a step that does not
// return, ActionRetry is also allowed.
type Action string

const (
	// ActionCancel turns a running saga back, as [Handle.Cancel] does.
	ActionCancel Action = "cancel"

	// ActionRetry lets a stuck saga continue in its direction: forward, or back if it has turned back. The attempts of
	// failed steps count from zero again. The next attempt starts immediately, even if the saga is not stuck but waits
	// before this attempt. If Saga.Timeout has expired and the pivot is not done, ActionRetry turns the saga back.
	// ActionRetry does not shorten waits for a Delay or an Await. Children that were compensated or abandoned are started
	// again with new ids.
	//
	// If a step does not return, ActionRetry takes the saga from its runner. Attempts in progress may have taken effect,
	// and their results are dropped. If [Handle.Cancel] was called before ActionRetry, the saga turns back.
	ActionRetry Action = "retry"

	// ActionSkip gives a step the status StepSkipped, without another attempt. The saga continues after the step, and does
	// not undo the step later. A step can be skipped if it is waiting, or if it was started and is neither done nor
	// undone.
	ActionSkip Action = "skip"

	// ActionCompensate turns back a saga whose pivot is not done. If a pivot without Undo may have taken effect,
	// ActionCompensate skips the pivot. So the operator must first make sure that the pivot has not taken effect.
	ActionCompensate Action = "compensate"

	// ActionAbandon ends a saga without undoing its steps, even if its definition is unknown. Attempts in progress are
	// canceled at the next heartbeat of the saga's owner, and their results are dropped.
	ActionAbandon Action = "abandon"
)

// actions returns the actions that are allowed now.
func (in *Instance) actions() (a []Action) {
	if in.Status == Running && !in.pivotDone() && !in.CancelRequested {
		a = append(a, ActionCancel)
	}
	switch {
	case in.Status.Ended():
		return a
	case in.Owner != "" && len(in.hung) > 0:
		return append(a, ActionRetry, ActionAbandon)
	case in.Owner != "":
		return append(a, ActionAbandon)
	}
	a = append(a, ActionRetry)
	if slices.ContainsFunc(in.Steps, func(st StepState) bool { return skippable(st.Status) }) {
		a = append(a, ActionSkip)
	}
	if !in.TurnedBack && !in.pivotDone() {
		a = append(a, ActionCompensate)
	}
	return append(a, ActionAbandon)
}

// blocker returns the step that prevents the saga from continuing, or "".
func (in *Instance) blocker() string {
	if !in.TurnedBack {
		return in.Step
	}
	for _, st := range in.Steps {
		if st.Status == StepUndoFailed {
			return st.Name
		}
	}
	return "" // in.Step is not the blocker: it is the step at which the saga turned back
}

// failure returns the error of a recorded saga that did not complete.
func (in *Instance) failure() *Error {
	cause := reason(in.Cause)
	switch {
	case in.Status == Abandoned:
		cause = reason(in.LastError) // the operator's note
	case in.answered:
		cause = Permanent(cause)
	}
	return in.failureOf(cause, func(i int) error { return recorded(in.Steps[i].Error) })
}

// failureOf returns the error of a saga that did not complete because of cause.
func (in *Instance) failureOf(cause error, errorOf func(step int) error) *Error {
	e := &Error{Saga: in.Saga, ID: in.ID, Status: in.Status, Step: in.Step, Err: cause}
	for i, st := range in.Steps {
		switch {
		case st.Status == StepUndoFailed:
			e.Failed = append(e.Failed, Failure{st.Name, OpUndo, errorOf(i)})
		case in.Status == Stuck && !in.TurnedBack && st.Status == StepFailed:
			e.Failed = append(e.Failed, Failure{st.Name, OpDo, errorOf(i)})
		}
	}
	return e
}

// reason returns the error with a recorded text, or nil if the text is empty.
func reason(text string) error {
	if text == "" {
		return nil
	}
	return recorded(text)
}

// recorded returns an error with a recorded text. It matches ErrCanceled, ErrDeadline or ErrNoSignal if the original
// error did.
func recorded(text string) error {
	for _, known := range []error{ErrCanceled, ErrDeadline, ErrNoSignal} {
		if text == known.Error() {
			return known
		}
		if why, ok := strings.CutPrefix(text, known.Error()+": "); ok {
			return fmt.Errorf("%w: %s", known, why)
		}
	}
	return errors.New(text)
}

const maxText = 4000 // maximum bytes of a text that storable does not cut

// shorten returns the first most bytes of s, followed by "...", if s is longer.
func shorten(s string, most int) string {
	if len(s) > most {
		s = s[:most] + "..."
	}
	return s
}

// storable returns the text of an error or of an operator in a form that every store accepts: valid UTF-8 without NUL,
// and not too long.
func storable(s string) string {
	s = shorten(s, maxText)
	return strings.ToValidUTF8(strings.ReplaceAll(s, "\x00", "\uFFFD"), "\uFFFD")
}
