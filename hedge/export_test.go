package hedge

import "time"

// LatencyOf returns the time within which the fraction q of the calls of h ended.
func LatencyOf[T any](h *Hedger[T], q float64) (time.Duration, bool) { return h.latencies.quantile(q) }
