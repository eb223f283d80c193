package bulkhead

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"time"

	"github.com/go-resilience/resilience/internal/invalid"
)

// Config says how a [Bulkhead] works.
type Config struct {
	// Name appears in errors, events and figures. Optional.
	Name string

	// Limit is how many slots there are, one for a call without a Cost: 1 to 1 073 741 823.
	// Required.
	Limit int

	// MaxWait is how long a call may wait for a slot. Zero means that none waits, negative
	// until its ctx ends.
	MaxWait time.Duration

	// Queue is how many calls may wait, at most 2 147 483 647. Zero means 1000. In a full one
	// a call takes the place of the newest of the least important level, there of the longest
	// line of a share, if its own level is more important. Queue needs a MaxWait.
	Queue int

	// Levels is the number of priorities, at most 1000. Zero means 1; more need a Priority.
	Levels int

	// Priority returns the level of a call, clamped to 0 ... Levels-1: 0 is the most important,
	// and nobody gets a slot while a more important call waits. It needs Levels. This, Cost
	// and Share are called for every call, before any wait, and must be fast.
	Priority func(context.Context) int

	// Cost returns how many slots a call takes. Nil means 1. With 0 or less it neither waits nor
	// is refused, and above the limit it is refused as [TooCostly]. Slots are kept for the call
	// that is served next until there are enough: cheap calls would pass it for ever.
	Cost func(context.Context) int

	// Share returns the share of a call: a tenant, a user, a kind of work, or "" for none. Shares
	// that wait at one level are served in turn: the next call is of the share with the fewest
	// slots, and among such of the one that has waited longest since it came or was served. In a
	// full queue a call takes the place of the newest of the longest line of its level, if that
	// is longer than the line of its own share would become. It needs a MaxWait.
	Share func(context.Context) string
}

const (
	maxLimit     = 1<<30 - 1
	defaultQueue = 1000
)

func (c Config) withDefaults() Config {
	c.Levels = cmp.Or(c.Levels, 1)
	if c.MaxWait != 0 {
		c.Queue = cmp.Or(c.Queue, defaultQueue)
	}
	return c
}

// Validate returns an error that names each invalid field, or nil.
func (c Config) Validate() error {
	f := invalid.Fields{Type: "bulkhead.Config"}
	f.Need(c.Limit >= 1 && c.Limit <= maxLimit, "Limit", c.Limit, fmt.Sprintf("1 to %d", maxLimit))
	f.Need(c.Queue >= 0 && c.Queue <= math.MaxInt32, "Queue", c.Queue,
		fmt.Sprintf("0 (for %d) to %d", defaultQueue, math.MaxInt32))
	f.Need(c.Queue <= 0 || c.MaxWait != 0, "Queue", c.Queue, "0 where MaxWait is 0: no call waits")
	f.Need(c.Levels >= 0 && c.Levels <= 1000, "Levels", c.Levels, "0 (for 1) to 1000")
	f.Need(c.Levels < 2 || c.Priority != nil, "Levels", c.Levels, "0 or 1 where Priority is nil")
	f.Need(c.Levels > 1 || c.Priority == nil, "Levels", c.Levels, "2 or more where Priority is set")
	f.Need(c.Share == nil || c.MaxWait != 0, "Share", "set",
		"nil where MaxWait is 0: no call waits, so that none is served in turn")
	return f.Err()
}

// allow returns an error if a field that cannot change is another in next.
func allow(was, next *Config) error {
	f := invalid.Fields{Type: "bulkhead.Config"}
	f.Same("Name", was.Name, next.Name)
	f.Same("Levels", was.Levels, next.Levels)
	return f.Err()
}
