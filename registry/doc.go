// Package registry holds the policies of a program, to see their metrics and events and to change their
// settings while they run.
//
//	reg := registry.New()
//	reg.MustAdd(retries, breaker, slots, search, users, runner) // each has a Name
//
//	reg.Observe(registry.Log(slog.Default())) // logs events
//	expvar.Publish("resilience", reg)         // publishes metrics
//
//	report, err := reg.Apply([]byte(`{
//		"breaker/users": {"ConsecutiveFailures": 10, "OpenFor": "45s"},
//		"bulkhead/users": {"Limit": 32}
//	}`))
//
// A [Registry] is a value that the program creates and passes on; no call looks a policy up in it. It reads
// policies only as [policy.Describer], so policies of your own can be added. The console, resilienceotel and
// resiliencehttp.Health read a Registry in the same way.
//
// # Settings
//
// Settings are JSON with the Go names of the fields of each policy's Config. [Registry.Settings] returns them;
// [Registry.Apply] and [Registry.Reload] change running policies. The package does not watch files:
// examples/reload reloads a file on SIGHUP and polls a key in Redis. The Update method of each policy
// documents what a change keeps and which fields cannot change.
//
// # Stability
//
// This package is unstable until version 1.0.0: a minor version may change it.
//
// Source: External Configuration Store
// (https://learn.microsoft.com/azure/architecture/patterns/external-configuration-store).
package registry
