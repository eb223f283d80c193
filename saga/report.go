package saga

import (
	"context"
	"fmt"
	"log/slog"
	"time"
)

// reportLoop reports due sagas whose definition is not registered, and stuck sagas that
// no runner has reported.
func (r *Runner) reportLoop(ctx context.Context) {
	t := time.NewTimer(r.config().Poll)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		r.reportUnregistered(ctx)
		r.reportStuck(ctx)
		t.Reset(3 * r.config().LeaseTTL)
	}
}

func (r *Runner) reportUnregistered(ctx context.Context) {
	call, cancel := context.WithTimeout(ctx, r.config().LeaseTTL)
	defer cancel()
	r.mu.Lock()
	known := r.definitions()
	r.mu.Unlock()
	found, err := r.store.Unregistered(call, known)
	if ctx.Err() != nil {
		return // the call was cut short
	}
	if err != nil {
		r.storeFailed(ctx, fmt.Errorf("saga: unregistered: %w", err))
		return
	}
	var n int64
	for _, u := range found {
		n += int64(u.Count)
		r.tell(ctx, Event{Kind: EventUnregistered, Saga: u.Saga, Version: u.Version, Count: u.Count, At: u.Now})
		if onUnregistered := r.config().OnUnregistered; onUnregistered != nil {
			hook(ctx, "OnUnregistered", onUnregistered, u)
		} else {
			slog.WarnContext(ctx, "saga: due sagas of a definition that is not registered", "runner", r.Name(), "saga", u.Saga, "version", u.Version, "count", u.Count, "since", u.Now.Sub(u.Oldest))
		}
	}
	r.count.unregistered.Store(n)
}

// reportStuck reports sagas whose owner did not report them within a lease.
func (r *Runner) reportStuck(ctx context.Context) {
	f := Filter{Status: []Status{Stuck}, Unreported: true}
	for {
		call, cancel := context.WithTimeout(ctx, r.config().LeaseTTL)
		recs, next, err := r.store.List(call, f)
		cancel()
		if err != nil && ctx.Err() == nil {
			r.storeFailed(ctx, fmt.Errorf("saga: stuck sagas: %w", err))
		}
		for _, rec := range recs {
			if ctx.Err() != nil {
				return
			}
			if rec.Now.Sub(rec.UpdatedAt) >= r.config().LeaseTTL {
				in := r.instance(rec)
				r.tellOf(ctx, &rec, Event{Kind: EventStuck, Seq: rec.Seq, Step: in.Step, Err: recordedReason(in.Cause), At: rec.UpdatedAt})
				r.isStuck(ctx, in)
			}
		}
		if f.After = next; next == "" {
			return
		}
	}
}

const (
	lookEvery = 5 * time.Second // at the numbers of the sagas in the store, for Stats
	lookKept  = 5 * time.Minute // if nobody has asked meanwhile
)

// look asks the store for the numbers of its sagas, in the background, unless it was asked a
// moment ago. It forgets the last answer if that is so old that it would mislead.
func (r *Runner) look() {
	r.mu.Lock()
	defer r.mu.Unlock()
	age := time.Since(r.looked)
	if r.looking || age < lookEvery {
		return
	}
	if age > lookKept {
		r.stored.Store(nil)
	}
	r.looking, r.looked = true, time.Now()
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), r.config().LeaseTTL)
		defer cancel()
		counts, err := r.countsOf(ctx)
		r.mu.Lock()
		r.looking = false
		r.mu.Unlock()
		if err != nil {
			r.storeFailed(ctx, err)
			return
		}
		r.stored.Store(&counts)
	}()
}

// countsOf is Counts, for a caller whose goroutine a panic of the store must not end.
func (r *Runner) countsOf(ctx context.Context) (counts Counts, err error) {
	defer func() {
		if v := recover(); v != nil {
			err = fmt.Errorf("saga: counts: the store panicked: %v", v)
		}
	}()
	return r.Counts(ctx)
}

// isStuck reports a stuck saga, and then records that it did.
func (r *Runner) isStuck(ctx context.Context, in *Instance) {
	if onStuck := r.config().OnStuck; onStuck != nil {
		hook(ctx, "OnStuck", onStuck, StuckSaga{r.Name(), *in})
	} else {
		slog.WarnContext(ctx, "saga: stuck", "runner", r.Name(), "saga", in.Saga, "version", in.Version, "id", in.ID, "step", in.Step, "cause", in.Cause, "actions", in.Actions)
	}
	call, cancel := context.WithTimeout(context.WithoutCancel(ctx), r.config().LeaseTTL/2)
	defer cancel()
	if err := r.store.Reported(call, in.ID, in.Seq); err != nil {
		r.storeFailed(ctx, fmt.Errorf("saga: report of %q: %w", in.ID, err)) // it is reported again
	}
}

func (r *Runner) storeFailed(ctx context.Context, err error) {
	r.count.storeErrors.Add(1)
	r.tell(ctx, Event{Kind: EventStoreFailed, Err: err, At: time.Now()})
	if onStoreError := r.config().OnStoreError; onStoreError != nil {
		hook(ctx, "OnStoreError", onStoreError, err)
		return
	}
	now := time.Now().UnixNano()
	if last := r.warned.Load(); (last == 0 || now-last >= int64(time.Second)) && r.warned.CompareAndSwap(last, now) {
		slog.WarnContext(ctx, "saga: the store has failed", "runner", r.Name(), "err", err)
	}
}
