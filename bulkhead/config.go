package bulkhead

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"time"

	"github.com/go-resilience/resilience/internal/invalid"
)

// Config configures a [Bulkhead]. Its functions are called for every call before it waits, and must be fast.
type Config struct {
	// Name appears in errors, events and metrics. It cannot change.
	Name string

	// Limit is the number of slots, from 1 to 1<<30 - 1. Required.
	Limit int

	// MaxWait is how long a call may wait for a slot. Zero means that it does not wait; [Unlimited] means until its
	// ctx ends.
	MaxWait time.Duration

	// Queue is how many calls may wait, if MaxWait allows it, at most 1<<31 - 1. Zero means 1000. When the queue is
	// full, a more important call displaces the newest call of the least important level.
	Queue int

	// Levels is the number of priorities, at most 1000. Zero means 1. It cannot change.
	Levels int

	// Priority returns the level of a call, from 0, the most important, to Levels-1; other values are clamped. No call
	// gets a slot while a more important one waits. It requires Levels of 2 or more.
	Priority func(context.Context) int

	// Cost returns how many slots a call takes. Nil means 1. A call with a cost of 0 or less neither waits nor is
	// refused; one with more than Limit is refused as [TooCostly]. Slots are reserved for the call that is served next
	// until there are enough for it.
	Cost func(context.Context) int

	// Share returns the share that a call belongs to, such as its tenant, or "". At each level, the share that holds
	// the fewest slots is served next; shares that hold equally many take turns. In a full queue, a call displaces the
	// newest one of the longest line, if its own stays shorter. It requires a MaxWait.
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
	f.Need(c.MaxWait >= Unlimited, "MaxWait", c.MaxWait, "0 (for no wait) or more, or Unlimited")
	f.Need(c.Queue >= 0 && c.Queue <= math.MaxInt32, "Queue", c.Queue,
		fmt.Sprintf("0 (for %d) to %d", defaultQueue, math.MaxInt32))
	f.Need(c.Queue <= 0 || c.MaxWait != 0, "Queue", c.Queue, "0 where MaxWait is 0: no call waits")
	f.Need(c.Levels >= 0 && c.Levels <= 1000, "Levels", c.Levels, "0 (for 1) to 1000")
	f.Need(c.Levels < 2 || c.Priority != nil, "Levels", c.Levels, "0 or 1 where Priority is nil")
	f.Need(c.Levels > 1 || c.Priority == nil, "Levels", c.Levels, "2 or more where Priority is set")
	f.Need(c.Share == nil || c.MaxWait != 0, "Share", "set",
		"nil where MaxWait is 0: no call waits, so none is served in turn")
	return f.Err()
}

// allow returns an error if a field that cannot change differs in next.
func allow(was, next *Config) error {
	f := invalid.Fields{Type: "bulkhead.Config"}
	f.Same("Name", was.Name, next.Name)
	f.Same("Levels", was.Levels, next.Levels)
	return f.Err()
}
