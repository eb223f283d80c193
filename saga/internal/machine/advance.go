package machine

import (
	"errors"
	"fmt"
	"time"

	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/saga/store"
)

// Past reports whether the pivot is done, so that the saga no longer turns back.
func (m *Machine) Past() bool {
	if m.plan.Pivot < 0 || m.Back {
		return false
	}
	return m.complete(m.plan.Pivot)
}

// unlimited reports whether a unit is tried until it works.
func (m *Machine) unlimited(i int) bool {
	d := &m.plan.Units[i]
	return d.Last && !m.plan.Nodes[d.Node].BestEffort && m.Past() || m.mustKnow(i)
}

// Undecided reports whether the answer of the pivot must be known before the saga can
// turn back.
func (m *Machine) Undecided() bool {
	if m.plan.Pivot < 0 {
		return false
	}
	i := m.plan.Nodes[m.plan.Pivot].First
	return m.mustKnow(i) && m.Units[i].Status == StepStarted
}

// mustKnow reports whether a unit is the pivot, has no Undo and may have taken effect.
// The saga cannot turn back before its answer is known.
func (m *Machine) mustKnow(i int) bool {
	return m.Decides(i) && (m.Units[i].InDoubt || m.work[i].busy)
}

// Decides reports whether a unit is the pivot and has no Undo.
func (m *Machine) Decides(i int) bool {
	d := &m.plan.Units[i]
	return d.Node == m.plan.Pivot && !d.HasUndo
}

// turning reports whether a saga that goes forward is to turn back.
func (m *Machine) turning(now time.Time) bool {
	if m.Past() {
		return false
	}
	if m.Wish == nil {
		m.wishStep, m.Wish = m.reason(now)
	}
	return m.Wish != nil
}

// Useless reports whether the attempt of a unit is to end, since the saga is to turn back.
func (m *Machine) Useless(i int, now time.Time) bool {
	return m.turning(now) && m.work[i].busy && m.Units[i].Status == StepStarted && !m.mustKnow(i)
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
	if m.Canceled {
		return "", ErrCanceled
	}
	for k := m.low; k < len(m.plan.Nodes); k++ {
		at, i := m.node(k)
		if at == nodeExhausted {
			return m.Units[i].Name, m.ErrorOf(i)
		}
		if at == nodeIdle && m.plan.Chain {
			break
		}
	}
	if !m.CompleteBy.IsZero() && !now.Before(m.CompleteBy) {
		return m.Late(ErrDeadline)
	}
	return "", nil
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
func (m *Machine) node(k int) (nodeAt, int) {
	n := &m.plan.Nodes[k]
	for i := n.First; i < n.First+n.N; i++ {
		switch m.Units[i].Status {
		case StepDone, StepSkipped:
			return nodeComplete, i
		case StepWaiting, StepStarted, StepUndoing:
			return nodeAtWork, i
		case StepUndoFailed:
			return nodeBlocked, i
		case StepFailed:
			switch {
			case n.BestEffort:
				return nodeComplete, i
			case m.plan.Units[i].Last:
				return nodeExhausted, i
			}
			return nodeRetreat, i
		case StepIdle:
			if i == n.First {
				return nodeIdle, i
			}
			return nodeNext, i
		}
	}
	if n.BestEffort {
		return nodeComplete, n.First
	}
	return nodeExhausted, n.First + n.N - 1
}

// Advance takes the saga as far as the results so far allow: it marks units that are
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

// goOn takes a saga forward.
func (m *Machine) goOn(now time.Time) {
	for m.low < len(m.plan.Nodes) && m.complete(m.low) {
		m.low++
	}
	switch {
	case m.turning(now):
		m.turn()
		return
	case m.low == len(m.plan.Nodes):
		m.Status = store.Completed
		m.Note(store.Entry{Kind: EventCompleted})
		return
	}
	var at tally
	for k := m.low; k < len(m.plan.Nodes); k++ {
		move, i := m.moveOf(k)
		switch move {
		case moveStart:
			m.start(i, now)
		case moveUndo:
			m.undo(i)
		}
		at.count(m, move, i)
		if m.plan.Chain {
			break // the nodes that follow wait
		}
	}
	opened := false
	for i := range m.Units {
		if m.Units[i].Status == StepWaiting && m.open(i, now) {
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

// A move is what is to be done about a node of a saga that goes forward.
type move int

const (
	moveNone  move = iota // it is complete, or waits for other nodes
	moveStart             // the unit is to be started
	moveUndo              // it is to be undone before the next alternative
	moveAwait             // it is at work
	moveBlock             // nothing: it has failed for good
)

// moveOf returns the move of a node, and the unit that it is about.
func (m *Machine) moveOf(k int) (move, int) {
	at, i := m.node(k)
	switch at {
	case nodeIdle:
		for _, before := range m.plan.Nodes[k].After {
			if !m.complete(before) {
				return moveNone, i
			}
		}
		return moveStart, i
	case nodeNext:
		return moveStart, i
	case nodeRetreat:
		return moveUndo, i
	case nodeAtWork:
		return moveAwait, i
	case nodeExhausted:
		if !m.work[i].final {
			return moveStart, i // it failed while the pivot, which then succeeded, was under way
		}
		return moveBlock, i
	case nodeBlocked:
		return moveBlock, i
	}
	return moveNone, i
}

// A tally is what the steps of a saga are at.
type tally struct {
	working bool // some are started or undoing
	waiting bool // some wait for a time, a signal or children
	blocked bool // some have failed for good
}

// count takes in the move of a node.
func (t *tally) count(m *Machine, is move, i int) {
	switch {
	case is == moveNone:
	case is == moveBlock:
		t.blocked = true
	case m.Units[i].Status == StepWaiting || m.Pending(i):
		t.waiting = true
	default:
		t.working = true
	}
}

// over reports whether only an operator can help. A step that waits does not delay
// that, since it may wait forever.
func (p *tally) over() bool { return !p.working && (p.blocked || !p.waiting) }

// complete reports whether a node needs nothing more on the way forward.
func (m *Machine) complete(k int) bool {
	at, _ := m.node(k)
	return at == nodeComplete
}

// turn turns the saga back, once no Do is running.
func (m *Machine) turn() {
	for i := range m.Units {
		if m.work[i].busy && m.Units[i].Status == StepStarted {
			return
		}
	}
	for i := range m.Units {
		if m.mustKnow(i) {
			switch m.Units[i].Status {
			case StepStarted:
				return
			case StepFailed:
				m.Stick(m.Units[i].Name, fmt.Errorf("saga: the pivot may have taken effect and has no Undo: %w", m.ErrorOf(i)))
				return
			}
		}
	}
	m.Step, m.Cause, m.answered = m.wishStep, m.Wish, behavior.IsAnswered(m.Wish)
	m.turnBack(m.Step, m.Cause.Error())
}

func (m *Machine) turnBack(step, why string) {
	m.Status, m.Back, m.moved = store.Compensating, true, true
	m.Note(store.Entry{Step: step, Kind: EventTurnedBack, Error: why})
}

// goBack takes a saga that has turned back further.
func (m *Machine) goBack() {
	var at tally
	left := false
	for k := range m.plan.Nodes {
		i := m.toUndo(k)
		if i < 0 {
			continue
		}
		left = true
		switch u := &m.Units[i]; {
		case u.Status == StepUndoing:
			at.count(m, moveAwait, i)
		case u.Status == StepUndoFailed:
			at.blocked = true
		case !m.allUndone(m.plan.Nodes[k].UndoAfter):
		case !m.plan.Units[i].HasUndo:
			at.blocked = true
			u.Error = "saga: it has no Undo"
			m.set(i, StepUndoFailed)
			m.Note(store.Entry{Step: u.Name, Op: store.OpUndo, Kind: EventUndoFailed, Error: u.Error})
		default:
			m.undo(i)
			at.count(m, moveUndo, i)
		}
	}
	switch {
	case !left:
		m.Status = store.Compensated
		m.Note(store.Entry{Kind: EventCompensated})
	case at.over():
		m.stuckAtBlocked()
	}
}

// toUndo returns the unit of a node that is still to be undone, or -1. A started unit
// that has certainly taken no effect is not undone.
func (m *Machine) toUndo(k int) int {
	n := &m.plan.Nodes[k]
	for i := n.First; i < n.First+n.N; i++ {
		switch u := &m.Units[i]; u.Status {
		case StepWaiting:
			m.set(i, StepNoEffect)
		case StepStarted:
			if u.InDoubt {
				return i
			}
			m.set(i, StepNoEffect)
		case StepDone, StepFailed, StepUndoing, StepUndoFailed:
			if !m.plan.Units[i].ReadOnly {
				return i
			}
			m.set(i, StepNoEffect)
		}
	}
	return -1
}

func (m *Machine) allUndone(nodes []int) bool {
	for _, k := range nodes {
		if m.toUndo(k) >= 0 {
			return false
		}
	}
	return true
}

// undo marks a unit as undoing. Its Undo waits until a request of its Do can no longer
// arrive.
func (m *Machine) undo(i int) {
	u := &m.Units[i]
	var at time.Time
	if settle := m.plan.Units[i].Settle; u.Status == StepDone {
		at = u.NotBefore
	} else if settle > 0 {
		at = m.work[i].ended.Add(settle)
	}
	m.set(i, StepUndoing)
	u.NotBefore = at
}

func (m *Machine) stuckAtBlocked() {
	for i := range m.Units {
		if m.plan.Nodes[m.plan.Units[i].Node].BestEffort {
			continue
		}
		if s := m.Units[i].Status; s == StepUndoFailed || s == StepFailed || s == StepNoEffect && m.plan.Units[i].Last && !m.Back {
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
