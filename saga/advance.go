package saga

import (
	"errors"
	"fmt"
	"time"
)

// This file is how a machine draws its conclusions: forward, or back.

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
	d := &m.p.units[i]
	return d.last && !m.p.nodes[d.node].bestEffort && m.past() || m.mustKnow(i)
}

// undecided reports whether the pivot must be known before the saga can turn.
func (m *machine) undecided() bool {
	if m.p.pivot < 0 || m.back {
		return false
	}
	i := m.p.nodes[m.p.pivot].first
	return m.mustKnow(i) && m.units[i].Status == StepStarted
}

// mustKnow reports whether a unit is the pivot, may have taken effect and has
// no Undo: before its answer is known the saga can turn nowhere.
func (m *machine) mustKnow(i int) bool {
	return m.decides(i) && (m.units[i].InDoubt || m.work[i].busy)
}

// decides reports whether a unit is the pivot and has no Undo.
func (m *machine) decides(i int) bool {
	d := &m.p.units[i]
	return d.node == m.p.pivot && !d.hasUndo
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
		return m.late(ErrDeadline)
	}
	return "", nil
}

// late returns why a saga that has run out of time turns back: why, together with
// the latest error of the first step that was to be tried again, and that step.
func (m *machine) late(why error) (step string, _ error) {
	for i := range m.units {
		if u := &m.units[i]; u.Status == StepStarted && u.Error != "" {
			return u.Name, fmt.Errorf("%w: %w", why, m.errorOf(i))
		}
	}
	return "", why
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
	nodeComplete                // done, skipped, or given up for good
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
			switch {
			case n.bestEffort:
				return nodeComplete, i
			case m.p.units[i].last:
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
	if n.bestEffort {
		return nodeComplete, n.first
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
	if m.moved {
		m.since, m.moved = now, false
	}
}

func (m *machine) goOn(now time.Time) {
	for m.low < len(m.p.nodes) {
		if at, _ := m.node(m.low); at != nodeComplete {
			break
		}
		m.low++
	}
	if m.turning(now) {
		m.turn()
		return
	}
	if m.low == len(m.p.nodes) {
		m.status = Completed
		m.note(Entry{Event: EventCompleted})
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
	m.status, m.back, m.moved = Compensating, true, true
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
			if !m.p.units[i].readOnly {
				return i
			}
			m.set(i, StepNoEffect)
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
	u.Refusals = 0
	m.set(i, StepUndoing)
}

func (m *machine) stuckAtBlocked() {
	for i := range m.units {
		if m.p.nodes[m.p.units[i].node].bestEffort {
			continue
		}
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
