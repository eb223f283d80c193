package bulkhead

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"strconv"
	"time"

	"github.com/go-resilience/resilience/internal/invalid"
)

// Config says how a [Bulkhead] works.
type Config struct {
	// Name appears in errors, events and figures. Optional.
	Name string

	// Limit is how many calls may run at once, or how many slots they may take if they
	// have a Cost: 1 to 1 073 741 823. It is required unless Adaptive is set, and must
	// be 0 then.
	Limit int

	// MaxWait is how long a call may wait for a slot. Zero means that no call waits: one
	// that finds no free slot is refused immediately. Negative means until its ctx ends.
	MaxWait time.Duration

	// Queue is how many calls may wait at once, at most 2 147 483 647. Zero means 1000. If
	// the queue is full, a call that would be served before a waiting call takes its
	// place: the call that would be served last is refused. Queue needs a MaxWait.
	Queue int

	// Order says which of the waiting calls of one level is served first, and so which
	// one loses its place in a full queue. Zero means FIFO.
	Order Order

	// Levels is the number of priority levels, at most 1000. Zero means 1. More need a
	// Priority.
	Levels int

	// Priority returns the level of a call: 0 is the most important. A value outside
	// 0 ... Levels-1 is clamped. It is called for every call, before any wait, and must
	// be fast. Priority needs Levels.
	Priority func(context.Context) int

	// Reserve[i] is the share of the limit that is kept for level i and the levels more
	// important than i. The shares add up: with a limit of 10 and Reserve {0.2, 0.3},
	// level 0 may use all 10 slots, level 1 may use 8 of them, and level 2 may use 5.
	// The slots that are kept follow the limit when it changes. They are rounded down,
	// and leave at least one slot to every level.
	//
	// There are at most Levels-1 shares, each at least 0; their sum is below 1. Missing
	// ones are 0. Nil means 1/(2 x Levels) for each level but the last, so that the least
	// important level may use a little more than half of the limit. An empty slice that
	// is not nil keeps nothing.
	Reserve []float64

	// Cost returns how many slots a call takes. Nil means 1. A call of cost 0 takes none:
	// it neither waits nor is refused, and an adaptive limit does not look at it. A
	// negative cost counts as 0. Cost is called for every call, before any wait, and must
	// be fast.
	//
	// Costly calls neither starve behind cheap ones nor hold them up forever. Consider
	// a limit of 4 with one slot free, and an export of cost 3 that is first in the
	// queue. Calls of cost 1 may pass the export until they have taken 4 slots, as many
	// as the limit. From then on every free slot is kept until there are 3 of them for
	// the export. With LIFO a costly call stays first once a slot was free and was not
	// enough for it, although newer calls arrive.
	//
	// A call that costs more than its level may use is refused immediately:
	// [TooCostly].
	Cost func(context.Context) int

	// Share returns the share that a call belongs to: a tenant, a user, a kind of work. While
	// slots are free, every call takes them. While calls wait, the shares that wait are
	// served in turn, and Order holds within a share. A share has its part when it holds
	// as much of the limit as its weight is of the weights of all shares that hold slots
	// or wait; it is served after those that do not have theirs. Calls with a Cost get
	// their parts as exactly as the costs divide the limit. The levels come first: shares
	// are served in turn within a level.
	//
	// If the queue is full, the share that waits most for its weight loses a place to the
	// call, within the least important level where calls wait. If that is the share of the
	// call itself, Queue and Order hold as without shares.
	//
	// A share is known while one of its calls holds a slot or waits. Nil means that there
	// are no shares. Share is called for every call, before any wait, and must be fast. Share
	// needs a MaxWait. Stats has the busiest shares, errors and events that of the call; no
	// metric has an attribute for them, since there may be as many as there are tenants.
	Share func(context.Context) string

	// Weight returns how many times in a row a share is served, clamped to 1 ... 1 000 000.
	// Nil means 1. It is called for every call, as Share is, and the latest result holds
	// for the share. Where Share is nil there is nothing to weigh.
	Weight func(share string) int

	// Adaptive, if not nil, makes the bulkhead find its limit by itself.
	Adaptive *AdaptiveLimit
}

const defaultQueue = 1000

func (c Config) withDefaults() Config {
	c.Order = cmp.Or(c.Order, FIFO)
	c.Levels = cmp.Or(c.Levels, 1)
	if c.MaxWait != 0 {
		c.Queue = cmp.Or(c.Queue, defaultQueue)
	}
	if c.Reserve == nil && c.Levels > 1 {
		c.Reserve = slices.Repeat([]float64{1 / float64(2*c.Levels)}, c.Levels-1)
	}
	if c.Adaptive != nil {
		*c.Adaptive = c.Adaptive.withDefaults()
	}
	return c
}

// Validate returns an error that names each invalid field, or nil.
func (c Config) Validate() error {
	f := invalid.Fields{Type: "bulkhead.Config"}
	if c.Adaptive == nil {
		f.Need(c.Limit >= 1 && c.Limit <= maxLimit, "Limit", c.Limit, fmt.Sprintf("1 to %d, or Adaptive must be set", maxLimit))
	} else {
		f.Need(c.Limit == 0, "Limit", c.Limit, "0 where Adaptive is set, which has an Initial limit of its own")
		c.Adaptive.validate(&f)
	}
	f.Need(c.Queue >= 0 && c.Queue <= math.MaxInt32, "Queue", c.Queue, fmt.Sprintf("0 (for %d) to %d", defaultQueue, math.MaxInt32))
	f.Need(c.Queue <= 0 || c.MaxWait != 0, "Queue", c.Queue, "0 where MaxWait is 0: no call waits")
	f.Need(slices.Contains([]Order{"", FIFO, LIFO, CoDel}, c.Order), "Order", strconv.Quote(string(c.Order)), `"FIFO", "LIFO" or "CoDel"`)
	f.Need(c.Levels >= 0 && c.Levels <= 1000, "Levels", c.Levels, "0 (for 1) to 1000")
	f.Need(c.Levels < 2 || c.Priority != nil, "Levels", c.Levels, "0 or 1 where Priority is nil")
	f.Need(c.Levels > 1 || c.Priority == nil, "Levels", c.Levels, "2 or more where Priority is set")
	f.Need(c.Share == nil || c.MaxWait != 0, "Share", "set", "nil where MaxWait is 0: no call waits, so that none is served in turn")
	c.validateReserve(&f)
	return f.Err()
}

func (c Config) validateReserve(f *invalid.Fields) {
	most := max(c.Levels-1, 0)
	f.Need(len(c.Reserve) <= most, "Reserve", c.Reserve, fmt.Sprintf("at most %d long, one less than Levels", most))
	sum := 0.0
	for level, share := range c.Reserve {
		f.Need(share >= 0 && share < 1, fmt.Sprintf("Reserve[%d]", level), share, "at least 0 and less than 1")
		sum += share
	}
	f.Need(!(sum >= 1), "Reserve", c.Reserve, "shares whose sum is less than 1")
}

// rules are a Config as a call reads it: once, at its start. They do not change: an
// Update makes new ones.
type rules struct {
	*Config            // with defaults
	simple   bool      // without Priority, Cost, Share and Adaptive
	above    []float64 // by level: the share of the limit that is kept for the levels above
	adaptive *adaptive // nil if the limit is fixed
}

// newRules returns the rules of a Config with defaults, without adaptive.
func newRules(cfg *Config) *rules {
	r := &rules{Config: cfg}
	r.simple = r.Priority == nil && r.Cost == nil && r.Share == nil && r.Adaptive == nil
	r.above = make([]float64, r.Levels)
	for level := 1; level < r.Levels; level++ {
		r.above[level] = r.above[level-1]
		if level <= len(r.Reserve) {
			r.above[level] += r.Reserve[level-1]
		}
	}
	return r
}

// kept returns how many slots of a limit a call of level must leave free.
func (r *rules) kept(limit, level int) int {
	if r.above[level] == 0 {
		return 0
	}
	const rounding = 1e-9 // a share of a whole number of slots may fall short of it
	return min(int(float64(limit)*r.above[level]+rounding), limit-1)
}

// most returns how many slots of a limit the calls of a level may use.
func (r *rules) most(limit, level int) int { return limit - r.kept(limit, level) }
