package faults

import "context"

// An EventKind says what an [Event] is.
type EventKind string

const (
	EventInjected EventKind = "injected" // a plan applies to a call, and is about to act
	EventSwitched EventKind = "switched" // the script was switched on or off
)

// An Event is a fault that is injected into a call, or a switch of a [Script]. A call that
// several plans apply to has an event for each.
type Event struct {
	Kind    EventKind
	Name    string // of the script
	Fault   Kind   // what is injected, of EventInjected
	Enabled bool   // whether the script is on now, of EventSwitched
}

// Observe calls f with each event from now on, until stop is called: synchronously, and while
// no lock is held, so that f may use the script. The kinds are EventInjected, on the goroutine
// of the call and with its ctx; and EventSwitched, one at a time and in order, on a goroutine
// that calls Update, Enable or Disable, with context.Background. A panic in f passes on to
// that caller. A second call of stop does nothing.
func (s *Script) Observe(f func(context.Context, Event)) (stop func()) {
	return s.observers.Observe(f)
}
