// Package resilienceotel shows the policies of a program in OpenTelemetry, as metrics and
// traces.
//
//	stop, err := resilienceotel.Observe(reg, resilienceotel.Config{}) // a *registry.Registry
//	defer stop()
//
//	t := resilienceotel.New(resilienceotel.Config{})
//	guarded := resilience.Chain(
//		t.Call("users"), // a span and a duration for the whole call
//		retries.Wrap, circuit.Wrap, slots.Wrap,
//		t.Attempt("users"), // a span and a duration for each attempt
//	)
//
// [Observe] and [New] stand alone: Observe needs no change of any call, and New no
// registry. The zero Config uses otel's global providers.
//
// # Metrics
//
// Every figure of a [registry.Registry] is an instrument, with the prefix "resilience."
// and the name, unit and attributes that the registry gives it, besides resilience.name,
// the name of the policy: breaker.call.count is resilience.breaker.call.count, which
// Prometheus knows as resilience_breaker_call_count_total. Figures are read when metrics
// are collected, so that calls cost what they did. States are 1 or 0 for each state, and
// add up over instances.
//
// These histograms come from events:
//
//	resilience.bulkhead.wait.duration  outcome                    calls that waited
//	resilience.throttle.wait.duration  outcome                    calls that waited
//	resilience.cache.load.duration     outcome                    as resilience.cache.load.count
//	resilience.retry.attempts          outcome                    calls that were retried or given up
//	resilience.saga.step.duration      saga, step, op, outcome    attempts of steps
//	resilience.saga.duration           saga, status               from start to end
//
// And these from Call and Attempt, with outcome ("ok", "error", "refused", "canceled" or
// "timeout") and, unless it is "ok", error.type:
//
//	resilience.call.duration
//	resilience.attempt.duration
//
// An error.type is what a method ErrorType() string of the error returns, as the status
// errors of resiliencehttp and resiliencegrpc have it, or the type of the error; never its
// text. The key of a Group appears only if [Config.Keys] allows it.
//
// The SDK keeps 2000 attribute sets of an instrument, unless it is told otherwise
// (metric.WithCardinalityLimit). A breaker has up to five for an instrument, and a
// saga up to ten for each of its steps.
//
// # Traces
//
// Call and Attempt make spans. The attempts of a Retrier are siblings under the span of
// their call. Observe sets these attributes on the span that is current when a policy tells
// of an event:
//
//	resilience.refused_by     the policy that refused last, such as "breaker/users"
//	resilience.retry.attempt  how many attempts there were; of an attempt, its number
//	resilience.waited         seconds of the last wait for a slot or a token
//	resilience.stale          true if a cache served a value past its TTL
//
// The span of a call that failed has resilience.outcome and error.type, and nothing else of
// the error. An attempt that a policy refuses has no span. [Steps] traces the steps of a
// saga.
//
// The directories dashboards and alerts of this module have a dashboard for Grafana and
// alerting rules for Prometheus.
package resilienceotel
