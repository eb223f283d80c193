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
// A [Figure] is described once, here. Whatever shows figures, such as expvar, a metrics
// library or a page, renders what [Entry.Figures] returns.
//
// Settings are JSON by the Go names of the fields of each policy's Config, so that the
// documentation of the Config is theirs. A Group has those of its members under Config, and
// so have the breaker, the bulkhead and the budget of a resiliencehttp.NewClient:
// {"breaker/users": {"Config": {"Failures": 10}}}. [Registry.Settings] writes them, a person
// or a program edits them, and [Registry.Apply] changes the policies that run,
// or [Registry.Reload] from a file. When, and from where else (Redis, a control plane), is the
// program's matter: nothing here watches anything. examples/reload does it on SIGHUP, and
// polls a key in Redis.
//
// # What a change keeps
//
// Every policy has Update, which Apply uses and whose documentation has the details.
// Counters are never reset. Calls under way end under the Config that they began with;
// the next retry of such a call asks the changed budget. Beside that:
//
//	              keeps                                 counts anew                     cannot change
//	retry         retries under way                     -                               Name
//	budget        calls and retries of the last 10 s    -                               Name
//	hedge         the latencies that were seen          -                               Name
//	breaker       the state and its time, failures in   the window, if Window or        Name
//	              a row, permits of probes              WindowCalls change
//	bulkhead      slots that are taken, the queue,      -                               Name, Levels
//	              what an adaptive limit has learned
//	throttle      tokens spent, the queue, the keys     an Adaptive's next window, if   Name, Levels; of a Shared
//	              that Group.Set decides about, the     Window changes                  also Prefix
//	              calls in the window of an Adaptive
//	cache         entries, loads under way,             -                               Name, Store, MemoryInOutage,
//	              invalidations that the Store must                                     Codec, Version, the sign
//	              still be told of                                                      of Capacity
//	saga          the sagas that are held; their        -                               Name
//	              leases follow with a heartbeat that
//	              is sent immediately
//	lease         terms under way, with their TTL and   a waiting call's place in the   Name
//	              Margin                                line, if TTL changes
//	faults        -                                     all plans, from the beginning   Name
//
// A Group's Update changes its members too, except those whose Config comes from
// ConfigFor or, in a throttle.Group, whose limit comes from Set. Its MaxKeys cannot fall
// below the keys that it holds.
//
// The pattern is External Configuration Store of the Cloud Design Patterns catalog
// (https://learn.microsoft.com/azure/architecture/patterns/external-configuration-store).
package registry
