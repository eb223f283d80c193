// Package policy defines how a policy describes itself: what it is called, what it counts, how it is
// doing, how it is configured and what happens to it. Package registry, the console and the metrics
// read policies through this package alone, and so work with policies of your own as well:
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
// docs/adapter.md has a complete policy. The package imports nothing of this module.
//
// # Stability
//
// This package is unstable until version 1.0.0: a minor version may change it, together with what the
// Describe methods of this module return.
package policy

import (
	"context"
	"iter"
	"log/slog"
)

// A Describer is a policy that can be shown in a registry. Every policy of this module is one.
//
//	var _ policy.Describer = (*Spacing)(nil)
type Describer interface {
	// Describe returns the description of the policy. Its functions are safe for concurrent use and
	// remain valid for as long as the policy does.
	Describe() Description
}

// A Description says what a policy is, and gives access to its state. Only Kind is required; a nil
// function means that the policy has nothing to say about that. A future version may add fields.
type Description struct {
	Kind string // the pattern, such as "breaker"; the same for all policies of a type
	Name string // unique within the kind; required by a registry

	// Metrics returns the current metrics. See the function [Metrics].
	Metrics func() []Metric

	// Health reports whether calls currently pass as they should. A policy that must ask a server
	// returns by the deadline of ctx.
	Health func(ctx context.Context) Health

	// Config returns a copy of the configuration, a struct, with defaults filled in. Fields that settings
	// cannot hold, such as functions and interfaces, are ignored.
	Config func() any

	// Update calls change with a pointer to the configuration as it was given, in which a zero field
	// means its default, and applies the result. Nothing changes if change returns an error, if the
	// result is invalid, or if dryRun is set; Update returns the error in each case.
	Update func(dryRun bool, change func(cfg any) error) error

	// Observe calls f with every event until stop is called, on the goroutine that causes the event
	// and without holding a lock. See [Events].
	Observe func(f func(context.Context, Event)) (stop func())

	// Members returns the members of a group, with the text of their keys.
	Members func() iter.Seq2[string, Describer]

	// InUse reports whether a group must keep this member although it is idle, as it must an open
	// breaker. A group calls it while it holds a lock, so it must be quick.
	InUse func() bool
}

// An Event is something that happened to a policy. Each pattern also has an Event type of its own, with
// typed fields.
type Event struct {
	Kind  string      // of the policy: "breaker"
	Name  string      // of the policy: "users"
	Key   string      // of the member, if the policy is a group
	What  string      // what happened, in snake_case: "refused"
	Level slog.Level  // Debug if the event is normal, Warn or above if it needs attention
	Err   error       // the error behind the event, or nil; it may contain secrets
	Attrs []slog.Attr // everything else, by names in snake_case
}

// Attr returns the value of an attribute in Attrs, or the zero Value.
func (e Event) Attr(key string) slog.Value {
	for _, a := range e.Attrs {
		if a.Key == key {
			return a.Value
		}
	}
	return slog.Value{}
}

// Events returns the Observe of a [Description] for a policy whose own method Observe has events of type
// E. convert is called once for each event and observer.
//
//	Observe: policy.Events(s.Observe, describeEvent),
func Events[E any](
	observe func(func(context.Context, E)) (stop func()), convert func(E) Event,
) func(func(context.Context, Event)) (stop func()) {
	return func(f func(context.Context, Event)) (stop func()) {
		return observe(func(ctx context.Context, e E) { f(ctx, convert(e)) })
	}
}

// Health says how a policy is doing. The zero Health means that all is well.
type Health struct {
	Status HealthStatus
	State  string // in a word, such as "open" or "full"; empty means "ok"
	Detail string // in numbers, such as "3 of 4 in flight"
	Err    error  // the underlying error, which may contain secrets
}

// A HealthStatus is the severity of a [Health].
type HealthStatus int

const (
	Pass HealthStatus = iota // calls pass as they should
	Warn                     // something needs attention, but calls pass
	Fail                     // calls fail because of it
)

// String returns "pass", "warn" or "fail". A value below the range counts as Pass, one above it as Fail.
func (s HealthStatus) String() string {
	return [...]string{"pass", "warn", "fail"}[min(max(s, Pass), Fail)]
}
