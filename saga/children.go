package saga

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	store "github.com/go-resilience/resilience/internal/sagastore"
	"github.com/go-resilience/resilience/saga/internal/machine"
	"github.com/go-resilience/resilience/saga/internal/participant"
)

// errPending is the result of an attempt whose children have not ended yet. It is no
// failure, and counts as no attempt.
type errPending struct{ children int }

func (*errPending) Error() string { return "saga: children have not ended" }

// attend is the Do and the Undo of a step with children.
func (e *execution) attend(ctx context.Context, res *result) error {
	p, err := e.p.child(res.unit)
	if err != nil {
		return Abort(err)
	}
	if res.op == OpUndo {
		return e.undoChildren(ctx, p, res)
	}
	return e.doChildren(ctx, p, res)
}

// doChildren starts the children, unless all have been started, and takes in their states
// when all are completed.
func (e *execution) doChildren(ctx context.Context, p program, res *result) error {
	if res.retried {
		return e.startAgain(ctx, p, res)
	}
	if res.children == 0 {
		n, err := e.startChildren(ctx, p, res)
		switch {
		case err != nil:
			return err
		case n > 0:
			return &errPending{n} // to be recorded before a Retry needs it
		}
		return e.p.endChildren(res.unit, res.s, nil)
	}
	look, err := e.look(ctx, res.unit, res.children)
	if err != nil {
		return e.childFailed(ctx, res, err)
	}
	verdict, failed := machine.Judge(look.statuses, e.plan.Units[res.unit].HasUndo)
	switch verdict {
	case machine.ChildrenWait:
		return &errPending{res.children}
	case machine.ChildrenDone:
		return e.endChildren(ctx, p, res, look)
	}
	rec, err := e.r.store.Load(ctx, look.children[failed].ID)
	if err != nil {
		return e.childFailed(ctx, res, err)
	}
	err = fmt.Errorf("saga: child %q: %w", rec.ID, newInstance(rec, p.planned()).failure(nil))
	if verdict == machine.ChildrenVoid {
		return Void(err)
	}
	return Abort(err)
}

// endChildren takes in the states of the completed children.
func (e *execution) endChildren(ctx context.Context, p program, res *result, look *look) error {
	states := make([]any, len(look.children))
	for i, c := range look.children {
		rec, err := e.r.store.Load(ctx, c.ID)
		if err != nil {
			return e.childFailed(ctx, res, err)
		}
		if states[i], err = p.decode(rec.Data); err != nil {
			return Abort(err)
		}
	}
	return e.p.endChildren(res.unit, res.s, states)
}

// startChildren starts the children, unless they have been started, and returns how many they
// are.
func (e *execution) startChildren(ctx context.Context, p program, res *result) (int, error) {
	states, err := e.p.beginChildren(res.unit, res.s)
	if err != nil {
		return 0, err
	}
	reqs := make([]store.StartRequest, len(states))
	for i := range states {
		if reqs[i], err = e.childRequest(p, e.plan.Units[res.unit].Name, i, states[i]); err != nil {
			return 0, withoutEffect(err) // none is started, or an attempt before is in doubt
		}
	}
	for i := range reqs {
		rec, err := e.startChild(ctx, reqs[i])
		if err != nil {
			return 0, err
		}
		if isNoChild(&rec) {
			return 0, Abort(participant.ErrUndone) // nor is one that follows it
		}
	}
	return len(reqs), nil
}

// startAgain starts the children again that were compensated or abandoned, after a Retry. An
// attempt that fails makes the next one do so.
func (e *execution) startAgain(ctx context.Context, p program, res *result) error {
	look, err := e.look(ctx, res.unit, res.children)
	if err != nil {
		return err
	}
	states, err := e.p.beginChildren(res.unit, res.s)
	if err == nil && len(states) != res.children {
		err = Abort(fmt.Errorf("saga: the step has %d children, and begin returns %d", res.children, len(states)))
	}
	for i := 0; err == nil && i < len(states); i++ {
		if s := look.children[i].Status; s == Compensated || s == Abandoned {
			var req store.StartRequest
			if req, err = e.childRequest(p, e.plan.Units[res.unit].Name, look.next[i], states[i]); err == nil {
				_, err = e.startChild(ctx, req)
			}
		}
	}
	if _, failed := err.(*errPending); failed {
		return errors.New("saga: not all children were started again: the store has failed")
	}
	if err != nil {
		return err
	}
	return &errPending{res.children}
}

func (e *execution) childRequest(p program, step string, i int, s any) (store.StartRequest, error) {
	data, err := p.encodeFirst(s)
	if err != nil {
		return store.StartRequest{}, err
	}
	req := startRequest(p.planned(), ChildID(e.rec.ID, step, i), data, e.carried)
	req.Parent, req.ParentStep = e.rec.ID, step
	return req, nil
}

// startChild starts a child, unless it has been started.
func (e *execution) startChild(ctx context.Context, req store.StartRequest) (store.Record, error) {
	if _, err := e.r.program(req.Saga, req.Version); err != nil {
		return store.Record{}, err
	}
	if e.r.keepPlace() {
		defer e.r.freePlace()
		req.Owner, req.LeaseTTL = e.r.owner, e.r.config().LeaseTTL
	}
	since := time.Now()
	rec, created, err := e.r.store.Start(ctx, req)
	if err != nil {
		return rec, e.childFailed(ctx, nil, err)
	}
	if rec.Parent != e.rec.ID {
		return rec, Abort(fmt.Errorf("%w: %q is a %s that %q has not started", ErrExists, req.ID, rec.Saga, e.rec.ID))
	}
	e.r.begun(ctx, rec, created, since, req)
	return rec, nil
}

// childFailed returns the result of an attempt for which the store has failed. That is no
// failure of the step, which looks again. A child that does not exist is one: it was
// deleted.
func (e *execution) childFailed(ctx context.Context, res *result, err error) error {
	if errors.Is(err, ErrNotFound) {
		return Abort(fmt.Errorf("saga: a child of %q was deleted: %w", e.rec.ID, err))
	}
	if ctx.Err() != nil {
		return err
	}
	e.r.storeFailed(ctx, fmt.Errorf("saga: children of %q: %w", e.rec.ID, err))
	pending := &errPending{}
	if res != nil {
		pending.children = res.children
	}
	return pending
}

// undoChildren turns the children back. As long as it is not known that all have been
// started, the next one is put on record as compensated: an owner that was cut off may
// still try to start it, and finds it ended.
func (e *execution) undoChildren(ctx context.Context, p program, res *result) error {
	if res.children > 0 {
		return e.turnChildren(ctx, res)
	}
	step, waits := e.plan.Units[res.unit].Name, false
	for i := 0; ; i++ {
		id := ChildID(e.rec.ID, step, i)
		rec, err := e.r.store.Load(ctx, id)
		if errors.Is(err, ErrNotFound) {
			rec, _, err = e.r.store.Start(ctx, e.noChild(p, step, i))
		}
		if err != nil {
			return e.childFailed(ctx, res, err)
		}
		if rec.Parent != e.rec.ID {
			break // this saga has never started it, nor any after it
		}
		status, err := e.r.turnChild(ctx, &rec)
		if err != nil {
			return e.childFailed(ctx, res, err)
		}
		waits = waits || !status.Ended()
		if isNoChild(&rec) {
			break // put on record now, or by an attempt before
		}
	}
	if waits {
		return &errPending{res.children}
	}
	return nil
}

// turnChildren turns the children back, all of which have been started.
func (e *execution) turnChildren(ctx context.Context, res *result) error {
	look, err := e.look(ctx, res.unit, res.children)
	if err != nil {
		return e.childFailed(ctx, res, err)
	}
	waits := false
	for _, c := range look.children {
		status := c.Status
		if status == Completed || status == Stuck || status == Running && !c.CancelRequested {
			rec, err := e.r.store.Load(ctx, c.ID)
			if err == nil {
				status, err = e.r.turnChild(ctx, &rec)
			}
			if err != nil {
				return e.childFailed(ctx, res, err)
			}
		}
		waits = waits || !status.Ended()
	}
	if waits {
		return &errPending{res.children}
	}
	return nil
}

// noChild returns the record of a child that is never to be started.
func (e *execution) noChild(p program, step string, i int) store.StartRequest {
	plan := p.planned()
	m := machine.New(plan)
	m.Forestall(errParentBack)
	data, _ := p.encode(p.zero()) // nobody needs it
	return store.StartRequest{
		ID: ChildID(e.rec.ID, step, i), Saga: plan.Name, Version: plan.Version, Status: m.Status, Data: data, Steps: m.Steps(),
		Parent: e.rec.ID, ParentStep: step, Nonce: rand.Int64(), Log: []store.Entry{{Kind: EventCreated}, {Kind: EventCompensated, Error: errParentBack}},
	}
}

// isNoChild reports whether a record was made by noChild: it has no entries in its log but
// the first two. Every other one that has turned back has an entry that says so.
func isNoChild(rec *store.Record) bool { return rec.Status == Compensated && rec.Seq == 2 }
