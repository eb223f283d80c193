package saga

import (
	"math"
	"math/rand/v2"
	"time"
)

var defaultBackoff = Exponential(100*time.Millisecond, time.Minute)

// Exponential returns a Step.Backoff that waits at most first, twice as long
// after each further failure, and never more than max, with full jitter: any
// time from nothing to that is equally likely.
//
// It depends on the number of the attempt alone, so that a wait goes on where
// it was when another process takes a saga over.
func Exponential(first, max time.Duration) func(attempt int) time.Duration {
	return func(attempt int) time.Duration {
		d := first
		for ; attempt > 1 && d < max; attempt-- {
			d *= 2
			if d <= 0 {
				d = max
			}
		}
		d = min(d, max)
		if d <= 0 {
			return 0
		}
		return rand.N(d) + 1
	}
}

// leastPause is the least wait after a refusal, which counts as no attempt: with a
// Backoff of 0, nothing else would slow the tries down.
const leastPause = 10 * time.Millisecond

// wait returns how long to wait after the attempt-th attempt has failed with an
// error whose RetryAfter is after. The error is that of a Backoff that panics.
func wait(u *unit, attempt int, after time.Duration) (d time.Duration, err error) {
	defer caught(&err)
	d = max(u.backoff(attempt), 0)
	if after > d {
		// Spread what was told to wait for the same moment.
		after = min(after, math.MaxInt64/2)
		d = after + rand.N(after/10+1)
	}
	return d, nil
}
