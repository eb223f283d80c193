package retry

import (
	"time"

	"github.com/cenkalti/backoff/v4"

	"github.com/go-resilience/resilience/internal/delay"
)

// A Backoff returns the delays before the retries of one call. A negative delay ends the retrying. Each BackOff of
// github.com/cenkalti/backoff is a Backoff.
type Backoff = interface {
	NextBackOff() time.Duration
	Reset() // called before the first delay
}

// Exponential waits for a random time between zero and a limit. The limit starts at first and doubles with each
// retry up to longest. This is the "full" jitter of Brooker, "Exponential Backoff And Jitter" (AWS, 2015). Half
// of the waits are shorter than half of the limit, and a wait can be close to zero. Set [Config.MinDelay] if
// waits must not be that short.
//
// Exponential never panics. [Config.Validate] reports an error unless 0 < first <= longest.
func Exponential(first, longest time.Duration) func() Backoff {
	return delay.Exponential(first, longest, delay.Full)
}

// Constant waits for d before each retry. Prefer [Exponential]: with Constant, clients that fail at the same
// moment also retry at the same moment. [Config.Validate] reports an error if d is negative.
func Constant(d time.Duration) func() Backoff { return delay.Constant(d) }

// Permanent marks err as an error that a Retrier does not retry. The mark has no effect if an error that wraps
// the mark has a method Retryable() bool. A Retrier removes the mark if the mark is the outermost error.
// Permanent creates the mark of github.com/cenkalti/backoff/v4. A Retrier treats the marks of v5 and v6 in the
// same way. Permanent(nil) is nil.
func Permanent(err error) error { return backoff.Permanent(err) }
