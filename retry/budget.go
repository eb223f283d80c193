package retry

import (
	"math"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience/internal/invalid"
)

// BudgetConfig says how many retries a [Budget] allows.
type BudgetConfig struct {
	Ratio     float64 // retries for each call, at most 100; 0: 0.2; negative: none
	PerSecond int     // retries a second on top of that; 0: 10; negative: none
}

// Validate reports what in c cannot mean anything.
func (c BudgetConfig) Validate() error {
	f := invalid.Fields{Type: "retry.BudgetConfig"}
	f.Need(c.Ratio <= 100, "Ratio", c.Ratio, "at most 100, 0 (for 0.2), or negative (for none)") // NaN is not
	f.Need(c.PerSecond <= 1e6, "PerSecond", c.PerSecond, "at most 1000000, 0 (for 10), or negative (for none)")
	return f.Err()
}

// A Budget bounds retries to a fraction of calls, so that clients which retry
// do not multiply the load on a dependency that is down. Share one among the
// retriers of one dependency.
//
// Over the last 10 seconds it allows Ratio retries for each call, and PerSecond
// x 10 besides: a rare call may still be retried. A retry is charged before its
// wait. It costs nothing in the end if it succeeds, or if it was never made.
//
// A Budget counts the attempts that reach the dependency: the first one of a call
// counts as the call, each later one as a retry, and an attempt that a policy further
// in refuses as neither. Of nested retriers, give it to one: each counts the call, and
// would earn its retries again.
//
// A Budget is safe for concurrent use and takes no lock.
type Budget struct {
	perMillion int64 // Ratio, exactly
	floor      int64 // PerSecond in a whole window
	base       time.Time

	// Rings of slots, each an epoch in the upper half and a count in the lower.
	// A slot that is written in a new epoch begins from nothing.
	calls   [budgetSlots]atomic.Uint64
	charged [budgetSlots]atomic.Uint64
	// spent is never less than the sum of charged: it grows before its slot does
	// and shrinks after, so that no interleaving lets more retries through.
	spent   atomic.Int64
	refused atomic.Int64
}

const (
	budgetWindow = 10 * time.Second
	budgetSlot   = 500 * time.Millisecond
	// The slot that is being filled is only part of one. Calls count while
	// they are surely within the window, charges until they surely are not.
	budgetSlots = int(budgetWindow/budgetSlot) + 1
)

// NewBudget returns a Budget. It panics if cfg is not valid.
func NewBudget(cfg BudgetConfig) *Budget {
	if err := cfg.Validate(); err != nil {
		panic(err)
	}
	if cfg.Ratio == 0 {
		cfg.Ratio = 0.2
	}
	if cfg.PerSecond == 0 {
		cfg.PerSecond = 10
	}
	return &Budget{
		perMillion: int64(math.Round(max(0, cfg.Ratio) * 1e6)),
		floor:      int64(max(0, cfg.PerSecond)) * int64(budgetWindow/time.Second),
		base:       time.Now(),
	}
}

// BudgetStats is a snapshot of a [Budget].
type BudgetStats struct {
	Called  int64 // calls in the last 10 seconds
	Charged int64 // retries in the last 10 seconds that have not succeeded
	Left    int64 // retries that would be allowed now
	Refused int64 // retries refused since the beginning
}

// Stats returns the figures of b.
func (b *Budget) Stats() BudgetStats {
	now := b.epoch()
	b.expire(now)
	s := BudgetStats{Called: b.called(now), Charged: b.spent.Load(), Refused: b.refused.Load()}
	s.Left = max(0, b.allowed(s.Called)-s.Charged)
	return s
}

func (b *Budget) allowed(calls int64) int64 { return b.floor + calls*b.perMillion/1e6 }

// epoch returns the number of the slot that is being filled. The first is such
// that a slot never written is long past.
func (b *Budget) epoch() uint64 {
	return uint64(max(0, time.Since(b.base))/budgetSlot) + uint64(budgetSlots)
}

// call counts a call, which earns Ratio of a retry. What it returns is for uncall.
func (b *Budget) call() (epoch uint64) {
	now := b.epoch()
	slot := &b.calls[now%uint64(budgetSlots)]
	for {
		w := slot.Load()
		if w>>32 >= now { // later: the clock was read a whole window ago
			return slot.Add(1) >> 32
		}
		if slot.CompareAndSwap(w, now<<32|1) {
			return now
		}
	}
}

// uncall takes back what call counted in an epoch, unless it is past.
func (b *Budget) uncall(epoch uint64) { takeBack(&b.calls[epoch%uint64(budgetSlots)], epoch) }

// called returns how many calls are in the window.
func (b *Budget) called(now uint64) int64 {
	var n int64
	for i := range b.calls {
		if w := b.calls[i].Load(); w>>32+uint64(budgetSlots)-1 > now {
			n += int64(uint32(w))
		}
	}
	return n
}

// charge takes a retry out of the budget. What it returns is for refund.
func (b *Budget) charge() (epoch uint64, ok bool) {
	now := b.epoch()
	b.expire(now)
	allowed := b.allowed(b.called(now))
	for {
		spent := b.spent.Load()
		if spent >= allowed {
			b.refused.Add(1)
			return 0, false
		}
		if b.spent.CompareAndSwap(spent, spent+1) {
			break
		}
	}
	slot := &b.charged[now%uint64(budgetSlots)]
	for {
		w := slot.Load()
		if w>>32 >= now {
			if slot.CompareAndSwap(w, w+1) {
				return w >> 32, true
			}
		} else if slot.CompareAndSwap(w, now<<32|1) {
			b.spent.Add(-int64(uint32(w)))
			return now, true
		}
	}
}

// refund gives back what charge took in an epoch, unless it is past.
func (b *Budget) refund(epoch uint64) {
	if takeBack(&b.charged[epoch%uint64(budgetSlots)], epoch) {
		b.spent.Add(-1)
	}
}

// takeBack lowers the count of slot by one, if it is still that of epoch.
func takeBack(slot *atomic.Uint64, epoch uint64) bool {
	for {
		w := slot.Load()
		if w>>32 != epoch || uint32(w) == 0 {
			return false
		}
		if slot.CompareAndSwap(w, w-1) {
			return true
		}
	}
}

// expire forgets the charges that have left the window.
func (b *Budget) expire(now uint64) {
	for i := range b.charged {
		w := b.charged[i].Load()
		if uint32(w) != 0 && w>>32+uint64(budgetSlots) <= now && b.charged[i].CompareAndSwap(w, 0) {
			b.spent.Add(-int64(uint32(w)))
		}
	}
}
