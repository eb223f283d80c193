package saga

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/go-resilience/resilience/internal/ended"
	store "github.com/go-resilience/resilience/internal/sagastore"
)

// Run runs sagas until ctx ends, and returns nil. It returns an error immediately if ctx
// has ended already, another Run is under way, or the store is in a database and was not
// set up.
//
// When ctx ends, Run claims nothing more, waits up to RunnerConfig.Drain for the running
// attempts, and writes back the sagas that it holds for other runners to continue. After
// Drain it sends no more heartbeats: other runners take over sagas that are not written
// back by the end of their leases. So Run returns within about Drain and LeaseTTL, unless a
// step ignores the end of its ctx, a hook does not return, or a Start still waits for the store:
// give Start a ctx that ends.
func (r *Runner) Run(ctx context.Context) error {
	if ctx.Err() != nil {
		return ended.Error(ctx)
	}
	if err := r.check(ctx); err != nil {
		return err
	}
	base, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	defer cancel(errDraining)
	r.mu.Lock()
	if r.base != nil {
		r.mu.Unlock()
		return errors.New("saga: the runner is running already")
	}
	r.base, r.draining = base, false
	r.mu.Unlock()

	var loops errgroup.Group
	for _, loop := range []func(){
		func() { r.claimLoop(ctx) }, func() { r.listenLoop(ctx) }, func() { r.sweepLoop(ctx) }, func() { r.heartbeatLoop(base) },
	} {
		loops.Go(func() error { loop(); return nil })
	}
	<-ctx.Done()
	r.drain(cancel)
	_ = loops.Wait()
	r.mu.Lock()
	r.base = nil
	r.mu.Unlock()
	return nil
}

// check returns the error of a store that was not set up. If the store does not answer,
// the runner runs nevertheless.
func (r *Runner) check(ctx context.Context) error {
	c, ok := r.store.(store.Checker)
	if !ok {
		return nil
	}
	call, cancel := context.WithTimeout(ctx, r.config().LeaseTTL/3)
	defer cancel()
	err := c.Check(call)
	if errors.Is(err, store.ErrNotMigrated) {
		return fmt.Errorf("saga: run: %w", err)
	}
	if err != nil && ctx.Err() == nil {
		r.storeFailed(ctx, fmt.Errorf("saga: run: %w", err))
	}
	return nil
}

// drain waits until the runner holds nothing any more, and ends base when Drain has
// passed.
func (r *Runner) drain(cancel context.CancelCauseFunc) {
	r.mu.Lock()
	r.draining = true
	for _, e := range r.held {
		e.nudge()
	}
	r.mu.Unlock()
	hard := time.AfterFunc(max(r.config().Drain, 0), func() { cancel(errDraining) })
	defer hard.Stop()
	r.work.Wait()
	cancel(errDraining)
}

// heartbeatLoop extends the leases of all held sagas, with one statement for all. It
// ends with the ctx of the attempts. Otherwise a step that hangs, or a store that accepts
// heartbeats and fails every commit, would keep a saga forever.
func (r *Runner) heartbeatLoop(ctx context.Context) {
	every(ctx, r.cfg.LeaseTTL/3, nil, func() time.Duration {
		began := time.Now()
		r.heartbeat(ctx)
		return time.Until(began.Add(r.cfg.LeaseTTL / 3))
	})
}

func (r *Runner) heartbeat(ctx context.Context) {
	r.mu.Lock()
	held := make(map[store.Held]*lease, len(r.held))
	req := store.HeartbeatRequest{Owner: r.owner, LeaseTTL: r.config().LeaseTTL}
	for id, e := range r.held {
		if e.lost() {
			continue // it waits for a step that ignores its ctx
		}
		h := store.Held{ID: id, Epoch: e.epoch}
		held[h] = e
		req.Held = append(req.Held, h)
	}
	r.mu.Unlock()
	if len(held) == 0 {
		return
	}
	renewed, since, err := r.renew(ctx, req)
	if err != nil {
		return // each execution has a timer for its lease
	}
	for _, n := range renewed {
		h := store.Held{ID: n.ID, Epoch: n.Epoch}
		if e := held[h]; e != nil {
			if !n.Locked {
				e.renew(since)
			}
			if n.CancelRequested {
				e.cancel(n.CancelNote)
			}
			delete(held, h)
		}
	}
	for _, e := range held {
		e.lose()
	}
}

// renew sends one heartbeat and returns the time at which it was sent. The first try has
// little time, so that a half-open connection does not cost the leases. The second has
// more, in case the store is slow. A store with a single writer is local, and can only be
// slow.
func (r *Runner) renew(ctx context.Context, req store.HeartbeatRequest) (renewed []store.Renewed, since time.Time, err error) {
	lease := r.cfg.LeaseTTL
	tries := []time.Duration{lease / 8, lease / 3}
	if r.tx != nil && r.tx.Exclusive() {
		tries = tries[1:]
	}
	for _, timeout := range tries {
		since = time.Now()
		call, cancel := context.WithTimeout(context.WithoutCancel(ctx), timeout)
		renewed, err = r.store.Heartbeat(call, req)
		cancel()
		if err == nil {
			break
		}
		r.storeFailed(ctx, fmt.Errorf("saga: heartbeat: %w", err))
	}
	return renewed, since, err
}

// sweepBatch is how many sagas one call of the store deletes, of each generation.
const sweepBatch = 200

// sweepLoop deletes the sagas that have been kept for long enough, in small batches with
// pauses between them. A runner that is busy does so as well, since it ends many.
func (r *Runner) sweepLoop(ctx context.Context) {
	every(ctx, r.config().Poll, nil, func() time.Duration {
		more := r.sweep(ctx)
		cfg := r.config()
		if more {
			return cfg.Poll / 10
		}
		return 3 * cfg.LeaseTTL
	})
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
		r.figures.count(func(s *Stats) { s.Deleted += int64(n) })
		more = more || n >= sweepBatch
	}
	return more
}
