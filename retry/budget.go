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
	// Name is the name in a registry. It may be empty.
	Name string
	// Ratio is how many retries each call adds, at most 100. Zero means 0.2, negative none.
	Ratio float64
	// PerSecond is how many retries each second adds, at most a million. Zero means 10,
	// negative none.
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

func (c *BudgetConfig) fixed(next *BudgetConfig) error {
	f := invalid.Fields{Type: "retry.BudgetConfig"}
	f.Same("Name", c.Name, next.Name)
	return f.Err()
}

// A Budget limits retries to a fraction of the calls, so that clients that retry do not
// multiply the load on a dependency that is down. Share one among the retriers of one
// dependency; for one for each host or tenant, make a resilience.Group of Retriers. It is safe
// for concurrent use.
//
// It is a bucket of retries: each call adds Ratio, each second adds PerSecond, so that a rare
// call may be retried too, and each retry takes one before its wait. It begins with what ten
// seconds add, and holds at most what ten seconds and a hundred calls add.
//
// The first attempt of a call that reaches the dependency counts as the call, each later one as
// a retry, whatever their results; an attempt that a policy further in refuses is neither. Of
// nested retriers give the Budget to one: each counts the call, and would add its retries.
type Budget struct {
	setting settings.Setting[BudgetConfig]

	mu                  sync.Mutex
	held                int64     // in billionths of a retry, so that no nanosecond and no call is lost
	at                  time.Time // when held was right
	allowed, overBudget int64
	spent               bool // the last retry that was asked for was not allowed
}

const whole = 1e9 // one retry

// NewBudget returns a Budget. It panics if cfg is not valid.
func NewBudget(cfg BudgetConfig) *Budget {
	b := &Budget{at: time.Now()}
	b.setting.Init(cfg, BudgetConfig.withDefaults)
	b.held = b.setting.Load().atFirst()
	return b
}

// perNano is what a nanosecond adds.
func (c *BudgetConfig) perNano() int64 { return int64(max(0, c.PerSecond)) }

// perCall is what a call adds.
func (c *BudgetConfig) perCall() int64 { return int64(math.Round(max(0, c.Ratio) * whole)) }

// atFirst is what a new Budget holds.
func (c *BudgetConfig) atFirst() int64 { return 10 * whole * c.perNano() }

// now brings b up to date. b.mu is held.
func (b *Budget) now() *BudgetConfig {
	c := b.setting.Load()
	now := time.Now()
	passed := int64(max(0, now.Sub(b.at)))
	b.at = now
	most := c.atFirst() + 100*c.perCall()
	if per := c.perNano(); per > 0 && passed > (most-b.held)/per { // the product could overflow
		b.held = most
	} else {
		b.held = min(most, b.held+passed*per)
	}
	return c
}

// earn counts a call. It does nothing if b is nil.
func (b *Budget) earn() {
	if b == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.held += b.now().perCall() // the next now bounds it
}

// take takes a retry, and reports whether there was one.
func (b *Budget) take() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.now()
	ok := b.held >= whole
	if ok {
		b.held -= whole
		b.allowed++
	} else {
		b.overBudget++
	}
	b.spent = !ok
	return ok
}

// giveBack returns what a retry took that was not made.
func (b *Budget) giveBack() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.held += whole // never more than before
}

// BudgetStats is a snapshot of a [Budget].
type BudgetStats struct {
	Allowed    int64 // retries that were allowed, since NewBudget
	OverBudget int64 // retries that were not allowed, since NewBudget
	Left       int64 // retries that would be allowed now
}

func (b *Budget) Stats() BudgetStats {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.now()
	return BudgetStats{b.allowed, b.overBudget, b.held / whole}
}

func (b *Budget) Name() string { return b.setting.Load().Name }

// Config returns the present BudgetConfig, with its defaults filled in.
func (b *Budget) Config() BudgetConfig { return b.setting.Config() }

// Update is as [Retrier.Update]; b keeps what it holds.
func (b *Budget) Update(change func(*BudgetConfig)) error {
	return b.setting.Update(change, (*BudgetConfig).fixed, nil)
}

func (b *Budget) Kind() string { return "budget" }

func (b *Budget) Figures() []describe.Figure {
	s := b.Stats()
	return []describe.Figure{
		{Name: "budget.retries{outcome=allowed}", Counter: true, Value: float64(s.Allowed)},
		{Name: "budget.retries{outcome=over_budget}", Counter: true, Value: float64(s.OverBudget)},
		{Name: "budget.left", Value: float64(s.Left)},
	}
}

type spentError struct{}

func (spentError) Error() string       { return "spent" }
func (spentError) HealthState() string { return "spent" }

// Health returns an error while b has no retry left and has refused one.
func (b *Budget) Health() error {
	if b == nil {
		return nil
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.now(); b.spent && b.held < whole {
		return spentError{}
	}
	return nil
}

// Needed reports whether b holds less than a new Budget.
func (b *Budget) Needed() bool {
	if b == nil {
		return false
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.now().atFirst() > b.held
}

func (b *Budget) Settings() any { return b.Config() }

// Change is Update for whoever does not know BudgetConfig.
func (b *Budget) Change(dry bool, f func(cfg any) error) error {
	return b.setting.Change(dry, f, (*BudgetConfig).fixed, nil)
}
