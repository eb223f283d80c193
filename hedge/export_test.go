package hedge

import "time"

// LatencyOf returns the quantile q of h's latencies, and whether there are enough of them.
func LatencyOf[T any](h *Hedger[T], q float64) (time.Duration, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	defer func(q float64) { h.cfg.Quantile = q }(h.cfg.Quantile)
	h.cfg.Quantile = q
	return h.delay() - 1, len(h.latencies.sorted) >= leastLatencies
}
