package faults

import "context"

// An EventKind says what an [Event] is.
type EventKind string

const (
	Injected EventKind = "injected" // a plan applies to a call, and is about to act
	Switched EventKind = "switched" // the script was switched on or off
)

// An Event is a fault that is injected into a call, or a switch of a [Script]. A call that
// several plans apply to has an event for each.
type Event struct {
	Kind    EventKind
	Name    string // of the script
	Fault   Kind   // what is injected, of an Injected
	Enabled bool   // whether the script is on now, of a Switched
}

// Observe calls f for each event until stop is called. A second call of stop does nothing.
// f is called without a lock and may use the script. For a fault it runs on the goroutine
// of the call, which waits for it, perhaps on several at once, with the ctx of the call. For
// a switch it runs on a goroutine that calls Update or Enable, one call at a time and in
// order, with context.Background.
func (s *Script) Observe(f func(context.Context, Event)) (stop func()) {
	return s.observers.Observe(f)
}
