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
	t := time.NewTimer(r.cfg.Poll)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		r.reportUnregistered(ctx)
		r.reportStuck(ctx)
		t.Reset(3 * r.cfg.Lease)
	}
}

func (r *Runner) reportUnregistered(ctx context.Context) {
	call, cancel := context.WithTimeout(ctx, r.cfg.Lease)
	defer cancel()
	found, err := r.store.Unregistered(call, r.definitions())
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
		if r.cfg.OnUnregistered != nil {
			hook(ctx, "OnUnregistered", r.cfg.OnUnregistered, u)
		} else {
			slog.WarnContext(ctx, "saga: due sagas of a definition that is not registered", "runner", r.cfg.Name, "saga", u.Saga, "version", u.Version, "count", u.Count, "since", u.Now.Sub(u.Oldest))
		}
	}
	r.count.unregistered.Store(n)
}

// reportStuck reports sagas whose owner did not report them within a lease.
func (r *Runner) reportStuck(ctx context.Context) {
	call, cancel := context.WithTimeout(ctx, r.cfg.Lease)
	defer cancel()
	recs, err := r.store.List(call, Filter{Status: []Status{Stuck}, Unreported: true})
	if err != nil && ctx.Err() == nil {
		r.storeFailed(ctx, fmt.Errorf("saga: stuck sagas: %w", err))
	}
	for _, rec := range recs {
		if ctx.Err() != nil {
			return
		}
		if rec.Now.Sub(rec.UpdatedAt) >= r.cfg.Lease {
			r.isStuck(ctx, r.instance(rec))
		}
	}
}

// isStuck reports a stuck saga, and then records that it did.
func (r *Runner) isStuck(ctx context.Context, in *Instance) {
	if r.cfg.OnStuck != nil {
		hook(ctx, "OnStuck", r.cfg.OnStuck, StuckSaga{r.cfg.Name, *in})
	} else {
		slog.WarnContext(ctx, "saga: stuck", "runner", r.cfg.Name, "saga", in.Saga, "version", in.Version, "id", in.ID, "step", in.Step, "cause", in.Cause, "actions", in.Actions)
	}
	call, cancel := context.WithTimeout(context.WithoutCancel(ctx), r.cfg.Lease/2)
	defer cancel()
	if err := r.store.Reported(call, in.ID, in.Seq); err != nil {
		r.storeFailed(ctx, fmt.Errorf("saga: report of %q: %w", in.ID, err)) // it is reported again
	}
}

func (r *Runner) storeFailed(ctx context.Context, err error) {
	r.count.storeErrors.Add(1)
	if r.cfg.OnStoreError != nil {
		hook(ctx, "OnStoreError", r.cfg.OnStoreError, err)
		return
	}
	now := time.Now().UnixNano()
	if last := r.warned.Load(); (last == 0 || now-last >= int64(time.Second)) && r.warned.CompareAndSwap(last, now) {
		slog.WarnContext(ctx, "saga: the store has failed", "runner", r.cfg.Name, "err", err)
	}
}
