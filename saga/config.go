package saga

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/go-resilience/resilience/internal/invalid"
)

// RunnerConfig configures a [Runner]. The zero RunnerConfig is usable. The runner, or the caller of Start or
// Operate, waits for each hook.
type RunnerConfig struct {
	// Name is in logs, metrics and the names of owners, the same in all processes of a program: up to 100 bytes.
	Name string

	// LeaseTTL is how long a saga remains this runner's without a heartbeat, of which there are three in
	// that time. Zero means 15 seconds; at least 10 milliseconds.
	LeaseTTL time.Duration
	// Poll is how often the runner asks the store for due sagas, and Result for the end of one. Zero means
	// 1 second.
	Poll time.Duration
	// Concurrency is how many sagas the runner holds at most. One that waits for a signal, for children, or
	// for more than a third of LeaseTTL, is not held. Zero means 64; at most 10000, as each has a parameter in
	// one statement.
	Concurrency int
	// Drain is how long attempts may continue after the ctx of Run has ended. Zero means 10 seconds, negative
	// no time.
	Drain time.Duration
	// MaxTakeovers is how often a saga may be taken over from crashed owners, which it may have killed,
	// without a step that succeeds, before it is stuck. Zero means 10, negative no limit.
	MaxTakeovers int

	// Inject returns what a saga carries from the ctx of its Start to its steps, such as a trace context: up
	// to 4 KiB of UTF-8, else nothing.
	Inject func(context.Context) string
	// Extract returns ctx with what a saga carries, for its steps and hooks in any process.
	Extract func(ctx context.Context, carried string) context.Context

	// Retention is the time that sagas are kept after they have ended.
	Retention Retention
}

// Validate returns an error that lists all that is wrong, or nil.
func (c RunnerConfig) Validate() error {
	f := invalid.Fields{Type: "saga.RunnerConfig"}
	f.Need(c.Name == "" || validName(c.Name), "Name", quoted(c.Name, maxName),
		fmt.Sprintf(`"", or up to %d bytes of UTF-8 without NUL`, maxName))
	f.Need(c.LeaseTTL == 0 || c.LeaseTTL >= 10*time.Millisecond, "LeaseTTL", c.LeaseTTL, "0 (for 15s), or 10ms or more")
	f.Need(c.Poll >= 0, "Poll", c.Poll, "0 (for 1s) or more")
	f.Need(c.Concurrency >= 0 && c.Concurrency <= 10000, "Concurrency", c.Concurrency, "0 (for 64) to 10000")
	f.Need(c.Drain >= 0 || c.Drain == None, "Drain", c.Drain, "0 (for 10s), more, or None")
	f.Need(c.MaxTakeovers >= 0 || c.MaxTakeovers == Unlimited, "MaxTakeovers", c.MaxTakeovers,
		"0 (for 10), more, or Unlimited")
	for _, kept := range c.Retention.byStatus() {
		f.Need(kept.age >= 0 || kept.age == Unlimited, "Retention."+kept.field, kept.age,
			"0 (for 30 days), more, or Unlimited")
	}
	return f.Err()
}

func (c RunnerConfig) withDefaults() RunnerConfig {
	c.LeaseTTL = cmp.Or(c.LeaseTTL, 15*time.Second)
	c.Poll = cmp.Or(c.Poll, time.Second)
	c.Concurrency = cmp.Or(c.Concurrency, 64)
	c.Drain = cmp.Or(c.Drain, 10*time.Second)
	c.MaxTakeovers = cmp.Or(c.MaxTakeovers, 10)
	c.Retention.Completed = cmp.Or(c.Retention.Completed, defaultRetention)
	c.Retention.Compensated = cmp.Or(c.Retention.Compensated, defaultRetention)
	c.Retention.Abandoned = cmp.Or(c.Retention.Abandoned, defaultRetention)
	return c
}

// Retention is the time that sagas are kept in the store after they have ended. It must be longer than their Start may
// be repeated, which would run them again. In each field, zero means 30 days, and [Unlimited] means forever. Children
// are deleted with their parent.
type Retention struct {
	Completed   time.Duration
	Compensated time.Duration
	Abandoned   time.Duration
}

const defaultRetention = 30 * 24 * time.Hour

// A retained is the time that sagas of a status are kept.
type retained struct {
	status Status
	field  string
	age    time.Duration
}

func (k Retention) byStatus() []retained {
	return []retained{
		{Completed, "Completed", k.Completed},
		{Compensated, "Compensated", k.Compensated},
		{Abandoned, "Abandoned", k.Abandoned},
	}
}
