package saga

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/saga/internal/machine"
	"github.com/go-resilience/resilience/saga/store"
)

// Run runs sagas until ctx ends, and returns nil. It returns an error immediately if ctx
// has ended already, another Run is under way, or the store is a [store.Checker] and was not
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

	var loops sync.WaitGroup
	loops.Go(func() { r.claimLoop(ctx) })
	loops.Go(func() { r.listenLoop(ctx) })
	loops.Go(func() { r.reportLoop(ctx) })
	loops.Go(func() { r.sweepLoop(ctx) })
	loops.Go(func() { r.heartbeatLoop(base) })
	<-ctx.Done()
	r.drain(cancel)
	loops.Wait()
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
	every(ctx, r.shortestLease()/3, r.beat, func() time.Duration {
		began := time.Now()
		r.heartbeat(ctx)
		return time.Until(began.Add(r.shortestLease() / 3))
	})
}

// shortestLease returns the shortest lease of a held saga, or the configured one if that
// is shorter. They differ between an Update and the heartbeat after it.
func (r *Runner) shortestLease() time.Duration {
	shortest := r.config().LeaseTTL
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, e := range r.held {
		if !e.lost() {
			shortest = min(shortest, e.term())
		}
	}
	return shortest
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
				e.renew(since, req.LeaseTTL)
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
	lease := r.shortestLease()
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

// reportLoop reports due sagas whose definition is not registered, and stuck sagas that
// no runner has reported.
func (r *Runner) reportLoop(ctx context.Context) {
	every(ctx, r.config().Poll, nil, func() time.Duration {
		r.reportUnregistered(ctx)
		r.reportStuck(ctx)
		return 3 * r.config().LeaseTTL
	})
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
		r.tell(ctx, Event{Kind: EventUnregistered, Saga: u.Saga, Version: u.Version, Count: u.Count, Took: u.Now.Sub(u.Oldest), At: u.Now})
	}
	r.figures.count(func(s *Stats) { s.Unregistered = n })
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
				r.tellOf(ctx, &rec, Event{Kind: EventStuck, Seq: rec.Seq, Step: in.Step, Err: machine.Reason(in.Cause), At: rec.UpdatedAt})
				r.toldStuck(ctx, rec.ID, rec.Seq)
			}
		}
		if f.After = next; next == "" {
			return
		}
	}
}
