package sagatemporal

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"go.temporal.io/sdk/activity"
	"go.temporal.io/sdk/temporal"
	"go.temporal.io/sdk/workflow"

	"github.com/go-resilience/resilience/saga"
)

const (
	heartbeatTimeout = 10 * time.Second // a worker that is silent for so long has died
	heartbeatEvery   = 2 * time.Second  // the SDK sends one after this time, and then one every 8s
	lostPause        = time.Second      // before the attempt that follows a lost one
	decideTimeout    = time.Minute
	endless          = 10 * 365 * 24 * time.Hour // the server needs a limit for an attempt without one
	maxDecisions     = 64                        // in a run, of up to 8 events each
	maxState         = 256 << 10                 // a decision has the state twice, and the server takes 2 MiB
	maxDecision      = 2000 << 10
)

// The types below are in histories. Fields may be added, but not renamed. Those of package saga are kept as the JSON
// that was recorded, because a replay must not depend on how another version of that package encodes them.

// A saved saga is the argument of the workflow.
type saved struct {
	Version  int               // of the definition
	Snapshot json.RawMessage   // a saga.Snapshot
	Answers  []json.RawMessage `json:",omitempty"` // each a saga.Answer since the last decision
	Signals  []string          `json:",omitempty"` // the names of those that are known
}

// A message is a signal or an operation: the argument of an update.
type message struct {
	Signal    string
	Payload   []byte
	Operation *saga.Operation

	done    bool   // in the workflow, once it was decided
	refused string // why it was not applied
}

// A decision is a saga.Decision, as far as the workflow needs it.
type decision struct {
	Version  int
	Status   saga.Status
	Snapshot json.RawMessage
	Instance json.RawMessage `json:",omitempty"` // once the saga has ended
	Calls    []call          `json:",omitempty"`
	Stop     []string        `json:",omitempty"`
	WakeAt   time.Time       `json:",omitzero"`
	Refused  string          `json:",omitempty"` // why the message was not applied
	Log      []saga.Entry    `json:",omitempty"` // for those who read the history
	Listed   bool            `json:",omitempty"` // the namespace has the search attribute
}

// A call is a saga.Call.
type call struct {
	Step    string
	Op      saga.Op
	Attempt int
	Timeout time.Duration
	Call    json.RawMessage
}

// A result is that of the workflow.
type result struct {
	Instance json.RawMessage
	Signals  []string `json:",omitempty"`
}

// A loop is a saga in its workflow.
type loop struct {
	saved
	saga     string
	running  map[string]workflow.CancelFunc // by step
	messages []*message
	canceled bool // a cancellation of the workflow is one of the messages
}

// run is the workflow. Decisions are made in a local activity, whose result is in the history. A later version of this
// module must issue the same commands for the same decisions: see TestReplay.
func (e *engine) run(ctx workflow.Context, was saved) (any, error) {
	info := workflow.GetInfo(ctx)
	l := &loop{saved: was, saga: info.WorkflowType.Name[len(typePrefix):], running: make(map[string]workflow.CancelFunc)}
	query := func() (*saga.Instance, error) { return e.instance(l.saga, &l.saved) }
	if err := workflow.SetQueryHandler(ctx, queryType, query); err != nil {
		return nil, err
	}
	if err := workflow.SetUpdateHandler(ctx, updateType, l.receive); err != nil {
		return nil, err
	}
	canceled := ctx.Err
	ctx, end := workflow.NewDisconnectedContext(ctx) // Undos run after a cancellation
	defer end()
	for n := 1; ; n++ {
		d := l.decide(ctx)
		for _, step := range d.Stop {
			if stop := l.running[step]; stop != nil {
				stop()
			}
		}
		for _, c := range d.Calls {
			l.call(ctx, c)
		}
		if d.Instance != nil && len(l.messages) == 0 {
			if err := workflow.Await(ctx, func() bool { return workflow.AllHandlersFinished(ctx) }); err != nil {
				return nil, err
			}
			return result{d.Instance, l.Signals}, nil
		}
		l.wait(ctx, d.WakeAt, canceled)
		full := n >= maxDecisions || workflow.GetInfo(ctx).GetContinueAsNewSuggested()
		if full && len(l.running) == 0 && len(l.messages) == 0 && workflow.AllHandlersFinished(ctx) {
			return nil, workflow.NewContinueAsNewError(ctx, info.WorkflowType.Name, l.saved)
		}
	}
}

// receive is the handler of updates. It returns why the message was not applied, or "".
func (l *loop) receive(ctx workflow.Context, m *message) (refused string, err error) {
	l.messages = append(l.messages, m)
	err = workflow.Await(ctx, func() bool { return m.done })
	return m.refused, err
}

// decide makes a decision about all answers, or about one message. If it fails, the saga must not: the panic fails the
// workflow task, and the server retries that, perhaps on a worker that has the definition.
func (l *loop) decide(ctx workflow.Context) decision {
	was, m := l.saved, &message{}
	if l.Answers = nil; len(was.Answers) == 0 && len(l.messages) > 0 {
		m, l.messages = l.messages[0], l.messages[1:]
	}
	var d decision
	err := workflow.ExecuteLocalActivity(workflow.WithLocalActivityOptions(ctx, workflow.LocalActivityOptions{
		StartToCloseTimeout: decideTimeout,
		RetryPolicy:         &temporal.RetryPolicy{MaximumAttempts: 1},
	}), decideType, l.saga, was, m, workflow.Now(ctx)).Get(ctx, &d)
	if err != nil {
		panic(err)
	}
	l.Version, l.Snapshot = d.Version, d.Snapshot
	m.done, m.refused = true, d.Refused
	if m.Signal != "" && d.Refused == "" && !slices.Contains(l.Signals, m.Signal) {
		l.Signals = append(l.Signals, m.Signal)
	}
	status := temporal.NewSearchAttributeKeyKeyword(statusField)
	if was, _ := workflow.GetTypedSearchAttributes(ctx).GetKeyword(status); d.Listed && was != string(d.Status) {
		if err := workflow.UpsertTypedSearchAttributes(ctx, status.ValueSet(string(d.Status))); err != nil {
			panic(err)
		}
	}
	return d
}

// call makes an attempt of a step, in an activity with one attempt: the saga decides whether another one follows.
func (l *loop) call(ctx workflow.Context, c call) {
	ctx, l.running[c.Step] = workflow.WithCancel(workflow.WithActivityOptions(ctx, workflow.ActivityOptions{
		StartToCloseTimeout: cmp.Or(c.Timeout, endless) + heartbeatTimeout, // Perform ends it before
		HeartbeatTimeout:    heartbeatTimeout,
		RetryPolicy:         &temporal.RetryPolicy{MaximumAttempts: 1},
		WaitForCancellation: true,
		Summary:             fmt.Sprintf("%s %s %d", c.Op, c.Step, c.Attempt),
	}))
	workflow.Go(ctx, func(ctx workflow.Context) {
		var a json.RawMessage
		if err := workflow.ExecuteActivity(ctx, typePrefix+l.saga, c.Call).Get(ctx, &a); err != nil {
			lost := saga.Call{Step: c.Step, Op: c.Op}.Interrupted(reason(err))
			lost.RetryAfter = lostPause
			a, _ = json.Marshal(lost) // strings and numbers can be encoded
		}
		delete(l.running, c.Step)
		l.Answers = append(l.Answers, a)
	})
}

// reason returns why an attempt has no answer.
func reason(err error) error {
	if _, is := errors.AsType[*temporal.TimeoutError](err); is {
		return errors.New("sagatemporal: the worker died, or did not return from the attempt")
	}
	return fmt.Errorf("sagatemporal: the attempt was not made or was canceled: %w", cmp.Or(errors.Unwrap(err), err))
}

// wait returns when there is something to decide.
func (l *loop) wait(ctx workflow.Context, wake time.Time, canceled func() error) {
	ctx, stop := workflow.WithCancel(ctx)
	defer stop()
	var timer workflow.Future
	if !wake.IsZero() {
		timer = workflow.NewTimer(ctx, max(wake.Sub(workflow.Now(ctx)), time.Millisecond))
	}
	_ = workflow.Await(ctx, func() bool { // its error would be the end of ctx
		if canceled() != nil && !l.canceled {
			l.canceled = true
			op := saga.Operation{Action: saga.ActionCancel, Note: "the workflow was canceled"}
			l.messages = append(l.messages, &message{Operation: &op})
		}
		return len(l.Answers) > 0 || len(l.messages) > 0 || timer != nil && timer.IsReady()
	})
}

// decide is the local activity.
func (e *engine) decide(
	ctx context.Context, name string, s saved, m *message, now time.Time,
) (out decision, err error) {
	was, in, version := saga.Snapshot{}, saga.Input{Now: now, Operation: m.Operation}, s.Version
	if err := json.Unmarshal(s.Snapshot, &was); err != nil {
		return out, err
	}
	in.Answers = make([]saga.Answer, len(s.Answers))
	for i, a := range s.Answers {
		if err := json.Unmarshal(a, &in.Answers[i]); err != nil {
			return out, err
		}
	}
	if m.Signal != "" {
		in.Signals = map[string][]byte{m.Signal: m.Payload}
	}
	if m.Operation != nil && m.Operation.Version != 0 {
		version = m.Operation.Version
	}
	d, err := e.definition(name, version)
	var next saga.Decision
	if err == nil {
		next, err = d.Decide(was, in)
		out.Refused = cmp.Or(next.NotAllowed, next.SignalsRefused[m.Signal])
	} else if version != s.Version {
		out.Refused = err.Error()
	}
	if in.Operation != nil && in.Operation.Version != 0 && out.Refused != "" { // Decide has then decided nothing
		version, in.Operation = s.Version, nil
		if d, err = e.definition(name, version); err == nil {
			next, err = d.Decide(was, in)
		}
	}
	if err != nil {
		return out, err
	}
	out.Version, out.Status, out.Stop, out.WakeAt, out.Log = version, next.Status, next.Stop, next.WakeAt, next.Log
	out.Listed = e.hasStatus(ctx)
	size := 0
	for _, c := range next.Calls {
		data, err := json.Marshal(c)
		if err != nil {
			return out, err
		}
		size += len(data)
		out.Calls = append(out.Calls, call{c.Step, c.Op, c.Command.Attempt, c.Timeout, data})
	}
	if next.Status.Ended() {
		if out.Instance, err = json.Marshal(d.Instance(next.Snapshot)); err != nil {
			return out, err
		}
	}
	if out.Snapshot, err = json.Marshal(next.Snapshot); err != nil {
		return out, err
	}
	if size += len(out.Snapshot) + len(out.Instance); size > maxDecision {
		return out, fmt.Errorf("sagatemporal: a decision has %d bytes, and the server takes %d", size, maxDecision)
	}
	return out, nil
}

// perform is the activity. It returns an error only if it makes no attempt.
func (e *engine) perform(ctx context.Context, c saga.Call) (saga.Answer, error) {
	d, err := e.definition(c.Saga, c.Version)
	if err != nil {
		return saga.Answer{}, err
	}
	returned := make(chan struct{})
	defer close(returned)
	go func() { // so that the server notices a dead worker, and the attempt its cancellation
		every := time.NewTicker(heartbeatEvery)
		defer every.Stop()
		for {
			select {
			case <-returned:
				return
			case <-every.C:
				activity.RecordHeartbeat(ctx)
			}
		}
	}()
	a := d.Perform(ctx, c)
	switch {
	case len(a.State) > maxState:
		a.Outcome, a.Final, a.State = saga.OutcomeMaybeApplied, true, nil
		a.Error = fmt.Sprintf("sagatemporal: the state is longer than %d bytes", maxState)
	case ctx.Err() != nil && a.Outcome == saga.OutcomeMaybeApplied:
		a.Outcome, a.Final, a.RetryAfter = saga.OutcomeInterrupted, false, lostPause // canceled, or the worker stops
	}
	return a, nil
}
