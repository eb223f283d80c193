package saga

import (
	"errors"
	"fmt"
	"time"
)

// past reports whether the pivot is done, so that the saga no longer turns back.
func (m *machine) past() bool {
	if m.p.pivot < 0 || m.back {
		return false
	}
	at, _ := m.node(m.p.pivot)
	return at == nodeComplete
}

// unlimited reports whether a unit is tried until it works.
func (m *machine) unlimited(i int) bool {
	d := &m.p.units[i]
	return d.last && !m.p.nodes[d.node].bestEffort && m.past() || m.mustKnow(i)
}

// undecided reports whether the answer of the pivot must be known before the saga can
// turn back.
func (m *machine) undecided() bool {
	if m.p.pivot < 0 || m.back {
		return false
	}
	i := m.p.nodes[m.p.pivot].first
	return m.mustKnow(i) && m.units[i].Status == StepStarted
}

// mustKnow reports whether a unit is the pivot, has no Undo and may have taken effect.
// The saga cannot turn back before its answer is known.
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

// wishBack asks the saga to turn back because of why, unless it is to already.
func (m *machine) wishBack(step string, why error) {
	if m.wish == nil {
		m.wishStep, m.wish = step, why
	}
}

// reason returns why a saga that goes forward must turn back, and at which step. why is
// nil if it need not.
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

// late returns the error of a saga that turns back for lack of time: why, together with
// the latest error of the first step that waits for another attempt, and that step.
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

// A nodeAt is the progress of a node that is to be done.
type nodeAt int

const (
	nodeIdle      nodeAt = iota // not begun
	nodeAtWork                  // waiting, started or undoing
	nodeComplete                // done, skipped, or gone on without
	nodeNext                    // the next alternative is to be started
	nodeRetreat                 // the alternative is to be undone before the next one
	nodeExhausted               // the last alternative has failed
	nodeBlocked                 // an alternative cannot be undone
)

// node returns the progress of a node, and the unit that decides it.
func (m *machine) node(k int) (nodeAt, int) {
	n := &m.p.nodes[k]
	for i := n.first; i < n.first+n.n; i++ {
		switch m.units[i].Status {
		case StepDone, StepSkipped:
			return nodeComplete, i
		case StepWaiting, StepStarted, StepUndoing:
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

// advance takes the saga as far as the results so far allow: it marks units that are
// ready as started or undoing, turns the saga back, and ends it.
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
		m.note(Entry{Kind: EventCompleted})
		return
	}
	past := m.past()
	var at progress
	for k := m.low; k < len(m.p.nodes); k++ {
		switch is, i := m.node(k); is {
		case nodeIdle:
			if m.allComplete(m.p.nodes[k].after) {
				m.start(i, now)
				at.begun(m, i)
			} else if m.p.chain {
				k = len(m.p.nodes) // the nodes that follow wait, too
			}
		case nodeNext:
			m.start(i, now)
			at.begun(m, i)
		case nodeRetreat:
			m.undo(i)
			at.working = true
		case nodeExhausted:
			// It failed while the pivot, which then succeeded, was under way.
			if past && !m.work[i].final {
				m.start(i, now)
				at.begun(m, i)
			} else {
				at.blocked = true
			}
		case nodeBlocked:
			at.blocked = true
		case nodeAtWork:
			at.begun(m, i)
		}
	}
	opened := false
	for i := range m.units {
		if m.units[i].Status == StepWaiting && m.open(i, now) {
			opened = true
		}
	}
	switch {
	case opened:
		m.goOn(now) // what waits for these units
	case at.over():
		m.stuckAtBlocked()
	}
}

// progress is what the steps of a saga are at.
type progress struct {
	working bool // some are started or undoing
	waiting bool // some wait for a time, a signal or children
	blocked bool // some have failed for good
}

// begun takes in a unit that is not idle.
func (p *progress) begun(m *machine, i int) {
	if m.units[i].Status == StepWaiting || m.pending(i) {
		p.waiting = true
	} else {
		p.working = true
	}
}

// over reports whether only an operator can help. A step that waits does not delay
// that, since it may wait for ever.
func (p *progress) over() bool { return !p.working && (p.blocked || !p.waiting) }

func (m *machine) allComplete(nodes []int) bool {
	for _, k := range nodes {
		if at, _ := m.node(k); at != nodeComplete {
			return false
		}
	}
	return true
}

// turn turns the saga back, once no Do is running.
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
	m.note(Entry{Step: step, Kind: EventTurnedBack, Error: why})
}

func (m *machine) goBack() {
	var at progress
	left := false
	for k := range m.p.nodes {
		i := m.toUndo(k)
		if i < 0 {
			continue
		}
		left = true
		switch u := &m.units[i]; {
		case u.Status == StepUndoing:
			at.begun(m, i)
		case u.Status == StepUndoFailed:
			at.blocked = true
		case !m.allUndone(m.p.nodes[k].undoAfter):
		case !m.p.units[i].hasUndo:
			at.blocked = true
			u.Error = "saga: it has no Undo"
			m.set(i, StepUndoFailed)
			m.note(Entry{Step: u.Name, Op: OpUndo, Kind: EventUndoFailed, Error: u.Error})
		default:
			m.undo(i)
			at.working = true
		}
	}
	switch {
	case !left:
		m.status = Compensated
		m.note(Entry{Kind: EventCompensated})
	case at.over():
		m.stuckAtBlocked()
	}
}

// toUndo returns the unit of a node that is still to be undone, or -1. A started unit
// that has certainly taken no effect is not undone.
func (m *machine) toUndo(k int) int {
	n := &m.p.nodes[k]
	for i := n.first; i < n.first+n.n; i++ {
		switch u := &m.units[i]; u.Status {
		case StepWaiting:
			u.NotBefore, u.WaitingSince = time.Time{}, time.Time{}
			m.set(i, StepNoEffect)
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

// undo marks a unit as undoing. Its Undo waits until a request of its Do can no longer
// arrive.
func (m *machine) undo(i int) {
	u := &m.units[i]
	if settle := m.p.units[i].settle; u.Status != StepDone {
		u.NotBefore = time.Time{}
		if u.InDoubt && settle > 0 {
			u.NotBefore = m.work[i].ended.Add(settle)
		}
	}
	u.Refusals, u.WaitingSince = 0, time.Time{}
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

// stick makes the saga stuck.
func (m *machine) stick(step string, why error) {
	m.status = Stuck
	if m.cause == nil {
		m.step, m.cause = step, why
	}
	m.lastError = text(why.Error())
	m.note(Entry{Step: step, Kind: EventStuck, Error: m.lastError})
}
