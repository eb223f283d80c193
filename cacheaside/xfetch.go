package cacheaside

import (
	"math"
	"math/rand/v2"
	"time"
)

// ahead reports whether e, which is fresh, is to be refreshed now rather than
// when it expires: XFetch of "Optimal Probabilistic Cache Stampede Prevention"
// (VLDB 2015). Each caller draws for itself; the longer the load takes and the
// nearer the end, the more likely it is.
func (c *Cache[K, V]) ahead(e *entry[V], now time.Duration) bool {
	left := float64(e.fresh - now)
	reach := c.cfg.Ahead * float64(e.took)
	// -ln of the least that Float64 draws, 2^-53, is below 37: no need to draw.
	if left >= 37*reach {
		return false
	}
	return -math.Log(1-rand.Float64())*reach >= left
}
