package saga

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/go-resilience/resilience/internal/behavior"
	store "github.com/go-resilience/resilience/saga/sagastore"
)

// A machine is the state of a saga between two decisions. Its methods are the rules by which a saga changes; decide
// calls them. They call no step and no store, read no clock and take no lock.
type machine struct {
	Instance // the part of the machine that is stored

	p     *program
	quiet bool // there is no log, since Run records nothing

	keepLog bool // the next decision appends to log

	cause    error             // the error whose text is Cause
	wish     error             // the first reason for which the saga must turn back, or nil
	wishStep string            // the step at which wish occurred, or ""
	signals  map[string][]byte // payloads by name; nil until they are read; the map is never modified

	work  []work // the attempts, by the index of the step
	begun int64  // the number of attempts that have started
	at    int    // the index of the first incomplete group
	moved bool   // a step has made progress, so advance sets since

	log     []store.Entry // the log entries that are not recorded yet
	changed bool          // the decision must be recorded before another attempt starts
}

// A work describes the current or the latest attempt of a step.
type work struct {
	busy   bool   // the attempt is in progress
	number int64  // the Number of the attempt's Call
	base   []byte // the attempt's initial state; nil if no steps run in parallel
	err    error  // the error of the latest attempt; nil if only its text is known
}

// newMachine returns the machine of a new saga.
func newMachine(p *program) *machine {
	m := &machine{p: p, work: make([]work, len(p.steps))}
	m.Saga, m.Status, m.pivot, m.Steps = p.name, Running, &p.pivotName, make([]StepState, len(p.steps))
	for i := range p.steps {
		m.Steps[i] = StepState{Name: p.steps[i].name, Status: StepIdle}
	}
	return m
}

// load returns the machine of a recorded saga. If the record does not match the definition, load returns an error and
// a machine with the definition's steps, none of which has started.
func load(p *program, rec *store.Record) (*machine, error) {
	m := newMachine(p)
	in, err := decode(rec)
	m.Instance, m.cause = *in, reason(in.Cause)
	if mismatch := m.bind(p); err == nil {
		err = mismatch
	}
	// The previous owner crashed, perhaps during a step. The record may not show that, since a runner that could not read
	// it has left its steps unchanged.
	if m.orphan || m.Status == Stuck && m.Cause == "" && m.Takeovers > 0 {
		m.doubt(true)
	}
	if !m.unread.IsZero() && err == nil {
		m.LastError = ""
	}
	return m, err
}

// stepStatuses are the statuses that this version of the package knows.
var stepStatuses = []StepStatus{
	StepIdle, StepWaiting, StepStarted, StepDone, StepNoEffect, StepFailed, StepUndoing, StepUndone, StepUndoFailed,
	StepSkipped,
}

// bind makes p the definition of the machine. It returns an error if the steps or the pivot differ, or if a step has an
// unknown status. If the steps differ, the machine gets the steps of p, none of which has started.
func (m *machine) bind(p *program) (err error) {
	begins, pivot := newMachine(p).Steps, m.pivot
	for _, st := range m.Steps {
		if st.Status != "" && !slices.Contains(stepStatuses, st.Status) && err == nil {
			err = fmt.Errorf("saga: step %s has the status %q, which this version of the package does not know",
				st.Name, st.Status)
		}
	}
	m.p, m.pivot = p, &p.pivotName
	if !slices.EqualFunc(m.Steps, begins, func(a, b StepState) bool { return a.Name == b.Name }) {
		m.Steps = begins
		return fmt.Errorf("saga: steps of %s version %d are not those of the record", p.name, p.version)
	}
	if err == nil && pivot != nil && *pivot != p.pivotName {
		err = fmt.Errorf("saga: pivot of %s version %d is %q, that of the record was %q",
			p.name, p.version, p.pivotName, *pivot)
	}
	return err
}

// loadAny returns the machine of a record that will be moved to another definition. The record's own definition need
// not be known.
func loadAny(rec *store.Record) (*machine, error) {
	in, err := decode(rec)
	m := &machine{p: &program{pivot: -1}, Instance: *in, cause: reason(in.Cause), work: make([]work, len(in.Steps))}
	return m, err
}

func (m *machine) clone() *machine {
	c := *m
	c.Steps, c.work = slices.Clone(m.Steps), slices.Clone(m.work)
	return &c
}

// commit returns the request that records the machine.
func (m *machine) commit() store.CommitRequest {
	return store.CommitRequest{
		Status: m.Status, Progress: m.encode(), Failures: m.Failures, Takeovers: m.Takeovers, LastError: m.LastError,
		Log: m.log,
	}
}

// going reports whether the saga is running or compensating.
func (m *machine) going() bool { return m.Status == Running || m.Status == Compensating }

// note adds an entry to the log. The entry must be recorded before another attempt starts.
func (m *machine) note(e store.Entry) {
	m.changed = true
	if !m.quiet {
		e.Error = storable(e.Error)
		m.log = append(m.log, e)
	}
}

// set sets the status of a step and ends its wait.
func (m *machine) set(i int, s StepStatus) {
	st := &m.Steps[i]
	st.Status, st.NotBefore, st.WaitingSince, st.Refusals = s, time.Time{}, time.Time{}, 0
	m.changed, m.moved = true, true
}

// Queries.

// complete reports whether a step with the status needs no more work while the saga goes forward.
func complete(s StepStatus) bool { return s == StepDone || s == StepSkipped }

// failedForGood reports whether a step with the status has failed permanently, in its Do or its Undo. Such a step turns
// the saga back or needs an operator.
func failedForGood(s StepStatus) bool {
	return s == StepFailed || s == StepNoEffect || s == StepUndoFailed
}

// undoable reports whether a step with the status must still be undone in a compensating saga.
func undoable(s StepStatus) bool {
	return s == StepStarted || s == StepDone || s == StepFailed || s == StepUndoing || s == StepUndoFailed
}

// skippable reports whether a step with the status can be skipped.
func skippable(s StepStatus) bool {
	switch s {
	case StepWaiting, StepStarted, StepFailed, StepNoEffect, StepUndoing, StepUndoFailed:
		return true
	}
	return false
}

// isFinalPivot reports whether a step is the pivot and has no Undo.
func (m *machine) isFinalPivot(i int) bool { return i == m.p.pivot && !m.p.steps[i].hasUndo }

// pivotMayHaveActed reports whether a step is the pivot, has no Undo and may have taken effect. If so, the saga cannot
// turn back before the outcome of the pivot is known.
func (m *machine) pivotMayHaveActed(i int) bool {
	return m.isFinalPivot(i) && (m.Steps[i].MaybeApplied || m.work[i].busy)
}

// pivotAwaitsAnswer reports whether the outcome of the pivot must be known before the saga can turn back.
func (m *machine) pivotAwaitsAnswer() bool {
	p := m.p.pivot
	return p >= 0 && m.pivotMayHaveActed(p) && m.Steps[p].Status == StepStarted
}

// turning returns why a running saga must turn back, and at which step. why is nil if it need not turn back.
func (m *machine) turning(now time.Time) (step string, why error) {
	switch {
	case m.pivotDone():
		return "", nil
	case m.wish != nil:
		return m.wishStep, m.wish
	case m.canceled:
		return "", ErrCanceled
	}
	if m.at < len(m.p.groups) {
		for i := m.p.groups[m.at].first; i < m.p.groups[m.at].end; i++ {
			if failedForGood(m.Steps[i].Status) {
				return m.Steps[i].Name, m.errorOf(i)
			}
		}
	}
	if !m.CompleteBy.IsZero() && !now.Before(m.CompleteBy) {
		return m.late(ErrDeadline)
	}
	return "", nil
}

// turns reports whether a running saga must turn back.
func (m *machine) turns(now time.Time) bool {
	_, why := m.turning(now)
	return why != nil
}

// late returns the error of a saga that turns back because of why, such as its deadline. The error joins why with the
// latest error of the first step that waits for another attempt. late also returns the name of that step, or "" if
// there is none.
func (m *machine) late(why error) (step string, _ error) {
	for i := range m.Steps {
		if st := &m.Steps[i]; st.Status == StepStarted && st.Error != "" {
			return st.Name, fmt.Errorf("%w: %w", why, m.errorOf(i))
		}
	}
	return "", why
}

func (m *machine) errorOf(i int) error {
	if m.work[i].err != nil {
		return m.work[i].err
	}
	return recorded(m.Steps[i].Error)
}

// useless reports whether the attempt of a step must be canceled if the saga turns back.
func (m *machine) useless(i int) bool {
	return m.work[i].busy && m.Steps[i].Status == StepStarted && !m.pivotMayHaveActed(i)
}

// onChildren reports whether a step waits for its children.
func (m *machine) onChildren(i int) bool {
	st := &m.Steps[i]
	return !st.WaitingSince.IsZero() && st.Error == "" && !m.work[i].busy &&
		(st.Status == StepStarted || st.Status == StepUndoing)
}

// waits reports whether a step waits for its Delay or Await. A step after the first incomplete group does not, even if
// it has that status: the definition may have changed since its wait started.
func (m *machine) waits(i int) bool {
	return m.Steps[i].Status == StepWaiting && m.p.steps[i].group <= m.at
}

// onSignal reports whether a step waits for a signal now.
func (m *machine) onSignal(now time.Time) bool {
	for i := range m.Steps {
		d := &m.p.steps[i]
		if m.waits(i) && d.await != "" && !now.Before(m.Steps[i].WaitingSince.Add(d.delay)) {
			return true
		}
	}
	return false
}

// onOutside reports whether a step waits for a signal or for children.
func (m *machine) onOutside(now time.Time) bool {
	for i := range m.Steps {
		if m.onChildren(i) {
			return true
		}
	}
	return m.onSignal(now)
}

// busy returns the number of attempts in progress.
func (m *machine) busy() (n int) {
	for i := range m.work {
		if m.work[i].busy {
			n++
		}
	}
	return n
}

// readyButForTime reports whether a step's next attempt waits for nothing but its time (NotBefore). In a saga that must
// turn back, no Do is ready, except the Do of a pivot whose outcome must be known.
func (m *machine) readyButForTime(i int, now time.Time) bool {
	switch m.Steps[i].Status {
	case StepUndoing:
		return !m.work[i].busy
	case StepStarted: // a new version may have an incomplete step before a started step
		return m.p.steps[i].group <= m.at && !m.work[i].busy && !m.TurnedBack &&
			(m.pivotMayHaveActed(i) || !m.turns(now))
	}
	return false
}

// next returns the index of the first step, from i on, whose next attempt may start, or -1.
func (m *machine) next(i int, now time.Time) int {
	for ; i < len(m.Steps); i++ {
		if m.readyButForTime(i, now) && !now.Before(m.Steps[i].NotBefore) {
			return i
		}
	}
	return -1
}

// deadline returns the time at which the saga turns back. ok is false if it has no deadline now.
func (m *machine) deadline(now time.Time) (at time.Time, ok bool) {
	if m.CompleteBy.IsZero() || m.Status != Running || m.pivotDone() || m.turns(now) {
		return time.Time{}, false
	}
	return m.CompleteBy, true
}

// wake returns the earliest time at which the next attempt may start, a wait ends or the deadline passes. ok is false
// if there is no such time. If children is true, wake also considers the times at which children are read again, and it
// considers the deadline even if all attempts are in progress.
func (m *machine) wake(now time.Time, children bool) (at time.Time, ok bool) {
	for i := range m.Steps {
		t := m.Steps[i].NotBefore
		if m.Steps[i].Status == StepWaiting {
			if t.IsZero() || !m.waits(i) || m.turns(now) {
				continue // the step waits for a signal without a limit or for another step, or is not continued
			}
		} else if !m.readyButForTime(i, now) || m.onChildren(i) && !children {
			continue
		}
		if !ok || t.Before(at) {
			at, ok = t, true
		}
	}
	if d, is := m.deadline(now); is && (ok && d.Before(at) || !ok && (children || m.onOutside(now))) {
		at, ok = d, true
	}
	return at, ok
}

// release decides whether a runner releases the saga. ok is true if the saga has ended or is stuck, if the runner
// stops, if a step waits for a signal, or if no attempt can start within a third of the lease. e is the log entry of
// the release; it has no kind if the saga has ended or is stuck. wakeIn is the time until the saga is due again. A saga
// that waits for children is due earlier, to read the children again, but not before a lease has elapsed.
func (m *machine) release(now time.Time, stops bool, lease time.Duration) (
	e store.Entry, wakeIn time.Duration, ok bool,
) {
	released := store.Entry{Kind: EventReleased}
	switch {
	case !m.going():
		return e, 0, true
	case m.busy() > 0:
		return e, 0, false
	case m.next(0, now) >= 0: // an attempt can start now, even if it only reads children
		return released, 0, stops
	}
	at, timed := m.wake(now, false)
	if timed {
		wakeIn = max(at.Sub(now), 0)
	}
	park := wakeIn > lease/3 || m.onSignal(now) // the saga releases its place for another saga
	if m.onOutside(now) {
		park = park || !timed
		if again := m.lookIn(now, lease); !timed || again < wakeIn {
			wakeIn = again
		}
	}
	if stops {
		return released, wakeIn, true
	}
	return store.Entry{Kind: EventParked, Error: cmp.Or(m.waitsFor(), m.LastError)}, wakeIn, park
}

// lookIn returns the time after which a saga that waits for signals or children is read again. For children, it is half
// of the time that the saga has waited, because the process that should wake the parent may have died. The returned
// time is never less than least. For signals, it is 6 hours, because the store always wakes the saga together with a
// signal.
func (m *machine) lookIn(now time.Time, least time.Duration) time.Duration {
	wait := 6 * time.Hour
	for i := range m.Steps {
		if m.onChildren(i) {
			wait = min(wait, now.Sub(m.Steps[i].WaitingSince)/2)
		}
	}
	return max(wait, least)
}

// waitsFor returns a text for the log that describes the first waiting step, or "".
func (m *machine) waitsFor() string {
	for i := range m.Steps {
		name, await := m.Steps[i].Name, m.p.steps[i].await
		switch {
		case m.onChildren(i):
			return fmt.Sprintf("step %s waits for its saga", name)
		case m.waits(i) && await != "":
			return fmt.Sprintf("step %s waits for signal %s", name, await)
		case m.waits(i):
			return fmt.Sprintf("step %s waits for its time", name)
		}
	}
	return ""
}

// A verdict is the result of a step's Do that follows from the statuses of its children.
type verdict int

const (
	childrenWait     verdict = iota // the Do has no result yet
	childrenDone                    // all children are completed
	childrenFailed                  // a child has failed, and some children may have taken effect
	childrenDeclined                // no child took effect or ever will
)

// judge returns the verdict on children, and the index of the first child that was compensated or abandoned, or -1. If
// the step can be undone, the step fails as soon as a child has failed. Otherwise the step fails only when all children
// have ended.
func judge(children []childState, canUndo bool) (v verdict, failed int) {
	waits, compensated := false, true
	failed = slices.IndexFunc(children, func(c childState) bool { return c.Status.Ended() && c.Status != Completed })
	for _, c := range children {
		waits, compensated = waits || !c.Status.Ended(), compensated && c.Status == Compensated
	}
	switch {
	case failed >= 0 && canUndo:
		return childrenFailed, failed
	case waits:
		return childrenWait, failed
	case failed < 0:
		return childrenDone, failed
	case compensated:
		return childrenDeclined, failed
	}
	return childrenFailed, failed
}

// Going forward and back.

// advance continues the saga as far as the results allow: it marks ready steps as started or undoing, turns the saga
// back, and ends it.
func (m *machine) advance(now time.Time) {
	if m.Status == Running {
		m.goForward(now)
	}
	if m.Status == Compensating {
		m.goBack()
	}
	if m.moved {
		m.since, m.moved = now, false
	}
}

// goForward continues a running saga through the complete groups to the first incomplete one.
func (m *machine) goForward(now time.Time) {
	for {
		m.skipComplete()
		if step, why := m.turning(now); why != nil {
			m.wishBack(step, why)
			m.turn()
			return
		}
		if m.at == len(m.p.groups) {
			m.Status = Completed
			m.note(store.Entry{Kind: EventCompleted})
			return
		}
		opened := false
		for i := m.p.groups[m.at].first; i < m.p.groups[m.at].end; i++ {
			if m.Steps[i].Status == StepIdle {
				m.start(i, now)
			}
			opened = m.Steps[i].Status == StepWaiting && m.open(i, now) || opened
		}
		if !opened { // otherwise repeat: a step whose wait has ended may be done
			m.stickIfOver(m.p.groups[m.at])
			return
		}
	}
}

// skipComplete moves at past the complete groups.
func (m *machine) skipComplete() {
	for ; m.at < len(m.p.groups); m.at++ {
		g := m.p.groups[m.at]
		if slices.ContainsFunc(m.Steps[g.first:g.end], func(st StepState) bool { return !complete(st.Status) }) {
			return
		}
	}
}

// start starts a step after the steps before it are complete. If the step has a Delay or Await, its wait starts.
func (m *machine) start(i int, now time.Time) {
	switch {
	case !m.p.steps[i].gated():
		m.set(i, StepStarted)
	case !now.IsZero(): // the first owner of a new saga starts the wait
		m.set(i, StepWaiting)
		m.Steps[i].WaitingSince = now
		if m.p.steps[i].group == 0 && m.since.Equal(m.CreatedAt) && !m.CreatedAt.IsZero() {
			m.Steps[i].WaitingSince = m.CreatedAt // the first step waits since the saga was created
		}
	}
}

// open ends the wait of a step whose time has elapsed or whose signal has arrived. It reports whether the step no
// longer waits.
func (m *machine) open(i int, now time.Time) bool {
	st, d := &m.Steps[i], &m.p.steps[i]
	from := st.WaitingSince.Add(d.delay)
	if now.Before(from) {
		st.NotBefore = from
		return false
	}
	if _, is := m.signals[d.await]; d.await != "" && !is {
		st.NotBefore = time.Time{}
		if d.awaitFor == 0 {
			return false
		}
		st.NotBefore = from.Add(d.awaitFor)
		if m.signals == nil || now.Before(st.NotBefore) {
			return false // the signals were not read yet, or the time has not elapsed
		}
		m.work[i].err = fmt.Errorf("%w: %s within %v", ErrNoSignal, d.await, d.awaitFor)
		st.Error = storable(m.work[i].err.Error())
		m.LastError = st.Error
		m.set(i, StepNoEffect)
		m.note(store.Entry{Step: st.Name, Op: OpDo, Kind: EventStepNoEffect, Error: st.Error})
		return true
	}
	if d.onlyWaits {
		m.set(i, StepDone)
		m.note(store.Entry{Step: st.Name, Op: OpDo, Kind: EventStepDone})
	} else {
		m.set(i, StepStarted)
	}
	return true
}

// stickIfOver makes the saga stuck if no step of a group can continue without an operator. A step that only waits does
// not count, because it may wait forever.
func (m *machine) stickIfOver(g group) {
	waiting, failed := false, -1
	for i := g.first; i < g.end; i++ {
		switch s := m.Steps[i].Status; {
		case s == StepWaiting || m.onChildren(i):
			waiting = true
		case m.TurnedBack && !undoable(s) || complete(s): // the step is settled in the saga's direction
		case !failedForGood(s):
			return // an attempt is in progress
		case failed < 0:
			failed = i
		}
	}
	switch {
	case failed >= 0:
		m.stick(m.Steps[failed].Name, m.errorOf(failed))
	case !waiting:
		m.stick("", errNothing)
	}
}

var errNothing = errors.New("saga: no step can continue")

// stick makes the saga stuck.
func (m *machine) stick(step string, why error) {
	m.Status = Stuck
	if m.cause == nil {
		m.setCause(step, why)
	}
	m.LastError = storable(why.Error())
	m.note(store.Entry{Step: step, Kind: EventStuck, Error: m.LastError})
}

// setCause records why the saga turns back or is stuck, and at which step.
func (m *machine) setCause(step string, why error) {
	m.Step, m.cause, m.Cause, m.answered = step, why, "", false
	if why != nil {
		m.Cause, m.answered = storable(why.Error()), behavior.IsAnswered(why)
	}
}

// wishBack requests that the saga turn back because of why, unless this was requested before.
func (m *machine) wishBack(step string, why error) {
	if m.wish == nil {
		m.wishStep, m.wish = step, why
	}
}

// turn turns the saga back once no Do is in progress and the outcome of the pivot is known.
func (m *machine) turn() {
	if m.busy() > 0 {
		return
	}
	if p := m.p.pivot; p >= 0 && m.pivotMayHaveActed(p) {
		switch m.Steps[p].Status {
		case StepStarted:
			return
		case StepFailed:
			m.stick(m.Steps[p].Name, fmt.Errorf("saga: pivot may have taken effect and has no Undo: %w", m.errorOf(p)))
			return
		}
	}
	m.setCause(m.wishStep, m.wish)
	m.turnBack(m.Step, m.wish.Error())
}

// turnBack turns the saga back. It marks steps that certainly took no effect. Marked steps are not undone.
func (m *machine) turnBack(step, why string) {
	m.Status, m.TurnedBack, m.moved = Compensating, true, true
	m.note(store.Entry{Step: step, Kind: EventTurnedBack, Error: why})
	for i := range m.Steps {
		switch s := m.Steps[i].Status; {
		case s == StepWaiting, s == StepStarted && !m.Steps[i].MaybeApplied,
			(s == StepDone || s == StepFailed) && m.p.steps[i].readOnly:
			m.set(i, StepNoEffect)
		}
	}
}

// goBack starts the Undos of the last group that is not undone. If there is no such group, the saga is Compensated.
func (m *machine) goBack() {
	for at := len(m.p.groups) - 1; at >= 0; at-- {
		g, left := m.p.groups[at], false
		for i := g.first; i < g.end; i++ {
			st := &m.Steps[i]
			if !undoable(st.Status) {
				continue
			}
			left = true
			switch {
			case st.Status == StepUndoing || st.Status == StepUndoFailed:
			case m.p.steps[i].hasUndo:
				m.set(i, StepUndoing)
			default:
				st.Error = "saga: step has no Undo"
				m.set(i, StepUndoFailed)
				m.note(store.Entry{Step: st.Name, Op: OpUndo, Kind: EventStepUndoFailed, Error: st.Error})
			}
		}
		if left {
			m.stickIfOver(g)
			return
		}
	}
	m.Status = Compensated
	m.note(store.Entry{Kind: EventCompensated})
}

// Attempts of steps.

// op returns the operation of the next attempt of a step.
func (m *machine) op(i int) Op {
	if m.Steps[i].Status == StepUndoing {
		return OpUndo
	}
	return OpDo
}

// begin starts an attempt of a step that next returned, and returns the number of the attempt.
func (m *machine) begin(i int) (attempt int) {
	m.begun++
	m.work[i].busy, m.work[i].number = true, m.begun
	n := m.Steps[i].attempts(m.op(i))
	*n++
	return *n
}

// finish records the answer of an attempt that was not interrupted.
func (m *machine) finish(i int, a *Answer, now time.Time) {
	st, d := &m.Steps[i], &m.p.steps[i]
	undo := a.Op == OpUndo
	attempts, limit, status, kind := st.attempts(a.Op), d.attempts, StepDone, EventStepDone
	if undo {
		limit, status, kind = d.undoAttempts, StepUndone, EventStepUndone
	}
	m.work[i] = work{err: a.cause()}
	if a.Outcome == OutcomeDone {
		m.Failures, m.Takeovers = 0, 0
		m.set(i, status)
		if !undo {
			st.MaybeApplied, st.Error = false, ""
		}
		m.note(store.Entry{Step: st.Name, Op: a.Op, Kind: kind, Attempt: *attempts})
		return
	}
	m.LastError, st.Error = a.Error, a.Error
	if a.Outcome == OutcomeRefused {
		*attempts--
		m.refused(i, a, now)
		return
	}
	m.Failures++
	st.Refusals = 0
	if !undo && a.Outcome != OutcomeFailed {
		st.MaybeApplied = a.Outcome == OutcomeMaybeApplied // earlier attempts of a declined Do took no effect, either
	}
	unlimited := m.pivotDone() || m.pivotMayHaveActed(i) // both are false while compensating
	if !a.Final && (unlimited || limit == Unlimited || *attempts < limit) {
		again := true
		if !undo {
			step, why := m.turning(now)
			if why != nil {
				m.wishBack(step, why)
			}
			again = why == nil || m.pivotMayHaveActed(i)
		}
		if again {
			st.NotBefore = now.Add(a.RetryAfter)
			m.stalled(i, a, *attempts)
			return
		}
	}
	switch {
	case undo:
		status, kind = StepUndoFailed, EventStepUndoFailed
	case st.MaybeApplied:
		status, kind = StepFailed, EventStepFailed
	default:
		status, kind = StepNoEffect, EventStepNoEffect
	}
	m.set(i, status)
	m.note(store.Entry{Step: st.Name, Op: a.Op, Kind: kind, Attempt: *attempts, Error: st.Error})
}

// refused records that a policy refused an attempt. The call had no effect, and does not count as an attempt. The first
// of several consecutive refusals gets a log entry, which is recorded together with the next other entry.
func (m *machine) refused(i int, a *Answer, now time.Time) {
	st := &m.Steps[i]
	st.Refusals++
	st.NotBefore = now.Add(max(a.RetryAfter, leastPause))
	if st.Refusals == 1 && !m.quiet {
		m.log = append(m.log, store.Entry{Step: st.Name, Op: a.Op, Kind: EventStepRefused, Error: st.Error})
	}
	m.stalled(i, a, *st.attempts(a.Op)+st.Refusals)
}

// stalled sets a.stalled to n if n is 8, 16, 32 and so on. n is the number of the step's attempts and refusals.
func (m *machine) stalled(i int, a *Answer, n int) {
	if s := m.Steps[i].Status; (s == StepStarted || s == StepUndoing) && n >= 8 && n&(n-1) == 0 {
		a.stalled = n
	}
}

// interrupted records that an attempt was interrupted or that its answer is lost. The attempt does not count. It may
// have taken effect, unless a policy refused the call.
func (m *machine) interrupted(i int, a *Answer, now time.Time) {
	st := &m.Steps[i]
	m.work[i].busy = false
	*st.attempts(a.Op)--
	st.MaybeApplied = st.MaybeApplied || st.Status == StepStarted && !m.p.steps[i].failsClean && !a.refused
	if a.RetryAfter > 0 {
		st.NotBefore = now.Add(a.RetryAfter)
	}
}

// hang records that an attempt in progress has not returned, although its ctx was canceled long ago.
func (m *machine) hang(step string, attempt int) {
	i := m.index(step)
	if i < 0 || !m.work[i].busy || *m.Steps[i].attempts(m.op(i)) != attempt || slices.Contains(m.hung, step) {
		return
	}
	m.hung = append(slices.Clone(m.hung), step)
	st := &m.Steps[i]
	st.MaybeApplied = st.MaybeApplied || st.Status == StepStarted && !m.p.steps[i].failsClean
	m.LastError = fmt.Sprintf("saga: %s of step %s has not returned a lease after its timeout of %v",
		m.op(i), step, m.p.steps[i].timeout)
	m.note(store.Entry{Step: step, Op: m.op(i), Kind: EventStalled, Attempt: attempt, Error: m.LastError})
}

// returned records that an attempt has ended.
func (m *machine) returned(i int) {
	if n := slices.Index(m.hung, m.Steps[i].Name); n >= 0 {
		m.hung = slices.Delete(slices.Clone(m.hung), n, n+1)
		m.changed = true // must be recorded before the next attempt starts
	}
}

// takeAway drops the attempts that do not return, because the saga gets another owner. Their steps may have taken
// effect.
func (m *machine) takeAway() {
	if len(m.hung) > 0 {
		m.hung, m.changed = nil, true
		m.doubt(true)
	}
}

// wait records that the children of a step have not ended. They are read again at the time next, or when one of them
// has ended.
func (m *machine) wait(i, children int, now, next time.Time) {
	st := &m.Steps[i]
	m.work[i] = work{}
	st.Error, st.Refusals, st.NotBefore = "", 0, next
	if st.WaitingSince.IsZero() {
		st.WaitingSince = now
	}
	*st.attempts(m.op(i))--
	if st.Status == StepStarted {
		st.MaybeApplied, st.Children = true, children
	}
}

// lookAgain makes the steps read their children again now.
func (m *machine) lookAgain() {
	for i := range m.Steps {
		if m.onChildren(i) {
			m.Steps[i].NotBefore = time.Time{}
		}
	}
}

// doubt marks started steps as steps that may have taken effect. If all is false, it marks only the steps with an
// attempt in progress in this process, because the results of these attempts will be dropped.
func (m *machine) doubt(all bool) {
	for i := range m.Steps {
		if m.Steps[i].Status == StepStarted && !m.p.steps[i].failsClean && (all || m.work[i].busy) {
			m.Steps[i].MaybeApplied = true
		}
	}
}

// takeOver records that the previous owner did not release the saga.
func (m *machine) takeOver(previous string) {
	m.doubt(true)
	m.note(store.Entry{Kind: EventTakenOver, Error: "from " + previous})
}

// cancel requests that the saga turn back, and reports whether this is the first request.
func (m *machine) cancel(note string) bool {
	if m.canceled || m.Status.Ended() {
		return false
	}
	m.canceled = true
	if m.pivotDone() {
		note = "too late, the pivot is done: " + note
	}
	m.note(store.Entry{Kind: EventCanceled, Error: note})
	return true
}

// Actions of operators.

// replace changes the version and the state as op requests. If that is not possible, it returns an error with the
// reason.
func (m *machine) replace(op *Operation, target *program) error {
	if err := op.checkReplacement(); err != nil {
		return err
	}
	if m.busy() > 0 {
		return errors.New("attempt is in progress")
	}
	if op.Version != 0 {
		if target == nil {
			return fmt.Errorf("version %d is not the one that decides", op.Version)
		}
		if err := m.move(target); err != nil {
			return err
		}
	}
	if op.State != nil {
		if _, err := m.p.decode(op.State); err != nil {
			return err
		}
		m.State = slices.Clone(op.State)
	}
	return nil
}

// hasBegun reports whether a step is done, undone or skipped, or may have taken effect.
func hasBegun(st *StepState) bool {
	switch st.Status {
	case StepIdle, StepWaiting, StepNoEffect:
		return false
	case StepStarted:
		return st.MaybeApplied
	}
	return true
}

// move makes p, another version of the definition, the definition of the saga. It finds each step by its name.
// The steps for which hasBegun returns true must be in p, in the same order.
func (m *machine) move(p *program) error {
	steps, pivotDone, at := newMachine(p).Steps, m.pivotDone(), 0
	for _, st := range m.Steps {
		i := p.index(st.Name)
		if hasBegun(&st) {
			switch {
			case i < 0:
				return fmt.Errorf("step %s is %s, and version %d lacks it", st.Name, st.Status, p.version)
			case i < at:
				return fmt.Errorf("step %s is %s, and has another place in version %d", st.Name, st.Status, p.version)
			case st.Children > 0 && p.steps[i].child == nil:
				return fmt.Errorf("step %s has children, and none in version %d", st.Name, p.version)
			}
			at = i + 1
		}
		if i >= 0 {
			steps[i] = st
		}
	}
	was := m.pivot
	m.Steps, m.pivot = steps, &p.pivotName
	if pivotDone && !m.pivotDone() {
		return fmt.Errorf("its pivot %s is done, and the pivot of version %d is not", *was, p.version)
	}
	m.p, m.Version, m.at, m.work = p, p.version, 0, make([]work, len(p.steps))
	m.skipComplete()
	for i := range m.Steps {
		if m.Steps[i].Status == StepWaiting && !m.waits(i) {
			m.set(i, StepIdle) // the step's wait starts over after the steps that p adds before it
		}
	}
	if m.orphan || m.Status == Stuck && m.Cause == "" && m.Takeovers > 0 {
		m.doubt(true) // see load
	}
	return nil
}

// skip declares a step settled. If that is not possible, it returns an error with the reason.
func (m *machine) skip(step, note string) error {
	i := slices.IndexFunc(m.Steps, func(st StepState) bool { return st.Name == step })
	if i < 0 {
		if step == "" && m.Status == Stuck {
			return errors.New("saga is stuck, but not at a step, so the operation must name the step")
		} else if step == "" {
			return errors.New("saga is not stuck, so the operation must name the step")
		}
		return errors.New("there is no such step")
	}
	if s := m.Steps[i].Status; !skippable(s) {
		return fmt.Errorf("step %s is %s", step, s)
	}
	m.set(i, StepSkipped)
	m.note(store.Entry{Step: step, Kind: EventStepSkipped, Error: note})
	m.unstick()
	return nil
}

// retry resets the attempts of failed steps and ends the waits between attempts.
func (m *machine) retry(note string) {
	m.takeAway()
	m.note(store.Entry{Kind: EventRetried, Error: note})
	m.unstick()
	for i := range m.Steps {
		st := &m.Steps[i]
		if st.Status == StepWaiting {
			continue // its NotBefore is the end of its wait, which is not shortened
		}
		st.NotBefore, st.Refusals = time.Time{}, 0
		switch {
		case st.Status == StepUndoFailed && m.p.steps[i].hasUndo:
			st.Undos = 0
			m.set(i, StepUndoing)
		case !m.TurnedBack && failedForGood(st.Status):
			st.Attempts = 0
			if st.MaybeApplied {
				m.set(i, StepStarted)
			} else {
				m.set(i, StepIdle) // the step starts again, with its wait
			}
		}
	}
}

// unstick lets a stuck saga continue in its direction: forward, or back if it has turned back.
func (m *machine) unstick() {
	m.Takeovers, m.moved = 0, true
	switch {
	case m.TurnedBack:
		m.Status = Compensating
	case m.Status == Stuck:
		m.Status = Running
		m.setCause("", nil)
	}
}

// compensate turns the saga back, or returns an error with the reason why it cannot.
func (m *machine) compensate(note string) error {
	if m.TurnedBack || m.pivotDone() {
		return errors.New("only on its way forward, and if its pivot is not done")
	}
	if p := m.p.pivot; p >= 0 && m.pivotMayHaveActed(p) {
		m.set(p, StepSkipped)
		m.note(store.Entry{Step: m.Steps[p].Name, Kind: EventStepSkipped, Error: note})
	}
	m.Takeovers = 0
	if m.cause == nil {
		m.setCause(m.Step, reason(note))
	}
	m.turnBack("", note)
	return nil
}

// forestall turns a new saga back before any of its steps has started.
func (m *machine) forestall(why string) {
	m.Status, m.TurnedBack = Compensated, true
	m.setCause("", reason(why))
}

// revert turns a completed saga back because its parent turns back.
func (m *machine) revert(why string) {
	m.setCause(m.Step, reason(why))
	m.turnBack("", why)
}
