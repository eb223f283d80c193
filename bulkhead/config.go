package bulkhead

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"time"

	"github.com/go-resilience/resilience/internal/invalid"
)

// Config says how a [Bulkhead] works. Its functions are called for every call, before any wait, and
// must be fast.
type Config struct {
	Name string // in errors, events and figures

	// Limit is how many slots there are: 1 to 1 073 741 823.
	Limit int

	// MaxWait is how long a call may wait for a slot: zero means not at all, negative until its
	// ctx ends.
	MaxWait time.Duration

	// Queue is how many calls may wait, at most 2 147 483 647; zero means 1000. It needs a
	// MaxWait. In a full one a call displaces the newest of the least important level, if its
	// own is more important.
	Queue int

	// Levels is the number of priorities, at most 1000; zero means 1.
	Levels int

	// Priority returns the level of a call, clamped to 0 ... Levels-1. Nobody gets a slot while
	// a more important call waits: 0 is the most important. It needs Levels.
	Priority func(context.Context) int

	// Cost returns how many slots a call takes; nil means 1. With 0 or less it neither waits nor
	// is refused, and above the limit it is [TooCostly]. Free slots are kept for the next call until
	// they suffice.
	Cost func(context.Context) int

	// Share returns the share of a call, such as its tenant, or "" for none. Of those that wait at
	// one level the one with the fewest slots is next, of several the one that came or was served
	// longest ago; within a share, the oldest call. In a full queue a call displaces the newest of
	// its level's longest line, if its own stays shorter. It needs a MaxWait.
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

// Validate names each invalid field in its error.
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
