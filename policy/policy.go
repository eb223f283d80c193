// Package policy defines how a policy, such as a breaker, describes itself: its name, metrics, health, configuration
// and events. The packages registry, console and resilienceotel read policies only through this package. To use your
// own policy with registry, console and resilienceotel, give it a method Describe:
//
//	var _ policy.Describer = (*Spacing)(nil)
//
//	func (s *Spacing) Describe() policy.Description {
//		return policy.Description{
//			Kind:    "spacing",
//			Name:    s.name,
//			Metrics: func() []policy.Metric { return policy.Metrics("spacing", s.Stats()) },
//		}
//	}
//
// docs/adapter.md explains how to write a complete policy. This package imports no other package of this module.
//
// # Stability
//
// This package is unstable until version 1.0.0: a minor version may change the package and the results of
// this module's Describe methods.
package policy

import (
	"context"
	"iter"
	"log/slog"
)

// A Describer is a policy that can be added to a registry. Every policy of this module is a Describer. The following
// line makes the compiler check that a type is a Describer:
//
//	var _ policy.Describer = (*Spacing)(nil)
type Describer interface {
	// Describe returns the description of the policy. The functions of the description are safe for
	// concurrent use, and remain valid as long as the policy does.
	Describe() Description
}

// A Description identifies a policy and gives access to the policy's state. Only Kind is required. If the policy does
// not support a function, the function's field is nil. A future version of this package may add fields.
type Description struct {
	Kind string // the kind of the policy, such as "breaker"; the same for all policies of a type
	Name string // the name of the policy, unique within its kind; a registry requires a name

	// Metrics returns the current metrics. See the function [Metrics].
	Metrics func() []Metric

	// Health reports whether the policy currently admits calls as it should. If Health queries a server, Health must
	// return before the deadline of ctx.
	Health func(ctx context.Context) Health

	// Config returns a copy of the policy's configuration. The configuration is a struct with defaults filled in. A
	// registry ignores the struct's fields that a settings file cannot hold, such as functions and interfaces.
	Config func() any

	// Update calls change with a pointer to the configuration, and then applies the modified configuration. The
	// configuration is passed without defaults: a zero field means its default, as in a settings file. In contrast,
	// the policy's own method Update passes the configuration with defaults filled in.
	//
	// The policy stays unchanged if change returns an error, if the modified configuration is invalid, or if dryRun
	// is true. Update returns the error that change returns, or an error that reports why the configuration is
	// invalid. Update returns these errors even if dryRun is true.
	Update func(dryRun bool, change func(cfg any) error) error

	// Observe calls f with every event until stop is called. f runs on the goroutine that causes the event, while the
	// policy holds no lock. The function [Events] creates a function for the field Observe.
	Observe func(f func(context.Context, Event)) (stop func())

	// Members returns the members of a group, each with the text of its key. A group is a policy that has one member
	// for each key, and each member is a policy.
	Members func() iter.Seq2[string, Describer]

	// InUse reports whether a group must keep this policy as a member even if the policy is idle. For example, a group
	// must keep an open breaker. A group calls InUse while it holds a lock, so InUse must be fast.
	InUse func() bool
}

// An Event is something that happened to a policy. The package of each policy also has its own Event type with typed
// fields.
type Event struct {
	Kind  string      // the kind of the policy: "breaker"
	Name  string      // the name of the policy: "users"
	Key   string      // the text of the member's key, for an event of a group's member
	What  string      // what happened, in snake_case, such as "refused"
	Level slog.Level  // Debug for a normal event, Info for the end of a problem, Warn or above for a problem
	Err   error       // the error behind the event, or nil; it may contain secrets
	Attrs []slog.Attr // all other data; the keys are in snake_case
}

// Attr returns the value of the attribute key, or the zero Value if Attrs does not contain the attribute.
func (e Event) Attr(key string) slog.Value {
	for _, a := range e.Attrs {
		if a.Key == key {
			return a.Value
		}
	}
	return slog.Value{}
}

// Events returns a function for the field Observe of a [Description]. observe is the policy's own method Observe, and
// E is the type of its events. convert converts an event of type E, and is called once for each event and observer.
//
//	Observe: policy.Events(s.Observe, describeEvent),
func Events[E any](
	observe func(func(context.Context, E)) (stop func()), convert func(E) Event,
) func(func(context.Context, Event)) (stop func()) {
	return func(f func(context.Context, Event)) (stop func()) {
		return observe(func(ctx context.Context, e E) { f(ctx, convert(e)) })
	}
}

// Health is the current condition of a policy. The zero Health means that there is no problem.
type Health struct {
	Status HealthStatus
	State  string // the state in one word, such as "open" or "full"; empty means "ok"
	Detail string // numbers about the state, such as "3 of 4 in flight"
	Err    error  // the underlying error, which may contain secrets
}

// A HealthStatus is the severity of a [Health].
type HealthStatus int

const (
	Pass HealthStatus = iota // calls pass as they should
	Warn                     // something needs attention, but calls pass
	Fail                     // calls fail because of the policy's condition
)

// String returns "pass", "warn" or "fail". A value below Pass counts as Pass, and a value above Fail counts as Fail.
func (s HealthStatus) String() string {
	return [...]string{"pass", "warn", "fail"}[min(max(s, Pass), Fail)]
}
