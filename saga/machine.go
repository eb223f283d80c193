package saga

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"
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
	work      []work // of this owner; nothing of it is recorded
	low       int    // the nodes below are complete
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
	InDoubt   bool       `json:"d,omitempty"` // an attempt of Do may have taken effect
	Error     string     `json:"e,omitempty"` // of the latest failure
	NotBefore time.Time  `json:"t,omitzero"`  // when its next attempt may begin
	Step      string     `json:"-"`           // the step that it is, or is an alternative of
}

// progress is what a Record's Steps holds.
type progress struct {
	Back     bool        `json:"back,omitempty"`
	Canceled bool        `json:"canceled,omitempty"`
	Step     string      `json:"step,omitempty"`
	Cause    string      `json:"cause,omitempty"`
	Steps    []StepState `json:"steps"`
}

func newMachine(p *plan) *machine {
	m := &machine{p: p, status: Running, units: make([]StepState, len(p.units)), work: make([]work, len(p.units))}
	for i := range m.units {
		m.units[i] = StepState{Name: p.units[i].name, Status: StepIdle, Step: p.nodes[p.units[i].node].name}
	}
	return m
}

// loadMachine takes a saga up where its record has it.
func loadMachine(p *plan, rec *Record) (*machine, error) {
	m := newMachine(p)
	var pr progress
	if err := json.Unmarshal(rec.Steps, &pr); err != nil {
		return m, fmt.Errorf("saga: the record's steps cannot be read: %w", err)
	}
	m.status, m.back, m.canceled, m.step = rec.Status, pr.Back, pr.Canceled, pr.Step
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
	return m, nil
}

func (m *machine) progress() progress {
	pr := progress{Back: m.back, Canceled: m.canceled, Step: m.step, Steps: m.units}
	if m.cause != nil {
		pr.Cause = text(m.cause.Error())
	}
	return pr
}

// recordedError is an error of which the record keeps the text, and the
// sentinel where there is one.
func recordedError(text string) error {
	for _, known := range []error{ErrCanceled, ErrDeadline} {
		if text == known.Error() {
			return known
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
	m.changed = true
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
		u.InDoubt, u.Error = false, ""
		m.failures, m.takeovers = 0, 0
		m.set(i, StepDone)
		m.note(Entry{Step: u.Name, Op: OpDo, Event: EventDone, Attempt: u.Attempts})
		return
	}
	final, noEffect := isFinal(err)
	if !noEffect && !d.doTx {
		u.InDoubt, w.ended = true, now
	}
	w.final = final
	m.failed(u, err)
	if !final && (m.unlimited(i) || !m.exhausted(d.attempts, u.Attempts)) && (!m.turning(now) || m.mustKnow(i)) {
		u.NotBefore = now.Add(wait(d, u.Attempts, err))
		return
	}
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
		m.undone = append(m.undone, u.Name)
		m.set(i, StepUndone)
		m.note(Entry{Step: u.Name, Op: OpUndo, Event: EventUndone, Attempt: u.Undos})
		return
	}
	m.failed(u, err)
	if final, _ := isFinal(err); !final && !m.exhausted(d.undoAttempts, u.Undos) {
		u.NotBefore = now.Add(wait(d, u.Undos, err))
		return
	}
	m.set(i, StepUndoFailed)
	m.note(Entry{Step: u.Name, Op: OpUndo, Event: EventUndoFailed, Attempt: u.Undos, Error: u.Error})
}

// interrupted says that an attempt was cut short by its runner, which counts as
// no attempt, and may have taken effect.
func (m *machine) interrupted(i int, now time.Time) {
	u, w := &m.units[i], &m.work[i]
	w.busy = false
	if u.Status == StepUndoing {
		u.Undos--
		return
	}
	u.Attempts--
	if !m.p.units[i].doTx {
		u.InDoubt, w.ended = true, now
	}
}

func (m *machine) failed(u *StepState, err error) {
	m.failures++
	m.lastError = text(err.Error())
	u.Error = m.lastError
}

func (m *machine) exhausted(limit, attempts int) bool { return limit >= 0 && attempts >= limit }

// cancel says that somebody wants the saga to turn back.
func (m *machine) cancel(note string) {
	if m.canceled || m.status.Ended() {
		return
	}
	m.canceled = true
	m.note(Entry{Event: EventCanceled, Error: note})
}

// takeOver says that the owner before did not give the saga up: whatever it had
// started may have taken effect. What commits with the log has not.
func (m *machine) takeOver(previous string) {
	for i := range m.units {
		if m.units[i].Status == StepStarted && !m.p.units[i].doTx {
			m.units[i].InDoubt = true
		}
	}
	m.note(Entry{Event: EventTakenOver, Error: "from " + previous})
}

// past reports whether the pivot is done: there is no way back.
func (m *machine) past() bool {
	if m.p.pivot < 0 || m.back {
		return false
	}
	at, _ := m.node(m.p.pivot)
	return at == nodeComplete
}

// unlimited reports whether a unit is to be tried until it works.
func (m *machine) unlimited(i int) bool {
	return m.p.units[i].last && m.past()
}

// mustKnow reports whether a unit is the pivot, may have taken effect and has
// no Undo: before its answer is known the saga can turn nowhere.
func (m *machine) mustKnow(i int) bool {
	d := &m.p.units[i]
	return d.node == m.p.pivot && !d.hasUndo && (m.units[i].InDoubt || m.work[i].busy)
}

// turning reports whether a saga that goes forward is to turn back.
func (m *machine) turning(now time.Time) bool {
	if m.back || m.past() {
		return false
	}
	if m.wish == nil {
		m.wishStep, m.wish = m.reason(now)
	}
	return m.wish != nil
}

// wishBack asks a saga to turn back for a reason of the caller's.
func (m *machine) wishBack(step string, why error) {
	if m.wish == nil {
		m.wishStep, m.wish = step, why
	}
}

// reason returns why a saga that goes forward would have to turn back, and at
// which step.
func (m *machine) reason(now time.Time) (step string, why error) {
	if m.canceled {
		return "", ErrCanceled
	}
	for k := m.low; k < len(m.p.nodes); k++ {
		at, i := m.node(k)
		if at == nodeExhausted {
			return m.units[i].Name, m.errorOf(i)
		}
		if at == nodeIdle && m.p.chain {
			break
		}
	}
	if !m.completeBy.IsZero() && !now.Before(m.completeBy) {
		return "", ErrDeadline
	}
	return "", nil
}

func (m *machine) errorOf(i int) error {
	if m.work[i].err != nil {
		return m.work[i].err
	}
	return recordedError(m.units[i].Error)
}

// Where a node is that is to be done.
type nodeAt int

const (
	nodeIdle      nodeAt = iota // not begun
	nodeAtWork                  // started or undoing
	nodeComplete                // done or skipped
	nodeNext                    // the alternative is to be started
	nodeRetreat                 // the alternative is to be undone before the next
	nodeExhausted               // the last alternative has failed
	nodeBlocked                 // an alternative cannot be undone
)

// node returns where a node is, and the unit that this is about.
func (m *machine) node(k int) (nodeAt, int) {
	n := &m.p.nodes[k]
	for i := n.first; i < n.first+n.n; i++ {
		switch m.units[i].Status {
		case StepDone, StepSkipped:
			return nodeComplete, i
		case StepStarted, StepUndoing:
			return nodeAtWork, i
		case StepUndoFailed:
			return nodeBlocked, i
		case StepFailed:
			if m.p.units[i].last {
				return nodeExhausted, i
			}
			return nodeRetreat, i
		case StepIdle:
			if i == n.first {
				return nodeIdle, i
			}
			return nodeNext, i
		}
	}
	return nodeExhausted, n.first + n.n - 1
}

// advance draws the conclusions from what has happened: what is ready is marked
// as started or undoing, and the saga turns back or ends.
func (m *machine) advance(now time.Time) {
	if m.status == Running {
		m.goOn(now)
	}
	if m.status == Compensating {
		m.goBack()
	}
}

func (m *machine) goOn(now time.Time) {
	for m.low < len(m.p.nodes) {
		if at, _ := m.node(m.low); at != nodeComplete {
			break
		}
		m.low++
	}
	if m.low == len(m.p.nodes) {
		m.status = Completed
		m.note(Entry{Event: EventCompleted})
		return
	}
	if m.turning(now) {
		m.turn()
		return
	}
	past := m.past()
	working := false
	for k := m.low; k < len(m.p.nodes); k++ {
		switch at, i := m.node(k); at {
		case nodeIdle:
			if m.allComplete(m.p.nodes[k].after) {
				m.set(i, StepStarted)
				working = true
			} else if m.p.chain {
				k = len(m.p.nodes) // nor can what follows
			}
		case nodeNext:
			m.set(i, StepStarted)
			working = true
		case nodeRetreat:
			m.undo(i)
			working = true
		case nodeExhausted:
			// It failed while the pivot was under way, which then succeeded.
			if past && !m.work[i].final {
				m.set(i, StepStarted)
				working = true
			}
		case nodeAtWork:
			working = true
		}
	}
	if !working {
		m.stuckAtBlocked()
	}
}

func (m *machine) allComplete(nodes []int) bool {
	for _, k := range nodes {
		if at, _ := m.node(k); at != nodeComplete {
			return false
		}
	}
	return true
}

// turn turns the saga back as soon as no Do is running any more.
func (m *machine) turn() {
	for i := range m.units {
		if m.work[i].busy && m.units[i].Status == StepStarted {
			return
		}
	}
	for i := range m.units {
		if m.mustKnow(i) {
			switch m.units[i].Status {
			case StepStarted:
				return
			case StepFailed:
				m.stick(m.units[i].Name, fmt.Errorf("saga: the pivot may have taken effect and has no Undo: %w", m.errorOf(i)))
				return
			}
		}
	}
	m.step, m.cause = m.wishStep, m.wish
	m.turnBack(m.step, m.cause.Error())
}

func (m *machine) turnBack(step, why string) {
	m.status, m.back = Compensating, true
	m.note(Entry{Step: step, Event: EventCompensating, Error: why})
}

func (m *machine) goBack() {
	working, left := false, false
	for k := range m.p.nodes {
		i := m.toUndo(k)
		if i < 0 {
			continue
		}
		left = true
		switch u := &m.units[i]; {
		case u.Status == StepUndoing:
			working = true
		case u.Status == StepUndoFailed || !m.allUndone(m.p.nodes[k].undoAfter):
		case !m.p.units[i].hasUndo:
			u.Error = "saga: it has no Undo"
			m.set(i, StepUndoFailed)
			m.note(Entry{Step: u.Name, Op: OpUndo, Event: EventUndoFailed, Error: u.Error})
		default:
			m.undo(i)
			working = true
		}
	}
	switch {
	case !left:
		m.status = Compensated
		m.note(Entry{Event: EventCompensated})
	case !working:
		m.stuckAtBlocked()
	}
}

// toUndo returns the unit of a node that is still to be undone, or -1. A unit
// that was marked as started and has certainly taken no effect needs nothing.
func (m *machine) toUndo(k int) int {
	n := &m.p.nodes[k]
	for i := n.first; i < n.first+n.n; i++ {
		switch u := &m.units[i]; u.Status {
		case StepStarted:
			if u.InDoubt {
				return i
			}
			m.set(i, StepNoEffect)
		case StepDone, StepFailed, StepUndoing, StepUndoFailed:
			return i
		}
	}
	return -1
}

func (m *machine) allUndone(nodes []int) bool {
	for _, k := range nodes {
		if m.toUndo(k) >= 0 {
			return false
		}
	}
	return true
}

// undo marks a unit for its Undo, which waits for what may still arrive.
func (m *machine) undo(i int) {
	u := &m.units[i]
	if settle := m.p.units[i].settle; u.Status != StepDone {
		u.NotBefore = time.Time{}
		if u.InDoubt && settle > 0 {
			u.NotBefore = m.work[i].ended.Add(settle)
		}
	}
	m.set(i, StepUndoing)
}

func (m *machine) stuckAtBlocked() {
	for i := range m.units {
		if s := m.units[i].Status; s == StepUndoFailed || s == StepFailed || s == StepNoEffect && m.p.units[i].last && !m.back {
			m.stick(m.units[i].Name, m.errorOf(i))
			return
		}
	}
	m.stick("", errors.New("saga: nothing can go on"))
}

// stick stops the saga until a person helps.
func (m *machine) stick(step string, why error) {
	m.status = Stuck
	if m.cause == nil {
		m.step, m.cause = step, why
	}
	m.lastError = text(why.Error())
	m.note(Entry{Step: step, Event: EventStuck, Error: m.lastError})
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
