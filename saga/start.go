package saga

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
)

// Start starts a saga of a registered definition under an id of the caller's,
// with s as its state. When it returns nil the saga is recorded and will end,
// by this runner, if its Run is under way and has a place free, or by another.
//
// The id is what makes it safe to call Start again after an error: if it exists
// already, nothing is started, and the Instance is the one that exists. It is
// [ErrExists] if that is of a definition with another name. Nothing is written
// for a ctx that has ended, an id that is not 1 to 200 bytes of UTF-8 without
// NUL, a definition that is wrong or not registered, or a state that does not
// encode.
func Start[S any](ctx context.Context, r *Runner, sg *Saga[S], id string, s S) (*Instance, error) {
	req, t, err := newStart(ctx, r, sg, id, s)
	if err != nil {
		return nil, err
	}
	here := r.reserve(1)
	defer r.unreserve(here)
	if here > 0 {
		req.Owner, req.Lease = r.owner, r.cfg.Lease
	}
	since := time.Now()
	rec, created, err := r.store.Start(ctx, req)
	if err != nil {
		// The answer may have been lost: then the saga is there, and its nonce says
		// whether this call has started it.
		found, lerr := r.store.Load(ctx, id)
		if lerr != nil {
			return nil, fmt.Errorf("saga: start of %q: %w", id, err)
		}
		rec, created = found, found.Nonce == req.Nonce
	}
	if rec.Saga != sg.Name {
		return nil, fmt.Errorf("%w: %q is a %s", ErrExists, id, rec.Saga)
	}
	if created {
		r.count.started.Add(1)
		r.happened(ctx, &rec, Entry{Event: EventCreated, Seq: 1, Epoch: rec.Epoch, At: rec.CreatedAt})
	}
	if created && here > 0 && rec.Owner == r.owner && rec.Epoch == 1 {
		r.hold(rec, since)
	} else if rec.Owner == "" {
		r.Wake()
	}
	return newInstance(rec, t.plan), nil
}

// StartTx is Start within tx, in the store's own database: the saga exists if
// tx commits, together with whatever else tx does. It runs when a runner next
// looks for it, which [Runner.Wake] hastens. An id that exists already is no
// error, unless it is of a definition with another name. The store must be a
// [TxStore].
func StartTx[S any](ctx context.Context, tx *sql.Tx, r *Runner, sg *Saga[S], id string, s S) error {
	if r.tx == nil {
		return fmt.Errorf("%w: StartTx of %q", ErrNoTx, id)
	}
	req, _, err := newStart(ctx, r, sg, id, s)
	if err != nil {
		return err
	}
	rec, _, err := r.tx.StartTx(ctx, tx, req)
	if err != nil {
		return fmt.Errorf("saga: start of %q: %w", id, err)
	}
	if rec.Saga != sg.Name {
		return fmt.Errorf("%w: %q is a %s", ErrExists, id, rec.Saga)
	}
	return nil
}

// newStart is what Start and StartTx write, which is checked first.
func newStart[S any](ctx context.Context, r *Runner, sg *Saga[S], id string, s S) (StartRequest, *typed[S], error) {
	if ctx.Err() != nil {
		return StartRequest{}, nil, ended.Error(ctx)
	}
	t, err := sg.program()
	if err == nil {
		_, err = r.program(Definition{sg.Name, sg.Version})
	}
	if err == nil {
		err = checkID(id)
	}
	if err != nil {
		return StartRequest{}, nil, err
	}
	data, err := t.encode(&s)
	if err != nil {
		return StartRequest{}, nil, err
	}
	m := newMachine(t.plan)
	m.advance(time.Time{}) // the first steps are started with the record
	return StartRequest{
		ID: id, Saga: sg.Name, Version: sg.Version, Status: m.status, Data: data, Steps: m.encode(),
		Nonce: rand.Int64(), CompleteIn: sg.Deadline, Log: []Entry{{Event: EventCreated}},
	}, t, nil
}

// Result waits until the saga has ended, whichever process runs it, and returns
// its state. The error is nil if it has completed, [ErrNotFound], the end of
// ctx, or an [*Error], with the state as it was left, when the saga was
// compensated, was abandoned, or is stuck. A store that fails is asked again
// after RunnerConfig.Poll; its error is returned with the end of ctx.
//
// A step that waits for the Result of a saga that it has started keeps the place of
// its own saga meanwhile. Give such sagas a Runner of their own: otherwise parents
// can take all places of RunnerConfig.Concurrency, and none is left for a child.
func Result[S any](ctx context.Context, r *Runner, id string) (S, error) {
	var s S
	var failed error
	for {
		if ctx.Err() != nil {
			return s, errors.Join(ended.Error(ctx), failed)
		}
		// Before the look, so that no end is missed after it.
		told := r.listen(id)
		rec, err := r.store.Load(ctx, id)
		switch {
		case errors.Is(err, ErrNotFound):
			r.unlisten(id, told)
			return s, fmt.Errorf("saga: result of %q: %w", id, err)
		case err != nil:
			failed = fmt.Errorf("saga: result of %q: %w", id, err)
			if ctx.Err() == nil { // else it was cut short
				r.storeFailed(ctx, failed)
			}
		case rec.Status == Stuck || rec.Status.Ended():
			r.unlisten(id, told)
			return resultOf[S](ctx, r, rec)
		default:
			failed = nil
		}
		t := time.NewTimer(r.cfg.Poll)
		select {
		case <-told:
		case <-t.C:
		case <-ctx.Done():
		}
		t.Stop()
		r.unlisten(id, told)
	}
}

// Result is the function of that name for a saga of this definition, whose state it
// knows.
func (sg *Saga[S]) Result(ctx context.Context, r *Runner, id string) (S, error) {
	return Result[S](ctx, r, id)
}

func resultOf[S any](ctx context.Context, r *Runner, rec Record) (s S, err error) {
	p, err := r.program(Definition{rec.Saga, rec.Version})
	if err != nil {
		return s, err
	}
	decoded, err := p.decode(rec.Data)
	if err != nil {
		return s, err
	}
	state, ok := decoded.(*S)
	if !ok {
		return s, fmt.Errorf("saga: the state of %q is a %T, not a %T", rec.ID, decoded, &s)
	}
	if rec.Status == Completed {
		return *state, nil
	}
	log, err := r.store.History(ctx, rec.ID)
	if err != nil && ctx.Err() == nil {
		err = fmt.Errorf("saga: history of %q: %w", rec.ID, err)
	}
	failure := error(newInstance(rec, p.planned()).failure(log))
	if err != nil {
		failure = errors.Join(failure, err)
	}
	return *state, failure
}

// listen returns a channel that is closed when this runner stops holding a saga.
func (r *Runner) listen(id string) chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	w := make(chan struct{})
	r.waiters[id] = append(r.waiters[id], w)
	return w
}

func (r *Runner) unlisten(id string, w chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	list := r.waiters[id]
	for i := range list {
		if list[i] == w {
			list[i] = list[len(list)-1]
			r.waiters[id] = list[:len(list)-1]
			break
		}
	}
	if len(r.waiters[id]) == 0 {
		delete(r.waiters, id)
	}
}
