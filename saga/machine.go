package saga

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/go-resilience/resilience/internal/behavior"
)

// A machine is the state of one saga and the rules by which it changes. It does no work,
// reads no clock and writes nothing. It is told what happened, and says which attempts
// may begin, what to log and what the saga's status is. The start of a step or of its
// undoing must be recorded before the attempt begins.
type machine struct {
	p     *plan
	quiet bool // keep no log, since nothing is recorded

	status     Status
	back       bool // the saga has turned back for good
	step       string
	cause      error // why the saga has turned back or is stuck, at step
	wishStep   string
	wish       error // why the saga is to turn back, at wishStep; the first reason counts
	canceled   bool
	completeBy time.Time
	carried    string // of RunnerConfig.Inject
	created    time.Time
	signals    map[string][]byte // by name; nil if they are not known

	units     []StepState
	records   []stepRecord // scratch space of encode
	work      []work       // of this owner; not recorded
	low       int          // the nodes below are complete
	since     time.Time    // of the last progress; zero before any
	reported  time.Time    // when OnStalled was last called
	moved     bool         // since is to be set
	failures  int
	takeovers int
	lastError string
	undone    []string

	log      []Entry // since the last commit
	changed  bool    // there is something to commit
	pressing bool    // before another attempt begins
}

// work is the part of a unit's state that only this process knows.
type work struct {
	busy  bool      // an attempt is running
	due   time.Time // when its ctx ends
	final bool      // its error said not to try again
	ended time.Time // when the last attempt that is in doubt ended
	err   error     // of the last attempt
}

func newMachine(p *plan) *machine {
	return &machine{p: p, status: Running, units: slices.Clone(p.idle), work: make([]work, len(p.units))}
}

func (m *machine) clone() *machine {
	c := *m
	c.units, c.work, c.records = slices.Clone(m.units), slices.Clone(m.work), nil
	c.log, c.undone = slices.Clone(m.log), slices.Clone(m.undone)
	return &c
}

func (m *machine) note(e Entry) {
	m.changed, m.pressing = true, true
	if !m.quiet {
		e.Error = text(e.Error)
		m.log = append(m.log, e)
	}
}

func (m *machine) set(i int, s StepStatus) {
	m.units[i].Status = s
	m.changed, m.pressing, m.moved = true, true, true
}

// stalled returns when the saga is to be reported as stalled: after it has made no
// progress for that long, and again each time that this time has doubled. ok is false
// unless an attempt has failed, was refused, or runs although its time is over.
func (m *machine) stalled(after time.Duration) (at time.Time, ok bool) {
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

// begin begins an attempt of a unit that was ready, and returns its op and number.
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

// did takes in the result of an attempt of Do.
func (m *machine) did(i int, err error, now time.Time) {
	u, w, d := &m.units[i], &m.work[i], &m.p.units[i]
	w.busy, w.err = false, err
	if err == nil {
		u.NotBefore = time.Time{}
		if u.InDoubt && d.settle > 0 {
			u.NotBefore = w.ended.Add(d.settle) // an earlier attempt may still arrive
		}
		u.InDoubt, u.Error, u.Refusals, u.WaitingSince = false, "", 0, time.Time{}
		m.failures, m.takeovers = 0, 0
		pressing := m.pressing
		m.set(i, StepDone)
		m.note(Entry{Step: u.Name, Op: OpDo, Kind: EventDone, Attempt: u.Attempts})
		m.pressing = pressing || !d.light
		return
	}
	end := behavior.Read(err)
	if end.Kind == behavior.Refused {
		u.Attempts--
		m.refused(i, OpDo, u.Attempts, err, end.RetryAfter, now)
		return
	}
	u.Refusals = 0
	switch known := knownOf(err); {
	case errors.Is(err, errTxEnded), known == inDoubt && !d.noDoubt:
		u.InDoubt, w.ended = true, now
	case known == void:
		u.InDoubt = false // the earlier attempts are settled, too
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

// broken ends the attempts of a unit whose Backoff has panicked.
func (m *machine) broken(i int, err error) {
	u, w := &m.units[i], &m.work[i]
	w.final, w.err = true, fmt.Errorf("%w: %w", err, w.err)
	m.lastError = text(w.err.Error())
	u.Error = m.lastError
}

// gaveUp ends the attempts of a Do.
func (m *machine) gaveUp(i int) {
	u := &m.units[i]
	u.NotBefore, u.WaitingSince = time.Time{}, time.Time{}
	if u.InDoubt {
		m.set(i, StepFailed)
		m.note(Entry{Step: u.Name, Op: OpDo, Kind: EventFailed, Attempt: u.Attempts, Error: u.Error})
	} else {
		m.set(i, StepNoEffect)
		m.note(Entry{Step: u.Name, Op: OpDo, Kind: EventNoEffect, Attempt: u.Attempts, Error: u.Error})
	}
}

// undid takes in the result of an attempt of Undo.
func (m *machine) undid(i int, err error, now time.Time) {
	u, w, d := &m.units[i], &m.work[i], &m.p.units[i]
	w.busy, w.err = false, err
	u.NotBefore = time.Time{}
	if err == nil {
		m.failures, m.takeovers = 0, 0
		u.Refusals, u.WaitingSince = 0, time.Time{}
		m.undone = append(m.undone, u.Name)
		m.set(i, StepUndone)
		m.note(Entry{Step: u.Name, Op: OpUndo, Kind: EventUndone, Attempt: u.Undos})
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

// undoGaveUp ends the attempts of an Undo.
func (m *machine) undoGaveUp(i int) {
	u := &m.units[i]
	m.set(i, StepUndoFailed)
	m.note(Entry{Step: u.Name, Op: OpUndo, Kind: EventUndoFailed, Attempt: u.Undos, Error: u.Error})
}

// refused takes in that a policy refused an attempt. It counts as no attempt and leaves
// nothing in doubt. The first of several refusals in a row is logged, together with the
// next entry that is recorded.
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
		m.log = append(m.log, Entry{Step: u.Name, Op: op, Kind: EventRefused, Error: u.Error})
	}
}

// interrupted takes in that the runner cut an attempt short. It counts as no attempt. It
// may have taken effect, unless err says that it was refused.
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

// spent reports whether no attempt is left.
func spent(limit, attempts int) bool { return limit >= 0 && attempts >= limit }

// cancel asks the saga to turn back, and reports whether that is news.
func (m *machine) cancel(note string) bool {
	if m.canceled || m.status.Ended() {
		return false
	}
	m.canceled = true
	if m.past() {
		note = "too late, the pivot is done: " + note
	}
	m.note(Entry{Kind: EventCanceled, Error: note})
	return true
}

// takeOver takes in that the owner before did not give the saga up: the steps that it had
// started may have taken effect, except for a DoTx.
func (m *machine) takeOver(previous string) {
	m.doubt()
	m.note(Entry{Kind: EventTakenOver, Error: "from " + previous})
}

// doubt puts the started steps in doubt.
func (m *machine) doubt() {
	for i := range m.units {
		if m.units[i].Status == StepStarted && !m.p.units[i].noDoubt {
			m.units[i].InDoubt = true
		}
	}
}

// ready returns the first unit, at i or after it, whose next attempt may begin, or -1.
func (m *machine) ready(i int, now time.Time) int {
	for ; i < len(m.units); i++ {
		if m.waits(i, now) && !now.Before(m.units[i].NotBefore) {
			return i
		}
	}
	return -1
}

// waits reports whether a unit's next attempt only waits for its time. A saga that is to
// turn back begins no Do, except for a pivot whose answer it must know.
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

// wake returns when the next attempt may begin, the wait of a unit ends, or the deadline
// if that is sooner. ok is false if no unit waits for a time.
func (m *machine) wake(now time.Time) (at time.Time, ok bool) {
	for i := range m.units {
		t := m.units[i].NotBefore
		if m.units[i].Status == StepWaiting {
			if t.IsZero() || m.turning(now) {
				continue // it waits for a signal however long, or goes on no more
			}
		} else if !m.waits(i, now) || m.pending(i) {
			continue
		}
		if !ok || t.Before(at) {
			at, ok = t, true
		}
	}
	if d, is := m.deadline(now); is && (ok && d.Before(at) || !ok && m.outside(now)) {
		at, ok = d, true
	}
	return at, ok
}

// park reports whether a saga of which no attempt is running is to be written back, because
// none can begin within longest, and when it is due again. If it waits for something outside
// it is looked at again before, but not within least.
func (m *machine) park(now time.Time, longest, least time.Duration) (park bool, wakeIn time.Duration) {
	if m.ready(0, now) >= 0 {
		return false, 0 // also if this is a look at children
	}
	at, timed := m.wake(now)
	if timed {
		wakeIn = max(at.Sub(now), 0)
	}
	park = wakeIn > longest
	if m.outside(now) {
		park = park || !timed
		if w := m.wakeOutside(now, least); !timed || w < wakeIn {
			wakeIn = w
		}
	}
	return park, wakeIn
}

// alarm returns when something changes by the passing of time alone, or is to be looked at
// again.
func (m *machine) alarm(now time.Time) (at time.Time, ok bool) {
	at, ok = m.wake(now)
	for i := range m.units {
		if t := m.units[i].NotBefore; m.pending(i) && m.waits(i, now) && (!ok || t.Before(at)) {
			at, ok = t, true
		}
	}
	if d, is := m.deadline(now); is && !ok {
		at, ok = d, true
	}
	return at, ok
}

// deadline returns when the saga turns back for lack of time. ok is false if it does not.
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

// forsake puts in doubt the steps whose attempts are running: their results will be
// dropped.
func (m *machine) forsake() {
	for i := range m.work {
		if m.work[i].busy && m.units[i].Status == StepStarted && !m.p.units[i].noDoubt {
			m.units[i].InDoubt = true
		}
	}
}

// failure returns the error of a saga that did not complete, or nil.
func (m *machine) failure(id string) error {
	if m.status == Completed {
		return nil
	}
	e := &Error{Saga: m.p.name, ID: id, Status: m.status, Step: m.step, Err: m.cause, Undone: m.undone}
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
