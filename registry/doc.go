// Package registry holds the policies of a program: to see their figures and events, and
// to change their settings while they run.
//
//	reg := registry.New()
//	reg.MustAdd(retries, circuit, slots, search, users, runner) // each has a Name
//
//	reg.Observe(registry.Log(slog.Default())) // what happens, in the log
//	expvar.Publish("resilience", reg)         // what has happened, as numbers
//
//	report, err := reg.Apply([]byte(`{
//		"breaker/users": {"Failures": 10, "OpenFor": "45s"},
//		"bulkhead/users": {"Limit": 32}
//	}`))
//
// A [Registry] is a value that the program makes and passes on. No policy knows its
// registry, and no call looks a policy up in one: a call costs the same with a registry
// and without. Only an observer costs something, and only where there are events.
//
// A registry knows no pattern. It shows what a policy says of itself by a few methods, so that
// a policy of anybody's appears in it, in package console and in package resilienceotel as
// those of this module do: see [Policy].
//
// Settings are JSON by the Go names of the fields of each policy's Config, so that the
// documentation of the Config is theirs. [Registry.Settings] writes them, a person
// or a program edits them, and [Registry.Apply] changes the policies that run,
// or [Registry.Reload] from a file. When, and from where else (Redis, a control plane), is the
// program's matter: nothing here watches anything. examples/reload does it on SIGHUP, and
// polls a key in Redis. What a change keeps, and what cannot change, is said at the method
// Update of each policy.
//
// The pattern is External Configuration Store of the Cloud Design Patterns catalog
// (https://learn.microsoft.com/azure/architecture/patterns/external-configuration-store).
package registry
