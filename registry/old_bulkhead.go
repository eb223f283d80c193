package registry

import (
	"fmt"
	"log/slog"
	"strconv"
	"time"

	"github.com/go-resilience/resilience/bulkhead"
)

func init() {
	oldReaders = append(oldReaders, func(p Policy) any {
		return read(p, "bulkhead", bulkheadFigures, bulkheadEvent, bulkheadHealth)
	}, func(p Policy) any { return read(p, "bulkhead", bulkheadGroupFigures, bulkheadEvent, nil) })
}

var bulkheadRefused = refusals(
	bulkhead.NoSlot, bulkhead.QueueFull, bulkhead.Displaced, bulkhead.WaitTooLong, bulkhead.DeadlineTooClose,
	bulkhead.ContextEnded, bulkhead.StandingQueue, bulkhead.TooCostly,
)

func bulkheadFigures(s bulkhead.Stats, to emit) {
	bulkheadTotals(s.Totals, to)
	bulkheadGauges(s.Limit, s.InFlight, s.Queued, s.LongestWait, s.LongestHeld, to)
}

func bulkheadGroupFigures(s bulkhead.GroupStats, to emit) {
	bulkheadTotals(s.Totals, to)
	bulkheadGauges(s.Limit, s.InFlight, s.Queued, s.LongestWait, s.LongestHeld, to)
	to.gauge("bulkhead.keys", "{key}", "Keys that have a bulkhead of their own.", float64(s.Keys))
}

func bulkheadGauges(limit, inFlight int, queued []int, longestWait, longestHeld time.Duration, to emit) {
	to.gauge("bulkhead.limit", "{slot}", "Slots.", float64(limit))
	to.gauge("bulkhead.in_flight", "{slot}", "Slots that are taken.", float64(inFlight))
	for level, n := range queued {
		to.gauge("bulkhead.queued", "{call}", "Calls that wait, by level; 0 is the most important.", float64(n), Attr{"level", strconv.Itoa(level)})
	}
	to.seconds(false, "bulkhead.wait.longest", "Time that the oldest of the waiting calls has waited. Not to be added up.", longestWait)
	to.seconds(false, "bulkhead.held.longest", "Age of the oldest slot held for a response or by Begin. Not to be added up.", longestHeld)
}

func bulkheadTotals(t bulkhead.Totals, to emit) {
	calls := func(n int64, attrs ...Attr) {
		to.counter("bulkhead.calls", "{call}", "Calls, by outcome and the reason of a refusal.", n, attrs...)
	}
	calls(t.Admitted, admitted...)
	for _, r := range bulkheadRefused {
		calls(t.Refusals[r.reason], r.attrs...)
	}
	to.counter("bulkhead.waits", "{call}", "Calls that were admitted after a wait.", t.Waited)
	to.seconds(true, "bulkhead.wait.time", "Time that these calls have waited, together.", t.WaitTime)
}

func bulkheadEvent(e bulkhead.Event) oldEvent {
	var attrs []slog.Attr
	if e.Reason != "" {
		attrs = append(attrs, slog.String("reason", string(e.Reason)))
	}
	if e.Share != "" {
		attrs = append(attrs, slog.String("share", e.Share))
	}
	if e.Waited > 0 {
		attrs = append(attrs, slog.Duration("waited", e.Waited))
	}
	if e.From != e.To {
		attrs = append(attrs, slog.Int("from", e.From), slog.Int("to", e.To))
	}
	return happened(e.Kind, e.Key, e.Err, attrs...).warn(e.Kind == bulkhead.EventRefused)
}

func bulkheadHealth(s bulkhead.Stats) *ailment {
	if s.InFlight < s.Limit {
		return nil
	}
	return &ailment{state: "full", detail: fmt.Sprintf("%d of %d in flight", s.InFlight, s.Limit)}
}
