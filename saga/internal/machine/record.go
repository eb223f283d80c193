package machine

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	store "github.com/go-resilience/resilience/internal/sagastore"
	"github.com/go-resilience/resilience/saga/internal/plan"
)

// A Progress is the stored form of a machine: the Steps of a Record.
type Progress struct {
	Back     bool      `json:"back,omitempty"`
	Canceled bool      `json:"canceled,omitempty"`
	Carried  string    `json:"carried,omitempty"` // of RunnerConfig.Inject
	Since    time.Time `json:"since,omitzero"`    // of the last progress
	Pivot    *string   `json:"pivot,omitempty"`   // the step's name; "" for none, nil if not known
	Step     string    `json:"step,omitempty"`
	Cause    string    `json:"cause,omitempty"`
	Answered bool      `json:"answered,omitempty"` // Cause is the text of an answer
	Steps    []state   `json:"steps"`
}

// A state is the progress of a step: see saga.StepState.
type state struct {
	Name         string     `json:"n"`
	Status       StepStatus `json:"s"`
	Attempts     int        `json:"a,omitempty"`
	Undos        int        `json:"u,omitempty"`
	Refusals     int        `json:"r,omitempty"`
	InDoubt      bool       `json:"d,omitempty"`
	Error        string     `json:"e,omitempty"`
	NotBefore    time.Time  `json:"-"`
	WaitingSince time.Time  `json:"-"`
	Children     int        `json:"c,omitempty"`

	// The times as they are stored: pointers, since omitzero copies each value.
	T *time.Time `json:"t,omitempty"`
	W *time.Time `json:"w,omitempty"`
}

// ReadProgress decodes the Steps of a Record.
func ReadProgress(steps []byte) (pr Progress, err error) {
	err = json.Unmarshal(steps, &pr)
	for i := range pr.Steps {
		u := &pr.Steps[i]
		if u.T != nil {
			u.NotBefore = *u.T
		}
		if u.W != nil {
			u.WaitingSince = *u.W
		}
	}
	return pr, err
}

// orNil returns t, or nil for the zero time.
func orNil(t *time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	return t
}

// Load returns the machine of a recorded saga.
func Load(p *plan.Plan, rec *store.Record) (*Machine, error) {
	m := New(p)
	pr, err := ReadProgress(rec.Steps)
	if err != nil {
		return m, fmt.Errorf("saga: the record's steps cannot be read: %w", err)
	}
	m.Status, m.Back, m.Canceled, m.Step = rec.Status, pr.Back, pr.Canceled, pr.Step
	m.since = pr.Since
	m.Carried, m.created = pr.Carried, rec.CreatedAt
	if m.since.IsZero() {
		m.since = rec.CreatedAt
	}
	m.Cause, m.answered = Reason(pr.Cause), pr.Answered
	m.CompleteBy, m.failures, m.takeovers, m.lastError = rec.CompleteBy, rec.Failures, rec.Takeovers, rec.LastError
	same := len(pr.Steps) == len(m.Units)
	for i := range pr.Steps {
		same = same && pr.Steps[i].Name == m.Units[i].Name
	}
	if !same {
		return m, fmt.Errorf("saga: the steps of %s version %d are not those of the record", p.Name, p.Version)
	}
	copy(m.Units, pr.Steps)
	m.skipComplete()
	if pr.Pivot != nil && *pr.Pivot != p.PivotName {
		return m, fmt.Errorf("saga: the pivot of %s version %d is %q, that of the record was %q", p.Name, p.Version, p.PivotName, *pr.Pivot)
	}
	return m, nil
}

// Commit returns what is to be recorded of the machine.
func (m *Machine) Commit() store.CommitRequest {
	return store.CommitRequest{
		Status: m.Status, Steps: m.Steps(), Failures: m.failures, Takeovers: m.takeovers, LastError: m.lastError, Log: m.Log,
	}
}

// Committed notes that commit was recorded.
func (m *Machine) Committed() { m.Log, m.Changed = nil, false }

// Steps returns the machine as the Steps of a Record.
func (m *Machine) Steps() []byte {
	pr := Progress{
		Back: m.Back, Canceled: m.Canceled, Carried: m.Carried, Since: m.since,
		Pivot: &m.plan.PivotName, Step: m.Step, Answered: m.answered, Steps: m.Units,
	}
	if m.Cause != nil {
		pr.Cause = Text(m.Cause.Error())
	}
	for i := range m.Units {
		u := &m.Units[i]
		u.T, u.W = orNil(&u.NotBefore), orNil(&u.WaitingSince)
	}
	data, err := json.Marshal(&pr)
	if err != nil {
		panic(err) // strings, numbers and times can be encoded
	}
	return data
}

// Reason returns the error whose text was recorded, or nil if there is no text.
func Reason(text string) error {
	if text == "" {
		return nil
	}
	return Recorded(text)
}

// Recorded returns the error whose text was recorded. It matches the sentinel that
// the error had.
func Recorded(text string) error {
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

// Text makes the text of an error, or of an operator, one that every store can keep.
func Text(s string) string {
	const most = 4000
	if len(s) > most {
		s = s[:most] + "..."
	}
	if strings.IndexByte(s, 0) >= 0 {
		s = strings.ReplaceAll(s, "\x00", "\uFFFD")
	}
	return strings.ToValidUTF8(s, "\uFFFD")
}
