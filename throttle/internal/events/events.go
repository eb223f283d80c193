// Package events converts the events of throttle, fleet and adaptive, which share a type, to events of
// package policy.
package events

import (
	"log/slog"
	"time"

	"github.com/go-resilience/resilience/policy"
)

// Describe returns the [policy.Event] of a throttle.Event with these fields. The level is Debug for a call that was
// admitted after a wait, Info for the end of an outage, and Warn for every other event.
func Describe(name, key, what, reason string, waited time.Duration, err error) policy.Event {
	e := policy.Event{Kind: "throttle", Name: name, Key: key, What: what, Level: slog.LevelWarn, Err: err}
	switch what {
	case "waited":
		e.Level = slog.LevelDebug
	case "outage_ended":
		e.Level = slog.LevelInfo
	}
	if reason != "" {
		e.Attrs = append(e.Attrs, slog.String("reason", reason))
	}
	if waited > 0 {
		e.Attrs = append(e.Attrs, slog.Duration("waited", waited))
	}
	return e
}
