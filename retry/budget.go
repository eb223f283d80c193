package retry

import (
	"cmp"
	"math"
	"sync"
	"time"

	"github.com/go-resilience/resilience/internal/describe"
	"github.com/go-resilience/resilience/internal/invalid"
	"github.com/go-resilience/resilience/internal/settings"
)

// BudgetConfig says how many retries a [Budget] allows.
type BudgetConfig struct {
	Name string // cannot change
	// Ratio is how many retries a call adds, at most 100. Zero means 0.2, negative none.
	Ratio float64
	// PerSecond is how many a second adds, at most a million. Zero means 10, negative none.
	PerSecond int
}

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

// A Budget is shared by the retriers of one dependency. It is safe for concurrent use.
//
// It is a bucket: calls and seconds add retries, and each retry takes one before its wait. It begins
// with what ten seconds add, and holds at most what ten seconds and a hundred calls add. An attempt
// that is refused counts as neither. Give it to one of nested retriers.
type Budget struct {
	setting settings.Setting[BudgetConfig]

	mu                  sync.Mutex
	held                int64     // in billionths of a retry, so that no nanosecond and no call is lost
	at                  time.Time // when held was right
	allowed, overBudget int64
	spent               bool // the last retry that was asked for was not allowed
}

const whole = 1e9 // one retry

// NewBudget panics if cfg is not valid.
func NewBudget(cfg BudgetConfig) *Budget {
	b := &Budget{at: time.Now()}
	b.setting.Init(cfg, BudgetConfig.withDefaults)
	b.held = b.setting.Load().atFirst()
	return b
}

// perNano, perCall and atFirst are what a nanosecond and a call add, and what a new Budget holds.
func (c *BudgetConfig) perNano() int64 { return int64(max(0, c.PerSecond)) }
func (c *BudgetConfig) perCall() int64 { return int64(math.Round(max(0, c.Ratio) * whole)) }
func (c *BudgetConfig) atFirst() int64 { return 10 * whole * c.perNano() }

// now calls f under the lock when b holds what it holds now. It does nothing if b is nil.
func (b *Budget) now(f func(*BudgetConfig)) {
	if b == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	c, now := b.setting.Load(), time.Now()
	passed, most := int64(max(0, now.Sub(b.at))), c.atFirst()+100*c.perCall()
	b.at = now
	if per := c.perNano(); per > 0 && passed > (most-b.held)/per { // the product could overflow
		b.held = most
	} else {
		b.held = min(most, b.held+passed*per)
	}
	f(c)
}

// earn counts a call.
func (b *Budget) earn() { b.now(func(c *BudgetConfig) { b.held += c.perCall() }) } // the next now bounds it

// take takes a retry, and reports whether there was one.
func (b *Budget) take() (ok bool) {
	b.now(func(*BudgetConfig) {
		if ok = b.held >= whole; ok {
			b.held -= whole
			b.allowed++
		} else {
			b.overBudget++
		}
		b.spent = !ok
	})
	return ok
}

// giveBack returns what a retry took that was not made.
func (b *Budget) giveBack() { b.now(func(*BudgetConfig) { b.held += whole }) } // never more than before

// BudgetStats counts the retries of a [Budget].
type BudgetStats struct {
	Allowed    int64
	OverBudget int64
	Left       int64 // would be allowed now
}

func (b *Budget) Stats() (s BudgetStats) {
	b.now(func(*BudgetConfig) { s = BudgetStats{b.allowed, b.overBudget, b.held / whole} })
	return s
}

func (b *Budget) Name() string { return b.setting.Load().Name }

func (b *Budget) Config() BudgetConfig { return b.setting.Config() }

func (b *Budget) Settings() any { return b.Config() }

func (b *Budget) Update(change func(*BudgetConfig)) error {
	return b.setting.Update(change, b.allow, nil)
}

func (b *Budget) Change(dry bool, f func(cfg any) error) error {
	return b.setting.Change(dry, f, b.allow, nil)
}

// allow lets the time until now add what the Config of that time says.
func (b *Budget) allow(was, next *BudgetConfig) error {
	b.now(func(*BudgetConfig) {})
	return invalid.Renamed("retry.BudgetConfig", was.Name, next.Name)
}

func (b *Budget) Kind() string { return "budget" }

func (b *Budget) Figures() []describe.Figure {
	s := b.Stats()
	return []describe.Figure{
		describe.Count("budget.retries{outcome=allowed}", s.Allowed),
		describe.Count("budget.retries{outcome=over_budget}", s.OverBudget),
		{Name: "budget.left", Value: float64(s.Left)},
	}
}

// Health returns an error while b has no retry left and has refused one.
func (b *Budget) Health() (err error) {
	b.now(func(*BudgetConfig) {
		if b.spent && b.held < whole {
			err = &describe.Ailment{State: "spent"}
		}
	})
	return err
}

func (b *Budget) Needed() (needed bool) {
	b.now(func(c *BudgetConfig) { needed = c.atFirst() > b.held })
	return needed
}
