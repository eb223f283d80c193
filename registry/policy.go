package registry

import (
	"context"
	"reflect"

	"github.com/go-resilience/resilience/internal/describe"
)

// A Policy is whatever has a name. A registry shows what it says of itself, by these methods,
// each of which may be missing but Kind:
//
//	Kind() string                    // which pattern it is of: "breaker"
//	Figures() []registry.Figure      // its numbers at this moment
//	Health() error                   // why calls do not pass as they should, or nil
//	Settings() any                   // a copy of its Config, with defaults, without functions
//	Change(dry bool, f func(cfg any) error) error
//	ObserveAny(f func(context.Context, any)) (stop func())
//
// Change calls f with a pointer to the Config as it was given, in which a zero field means its
// default. What f makes of it takes effect, unless f returns an error, the Config is not valid,
// or dry is true. ObserveAny calls f with each event; a policy whose method Observe is of that
// form needs no other. An event may have Level() int, as slog's levels, and
// Fields(func(name string, value any)), which calls the function with each detail: "event" is
// what happened, "key" is which member of a group, and "err" is an error. An error of Health may
// have HealthState() string, a word for it, and Failed() bool: whether calls fail because of it.
// Health(context.Context) error is for a policy that must ask a server.
//
// A policy may hold no registry for long: its methods are called one after the other.
//
// Policy is an alias of an unnamed type, so that a function that knows nothing of this package
// can take [Registry.MustAdd]: resiliencehttp.ClientConfig.Register does.
type Policy = interface {
	Name() string
}

// An Entry is a policy in a [Registry].
type Entry struct {
	// Kind is what the method Kind of the policy returns. A Group has the kind of its members.
	Kind string
	// Name is the name of the policy, unique within its kind.
	Name string
	// Policy is the policy itself.
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

// String returns the kind and the name: "breaker/users". It is the name in settings.
func (e Entry) String() string { return e.Kind + "/" + e.Name }

// Figures returns the figures of the policy. A Group's are those of its members added up,
// those that it has evicted included.
func (e Entry) Figures() []Figure {
	if d, ok := e.Policy.(describe.Figurer); ok {
		return d.Figures()
	}
	return nil
}

// Health returns nil, or why the policy does not let calls pass as it should, as its method
// Health does. A policy that must ask a server for that ends when ctx does.
func (e Entry) Health(ctx context.Context) error {
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
