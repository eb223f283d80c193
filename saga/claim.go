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
	wake, failing := r.wake, time.Time{}
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		case <-wake:
		}
		cfg, began := r.config(), time.Now()
		err := r.claim(ctx)
		// The jitter keeps processes from asking at the same time.
		wait := cfg.Poll - rand.N(cfg.Poll/8+1)
		wake = r.wake
		if err == nil {
			failing = time.Time{}
		} else {
			// Whatever wakes the runner, since the store may fail because of how often it is asked.
			wake = nil
			if failing.IsZero() {
				failing = began
			}
			wait = max(wait, min(time.Since(failing), cfg.LeaseTTL))
			r.storeFailed(ctx, fmt.Errorf("saga: claim (the next is in %v): %w", wait.Round(time.Millisecond), err))
		}
		t.Reset(wait)
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
		r.count.claimed.Add(1)
		if rec.Previous != "" {
			r.count.takenOver.Add(1)
		}
		r.hold(rec, since, cfg.LeaseTTL)()
	}
	r.claimed(req, recs)
	return err
}

// claimRequest returns a request for sagas of each definition that has places, and keeps
// these free until claimed. The Limit is 0 if there is nothing to claim.
func (r *Runner) claimRequest(cfg *RunnerConfig) ClaimRequest {
	r.mu.Lock()
	defer r.mu.Unlock()
	req := ClaimRequest{Owner: r.owner, LeaseTTL: cfg.LeaseTTL, Limits: make(map[Definition]int)}
	for _, d := range r.definitions() {
		p := r.programs[d]
		n := p.free()
		if p.backlog = n <= 0; p.backlog {
			continue
		}
		req.Definitions = append(req.Definitions, d)
		if p.planned().most > 0 {
			req.Limits[d] = n
		}
	}
	if len(req.Definitions) == 0 {
		return req
	}
	if req.Limit = r.reserve(cfg.Concurrency); req.Limit == 0 {
		r.backlog = true
		return req
	}
	for d, n := range req.Limits {
		r.programs[d].reserved += n
	}
	return req
}

// claimed gives back the places that a claim kept free, and notes what may be left to claim.
func (r *Runner) claimed(req ClaimRequest, recs []Record) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.claims++
	got := make(map[Definition]int)
	for _, rec := range recs {
		d := Definition{rec.Saga, rec.Version}
		got[d]++
		if p := r.programs[d]; p != nil {
			p.turn = r.claims
		}
	}
	for d, n := range req.Limits {
		p := r.programs[d]
		p.reserved -= n
		p.backlog = got[d] == n
	}
	r.backlog = len(recs) == req.Limit
	r.unreserve(req.Limit)
}

// keepPlace keeps a place free for a saga of p that is about to be held, until freePlace. It
// reports whether there is one.
func (r *Runner) keepPlace(p *registered) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if p.free() <= 0 || r.reserve(1) == 0 {
		return false
	}
	p.reserved++
	return true
}

func (r *Runner) freePlace(p *registered) {
	r.mu.Lock()
	defer r.mu.Unlock()
	p.reserved--
	r.unreserve(1)
}

// reserve keeps up to n places free for sagas that are about to be held, and returns how
// many. The runner does not stop before unreserve. The caller holds r.mu.
func (r *Runner) reserve(n int) int {
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
	r.reserved -= n
	r.work.Done()
}

// hold keeps the lease of a saga, which this runner has had since then by the local clock. It
// returns what runs the saga. The caller has reserved a place.
func (r *Runner) hold(rec Record, since time.Time, lease time.Duration) (run func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	p := r.programs[Definition{rec.Saga, rec.Version}]
	if p == nil || r.base == nil {
		return func() {} // its lease ends, and another runner takes it over
	}
	if e := r.held[rec.ID]; e != nil {
		if e.id.epoch >= rec.Epoch {
			return func() {}
		}
		e.lose()
		e.p.held--
	}
	e := newExecution(r, p, rec, since, lease)
	if lease != r.config().LeaseTTL {
		r.beatNow() // an Update came in between
	}
	r.held[rec.ID] = e
	p.held++
	return func() { r.work.Go(e.run) }
}

// begun runs a saga that a Start of this runner has found or created with req. The hooks are
// told of a new one while it is held, so that they may take longer than a lease.
func (r *Runner) begun(ctx context.Context, rec Record, created bool, since time.Time, req StartRequest) {
	run := func() {}
	if created && req.Owner != "" && rec.Owner == req.Owner && rec.Epoch == 1 {
		run = r.hold(rec, since, req.LeaseTTL)
	} else if rec.Owner == "" {
		run = r.Wake
	}
	if created {
		r.happened(ctx, &rec, Entry{Kind: EventCreated, Seq: 1, Epoch: rec.Epoch, At: rec.CreatedAt})
	}
	run()
}

// drop forgets a saga that is no longer held.
func (r *Runner) drop(e *execution) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.held[e.rec.ID] == e {
		delete(r.held, e.rec.ID)
		e.p.held--
	}
	if r.backlog && len(r.held)+r.reserved <= r.config().Concurrency*3/4 ||
		e.p.backlog && e.p.held+e.p.reserved <= e.p.planned().most*3/4 {
		r.backlog, e.p.backlog = false, false
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
