package bulkhead

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"time"

	"github.com/go-resilience/resilience/internal/invalid"
)

// Config configures a [Bulkhead]. The bulkhead calls the functions in Config for every call before it admits the
// call. The functions must be fast.
type Config struct {
	// Name identifies the bulkhead in errors, events and metrics. Update cannot change Name.
	Name string

	// Limit is the number of slots, from 1 to 1<<30 - 1. Required.
	Limit int

	// MaxWait is the maximum time that a call waits for a slot. Zero means that calls do not wait. [Unlimited] means
	// that a call waits until its ctx is done.
	MaxWait time.Duration

	// Queue is the maximum number of waiting calls. The maximum of Queue is 1<<31 - 1. Zero means 1000. If MaxWait is 0,
	// no call waits, and Queue must be 0. When the queue is full, a new call may displace a less important call (see
	// Priority). The displaced call is the newest call at the least important level.
	Queue int

	// Levels is the number of priority levels. The maximum is 1000. If Levels is 2 or more, Priority must be set. Zero
	// means 1. Update cannot change Levels.
	Levels int

	// Priority returns the level of a call. The most important level is 0, and the least important level is Levels-1. A
	// result below 0 counts as 0, and a result above Levels-1 counts as Levels-1. No call gets a slot while a more
	// important call waits. If Priority is set, Levels must be 2 or more.
	Priority func(context.Context) int

	// Cost returns how many slots a call takes. Nil means that each call takes 1 slot. A call with a cost of 0 or less
	// does not wait and is never refused. A call with a cost above Limit is refused as [TooCostly]. If the next waiting
	// call needs more slots than are free, the free slots are reserved for that call until a more important call
	// arrives.
	Cost func(context.Context) int

	// Share returns the name of a call's share. A share is a group of calls, such as the calls of one tenant. The slots
	// are divided fairly among the shares. Calls without a tenant may use the share "". At each level, the share that
	// holds the fewest slots is served next. Shares that hold the same number of slots take turns. If Share is set,
	// MaxWait must not be 0. Share is unstable until version 1.0.0.
	//
	// In the queue, each share has a separate line at each level. When the queue is full, a new call may displace the
	// newest call in the longest line at the new call's level. It does so only if its own line, including the new call,
	// is shorter than the longest line.
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
