// Package registry provides a [Registry] of the policies of a program. A Registry gives access to the metrics
// and events of the policies, and changes their settings while they run.
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
// There is no global Registry: the program creates a [Registry] and passes it to the code that needs it. Calls that run
// under a policy do not use the Registry. A Registry reads each policy only through its method Describe (see
// [policy.Describer]), so you can also add your own policies. The console, resilienceotel and resiliencehttp.Health
// read the policies from a Registry.
//
// # Settings
//
// The settings of a policy are its Config as a JSON object. The keys of the object are the Go names of the Config's
// fields. [Registry.Settings] returns the current settings. [Registry.Apply] and [Registry.Reload] change running
// policies. The package does not watch files. The program examples/reload shows how to reload a file on SIGHUP, and how
// to poll settings from a key in Redis. The documentation of each policy's Update method describes which fields cannot
// change, and which state of the policy survives a change.
//
// # Stability
//
// This package is unstable until version 1.0.0: a minor version of the module may change it.
//
// Source: External Configuration Store
// (https://learn.microsoft.com/azure/architecture/patterns/external-configuration-store).
package registry
