package saga

import (
	"context"
	"crypto/sha256"
	"encoding/base32"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"time"
	"unicode/utf8"
)

// A Child is the work of a step that consists of sagas of their own: Step.Saga. It is
// made by [ChildOf] and [ChildrenOf].
//
// The step is done when all of its children are completed. It fails when one of them was
// compensated or abandoned, and its other children are then undone with it. A child that
// is stuck keeps the step waiting, until an operator has mended it. While the step waits,
// its saga takes no place in a runner.
//
// To undo the step is to turn its children back. A child that is running is canceled, and
// one that is completed is compensated, although it has ended: its status becomes
// Compensating again. An abandoned child counts as undone by the operator who abandoned
// it.
//
// A definition with a pivot cannot be turned back when it is completed: it can only be a
// child in the pivot or after it. Such a step fails only when all of its children have
// ended and some are not completed, as does a BestEffort step. It has taken no effect if
// all were compensated: a pivot then turns its saga back.
//
// The children are started with ids of [ChildID], and run by any runner with which the
// definition is registered. [Register] registers it together with that of the parent.
// Children stay in the store until their parent is deleted.
type Child[S any] struct {
	program  func() (program, error)
	pivot    func() bool
	register func(*Runner)
	begin    func(s *S) ([]any, error)      // the states, each a *C
	end      func(s *S, states []any) error // of the completed children
}

// ChildOf returns one saga as the work of a step. begin returns its state when it is
// started. end takes in its state when it is completed; nil means that nothing is taken
// in.
//
// begin must not change s, and must return the same state when it is called again, as far
// as it matters: it may depend on what the steps before this one have written. The errors
// of begin and end are those of a Do, except that a [Void] is a [NoEffect]: children that
// were started are turned back whatever it says.
func ChildOf[S, C any](sg *Saga[C], begin func(s *S) (C, error), end func(s *S, c C) error) *Child[S] {
	if sg == nil || begin == nil {
		return &Child[S]{}
	}
	many := func(s *S) ([]C, error) {
		c, err := begin(s)
		return []C{c}, err
	}
	if end == nil {
		return ChildrenOf(sg, many, nil)
	}
	return ChildrenOf(sg, many, func(s *S, c []C) error { return end(s, c[0]) })
}

// ChildrenOf returns any number of sagas, which run in parallel, as the work of a step.
// begin returns their states when they are started, and end takes in their states, in the
// same order, when all are completed. The rest is as in [ChildOf].
func ChildrenOf[S, C any](sg *Saga[C], begin func(s *S) ([]C, error), end func(s *S, c []C) error) *Child[S] {
	if sg == nil || begin == nil {
		return &Child[S]{}
	}
	return &Child[S]{
		program: func() (program, error) { return sg.program() },
		pivot: func() bool {
			for i := range sg.Steps {
				if sg.Steps[i].Pivot {
					return true
				}
			}
			return false
		},
		register: func(r *Runner) { Register(r, sg) },
		begin: func(s *S) ([]any, error) {
			list, err := begin(s)
			states := make([]any, len(list))
			for i := range list {
				states[i] = &list[i]
			}
			return states, notVoid(err)
		},
		end: func(s *S, states []any) error {
			if end == nil {
				return nil
			}
			list := make([]C, len(states))
			for i := range states {
				list[i] = *states[i].(*C)
			}
			return notVoid(end(s, list))
		},
	}
}

// notVoid makes a NoEffect of a Void: only the children know of all attempts.
func notVoid(err error) error {
	if Voided(err) {
		return NoEffect(err)
	}
	return err
}

// ChildID returns the id of the nth child, from 0, of a step or alternative of the saga
// id: "<id>/<step>/<n>". If that is longer than an id can be, its end is replaced by a
// hash of the whole. Of a step with 3 children, number 4 is child 1 started again by a
// Retry, and number 7 the next time.
func ChildID(id, step string, n int) string {
	child := id + "/" + step + "/" + strconv.Itoa(n)
	if len(child) <= maxID {
		return child
	}
	sum := sha256.Sum256([]byte(child))
	hash := "~" + base32.HexEncoding.WithPadding(base32.NoPadding).EncodeToString(sum[:])
	cut := maxID - len(hash)
	for !utf8.RuneStart(child[cut]) {
		cut--
	}
	return child[:cut] + hash
}

// errPending is the result of an attempt whose children have not ended yet. It is no
// failure, and counts as no attempt.
type errPending struct{ children int }

func (*errPending) Error() string { return "saga: children have not ended" }

// pending reports whether a unit waits for its children.
func (m *machine) pending(i int) bool {
	u := &m.units[i]
	return m.p.units[i].child && !u.WaitingSince.IsZero() && u.Error == "" && !m.work[i].busy &&
		(u.Status == StepStarted || u.Status == StepUndoing)
}

// wait takes in that the children of a unit have not ended. They are looked at again at
// next, or when one of them ends.
func (m *machine) wait(i, children int, now, next time.Time) {
	u, w := &m.units[i], &m.work[i]
	w.busy, w.err, w.ended = false, nil, now
	u.Error, u.Refusals, u.NotBefore = "", 0, next
	if u.WaitingSince.IsZero() {
		u.WaitingSince = now
	}
	if u.Status == StepUndoing {
		u.Undos--
		return
	}
	u.Attempts--
	u.InDoubt, u.Children = true, children
}

// lookAgain makes the units look at their children again now.
func (m *machine) lookAgain() {
	for i := range m.units {
		if m.pending(i) {
			m.units[i].NotBefore = time.Time{}
		}
	}
}

// tellParent makes the parent of a saga that has ended look at its children, if that can
// make a difference: the step has no other child that has not ended, or the saga has failed.
// A saga that its parent has turned back is no news.
func (r *Runner) tellParent(ctx context.Context, rec *Record) {
	if rec.Parent == "" {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), r.config().LeaseTTL/2)
	defer cancel()
	if rec.Status == Completed || rec.Status == Compensated && turnedByParent(rec) {
		left, err := r.store.Children(ctx, ChildrenRequest{Parent: rec.Parent, Step: rec.ParentStep, Status: unfinished, Limit: 1})
		if err != nil {
			r.storeFailed(ctx, fmt.Errorf("saga: children of %q: %w", rec.Parent, err)) // the parent looks in any case
		}
		if len(left) > 0 {
			return
		}
	}
	if r.tellHeld(rec.Parent) {
		return
	}
	if err := r.store.Hasten(ctx, rec.Parent); err != nil {
		r.storeFailed(ctx, fmt.Errorf("saga: hasten %q: %w", rec.Parent, err)) // it looks around by itself, later
	}
	r.Wake()
}

// turnedByParent reports whether a saga was turned back by its parent.
func turnedByParent(rec *Record) bool {
	return rec.CancelNote == errParentBack || newInstance(*rec, nil).Cause == errParentBack
}

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
	if res.children > 0 {
		look, err := e.look(ctx, res.unit, res.children)
		if err != nil {
			return e.childFailed(ctx, res, err)
		}
		if !look.settled(e.plan.units[res.unit].hasUndo) {
			return &errPending{res.children}
		}
	}
	recs, err := e.loadChildren(ctx, p, res)
	if err != nil {
		return err
	}
	if len(recs) > res.children {
		return &errPending{len(recs)} // to be recorded before a Retry needs it
	}
	states := make([]any, len(recs))
	var failed error
	waits, compensated := false, true
	for i := range recs {
		rec := &recs[i]
		compensated = compensated && rec.Status == Compensated
		switch rec.Status {
		case Completed:
			if states[i], err = p.decode(rec.Data); err != nil {
				return Abort(err)
			}
		case Compensated, Abandoned:
			if failed == nil {
				failed = fmt.Errorf("saga: child %q: %w", rec.ID, newInstance(*rec, p.planned()).failure(nil))
			}
		default:
			waits = true
		}
	}
	switch canUndo := e.plan.units[res.unit].hasUndo; {
	case failed != nil && canUndo:
		return Abort(failed)
	case waits:
		return &errPending{len(recs)}
	case failed != nil && compensated:
		return Void(failed)
	case failed != nil:
		return Abort(failed)
	}
	return e.p.endChildren(res.unit, res.s, states)
}

// A look is what a parent sees of the children of a step.
type look struct {
	children  []ChildRecord // those that count, in the order of their states
	next      []int         // the numbers of the ids under which they would be started again
	waits     bool          // some have not ended
	failed    bool          // some were compensated or abandoned
	completed bool          // some were completed
}

// settled reports whether the Do of the step has a result. A step that can be undone has
// failed as soon as one child has.
func (l *look) settled(canUndo bool) bool { return !l.waits || l.failed && canUndo }

// look looks at the children of a unit, whose number is known. Of those that a Retry has
// started again the last counts. The error is ErrNotFound if one was deleted.
func (e *execution) look(ctx context.Context, unit, children int) (*look, error) {
	list, err := e.r.store.Children(ctx, ChildrenRequest{Parent: e.rec.ID, Step: e.plan.units[unit].name})
	if err != nil {
		return nil, err
	}
	byID := make(map[string]*ChildRecord, len(list))
	for i := range list {
		byID[list[i].ID] = &list[i]
	}
	l := &look{}
	for n := range children {
		var c *ChildRecord
		for ; ; n += children {
			next := byID[ChildID(e.rec.ID, e.plan.units[unit].name, n)]
			if next == nil {
				break
			}
			c = next
		}
		if c == nil {
			return nil, ErrNotFound
		}
		l.children, l.next = append(l.children, *c), append(l.next, n)
		switch c.Status {
		case Completed:
			l.completed = true
		case Compensated, Abandoned:
			l.failed = true
		default:
			l.waits = true
		}
	}
	return l, nil
}

// loadChildren returns the records of the children, which it starts if need be.
func (e *execution) loadChildren(ctx context.Context, p program, res *result) ([]Record, error) {
	step := e.plan.units[res.unit].name
	if res.children > 0 {
		look, err := e.look(ctx, res.unit, res.children)
		if err != nil {
			return nil, e.childFailed(ctx, res, err)
		}
		recs := make([]Record, res.children)
		for i, c := range look.children {
			if recs[i], err = e.r.store.Load(ctx, c.ID); err != nil {
				return nil, e.childFailed(ctx, res, err)
			}
		}
		return recs, nil
	}
	states, err := e.p.beginChildren(res.unit, res.s)
	if err != nil {
		return nil, err
	}
	reqs := make([]StartRequest, len(states))
	for i := range states {
		if reqs[i], err = e.childRequest(p, step, i, states[i]); err != nil {
			return nil, NoEffect(err) // none is started, or an attempt before is in doubt
		}
	}
	recs := make([]Record, len(reqs))
	for i := range reqs {
		if recs[i], err = e.startChild(ctx, reqs[i]); err != nil {
			return nil, err
		}
		if isNoChild(&recs[i]) {
			return nil, Abort(ErrUndone) // nor is one that follows it
		}
	}
	return recs, nil
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
			var req StartRequest
			if req, err = e.childRequest(p, e.plan.units[res.unit].name, look.next[i], states[i]); err == nil {
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

func (e *execution) childRequest(p program, step string, i int, s any) (StartRequest, error) {
	data, err := p.encode(s)
	if err != nil {
		return StartRequest{}, err
	}
	plan := p.planned()
	m := newMachine(plan)
	m.carried = e.carried
	m.advance(time.Time{})
	return StartRequest{
		ID: ChildID(e.rec.ID, step, i), Saga: plan.name, Version: plan.version, Status: m.status, Data: data, Steps: m.encode(),
		Parent: e.rec.ID, ParentStep: step, Nonce: rand.Int64(), CompleteIn: plan.deadline, Log: []Entry{{Kind: EventCreated}},
	}, nil
}

// startChild starts a child, unless it has been started.
func (e *execution) startChild(ctx context.Context, req StartRequest) (Record, error) {
	p, err := e.r.program(Definition{req.Saga, req.Version})
	if err != nil {
		return Record{}, err
	}
	if e.r.keepPlace(p) {
		defer e.r.freePlace(p)
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

// errParentBack is the reason for which children turn back.
const errParentBack = "the saga that started it turned back"

// undoChildren turns the children back. As long as it is not known that all have been
// started, the next one is put on record as compensated: an owner that was cut off may
// still try to start it, and finds it ended.
func (e *execution) undoChildren(ctx context.Context, p program, res *result) error {
	if res.children > 0 {
		return e.turnChildren(ctx, res)
	}
	step, waits := e.plan.units[res.unit].name, false
	for i := 0; ; i++ {
		id := ChildID(e.rec.ID, step, i)
		rec, err := e.r.store.Load(ctx, id)
		if errors.Is(err, ErrNotFound) {
			var created bool
			if rec, created, err = e.r.store.Start(ctx, e.noChild(p, step, i)); created {
				break
			}
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
			break // put on record by an attempt before
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
func (e *execution) noChild(p program, step string, i int) StartRequest {
	plan := p.planned()
	m := newMachine(plan)
	m.status, m.back, m.cause = Compensated, true, recordedReason(errParentBack)
	data, _ := p.encode(p.zero()) // nobody needs it
	return StartRequest{
		ID: ChildID(e.rec.ID, step, i), Saga: plan.name, Version: plan.version, Status: Compensated, Data: data, Steps: m.encode(),
		Parent: e.rec.ID, ParentStep: step, Nonce: rand.Int64(), Log: []Entry{{Kind: EventCreated}, {Kind: EventCompensated, Error: errParentBack}},
	}
}

// isNoChild reports whether a record was made by noChild: it has no entries in its log but
// the first two. An operator can turn a child back that no runner has claimed, too.
func isNoChild(rec *Record) bool {
	return rec.Status == Compensated && rec.Epoch == 0 && rec.Seq == 2
}

// turnChild turns a child back, unless it has turned back already, and returns its status.
func (r *Runner) turnChild(ctx context.Context, rec *Record) (Status, error) {
	var err error
	switch {
	case rec.Status == Running && !rec.CancelRequested:
		err = r.Cancel(ctx, rec.ID, errParentBack)
	case rec.Status == Stuck:
		err = r.Compensate(ctx, rec.ID, errParentBack)
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
		p, err := r.program(Definition{rec.Saga, rec.Version})
		if err != nil {
			return rec.Status, err
		}
		m, err := loadMachine(p.planned(), &rec)
		if err != nil {
			return rec.Status, err
		}
		m.cause = recordedReason(errParentBack)
		m.turnBack("", errParentBack)
		m.advance(rec.Now)
		req := CommitRequest{
			ID: id, Epoch: rec.Epoch, Seq: rec.Seq, Nonce: rand.Int64(),
			Status: m.status, Steps: m.encode(), LastError: rec.LastError, Log: m.log, Release: true,
		}
		_, err = r.store.Commit(ctx, req)
		if errors.Is(err, ErrFenced) {
			continue
		}
		if err != nil {
			return rec.Status, err
		}
		rec.Status = req.Status
		r.tellLog(ctx, &rec, req)
		r.Wake()
		return rec.Status, nil
	}
}

// childrenSettled reports whether the children of a unit that waits for them have ended
// meanwhile.
func (e *execution) childrenSettled() bool {
	ctx, cancel := e.storeCtx()
	defer cancel()
	for i := range e.m.units {
		if !e.m.pending(i) || !e.m.waits(i, e.now()) {
			continue // a saga that is to turn back does not look at the children of its Do
		}
		u := &e.m.units[i]
		if u.Children == 0 {
			continue
		}
		look, err := e.look(ctx, i, u.Children)
		if err != nil {
			continue
		}
		if u.Status == StepUndoing && (!look.waits || look.completed) ||
			u.Status == StepStarted && look.settled(e.plan.units[i].hasUndo) {
			return true
		}
	}
	return false
}
