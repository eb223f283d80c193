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
// A [Registry] is a value that the program makes and passes on. No call looks a policy up in it. It
// shows what a policy says of itself by a few methods: see [Policy].
//
// Settings are JSON by the Go names of the fields of each policy's Config. [Registry.Settings] writes
// them, and [Registry.Apply] or [Registry.Reload] changes the policies that run; nothing here watches
// anything. examples/reload does it on SIGHUP, and polls a key in Redis. What a change keeps, and what
// cannot change, is said at the method Update of each policy.
//
// The pattern is External Configuration Store
// (https://learn.microsoft.com/azure/architecture/patterns/external-configuration-store).
package registry
