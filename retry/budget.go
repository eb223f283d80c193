package retry

import (
	"cmp"
	"context"
	"math"
	"sync"
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
// A Budget is safe for concurrent use.
type Budget struct {
	setting   settings.Setting[BudgetConfig]
	observers notify.Observers[Event]
	base      time.Time

	mu      sync.Mutex
	calls   ring
	charged ring

	did budgetCounts

	// Set if the Budget is that of a key:
	key     string
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
func NewBudget(cfg BudgetConfig) *Budget {
	b := &Budget{}
	b.make(newBudgetVersion(cfg))
	return b
}

func newBudgetVersion(cfg BudgetConfig) *settings.Version[BudgetConfig] {
	return settings.NewVersion(cfg, BudgetConfig.withDefaults)
}

func (b *Budget) make(v *settings.Version[BudgetConfig]) {
	b.base = time.Now()
	b.setting.Adopt(v, BudgetConfig.withDefaults, nil)
}

// Name returns the Name of b's BudgetConfig.
func (b *Budget) Name() string { return b.setting.Load().Name }

// Config returns the present BudgetConfig of b, with its defaults filled in.
func (b *Budget) Config() BudgetConfig { return b.setting.Config() }

// Update changes the BudgetConfig of b: it calls change with the present one as it was given,
// in which a zero field means its default, validates the result and makes it effective. If the result is not valid, Update returns the error of
// Validate and changes nothing.
//
// The calls and the retries of the last 10 seconds are kept: with a new Ratio, they earn by
// the new one. Calls under way go on, and their next retries are allowed by the new
// BudgetConfig. The Name cannot change. change must not call b.
func (b *Budget) Update(change func(*BudgetConfig)) error {
	return b.setting.Update(change, (*BudgetConfig).fixed, nil)
}

// Change is Update for a program that does not know the type of the configuration: f gets a
// pointer to it, as Update's change does. If f returns an error, or dry is true, nothing
// changes; dry returns the error that the change would have.
func (b *Budget) Change(dry bool, f func(cfg any) error) error {
	return b.setting.Change(dry, f, (*BudgetConfig).fixed, nil)
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
	s := BudgetStats{BudgetTotals: b.did.totals()}
	s.Called, s.Charged = b.counts()
	s.Left = max(0, b.setting.Load().allows(s.Called)-s.Charged)
	return s
}

// allows returns how many retries there may be in the window, for calls in it.
func (c *BudgetConfig) allows(calls int64) int64 {
	perMillion := int64(math.Round(max(0, c.Ratio) * 1e6)) // exactly
	return int64(max(0, c.PerSecond))*int64(budgetWindow/time.Second) + calls*perMillion/1e6
}

// A ring counts what happened in each of the last epochs.
type ring [budgetSlots]struct{ epoch, n int64 }

// add adds n in an epoch, unless that has left the ring.
func (r *ring) add(epoch, n int64) {
	s := &r[epoch%int64(budgetSlots)]
	if s.epoch < epoch {
		s.epoch, s.n = epoch, 0
	}
	if s.epoch == epoch {
		s.n += n
	}
}

// sum returns what was counted in the given number of epochs up to now.
func (r *ring) sum(now, epochs int64) (n int64) {
	for _, s := range r {
		if s.epoch > now-epochs {
			n += s.n
		}
	}
	return n
}

// epoch returns the number of the slot that is being filled. The first number is so high
// that a slot never written has left the window.
func (b *Budget) epoch() int64 {
	return int64(max(0, time.Since(b.base))/budgetSlot) + int64(budgetSlots)
}

// counts returns the calls and the charges in the window.
func (b *Budget) counts() (called, charged int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.countsAt(b.epoch())
}

func (b *Budget) countsAt(now int64) (called, charged int64) {
	return b.calls.sum(now, int64(budgetSlots)-1), b.charged.sum(now, int64(budgetSlots))
}

// earn counts a call, which earns Ratio retries. Its result is the argument of unearn. It
// does nothing if b is nil.
func (b *Budget) earn() (epoch int64) {
	if b == nil {
		return 0
	}
	epoch = b.epoch() // not under mu: it may be the last one by now
	b.mu.Lock()
	defer b.mu.Unlock()
	b.calls.add(epoch, 1)
	return epoch
}

// unearn takes back a call counted in epoch, unless that has left the window.
func (b *Budget) unearn(epoch int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.calls.add(epoch, -1)
}

// charge takes a retry out of the budget of b's key, if there is one. It returns the Budget
// that it was charged to and the argument of its refund.
//
// The group may have evicted b since it returned it. A Budget that something is charged to
// is not evicted: if it is still that of its key then, it stays the only one.
func (b *Budget) charge() (of *Budget, epoch int64, ok bool) {
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
func (b *Budget) spend() (epoch int64, ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	epoch = b.epoch()
	called, charged := b.countsAt(epoch)
	if charged >= b.setting.Load().allows(called) {
		return 0, false
	}
	b.charged.add(epoch, 1)
	return epoch, true
}

// refund gives back a retry charged in epoch, unless that has left the window.
func (b *Budget) refund(epoch int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.charged.add(epoch, -1)
}

// fixed returns an error if Name has changed.
func (c *BudgetConfig) fixed(next *BudgetConfig) error {
	f := invalid.Fields{Type: "retry.BudgetConfig"}
	f.Same("Name", c.Name, next.Name)
	return f.Err()
}
