package saga

import (
	"context"
	"database/sql"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
)

// Start starts a saga of a registered definition, with s as its state. When it returns
// nil, the saga is recorded and will end. This runner runs it if its Run is under way and
// has a free place; otherwise another runner does, or this one later.
//
// The caller chooses the id, so that Start can be repeated after an error: if the id
// exists already, Start changes nothing and returns the Instance that exists. The error
// is [ErrExists] if that Instance is of a definition with another name.
//
// Start writes nothing if ctx has ended, the id is not 1 to 200 bytes of UTF-8 without
// NUL, the definition is invalid or not registered, or the state cannot be encoded.
func Start[S any](ctx context.Context, r *Runner, sg *Saga[S], id string, s S) (*Instance, error) {
	req, p, err := newStart(ctx, r, sg, id, s)
	if err != nil {
		return nil, err
	}
	if r.keepPlace(p) {
		defer r.freePlace(p)
		req.Owner, req.LeaseTTL = r.owner, r.config().LeaseTTL
	}
	since := time.Now()
	rec, created, err := r.store.Start(ctx, req)
	if err != nil {
		// The answer may be lost. If the saga exists, its nonce says whether this call
		// has started it.
		found, lerr := r.store.Load(ctx, id)
		if lerr != nil {
			return nil, fmt.Errorf("saga: start of %q: %w", id, err)
		}
		rec, created = found, found.Nonce == req.Nonce
	}
	if rec.Saga != sg.Name {
		return nil, fmt.Errorf("%w: %q is a %s", ErrExists, id, rec.Saga)
	}
	r.begun(ctx, rec, created, since, req)
	return newInstance(rec, p.planned()), nil
}

// StartTx is Start within tx, a transaction of the store's own database: the saga exists
// if tx commits. A runner finds it at its next poll; call [Runner.Wake] after the commit
// to hasten that. An id that exists already is no error, unless it belongs to a
// definition with another name. The store must be a [TxStore].
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

// newStart checks and returns the request of Start and StartTx.
func newStart[S any](ctx context.Context, r *Runner, sg *Saga[S], id string, s S) (StartRequest, *registered, error) {
	if ctx.Err() != nil {
		return StartRequest{}, nil, ended.Error(ctx)
	}
	t, err := sg.program()
	var p *registered
	if err == nil {
		p, err = r.program(Definition{sg.Name, sg.Version})
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
	if m.carried, err = r.inject(ctx); err != nil {
		return StartRequest{}, nil, err
	}
	m.advance(time.Time{}) // the first steps are started with the record
	return StartRequest{
		ID: id, Saga: sg.Name, Version: sg.Version, Status: m.status, Data: data, Steps: m.encode(),
		Nonce: rand.Int64(), CompleteIn: sg.Timeout, Log: []Entry{{Kind: EventCreated}},
	}, p, nil
}
