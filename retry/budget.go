package retry

import (
	"cmp"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience/internal/invalid"
	"github.com/go-resilience/resilience/internal/settings"
)

// BudgetConfig configures a [Budget].
type BudgetConfig struct {
	// Name identifies the Budget in metrics. A registry does not accept a Budget without a Name. Update cannot change
	// Name.
	Name string
	// Ratio is the number of retries that each call adds to the Budget. The maximum is 100. Zero means 0.2. [None] means
	// that calls add no retries.
	Ratio float64
	// PerSecond is the number of retries that each second adds to the Budget. The maximum is 1,000,000. Zero means 10.
	// [None] means that time adds no retries.
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

// A Budget limits the retries of the Retriers that use it, all together. A Budget is safe for concurrent use.
//
// A Budget is a bucket of retries. Each call adds Ratio retries, and each second adds PerSecond retries. A Retrier
// takes a retry out of the bucket before it waits for the next attempt. If the bucket holds less than one retry, the
// Retrier does not retry. A new Budget holds 10*PerSecond retries. A Budget holds at most 10*PerSecond + 100*Ratio
// retries. If another policy refuses an attempt, the attempt neither adds a retry to the bucket nor takes one out of
// it. If retriers are nested, give a Budget to only one of the retriers.
type Budget struct {
	setting settings.Setting[BudgetConfig]
	users   atomic.Int64 // number of Retriers that have ever used the Budget

	mu                  sync.Mutex
	held                int64     // number of retries, in billionths of a retry; a nanosecond adds a whole number
	at                  time.Time // the time for which held was computed
	allowed, overBudget int64
	spent               bool // the last requested retry was not allowed
}

const whole = 1e9 // billionths in one retry

// NewBudget returns a Budget. NewBudget panics if cfg is invalid; see [BudgetConfig.Validate].
func NewBudget(cfg BudgetConfig) *Budget {
	b := &Budget{at: time.Now()}
	b.setting.Init(cfg, BudgetConfig.withDefaults)
	b.held = b.setting.Load().initial()
	return b
}

// perNano returns the retries that a nanosecond adds. perCall returns the retries that a call adds. initial
// returns the retries that a new Budget holds. The unit of all three is a billionth of a retry. None counts as
// zero.
func (c *BudgetConfig) perNano() int64 { return int64(max(0, c.PerSecond)) }
func (c *BudgetConfig) perCall() int64 { return int64(math.Round(max(0, c.Ratio) * whole)) }
func (c *BudgetConfig) initial() int64 { return 10 * whole * c.perNano() }

// refill adds the retries for the time since the last refill. Then it calls f with b.mu held. refill does nothing if
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
	if per := c.perNano(); per > 0 && elapsed > (most-b.held)/per { // elapsed*per could overflow
		b.held = most
	} else {
		b.held = min(most, b.held+elapsed*per)
	}
	f(c)
}

// credit adds the retries that one call adds. The sum may exceed the maximum until the next refill.
func (b *Budget) credit() { b.refill(func(c *BudgetConfig) { b.held += c.perCall() }) }

// take takes a retry out of the Budget. It reports whether the Budget had a retry left.
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

// refund adds a retry that was taken but not used. The sum may exceed the maximum until the next refill.
func (b *Budget) refund() { b.refill(func(*BudgetConfig) { b.held += whole }) }

// BudgetStats are metrics of a [Budget].
type BudgetStats struct {
	Allowed    int64 `counter:"retries{outcome=allowed}"`     // retries that were allowed
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

// Update is like [Retrier.Update]. Ratio and PerSecond may be None, so change must test for None before it calculates
// with Ratio or PerSecond. For the time before the call to Update, the old PerSecond applies.
func (b *Budget) Update(change func(*BudgetConfig)) error {
	return b.setting.Update(change, b.allow, nil)
}

// allow refills b under the old configuration and checks the new one.
func (b *Budget) allow(was, next *BudgetConfig) error {
	b.refill(func(*BudgetConfig) {})
	return invalid.Renamed("retry.BudgetConfig", was.Name, next.Name)
}
