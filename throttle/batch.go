package throttle

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
)

// A batch holds tokens that were taken from Redis, and claims of the calls that found
// none. One trip at a time asks for all claims that were made before it began. So a
// call waits for the trip that is under way and for its own, whatever the load.
type batch struct {
	held atomic.Int64 // tokens; spent without mu

	mu     sync.Mutex
	asking bool
	claims []*claim // for the next trip
}

// A claim is a call that waits for tokens.
type claim struct {
	n       int
	left    bool          // the call has given up; under mu
	settled chan struct{} // closed when d, why and outage are set
	d       Decision
	why     Reason
	outage  *outage
}

// spend takes n of the held tokens, if they are there.
func (b *batch) spend(n int) bool {
	for {
		held := b.held.Load()
		if held < int64(n) {
			return false
		}
		if b.held.CompareAndSwap(held, held-int64(n)) {
			return true
		}
	}
}

// hold adds tokens, up to as many as the Batch of s may hold. The caller holds mu, so
// that either limit comes later or hold sees the new Batch.
func (b *batch) hold(tokens int, s *Shared) {
	b.held.Add(int64(min(tokens, s.terms.Load().cfg.Batch-1)))
}

// limit drops the tokens that a new Batch of size may not hold.
func (b *batch) limit(size int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for {
		held := b.held.Load()
		if held < int64(size) || b.held.CompareAndSwap(held, int64(size-1)) {
			return
		}
	}
}

// askBatch makes a claim for a call and waits until it is settled.
func (s *Shared) askBatch(ctx context.Context, t *sharedTerms, c sharedCall) (Decision, Reason, error) {
	b := &s.batch
	mine := &claim{n: c.n, settled: make(chan struct{})}
	b.mu.Lock()
	b.claims = append(b.claims, mine)
	if !b.asking {
		b.asking = true
		go s.fetch(context.WithoutCancel(ctx), c)
	}
	b.mu.Unlock()
	select {
	case <-mine.settled:
	case <-ctx.Done():
		b.mu.Lock()
		mine.left = true
		b.mu.Unlock()
		return t.unknown(), ContextEnded, ended.Error(ctx)
	}
	if mine.outage != nil {
		return s.decideAlone(ctx, t, c, mine.outage)
	}
	return mine.d, mine.why, nil
}

// fetch makes one trip after the other until there are no more claims.
func (s *Shared) fetch(ctx context.Context, c sharedCall) {
	b := &s.batch
	var last *outage
	for {
		b.mu.Lock()
		claims := slices.DeleteFunc(b.claims, func(c *claim) bool { return c.left })
		b.claims = nil
		if len(claims) == 0 {
			b.asking = false
			b.mu.Unlock()
			return
		}
		b.mu.Unlock()
		if last != nil { // these claims were made before the outage was known
			settle(claims, last)
			continue
		}
		last = s.fetchFor(ctx, c, claims)
	}
}

// fetchFor makes a trip for claims, and settles them. It returns the outage, if the
// trip failed.
func (s *Shared) fetchFor(ctx context.Context, c sharedCall, claims []*claim) *outage {
	t := s.terms.Load()
	b := &s.batch
	held := int(b.held.Swap(0))
	// The cheap claims first, so that no claim is refused for which there are tokens.
	slices.SortStableFunc(claims, func(a, b *claim) int { return cmp.Compare(a.n, b.n) })
	for len(claims) > 0 && claims[0].n <= held { // the trip before has left enough
		held -= claims[0].n
		claims[0].d = t.unknown()
		claims[0].d.OK, claims[0].d.Remaining = true, held
		close(claims[0].settled)
		claims = claims[1:]
	}
	if len(claims) == 0 {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.hold(held, s)
		return nil
	}
	trip := s.depart(ctx, t, c, make(chan struct{}))
	go s.travel(trip, t.amounts(claims, held))
	<-trip.ended
	b.mu.Lock()
	defer b.mu.Unlock()
	if trip.outage != nil {
		b.hold(held, s)
		settle(claims, trip.outage)
		return trip.outage
	}
	a := trip.answer
	held += a.taken
	for _, claim := range claims {
		short := claim.n - held
		a.wait = max(t.wait(short, 0, a.debt), time.Microsecond)
		claim.d, claim.why = t.decision(short <= 0, short, 0, a)
		if claim.d.OK && !claim.left {
			held -= claim.n
		}
		close(claim.settled)
	}
	// If calls have given up, more may be left than a batch. hold drops the rest, to keep
	// the bound.
	b.hold(held, s)
	return nil
}

// amounts returns the amounts to ask for, the preferred one first: one that serves all
// claims and is at least a batch, then one that serves all claims, half of them, a
// quarter of them, and so on down to the cheapest claim.
func (t *sharedTerms) amounts(claims []*claim, held int) (amounts []int) {
	sum := 0
	sums := make([]int, len(claims))
	for i, claim := range claims {
		sum += claim.n
		sums[i] = sum
	}
	amounts = append(amounts, max(sum, t.cfg.Batch)-held)
	for k := len(claims); k > 0; k /= 2 {
		amounts = append(amounts, sums[k-1]-held)
	}
	amounts = slices.DeleteFunc(amounts, func(n int) bool { return n > t.most(0) })
	return slices.Compact(amounts)
}

// wait returns the time until a level could take n tokens of the rate on top of a debt.
func (t *sharedTerms) wait(n, level int, debt time.Duration) time.Duration {
	cost, room := t.token.times(max(n, 0)), t.room[level]
	over := int64(debt/time.Microsecond) + int64(cost.whole) - int64(room.whole)
	if cost.part > room.part {
		over++
	}
	return time.Duration(max(over, 0)) * time.Microsecond
}

func settle(claims []*claim, o *outage) {
	for _, claim := range claims {
		claim.outage = o
		close(claim.settled)
	}
}
