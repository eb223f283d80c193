package registry

import (
	"fmt"
	"log/slog"

	"github.com/go-resilience/resilience/breaker"
)

func init() {
	oldReaders = append(oldReaders, func(p Policy) any {
		return read(p, "breaker", breakerFigures, breakerEvent, breakerHealth)
	}, func(p Policy) any { return read(p, "breaker", breakerGroupFigures, breakerEvent, breakersHealth) })
}

// breakerStates are the values of the attribute state.
var breakerStates = []breaker.State{breaker.Closed, breaker.HalfOpen, breaker.Open, breaker.ForcedOpen, breaker.Disabled}

// breakerIn are attributes, by state.
var breakerIn = func() map[breaker.State][]Attr {
	all := map[breaker.State][]Attr{}
	for _, state := range breakerStates {
		all[state] = []Attr{{"state", label(state)}}
	}
	return all
}()

func breakerFigures(s breaker.Stats, to emit) {
	breakerTotals(s.Totals, to)
	breakerStateFigures(map[breaker.State]int{s.State: 1}, to)
	to.gauge("breaker.failure.ratio", "1", "Share of the calls in the window that failed. Not to be added up.", s.FailureRate)
	to.gauge("breaker.slow.ratio", "1", "Share of the calls in the window that were slow. Not to be added up.", s.SlowRate)
	to.seconds(false, "breaker.open.left", "Time until an open breaker lets a probe through. Not to be added up.", s.OpenLeft)
}

func breakerGroupFigures(s breaker.GroupStats, to emit) {
	breakerTotals(s.Totals, to)
	breakerStateFigures(s.States, to)
	to.gauge("breaker.keys", "{key}", "Keys that have a breaker of their own.", float64(s.Keys))
}

func breakerTotals(t breaker.Totals, to emit) {
	calls := func(outcome string, n int64) {
		to.counter("breaker.calls", "{call}", "Calls, by outcome.", n, Attr{"outcome", outcome})
	}
	calls("success", t.Succeeded)
	calls("failure", t.Failed)
	calls("ignored", t.Ignored)
	calls("refused", t.Refused)
	to.counter("breaker.slow_calls", "{call}", "Calls that were slow, failed or not.", t.Slow)
	to.counter("breaker.hook.panics", "{panic}", "Panics of hooks and observers on the goroutine of a Ping.", t.HookPanics)
	changes := func(state breaker.State, n int64) {
		to.counter("breaker.transitions", "{transition}", "Changes of state, by the new state.", n, breakerIn[state]...)
	}
	changes(breaker.Open, t.Opened)
	changes(breaker.HalfOpen, t.HalfOpened)
	changes(breaker.Closed, t.Closed)
	changes(breaker.ForcedOpen, t.ForcedOpen)
	changes(breaker.Disabled, t.Disabled)
}

func breakerStateFigures(in map[breaker.State]int, to emit) {
	for _, state := range breakerStates {
		to.gauge("breaker.state", "{breaker}", "Breakers in a state: of one breaker, 1 for its state and 0 for the others.",
			float64(in[state]), breakerIn[state]...)
	}
}

func breakerEvent(e breaker.Event) oldEvent {
	if e.Kind == breaker.EventRefused {
		return happened(e.Kind, e.Key, e.Err, slog.String("reason", string(e.Reason))).warn(true)
	}
	attrs := []slog.Attr{slog.String("from", string(e.From)), slog.String("to", string(e.To))}
	if e.OpenFor > 0 {
		attrs = append(attrs, slog.Duration("for", e.OpenFor))
	}
	return happened(e.Kind, e.Key, e.Err, attrs...).warn(e.To == breaker.Open || e.To == breaker.ForcedOpen)
}

func breakerHealth(s breaker.Stats) *ailment {
	if s.State == breaker.Closed {
		return nil
	}
	return &ailment{state: string(s.State), fails: s.State == breaker.Open || s.State == breaker.ForcedOpen, err: s.LastErr}
}

// breakersHealth: a Group whose breakers are all open is as ill as one breaker that is.
func breakersHealth(s breaker.GroupStats) *ailment {
	open, halfOpen, disabled := s.States[breaker.Open]+s.States[breaker.ForcedOpen], s.States[breaker.HalfOpen], s.States[breaker.Disabled]
	switch {
	case open > 0 && open == s.Keys:
		return &ailment{state: "open", fails: true, detail: fmt.Sprintf("%d of %d open", open, s.Keys)}
	case open > 0:
		return &ailment{state: "partly open", detail: fmt.Sprintf("%d of %d open", open, s.Keys)}
	case halfOpen > 0:
		return &ailment{state: "half-open", detail: fmt.Sprintf("%d of %d half-open", halfOpen, s.Keys)}
	case disabled > 0:
		return &ailment{state: "disabled", detail: fmt.Sprintf("%d of %d disabled", disabled, s.Keys)}
	}
	return nil
}
