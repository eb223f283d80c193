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
// The program creates a [Registry] and passes it on. Calls do not use the Registry. A Registry reads policies
// only as [policy.Describer], so you can add your own policies. The console, resilienceotel and
// resiliencehttp.Health read a Registry in the same way.
//
// # Settings
//
// The settings of a policy are a JSON object. Its keys are the Go names of the fields of the policy's Config.
// [Registry.Settings] returns the current settings. [Registry.Apply] and [Registry.Reload] change running
// policies. The package does not watch files: examples/reload reloads a file on SIGHUP and polls a key in
// Redis. The Update method of each policy documents which fields cannot change, and which state a change
// keeps.
//
// # Stability
//
// This package is unstable until version 1.0.0: a minor version may change it.
//
// Source: External Configuration Store
// (https://learn.microsoft.com/azure/architecture/patterns/external-configuration-store).
package registry
