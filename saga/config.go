package saga

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/go-resilience/resilience/internal/invalid"
)

// RunnerConfig configures a [Runner]. The zero RunnerConfig is usable. The runner, or the caller of Start or Operate,
// waits for each call of Inject and Extract. A panic in a hook is logged, and goes no further.
type RunnerConfig struct {
	// Name appears in logs, metrics and the names of owners. It is the same in all processes of a program, and has up
	// to 100 bytes of UTF-8 without NUL.
	Name string

	// LeaseTTL is the time for which a saga belongs to this runner without a heartbeat. The runner sends three
	// heartbeats in that time. Zero means 15 seconds; the minimum is 10ms.
	LeaseTTL time.Duration
	// Poll is the interval at which the runner looks for due sagas, and Result for the end of one. Zero means 1 second.
	Poll time.Duration
	// Concurrency limits the number of sagas that the runner holds. A saga that waits for a signal, for children, or
	// for more than LeaseTTL/3, is not held. Zero means 64; the maximum is 10,000.
	Concurrency int
	// Drain is the time for which attempts may continue after the ctx of Run is done. Zero means 10 seconds; [None]
	// means that they are canceled immediately.
	Drain time.Duration
	// MaxTakeovers is the number of times that a saga may be taken over from crashed processes, which it may have
	// killed, before one of its steps succeeds. After that the saga is stuck. Zero means 10; [Unlimited] means no limit.
	MaxTakeovers int

	// Retention is the time for which sagas are kept after they have ended.
	Retention Retention

	// Inject returns the text that a saga carries from the ctx of its Start to its steps, such as a trace context: up to
	// 4 KiB of UTF-8. A longer text is dropped. Nil means no text.
	Inject func(context.Context) string
	// Extract returns ctx with the text that a saga carries, for its steps and observers in any process. Nil means ctx.
	Extract func(ctx context.Context, carried string) context.Context
}

// Validate returns an error that names each invalid field, or nil.
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

// Retention is the time for which sagas are kept in the store after they have ended. It must be longer than the time
// in which their Start may be repeated: if a saga was deleted, Start runs it again. In each field, zero means 30 days,
// and [Unlimited] means forever. Children are deleted with their parent.
type Retention struct {
	Completed   time.Duration // of sagas that are Completed
	Compensated time.Duration // of sagas that are Compensated
	Abandoned   time.Duration // of sagas that are Abandoned
}

const defaultRetention = 30 * 24 * time.Hour

// A retained is the retention of sagas with a status.
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
