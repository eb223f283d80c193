package retry

import (
	"time"

	"github.com/cenkalti/backoff/v4"

	"github.com/go-resilience/resilience/internal/delay"
)

// A Backoff returns the delays before the retries of one call. A negative delay means that no retry follows. Each
// BackOff of github.com/cenkalti/backoff is a Backoff.
type Backoff = interface {
	NextBackOff() time.Duration
	Reset() // called before the first delay
}

// Exponential waits for a random time between zero and a limit. The limit for the first retry is the argument first.
// The limit doubles with each further retry, up to the argument longest. The random wait is the "full jitter" of
// Brooker, "Exponential Backoff And Jitter" (AWS, 2015). Half of the waits are shorter than half of the limit, and a
// wait can be close to zero. To prevent very short waits, set [Config.MinDelay].
//
// If its arguments are invalid, Exponential does not panic, but [Config.Validate] returns an error. The arguments are
// valid if 0 < first <= longest.
func Exponential(first, longest time.Duration) func() Backoff {
	return delay.Exponential(first, longest, delay.Full)
}

// Constant waits for d before each retry. Prefer [Exponential]: with Constant, clients that fail at the same moment
// also retry at the same moment. [Config.Validate] returns an error if d is negative.
func Constant(d time.Duration) func() Backoff { return delay.Constant(d) }

// Permanent wraps err to prevent a Retrier from retrying the call. If another error wraps Permanent's result and has
// a method Retryable() bool, that method decides instead. If the outermost wrapper of an error comes from Permanent,
// a Retrier removes this wrapper before it returns the error.
//
// Permanent is the function Permanent of github.com/cenkalti/backoff/v4. A Retrier also supports the function
// Permanent of backoff v5 and v6. Permanent(nil) is nil.
func Permanent(err error) error { return backoff.Permanent(err) }
