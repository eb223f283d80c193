package saga

import (
	"context"
	"fmt"
	"time"
)

// Keep says how long sagas that have ended stay in the store. Zero means for ever.
//
// When a saga is deleted, its log and its signals go with it, Result and Get no longer
// find it, and a Start with its id runs it again. A time must therefore be longer than the
// time in which a Start may be repeated.
//
// The children of a saga that have ended are deleted just before it, whatever their status
// is, and never sooner. A child that has not ended, because its parent was abandoned, is kept
// as a saga of its own.
type Keep struct {
	Completed   time.Duration
	Compensated time.Duration
	Abandoned   time.Duration
}

// sweepBatch is how many sagas one call of the store deletes, of each generation.
const sweepBatch = 200

// sweepLoop deletes the sagas that have been kept for long enough, in small batches. A
// runner that has no free place leaves longer pauses between them.
func (r *Runner) sweepLoop(ctx context.Context) {
	t := time.NewTimer(r.config().Poll)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		more := r.sweep(ctx)
		switch cfg := r.config(); {
		case !more:
			t.Reset(3 * cfg.LeaseTTL)
		case r.isFull():
			t.Reset(cfg.Poll)
		default:
			t.Reset(cfg.Poll / 10)
		}
	}
}

func (r *Runner) isFull() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.backlog
}

// sweep deletes one batch of each status, and reports whether there may be more.
func (r *Runner) sweep(ctx context.Context) (more bool) {
	keep := r.config().Keep
	for _, k := range []struct {
		status Status
		age    time.Duration
	}{{Completed, keep.Completed}, {Compensated, keep.Compensated}, {Abandoned, keep.Abandoned}} {
		if k.age <= 0 {
			continue
		}
		call, cancel := context.WithTimeout(ctx, r.config().LeaseTTL)
		n, err := r.store.DeleteEnded(call, k.status, k.age, sweepBatch)
		cancel()
		if err != nil {
			if ctx.Err() == nil {
				r.storeFailed(ctx, fmt.Errorf("saga: sweep: %w", err))
			}
			continue
		}
		r.count.deleted.Add(int64(n))
		more = more || n >= sweepBatch
	}
	return more
}
