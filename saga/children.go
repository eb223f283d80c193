package saga

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"time"

	"github.com/go-resilience/resilience/saga/internal/participant"
	store "github.com/go-resilience/resilience/saga/sagastore"
)

// errPending is the result of an attempt whose children have not ended yet. It is not a failure, and the attempt does
// not count.
type errPending struct{ children int }

func (*errPending) Error() string { return "saga: children have not ended" }

// A storeError is an error of the store. The attempt that returns it does not know the status of its children, and does
// not count.
type storeError struct{ error }

func (e *storeError) Unwrap() error { return e.error }

func ofStore(err error) error {
	if err == nil {
		return nil
	}
	return &storeError{err}
}

// query makes a call to the store. The call has a timeout, because otherwise a connection that hangs would end the
// attempt.
func query[T any](f *family, call func(ctx context.Context) (T, error)) (T, error) {
	most := f.r.cfg.LeaseTTL / 2
	if f.Timeout > 0 {
		most = min(most, f.Timeout/2)
	}
	ctx, cancel := context.WithTimeout(f.ctx, most)
	defer cancel()
	return call(ctx)
}

func (f *family) load(id string) (store.Record, error) {
	return query(f, func(ctx context.Context) (store.Record, error) { return f.r.store.Load(ctx, id) })
}

// A family is an attempt of a step with children.
type family struct {
	*attempt
	r     *Runner
	id    string   // the ID of the parent
	name  string   // the name of the step
	child *child   // the Child of the step
	p     *program // the definition of the children
}

// attend is the Do and the Undo of a step with children. If the store fails, attend returns a *storeError, and the step
// does not fail: it reads or starts the children again soon. If a child does not exist, the child was deleted, and the
// step fails.
func (h *hold) attend(t *attempt) error {
	st := &h.p.steps[t.n]
	p, err := st.child.program()
	if err != nil {
		return Permanent(err)
	}
	f := &family{t, h.r, h.rec.ID, st.name, st.child, p}
	again := t.Op == OpDo && t.retried
	switch {
	case t.Op == OpUndo:
		err = f.undo()
		if errors.Is(err, ErrNotRegistered) && t.Command.Attempt == 1 && t.Refusals < defaultUndoAttempts {
			err = &notBegun{err} // during a deployment, another runner may know the child's definition
		}
	case again || t.children == 0:
		err = f.start(again)
	default:
		err = f.finish(st.hasUndo)
	}
	if _, failed := err.(*storeError); !failed {
		return err
	}
	if errors.Is(err, ErrNotFound) {
		return Permanent(fmt.Errorf("saga: child of %q was deleted: %w", h.rec.ID, err))
	}
	switch t.ctx.Err() {
	case nil:
	case context.DeadlineExceeded: // a slow store is no failure of the step, either
		err = ofStore(fmt.Errorf("not done within the Timeout of step %s (%v): %w", st.name, t.Timeout, err))
	default:
		return errors.Unwrap(err)
	}
	h.r.storeFailed(h.ctx, fmt.Errorf("saga: children of %q: %w", h.rec.ID, err))
	return err
}

// start starts the children that have not been started. If again is true, after an ActionRetry, it restarts the
// children that were compensated or abandoned.
func (f *family) start(again bool) error {
	var started []childState
	if again {
		list, err := f.look()
		if err != nil {
			return err
		}
		started = list
	}
	states, err := f.child.begin(f.s)
	switch {
	case err != nil:
		return err
	case again && len(states) != len(started):
		return Permanent(fmt.Errorf("saga: step has %d children, and begin returns %d", len(started), len(states)))
	case len(states) == 0:
		return f.child.end(f.s, nil)
	}
	var reqs []store.StartRequest
	for i := range states {
		n := i
		if again {
			if s := started[i].Status; s != Compensated && s != Abandoned {
				continue
			}
			n = started[i].next
		}
		data, err := f.p.encodeNew(states[i])
		if err != nil {
			return withoutEffect(err) // this attempt has started no child
		}
		req, err := startRequest(f.p, ChildID(f.id, f.name, n), data, f.carried)
		if err != nil {
			return withoutEffect(err)
		}
		req.Parent, req.ParentStep = f.id, f.name
		reqs = append(reqs, req)
	}
	for _, req := range reqs {
		rec, err := query(f, func(ctx context.Context) (store.Record, error) { return f.r.start(ctx, req) })
		switch {
		case errors.Is(err, ErrExists):
			return Permanent(err)
		case err != nil:
			return ofStore(err)
		case isNoChild(&rec):
			return Permanent(participant.ErrUndone) // an Undo has prevented this child and all later children
		}
	}
	return &errPending{len(states)} // the number is recorded, for a later ActionRetry
}

// finish passes the states of the children to end if all children are completed. It returns an error if the step has
// failed.
func (f *family) finish(canUndo bool) error {
	list, err := f.look()
	if err != nil {
		return err
	}
	verdict, failed := judge(list, canUndo)
	if verdict == childrenWait {
		return &errPending{f.children}
	}
	states := make([]any, len(list))
	for i := range list {
		if verdict != childrenDone && i != failed {
			continue
		}
		rec, err := f.load(list[i].ID)
		if err != nil {
			return ofStore(err)
		}
		if verdict == childrenDone {
			states[i], err = f.p.decode(rec.State)
		} else if err = fmt.Errorf("saga: child %q: %w", rec.ID, show(&rec, f.p).failure()); verdict == childrenDeclined {
			return Declined(err)
		}
		if err != nil {
			return Permanent(err)
		}
	}
	return f.child.end(f.s, states)
}

// undo turns the children back. If it is not known how many children were started, undo records the first child that
// does not exist as compensated. An owner that was cut off may still try to start that child, and then finds that the
// child has ended.
func (f *family) undo() error {
	waits, unknown := false, error(nil)
	turn := func(rec store.Record, err error) error {
		var status Status
		if err == nil {
			status, err = query(f, func(ctx context.Context) (Status, error) { return f.r.turnChild(ctx, &rec) })
		}
		waits = waits || !status.Ended()
		if errors.Is(err, ErrNotRegistered) {
			unknown, err = err, nil // the other children still turn back
		}
		return ofStore(err)
	}
	list, err := f.look() // empty if the number of children is not known
	if err != nil {
		return err
	}
	for _, c := range list {
		switch {
		case c.Status == Completed || c.Status == Stuck || c.Status == Running && !c.CancelRequested:
			if err := turn(f.load(c.ID)); err != nil {
				return err
			}
		case !c.Status.Ended():
			waits = true
		}
	}
	for i, last := 0, f.children > 0; !last; i++ {
		rec, err := f.load(ChildID(f.id, f.name, i))
		if errors.Is(err, ErrNotFound) {
			rec, err = query(f, func(ctx context.Context) (rec store.Record, err error) {
				rec, _, err = f.r.store.Start(ctx, f.noChild(i))
				return rec, err
			})
		}
		if err == nil && rec.Parent != f.id {
			break // the parent has started neither this child nor a later one
		}
		if err := turn(rec, err); err != nil {
			return err
		}
		last = isNoChild(&rec) // the child was recorded by noChild, now or in an earlier attempt
	}
	if waits && unknown == nil {
		return &errPending{f.children}
	}
	return unknown
}

// noChild returns the request to record a child that must never start: it has turned back before its start.
func (f *family) noChild(i int) store.StartRequest {
	m := newMachine(f.p)
	m.forestall(errParentBack)
	data, _ := f.p.encode(reflect.New(f.p.state).Interface()) // the state is never used
	return store.StartRequest{
		ID: ChildID(f.id, f.name, i), Saga: f.p.name, Version: f.p.version,
		Status: m.Status, State: data, Progress: m.encode(),
		Parent: f.id, ParentStep: f.name, Nonce: rand.Int64(),
		Log: []store.Entry{{Kind: EventCreated}, {Kind: EventCompensated, Error: errParentBack}},
	}
}

// isNoChild reports whether the record is one of noChild: its log has only the two entries of noChild. Every other
// compensated saga also has an entry for its turning back.
func isNoChild(rec *store.Record) bool { return rec.Status == Compensated && rec.Seq == 2 }

// A childState is a parent's view of a child.
type childState struct {
	store.ChildRecord
	next int // the n of the ChildID with which the child would be restarted
}

// look returns the children of a step, in the order in which begin returned their states. The number of children must
// be known. If a child was restarted, look returns only its latest restart. If a child was deleted, the error matches
// ErrNotFound.
func (f *family) look() (list []childState, err error) {
	found, err := query(f, func(ctx context.Context) ([]store.ChildRecord, error) {
		return f.r.store.Children(ctx, store.ChildrenRequest{Parent: f.id, Step: f.name})
	})
	if err != nil {
		return nil, ofStore(err)
	}
	byID := make(map[string]store.ChildRecord, len(found))
	for _, c := range found {
		byID[c.ID] = c
	}
	for n := range f.children {
		c := childState{next: n}
		for next, is := byID[ChildID(f.id, f.name, n)]; is; next, is = byID[ChildID(f.id, f.name, c.next)] {
			c.ChildRecord = next
			c.next += f.children
		}
		if c.ID == "" {
			return nil, ofStore(ErrNotFound)
		}
		list = append(list, c)
	}
	return list, nil
}

// notifyParent wakes the parent of a saga that has ended, if the parent can continue: if all children of the step have
// ended, or if this saga has failed. A saga that its parent turned back has not failed. notifyParent returns false if
// the store has failed. The parent then reads its children again later, but perhaps hours later: see machine.lookIn.
func (r *Runner) notifyParent(ctx context.Context, rec *store.Record) (ok bool) {
	if rec.Parent == "" {
		return true
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), r.cfg.LeaseTTL/2)
	defer cancel()
	if rec.Status == Completed || turnedByParent(rec) {
		left, err := r.store.Children(ctx, store.ChildrenRequest{
			Parent: rec.Parent, Step: rec.ParentStep, Status: []Status{Running, Compensating, Stuck}, Limit: 1,
		})
		if err != nil {
			r.storeFailed(ctx, fmt.Errorf("saga: children of %q: %w", rec.Parent, err)) // wake the parent in any case
		}
		if len(left) > 0 {
			return true
		}
	}
	// The parent's owner may already have read the children, and may be about to park the parent. So the store records
	// that the parent was woken.
	_, err := r.store.Post(ctx, store.PostRequest{ID: rec.Parent})
	if err != nil {
		r.storeFailed(ctx, fmt.Errorf("saga: wake %q: %w", rec.Parent, err))
	}
	r.Wake()
	return err == nil
}

// notifyParent wakes the parent of the saga, which has ended. While the store fails, it tries again until the ctx of
// the attempts of the runner is done.
func (h *hold) notifyParent() {
	h.r.mu.Lock()
	base := h.r.base // h.ctx is canceled by the next heartbeat, because the saga is released
	h.r.mu.Unlock()
	for since := time.Now(); !h.r.notifyParent(h.ctx, &h.rec) && base.Err() == nil; {
		pause(base, h.r.chance(pauseFor(since, time.Millisecond, h.r.cfg.LeaseTTL))+1)
	}
}

// turnedByParent reports whether a saga was turned back by its parent.
func turnedByParent(rec *store.Record) bool {
	return rec.CancelNote == errParentBack || show(rec, nil).Cause == errParentBack
}

// errParentBack is the recorded reason of children that turn back with their parent.
const errParentBack = "the saga that started it turned back"

// turnChild turns a child back unless it has already turned back, and returns its status.
func (r *Runner) turnChild(ctx context.Context, rec *store.Record) (status Status, err error) {
	status = rec.Status
	switch {
	case status == Running:
		err = r.cancel(ctx, rec.ID, errParentBack)
	case status == Stuck:
		err = r.Operate(ctx, rec.ID, Operation{Action: ActionCompensate, Note: errParentBack})
	case status == Completed:
		status, err = r.write(ctx, ActionCompensate, rec.ID, func(rec *store.Record) (req store.CommitRequest, err error) {
			if rec.Status != Completed {
				return req, ErrNotAllowed
			}
			return r.decide(rec, Input{runner: runnerInput{revert: errParentBack}})
		})
	}
	if errors.Is(err, ErrNotAllowed) || status == Stuck && errors.Is(err, ErrNotRegistered) {
		err = nil // the child's status has changed, or only an operator can resolve it
	}
	return status, err
}
