package registry

import (
	"context"
	"fmt"
	"reflect"

	"github.com/go-resilience/resilience/internal/describe"
)

// A Policy has a name. A registry shows what it says by these methods, all of which but Kind may be
// missing:
//
//	Kind() string                    // which pattern it is of: "breaker"
//	Figures() []registry.Figure      // its numbers at this moment
//	Health() error                   // why calls do not pass as they should, or nil
//	Settings() any                   // a copy of its Config, with defaults, without functions
//	Change(dry bool, f func(cfg any) error) error
//	ObserveAny(f func(context.Context, any)) (stop func())
//
// Health(context.Context) error is for a policy that must ask a server. Its error may have
// HealthState() string, a word for it, HealthDetail() string, and Failed() bool: whether calls fail.
//
// Change calls f with a pointer to the Config as it was given: a zero field means its default. What f
// makes of it takes effect, unless f returns an error, the Config is not valid, or dry is true.
//
// ObserveAny, or an Observe of that form, calls f with each event. An event may have Level() int, one
// of slog's, and Fields(func(name string, value any)), which calls the function with each detail:
// "event" is what happened, "key" the member of a group, "err" an error.
type Policy = interface {
	Name() string
}

// An Entry is a policy in a [Registry].
type Entry struct {
	Kind   string // a Group has that of its members
	Name   string // unique within the kind
	Policy Policy
}

// entryOf returns the entry of p, or false if p does not say what it is.
func entryOf(p Policy) (Entry, bool) {
	k, ok := p.(describe.Kinder)
	if !ok {
		return Entry{}, false
	}
	return Entry{Kind: k.Kind(), Name: p.Name(), Policy: p}, true
}

// String returns the name in settings: "breaker/users".
func (e Entry) String() string { return e.Kind + "/" + e.Name }

func (e Entry) Figures() []Figure {
	if d, ok := e.Policy.(describe.Figurer); ok {
		return d.Figures()
	}
	return nil
}

// Health returns what the method Health of the policy does, if it has one. A panic is an error: whoever
// looks after the policies asks in the background.
func (e Entry) Health(ctx context.Context) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = fmt.Errorf("registry: %s: Health panicked: %v", e, v)
		}
	}()
	switch h := e.Policy.(type) {
	case interface{ Health(context.Context) error }:
		return h.Health(ctx)
	case describe.Healther:
		return h.Health()
	}
	return nil
}

// config returns the settings of the policy, or false if it has none.
func (e Entry) config() (reflect.Value, bool) {
	s, ok := e.Policy.(describe.Setter)
	if !ok {
		return reflect.Value{}, false
	}
	v := reflect.ValueOf(s.Settings())
	if v.Kind() == reflect.Pointer {
		v = v.Elem()
	}
	return v, v.Kind() == reflect.Struct
}

// observe calls f with each event of the policy until stop is called.
func (e Entry) observe(f func(context.Context, Event)) (stop func()) {
	observer := func(ctx context.Context, event any) { f(ctx, e.event(event)) }
	switch o := e.Policy.(type) {
	case describe.Observer:
		return o.ObserveAny(observer)
	case interface {
		Observe(func(context.Context, any)) func()
	}:
		return o.Observe(observer)
	}
	return func() {}
}
