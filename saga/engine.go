package saga

import (
	"bytes"
	"cmp"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/go-resilience/resilience/saga/internal/participant"
	store "github.com/go-resilience/resilience/saga/sagastore"
)

// An Engine runs sagas durably. A [*Runner] is the engine on a [Store]. [Register] returns a typed [Handle] of an
// engine.
//
//	var _ saga.Engine = (*Engine)(nil)
//
// An engine keeps a [Snapshot] of each saga, and advances it with [Definition.Decide] only. It makes the calls that a
// Decision requests with [Definition.Perform], in any process, and passes their answers, signals and operations to the
// next Decide, until the saga has ended. [Run] and Runner are such loops.
//
// Package enginetest has the tests that an engine must pass. Before 1.0.0, a minor version may change the interface and
// the types that only engines use.
type Engine interface {
	// Register makes a definition known, so that its sagas run. It returns an error if another definition has its name
	// and version, or if the engine lacks a feature that it needs. Registering a definition again changes nothing.
	Register(d *Definition) error
	// Start starts a saga with an encoded state, or returns the saga that has the id. The error matches ErrExists if
	// that saga is of another definition.
	Start(ctx context.Context, d *Definition, id string, state []byte) (*Instance, error)
	// Get returns a saga. The error matches ErrNotFound if there is no such saga.
	Get(ctx context.Context, id string) (*Instance, error)
	// Wait returns the saga once it has ended or is stuck.
	Wait(ctx context.Context, id string) (*Instance, error)
	// Signal keeps the first payload of each name for the saga. The error matches ErrNotAllowed if the saga has turned
	// back or ended without the signal, or does not await it.
	Signal(ctx context.Context, id, name string, payload []byte) error
	// Operate applies an operator's action. The error matches ErrNotAllowed if the saga does not allow it.
	Operate(ctx context.Context, id string, op Operation) error
	// List returns a page of the sagas that the filter selects, the latest first. next is the After of the following
	// page, or "" if this is the last one.
	List(ctx context.Context, f Filter) (sagas []*Instance, next string, err error)
}

// A TxEngine is an Engine whose sagas can start, and be signaled, in a transaction of their database.
type TxEngine interface {
	Engine
	// StartTx is Start within tx: the saga exists if tx commits.
	StartTx(ctx context.Context, tx *sql.Tx, d *Definition, id string, state []byte) error
	// SignalTx is Signal within tx.
	SignalTx(ctx context.Context, tx *sql.Tx, id, name string, payload []byte) error
}

// A Definition is a [Saga] without its type, as an [Engine] sees it. It is safe for concurrent use.
type Definition struct{ p *program }

// Define returns the definition of sg, or the error of its Validate.
func Define[S any](sg *Saga[S]) (*Definition, error) {
	p, err := sg.program()
	if err != nil {
		return nil, err
	}
	return &Definition{p}, nil
}

// Name returns the Name of the saga.
func (d *Definition) Name() string { return d.p.name }

// Version returns the Version of the saga.
func (d *Definition) Version() int { return d.p.version }

// Needs reports which features the definition needs of its engine: transactions for a DoTx or UndoTx, and sagas that
// start other sagas.
func (d *Definition) Needs() (tx, children bool) { return d.p.needsTx, d.p.children }

// Begin returns the snapshot of a new saga with an encoded state. It returns an error if the id is empty, longer than
// 200 bytes, or not UTF-8, and if the state does not decode.
func (d *Definition) Begin(id string, state []byte, now time.Time) (Snapshot, error) {
	if err := participant.CheckID(id); err != nil {
		return Snapshot{}, err
	}
	if _, err := d.p.decode(state); err != nil {
		return Snapshot{}, err
	}
	m := newMachine(d.p)
	m.ID, m.Version, m.State, m.signals = id, d.p.version, bytes.Clone(state), map[string][]byte{}
	m.CreatedAt, m.UpdatedAt, m.Now, m.since = now, now, now, now
	if d.p.timeout > 0 {
		m.CompleteBy = now.Add(d.p.timeout)
	}
	return Snapshot{m}, nil
}

// Decide returns what to do next, given what has happened. It reads no clock, makes no calls and, apart from the
// Codec, depends on nothing but its arguments. An engine that replays its history must record the Decision, because
// a later version of this package may decide differently.
//
// An Operation with a Version moves a saga of another version to d. It must come alone, without Answers and Signals.
//
// The engine keeps the Decision's Snapshot before it makes the Calls. An Answer of a call that is not in progress is
// ignored. The error means that the snapshot is not one of the definition.
func (d *Definition) Decide(was Snapshot, in Input) (Decision, error) {
	if was.m == nil {
		return Decision{}, errors.New("saga: the Snapshot is empty: it must be one of Begin or Decide")
	}
	m := was.m.clone()
	in.ended, in.runner = nil, runnerInput{}
	if op := in.Operation; op != nil && op.Version == d.p.version && op.Version != 0 && m.Saga == d.p.name {
		if len(in.Answers) > 0 || len(in.Signals) > 0 {
			return Decision{}, errors.New("saga: the Input has Answers or Signals beside an Operation with a Version")
		}
		if err := m.operateAs(d.p, op); err != nil {
			return Decision{Snapshot: was, Status: was.m.Status, NotAllowed: err.Error()}, nil
		}
		in.Operation = nil
		return m.decide(&in), nil
	}
	if m.Saga != d.p.name || m.Version != d.p.version {
		return Decision{}, fmt.Errorf("saga: the Snapshot is one of %s version %d, not of %s version %d",
			m.Saga, m.Version, d.p.name, d.p.version)
	}
	if m.p != d.p {
		if err := m.bind(d.p); err != nil {
			return Decision{}, err
		}
	}
	return m.decide(&in), nil
}

// Perform makes a call that a Decision requested. If a step panics, the Answer has the panic as its error. A step with
// a transaction or with children needs a [Runner]: its Answer has an error that matches ErrNoTx.
func (d *Definition) Perform(ctx context.Context, c Call) Answer {
	if c.Saga != d.p.name || c.Version != d.p.version || d.p.index(c.Step) < 0 {
		return c.Interrupted(fmt.Errorf("saga: step %s of %s version %d is not one of %s version %d",
			c.Step, c.Saga, c.Version, d.p.name, d.p.version))
	}
	t := &attempt{Call: c, p: d.p}
	t.perform(ctx)
	return t.answer
}

// Instance returns the saga of a snapshot. It returns an empty Instance for the zero Snapshot.
func (d *Definition) Instance(s Snapshot) *Instance {
	if s.m == nil {
		return &Instance{}
	}
	in := s.m.clone().Instance
	in.complete(d.p)
	return &in
}

// An Input has the events of a saga since its last [Decision].
type Input struct {
	Now       time.Time         // the present time
	Answers   []Answer          // of calls that have ended
	Signals   map[string][]byte // new ones, by name
	Operation *Operation        // an operator's action, such as ActionCancel, or nil

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
	overdue   []overdue
	stick     error // make the saga stuck
}

// An overdue attempt has not returned although its ctx ended a lease ago.
type overdue struct {
	step    string
	attempt int
}

// A Decision has the next actions for a saga. It can be encoded as JSON.
type Decision struct {
	Snapshot   Snapshot  // the saga after the decision, to be kept before the Calls are made
	Status     Status    // after the decision
	Calls      []Call    // to make now
	Stop       []string  // steps whose calls in progress are to be canceled
	WakeAt     time.Time // when to decide again if nothing happens before; zero means never
	Log        []Entry   // the new entries of the saga's log
	NotAllowed string    // why Input.Operation was refused, or ""
	// SignalsRefused has, by name, why new signals were not kept: the saga has turned back or ended without them, or
	// has no step that awaits them.
	SignalsRefused map[string]string

	why      error         // the cause with which the calls in Stop are canceled
	changed  bool          // it must be recorded before another attempt begins
	deadline time.Time     // when the saga turns back for lack of time, or zero
	release  bool          // a Runner gives the saga up
	wakeIn   time.Duration // when the saga is then due again
	answers  []Answer      // the Input's, as they were counted
}

// A Snapshot is a saga between two decisions, without its log. It is opaque, and a later version of this package can
// read it. It does not change: Decide returns another one.
type Snapshot struct{ m *machine }

// A snapshot is the JSON of a Snapshot. Fields may be added, and V is increased if a version of this package that does
// not know them must not read it.
type snapshot struct {
	V         int               `json:"v"`
	ID        string            `json:"id"`
	Saga      string            `json:"saga"`
	Version   int               `json:"version"`
	Status    Status            `json:"status"`
	State     []byte            `json:"state"`
	Progress  json.RawMessage   `json:"progress"`
	Seq       int64             `json:"seq"`
	Failures  int               `json:"failures,omitempty"`
	LastError string            `json:"last_error,omitempty"`
	Signals   map[string][]byte `json:"signals,omitempty"`
	Calls     map[string][]byte `json:"calls,omitempty"` // in progress, with their copies of the state
	WishStep  string            `json:"wish_step,omitempty"`
	Wish      string            `json:"wish,omitempty"`

	CompleteBy time.Time `json:"complete_by,omitzero"`
	CreatedAt  time.Time `json:"created_at"`
	UpdatedAt  time.Time `json:"updated_at"`
	Now        time.Time `json:"now"`
}

const snapshotVersion = 1

// MarshalJSON implements json.Marshaler.
func (s Snapshot) MarshalJSON() ([]byte, error) {
	m := s.m
	if m == nil {
		return []byte("null"), nil
	}
	j := snapshot{
		V: snapshotVersion, ID: m.ID, Saga: m.Saga, Version: m.Version, Status: m.Status, State: m.State,
		Progress: m.encode(), Seq: m.Seq, Failures: m.Failures, LastError: m.LastError, Signals: m.signals,
		CompleteBy: m.CompleteBy, CreatedAt: m.CreatedAt, UpdatedAt: m.UpdatedAt, Now: m.Now,
	}
	for i := range m.work {
		if m.work[i].busy {
			if j.Calls == nil {
				j.Calls = make(map[string][]byte)
			}
			j.Calls[m.Steps[i].Name] = m.work[i].base
		}
	}
	if m.wish != nil {
		j.WishStep, j.Wish = m.wishStep, storable(m.wish.Error())
	}
	return json.Marshal(&j)
}

// UnmarshalJSON implements json.Unmarshaler.
func (s *Snapshot) UnmarshalJSON(data []byte) error {
	var j *snapshot
	if err := json.Unmarshal(data, &j); err != nil || j == nil {
		s.m = nil
		return err
	}
	if j.V > snapshotVersion {
		return fmt.Errorf("saga: a Snapshot of version %d: this version of the package reads up to %d", j.V, snapshotVersion)
	}
	in, err := decode(&store.Record{
		ID: j.ID, Saga: j.Saga, Version: j.Version, Status: j.Status, State: j.State, Progress: j.Progress, Seq: j.Seq,
		Failures: j.Failures, LastError: j.LastError, CompleteBy: j.CompleteBy,
		CreatedAt: j.CreatedAt, UpdatedAt: j.UpdatedAt, Now: j.Now,
	})
	if err != nil {
		return err
	}
	m := &machine{Instance: *in, signals: j.Signals, wishStep: j.WishStep, work: make([]work, len(in.Steps))}
	m.cause, m.wish = reason(m.Cause), reason(j.Wish)
	if m.answered {
		m.cause = Permanent(m.cause)
	}
	if m.signals == nil {
		m.signals = map[string][]byte{}
	}
	for i := range m.Steps {
		w := &m.work[i]
		w.base, w.busy = j.Calls[m.Steps[i].Name]
	}
	s.m = m
	return nil
}

// A Call is an attempt of a step. It can be encoded as JSON.
type Call struct {
	Saga     string // the Name of the definition
	Version  int    // of the definition
	Step     string // the Name of the step
	Op       Op
	Command  Command
	Refusals int               // consecutive refusals before this attempt
	State    []byte            // encoded
	Signals  map[string][]byte // by name
	Timeout  time.Duration     // zero means none

	last     bool   // no attempt follows if this one fails
	detached bool   // the end of Run's ctx does not end the call
	carried  string // see RunnerConfig.Inject
	children int    // of the step, as far as is recorded
	retried  bool   // start those children again that have failed
}

// An Answer is the result of a [Call]. It can be encoded as JSON.
type Answer struct {
	Step       string        // of the Call
	Op         Op            // of the Call
	Outcome    Outcome       // the result
	Error      string        // the text of the error, or ""
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
		return Declined(err)
	case a.Final:
		return Permanent(err)
	}
	return err
}

// decide changes the machine according to what has happened, and returns what to do next. It is the only driver of a
// saga: Run, Runner and Operate perform what it returns.
func (m *machine) decide(in *Input) (d Decision) {
	engine := in.runner.lease == 0 && !m.quiet
	if (m.changed || in.runner.lease == 0) && !m.keepLog {
		m.log, m.changed = nil, false
	}
	m.keepLog = false
	if engine && m.Seq == 0 {
		m.note(store.Entry{Kind: EventCreated})
	}
	m.Now = in.Now
	d.SignalsRefused = m.learn(in.Signals, in.runner.lease > 0)
	m.resume(in)
	for _, a := range in.Answers {
		if a = m.take(a, in); in.runner.lease > 0 {
			d.answers = append(d.answers, a)
		}
	}
	for _, a := range in.runner.overdue {
		m.hang(a.step, a.attempt)
	}
	if in.runner.cancel != nil {
		m.cancel(*in.runner.cancel)
	}
	if op := in.Operation; op != nil {
		if err := m.operate(op, nil); err != nil {
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
			m.note(store.Entry{Kind: EventResumed})
		}
	}
	if !in.runner.idle && !in.runner.stops && (!m.changed || in.runner.lease == 0) {
		d.Calls = m.calls(in.Now)
	}
	m.rest(in, &d)
	d.Snapshot, d.Status, d.changed, d.Log = Snapshot{m}, m.Status, m.changed, m.log
	if engine {
		m.number(d.Log)
	}
	return d
}

// number completes the entries of an engine that has no store to do it.
func (m *machine) number(log []Entry) {
	for i := range log {
		m.Seq++
		log[i].Seq, log[i].Epoch, log[i].At = m.Seq, m.Epoch, m.Now
	}
	if len(log) > 0 {
		m.UpdatedAt = m.Now
	}
}

// learn adds signals to those that are known, the first of each name, and returns why it does not. If they are stored,
// they were admitted when they were sent. The map may belong to an earlier machine or to a Call.
func (m *machine) learn(signals map[string][]byte, stored bool) (refused map[string]string) {
	if signals == nil {
		return nil
	}
	all := maps.Clone(m.signals)
	if all == nil {
		all = make(map[string][]byte, len(signals))
	}
	for name, payload := range signals {
		if _, known := all[name]; known {
			continue
		}
		if why := refuseSignal(&m.Instance, m.p, name); why != "" && !stored {
			if refused == nil {
				refused = make(map[string]string)
			}
			refused[name] = why
			continue
		}
		all[name] = payload
	}
	m.signals = all
	return refused
}

// resume applies what a Runner finds out when it claims a saga.
func (m *machine) resume(in *Input) {
	if in.runner.look {
		m.takeAway()
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
	m.returned(i)
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

// operateAs applies an operation that makes target the definition of the saga. The next decision continues its log.
func (m *machine) operateAs(target *program, op *Operation) error {
	m.log, m.changed = nil, false
	if err := m.operate(op, target); err != nil {
		return err
	}
	m.keepLog = true
	return nil
}

// operate applies an operator's action, or returns why it is not allowed. target is the definition of op.Version.
func (m *machine) operate(op *Operation, target *program) (err error) {
	if m.Status.Ended() {
		return fmt.Errorf("it is %s", m.Status)
	}
	if seq := m.Seq + int64(len(m.log)); op.Seq != 0 && op.Seq != seq && op.Action != ActionCancel {
		return fmt.Errorf("its log has grown from %d entries to %d", op.Seq, seq)
	}
	note := op.note(m.Version)
	if op.replaces() {
		was := m.clone()
		if err := m.replace(op, target); err != nil {
			*m = *was
			return err
		}
		defer func() {
			if err != nil {
				*m = *was
			}
		}()
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
	case ActionAbandon: // which replaces nothing
		m.Status, m.LastError = Abandoned, storable(op.Note)
		m.note(store.Entry{Kind: EventAbandoned, Error: op.Note})
		return nil
	}
	if m.busy() > 0 {
		return errors.New("an attempt is in progress")
	}
	switch op.Action {
	case ActionRetry:
		m.retry(note)
	case ActionSkip:
		err = m.skip(cmp.Or(op.Step, m.blocker()), note)
	case ActionCompensate:
		err = m.compensate(note)
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
		State: m.State, Signals: m.signals, Timeout: max(d.timeout, 0), carried: m.carried,
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
	case in.ended != nil && waits && !m.TurnedBack && (m.pivotDone() || m.pivotAwaitsAnswer()):
		m.stick(m.late(in.ended)) // no attempt begins before it is time
	case m.quiet && !waits:
		m.stick("", errNothing)
	}
}
