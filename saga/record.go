package saga

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/go-resilience/resilience/internal/behavior"
)

// A progressRecord is the stored form of a machine: the Steps of a Record.
type progressRecord struct {
	Back     bool         `json:"back,omitempty"`
	Canceled bool         `json:"canceled,omitempty"`
	Carried  string       `json:"carried,omitempty"` // of RunnerConfig.Inject
	Since    time.Time    `json:"since,omitzero"`    // of the last progress
	Reported time.Time    `json:"reported,omitzero"` // when OnStalled was last called
	Pivot    *string      `json:"pivot,omitempty"`   // the step's name; "" for none, nil if not known
	Step     string       `json:"step,omitempty"`
	Cause    string       `json:"cause,omitempty"`
	Answered bool         `json:"answered,omitempty"` // Cause is the text of an answer
	Steps    []stepRecord `json:"steps"`
}

// A stepRecord is the stored form of a StepState.
type stepRecord struct {
	Name      string     `json:"n"`
	Status    StepStatus `json:"s"`
	Attempts  int        `json:"a,omitempty"`
	Undos     int        `json:"u,omitempty"`
	Refusals  int        `json:"r,omitempty"`
	InDoubt   bool       `json:"d,omitempty"`
	Error     string     `json:"e,omitempty"`
	NotBefore *time.Time `json:"t,omitempty"` // a pointer, since omitzero copies each value
	Waiting   *time.Time `json:"w,omitempty"` // since then
	Children  int        `json:"c,omitempty"`
}

func recordOf(u *StepState) stepRecord {
	return stepRecord{u.Name, u.Status, u.Attempts, u.Undos, u.Refusals, u.InDoubt, u.Error, orNil(&u.NotBefore), orNil(&u.WaitingSince), u.Children}
}

// state returns what is recorded of a step. step is the name of the step that it is, or
// is an alternative of.
func (s *stepRecord) state(step string) StepState {
	return StepState{
		Name: s.Name, Step: step, Status: s.Status, Attempts: s.Attempts, Undos: s.Undos, Refusals: s.Refusals,
		InDoubt: s.InDoubt, Error: s.Error, NotBefore: orZero(s.NotBefore), WaitingSince: orZero(s.Waiting), Children: s.Children,
	}
}

// orNil returns t, or nil for the zero time, and orZero the other way round.
func orNil(t *time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	return t
}

func orZero(t *time.Time) time.Time {
	if t == nil {
		return time.Time{}
	}
	return *t
}

// loadMachine returns the machine of a recorded saga.
func loadMachine(p *plan, rec *Record) (*machine, error) {
	m := newMachine(p)
	var pr progressRecord
	if err := json.Unmarshal(rec.Steps, &pr); err != nil {
		return m, fmt.Errorf("saga: the record's steps cannot be read: %w", err)
	}
	m.status, m.back, m.canceled, m.step = rec.Status, pr.Back, pr.Canceled, pr.Step
	m.since, m.reported = pr.Since, pr.Reported
	m.carried, m.created = pr.Carried, rec.CreatedAt
	if m.since.IsZero() {
		m.since = rec.CreatedAt
	}
	m.cause = recordedCause(pr.Cause, pr.Answered)
	m.completeBy, m.failures, m.takeovers, m.lastError = rec.CompleteBy, rec.Failures, rec.Takeovers, rec.LastError
	same := len(pr.Steps) == len(m.units)
	for i := range pr.Steps {
		same = same && pr.Steps[i].Name == m.units[i].Name
	}
	if !same {
		return m, fmt.Errorf("saga: the steps of %s version %d are not those of the record", p.name, p.version)
	}
	for i := range pr.Steps {
		m.units[i] = pr.Steps[i].state(m.units[i].Step)
		m.work[i].ended = rec.Now
	}
	if m.past() {
		// A unit that failed while the pivot was under way was started again before the
		// record was written. The others are given up.
		for k := range p.nodes {
			if at, i := m.node(k); at == nodeExhausted {
				m.work[i].final = true
			}
		}
	}
	if pr.Pivot != nil && *pr.Pivot != p.pivotName {
		return m, fmt.Errorf("saga: the pivot of %s version %d is %q, that of the record was %q", p.name, p.version, p.pivotName, *pr.Pivot)
	}
	return m, nil
}

// encode returns the machine as the Steps of a Record.
func (m *machine) encode() []byte {
	pr := progressRecord{
		Back: m.back, Canceled: m.canceled, Carried: m.carried, Since: m.since, Reported: m.reported,
		Pivot: &m.p.pivotName, Step: m.step,
	}
	if m.cause != nil {
		pr.Cause, pr.Answered = text(m.cause.Error()), behavior.IsAnswered(m.cause)
	}
	m.records = slices.Grow(m.records[:0], len(m.units))
	for i := range m.units {
		m.records = append(m.records, recordOf(&m.units[i]))
	}
	pr.Steps = m.records
	data, err := json.Marshal(pr)
	if err != nil {
		panic(err) // strings, numbers and times can be encoded
	}
	return data
}

// recordedCause returns the recorded cause of a saga. It is an answer if the original was.
func recordedCause(text string, answered bool) error {
	if answered {
		return Abort(recordedReason(text))
	}
	return recordedReason(text)
}

// recordedReason returns the error whose text was recorded, or nil if there is no text.
func recordedReason(text string) error {
	if text == "" {
		return nil
	}
	return recordedError(text)
}

// recordedError returns the error whose text was recorded. It matches the sentinel that
// the error had.
func recordedError(text string) error {
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

// text makes the text of an error, or of an operator, one that every store can keep.
func text(s string) string {
	const most = 4000
	if len(s) > most {
		s = s[:most] + "..."
	}
	if strings.IndexByte(s, 0) >= 0 {
		s = strings.ReplaceAll(s, "\x00", "\uFFFD")
	}
	return strings.ToValidUTF8(s, "\uFFFD")
}
