package saga

import (
	"math"
	"math/rand/v2"
	"time"
)

var defaultBackoff = Exponential(100*time.Millisecond, time.Minute)

// Exponential returns a Step.Backoff with full jitter: each wait is a random time between
// zero and a limit. The limit is first after the first attempt, doubles with each further
// attempt, and is at most longest. If one of them is zero or negative there is no wait.
//
// The limit depends on the number of the attempt alone, so that a process that takes a
// saga over continues with it.
func Exponential(first, longest time.Duration) func(attempt int) time.Duration {
	return func(attempt int) time.Duration {
		d := first
		for ; attempt > 1 && d < longest; attempt-- {
			d *= 2
			if d <= 0 {
				d = longest
			}
		}
		d = min(d, longest)
		if d <= 0 {
			return 0
		}
		return rand.N(d) + 1
	}
}

// leastPause is the shortest wait after a refusal. Refusals are not limited in number, and
// the Backoff may return zero.
const leastPause = 10 * time.Millisecond

// wait returns how long to wait after a failed attempt whose error has the RetryAfter
// after. err is a panic of the Backoff.
func wait(u *unit, attempt int, after time.Duration) (d time.Duration, err error) {
	defer caught(&err)
	d = max(u.backoff(attempt), 0)
	if after > d {
		// The jitter spreads attempts that were told to wait for the same moment.
		after = min(after, math.MaxInt64/2)
		d = after + rand.N(after/10+1)
	}
	return d, nil
}
