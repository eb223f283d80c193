package machine

import (
	"errors"
	"fmt"
	"time"

	"github.com/go-resilience/resilience/internal/behavior"
	store "github.com/go-resilience/resilience/internal/sagastore"
	"github.com/go-resilience/resilience/saga/internal/plan"
)

// Past reports whether the pivot is done, so that the saga no longer turns back.
func (m *Machine) Past() bool { return m.plan.Pivot >= 0 && !m.Back && m.complete(m.plan.Pivot) }

// complete reports whether a step needs nothing more on the way forward.
func (m *Machine) complete(i int) bool {
	s := m.Units[i].Status
	return s == StepDone || s == StepSkipped
}

// unlimited reports whether a step is tried until it works.
func (m *Machine) unlimited(i int) bool { return m.Past() || m.mustKnow(i) }

// Undecided reports whether the answer of the pivot must be known before the saga can
// turn back.
func (m *Machine) Undecided() bool {
	p := m.plan.Pivot
	return p >= 0 && m.mustKnow(p) && m.Units[p].Status == StepStarted
}

// mustKnow reports whether a step is the pivot, has no Undo and may have taken effect.
// The saga cannot turn back before its answer is known.
func (m *Machine) mustKnow(i int) bool {
	return m.Decides(i) && (m.Units[i].InDoubt || m.work[i].busy)
}

// Decides reports whether a step is the pivot and has no Undo.
func (m *Machine) Decides(i int) bool { return i == m.plan.Pivot && !m.plan.Units[i].HasUndo }

// Turning returns why a saga that goes forward is to turn back, or nil.
func (m *Machine) Turning(now time.Time) error {
	_, why := m.reason(now)
	return why
}

func (m *Machine) turning(now time.Time) bool { return m.Turning(now) != nil }

// Useless reports whether the attempt of a step is to end, since the saga is to turn back.
func (m *Machine) Useless(i int, now time.Time) bool {
	return m.work[i].busy && m.Units[i].Status == StepStarted && !m.mustKnow(i) && m.turning(now)
}

// WishBack asks the saga to turn back because of why, unless it is to already.
func (m *Machine) WishBack(step string, why error) {
	if m.Wish == nil {
		m.wishStep, m.Wish = step, why
	}
}

// reason returns why a saga that goes forward must turn back, and at which step. why is
// nil if it need not.
func (m *Machine) reason(now time.Time) (step string, why error) {
	switch {
	case m.Past():
		return "", nil
	case m.Wish != nil:
		return m.wishStep, m.Wish
	case m.Canceled:
		return "", ErrCanceled
	}
	if m.at < len(m.plan.Groups) {
		for i := m.plan.Groups[m.at].First; i < m.plan.Groups[m.at].End; i++ {
			if m.lost(i) {
				return m.Units[i].Name, m.ErrorOf(i)
			}
		}
	}
	if !m.CompleteBy.IsZero() && !now.Before(m.CompleteBy) {
		return m.Late(ErrDeadline)
	}
	return "", nil
}

// lost reports whether a step of a saga that goes forward has failed for good.
func (m *Machine) lost(i int) bool {
	switch m.Units[i].Status {
	case StepFailed, StepNoEffect, StepUndoFailed:
		return true
	}
	return false
}

// Late returns the error of a saga that turns back for lack of time: why, together with
// the latest error of the first step that waits for another attempt, and that step.
func (m *Machine) Late(why error) (step string, _ error) {
	for i := range m.Units {
		if u := &m.Units[i]; u.Status == StepStarted && u.Error != "" {
			return u.Name, fmt.Errorf("%w: %w", why, m.ErrorOf(i))
		}
	}
	return "", why
}

func (m *Machine) ErrorOf(i int) error {
	if m.work[i].err != nil {
		return m.work[i].err
	}
	return Recorded(m.Units[i].Error)
}

// Advance takes the saga as far as the results so far allow: it marks steps that are
// ready as started or undoing, turns the saga back, and ends it.
func (m *Machine) Advance(now time.Time) {
	if m.Status == store.Running {
		m.goOn(now)
	}
	if m.Status == store.Compensating {
		m.goBack()
	}
	if m.moved {
		m.since, m.moved = now, false
	}
}

// goOn takes a saga forward: through the groups that are complete, to the first that is not.
func (m *Machine) goOn(now time.Time) {
	for {
		m.skipComplete()
		if step, why := m.reason(now); why != nil {
			m.WishBack(step, why)
			m.turn()
			return
		}
		if m.at == len(m.plan.Groups) {
			m.Status = store.Completed
			m.Note(store.Entry{Kind: EventCompleted})
			return
		}
		opened := false
		var at tally
		for i := m.plan.Groups[m.at].First; i < m.plan.Groups[m.at].End; i++ {
			if m.Units[i].Status == StepIdle {
				m.start(i, now)
			}
			opened = m.Units[i].Status == StepWaiting && m.open(i, now) || opened
			at.count(m, i)
		}
		if opened {
			continue // it may be done
		}
		if at.over() {
			m.stuckAtBlocked()
		}
		return
	}
}

// skipComplete moves at behind the groups that are complete.
func (m *Machine) skipComplete() {
	for ; m.at < len(m.plan.Groups); m.at++ {
		for i := m.plan.Groups[m.at].First; i < m.plan.Groups[m.at].End; i++ {
			if !m.complete(i) {
				return
			}
		}
	}
}

// A tally is what the steps of a group are at.
type tally struct {
	working bool // some are to start, started or undoing
	waiting bool // some wait for a time, a signal or children
	blocked bool // some have failed for good
}

// count takes in a step.
func (t *tally) count(m *Machine, i int) {
	switch {
	case m.Units[i].Status == StepWaiting || m.Pending(i):
		t.waiting = true
	case m.lost(i):
		t.blocked = true
	case !m.complete(i):
		t.working = true
	}
}

// over reports whether only an operator can help. A step that waits does not delay
// that, since it may wait forever.
func (t *tally) over() bool { return !t.working && (t.blocked || !t.waiting) }

// turn turns the saga back, once no Do is running and the answer of the pivot is known.
func (m *Machine) turn() {
	for i := range m.Units {
		if m.work[i].busy && m.Units[i].Status == StepStarted {
			return
		}
	}
	if p := m.plan.Pivot; p >= 0 && m.mustKnow(p) {
		switch m.Units[p].Status {
		case StepStarted:
			return
		case StepFailed:
			m.Stick(m.Units[p].Name, fmt.Errorf("saga: the pivot may have taken effect and has no Undo: %w", m.ErrorOf(p)))
			return
		}
	}
	m.Step, m.Cause, m.answered = m.wishStep, m.Wish, behavior.IsAnswered(m.Wish)
	m.turnBack(m.Step, m.Cause.Error())
}

// turnBack turns the saga back. What has certainly taken no effect needs no Undo.
func (m *Machine) turnBack(step, why string) {
	m.Status, m.Back, m.moved = store.Compensating, true, true
	m.Note(store.Entry{Step: step, Kind: EventTurnedBack, Error: why})
	for i := range m.Units {
		switch u := &m.Units[i]; u.Status {
		case StepWaiting:
			m.set(i, StepNoEffect)
		case StepStarted:
			if !u.InDoubt {
				m.set(i, StepNoEffect)
			}
		case StepDone, StepFailed:
			if m.plan.Units[i].ReadOnly {
				m.set(i, StepNoEffect)
			}
		}
	}
}

// toUndo reports whether a step of a saga that has turned back is still to be undone.
func (m *Machine) toUndo(i int) bool {
	switch m.Units[i].Status {
	case StepStarted, StepDone, StepFailed, StepUndoing, StepUndoFailed:
		return true
	}
	return false
}

// goBack takes a saga that has turned back further: the last group that is not undone yet.
func (m *Machine) goBack() {
	g := len(m.plan.Groups) - 1
	for ; g >= 0 && !m.anyToUndo(m.plan.Groups[g]); g-- {
	}
	if g < 0 {
		m.Status = store.Compensated
		m.Note(store.Entry{Kind: EventCompensated})
		return
	}
	var at tally
	for i := m.plan.Groups[g].First; i < m.plan.Groups[g].End; i++ {
		if !m.toUndo(i) {
			continue
		}
		u := &m.Units[i]
		switch {
		case u.Status == StepUndoing || u.Status == StepUndoFailed:
		case m.plan.Units[i].HasUndo:
			m.set(i, StepUndoing)
		default:
			u.Error = "saga: it has no Undo"
			m.set(i, StepUndoFailed)
			m.Note(store.Entry{Step: u.Name, Op: store.OpUndo, Kind: EventUndoFailed, Error: u.Error})
		}
		at.count(m, i)
	}
	if at.over() {
		m.stuckAtBlocked()
	}
}

func (m *Machine) anyToUndo(g plan.Group) bool {
	for i := g.First; i < g.End; i++ {
		if m.toUndo(i) {
			return true
		}
	}
	return false
}

func (m *Machine) stuckAtBlocked() {
	for i := range m.Units {
		if s := m.Units[i].Status; s == StepUndoFailed || s == StepFailed || s == StepNoEffect && !m.Back {
			m.Stick(m.Units[i].Name, m.ErrorOf(i))
			return
		}
	}
	m.Stick("", errors.New("saga: nothing can go on"))
}

// Stick makes the saga stuck.
func (m *Machine) Stick(step string, why error) {
	m.Status = store.Stuck
	if m.Cause == nil {
		m.Step, m.Cause, m.answered = step, why, behavior.IsAnswered(why)
	}
	m.lastError = Text(why.Error())
	m.Note(store.Entry{Step: step, Kind: EventStuck, Error: m.lastError})
}
