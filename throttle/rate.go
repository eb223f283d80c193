package throttle

import (
	"fmt"
	"math"
	"time"

	"github.com/go-resilience/resilience/internal/invalid"
	"github.com/go-resilience/resilience/throttle/internal/bucket"
)

// PerMinute returns the [Config] Rate of n tokens a minute.
func PerMinute(n float64) float64 { return n / 60 }

// burstOf returns burst, or the default for rate if it is zero.
func burstOf(rate float64, burst int) int {
	if burst == 0 {
		return int(min(max(1, math.Ceil(rate)), math.MaxInt))
	}
	return burst
}

// windowOf returns the time in which a burst refills, to the nearest nanosecond: it
// is for people to read.
func windowOf(rate float64, burst int) time.Duration {
	if rate == 0 { // only quotas limit
		return 0
	}
	return time.Duration(math.Round(float64(burst) / rate * float64(time.Second)))
}

// maxRefill is the longest time in which a burst refills.
const maxRefill = int64(36 * 365 * 24 * time.Hour)

// checkRate records what is wrong with a rate and a burst.
func checkRate(f *invalid.Fields, rate float64, burst int) {
	if !(rate > 0 && rate <= bucket.MaxRate) {
		f.Need(false, "Rate", rate, "above 0 and at most 1e12 tokens a second")
		return
	}
	if burst < 0 {
		f.Need(false, "Burst", burst, "0 (for a second's worth) or more")
		return
	}
	burst = burstOf(rate, burst)
	r, ok := bucket.NewRate(rate)
	f.Need(ok && r.Of(burst).Up() <= maxRefill, "Rate", rate, fmt.Sprintf("enough to refill a Burst of %d within 36 years", burst))
}
