package machine

import (
	"fmt"
	"strings"
	"time"

	store "github.com/go-resilience/resilience/internal/sagastore"
)

// start begins a unit whose turn it is. A unit that waits first is not in doubt.
func (m *Machine) start(i int, now time.Time) {
	if d := &m.plan.Units[i]; !d.IsGated() || m.Units[i].InDoubt {
		m.set(i, StepStarted)
		return
	}
	if now.IsZero() {
		return // the saga has not begun: its first owner starts the unit
	}
	m.set(i, StepWaiting)
	m.Units[i].WaitingSince = now
	if m.plan.Units[i].Group == 0 && m.since.Equal(m.created) && !m.created.IsZero() {
		m.Units[i].WaitingSince = m.created // there was no step before it
	}
}

// open lets a unit go on that has waited long enough, or has its signal. It reports whether
// the unit waits no longer.
func (m *Machine) open(i int, now time.Time) bool {
	u, d := &m.Units[i], &m.plan.Units[i]
	from := u.WaitingSince.Add(d.Delay)
	if now.Before(from) {
		u.NotBefore = from
		return false
	}
	if _, is := m.Signals[d.Await]; d.Await != "" && !is {
		u.NotBefore = time.Time{}
		if d.AwaitFor == 0 {
			return false
		}
		u.NotBefore = from.Add(d.AwaitFor)
		if m.Signals == nil || now.Before(u.NotBefore) {
			return false // without the signals nobody knows
		}
		m.unsignaled(i)
		return true
	}
	if d.GateOnly {
		m.set(i, StepDone)
		m.Note(store.Entry{Step: u.Name, Op: store.OpDo, Kind: EventDone})
	} else {
		m.set(i, StepStarted)
	}
	return true
}

// unsignaled takes in that the signal of a unit has not come in time.
func (m *Machine) unsignaled(i int) {
	u, w, d := &m.Units[i], &m.work[i], &m.plan.Units[i]
	w.err = fmt.Errorf("%w: %s within %v", ErrNoSignal, d.Await, d.AwaitFor)
	u.Error = Text(w.err.Error())
	m.lastError = u.Error
	m.set(i, StepNoEffect)
	m.Note(store.Entry{Step: u.Name, Op: store.OpDo, Kind: EventNoEffect, Error: u.Error})
}

// Awaiting reports whether a unit waits for a signal now.
func (m *Machine) Awaiting(now time.Time) bool {
	for i := range m.Units {
		u, d := &m.Units[i], &m.plan.Units[i]
		if u.Status == StepWaiting && d.Await != "" && !now.Before(u.WaitingSince.Add(d.Delay)) {
			return true
		}
	}
	return false
}

// TimeUp reports whether the AwaitFor of a unit that waits for a signal is over.
func (m *Machine) TimeUp(now time.Time) bool {
	for i := range m.Units {
		u, d := &m.Units[i], &m.plan.Units[i]
		if u.Status == StepWaiting && d.AwaitFor > 0 && !now.Before(u.WaitingSince.Add(d.Delay+d.AwaitFor)) {
			return true
		}
	}
	return false
}

// Outside reports whether a unit waits for something other than the time.
func (m *Machine) Outside(now time.Time) bool {
	for i := range m.Units {
		if m.Pending(i) {
			return true
		}
	}
	return m.Awaiting(now)
}

// wakeOutside returns after how long a saga that waits for something outside is looked at
// again, in case nobody was told: half of the time that it has waited, least or more.
func (m *Machine) wakeOutside(now time.Time, least time.Duration) time.Duration {
	const most = 6 * time.Hour
	wait := most
	for i := range m.Units {
		if since := m.Units[i].WaitingSince; !since.IsZero() {
			wait = min(wait, now.Sub(since)/2)
		}
	}
	return max(wait, least)
}

// waitsFor says what the saga waits for outside, for its log.
func (m *Machine) waitsFor() string {
	var list []string
	for i := range m.Units {
		switch {
		case m.Pending(i):
			list = append(list, fmt.Sprintf("step %s waits for its saga", m.Units[i].Name))
		case m.Units[i].Status == StepWaiting && m.plan.Units[i].Await != "":
			list = append(list, fmt.Sprintf("step %s waits for signal %s", m.Units[i].Name, m.plan.Units[i].Await))
		case m.Units[i].Status == StepWaiting:
			list = append(list, fmt.Sprintf("step %s waits for its time", m.Units[i].Name))
		}
	}
	return strings.Join(list, ", ")
}

// News reports whether there is a signal that a unit waits for and that was not known before.
func (m *Machine) News(signals map[string][]byte) bool {
	for i := range m.Units {
		name := m.plan.Units[i].Await
		_, is := signals[name]
		if _, known := m.Signals[name]; is && !known && m.Units[i].Status == StepWaiting {
			return true
		}
	}
	return false
}

// Pending reports whether a unit waits for its children.
func (m *Machine) Pending(i int) bool {
	u := &m.Units[i]
	return !u.WaitingSince.IsZero() && u.Error == "" && !m.work[i].busy &&
		(u.Status == StepStarted || u.Status == StepUndoing)
}

// Wait takes in that the children of a unit have not ended. They are looked at again at
// next, or when one of them ends.
func (m *Machine) Wait(i, children int, now, next time.Time) {
	u, w := &m.Units[i], &m.work[i]
	w.busy, w.err = false, nil
	u.Error, u.Refusals, u.NotBefore = "", 0, next
	if u.WaitingSince.IsZero() {
		u.WaitingSince = now
	}
	if u.Status == StepUndoing {
		u.Undos--
		return
	}
	u.Attempts--
	u.InDoubt, u.Children = true, children
}

// LookAgain makes the units look at their children again now.
func (m *Machine) LookAgain() {
	for i := range m.Units {
		if m.Pending(i) {
			m.Units[i].NotBefore = time.Time{}
		}
	}
}

// A Verdict is what the children of a step mean for its Do.
type Verdict int

const (
	ChildrenWait   Verdict = iota // the Do has no result yet
	ChildrenDone                  // all are completed
	ChildrenFailed                // one has failed, and some may have taken effect
	ChildrenVoid                  // none has taken effect, or ever will
)

// Judge returns the verdict on children with these statuses, and the first of them that was
// compensated or abandoned, or -1. A step that can be undone has failed as soon as one child
// has; one that cannot, when all have ended.
func Judge(children []store.Status, canUndo bool) (v Verdict, failed int) {
	failed = -1
	waits, compensated := false, true
	for i, s := range children {
		compensated = compensated && s == store.Compensated
		switch {
		case !s.Ended():
			waits = true
		case s != store.Completed && failed < 0:
			failed = i
		}
	}
	switch {
	case failed >= 0 && canUndo:
		return ChildrenFailed, failed
	case waits:
		return ChildrenWait, failed
	case failed < 0:
		return ChildrenDone, failed
	case compensated:
		return ChildrenVoid, failed
	}
	return ChildrenFailed, failed
}
