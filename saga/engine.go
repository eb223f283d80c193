package saga

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	store "github.com/go-resilience/resilience/internal/sagastore"
	"github.com/go-resilience/resilience/saga/internal/participant"
)

// An Input is what has happened to a saga since its last [Decision].
type Input struct {
	Now       time.Time
	Answers   []Answer          // of calls that have ended
	Signals   map[string][]byte // new ones, by name
	Operation *Operation        // such as ActionCancel

	ended  error // of the ctx of Run, once that has ended
	runner runnerInput
}

// A runnerInput is the part of an [Input] that only a Runner has.
type runnerInput struct {
	// lease is the Runner's LeaseTTL. With it, a Decision that must be recorded has no Calls: they come with the
	// next Decision, which is taken once this one is recorded. Zero means another engine.
	lease time.Duration
	idle  bool // begin no attempt and do not give the saga up
	stops bool // the Runner stops: begin no attempt, and give the saga up once none is in progress

	takenFrom string  // the previous owner, if that crashed
	look      bool    // look at children again now
	cancel    *string // the note of a request to turn back that the store has accepted
	revert    string  // why a parent turns this saga back after it has completed
	doubt     bool    // attempts may be in progress that the snapshot does not have
	stick     error   // make the saga stuck
}

// A Decision is what to do next with a saga. It is JSON.
type Decision struct {
	Snapshot   Snapshot
	Status     Status
	Calls      []Call    // to make now
	Stop       []string  // steps whose calls in progress are to be canceled
	WakeAt     time.Time // when to decide again if nothing happens before; zero means never
	Log        []Entry   // what has happened
	NotAllowed string    // why Input.Operation was refused, or ""

	why      error         // the cause with which the calls in Stop are canceled
	changed  bool          // it must be recorded before another attempt begins
	deadline time.Time     // when the saga turns back for lack of time, or zero
	release  bool          // a Runner gives the saga up
	wakeIn   time.Duration // when the saga is then due again
	answers  []Answer      // the Input's, as they were counted
}

// A Snapshot is a saga between two decisions, without its log. It is opaque, and a later version of this package can
// read it.
type Snapshot struct{ m *machine }

// A Call is an attempt of a step. It is JSON.
type Call struct {
	Saga     string // the Name of the definition
	Version  int
	Step     string
	Op       Op
	Command  Command
	Refusals int // consecutive ones before this attempt
	State    []byte
	Signals  map[string][]byte // by name
	Timeout  time.Duration     // zero means none

	last     bool   // no attempt follows if this one fails
	detached bool   // the end of Run's ctx does not end the call
	carried  string // see RunnerConfig.Inject
	children int    // of the step, as far as is recorded
	retried  bool   // start those children again that have failed
}

// An Answer is the result of a [Call]. It is JSON.
type Answer struct {
	Step       string
	Op         Op
	Outcome    Outcome
	Error      string
	Final      bool          // the step is not tried again
	State      []byte        // nil if it has not changed
	RetryAfter time.Duration // the pause before the next attempt, drawn from the error or from Backoff

	err      error // the error whose text is Error; nil if only its text is known
	ends     error // err with the end of the ctx of Run, because of which the saga turns back
	refused  bool  // no call was made, although Outcome is OutcomeInterrupted
	broken   error // a panic outside of the step: the saga is stuck
	waits    bool  // the children of the step have not ended
	children int   // how many the step has started

	at      time.Time     // when the call ended; zero means Input.Now
	attempt int           // the number of the call's attempt
	took    time.Duration // how long the call took
	stalled int           // the number of attempts or refusals that EventStalled reports, or zero
}

// Interrupted returns the answer of a call that the engine has lost, because its process died for example. It does not
// count as an attempt; the step may have taken effect.
func (c Call) Interrupted(err error) Answer {
	return Answer{
		Step: c.Step, Op: c.Op, Outcome: OutcomeInterrupted, Error: storable(err.Error()), RetryAfter: leastPause, err: err,
	}
}

// cause returns the error of an attempt. Of an answer that was JSON, it is the text.
func (a *Answer) cause() error {
	if a.err != nil || a.Error == "" || a.Outcome == OutcomeDone {
		return a.err
	}
	err := recorded(a.Error)
	switch {
	case a.Outcome == OutcomeDeclined:
		return Void(err)
	case a.Final:
		return Abort(err)
	}
	return err
}

// decide changes the machine according to what has happened, and returns what to do next. It is the only driver of a
// saga: Run, Runner and Operate perform what it returns.
func (m *machine) decide(in *Input) (d Decision) {
	if m.changed || in.runner.lease == 0 {
		m.log, m.changed = nil, false
	}
	m.Now = in.Now
	m.learn(in.Signals)
	m.resume(in)
	for _, a := range in.Answers {
		if a = m.take(a, in); in.runner.lease > 0 {
			d.answers = append(d.answers, a)
		}
	}
	if in.runner.cancel != nil {
		m.cancel(*in.runner.cancel)
	}
	if op := in.Operation; op != nil {
		if err := m.operate(op); err != nil {
			d.NotAllowed = err.Error()
		}
	}
	if in.ended != nil {
		m.wishBack(m.late(in.ended))
	}
	m.advance(in.Now)
	if in.runner.lease > 0 && !in.runner.idle {
		var e store.Entry
		if e, d.wakeIn, d.release = m.release(in.Now, in.runner.stops, in.runner.lease); d.release && e.Kind != "" {
			m.note(e)
		}
		if d.release {
			m.doubt(false)
		}
		if m.changed && len(m.log) == 0 {
			m.note(store.Entry{Kind: eventResumed})
		}
	}
	if !in.runner.idle && !in.runner.stops && (!m.changed || in.runner.lease == 0) {
		d.Calls = m.calls(in.Now)
	}
	m.rest(in, &d)
	d.Snapshot, d.Status, d.changed, d.Log = Snapshot{m}, m.Status, m.changed, m.log
	return d
}

// learn adds signals to those that are known. The map may belong to an earlier machine or to a Call.
func (m *machine) learn(signals map[string][]byte) {
	if signals == nil {
		return
	}
	all := maps.Clone(m.signals)
	if all == nil {
		all = make(map[string][]byte, len(signals))
	}
	for name, payload := range signals {
		if _, known := all[name]; !known {
			all[name] = payload
		}
	}
	m.signals = all
}

// resume applies what a Runner finds out when it claims a saga.
func (m *machine) resume(in *Input) {
	if in.runner.look {
		m.lookAgain()
	}
	if in.runner.takenFrom != "" {
		m.takeOver(in.runner.takenFrom)
		if in.runner.stick != nil {
			m.Takeovers = max(m.Takeovers, 1) // even if this runner lost the saga itself: load must know
		}
	}
	if in.runner.revert != "" {
		m.revert(in.runner.revert)
	}
	if in.runner.doubt {
		m.doubt(true)
	}
	if in.runner.stick != nil {
		m.stick("", in.runner.stick)
	}
}

// take applies the answer of an attempt, and returns it as it was counted. An answer of no attempt in progress has
// come twice or too late, and is ignored.
func (m *machine) take(a Answer, in *Input) Answer {
	i := m.index(a.Step)
	if i < 0 || !m.work[i].busy || m.op(i) != a.Op {
		return a
	}
	if err := m.merge(i, a.State); err != nil {
		// The attempt may run again, on the state that the other one has left.
		if cause := a.cause(); cause != nil {
			err = fmt.Errorf("%w; %w", cause, err)
		}
		a.read(err, &m.p.steps[i], false)
		a.State, a.RetryAfter = nil, leastPause
	}
	now := in.Now
	if !a.at.IsZero() {
		now = a.at
	}
	switch {
	case a.waits:
		m.wait(i, a.children, now, now.Add(a.RetryAfter))
		return a
	case a.broken != nil:
		m.interrupted(i, &a, now)
		m.stick("", a.broken)
		return a
	case a.Outcome == OutcomeInterrupted:
		m.interrupted(i, &a, now)
		return a
	}
	if a.ends != nil {
		m.wishBack(a.Step, a.ends)
	}
	m.finish(i, &a, now)
	if a.ends != nil && (m.pivotDone() || m.pivotAwaitsAnswer()) {
		m.stick(a.Step, a.ends)
	}
	return a
}

// index returns the number of a step, or -1.
func (m *machine) index(step string) int {
	return slices.IndexFunc(m.Steps, func(st StepState) bool { return st.Name == step })
}

// merge merges an attempt's state into that of the saga. Steps that run in parallel each have a copy of the state; if
// two of them have changed the same field, the later one fails.
func (m *machine) merge(i int, state []byte) error {
	if state == nil || bytes.Equal(state, m.State) {
		return nil
	}
	if base := m.work[i].base; base != nil && !bytes.Equal(base, m.State) {
		var err error
		if state, err = m.p.merge(m.State, base, state); err != nil {
			return err
		}
	}
	m.State = state
	return nil
}

// operate applies an operator's action, or returns why it is not allowed.
func (m *machine) operate(op *Operation) (err error) {
	if m.Status.Ended() {
		return fmt.Errorf("it is %s", m.Status)
	}
	switch op.Action {
	case ActionCancel:
		if m.Status != Running {
			return fmt.Errorf("it is %s", m.Status)
		}
		if m.pivotDone() {
			return errors.New("its pivot is done")
		}
		m.cancel(op.Note)
		return nil
	case ActionAbandon:
		m.Status, m.LastError = Abandoned, storable(op.Note)
		m.note(store.Entry{Kind: EventAbandoned, Error: op.Note})
		return nil
	}
	if m.busy() > 0 {
		return errors.New("an attempt is in progress")
	}
	switch op.Action {
	case ActionRetry:
		m.retry(op.Note)
	case ActionSkip:
		err = m.skip(cmp.Or(op.Step, m.blocker()), op.Note)
	case ActionCompensate:
		err = m.compensate(op.Note)
	default:
		err = errors.New("Operation.Action must be cancel, retry, skip, compensate or abandon")
	}
	return err
}

// calls begins the attempts that may begin. Of the steps with a transaction, one at a time begins.
func (m *machine) calls(now time.Time) (calls []Call) {
	if !m.going() {
		return nil
	}
	inTx := false
	for i := range m.work {
		inTx = inTx || m.work[i].busy && m.hasTx(i)
	}
	for i := m.next(0, now); i >= 0; i = m.next(i+1, now) {
		if m.hasTx(i) {
			if inTx {
				continue
			}
			inTx = true
		}
		calls = append(calls, m.call(i))
		if m.p.chain {
			break
		}
	}
	return calls
}

// hasTx reports whether the next attempt of a step, or the one in progress, has a transaction.
func (m *machine) hasTx(i int) bool {
	_, tx := m.p.steps[i].calls(m.op(i))
	return tx != nil
}

// call begins an attempt of a step and returns its Call.
func (m *machine) call(i int) Call {
	st, d := &m.Steps[i], &m.p.steps[i]
	c := Call{
		Saga: m.p.name, Version: m.p.version, Step: st.Name, Op: m.op(i), Refusals: st.Refusals,
		State: m.State, Signals: m.signals, Timeout: d.timeout, carried: m.carried,
		Command: Command{Attempt: m.begin(i), Epoch: m.Epoch}, children: st.Children,
	}
	limit := d.attempts
	if c.Op == OpUndo {
		limit = d.undoAttempts
	}
	c.last = limit > 0 && c.Command.Attempt >= limit && !m.pivotDone() && !m.pivotMayHaveActed(i)
	// A step that has children waits for them, unless it has failed since.
	c.retried = st.Children > 0 && st.WaitingSince.IsZero()
	c.detached = c.Op == OpUndo || m.pivotDone()
	if !m.quiet || c.detached {
		c.Timeout = cmp.Or(c.Timeout, defaultTimeout)
	}
	if m.ID != "" {
		c.Command.ID = participant.ID(m.ID, c.Step, c.Op)
	}
	if !m.p.chain {
		m.work[i].base = m.State
	}
	return c
}

// rest decides which attempts in progress are to end, and when to decide again.
func (m *machine) rest(in *Input, d *Decision) {
	now := in.Now
	_, d.why = m.turning(now)
	for i := range m.work {
		if d.why != nil && m.useless(i) || m.work[i].busy && !m.going() && !m.quiet {
			d.Stop = append(d.Stop, m.Steps[i].Name)
		}
	}
	if !m.going() {
		return
	}
	d.deadline, _ = m.deadline(now)
	at, waits := m.wake(now, !m.quiet)
	switch {
	case in.runner.stops:
		d.WakeAt = d.deadline // no attempt begins any more
	case waits:
		d.WakeAt = at
	}
	if len(d.Calls) > 0 || m.busy() > 0 {
		return
	}
	switch {
	case in.ended != nil && waits && !m.Back && (m.pivotDone() || m.pivotAwaitsAnswer()):
		m.stick(m.late(in.ended)) // no attempt begins before it is time
	case m.quiet && !waits:
		m.stick("", errNothing)
	}
}
