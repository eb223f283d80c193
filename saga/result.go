package saga

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
)

// Result waits until the saga has ended, in whichever process, and returns its state.
// The error is nil if the saga has completed. It is an [*Error], beside the state as it
// was left, if the saga was compensated, was abandoned or is stuck. Otherwise it is
// [ErrNotFound], [ErrNotRegistered], an error of the Codec or the end of ctx. If the store
// fails, Result asks again after RunnerConfig.Poll, and returns the store's error together
// with the end of ctx.
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
	for {
		if ctx.Err() != nil {
			return s, errors.Join(ended.Error(ctx), failed)
		}
		// Listen before the look at the store, so that no end is missed between them.
		told := r.listen(id)
		rec, err := r.store.Load(ctx, id)
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
		case <-told:
		case <-t.C:
		case <-ctx.Done():
		}
		t.Stop()
		r.unlisten(id, told)
	}
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
	log, err := r.store.History(ctx, rec.ID, 0, 0)
	if err != nil && ctx.Err() == nil {
		err = fmt.Errorf("saga: history of %q: %w", rec.ID, err)
	}
	failure := error(newInstance(rec, p.planned()).failure(log))
	if err != nil {
		failure = errors.Join(failure, err)
	}
	return *state, failure
}

// listen returns a channel that is closed when this runner no longer holds the saga.
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
