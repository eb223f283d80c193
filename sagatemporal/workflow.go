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
	heartbeatTimeout = 10 * time.Second // a worker without a heartbeat for this time has died
	heartbeatEvery   = 2 * time.Second  // the SDK sends the first heartbeat after this time, and then one every 8s
	lostPause        = time.Second      // the pause before the attempt that follows a lost attempt
	decideTimeout    = time.Minute
	// endless is the timeout of an attempt without a Timeout, or with a longer one, because the server needs a limit.
	endless      = 10 * 365 * 24 * time.Hour
	maxDecisions = 64        // the maximum number of decisions in a run; each has up to 8 events
	maxState     = 256 << 10 // a decision contains the state twice, and the server accepts 2 MiB
	maxDecision  = 2000 << 10
)

// The types below are encoded in workflow histories, so fields may be added, but not renamed. Values of package saga
// are stored as the JSON that was recorded. Otherwise a replay would depend on how another version of that package
// encodes them.

// A saved is the state of a saga between two decisions. It is the argument of the workflow.
type saved struct {
	Version  int               // the definition's version
	Snapshot json.RawMessage   // an encoded saga.Snapshot
	Answers  []json.RawMessage `json:",omitempty"` // the answers since the last decision; each is an encoded saga.Answer
	Signals  []string          `json:",omitempty"` // the names of the signals that the saga has
}

// A message is a signal or an operator's operation. It is the argument of a workflow update.
type message struct {
	Signal    string
	Payload   []byte
	Operation *saga.Operation

	done    bool   // whether the workflow has decided about the message
	refused string // the reason why the message was not applied; "" if it was
}

// A decision is the part of a saga.Decision that the workflow needs.
type decision struct {
	Version  int
	Status   saga.Status
	Snapshot json.RawMessage
	Instance json.RawMessage `json:",omitempty"` // an encoded saga.Instance, if the saga has ended
	Calls    []call          `json:",omitempty"`
	Stop     []string        `json:",omitempty"`
	WakeAt   time.Time       `json:",omitzero"`
	Refused  string          `json:",omitempty"` // the reason why the message was not applied; "" if it was
	Log      []saga.Entry    `json:",omitempty"` // new entries of the saga's log, for people who read the history
	Listed   bool            `json:",omitempty"` // whether the namespace has the search attribute
}

// A call is a saga.Call with the values that the workflow needs.
type call struct {
	Step    string
	Op      saga.Op
	Number  int64
	Attempt int
	Timeout time.Duration
	Call    json.RawMessage
}

// A result is the result of the workflow.
type result struct {
	Instance json.RawMessage
	Signals  []string `json:",omitempty"`
}

// A loop is the state of a saga's workflow while it runs.
type loop struct {
	saved
	saga     string
	running  map[string]workflow.CancelFunc // cancels the activities that run, by step
	messages []*message
	canceled bool // whether a cancellation of the workflow was added to the messages
}

// run is the workflow function. A local activity makes the decisions, and its results are in the history. A later
// version of this module must issue the same Temporal commands for the same decisions; TestReplay checks this.
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
	ctx, end := workflow.NewDisconnectedContext(ctx) // the Undos must run even after a cancellation
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

// receive handles an update. It returns the reason why the message was not applied, or "".
func (l *loop) receive(ctx workflow.Context, m *message) (refused string, err error) {
	l.messages = append(l.messages, m)
	err = workflow.Await(ctx, func() bool { return m.done })
	return m.refused, err
}

// decide makes a decision about all answers of attempts, or about one message. It panics if the local activity fails,
// because the saga must not fail. The panic fails the workflow task, and the server retries the task, perhaps on a
// worker that has the definition.
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

// call attempts a step in an activity. Temporal does not retry the activity, because the saga decides whether another
// attempt follows.
func (l *loop) call(ctx workflow.Context, c call) {
	ctx, l.running[c.Step] = workflow.WithCancel(workflow.WithActivityOptions(ctx, workflow.ActivityOptions{
		StartToCloseTimeout: min(cmp.Or(c.Timeout, endless), endless) + heartbeatTimeout, // Perform ends the attempt earlier
		HeartbeatTimeout:    heartbeatTimeout,
		RetryPolicy:         &temporal.RetryPolicy{MaximumAttempts: 1},
		WaitForCancellation: true,
		Summary:             fmt.Sprintf("%s %s %d", c.Op, c.Step, c.Attempt),
	}))
	workflow.Go(ctx, func(ctx workflow.Context) {
		var a json.RawMessage
		if err := workflow.ExecuteActivity(ctx, typePrefix+l.saga, c.Call).Get(ctx, &a); err != nil {
			lost := saga.Call{Step: c.Step, Op: c.Op, Number: c.Number}.Interrupted(reason(err))
			lost.RetryAfter = lostPause
			a, _ = json.Marshal(lost) // strings and numbers can always be encoded
		}
		delete(l.running, c.Step)
		l.Answers = append(l.Answers, a)
	})
}

// reason returns the reason why the activity of an attempt has returned no answer.
func reason(err error) error {
	if _, is := errors.AsType[*temporal.TimeoutError](err); is {
		return errors.New("sagatemporal: worker died, or did not return from the attempt")
	}
	return fmt.Errorf("sagatemporal: attempt was not made or was canceled: %w", cmp.Or(errors.Unwrap(err), err))
}

// wait waits until the saga needs another decision: because of an answer, a message or the time wake.
func (l *loop) wait(ctx workflow.Context, wake time.Time, canceled func() error) {
	ctx, stop := workflow.WithCancel(ctx)
	defer stop()
	var timer workflow.Future
	if !wake.IsZero() {
		timer = workflow.NewTimer(ctx, max(wake.Sub(workflow.Now(ctx)), time.Millisecond))
	}
	_ = workflow.Await(ctx, func() bool { // Await fails only if ctx is canceled, which it is not
		if canceled() != nil && !l.canceled {
			l.canceled = true
			op := saga.Operation{Action: saga.ActionCancel, Note: "the workflow was canceled"}
			l.messages = append(l.messages, &message{Operation: &op})
		}
		return len(l.Answers) > 0 || len(l.messages) > 0 || timer != nil && timer.IsReady()
	})
}

// decide is the function of the local activity. It decides how the saga continues.
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
	// Decide has rejected the operation, and made no other decision.
	if in.Operation != nil && in.Operation.Version != 0 && out.Refused != "" {
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
		out.Calls = append(out.Calls, call{c.Step, c.Op, c.Number, c.Command.Attempt, c.Timeout, data})
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
		return out, fmt.Errorf("sagatemporal: decision has %d bytes, and the server takes %d", size, maxDecision)
	}
	return out, nil
}

// perform is the function of an attempt's activity. It returns an error only if it has made no attempt.
func (e *engine) perform(ctx context.Context, c saga.Call) (saga.Answer, error) {
	d, err := e.definition(c.Saga, c.Version)
	if err != nil {
		return saga.Answer{}, err
	}
	returned := make(chan struct{})
	defer close(returned)
	go func() { // heartbeats let the server notice a dead worker, and let the attempt notice its cancellation
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
		a.Error = fmt.Sprintf("sagatemporal: state is longer than %d bytes", maxState)
	case ctx.Err() != nil && a.Outcome == saga.OutcomeMaybeApplied:
		// The attempt was canceled, or the worker stops.
		a.Outcome, a.Final, a.RetryAfter = saga.OutcomeInterrupted, false, lostPause
	}
	return a, nil
}
