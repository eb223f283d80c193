package retry

import "github.com/go-resilience/resilience/internal/behavior"

// VerdictOn returns what follows from a failed attempt.
func VerdictOn(end behavior.End, permanent, ended, itself, made, waits, worth, last bool) string {
	names := []string{"again", "final", "stopped", "cut", "turned off", "exhausted"}
	return names[failure{end, permanent, ended, itself, made, waits, worth, last}.verdict()]
}
