// Package describe has what a policy may say of itself, each as an optional method. Package
// registry reads policies by these methods alone, so that it knows no pattern; and since this
// package links nothing, a pattern that describes itself links neither slog nor JSON.
package describe

import "context"

// A Figure is one number that a policy shows, at one moment.
//
// Its Name is what the figure is called everywhere, with its attributes in braces:
// "breaker.calls{outcome=failure}". The values of attributes are constants in snake_case.
// A Name whose unit is not a count ends in it: "_seconds", or "_ratio" for a share.
type Figure struct {
	Name string
	// Counter is whether the Value only grows. Otherwise it rises and falls.
	Counter bool
	Value   float64
}

// An Event is something that happened to a policy.
type Event interface {
	// Level is as slog's: -4 for what is normal, 4 for what needs attention.
	Level() int
	// Fields calls yield with each detail of the event. The first is "event", what happened.
	Fields(yield func(name string, value any))
}

// A Kinder says which pattern it is of: "breaker".
type Kinder interface{ Kind() string }

// A Namer has a name, unique within its kind.
type Namer interface{ Name() string }

// A Figurer has figures.
type Figurer interface{ Figures() []Figure }

// A Healther says why it does not let calls pass as it should, or nil.
type Healther interface{ Health() error }

// A Setter has settings: a copy of its Config with the defaults, without functions.
type Setter interface{ Settings() any }

// A Changer lets its settings change. Change calls f with a pointer to the Config as it was
// given, under the lock of Update. The Config that f leaves takes effect unless f returns an
// error, the Config is not valid, or dry is true.
type Changer interface {
	Change(dry bool, f func(cfg any) error) error
}

// An Observer tells f of each event, an [Event], until stop is called. f is called without a
// lock, by the goroutine that caused the event, perhaps by several at once.
type Observer interface {
	ObserveAny(f func(context.Context, any)) (stop func())
}

// Count returns a Figure that only grows.
func Count(name string, n int64) Figure { return Figure{Name: name, Counter: true, Value: float64(n)} }

// An Ailment is what is wrong with a policy: the error of its Health. Whoever shows it asks for its
// parts by methods, because a policy of another module has a type of its own.
type Ailment struct {
	State  string // in a word: "open"
	Detail string // in numbers: "3 of 4 in flight"; or ""
	Fails  bool   // calls fail because of it
	Err    error  // of a call or a store, which may hold secrets; or nil
}

func (a *Ailment) Error() string {
	text := a.State
	if a.Detail != "" {
		text += ": " + a.Detail
	}
	if a.Err != nil {
		text += ": " + a.Err.Error()
	}
	return text
}

func (a *Ailment) Unwrap() error        { return a.Err }
func (a *Ailment) HealthState() string  { return a.State }
func (a *Ailment) HealthDetail() string { return a.Detail }
func (a *Ailment) Failed() bool         { return a.Fails }
