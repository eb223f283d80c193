package saga

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/go-resilience/resilience/internal/invalid"
)

// RunnerConfig configures a [Runner]. The zero RunnerConfig is usable. A panic in Inject or Extract is logged and
// otherwise ignored.
type RunnerConfig struct {
	// Name appears in logs and metrics, and is a prefix of the Owner of each saga that the runner holds. Use the same Name
	// in all processes of a program. A Name has up to 100 bytes of UTF-8 without NUL.
	Name string

	// LeaseTTL is the duration of the lease with which the runner holds a saga. In each LeaseTTL, the runner sends three
	// heartbeats, which extend its leases. If the runner's process crashes, other runners can take the saga over after the
	// lease has expired. Zero means 15 seconds; the minimum is 10ms.
	LeaseTTL time.Duration
	// Poll is the interval at which the runner queries the store for due sagas. It is also the interval at which
	// [Handle.Result] checks whether a saga has ended. Zero means 1 second.
	Poll time.Duration
	// Concurrency limits the number of sagas that the runner holds at the same time. A runner does not hold a saga while
	// the saga waits for a signal, for children, or for more than LeaseTTL/3. Zero means 64; the maximum is 10,000.
	Concurrency int
	// Drain is the time for which attempts may continue after the ctx of [Runner.Run] is done. After Drain, the ctx of the
	// attempts is canceled. Zero means 10 seconds; [None] means that the ctx of the attempts is canceled immediately.
	Drain time.Duration
	// MaxTakeovers limits how many times runners take a saga over from crashed processes. The number of takeovers starts
	// at zero again when a step of the saga succeeds. If a saga exceeds MaxTakeovers, the saga is stuck, because its steps
	// may have crashed the processes. The number also starts at zero again at a takeover if the runner has seen the store
	// fail since a step last succeeded, because processes also lose their sagas when the store fails. Zero means 10;
	// [Unlimited] means no limit.
	MaxTakeovers int

	// Retention is the time for which the store keeps sagas after they have ended.
	Retention Retention

	// Inject returns a text that is stored with a new saga, for example a trace context. Inject receives the ctx of Start
	// or StartTx. The text may have up to 4 KiB of UTF-8; a longer text is dropped. Start waits for Inject. Nil means no
	// text.
	Inject func(context.Context) string
	// Extract adds carried, the text that Inject returned, to ctx. In every process, the saga's steps and observers
	// receive the ctx that Extract returns. The runner waits for Extract. Nil means that ctx remains unchanged.
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

const (
	longestLease = time.Duration(1 << 57) // 4.5 years, the maximum LeaseTTL; 60 times longestLease does not overflow
	longestTry   = time.Duration(1 << 61) // 73 years, the maximum Step.Timeout, to which a LeaseTTL is added
)

func (c RunnerConfig) withDefaults() RunnerConfig {
	c.LeaseTTL = min(cmp.Or(c.LeaseTTL, 15*time.Second), longestLease)
	c.Poll = cmp.Or(c.Poll, time.Second)
	c.Concurrency = cmp.Or(c.Concurrency, 64)
	c.Drain = cmp.Or(c.Drain, 10*time.Second)
	c.MaxTakeovers = cmp.Or(c.MaxTakeovers, 10)
	c.Retention.Completed = cmp.Or(c.Retention.Completed, defaultRetention)
	c.Retention.Compensated = cmp.Or(c.Retention.Compensated, defaultRetention)
	c.Retention.Abandoned = cmp.Or(c.Retention.Abandoned, defaultRetention)
	return c
}

// Retention is the time for which the store keeps sagas after they have ended, for each final status. If Start is
// repeated after the saga was deleted, the saga runs again. So the retention must be longer than the time in which a
// program may repeat a Start. In each field, zero means 30 days, and [Unlimited] means forever. Children are deleted
// with their parent.
type Retention struct {
	Completed   time.Duration // the retention of Completed sagas
	Compensated time.Duration // the retention of Compensated sagas
	Abandoned   time.Duration // the retention of Abandoned sagas
}

const defaultRetention = 30 * 24 * time.Hour

// A retained is a field of a Retention, with the status of the sagas to which it applies.
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
