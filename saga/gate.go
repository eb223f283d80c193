package saga

import (
	"fmt"
	"strings"
	"time"
)

// isGated reports whether the step waits before its Do begins.
func (u *unit) isGated() bool { return u.delay > 0 || u.await != "" }

// start begins a unit whose turn it is. A unit that waits first is not in doubt.
func (m *machine) start(i int, now time.Time) {
	if d := &m.p.units[i]; !d.isGated() || m.units[i].InDoubt {
		pressing := m.pressing
		m.set(i, StepStarted)
		m.pressing = pressing || !d.light && !d.doTx // which is recorded by its transaction
		return
	}
	if now.IsZero() {
		return // the saga has not begun: its first owner starts the unit
	}
	m.set(i, StepWaiting)
	m.units[i].WaitingSince = now
	n := &m.p.nodes[m.p.units[i].node]
	if len(n.after) == 0 && i == n.first && m.since.Equal(m.created) && !m.created.IsZero() {
		m.units[i].WaitingSince = m.created // there was no step before it
	}
}

// open lets a unit go on that has waited long enough, or has its signal. It reports whether
// the unit waits no longer.
func (m *machine) open(i int, now time.Time) bool {
	u, d := &m.units[i], &m.p.units[i]
	from := u.WaitingSince.Add(d.delay)
	if now.Before(from) {
		u.NotBefore = from
		return false
	}
	if _, is := m.signals[d.await]; d.await != "" && !is {
		u.NotBefore = time.Time{}
		if d.awaitFor == 0 {
			return false
		}
		u.NotBefore = from.Add(d.awaitFor)
		if m.signals == nil || now.Before(u.NotBefore) {
			return false // without the signals nobody knows
		}
		if !d.goOn {
			m.unsignaled(i)
			return true
		}
	}
	u.NotBefore, u.WaitingSince = time.Time{}, time.Time{}
	if d.gateOnly {
		m.set(i, StepDone)
		m.note(Entry{Step: u.Name, Op: OpDo, Kind: EventDone})
	} else {
		m.set(i, StepStarted)
	}
	return true
}

// unsignaled takes in that the signal of a unit has not come in time.
func (m *machine) unsignaled(i int) {
	u, w, d := &m.units[i], &m.work[i], &m.p.units[i]
	w.err, w.final = fmt.Errorf("%w: %s within %v", ErrNoSignal, d.await, d.awaitFor), true
	u.Error = text(w.err.Error())
	m.lastError = u.Error
	u.NotBefore, u.WaitingSince = time.Time{}, time.Time{}
	m.set(i, StepNoEffect)
	m.note(Entry{Step: u.Name, Op: OpDo, Kind: EventNoEffect, Error: u.Error})
}

// awaiting reports whether a unit waits for a signal now.
func (m *machine) awaiting(now time.Time) bool {
	for i := range m.units {
		u, d := &m.units[i], &m.p.units[i]
		if u.Status == StepWaiting && d.await != "" && !now.Before(u.WaitingSince.Add(d.delay)) {
			return true
		}
	}
	return false
}

// timeUp reports whether the AwaitFor of a unit that waits for a signal is over.
func (m *machine) timeUp(now time.Time) bool {
	for i := range m.units {
		u, d := &m.units[i], &m.p.units[i]
		if u.Status == StepWaiting && d.awaitFor > 0 && !now.Before(u.WaitingSince.Add(d.delay+d.awaitFor)) {
			return true
		}
	}
	return false
}

// outside reports whether a unit waits for something other than the time.
func (m *machine) outside(now time.Time) bool {
	for i := range m.units {
		if m.pending(i) {
			return true
		}
	}
	return m.awaiting(now)
}

// wakeOutside returns after how long a saga that waits for something outside is looked at
// again, in case nobody was told: half of the time that it has waited, least or more.
func (m *machine) wakeOutside(now time.Time, least time.Duration) time.Duration {
	const most = 6 * time.Hour
	wait := most
	for i := range m.units {
		if since := m.units[i].WaitingSince; !since.IsZero() {
			wait = min(wait, now.Sub(since)/2)
		}
	}
	return max(wait, least)
}

// waitsFor says what the saga waits for outside, for its log.
func (m *machine) waitsFor() string {
	var list []string
	for i := range m.units {
		switch {
		case m.pending(i):
			list = append(list, fmt.Sprintf("step %s waits for its saga", m.units[i].Name))
		case m.units[i].Status == StepWaiting && m.p.units[i].await != "":
			list = append(list, fmt.Sprintf("step %s waits for signal %s", m.units[i].Name, m.p.units[i].await))
		case m.units[i].Status == StepWaiting:
			list = append(list, fmt.Sprintf("step %s waits for its time", m.units[i].Name))
		}
	}
	return strings.Join(list, ", ")
}
