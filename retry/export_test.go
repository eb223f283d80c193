package retry

import (
	"time"

	"github.com/go-resilience/resilience/internal/behavior"
)

// LatencyOf returns the time within which the fraction q of the calls of h ended.
func LatencyOf[T any](h *Hedger[T], q float64) (time.Duration, bool) { return h.latencies.quantile(q) }

// VerdictOn returns what follows from a failed attempt.
func VerdictOn(end behavior.End, permanent, ended, itself, made, waits, worth, last bool) string {
	names := []string{"again", "final", "stopped", "cut", "turned off", "exhausted"}
	return names[failure{end, permanent, ended, itself, made, waits, worth, last}.verdict()]
}
