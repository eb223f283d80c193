package saga

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	store "github.com/go-resilience/resilience/internal/sagastore"
	"github.com/go-resilience/resilience/saga/internal/participant"
)

// errPending is the result of an attempt whose children have not ended yet. It is no
// failure, and counts as no attempt.
type errPending struct{ children int }

func (*errPending) Error() string { return "saga: children have not ended" }

// attend is the Do and the Undo of a step with children.
func (h *hold) attend(ctx context.Context, res *result) error {
	p, err := h.p.steps[res.step].child.program()
	if err != nil {
		return Abort(err)
	}
	if res.op == OpUndo {
		return h.undoChildren(ctx, p, res)
	}
	return h.doChildren(ctx, p, res)
}

// doChildren starts the children, unless all have been started, and takes in their states
// when all are completed.
func (h *hold) doChildren(ctx context.Context, p *program, res *result) error {
	if res.retried {
		return h.startAgain(ctx, p, res)
	}
	if res.children == 0 {
		n, err := h.startChildren(ctx, p, res)
		switch {
		case err != nil:
			return err
		case n > 0:
			return &errPending{n} // to be recorded before a Retry needs it
		}
		return h.p.steps[res.step].child.end(res.s, nil)
	}
	look, err := h.look(ctx, res.step, res.children)
	if err != nil {
		return h.childFailed(ctx, res, err)
	}
	verdict, failed := judge(look.statuses, h.p.steps[res.step].hasUndo)
	switch verdict {
	case childrenWait:
		return &errPending{res.children}
	case childrenDone:
		return h.endChildren(ctx, p, res, look)
	}
	rec, err := h.r.store.Load(ctx, look.children[failed].ID)
	if err != nil {
		return h.childFailed(ctx, res, err)
	}
	err = fmt.Errorf("saga: child %q: %w", rec.ID, show(&rec, p).failure(nil))
	if verdict == childrenVoid {
		return Void(err)
	}
	return Abort(err)
}

// endChildren takes in the states of the completed children.
func (h *hold) endChildren(ctx context.Context, p *program, res *result, look *look) error {
	states := make([]any, len(look.children))
	for i, c := range look.children {
		rec, err := h.r.store.Load(ctx, c.ID)
		if err != nil {
			return h.childFailed(ctx, res, err)
		}
		if states[i], err = p.decode(rec.Data); err != nil {
			return Abort(err)
		}
	}
	return h.p.steps[res.step].child.end(res.s, states)
}

// startChildren starts the children, unless they have been started, and returns how many they
// are.
func (h *hold) startChildren(ctx context.Context, p *program, res *result) (int, error) {
	states, err := h.p.steps[res.step].child.begin(res.s)
	if err != nil {
		return 0, err
	}
	reqs := make([]store.StartRequest, len(states))
	for i := range states {
		if reqs[i], err = h.childRequest(p, h.p.steps[res.step].name, i, states[i]); err != nil {
			return 0, withoutEffect(err) // none is started, or an attempt before is in doubt
		}
	}
	for i := range reqs {
		rec, err := h.startChild(ctx, reqs[i])
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
func (h *hold) startAgain(ctx context.Context, p *program, res *result) error {
	look, err := h.look(ctx, res.step, res.children)
	if err != nil {
		return err
	}
	states, err := h.p.steps[res.step].child.begin(res.s)
	if err == nil && len(states) != res.children {
		err = Abort(fmt.Errorf("saga: the step has %d children, and begin returns %d", res.children, len(states)))
	}
	for i := 0; err == nil && i < len(states); i++ {
		if s := look.children[i].Status; s == Compensated || s == Abandoned {
			var req store.StartRequest
			if req, err = h.childRequest(p, h.p.steps[res.step].name, look.next[i], states[i]); err == nil {
				_, err = h.startChild(ctx, req)
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

func (h *hold) childRequest(p *program, step string, i int, s any) (store.StartRequest, error) {
	data, err := p.encodeNew(s)
	if err != nil {
		return store.StartRequest{}, err
	}
	req := startRequest(p, ChildID(h.rec.ID, step, i), data, h.carried)
	req.Parent, req.ParentStep = h.rec.ID, step
	return req, nil
}

// startChild starts a child, unless it has been started.
func (h *hold) startChild(ctx context.Context, req store.StartRequest) (store.Record, error) {
	if _, err := h.r.program(req.Saga, req.Version); err != nil {
		return store.Record{}, err
	}
	defer h.r.claimAtOnce(&req)()
	since := time.Now()
	rec, created, err := h.r.store.Start(ctx, req)
	if err != nil {
		return rec, h.childFailed(ctx, nil, err)
	}
	if rec.Parent != h.rec.ID {
		return rec, Abort(fmt.Errorf("%w: %q is a %s that %q has not started", ErrExists, req.ID, rec.Saga, h.rec.ID))
	}
	h.r.begun(ctx, rec, created, since, req)
	return rec, nil
}

// childFailed returns the result of an attempt for which the store has failed. That is no
// failure of the step, which looks again. A child that does not exist is one: it was
// deleted.
func (h *hold) childFailed(ctx context.Context, res *result, err error) error {
	if errors.Is(err, ErrNotFound) {
		return Abort(fmt.Errorf("saga: a child of %q was deleted: %w", h.rec.ID, err))
	}
	if ctx.Err() != nil {
		return err
	}
	h.r.storeFailed(ctx, fmt.Errorf("saga: children of %q: %w", h.rec.ID, err))
	pending := &errPending{}
	if res != nil {
		pending.children = res.children
	}
	return pending
}

// undoChildren turns the children back. As long as it is not known that all have been
// started, the next one is put on record as compensated: an owner that was cut off may
// still try to start it, and finds it ended.
func (h *hold) undoChildren(ctx context.Context, p *program, res *result) error {
	if res.children > 0 {
		return h.turnChildren(ctx, res)
	}
	step, waits := h.p.steps[res.step].name, false
	for i := 0; ; i++ {
		id := ChildID(h.rec.ID, step, i)
		rec, err := h.r.store.Load(ctx, id)
		if errors.Is(err, ErrNotFound) {
			rec, _, err = h.r.store.Start(ctx, h.noChild(p, step, i))
		}
		if err != nil {
			return h.childFailed(ctx, res, err)
		}
		if rec.Parent != h.rec.ID {
			break // this saga has never started it, nor any after it
		}
		status, err := h.r.turnChild(ctx, &rec)
		if err != nil {
			return h.childFailed(ctx, res, err)
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
func (h *hold) turnChildren(ctx context.Context, res *result) error {
	look, err := h.look(ctx, res.step, res.children)
	if err != nil {
		return h.childFailed(ctx, res, err)
	}
	waits := false
	for _, c := range look.children {
		status := c.Status
		if status == Completed || status == Stuck || status == Running && !c.CancelRequested {
			rec, err := h.r.store.Load(ctx, c.ID)
			if err == nil {
				status, err = h.r.turnChild(ctx, &rec)
			}
			if err != nil {
				return h.childFailed(ctx, res, err)
			}
		}
		waits = waits || !status.Ended()
	}
	if waits {
		return &errPending{res.children}
	}
	return nil
}

// noChild returns the record of a child that is never to be started: one that has turned back
// before it began.
func (h *hold) noChild(p *program, step string, i int) store.StartRequest {
	m := newMachine(p)
	m.forestall(errParentBack)
	data, _ := p.encode(p.zero()) // nobody needs it
	return store.StartRequest{
		ID: ChildID(h.rec.ID, step, i), Saga: p.name, Version: p.version, Status: m.Status, Data: data, Steps: m.encode(),
		Parent: h.rec.ID, ParentStep: step, Nonce: rand.Int64(), Log: []store.Entry{{Kind: EventCreated}, {Kind: EventCompensated, Error: errParentBack}},
	}
}

// isNoChild reports whether a record was made by noChild: it has no entries in its log but
// the first two. Every other one that has turned back has an entry that says so.
func isNoChild(rec *store.Record) bool { return rec.Status == Compensated && rec.Seq == 2 }

// A look is what a parent sees of the children of a step.
type look struct {
	children []store.ChildRecord // those that count, in the order of their states
	statuses []Status            // of them
	next     []int               // the numbers of the ids under which they would be started again
}

// look looks at the children of a unit, whose number is known. Of those that a Retry has
// started again the last counts. The error is ErrNotFound if one was deleted.
func (h *hold) look(ctx context.Context, step, children int) (*look, error) {
	list, err := h.r.store.Children(ctx, store.ChildrenRequest{Parent: h.rec.ID, Step: h.p.steps[step].name})
	if err != nil {
		return nil, err
	}
	byID := make(map[string]*store.ChildRecord, len(list))
	for i := range list {
		byID[list[i].ID] = &list[i]
	}
	l := &look{}
	for n := range children {
		var c *store.ChildRecord
		for ; ; n += children {
			next := byID[ChildID(h.rec.ID, h.p.steps[step].name, n)]
			if next == nil {
				break
			}
			c = next
		}
		if c == nil {
			return nil, ErrNotFound
		}
		l.children, l.statuses, l.next = append(l.children, *c), append(l.statuses, c.Status), append(l.next, n)
	}
	return l, nil
}

// tellParent makes the parent of a saga that has ended look at its children, if that can
// make a difference: the step has no other child that has not ended, or the saga has failed.
// A saga that its parent has turned back is no news.
func (r *Runner) tellParent(ctx context.Context, rec *store.Record) {
	if rec.Parent == "" {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), r.cfg.LeaseTTL/2)
	defer cancel()
	if rec.Status == Completed || turnedByParent(rec) {
		left, err := r.store.Children(ctx, store.ChildrenRequest{Parent: rec.Parent, Step: rec.ParentStep, Status: []Status{Running, Compensating, Stuck}, Limit: 1})
		if err != nil {
			r.storeFailed(ctx, fmt.Errorf("saga: children of %q: %w", rec.Parent, err)) // the parent looks in any case
		}
		if len(left) > 0 {
			return
		}
	}
	if !r.lookAt(rec.Parent) {
		r.hasten(ctx, rec.Parent)
	}
}

// hasten makes a saga due that waits. If that fails, the saga is looked at later all the same.
func (r *Runner) hasten(ctx context.Context, id string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), r.cfg.LeaseTTL/2)
	defer cancel()
	if err := r.store.Hasten(ctx, id); err != nil {
		r.storeFailed(ctx, fmt.Errorf("saga: hasten %q: %w", id, err))
	}
	r.Wake()
}

// turnedByParent reports whether a saga was turned back by its parent.
func turnedByParent(rec *store.Record) bool {
	return rec.CancelNote == errParentBack || show(rec, nil).Cause == errParentBack
}

// errParentBack is the reason for which children turn back.
const errParentBack = "the saga that started it turned back"

// turnChild turns a child back, unless it has turned back already, and returns its status.
func (r *Runner) turnChild(ctx context.Context, rec *store.Record) (Status, error) {
	var err error
	switch {
	case rec.Status == Running && !rec.CancelRequested:
		err = r.Cancel(ctx, rec.ID, errParentBack)
	case rec.Status == Stuck:
		err = r.Operate(ctx, rec.ID, Operation{Action: ActionCompensate, Note: errParentBack})
	case rec.Status == Completed:
		return r.revert(ctx, rec.ID)
	}
	if errors.Is(err, ErrNotAllowed) {
		err = nil // it has changed, or only an operator can mend it
	}
	return rec.Status, err
}

// revert turns a saga back that is completed.
func (r *Runner) revert(ctx context.Context, id string) (Status, error) {
	for {
		rec, err := r.store.Load(ctx, id)
		if err != nil || rec.Status != Completed {
			return rec.Status, err
		}
		m, err := r.machineOf(&rec)
		if err != nil {
			return rec.Status, err
		}
		m.revert(errParentBack)
		m.advance(rec.Now)
		req := m.commit()
		req.ID, req.Epoch, req.Seq, req.Nonce, req.Release = id, rec.Epoch, rec.Seq, rand.Int64(), true
		_, err = r.store.Commit(ctx, req)
		if errors.Is(err, store.ErrFenced) {
			continue
		}
		if err != nil {
			return rec.Status, err
		}
		rec.Status = req.Status
		r.tellLog(ctx, &rec, req, rec.Now)
		r.Wake()
		return rec.Status, nil
	}
}
