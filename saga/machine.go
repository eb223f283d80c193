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

// A machine is the state of one saga and the rules by which it changes. It does
// no work, reads no clock and writes nothing: it is told what happened, and says
// what may begin, what to log and where the saga is. What it marks as started
// or undoing must be recorded before it begins.
type machine struct {
	p     *plan
	quiet bool // keep no log: nothing is recorded

	status     Status
	back       bool // turned back, for good
	step       string
	cause      error  // why it turned back or is stuck, and at which step
	wishStep   string // why it is to turn back: the first reason counts
	wish       error
	canceled   bool
	completeBy time.Time

	units     []StepState
	work      []work    // of this owner; nothing of it is recorded
	low       int       // the nodes below are complete
	since     time.Time // of the last progress; zero: there was none
	reported  time.Time // when the lack of it was told last
	moved     bool      // since is to be set
	failures  int
	takeovers int
	lastError string
	undone    []string

	log     []Entry // since the last commit
	changed bool    // what a commit must record has changed
}

// work is what a machine knows of the attempts of a unit in this process.
type work struct {
	busy  bool      // an attempt is running
	due   time.Time // when its ctx ends
	final bool      // its error said that another is pointless
	ended time.Time // of the last attempt that is in doubt
	err   error     // of the last attempt
}

// A StepState is the progress of a step, or of one of its alternatives.
type StepState struct {
	Name      string     `json:"n"`
	Status    StepStatus `json:"s"`
	Attempts  int        `json:"a,omitempty"` // of Do, as far as they are known
	Undos     int        `json:"u,omitempty"` // attempts of Undo
	Refusals  int        `json:"r,omitempty"` // calls refused since the last attempt that was made
	InDoubt   bool       `json:"d,omitempty"` // an attempt of Do may have taken effect
	Error     string     `json:"e,omitempty"` // of the latest failure
	NotBefore time.Time  `json:"t,omitzero"`  // when its next attempt may begin
	Step      string     `json:"-"`           // the step that it is, or is an alternative of
}

// progress is what a Record's Steps holds.
type progress struct {
	Back     bool        `json:"back,omitempty"`
	Canceled bool        `json:"canceled,omitempty"`
	Since    time.Time   `json:"since,omitzero"`    // of the last progress
	Reported time.Time   `json:"reported,omitzero"` // when the lack of it was told last
	Pivot    *string     `json:"pivot,omitempty"`   // the name of the step; "": none; nil: not known
	Step     string      `json:"step,omitempty"`
	Cause    string      `json:"cause,omitempty"`
	Steps    []StepState `json:"steps"`
}

func newMachine(p *plan) *machine {
	return &machine{p: p, status: Running, units: slices.Clone(p.idle), work: make([]work, len(p.units))}
}

// loadMachine takes a saga up where its record has it.
func loadMachine(p *plan, rec *Record) (*machine, error) {
	m := newMachine(p)
	var pr progress
	if err := json.Unmarshal(rec.Steps, &pr); err != nil {
		return m, fmt.Errorf("saga: the record's steps cannot be read: %w", err)
	}
	m.status, m.back, m.canceled, m.step = rec.Status, pr.Back, pr.Canceled, pr.Step
	m.since, m.reported = pr.Since, pr.Reported
	if m.since.IsZero() {
		m.since = rec.CreatedAt
	}
	if pr.Cause != "" {
		m.cause = recordedError(pr.Cause)
	}
	m.completeBy, m.failures, m.takeovers, m.lastError = rec.CompleteBy, rec.Failures, rec.Takeovers, rec.LastError
	same := len(pr.Steps) == len(m.units)
	for i := range pr.Steps {
		same = same && pr.Steps[i].Name == m.units[i].Name
	}
	if !same {
		return m, fmt.Errorf("saga: the steps of %s version %d are not those of the record", p.name, p.version)
	}
	for i := range pr.Steps {
		pr.Steps[i].Step = m.units[i].Step
		m.work[i].ended = rec.Now
	}
	m.units = pr.Steps
	if pr.Pivot != nil && *pr.Pivot != p.pivotName {
		return m, fmt.Errorf("saga: the pivot of %s version %d is %q, that of the record was %q", p.name, p.version, p.pivotName, *pr.Pivot)
	}
	return m, nil
}

func (m *machine) progress() progress {
	pr := progress{
		Back: m.back, Canceled: m.canceled, Since: m.since, Reported: m.reported,
		Pivot: &m.p.pivotName, Step: m.step, Steps: m.units,
	}
	if m.cause != nil {
		pr.Cause = text(m.cause.Error())
	}
	return pr
}

// encode returns the machine's progress as a Record keeps it.
func (m *machine) encode() []byte {
	data, err := json.Marshal(m.progress())
	if err != nil {
		panic(err) // it is of strings, numbers and times
	}
	return data
}

func (m *machine) clone() *machine {
	c := *m
	c.units, c.work = slices.Clone(m.units), slices.Clone(m.work)
	c.log, c.undone = slices.Clone(m.log), slices.Clone(m.undone)
	return &c
}

// recordedError is an error of which the record keeps the text, and the
// sentinel where there is one.
func recordedError(text string) error {
	for _, known := range []error{ErrCanceled, ErrDeadline} {
		if text == known.Error() {
			return known
		}
		if why, ok := strings.CutPrefix(text, known.Error()+": "); ok {
			return fmt.Errorf("%w: %s", known, why)
		}
	}
	return errors.New(text)
}

func (m *machine) note(e Entry) {
	m.changed = true
	if !m.quiet {
		e.Error = text(e.Error)
		m.log = append(m.log, e)
	}
}

// text makes of the words of an error or a person what every store can keep.
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

func (m *machine) set(i int, s StepStatus) {
	m.units[i].Status = s
	m.changed, m.moved = true, true
}

// failing returns when the saga is to be reported as failing: when it has made no
// progress for that long, and again whenever that time has doubled, while an attempt
// has failed, was refused, or runs though its time is over. ok is false if it is not
// failing.
func (m *machine) failing(after time.Duration) (at time.Time, ok bool) {
	if after < 0 || m.status != Running && m.status != Compensating {
		return at, false
	}
	if m.reported.After(m.since) {
		after = 2 * m.reported.Sub(m.since)
	}
	for i := range m.units {
		u, w, t := &m.units[i], &m.work[i], m.since.Add(after)
		switch {
		case (u.Status == StepStarted || u.Status == StepUndoing) && u.Error != "":
		case w.busy:
			if w.due.After(t) {
				t = w.due
			}
		default:
			continue
		}
		if !ok || t.Before(at) {
			at, ok = t, true
		}
	}
	return at, ok
}

// begin says that an attempt of a unit that was ready begins, and which it is.
func (m *machine) begin(i int) (op Op, attempt int) {
	m.work[i].busy = true
	u := &m.units[i]
	if u.Status == StepUndoing {
		u.Undos++
		return OpUndo, u.Undos
	}
	u.Attempts++
	return OpDo, u.Attempts
}

// did says how an attempt of Do has ended.
func (m *machine) did(i int, err error, now time.Time) {
	u, w, d := &m.units[i], &m.work[i], &m.p.units[i]
	w.busy, w.err = false, err
	if err == nil {
		u.NotBefore = time.Time{}
		if u.InDoubt && d.settle > 0 {
			u.NotBefore = w.ended.Add(d.settle) // an earlier attempt may be late
		}
		u.InDoubt, u.Error, u.Refusals = false, "", 0
		m.failures, m.takeovers = 0, 0
		m.set(i, StepDone)
		m.note(Entry{Step: u.Name, Op: OpDo, Event: EventDone, Attempt: u.Attempts})
		return
	}
	end := behavior.Read(err)
	if end.Kind == behavior.Refused {
		u.Attempts--
		m.refused(i, OpDo, u.Attempts, err, end.RetryAfter, now)
		return
	}
	u.Refusals = 0
	if !noEffect(err) && !d.noDoubt || errors.Is(err, errTxEnded) {
		u.InDoubt, w.ended = true, now
	}
	w.final = isFinal(err, end)
	m.failed(u, err)
	if !w.final && (m.unlimited(i) || !spent(d.attempts, u.Attempts)) && (!m.turning(now) || m.mustKnow(i)) {
		pause, broken := wait(d, u.Attempts, end.RetryAfter)
		if broken == nil {
			u.NotBefore = now.Add(pause)
			return
		}
		m.broken(i, broken)
	}
	m.gaveUp(i)
}

// broken says that the Backoff of a unit has panicked: there is no other attempt.
func (m *machine) broken(i int, err error) {
	u, w := &m.units[i], &m.work[i]
	w.final, w.err = true, fmt.Errorf("%w: %w", err, w.err)
	m.lastError = text(w.err.Error())
	u.Error = m.lastError
}

// gaveUp says that a Do is not tried again.
func (m *machine) gaveUp(i int) {
	u := &m.units[i]
	u.NotBefore = time.Time{}
	if u.InDoubt {
		m.set(i, StepFailed)
		m.note(Entry{Step: u.Name, Op: OpDo, Event: EventFailed, Attempt: u.Attempts, Error: u.Error})
	} else {
		m.set(i, StepNoEffect)
		m.note(Entry{Step: u.Name, Op: OpDo, Event: EventNoEffect, Attempt: u.Attempts, Error: u.Error})
	}
}

// undid says how an attempt of Undo has ended.
func (m *machine) undid(i int, err error, now time.Time) {
	u, w, d := &m.units[i], &m.work[i], &m.p.units[i]
	w.busy, w.err = false, err
	u.NotBefore = time.Time{}
	if err == nil {
		m.failures, m.takeovers = 0, 0
		u.Refusals = 0
		m.undone = append(m.undone, u.Name)
		m.set(i, StepUndone)
		m.note(Entry{Step: u.Name, Op: OpUndo, Event: EventUndone, Attempt: u.Undos})
		return
	}
	end := behavior.Read(err)
	if end.Kind == behavior.Refused {
		u.Undos--
		m.refused(i, OpUndo, u.Undos, err, end.RetryAfter, now)
		return
	}
	u.Refusals = 0
	m.failed(u, err)
	if !isFinal(err, end) && !spent(d.undoAttempts, u.Undos) {
		pause, broken := wait(d, u.Undos, end.RetryAfter)
		if broken == nil {
			u.NotBefore = now.Add(pause)
			return
		}
		m.broken(i, broken)
	}
	m.undoGaveUp(i)
}

// undoGaveUp says that an Undo is not tried again.
func (m *machine) undoGaveUp(i int) {
	u := &m.units[i]
	m.set(i, StepUndoFailed)
	m.note(Entry{Step: u.Name, Op: OpUndo, Event: EventUndoFailed, Attempt: u.Undos, Error: u.Error})
}

// refused says that an attempt was refused before the participant was called. It
// is no attempt and leaves nothing in doubt. The log shows the first refusal in a
// row, together with whatever is recorded next.
func (m *machine) refused(i int, op Op, attempts int, err error, after time.Duration, now time.Time) {
	u := &m.units[i]
	u.Refusals++
	m.lastError = text(err.Error())
	u.Error = m.lastError
	pause, broken := wait(&m.p.units[i], attempts+u.Refusals, after)
	if broken != nil {
		m.broken(i, broken)
		if op == OpUndo {
			m.undoGaveUp(i)
		} else {
			m.gaveUp(i)
		}
		return
	}
	u.NotBefore = now.Add(max(pause, leastPause))
	if u.Refusals == 1 && !m.quiet {
		m.log = append(m.log, Entry{Step: u.Name, Op: op, Event: EventRefused, Error: u.Error})
	}
}

// interrupted says that an attempt was cut short by its runner. It counts as no
// attempt, and may have taken effect unless err says that it was refused.
func (m *machine) interrupted(i int, err error, now time.Time) {
	u, w := &m.units[i], &m.work[i]
	w.busy = false
	if u.Status == StepUndoing {
		u.Undos--
		return
	}
	u.Attempts--
	if !m.p.units[i].noDoubt && !behavior.IsRefused(err) {
		u.InDoubt, w.ended = true, now
	}
}

func (m *machine) failed(u *StepState, err error) {
	m.failures++
	m.lastError = text(err.Error())
	u.Error = m.lastError
}

// spent reports whether there were as many attempts as there may be.
func spent(limit, attempts int) bool { return limit >= 0 && attempts >= limit }

// cancel says that somebody wants the saga to turn back, and reports whether
// that is new to it.
func (m *machine) cancel(note string) bool {
	if m.canceled || m.status.Ended() {
		return false
	}
	m.canceled = true
	if m.past() {
		note = "too late, the pivot is done: " + note
	}
	m.note(Entry{Event: EventCanceled, Error: note})
	return true
}

// takeOver says that the owner before did not give the saga up: whatever it had
// started may have taken effect. What commits with the log has not.
func (m *machine) takeOver(previous string) {
	m.doubt()
	m.note(Entry{Event: EventTakenOver, Error: "from " + previous})
}

// doubt puts in doubt what was started.
func (m *machine) doubt() {
	for i := range m.units {
		if m.units[i].Status == StepStarted && !m.p.units[i].noDoubt {
			m.units[i].InDoubt = true
		}
	}
}

// ready returns a unit at or after i whose next attempt may begin, or -1.
func (m *machine) ready(i int, now time.Time) int {
	for ; i < len(m.units); i++ {
		if m.waits(i, now) && !now.Before(m.units[i].NotBefore) {
			return i
		}
	}
	return -1
}

// waits reports whether a unit's next attempt is only a matter of time. A saga
// that is to turn back begins no Do, but for a pivot whose answer it must know.
func (m *machine) waits(i int, now time.Time) bool {
	if m.work[i].busy {
		return false
	}
	switch m.units[i].Status {
	case StepUndoing:
		return true
	case StepStarted:
		return m.mustKnow(i) || !m.turning(now)
	}
	return false
}

// wake returns when the next attempt may begin, or the deadline passes before
// it, and whether there is an attempt to wait for.
func (m *machine) wake(now time.Time) (at time.Time, ok bool) {
	for i := range m.units {
		if m.waits(i, now) {
			if t := m.units[i].NotBefore; !ok || t.Before(at) {
				at, ok = t, true
			}
		}
	}
	if d, is := m.deadline(now); ok && is && d.Before(at) {
		at = d
	}
	return at, ok
}

// alarm returns when time alone will change something.
func (m *machine) alarm(now time.Time) (at time.Time, ok bool) {
	at, ok = m.wake(now)
	if d, is := m.deadline(now); is && !ok {
		at, ok = d, true
	}
	return at, ok
}

// deadline returns when the saga is to turn back, if it can and is not to yet.
func (m *machine) deadline(now time.Time) (at time.Time, ok bool) {
	if m.completeBy.IsZero() || m.status != Running || m.past() || m.turning(now) {
		return time.Time{}, false
	}
	return m.completeBy, true
}

// busy returns how many attempts are running.
func (m *machine) busy() int {
	n := 0
	for i := range m.work {
		if m.work[i].busy {
			n++
		}
	}
	return n
}

// forsake says that nobody will learn how the attempts end that are running.
func (m *machine) forsake() {
	for i := range m.work {
		if m.work[i].busy && m.units[i].Status == StepStarted && !m.p.units[i].noDoubt {
			m.units[i].InDoubt = true
		}
	}
}

// failure returns why the saga did not complete, or nil if it did.
func (m *machine) failure(id string) error {
	if m.status == Completed {
		return nil
	}
	e := &Error{Name: m.p.name, ID: id, Status: m.status, Step: m.step, Err: m.cause, Undone: m.undone}
	for i := range m.units {
		switch u := &m.units[i]; {
		case u.Status == StepUndoFailed:
			e.Failed = append(e.Failed, Failure{u.Name, OpUndo, m.errorOf(i)})
		case m.status == Stuck && !m.back && u.Status == StepFailed:
			e.Failed = append(e.Failed, Failure{u.Name, OpDo, m.errorOf(i)})
		}
	}
	return e
}
