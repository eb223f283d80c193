package registry

import (
	"log/slog"

	"github.com/go-resilience/resilience/throttle"
)

func init() {
	oldReaders = append(oldReaders,
		func(p Policy) any { return read(p, "throttle", throttleFigures, throttleEvent, nil) },
		func(p Policy) any { return read(p, "throttle", throttleGroupFigures, throttleEvent, nil) },
		func(p Policy) any { return read(p, "throttle", throttleSharedFigures, throttleEvent, sharedHealth) },
		func(p Policy) any { return read(p, "throttle", throttleAdaptiveFigures, throttleEvent, nil) })
}

var (
	throttleRefused = refusals(
		throttle.OverLimit, throttle.OverQuota, throttle.WaitTooLong, throttle.QueueFull, throttle.Displaced,
		throttle.DeadlineTooClose, throttle.ContextEnded, throttle.TooCostly, throttle.Outage,
	)
	throttleShed = []Attr{{"outcome", "refused"}, {"reason", label(throttle.Shed)}}
)

func throttleFigures(s throttle.Stats, to emit) {
	throttleTotals(s.Totals, to)
	to.gauge("throttle.queued", "{call}", "Calls that wait now.", float64(s.Queued))
}

func throttleGroupFigures(s throttle.GroupStats, to emit) {
	throttleTotals(s.Totals, to)
	to.counter("throttle.evictions", "{key}", "Keys that were evicted.", s.Evicted)
	to.counter("throttle.overflows", "{call}", "Calls whose key found no room.", s.Overflow)
	to.gauge("throttle.keys", "{key}", "Keys that are held now.", float64(s.Keys))
	to.gauge("throttle.queued", "{call}", "Calls that wait now.", float64(s.Queued))
}

func throttleSharedFigures(s throttle.SharedStats, to emit) {
	throttleCalls(s.Admitted, s.Refusals, to)
	throttleTokens(s.Spent, s.Refunded, to)
	to.counter("throttle.store.trips", "{trip}", "Round trips to the store.", s.Asked)
	to.counter("throttle.store.failures", "{trip}", "Round trips without a valid answer.", s.Failed)
	to.seconds(true, "throttle.store.time", "Time that round trips took, together.", s.AskTime)
	to.counter("throttle.store.outages", "{outage}", "Outages that have begun.", s.Outages)
	to.counter("throttle.alone_calls", "{call}", "Calls that were decided without the store.", s.Alone)
	up := 1.0
	if s.Down {
		up = 0
	}
	to.alone("throttle.store.up", "{store}", "1 if the store answers, 0 in an outage. Not to be added up.", up)
}

func throttleAdaptiveFigures(s throttle.AdaptiveStats, to emit) {
	throttleCall(s.Sent, to, admitted...)
	throttleCall(s.Refused, to, throttleShed...)
	answers := func(outcome string, n int64) {
		to.counter("throttle.answers", "{call}", "Calls that have ended, by what the server made of them.", n, Attr{"outcome", outcome})
	}
	answers("accepted", s.Accepted)
	answers("throttled", s.Throttled)
	to.gauge("throttle.shed.ratio", "1", "Probability of shedding a call of the least important level. Not to be added up.", s.Probability)
}

func throttleTotals(t throttle.Totals, to emit) {
	throttleCalls(t.Admitted, t.Refusals, to)
	throttleTokens(t.Spent, t.Refunded, to)
	to.counter("throttle.waits", "{call}", "Calls that were admitted after a wait.", t.Waited)
	to.seconds(true, "throttle.wait.time", "Time that these calls have waited, together.", t.WaitTime)
}

func throttleCalls(sent int64, refused map[throttle.Reason]int64, to emit) {
	throttleCall(sent, to, admitted...)
	for _, r := range throttleRefused {
		throttleCall(refused[r.reason], to, r.attrs...)
	}
}

func throttleCall(n int64, to emit, attrs ...Attr) {
	to.counter("throttle.calls", "{call}", "Calls, by outcome and the reason of a refusal.", n, attrs...)
}

func throttleTokens(spent, refunded int64, to emit) {
	to.counter("throttle.tokens", "{token}", "Tokens that were spent.", spent)
	to.counter("throttle.refunds", "{token}", "Tokens that were given back.", refunded)
}

func throttleEvent(e throttle.Event) oldEvent {
	var attrs []slog.Attr
	if e.Reason != "" {
		attrs = append(attrs, slog.String("reason", string(e.Reason)))
	}
	if e.Waited > 0 {
		attrs = append(attrs, slog.Duration("waited", e.Waited))
	}
	return happened(e.Kind, e.Key, e.Err, attrs...).
		warn(e.Kind == throttle.EventRefused || e.Kind == throttle.EventOutageBegan || e.Kind == throttle.EventRecovered)
}

func sharedHealth(s throttle.SharedStats) *ailment {
	if !s.Down {
		return nil
	}
	return &ailment{state: "store down", fails: true}
}
