// Package machine has the rules by which a saga changes. It does no work, reads no clock, takes
// no lock and writes nothing.
package machine

import (
	"cmp"
	"math/rand/v2"
	"slices"
	"time"

	store "github.com/go-resilience/resilience/internal/sagastore"
	"github.com/go-resilience/resilience/saga/internal/plan"
)

// A Machine is the state of one saga. It is told what happened, and says which attempts may
// begin, what to log and what the saga's status is. The start of a step or of its undoing must
// be recorded before the attempt begins.
type Machine struct {
	plan  *plan.Plan
	Quiet bool // keep no log, since nothing is recorded

	Status     store.Status
	Back       bool // the saga has turned back for good
	Step       string
	Cause      error // why the saga has turned back or is stuck, at step
	answered   bool  // cause is the answer of a participant
	wishStep   string
	Wish       error // why the saga is to turn back, at wishStep; the first reason counts
	Canceled   bool
	CompleteBy time.Time
	Carried    string // of RunnerConfig.Inject
	created    time.Time
	Signals    map[string][]byte // by name; nil if they are not known

	Units     []state
	work      []work    // of this owner; not recorded
	at        int       // the first group that is not complete
	since     time.Time // of the last progress; zero before any
	moved     bool      // since is to be set
	failures  int
	takeovers int
	lastError string

	Log     []store.Entry // since the last commit
	Changed bool          // there is something to commit, before another attempt begins
}

// work is the part of a unit's state that only this process knows.
type work struct {
	busy bool  // an attempt is running
	err  error // of the last attempt
}

func New(p *plan.Plan) *Machine {
	m := &Machine{plan: p, Status: store.Running, Units: make([]state, len(p.Units)), work: make([]work, len(p.Units))}
	for i := range p.Units {
		m.Units[i] = state{Name: p.Units[i].Name, Status: StepIdle}
	}
	return m
}

func (m *Machine) Clone() *Machine {
	c := *m
	c.Units, c.work = slices.Clone(m.Units), slices.Clone(m.work)
	return &c
}

// Going reports whether the saga goes forward or back.
func (m *Machine) Going() bool { return m.Status == store.Running || m.Status == store.Compensating }

// Note logs an entry, which is to be recorded before another attempt begins.
func (m *Machine) Note(e store.Entry) {
	m.Changed = true
	if !m.Quiet {
		e.Error = Text(e.Error)
		m.Log = append(m.Log, e)
	}
}

// set gives a unit a status. What it waited for before is over.
func (m *Machine) set(i int, s StepStatus) {
	u := &m.Units[i]
	u.Status, u.NotBefore, u.WaitingSince, u.Refusals = s, time.Time{}, time.Time{}, 0
	m.Changed, m.moved = true, true
}

// Begin begins an attempt of a unit that was ready, and returns its op and number.
func (m *Machine) Begin(i int) (op store.Op, attempt int) {
	m.work[i].busy = true
	u := &m.Units[i]
	if u.Status == StepUndoing {
		u.Undos++
		return store.OpUndo, u.Undos
	}
	u.Attempts++
	return store.OpDo, u.Attempts
}

// An End is how an attempt has ended. The zero end is success.
type End struct {
	Err        error
	Effect     Effect // of a Do, unless it was refused
	Refused    bool   // a policy did not make the call
	Final      bool   // it is not tried again
	RetryAfter time.Duration
}

// An Effect is what the error of a Do says of its effect.
type Effect int

const (
	InDoubt Effect = iota // the attempt may have taken effect
	Failed                // it has taken none
	Void                  // no attempt has, or ever will
)

// Did takes in the end of an attempt of Do.
func (m *Machine) Did(i int, e End, now time.Time) {
	u, w, d := &m.Units[i], &m.work[i], &m.plan.Units[i]
	w.busy, w.err = false, e.Err
	if e.Err == nil {
		m.failures, m.takeovers = 0, 0
		m.set(i, StepDone)
		u.InDoubt, u.Error = false, ""
		m.Note(store.Entry{Step: u.Name, Op: store.OpDo, Kind: EventDone, Attempt: u.Attempts})
		return
	}
	if e.Refused {
		u.Attempts--
		m.refused(i, store.OpDo, u.Attempts, e, now)
		return
	}
	u.Refusals = 0
	switch e.Effect {
	case InDoubt:
		u.InDoubt = true
	case Void:
		u.InDoubt = false // the earlier attempts have taken none, either
	}
	m.failed(u, e.Err)
	if !e.Final && (m.unlimited(i) || !spent(d.Attempts, u.Attempts)) {
		step, why := m.reason(now)
		if why != nil {
			m.WishBack(step, why)
		}
		if why == nil || m.mustKnow(i) {
			u.NotBefore = now.Add(pauseAfter(d, u.Attempts, e.RetryAfter))
			return
		}
	}
	m.gaveUp(i)
}

// gaveUp ends the attempts of a Do.
func (m *Machine) gaveUp(i int) {
	u, is, kind := &m.Units[i], StepNoEffect, EventNoEffect
	if u.InDoubt {
		is, kind = StepFailed, EventFailed
	}
	m.set(i, is)
	m.Note(store.Entry{Step: u.Name, Op: store.OpDo, Kind: kind, Attempt: u.Attempts, Error: u.Error})
}

// Undid takes in the end of an attempt of Undo.
func (m *Machine) Undid(i int, e End, now time.Time) {
	u, w, d := &m.Units[i], &m.work[i], &m.plan.Units[i]
	w.busy, w.err = false, e.Err
	if e.Err == nil {
		m.failures, m.takeovers = 0, 0
		m.set(i, StepUndone)
		m.Note(store.Entry{Step: u.Name, Op: store.OpUndo, Kind: EventUndone, Attempt: u.Undos})
		return
	}
	if e.Refused {
		u.Undos--
		m.refused(i, store.OpUndo, u.Undos, e, now)
		return
	}
	u.Refusals = 0
	m.failed(u, e.Err)
	if !e.Final && !spent(d.UndoAttempts, u.Undos) {
		u.NotBefore = now.Add(pauseAfter(d, u.Undos, e.RetryAfter))
		return
	}
	m.undoGaveUp(i)
}

// undoGaveUp ends the attempts of an Undo.
func (m *Machine) undoGaveUp(i int) {
	u := &m.Units[i]
	m.set(i, StepUndoFailed)
	m.Note(store.Entry{Step: u.Name, Op: store.OpUndo, Kind: EventUndoFailed, Attempt: u.Undos, Error: u.Error})
}

// refused takes in that a policy refused an attempt. It counts as no attempt and leaves
// nothing in doubt. The first of several refusals in a row is logged, together with the
// next entry that is recorded.
func (m *Machine) refused(i int, op store.Op, attempts int, e End, now time.Time) {
	u := &m.Units[i]
	u.Refusals++
	m.lastError = Text(e.Err.Error())
	u.Error = m.lastError
	u.NotBefore = now.Add(max(pauseAfter(&m.plan.Units[i], attempts+u.Refusals, e.RetryAfter), leastPause))
	if u.Refusals == 1 && !m.Quiet {
		m.Log = append(m.Log, store.Entry{Step: u.Name, Op: op, Kind: EventRefused, Error: u.Error})
	}
}

// Interrupted takes in that the runner cut an attempt short. It counts as no attempt. It
// may have taken effect, unless it was refused.
func (m *Machine) Interrupted(i int, e End) {
	u := &m.Units[i]
	m.work[i].busy = false
	if u.Status == StepUndoing {
		u.Undos--
		return
	}
	u.Attempts--
	if !m.plan.Units[i].NoDoubt && !e.Refused {
		u.InDoubt = true
	}
}

// Failing returns after how many attempts and refusals a unit still fails. It is 0 if the unit does
// not, or is not tried again.
func (m *Machine) Failing(i int) int {
	switch u := &m.Units[i]; {
	case u.Error == "":
	case u.Status == StepStarted:
		return u.Attempts + u.Refusals
	case u.Status == StepUndoing:
		return u.Undos + u.Refusals
	}
	return 0
}

func (m *Machine) failed(u *state, err error) {
	m.failures++
	m.lastError = Text(err.Error())
	u.Error = m.lastError
}

// spent reports whether no attempt is left.
func spent(limit, attempts int) bool { return limit >= 0 && attempts >= limit }

// Cancel asks the saga to turn back, and reports whether that is news.
func (m *Machine) Cancel(note string) bool {
	if m.Canceled || m.Status.Ended() {
		return false
	}
	m.Canceled = true
	if m.Past() {
		note = "too late, the pivot is done: " + note
	}
	m.Note(store.Entry{Kind: EventCanceled, Error: note})
	return true
}

// TakeOver takes in that the owner before did not give the saga up: the steps that it had
// started may have taken effect, except for a DoTx.
func (m *Machine) TakeOver(previous string) {
	m.Doubt()
	m.Note(store.Entry{Kind: EventTakenOver, Error: "from " + previous})
}

// Doubt puts the started steps in doubt.
func (m *Machine) Doubt() {
	for i := range m.Units {
		if m.Units[i].Status == StepStarted && !m.plan.Units[i].NoDoubt {
			m.Units[i].InDoubt = true
		}
	}
}

// Ready returns the first unit, at i or after it, whose next attempt may begin, or -1.
func (m *Machine) Ready(i int, now time.Time) int {
	for ; i < len(m.Units); i++ {
		if m.Waits(i, now) && !now.Before(m.Units[i].NotBefore) {
			return i
		}
	}
	return -1
}

// Waits reports whether a unit's next attempt only waits for its time. A saga that is to
// turn back begins no Do, except for a pivot whose answer it must know.
func (m *Machine) Waits(i int, now time.Time) bool {
	if m.work[i].busy {
		return false
	}
	switch m.Units[i].Status {
	case StepUndoing:
		return true
	case StepStarted:
		return m.mustKnow(i) || !m.turning(now)
	}
	return false
}

// Wake returns when the next attempt may begin, the wait of a unit ends, or the deadline
// if that is sooner. ok is false if no unit waits for a time.
func (m *Machine) Wake(now time.Time) (at time.Time, ok bool) { return m.next(now, false) }

// Alarm is like Wake, and counts the time at which children are looked at again, and the
// deadline while all attempts are running.
func (m *Machine) Alarm(now time.Time) (at time.Time, ok bool) { return m.next(now, true) }

func (m *Machine) next(now time.Time, children bool) (at time.Time, ok bool) {
	for i := range m.Units {
		t := m.Units[i].NotBefore
		if m.Units[i].Status == StepWaiting {
			if t.IsZero() || m.turning(now) {
				continue // it waits for a signal however long, or goes on no more
			}
		} else if !m.Waits(i, now) || m.Pending(i) && !children {
			continue
		}
		if !ok || t.Before(at) {
			at, ok = t, true
		}
	}
	if d, is := m.Deadline(now); is && (ok && d.Before(at) || !ok && (children || m.Outside(now))) {
		at, ok = d, true
	}
	return at, ok
}

// Waits says how long a runner lets a saga wait.
type Waits struct {
	Stops   bool          // no attempt begins any more
	Longest time.Duration // in the runner, without an attempt
	Least   time.Duration // before it looks again at what it waits for outside
}

// Release reports whether the saga is to be written back without an owner, and when it is due
// again: since it goes no further, the runner stops, or no attempt can begin within the
// longest wait. If it waits for something outside it is looked at again before it is due, but
// not within least.
func (m *Machine) Release(now time.Time, w Waits) (release bool, wakeIn time.Duration) {
	switch {
	case !m.Going():
		return true, 0
	case m.Busy() > 0:
		return false, 0
	case m.Ready(0, now) >= 0: // also if this is a look at children
		if w.Stops {
			m.Note(store.Entry{Kind: EventReleased})
		}
		return w.Stops, 0
	}
	at, timed := m.Wake(now)
	if timed {
		wakeIn = max(at.Sub(now), 0)
	}
	park := wakeIn > w.Longest
	if m.Outside(now) {
		park = park || !timed
		if again := m.wakeOutside(now, w.Least); !timed || again < wakeIn {
			wakeIn = again
		}
	}
	switch {
	case w.Stops:
		m.Note(store.Entry{Kind: EventReleased})
	case park:
		m.Note(store.Entry{Kind: EventParked, Error: cmp.Or(m.waitsFor(), m.lastError)})
	default:
		return false, 0
	}
	return true, wakeIn
}

// Deadline returns when the saga turns back for lack of time. ok is false if it does not.
func (m *Machine) Deadline(now time.Time) (at time.Time, ok bool) {
	if m.CompleteBy.IsZero() || m.Status != store.Running || m.Past() || m.turning(now) {
		return time.Time{}, false
	}
	return m.CompleteBy, true
}

// Busy returns how many attempts are running.
func (m *Machine) Busy() int {
	n := 0
	for i := range m.work {
		if m.work[i].busy {
			n++
		}
	}
	return n
}

// Forsake puts in doubt the steps whose attempts are running: their results will be
// dropped.
func (m *Machine) Forsake() {
	for i := range m.work {
		if m.work[i].busy && m.Units[i].Status == StepStarted && !m.plan.Units[i].NoDoubt {
			m.Units[i].InDoubt = true
		}
	}
}

// leastPause is the shortest wait after a refusal. Refusals are not limited in number, and
// the Backoff may return zero.
const leastPause = 10 * time.Millisecond

// longestAsked is the longest RetryAfter that counts, unless the Backoff is longer. A server that
// asks for ten years, in a wrong unit, would keep a saga running for as long, and nobody would be
// told of it.
const longestAsked = time.Hour

// pauseAfter returns how long to wait after a failed attempt whose error has the RetryAfter
// after.
func pauseAfter(u *plan.Unit, attempt int, after time.Duration) time.Duration {
	d := u.Backoff(attempt)
	if after = min(after, longestAsked); after > d {
		// The jitter spreads attempts that were told to wait for the same moment.
		d = after + rand.N(after/10+1)
	}
	return max(d, 0)
}
