package breaker

import (
	"cmp"
	"slices"
	"time"
)

// A permit is held by a probe from its admission to its end, for at most MaxHalfOpen.
// Probes of an earlier half-open phase that still run hold theirs too, so that there are
// never more than Probes at once.
type permit struct {
	id      uint64 // from 1
	expires time.Duration
}

// take returns a permit for a probe of phase p, if one is free.
func (b *Breaker) take(p *phase, now time.Duration) (uint64, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.phase.Load() != p {
		return 0, false
	}
	b.permits = slices.DeleteFunc(b.permits, func(q permit) bool { return q.expires <= now })
	r := p.rules
	most := min(r.Probes, r.Successes-p.circuit.successes())
	ok := len(b.permits) < most
	if ok {
		b.lastPermit++
		b.permits = append(b.permits, permit{b.lastPermit, now + r.MaxHalfOpen})
	}
	if len(b.permits) >= most {
		next := slices.MinFunc(b.permits, func(p, q permit) int { return cmp.Compare(p.expires, q.expires) })
		b.busy.Store(int64(next.expires))
	}
	return b.lastPermit, ok
}

// settleProbe counts the verdict v on a probe of phase p and takes its permit back. A
// probe that has lost its permit does not count. A Ping, and a call that breaks off after
// it has returned, have no permit: id is 0.
func (b *Breaker) settleProbe(p *phase, id uint64, v *verdict) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if id == 0 || b.release(id) {
		p.circuit.report(v)
		b.catchUp()
	}
}

// release takes a permit back and reports whether it had not expired; b.mu is held.
func (b *Breaker) release(id uint64) bool {
	i := slices.IndexFunc(b.permits, func(q permit) bool { return q.id == id })
	if i < 0 {
		return false
	}
	held := b.now() < b.permits[i].expires
	b.permits = slices.Delete(b.permits, i, i+1)
	b.busy.Store(0)
	return held
}
