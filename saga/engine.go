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

	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/saga/internal/participant"
	store "github.com/go-resilience/resilience/saga/sagastore"
)

// An Engine runs sagas durably. A [*Runner] is the engine that keeps sagas in a [Store]. [Register] registers a
// definition with an engine, and returns a [Handle] for it.
//
//	var _ saga.Engine = (*Engine)(nil)
//
// An engine stores a [Snapshot] of each saga. To change the Snapshot, the engine must call [Definition.Decide]. Decide
// returns a [Decision], which has the new Snapshot. The engine performs the Decision's Calls with [Definition.Perform],
// in any process. Until the saga has ended, the engine calls Decide again with new events: answers of calls, signals
// and operations.
//
// Package enginetest has the tests that an engine must pass. Until version 1.0.0, a minor version may change Engine and
// the types that only engines use.
type Engine interface {
	// Register registers a definition. The engine then runs the definition's sagas. Register returns an error if another
	// definition with the same name and version is registered, or if the engine lacks a feature that the definition needs.
	// Registering the same definition again changes nothing.
	Register(d *Definition) error
	// Start starts a saga with an encoded state, or returns the saga that has the id. The error matches ErrExists if a
	// saga of another definition has the id.
	Start(ctx context.Context, d *Definition, id string, state []byte) (*Instance, error)
	// Get returns a saga. The error matches ErrNotFound if there is no such saga.
	Get(ctx context.Context, id string) (*Instance, error)
	// Wait returns the saga once it has ended or is stuck. If ctx is done before, the error matches the error and the
	// cause of ctx.
	Wait(ctx context.Context, id string) (*Instance, error)
	// Signal records a signal for the saga. The engine keeps only the first payload of each name. The error matches
	// ErrNotAllowed if no step of the saga awaits the signal, or if the saga turned back or ended before the signal
	// arrived.
	Signal(ctx context.Context, id, name string, payload []byte) error
	// Operate applies an operator's action. The error matches ErrNotAllowed if the saga does not allow the action.
	Operate(ctx context.Context, id string, op Operation) error
	// List returns a page of the sagas that the filter selects, the latest first. To get the following page, set
	// Filter.After to next, the second result. If there are no more pages, next is "".
	List(ctx context.Context, f Filter) (sagas []*Instance, next string, err error)
}

// A TxEngine is an Engine that can start and signal a saga in a transaction of the database that stores the saga.
type TxEngine interface {
	Engine
	// StartTx is like Start, but starts the saga in tx. The saga exists if tx commits.
	StartTx(ctx context.Context, tx *sql.Tx, d *Definition, id string, state []byte) error
	// SignalTx is like Signal, but records the signal in tx.
	SignalTx(ctx context.Context, tx *sql.Tx, id, name string, payload []byte) error
}

// A Definition is a [Saga] without its type parameter, for use by an [Engine]. A Definition is safe for concurrent use.
type Definition struct{ p *program }

// Define returns the definition of sg, or the error of sg.Validate.
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

// Needs reports which features the definition needs of its engine. The result tx is true if a step has a DoTx or
// UndoTx, which needs transactions. The result children is true if a step has a Child, which starts other sagas.
func (d *Definition) Needs() (tx, children bool) { return d.p.needsTx, d.p.children }

// Begin returns the snapshot of a new saga with an encoded state. Begin returns an error if the id is empty, longer
// than 200 bytes or not UTF-8, or if the state cannot be decoded.
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

// Decide returns the next actions for a saga, given the saga's latest snapshot (was) and the events since that snapshot
// (in). Decide reads no clock and performs no calls. Apart from the Codec, the result of Decide depends only on its
// arguments. An engine that replays its history must record each Decision, because a later version of this package may
// decide differently.
//
// If in.Operation has a Version, Decide moves a saga of another version to d. An Input with such an Operation must have
// no Answers and no Signals.
//
// The engine stores the Decision's Snapshot before it performs the Calls. Decide ignores an Answer to a call that is
// not in progress, for example an Answer that arrives twice or after [Call.Interrupted]. Decide returns an error if the
// snapshot does not match the definition.
func (d *Definition) Decide(was Snapshot, in Input) (Decision, error) {
	if was.m == nil {
		return Decision{}, errors.New("saga: Snapshot is empty: must be one of Begin or Decide")
	}
	m := was.m.clone()
	in.ended, in.runner = nil, runnerInput{}
	if op := in.Operation; op != nil && op.Version == d.p.version && op.Version != 0 && m.Saga == d.p.name {
		if len(in.Answers) > 0 || len(in.Signals) > 0 {
			return Decision{}, errors.New("saga: Input has Answers or Signals beside an Operation with a Version")
		}
		if err := m.operateAs(d.p, op); err != nil {
			return Decision{Snapshot: was, Status: was.m.Status, NotAllowed: err.Error()}, nil
		}
		in.Operation = nil
		return m.decide(&in), nil
	}
	if m.Saga != d.p.name || m.Version != d.p.version {
		return Decision{}, fmt.Errorf("saga: Snapshot is one of %s version %d, not of %s version %d",
			m.Saga, m.Version, d.p.name, d.p.version)
	}
	if m.p != d.p {
		if err := m.bind(d.p); err != nil {
			return Decision{}, err
		}
	}
	return m.decide(&in), nil
}

// Perform performs a call that a Decision requested, and returns its answer. If the step panics, the Answer has an
// error that reports the panic. A step with a transaction or with children needs a [Runner]. With another engine, the
// step's Answer has an error that matches ErrNoTx.
func (d *Definition) Perform(ctx context.Context, c Call) Answer {
	if c.Saga != d.p.name || c.Version != d.p.version || d.p.index(c.Step) < 0 {
		return c.Interrupted(fmt.Errorf("saga: step %s of %s version %d is not one of %s version %d",
			c.Step, c.Saga, c.Version, d.p.name, d.p.version))
	}
	t := &attempt{Call: c, p: d.p}
	t.perform(ctx)
	return t.answer
}

// Instance returns the Instance that describes the saga of a snapshot. For the zero Snapshot, the Instance is empty.
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
	Now       time.Time         // the current time
	Answers   []Answer          // the answers of calls that have ended
	Signals   map[string][]byte // the payloads of new signals, by name
	Operation *Operation        // an operator's action, such as ActionCancel, or nil

	ended  error // the error of the ctx of Run if that ctx is done, or nil
	runner runnerInput
}

// A runnerInput is the part of an [Input] that only a Runner has.
type runnerInput struct {
	// lease is the Runner's LeaseTTL, or zero for another engine. If lease is set and a Decision must be recorded, that
	// Decision has no Calls. The next Decision, after the first one was recorded, has them.
	lease time.Duration
	idle  bool // start no attempt and do not release the saga
	stops bool // the Runner stops: start no attempt, and release the saga once none is in progress

	takenFrom string  // the previous owner, if it crashed; otherwise ""
	look      bool    // read the children again now
	cancel    *string // the note of a recorded request to turn back, or nil
	revert    string  // why a parent turns this completed saga back, or ""
	doubt     bool    // attempts that are missing in the snapshot may be in progress
	overdue   []overdue
	stick     error // the error because of which the saga is stuck, or nil
}

// An overdue is an attempt that has not returned a LeaseTTL after its timeout.
type overdue struct {
	step    string
	attempt int
}

// A Decision has the next actions for a saga. A Decision can be encoded as JSON.
type Decision struct {
	Snapshot   Snapshot  // the saga after the decision; store it before the Calls are performed
	Status     Status    // the saga's status after the decision
	Calls      []Call    // the calls to perform now
	Stop       []string  // the steps whose calls in progress must be canceled
	WakeAt     time.Time // the time of the next Decide if nothing happens before; zero means never
	Log        []Entry   // the new entries of the saga's log
	NotAllowed string    // why Input.Operation is not allowed, or ""
	// SignalsRefused maps the name of each new signal that was not recorded to the reason. A signal is not recorded if no
	// step awaits it, or if the saga turned back or ended before the signal arrived.
	SignalsRefused map[string]string

	why      error         // the cause with which the calls in Stop are canceled
	changed  bool          // the decision must be recorded before another attempt starts
	deadline time.Time     // the time when the saga turns back because of Saga.Timeout, or zero
	release  bool          // a Runner releases the saga
	wakeIn   time.Duration // the time after which a released saga is due again
	answers  []Answer      // the answers of the Input, as they were counted
}

// A Snapshot has all data of a saga between two decisions, except its log. A Snapshot is opaque, and later versions of
// this package can read it. A Snapshot never changes: Decide returns a new Snapshot.
type Snapshot struct{ m *machine }

// A snapshot is the JSON form of a Snapshot. A new field does not need a new V, unless older versions of this package,
// which do not know the field, must not read the Snapshot.
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
	Calls     map[string][]byte `json:"calls,omitempty"`   // the calls in progress: the state that each step received
	Numbers   map[string]int64  `json:"numbers,omitempty"` // the Numbers of the calls in progress, by step
	Begun     int64             `json:"begun,omitempty"`
	WishStep  string            `json:"wish_step,omitempty"`
	Wish      string            `json:"wish,omitempty"`
	Answered  bool              `json:"wish_answered,omitempty"` // Wish is the text of an answer

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
		Progress: m.encode(), Seq: m.Seq, Failures: m.Failures, LastError: m.LastError, Signals: m.signals, Begun: m.begun,
		CompleteBy: m.CompleteBy, CreatedAt: m.CreatedAt, UpdatedAt: m.UpdatedAt, Now: m.Now,
	}
	for i := range m.work {
		if m.work[i].busy {
			if j.Calls == nil {
				j.Calls, j.Numbers = make(map[string][]byte), make(map[string]int64)
			}
			j.Calls[m.Steps[i].Name], j.Numbers[m.Steps[i].Name] = m.work[i].base, m.work[i].number
		}
	}
	if m.wish != nil {
		j.WishStep, j.Wish, j.Answered = m.wishStep, storable(m.wish.Error()), behavior.IsAnswered(m.wish)
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
		return fmt.Errorf("saga: Snapshot has version %d: this version of the package reads up to %d", j.V, snapshotVersion)
	}
	in, err := decode(&store.Record{
		ID: j.ID, Saga: j.Saga, Version: j.Version, Status: j.Status, State: j.State, Progress: j.Progress, Seq: j.Seq,
		Failures: j.Failures, LastError: j.LastError, CompleteBy: j.CompleteBy,
		CreatedAt: j.CreatedAt, UpdatedAt: j.UpdatedAt, Now: j.Now,
	})
	if err != nil {
		return err
	}
	m := &machine{
		Instance: *in, signals: j.Signals, wishStep: j.WishStep, work: make([]work, len(in.Steps)), begun: j.Begun,
	}
	m.cause, m.wish = reason(m.Cause), reason(j.Wish)
	if m.answered {
		m.cause = Permanent(m.cause)
	}
	if j.Answered {
		m.wish = Permanent(m.wish)
	}
	if m.signals == nil {
		m.signals = map[string][]byte{}
	}
	for i := range m.Steps {
		w := &m.work[i]
		w.base, w.busy = j.Calls[m.Steps[i].Name]
		w.number = j.Numbers[m.Steps[i].Name]
	}
	s.m = m
	return nil
}

// A Call is an attempt of a step. A Call can be encoded as JSON.
type Call struct {
	Saga     string // the Name of the definition
	Version  int    // the Version of the definition
	Step     string // the Name of the step
	Op       Op
	Number   int64 // the number of the call among the saga's calls, from 1
	Command  Command
	Refusals int               // consecutive refusals before this attempt
	State    []byte            // the saga's encoded state
	Signals  map[string][]byte // the payloads of the saga's signals, by name
	Timeout  time.Duration     // the maximum duration of the call; zero means no limit

	last     bool   // no attempt follows if this one fails
	detached bool   // the call is not canceled if Run's ctx is canceled
	carried  string // the text that RunnerConfig.Inject returned
	children int    // the recorded number of the step's children
	retried  bool   // start the failed children again
}

// An Answer is the result of a [Call]. An Answer can be encoded as JSON.
type Answer struct {
	Step       string        // the Step of the Call
	Op         Op            // the Op of the Call
	Number     int64         // the Number of the Call; Decide ignores the Answer if another call is in progress
	Outcome    Outcome       // the kind of the result
	Error      string        // the text of the error, or ""
	Final      bool          // the step is not retried
	State      []byte        // the encoded state after the call; nil if the state has not changed
	RetryAfter time.Duration // the pause before the next attempt, from the error or from Backoff

	err      error // the error whose text is the field Error; nil if only the text is known
	ends     error // err joined with the reason why Run's ctx is done, or nil; the saga turns back
	refused  bool  // a policy refused the call, even if Outcome is OutcomeInterrupted
	broken   error // a panic outside the step, such as in a Codec; the saga is stuck
	waits    bool  // the children of the step have not ended
	unread   error // the store's error, if waits is true because the children could not be read or started; or nil
	children int   // the number of children that the step has started

	at      time.Time     // the time when the call ended; zero means Input.Now
	attempt int           // the number of the call's attempt
	took    time.Duration // the duration of the call
	stalled int           // the number of attempts or refusals that EventStalled reports, or zero
}

// Interrupted returns the answer of a call whose result the engine has lost, for example because a process died. The
// call does not count as an attempt, but the step may have taken effect.
func (c Call) Interrupted(err error) Answer {
	return Answer{
		Step: c.Step, Op: c.Op, Number: c.Number, Outcome: OutcomeInterrupted,
		Error: storable(err.Error()), RetryAfter: leastPause, err: err,
	}
}

// cause returns the error of an attempt. If the answer was decoded from JSON, only the text of the error is known.
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

// decide changes the machine according to the events in in, and returns the next actions. All changes to a saga go
// through decide: Run, Runner and Operate only perform the actions that decide returns.
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

// number sets the Seq, Epoch and At of log entries, for an engine that has no store to do so.
func (m *machine) number(log []Entry) {
	for i := range log {
		m.Seq++
		log[i].Seq, log[i].Epoch, log[i].At = m.Seq, m.Epoch, m.Now
	}
	if len(log) > 0 {
		m.UpdatedAt = m.Now
	}
}

// learn adds new signals to the known signals. It keeps only the first signal of each name. It returns, by name, the
// reasons why it did not add a signal. Signals from a store are always added, because they were admitted when they were
// sent. learn does not modify the map m.signals, which may belong to an earlier machine or to a Call.
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

// resume applies the facts that a Runner finds out when it claims a saga.
func (m *machine) resume(in *Input) {
	if in.runner.look {
		m.takeAway()
		m.lookAgain()
	}
	if in.runner.takenFrom != "" {
		m.takeOver(in.runner.takenFrom)
		if in.runner.stick != nil {
			m.Takeovers = max(m.Takeovers, 1) // 0 if this runner itself lost the saga, but load needs 1 or more
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

// take applies the answer of an attempt, and returns the counted answer, which may differ from a. If the attempt is not
// in progress, the answer has come twice or too late, and is ignored.
func (m *machine) take(a Answer, in *Input) Answer {
	i := m.index(a.Step)
	if i < 0 || !m.work[i].busy || m.op(i) != a.Op || m.work[i].number != a.Number {
		return a
	}
	m.returned(i)
	if err := m.merge(i, a.State); err != nil {
		// The attempt may be retried with the current state, which has the changes of the other attempt.
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
	case a.waits && a.unread != nil:
		m.interrupted(i, &a, now)
		m.LastError = storable(a.unread.Error())
		m.Steps[i].Error = m.LastError // with an error, the step does not wait until its children end
		return a
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

// index returns the index of a step, or -1.
func (m *machine) index(step string) int {
	return slices.IndexFunc(m.Steps, func(st StepState) bool { return st.Name == step })
}

// merge merges the state after an attempt into the state of the saga. Steps that run in parallel each have a copy of
// the state. If two of them have changed the same field, the step that ends later fails.
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

// operateAs applies an operation that makes target the definition of the saga. The next decision appends to the log
// entries of this operation.
func (m *machine) operateAs(target *program, op *Operation) error {
	m.log, m.changed = nil, false
	if err := m.operate(op, target); err != nil {
		return err
	}
	m.keepLog = true
	return nil
}

// operate applies an operator's action, or returns the reason why it is not allowed. target is the definition of
// version op.Version.
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
	case ActionAbandon: // State and Version are not set: replace does not allow them
		m.Status, m.LastError = Abandoned, storable(op.Note)
		m.note(store.Entry{Kind: EventAbandoned, Error: op.Note})
		return nil
	}
	if m.busy() > 0 {
		return errors.New("attempt is in progress")
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

// calls starts the attempts that may start, and returns their Calls. At most one attempt with a transaction is in
// progress.
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

// call starts an attempt of a step, and returns its Call.
func (m *machine) call(i int) Call {
	st, d := &m.Steps[i], &m.p.steps[i]
	c := Call{
		Saga: m.p.name, Version: m.p.version, Step: st.Name, Op: m.op(i), Refusals: st.Refusals,
		State: m.State, Signals: m.signals, Timeout: max(d.timeout, 0), carried: m.carried,
		Command: Command{Attempt: m.begin(i), Epoch: m.Epoch}, children: st.Children,
	}
	c.Number = m.work[i].number
	limit := d.attempts
	if c.Op == OpUndo {
		limit = d.undoAttempts
	}
	c.last = limit > 0 && c.Command.Attempt >= limit && !m.pivotDone() && !m.pivotMayHaveActed(i)
	// A step that has started children usually waits for them. If it does not wait, it has failed and is being retried.
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

// rest sets which attempts in progress must be canceled, and when to decide again.
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
		d.WakeAt = d.deadline // only the deadline matters, since no attempt starts any more
	case waits:
		d.WakeAt = at
	}
	if len(d.Calls) > 0 || m.busy() > 0 {
		return
	}
	switch {
	case in.ended != nil && waits && !m.TurnedBack && (m.pivotDone() || m.pivotAwaitsAnswer()):
		m.stick(m.late(in.ended)) // the saga must not wait for its next attempt, because ctx is done
	case m.quiet && !waits:
		m.stick("", errNothing)
	}
}
