package saga

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"
	"unicode/utf8"

	"github.com/go-resilience/resilience/internal/ended"
	store "github.com/go-resilience/resilience/internal/sagastore"
	"github.com/go-resilience/resilience/saga/internal/participant"
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
// NUL, the definition is invalid or not registered, or the state cannot be encoded or does not
// come back from its Codec as it was.
func Start[S any](ctx context.Context, r *Runner, sg *Saga[S], id string, s S) (*Instance, error) {
	req, p, err := newStart(ctx, r, sg, id, s)
	if err != nil {
		return nil, err
	}
	if r.keepPlace() {
		defer r.freePlace()
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
// definition with another name. The store must be one of sqlstore.
func StartTx[S any](ctx context.Context, tx *sql.Tx, r *Runner, sg *Saga[S], id string, s S) error {
	if r.tx == nil {
		return fmt.Errorf("%w: StartTx of %q", errNoTx, id)
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
func newStart[S any](ctx context.Context, r *Runner, sg *Saga[S], id string, s S) (store.StartRequest, program, error) {
	if ctx.Err() != nil {
		return store.StartRequest{}, nil, ended.Error(ctx)
	}
	t, err := sg.program()
	var p program
	if err == nil {
		p, err = r.program(sg.Name, sg.Version)
	}
	if err == nil {
		err = participant.CheckID(id)
	}
	if err != nil {
		return store.StartRequest{}, nil, err
	}
	data, err := t.encodeFirst(&s)
	if err != nil {
		return store.StartRequest{}, nil, err
	}
	return startRequest(t.plan, id, data, r.inject(ctx)), p, nil
}

// Result waits until the saga has ended, in whichever process, and returns its state.
// The error is nil if the saga has completed. It is an [*Error], beside the state as it
// was left, if the saga was compensated, was abandoned or is stuck. Otherwise it is
// [ErrNotFound], [ErrNotRegistered], an error of the Codec or the end of ctx. If the store
// fails, Result asks again after RunnerConfig.Poll, and returns the store's error together
// with the end of ctx. The causes of an Error have their recorded texts, so errors.Is finds
// none of yours: to learn why a saga has turned back, write the reason into its state.
//
// The version of sg does not matter: the state is decoded by the definition that the
// saga was started with, which must be registered with r.
//
// Consider a step that starts another saga and waits for its Result. It keeps the place
// of its own saga meanwhile. With one Runner for both, such parents could take all places
// of RunnerConfig.Concurrency and leave none for a child: give the children a Runner of
// their own.
func (sg *Saga[S]) Result(ctx context.Context, r *Runner, id string) (S, error) {
	var s S
	var failed error
	for first := true; ; first = false {
		if ctx.Err() != nil {
			return s, errors.Join(ended.Error(ctx), failed)
		}
		// Listen before the look at the store, so that no end is missed between them. A saga
		// that this runner holds has not ended; it may be looked at if it takes longer.
		told, here := r.listen(id)
		var rec store.Record
		var err error
		if !first || !here {
			rec, err = r.store.Load(ctx, id)
		}
		switch {
		case errors.Is(err, ErrNotFound):
			r.unlisten(id, told)
			return s, fmt.Errorf("saga: result of %q: %w", id, err)
		case err != nil:
			failed = fmt.Errorf("saga: result of %q: %w", id, err)
			if ctx.Err() == nil { // otherwise the call was cut short
				r.storeFailed(ctx, failed)
			}
		case rec.Status == Stuck || rec.Status.Ended():
			r.unlisten(id, told)
			return resultOf[S](ctx, r, rec)
		default:
			failed = nil
		}
		t := time.NewTimer(r.config().Poll)
		select {
		case rec = <-told:
		case <-t.C:
		case <-ctx.Done():
		}
		t.Stop()
		r.unlisten(id, told)
		if rec.Status == Completed { // the error of another end needs its log
			return resultOf[S](ctx, r, rec)
		}
	}
}

func resultOf[S any](ctx context.Context, r *Runner, rec store.Record) (s S, err error) {
	p, err := r.program(rec.Saga, rec.Version)
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
	var log []store.Entry
	if rec.Status == Abandoned { // its last entry has the operator's note
		log, err = r.store.History(ctx, rec.ID, rec.Seq-1, 0)
		if err != nil && ctx.Err() == nil {
			err = fmt.Errorf("saga: history of %q: %w", rec.ID, err)
		}
	}
	failure := error(newInstance(rec, p.planned()).failure(log))
	if err != nil {
		failure = errors.Join(failure, err)
	}
	return *state, failure
}

// maxCarried is how many bytes a saga carries at most.
const maxCarried = 4096

// inject returns what a saga carries that is started under ctx.
func (r *Runner) inject(ctx context.Context) string {
	if r.cfg.Inject == nil {
		return ""
	}
	if carried := r.cfg.Inject(ctx); len(carried) <= maxCarried && utf8.ValidString(carried) {
		return carried
	}
	return ""
}
