package breaker

import (
	"math/rand/v2"
	"time"
)

// longest is where open times end: far enough away, and safe to add.
const longest = time.Duration(1 << 61)

// openTime returns how long to stay open when it is the nth time in a row, and
// has to be hold at least.
func (c *Config) openTime(n int, hold time.Duration) time.Duration {
	d := c.OpenFor
	for ; n > 1 && d < c.MaxOpenFor; n-- {
		d = min(d*2, c.MaxOpenFor)
	}
	d = min(max(d, hold), longest)
	if c.Jitter > 0 {
		d += time.Duration(rand.Float64() * c.Jitter * float64(d))
	}
	return d
}
