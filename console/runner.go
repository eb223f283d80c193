package console

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/go-resilience/resilience/saga"
)

// Only this file uses package saga.

type (
	sagaRunner = saga.Runner
	sagaStatus = saga.Status
	stepStatus = saga.StepStatus
)

const stuck = saga.Stuck

var errNoSaga = saga.ErrNotFound

// statuses are the statuses of a saga, in the order in which a list shows them.
var statuses = []saga.Status{
	saga.Stuck, saga.Running, saga.Compensating, saga.Completed, saga.Compensated, saga.Abandoned,
}

// sagaTones has the tones of the statuses of sagas. For any other status, the tone is idle. sagaView changes the tone
// of a running saga with failed attempts to warn.
var sagaTones = map[saga.Status]tone{
	saga.Stuck: fail, saga.Compensating: warn, saga.Running: blue, saga.Completed: well,
}

// stepTones has the tones of the statuses of steps. For any other status, the tone is blue.
var stepTones = map[saga.StepStatus]tone{
	saga.StepDone: well, saga.StepSkipped: well, saga.StepIdle: idle, saga.StepUndone: idle,
	saga.StepFailed: fail, saga.StepUndoFailed: fail, saga.StepUndoing: warn, saga.StepNoEffect: warn,
}

// runner returns the Runner with the given name, its name, and the names of all Runners. If name is empty, it returns
// the first Runner.
func (c *Console) runner(name string) (found *saga.Runner, its string, names []string) {
	for e := range c.reg.All() {
		if r, ok := e.Policy.(*saga.Runner); ok {
			names = append(names, e.Name)
			if e.Name == name || name == "" && found == nil {
				found, its = r, e.Name
			}
		}
	}
	return found, its, names
}

// operateSaga applies an operation to a saga.
func operateSaga(ctx context.Context, policy any, op Operation) error {
	runner, ok := policy.(*saga.Runner)
	if !ok {
		return fmt.Errorf("%s has no sagas", op.Policy)
	}
	err := runner.Operate(ctx, op.ID, saga.Operation{
		Action: saga.Action(op.Action), Step: op.Step, Note: op.Note, Seq: op.Seq,
		State: op.State, Version: op.Version,
	})
	if isRefusal(err) {
		return err
	}
	return ofStore(err)
}

// changes returns the changes that op makes to a saga's state and version. If op.State equals the current state,
// changes sets op.State to nil.
func (c *Console) changes(ctx context.Context, r *saga.Runner, op *Operation) (all []change, err error) {
	ctx, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	in, err := r.Get(ctx, op.ID)
	switch {
	case isRefusal(err):
		return nil, err
	case err != nil:
		return nil, ofStore(err)
	case op.Seq != 0 && in.Seq != op.Seq:
		return nil, fmt.Errorf("%w: %s of %q: its log has grown from %d entries to %d",
			saga.ErrNotAllowed, op.Action, op.ID, op.Seq, in.Seq)
	}
	if op.Version != 0 {
		all = append(all, changeOf("Version", fmt.Sprint(in.Version), fmt.Sprint(op.Version)))
	}
	if before, _ := compacted(string(in.State)); bytes.Equal(before, op.State) {
		op.State = nil
	}
	if op.State != nil {
		before := "hidden"
		if c.cfg.Show.State {
			before = indented(in.State)
		}
		all = append(all, changeOf("State", before, indented(op.State)))
	}
	if all == nil {
		err = errors.New("nothing would change: enter another state or a version")
	}
	return all, err
}

// isRefusal reports whether err means that a saga does not allow an action. Any other error is an error of the store.
func isRefusal(err error) bool {
	return errors.Is(err, saga.ErrNotAllowed) || errors.Is(err, saga.ErrNotFound) ||
		errors.Is(err, saga.ErrNotRegistered)
}

// count returns the numbers of a Runner's sagas for each definition, and the current time of the store's clock.
func count(ctx context.Context, r *saga.Runner) (rows []sagaRow, now time.Time, err error) {
	counts, now, err := r.Counts(ctx)
	for _, n := range counts {
		rows = append(rows, sagaRow{n.Saga, n.Stuck, n.Running, n.Compensating, n.Due, seconds(n.DueFor)})
	}
	return rows, now, err
}

// list returns at most limit sagas that match form and have one of the statuses. next is the value of the parameter
// after for the next page.
func (c *Console) list(ctx context.Context, r *saga.Runner, form listForm, limit int, statuses ...saga.Status) (
	views []sagaView, next string, err error,
) {
	found, next, err := r.List(ctx, saga.Filter{
		Saga: form.Get("saga"), ID: form.Get("text"), CreatedBefore: form.createdBefore, After: form.Get("after"),
		Status: statuses, Limit: limit, WithoutState: true,
	})
	views = []sagaView{}
	for _, in := range found {
		views = append(views, c.sagaView(in))
	}
	return views, next, err
}

func (c *Console) sagaView(in *saga.Instance) sagaView {
	v := sagaView{
		ID: in.ID, Seq: in.Seq, Saga: in.Saga, Version: in.Version, State: in.Status, Step: in.Step, Steps: len(in.Steps),
		TurnedBack: in.TurnedBack, Failures: in.Failures, Error: c.text(cmp.Or(in.LastError, in.Cause)), Owner: in.Owner,
		Created: in.CreatedAt, Age: seconds(in.Now.Sub(in.CreatedAt)), Since: seconds(in.IdleFor()),
		Ended: in.Status.Ended(), Tone: cmp.Or(sagaTones[in.Status], idle),
	}
	if v.Tone == blue && v.Failures > 0 {
		v.Tone = warn
	}
	if c.cfg.Allow != nil {
		for _, a := range in.Actions {
			v.Actions = append(v.Actions, Action(a))
		}
	}
	blocked := false // a step that blocks the saga was found
	for _, s := range in.Steps {
		v.addStep(s.Status, s.Name)
		blocks := in.TurnedBack && s.Status == saga.StepUndoFailed || !in.TurnedBack && s.Name == in.Step
		if blocks && !blocked && in.Status == saga.Stuck {
			blocked, v.Step, v.Error = true, s.Name, c.text(s.Error)
		}
	}
	return v
}

// addStep counts a step by its status. If the saga has no Step yet, the first step in progress becomes its Step.
func (v *sagaView) addStep(status saga.StepStatus, name string) {
	switch status {
	case saga.StepStarted, saga.StepUndoing, saga.StepWaiting:
		v.Step = cmp.Or(v.Step, name)
	case saga.StepDone, saga.StepSkipped:
		v.StepsDone++
	}
	switch {
	case !v.TurnedBack || status == saga.StepIdle || status == saga.StepWaiting || status == saga.StepNoEffect:
	case status == saga.StepUndone:
		v.StepsUndone++
		v.StepsToUndo++
	default:
		v.StepsToUndo++
	}
}

// sagaPage returns the page of a saga, or the error of the store. If the saga does not exist, the error matches
// errNoSaga.
func (c *Console) sagaPage(ctx context.Context, r *saga.Runner, runner, id string) (p sagaPage, err error) {
	in, err := r.Get(ctx, id)
	if err != nil {
		return p, err
	}
	log, err := r.History(ctx, id, in.Seq-logShown, logShown)
	if err != nil {
		return p, err
	}
	return c.pageOf(runner, in, log), nil
}

func (c *Console) pageOf(runner string, in *saga.Instance, log []saga.Entry) sagaPage {
	p := sagaPage{
		page: c.page("saga", in.ID, 3), Runner: runner, sagaView: c.sagaView(in), Cause: c.text(in.Cause),
		Epoch: in.Epoch, Takeover: in.Takeovers, Canceled: in.CancelRequested, Updated: in.UpdatedAt,
		Wake: in.WakeAt, Deadline: in.CompleteBy, Older: max(in.Seq-logShown, 0), Content: "hidden",
	}
	if p.Ended {
		p.Refresh = 0
	}
	if in.TurnedBack {
		p.Turned = in.Step
	}
	if c.cfg.Show.State {
		p.Content = string(in.State)
	}
	p.Edits, p.JSON = p.Can(Retry) && in.Owner == "", json.Valid(in.State)
	var before, group []string // names of the steps of the previous and of the current parallel group
	for _, s := range in.Steps {
		if !s.Parallel {
			before, group = group, nil
		}
		group = append(group, s.Name)
		u := unitView{
			Name: s.Name, State: s.Status, After: before, Pivot: s.Pivot,
			Attempts: s.Attempts, Undos: s.Undos, Refusals: s.Refusals,
			MaybeApplied: s.MaybeApplied, Error: c.text(s.Error), NotBefore: s.NotBefore, Waiting: s.WaitingSince,
			Tone: cmp.Or(stepTones[s.Status], blue),
			skippable: !slices.Contains([]saga.StepStatus{
				saga.StepDone, saga.StepSkipped, saga.StepIdle, saga.StepUndone,
			}, s.Status),
		}
		if in.TurnedBack && s.Status == saga.StepNoEffect {
			u.Tone = idle // a step without an effect needs no Undo
		}
		for i := range min(s.Children, 20) {
			u.Children = append(u.Children, saga.ChildID(in.ID, s.Name, i))
		}
		p.Units = append(p.Units, u)
	}
	for _, e := range log {
		p.Log = append(p.Log, entryView{
			e.Seq, string(e.Kind), e.Step, string(e.Op), e.Attempt, e.Epoch, c.text(e.Error), e.At,
		})
	}
	return p
}

func seconds(d time.Duration) float64 { return d.Round(time.Millisecond).Seconds() }
