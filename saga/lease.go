package saga

import (
	"context"
	"fmt"
	"time"
)

// heartbeatLoop extends the leases of all held sagas, with one statement for all. It
// ends with the ctx of the attempts. Otherwise a step that hangs, or a store that accepts
// heartbeats and fails every commit, would keep a saga for ever.
func (r *Runner) heartbeatLoop(ctx context.Context) {
	t := time.NewTimer(r.shortestLease() / 3)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		case <-r.beat:
		}
		began := time.Now()
		r.heartbeat(ctx)
		t.Reset(time.Until(began.Add(r.shortestLease() / 3)))
	}
}

// beatNow makes the runner send a heartbeat now: some sagas have a lease that is not the
// configured one.
func (r *Runner) beatNow() {
	select {
	case r.beat <- struct{}{}:
	default:
	}
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
	held := make(map[Held]*execution, len(r.held))
	req := HeartbeatRequest{Owner: r.owner, LeaseTTL: r.config().LeaseTTL}
	for id, e := range r.held {
		if e.lost() {
			continue // it waits for a step that ignores its ctx
		}
		h := Held{id, e.id.epoch}
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
		h := Held{n.ID, n.Epoch}
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
func (r *Runner) renew(ctx context.Context, req HeartbeatRequest) (renewed []Renewed, since time.Time, err error) {
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

// term returns the length of the lease that the saga has.
func (e *execution) term() time.Duration {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.granted
}

// renew moves the end of the lease, after a heartbeat that was sent at since.
func (e *execution) renew(since time.Time, lease time.Duration) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.lease.Stop() {
		e.granted, e.until = lease, since.Add(lease)
		e.lease.Reset(time.Until(e.until))
	}
}

// lose gives up a saga that another runner has, or may have by now, and ends its
// attempts.
func (e *execution) lose() {
	e.mu.Lock()
	e.gone = true
	e.mu.Unlock()
	e.stop(ErrLost)
	e.nudge()
}

// lost reports whether this owner may no longer act. A process that was stopped learns
// it here before its timers fire.
func (e *execution) lost() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.gone || !time.Now().Before(e.until)
}
