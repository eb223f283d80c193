package retry

import (
	"cmp"
	"math"
	"sync"
	"time"

	"github.com/go-resilience/resilience/internal/invalid"
	"github.com/go-resilience/resilience/internal/settings"
)

// BudgetConfig configures a [Budget].
type BudgetConfig struct {
	// Name appears in metrics. It cannot change.
	Name string
	// Ratio is how many retries each call adds, at most 100. Zero means 0.2; [None] means that calls add none.
	Ratio float64
	// PerSecond is how many retries each second adds, at most a million. Zero means 10; [None] means that
	// time adds none.
	PerSecond int
}

// Validate returns an error that names each invalid field, or nil.
func (c BudgetConfig) Validate() error {
	f := invalid.Fields{Type: "retry.BudgetConfig"}
	ratio := c.Ratio >= 0 && c.Ratio <= 100 || c.Ratio == None // false for NaN
	f.Need(ratio, "Ratio", c.Ratio, "0 (for 0.2) to 100, or None")
	perSecond := c.PerSecond >= 0 && c.PerSecond <= 1e6 || c.PerSecond == None
	f.Need(perSecond, "PerSecond", c.PerSecond, "0 (for 10) to 1000000, or None")
	return f.Err()
}

func (c BudgetConfig) withDefaults() BudgetConfig {
	c.Ratio = cmp.Or(c.Ratio, 0.2)
	c.PerSecond = cmp.Or(c.PerSecond, 10)
	return c
}

// A Budget limits the retries of all Retriers that share it. It is safe for concurrent use.
//
// It is a bucket: calls and seconds add retries, and each retry takes one before its wait. It starts with
// what ten seconds add, and holds at most what ten seconds and a hundred calls add. A refused attempt neither
// adds nor takes a retry. Give a Budget to only one of nested retriers.
type Budget struct {
	setting settings.Setting[BudgetConfig]

	mu                  sync.Mutex
	held                int64     // in billionths of a retry, so that no nanosecond and no call is lost
	at                  time.Time // when held was computed
	allowed, overBudget int64
	spent               bool // the last retry that was requested was not allowed
}

const whole = 1e9 // one retry

// NewBudget returns a Budget. It panics if cfg is invalid; see [BudgetConfig.Validate].
func NewBudget(cfg BudgetConfig) *Budget {
	b := &Budget{at: time.Now()}
	b.setting.Init(cfg, BudgetConfig.withDefaults)
	b.held = b.setting.Load().initial()
	return b
}

// In billionths of a retry, perNano and perCall are what a nanosecond and a call add, and initial is what a new
// Budget holds. None counts as zero.
func (c *BudgetConfig) perNano() int64 { return int64(max(0, c.PerSecond)) }
func (c *BudgetConfig) perCall() int64 { return int64(math.Round(max(0, c.Ratio) * whole)) }
func (c *BudgetConfig) initial() int64 { return 10 * whole * c.perNano() }

// refill adds the retries of the time since the last refill, and then calls f under the lock. It does nothing if
// b is nil.
func (b *Budget) refill(f func(*BudgetConfig)) {
	if b == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	c, now := b.setting.Load(), time.Now()
	elapsed, most := int64(max(0, now.Sub(b.at))), c.initial()+100*c.perCall()
	b.at = now
	if per := c.perNano(); per > 0 && elapsed > (most-b.held)/per { // the product could overflow
		b.held = most
	} else {
		b.held = min(most, b.held+elapsed*per)
	}
	f(c)
}

// credit adds the retries of one call. The next refill limits the sum.
func (b *Budget) credit() { b.refill(func(c *BudgetConfig) { b.held += c.perCall() }) }

// take takes a retry, and reports whether there was one.
func (b *Budget) take() (ok bool) {
	b.refill(func(*BudgetConfig) {
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

// refund returns a retry that was taken and not used. b held it before, so the sum needs no limit.
func (b *Budget) refund() { b.refill(func(*BudgetConfig) { b.held += whole }) }

// BudgetStats are metrics of a [Budget].
type BudgetStats struct {
	Allowed    int64 `counter:"retries{outcome=allowed}"`     // retries
	OverBudget int64 `counter:"retries{outcome=over_budget}"` // retries that were not allowed
	Left       int64 `gauge:"left"`                           // retries that would be allowed now
}

// Stats returns the metrics of b.
func (b *Budget) Stats() (s BudgetStats) {
	b.refill(func(*BudgetConfig) { s = BudgetStats{b.allowed, b.overBudget, b.held / whole} })
	return s
}

// Config returns the configuration with defaults filled in.
func (b *Budget) Config() BudgetConfig { return b.setting.Config() }

// Update changes the configuration, as [Retrier.Update] does. Ratio and PerSecond may be [None]: change must not
// calculate with it. The time before the Update adds retries under the old configuration.
func (b *Budget) Update(change func(*BudgetConfig)) error {
	return b.setting.Update(change, b.allow, nil)
}

// allow refills b under the old configuration and checks the new one.
func (b *Budget) allow(was, next *BudgetConfig) error {
	b.refill(func(*BudgetConfig) {})
	return invalid.Renamed("retry.BudgetConfig", was.Name, next.Name)
}
