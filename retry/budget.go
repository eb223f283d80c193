package retry

import (
	"cmp"
	"context"
	"math"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience/internal/invalid"
	"github.com/go-resilience/resilience/internal/notify"
	"github.com/go-resilience/resilience/internal/settings"
)

// BudgetConfig says how many retries a [Budget] allows.
type BudgetConfig struct {
	// Name appears in events. It may be empty.
	Name string

	// Ratio is how many retries each call earns, at most 100. Zero means 0.2; a
	// negative number means none.
	Ratio float64

	// PerSecond is how many retries a second there may be besides, at most a million.
	// Zero means 10; a negative number means none.
	PerSecond int
}

// Validate returns an error that names each invalid field, or nil.
func (c BudgetConfig) Validate() error {
	f := invalid.Fields{Type: "retry.BudgetConfig"}
	f.Need(c.Ratio <= 100, "Ratio", c.Ratio, "at most 100, 0 (for 0.2), or negative (for none)") // false for NaN
	f.Need(c.PerSecond <= 1e6, "PerSecond", c.PerSecond, "at most 1000000, 0 (for 10), or negative (for none)")
	return f.Err()
}

func (c BudgetConfig) withDefaults() BudgetConfig {
	c.Ratio = cmp.Or(c.Ratio, 0.2)
	c.PerSecond = cmp.Or(c.PerSecond, 10)
	return c
}

// A Budget limits retries to a fraction of the calls, so that clients that retry do not
// multiply the load on a dependency that is down. Share one among the retriers of one
// dependency.
//
// Over the last 10 seconds it allows Ratio retries for each call, and 10 x PerSecond
// retries besides, so that a rare call may be retried too. A retry is charged before its
// wait. The charge is refunded if the retry succeeds or is not made.
//
// A Budget counts the attempts that reach the dependency: the first attempt of a call as
// the call, each later one as a retry, and an attempt that a policy further in refuses as
// neither. If retriers are nested, give the Budget to one of them: each counts the call,
// and would earn its retries again.
//
// A Budget is safe for concurrent use and takes no lock.
type Budget struct {
	setting   settings.Setting[BudgetConfig]
	observers notify.Observers[Event]
	base      time.Time

	// Rings of slots, each an epoch in the upper half and a count in the lower. A slot
	// that is written in a new epoch starts at zero.
	calls   [budgetSlots]atomic.Uint64
	charged [budgetSlots]atomic.Uint64
	// spent is never less than the sum of charged: it grows before its slot does and
	// shrinks after it, so that no interleaving allows more retries.
	spent atomic.Int64

	did budgetCounts

	// Set if the Budget is that of a key:
	key     string
	own     bool           // its BudgetConfig came from ConfigFor
	group   *budgetCounts  // which count for all keys
	present func() *Budget // returns the Budget that the key has by now
}

// budgetCounts count retries.
type budgetCounts struct{ allowed, overBudget atomic.Int64 }

func (c *budgetCounts) totals() BudgetTotals {
	return BudgetTotals{Allowed: c.allowed.Load(), OverBudget: c.overBudget.Load()}
}

const (
	budgetWindow = 10 * time.Second
	budgetSlot   = 500 * time.Millisecond
	// The slot that is being filled is only part of one. Calls count while they are
	// certainly within the window, charges until they certainly are not.
	budgetSlots = int(budgetWindow/budgetSlot) + 1
)

// NewBudget returns a Budget. It panics if cfg is not valid.
func NewBudget(cfg BudgetConfig) *Budget { return newBudget(newBudgetVersion(cfg)) }

func newBudgetVersion(cfg BudgetConfig) *settings.Version[BudgetConfig] {
	return settings.New(cfg, BudgetConfig.withDefaults)
}

func newBudget(v *settings.Version[BudgetConfig]) *Budget {
	b := &Budget{base: time.Now()}
	b.setting.Adopt(v, nil)
	return b
}

// Name returns the Name of b's BudgetConfig.
func (b *Budget) Name() string { return b.setting.Load().Name }

// Config returns the present BudgetConfig of b, with its defaults filled in.
func (b *Budget) Config() BudgetConfig { return b.setting.Config() }

// Update changes the BudgetConfig of b: it calls change with the present one, validates the
// result and makes it effective. If the result is not valid, Update returns the error of
// Validate and changes nothing.
//
// The calls and the retries of the last 10 seconds are kept: with a new Ratio, they earn by
// the new one. Calls under way go on, and their next retries are allowed by the new
// BudgetConfig. The Name cannot change. change must not call b.
func (b *Budget) Update(change func(*BudgetConfig)) error {
	return b.setting.Update(change, nil, nil)
}

// Preview returns what Config would return after the Update, or the error of Update, and
// changes nothing.
func (b *Budget) Preview(change func(*BudgetConfig)) (BudgetConfig, error) {
	return b.setting.Preview(change)
}

// Observe calls f with an [EventOverBudget] for each retry and further call that b does not
// allow from now on, until stop is called: synchronously, with the ctx of Do, and while no
// lock is held. A panic in f passes on to the caller of Do. A second call of stop does
// nothing.
func (b *Budget) Observe(f func(context.Context, Event)) (stop func()) {
	return b.observers.Observe(f)
}

func (b *Budget) tellOverBudget(ctx context.Context) {
	if b.observers.Any() {
		b.observers.Tell(ctx, Event{Kind: EventOverBudget, Name: b.Name(), Key: b.key})
	}
}

// BudgetTotals are counted from NewBudget or NewBudgetGroup on, and never go back.
type BudgetTotals struct {
	Allowed    int64 // retries that were allowed, refunded ones included
	OverBudget int64 // retries that were not allowed
}

// BudgetStats is a snapshot of a [Budget].
type BudgetStats struct {
	BudgetTotals

	// In the last 10 seconds:
	Called  int64 // calls
	Charged int64 // retries that were not refunded

	Left int64 // retries that would be allowed now
}

// Stats returns a snapshot.
func (b *Budget) Stats() BudgetStats {
	now := b.epoch()
	b.expire(now)
	s := BudgetStats{
		BudgetTotals: b.did.totals(),
		Called:       b.called(now),
		Charged:      b.spent.Load(),
	}
	s.Left = max(0, b.setting.Load().allows(s.Called)-s.Charged)
	return s
}

// allows returns how many retries there may be in the window, for calls in it.
func (c *BudgetConfig) allows(calls int64) int64 {
	perMillion := int64(math.Round(max(0, c.Ratio) * 1e6)) // exactly
	return int64(max(0, c.PerSecond))*int64(budgetWindow/time.Second) + calls*perMillion/1e6
}

// epoch returns the number of the slot that is being filled. The first number is so high
// that a slot never written has left the window.
func (b *Budget) epoch() uint64 {
	return uint64(max(0, time.Since(b.base))/budgetSlot) + uint64(budgetSlots)
}

// earn counts a call, which earns Ratio retries. Its result is the argument of unearn. It
// does nothing if b is nil.
func (b *Budget) earn() (epoch uint64) {
	if b == nil {
		return 0
	}
	now := b.epoch()
	slot := &b.calls[now%uint64(budgetSlots)]
	for {
		w := slot.Load()
		if w>>32 >= now { // later, if this goroutine read the clock a whole window ago
			return slot.Add(1) >> 32
		}
		if slot.CompareAndSwap(w, now<<32|1) {
			return now
		}
	}
}

// unearn takes back a call counted in epoch, unless that has left the window.
func (b *Budget) unearn(epoch uint64) { takeBack(&b.calls[epoch%uint64(budgetSlots)], epoch) }

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

// charge takes a retry out of the budget of b's key, if there is one. It returns the Budget
// that it was charged to and the argument of its refund.
//
// The group may have evicted b since it returned it. A Budget that something is charged to
// is not evicted: if it is still that of its key then, it stays the only one.
func (b *Budget) charge() (of *Budget, epoch uint64, ok bool) {
	for {
		epoch, ok = b.spend()
		now := b
		if ok && b.present != nil {
			now = b.present()
		}
		if now == b {
			break
		}
		b.refund(epoch)
		b = now
	}
	b.did.count(ok)
	if b.group != nil {
		b.group.count(ok)
	}
	return b, epoch, ok
}

func (c *budgetCounts) count(allowed bool) {
	if allowed {
		c.allowed.Add(1)
	} else {
		c.overBudget.Add(1)
	}
}

// spend takes a retry out of b.
func (b *Budget) spend() (epoch uint64, ok bool) {
	now := b.epoch()
	b.expire(now)
	allowed := b.setting.Load().allows(b.called(now))
	for {
		spent := b.spent.Load()
		if spent >= allowed {
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

// refund gives back a retry charged in epoch, unless that has left the window.
func (b *Budget) refund(epoch uint64) {
	if takeBack(&b.charged[epoch%uint64(budgetSlots)], epoch) {
		b.spent.Add(-1)
	}
}

// takeBack lowers the count of slot by one, if the slot still counts epoch.
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
