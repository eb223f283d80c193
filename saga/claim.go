package saga

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	store "github.com/go-resilience/resilience/internal/sagastore"
)

// claimLoop claims sagas at each Poll, and when it is woken. While the store fails nothing wakes
// it, since the store may fail because of how often it is asked.
func (r *Runner) claimLoop(ctx context.Context) {
	var failing, next time.Time
	every(ctx, 0, r.wake, func() time.Duration {
		if left := time.Until(next); left > 0 {
			return left
		}
		cfg, began := r.config(), time.Now()
		err := r.claim(ctx)
		// The jitter keeps processes from asking at the same time.
		wait := cfg.Poll - r.chance(cfg.Poll/8+1)
		if err == nil {
			failing = time.Time{}
			return wait
		}
		if failing.IsZero() {
			failing = began
		}
		wait = patience(failing, wait, cfg.LeaseTTL)
		r.storeFailed(ctx, fmt.Errorf("saga: claim (the next is in %v): %w", wait.Round(time.Millisecond), err))
		next = time.Now().Add(wait)
		return wait
	})
}

// patience returns how long a store is left alone that has failed since then: for as long as
// it has failed, but no less than least and no longer than most.
func patience(since time.Time, least, most time.Duration) time.Duration {
	return max(least, min(time.Since(since), most))
}

// gatherFor is how long the runner gathers notifications for one claim.
const gatherFor = 2 * time.Millisecond

// listenLoop lets the store wake the runner.
func (r *Runner) listenLoop(ctx context.Context) {
	n, ok := r.store.(store.Notifier)
	if !ok {
		return
	}
	var told atomic.Bool
	notify := func() {
		if told.CompareAndSwap(false, true) {
			time.AfterFunc(gatherFor, func() { told.Store(false); r.Wake() })
		}
	}
	for {
		err := n.Listen(ctx, notify)
		if ctx.Err() != nil {
			return
		}
		r.storeFailed(ctx, fmt.Errorf("saga: listen: %w", err))
		select {
		case <-ctx.Done():
			return
		case <-time.After(r.config().Poll):
		}
	}
}

// claim claims as many sagas as there are places for.
func (r *Runner) claim(ctx context.Context) error {
	cfg := r.config()
	req := r.claimRequest(cfg)
	if req.Limit == 0 {
		return nil
	}
	since := time.Now()
	// The end of ctx does not cut the claim short: claimed sagas must be written back.
	call, cancel := context.WithTimeout(context.WithoutCancel(ctx), cfg.LeaseTTL/3)
	recs, err := r.store.Claim(call, req)
	cancel()
	if err != nil {
		recs = nil
	}
	for _, rec := range recs {
		r.figures.count(func(s *Stats) { s.Claimed++ })
		if rec.Previous != "" {
			r.figures.count(func(s *Stats) { s.TakenOver++ })
		}
		r.hold(rec, since)()
	}
	r.claimed(req, recs)
	return err
}

// claimRequest returns a request for sagas of every definition, and keeps places free for them
// until claimed. The Limit is 0 if there is none.
func (r *Runner) claimRequest(cfg *RunnerConfig) store.ClaimRequest {
	r.mu.Lock()
	defer r.mu.Unlock()
	req := store.ClaimRequest{Owner: r.owner, LeaseTTL: cfg.LeaseTTL, Definitions: slices.Collect(maps.Keys(r.programs))}
	if len(req.Definitions) > 0 {
		req.Limit = r.reserve(cfg.Concurrency)
		r.backlog = req.Limit == 0
	}
	return req
}

// claimed gives back the places that a claim kept free, and notes what may be left to claim.
func (r *Runner) claimed(req store.ClaimRequest, recs []store.Record) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.backlog = len(recs) == req.Limit
	r.unreserve(req.Limit)
	r.claimRest() // some may have ended already
}

// hold keeps the lease of a saga, which this runner has had since then by the local clock. It
// returns what runs the saga. The caller has reserved a place.
func (r *Runner) hold(rec store.Record, since time.Time) (run func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	p := r.programs[store.Definition{Saga: rec.Saga, Version: rec.Version}]
	if p == nil {
		return func() {} // its lease ends, and another runner takes it over
	}
	if l := r.held[rec.ID]; l != nil {
		if l.epoch >= rec.Epoch {
			return func() {}
		}
		l.lose()
	}
	e := newExecution(r, p, rec, since)
	r.held[rec.ID] = e.lease
	return func() { r.work.Go(e.run) }
}

// begun runs a saga that a Start of this runner has found or created with req. The hooks are
// told of a new one while it is held, so that they may take longer than a lease.
func (r *Runner) begun(ctx context.Context, rec store.Record, created bool, since time.Time, req store.StartRequest) {
	run := func() {}
	if rec.Owner == "" {
		run = r.Wake
	} else if created && rec.Owner == req.Owner && rec.Epoch == 1 {
		run = r.hold(rec, since)
	}
	if created {
		r.happened(ctx, &rec, store.Entry{Kind: EventCreated, Seq: 1, Epoch: rec.Epoch, At: rec.CreatedAt})
	}
	run()
}
