package machine

import (
	"errors"
	"fmt"
	"slices"
	"time"

	store "github.com/go-resilience/resilience/internal/sagastore"
)

// Skippable reports whether a step with the status can be skipped.
func Skippable(s StepStatus) bool {
	switch s {
	case StepWaiting, StepStarted, StepFailed, StepNoEffect, StepUndoing, StepUndoFailed:
		return true
	}
	return false
}

// SkipStep declares a step settled. The error says why it cannot.
func (m *Machine) SkipStep(step, note string) error {
	i := slices.IndexFunc(m.Units, func(u state) bool { return u.Name == step })
	if i < 0 {
		return errors.New("there is no such step")
	}
	if s := m.Units[i].Status; !Skippable(s) {
		return fmt.Errorf("step %s is %s", step, s)
	}
	m.skip(i, note)
	m.unstick()
	return nil
}

func (m *Machine) skip(i int, note string) {
	m.set(i, StepSkipped)
	m.Note(store.Entry{Step: m.Units[i].Name, Kind: EventSkipped, Error: note})
}

// Retry gives what has failed its attempts again, and ends the waits between attempts.
func (m *Machine) Retry(note string) {
	m.Note(store.Entry{Kind: EventRetried, Error: note})
	m.unstick()
	for i := range m.Units {
		u := &m.Units[i]
		if u.Status == StepWaiting {
			continue // NotBefore is the end of its wait
		}
		u.NotBefore, u.Refusals = time.Time{}, 0
		switch {
		case u.Status == StepUndoFailed:
			u.Undos = 0
			m.set(i, StepUndoing)
		case !m.Back && m.lost(i):
			u.Attempts = 0
			if u.InDoubt {
				m.set(i, StepStarted)
			} else {
				m.set(i, StepIdle) // its turn comes again, and with it what it waits for
			}
		}
	}
}

// Compensate turns the saga back. The error says why it cannot.
func (m *Machine) Compensate(note string) error {
	if m.Back || m.Past() {
		return errors.New("only on its way forward, and if its pivot is not done")
	}
	if p := m.plan.Pivot; p >= 0 && m.mustKnow(p) {
		m.skip(p, note)
	}
	m.takeovers = 0
	if m.Cause == nil {
		m.Cause = Reason(note)
	}
	m.turnBack("", note)
	return nil
}

// Revert turns a completed saga back.
func (m *Machine) Revert(why string) {
	m.Cause = Reason(why)
	m.turnBack("", why)
}

// Forestall makes the machine that of a saga that has turned back before it began.
func (m *Machine) Forestall(why string) {
	m.Status, m.Back, m.Cause = store.Compensated, true, Reason(why)
}

// unstick lets a stuck saga continue in its direction.
func (m *Machine) unstick() {
	m.takeovers, m.moved = 0, true
	if m.Status != store.Stuck {
		return
	}
	if m.Back {
		m.Status = store.Compensating
		return
	}
	m.Status, m.Step, m.Cause, m.answered = store.Running, "", nil, false
}
