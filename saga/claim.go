package saga

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"time"
)

// Wake makes the runner ask for due sagas immediately, without waiting for
// RunnerConfig.Poll: after the commit of the transaction of a [StartTx].
func (r *Runner) Wake() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

func (r *Runner) claimLoop(ctx context.Context) {
	t := time.NewTimer(0)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		case <-r.wake:
		}
		r.claim(ctx)
		// The jitter keeps processes from asking at the same time.
		poll := r.config().Poll
		t.Reset(poll - rand.N(poll/8+1))
	}
}

// gatherFor is how long the runner gathers notifications for one claim.
const gatherFor = 2 * time.Millisecond

// listenLoop lets the store wake the runner.
func (r *Runner) listenLoop(ctx context.Context) {
	n, ok := r.store.(Notifier)
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
func (r *Runner) claim(ctx context.Context) {
	known := r.definitions()
	if len(known) == 0 {
		return
	}
	cfg := r.config()
	n := r.reserve(cfg.Concurrency)
	if n == 0 {
		r.mu.Lock()
		r.backlog = true
		r.mu.Unlock()
		return
	}
	since := time.Now()
	// The end of ctx does not cut the claim short: claimed sagas must be written back.
	call, cancel := context.WithTimeout(context.WithoutCancel(ctx), cfg.LeaseTTL/3)
	recs, err := r.store.Claim(call, ClaimRequest{
		Owner: r.owner, LeaseTTL: cfg.LeaseTTL, Limit: n, Definitions: known,
	})
	cancel()
	if err != nil {
		recs = nil
		r.storeFailed(ctx, fmt.Errorf("saga: claim: %w", err))
	}
	for _, rec := range recs {
		r.count.claimed.Add(1)
		if rec.Previous != "" {
			r.count.takenOver.Add(1)
		}
		r.hold(rec, since, cfg.LeaseTTL)
	}
	r.mu.Lock()
	r.backlog = len(recs) == n
	r.mu.Unlock()
	r.unreserve(n)
}

// reserve keeps up to n places free for sagas that are about to be held, and returns how
// many. The runner does not stop before unreserve.
func (r *Runner) reserve(n int) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.base == nil || r.draining {
		return 0
	}
	n = max(min(n, r.config().Concurrency-len(r.held)-r.reserved), 0)
	if n > 0 {
		r.reserved += n
		r.work.Add(1)
	}
	return n
}

func (r *Runner) unreserve(n int) {
	if n == 0 {
		return
	}
	r.mu.Lock()
	r.reserved -= n
	r.mu.Unlock()
	r.work.Done()
}

// hold runs a saga of which this runner has had a lease since then, by the local clock.
func (r *Runner) hold(rec Record, since time.Time, lease time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	p := r.programs[Definition{rec.Saga, rec.Version}]
	if p == nil || r.base == nil {
		return // its lease ends, and another runner takes it over
	}
	if e := r.held[rec.ID]; e != nil {
		if e.id.epoch >= rec.Epoch {
			return
		}
		e.lose()
	}
	e := newExecution(r, p, rec, since, lease)
	if lease != r.config().LeaseTTL {
		r.beatNow() // an Update came in between
	}
	r.held[rec.ID] = e
	r.work.Go(e.run)
}

// drop forgets a saga that is no longer held.
func (r *Runner) drop(e *execution) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.held[e.rec.ID] == e {
		delete(r.held, e.rec.ID)
	}
	if len(r.held)+r.reserved <= r.config().Concurrency*3/4 && r.backlog {
		r.backlog = false
		r.Wake()
	}
	r.wakeResults(e.rec.ID)
}

// wakeResults wakes the calls of Result that wait for a saga. The caller holds r.mu.
func (r *Runner) wakeResults(id string) {
	for _, w := range r.waiters[id] {
		close(w)
	}
	delete(r.waiters, id)
}
