package saga

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	store "github.com/go-resilience/resilience/saga/sagastore"
)

// Get returns a saga of any definition. The error matches [ErrNotFound] if there is no such saga.
func (r *Runner) Get(ctx context.Context, id string) (*Instance, error) {
	rec, err := r.store.Load(ctx, id)
	if err != nil {
		return nil, fmt.Errorf("saga: get %q: %w", id, err)
	}
	return r.show(&rec), nil
}

// A Filter selects sagas for [Runner.List]. A zero field does not restrict the selection.
type Filter struct {
	Saga   string   // the Name of the definition
	Status []Status // any of these statuses; empty means every status
	ID     string   // the saga's id, or a prefix of it

	CreatedBefore time.Time // only sagas created before this time of the store's clock

	After string // the second result of List for the previous page
	Limit int    // the number of sagas in a page; zero means 100

	WithoutState bool // omit the State, so the store need not read it
}

// List returns a page of the sagas that the filter selects, the latest first. To get the following page, set
// Filter.After to next, the second result. If there are no more pages, next is "".
func (r *Runner) List(ctx context.Context, f Filter) (sagas []*Instance, next string, err error) {
	recs, next, err := r.store.List(ctx, store.Filter(f))
	if err != nil {
		return nil, "", fmt.Errorf("saga: list: %w", err)
	}
	for _, rec := range recs {
		sagas = append(sagas, r.show(&rec))
	}
	return sagas, next, nil
}

func (r *Runner) show(rec *store.Record) *Instance {
	p, _ := r.program(rec.Saga, rec.Version)
	return show(rec, p)
}

// History returns entries in the log of a saga, the oldest first. History returns up to limit entries whose Seq is
// greater than the argument after. A limit of 0 means all entries. If no saga has the id and after is 0, the error
// matches [ErrNotFound]. If no saga has the id and after is not 0, the result is empty.
func (r *Runner) History(ctx context.Context, id string, after int64, limit int) ([]Entry, error) {
	log, err := r.store.History(ctx, id, after, limit)
	if err == nil && len(log) == 0 && after <= 0 {
		err = ErrNotFound
	}
	if err != nil {
		return nil, fmt.Errorf("saga: history of %q: %w", id, err)
	}
	return log, nil
}

// An Entry is an entry in the log of a saga.
type Entry = store.Entry

// cancel requests that a running saga turn back, and returns when the request is recorded. An owner in this process
// receives the request immediately. An owner in another process receives it with its next commit or heartbeat.
func (r *Runner) cancel(ctx context.Context, id, note string) error {
	rec, err := r.store.Load(ctx, id)
	if err != nil {
		return fmt.Errorf("saga: cancel of %q: %w", id, err)
	}
	if rec.Status != Running {
		return notAllowed(ActionCancel, &rec)
	}
	if r.show(&rec).pivotDone() {
		return fmt.Errorf("%w: cancel of %q: its pivot is done", ErrNotAllowed, id)
	}
	rec, err = r.store.Post(ctx, store.PostRequest{ID: id, Payload: []byte(storable(note)), Cancel: true})
	if err != nil {
		return fmt.Errorf("saga: cancel of %q: %w", id, err)
	}
	if !rec.CancelRequested {
		return notAllowed(ActionCancel, &rec)
	}
	r.mu.Lock()
	h := r.held[id]
	r.mu.Unlock()
	if h != nil {
		h.cancel(rec.CancelNote)
	} else if rec.Owner == "" {
		r.Wake()
	}
	return nil
}

// An Operation is an operator's [Action] with its arguments. Action, Operation and [Runner.Operate] are unstable until
// version 1.0.0: a minor version may change them.
type Operation struct {
	Action Action
	// Step is the step that ActionSkip skips. An empty Step means the step at which the saga is stuck. If the saga is not
	// stuck, ActionSkip needs a Step.
	Step string
	Note string // a text for the saga's log; about the first 4,000 bytes are stored

	// Seq is the Seq of the [Instance] that the operator saw. If the saga's log has grown since the operator saw the
	// Instance, only ActionCancel is allowed. Zero means that Seq is not checked.
	Seq int64

	// State replaces the saga's state. State must be encoded by the definition's Codec. For example, if ActionSkip skips a
	// step, State can be the state that the step would have left. Nil means that the state does not change.
	//
	// State and Version can be set only with ActionRetry, ActionSkip or ActionCompensate, and only with a Note. State and
	// Version are allowed only if the saga is stuck, or if it waits and no runner holds it. The saga's log records the
	// Note, whether the state was replaced, and the old and the new version.
	State []byte
	// Version moves the saga to another registered version of its definition. The new version must have all steps of the
	// saga that are done, undone or skipped, or that may have taken effect. These steps must be in the same order as in
	// the old version. If the saga's pivot is done, the pivot of the new version must be one of the steps that are done.
	// If the new version has an additional step before the steps that were done, the saga continues with the additional
	// step, even if the pivot is done. If the pivot is done and the additional step returns a [Declined] error, the saga
	// is stuck. If a step after the additional step was waiting for its Delay or Await, that wait starts over. Version may
	// be the saga's own version if a deployment changed the steps of that version. Zero means that the version does not
	// change, so a saga cannot be moved to version 0.
	Version int
}

// replaces reports whether the operation changes the state or the version.
func (op *Operation) replaces() bool { return op.State != nil || op.Version != 0 }

// checkReplacement returns an error if the operation has a State or Version that its Action or its missing Note does
// not allow.
func (op *Operation) checkReplacement() error {
	if !op.replaces() {
		return nil
	}
	switch op.Action {
	case ActionRetry, ActionSkip, ActionCompensate:
	default:
		return fmt.Errorf("replacing State or Version needs the Action retry, skip or compensate, not %q", op.Action)
	}
	if op.Note == "" {
		return errors.New("replacing State or Version needs a Note with the reason")
	}
	return nil
}

// note returns the Note, followed by the changes to the version and the state. A long Note is cut. Otherwise storable
// would cut the changes. was is the version before the operation.
func (op *Operation) note(was int) string {
	changes := ""
	moved := fmt.Sprintf("moved from version %d to %d", was, op.Version)
	switch {
	case op.State != nil && op.Version != 0:
		changes = fmt.Sprintf(" (%s, and the state was replaced)", moved)
	case op.Version != 0:
		changes = fmt.Sprintf(" (%s)", moved)
	case op.State != nil:
		changes = " (the state was replaced)"
	default:
		return op.Note
	}
	return shorten(op.Note, maxText-len(changes)-len("...")) + changes
}

// Operate applies an operator's action to a saga. The error matches [ErrNotFound] if there is no such saga. The error
// matches [ErrNotAllowed] if the saga does not allow the operation, for example because of its status, or because its
// log has grown (see Operation.Seq). The error matches [ErrNotRegistered] if the operation needs the saga's definition
// and this runner does not have it.
func (r *Runner) Operate(ctx context.Context, id string, op Operation) error {
	if err := op.checkReplacement(); err != nil {
		return fmt.Errorf("%w: %s of %q: %w", ErrNotAllowed, op.Action, id, err)
	}
	if op.Action == ActionCancel {
		return r.cancel(ctx, id, op.Note)
	}
	_, err := r.write(ctx, op.Action, id, func(rec *store.Record) (req store.CommitRequest, err error) {
		switch {
		case rec.Status.Ended(), rec.Owner != "" && op.Action != ActionAbandon &&
			(op.Action != ActionRetry || op.replaces() || len(show(rec, nil).hung) == 0):
			return req, notAllowed(op.Action, rec)
		case op.Seq != 0 && rec.Seq != op.Seq:
			return req, fmt.Errorf("%w: %s of %q: its log has grown from %d entries to %d",
				ErrNotAllowed, op.Action, id, op.Seq, rec.Seq)
		case op.Action == ActionAbandon: // works even if the definition is unknown
			return store.CommitRequest{
				Status: Abandoned, Progress: rec.Progress, LastError: storable(op.Note),
				Failures: rec.Failures, Takeovers: rec.Takeovers,
				Log: []store.Entry{{Kind: EventAbandoned, Error: storable(op.Note)}},
			}, nil
		}
		return r.decide(rec, Input{Operation: &op})
	})
	return err
}

// decide decides about a saga that no runner holds, given the events in in. It returns the commit that records the
// decision.
func (r *Runner) decide(rec *store.Record, in Input) (req store.CommitRequest, err error) {
	var m *machine
	if op := in.Operation; op != nil && op.Version != 0 {
		m, err = r.movedMachine(rec, op)
		in.Operation = nil
	} else {
		m, err = r.machineOf(rec)
	}
	if err != nil {
		return req, err
	}
	in.Now, in.runner.lease, in.runner.idle = rec.Now, r.cfg.LeaseTTL, true
	d := m.decide(&in)
	if d.NotAllowed != "" {
		return req, fmt.Errorf("%w: %s of %q: %s", ErrNotAllowed, in.Operation.Action, rec.ID, d.NotAllowed)
	}
	req = m.commit()
	if m.Version != rec.Version {
		req.Version = m.Version
	}
	if !bytes.Equal(m.State, rec.State) {
		req.State = m.State
	}
	// A saga that waits for signals or children is due immediately, because they may have arrived or ended by now. The
	// saga's next owner reads them.
	if !m.onOutside(rec.Now) && !d.WakeAt.IsZero() {
		req.WakeIn = max(d.WakeAt.Sub(rec.Now), 0)
	}
	return req, nil
}

// machineOf returns the machine of a saga whose definition is registered.
func (r *Runner) machineOf(rec *store.Record) (*machine, error) {
	p, err := r.program(rec.Saga, rec.Version)
	if err != nil {
		return nil, err
	}
	m, err := load(p, rec)
	if err != nil {
		err = fmt.Errorf("%w: %w", ErrNotRegistered, err)
	}
	return m, err
}

// movedMachine returns the machine of a saga that an operation has moved to op.Version.
func (r *Runner) movedMachine(rec *store.Record, op *Operation) (*machine, error) {
	p, err := r.program(rec.Saga, op.Version)
	if err != nil {
		return nil, err
	}
	m, err := loadAny(rec)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNotRegistered, err)
	}
	if err := m.operateAs(p, op); err != nil {
		return nil, fmt.Errorf("%w: %s of %q: %w", ErrNotAllowed, op.Action, rec.ID, err)
	}
	return m, nil
}

// write loads the record of a saga, calls next with it, and commits the request that next returns. The commit releases
// the saga from its owner, if it has one. If another write comes first, write loads the record and calls next again. It
// returns the saga's status.
func (r *Runner) write(
	ctx context.Context, action Action, id string, next func(*store.Record) (store.CommitRequest, error),
) (Status, error) {
	for {
		rec, err := r.store.Load(ctx, id)
		if err != nil {
			return "", fmt.Errorf("saga: %s of %q: %w", action, id, err)
		}
		req, err := next(&rec)
		if err != nil {
			return rec.Status, err
		}
		req.ID, req.Epoch, req.Seq, req.Nonce, req.Release = rec.ID, rec.Epoch, rec.Seq, rand.Int64(), true
		_, err = r.store.Commit(ctx, req)
		if errors.Is(err, store.ErrFenced) {
			continue
		}
		if err != nil {
			return rec.Status, fmt.Errorf("saga: %s of %q: %w", action, id, err)
		}
		if in, _ := decode(&rec); rec.Owner == "" {
			r.reportCreated(ctx, &rec, in.unreported)
		}
		rec.Status, rec.Version = req.Status, cmp.Or(req.Version, rec.Version)
		defer r.reportLog(ctx, &rec, req, rec.Now) // last, because an observer may take long
		r.mu.Lock()
		r.wakeResults(store.Record{ID: id})
		if h := r.held[id]; h != nil && rec.Owner != "" && h.rec.Epoch == rec.Epoch {
			h.lose() // the commit has released the saga
		}
		r.mu.Unlock()
		if rec.Status.Ended() {
			r.notifyParent(ctx, &rec)
		}
		r.Wake()
		return rec.Status, nil
	}
}

func notAllowed(action Action, rec *store.Record) error {
	if rec.Owner != "" {
		return fmt.Errorf("%w: %s of %q: it is %s, held by %s", ErrNotAllowed, action, rec.ID, rec.Status, rec.Owner)
	}
	return fmt.Errorf("%w: %s of %q: it is %s", ErrNotAllowed, action, rec.ID, rec.Status)
}
