// Package resilienceotel shows the policies of a program in OpenTelemetry, as metrics and
// traces.
//
//	stop, err := resilienceotel.Observe(reg, resilienceotel.Config{}) // a *registry.Registry that has its policies
//	defer stop()
//
//	t := resilienceotel.New(resilienceotel.Config{})
//	guarded := resilience.Chain(
//		t.Call("users"), // a span and a duration for the whole call
//		retries.Wrap, circuit.Wrap, slots.Wrap,
//		t.Attempt("users"), // a span and a duration for each attempt
//	)
//
// A client of resiliencehttp.NewClient is measured from within and from around:
//
//	client := resiliencehttp.NewClient(resiliencehttp.ClientConfig{
//		Base: &resiliencehttp.Transport{Middleware: t.Attempt("users")},
//	})
//	client.Transport = &resiliencehttp.Transport{Base: client.Transport, Middleware: t.Call("users")}
//
// [Observe] and [New] stand alone. The zero Config uses otel's global providers. The program
// examples/observed sets up metrics for Prometheus, and metrics and traces by OTLP.
//
// # Metrics
//
// Each metric of the policies in a [registry.Registry] is an instrument: the metric breaker.calls with its
// attribute outcome is resilience.breaker.calls with resilience.outcome and resilience.name, the name of the
// policy; in Prometheus it is resilience_breaker_calls_total with resilience_outcome. The metric of a breaker's
// state is 1 for its current state and 0 for the others, so states can be summed over instances.
//
// These histograms record events; all except one are in seconds:
//
//	resilience.bulkhead.wait.duration  outcome                  calls that waited
//	resilience.throttle.wait.duration  outcome                  calls that waited
//	resilience.cache.load.duration     outcome                  completed loads, except canceled ones
//	resilience.retry.call.attempts     outcome                  attempts of calls that were retried or failed
//	resilience.saga.step.duration      saga, step, op, outcome  attempts of steps
//	resilience.saga.duration           saga, status             sagas, from start to end
//
// These come from Call and Attempt, in seconds, with the attribute outcome ("ok", "error",
// "refused", "canceled" or "timeout") and, unless that is "ok", error.type:
//
//	resilience.call.duration     calls, attempts and waits included
//	resilience.attempt.duration  attempts
//
// An error.type is what a method ErrorType() string of the error returns, or the type of the
// error; never its text.
//
// With [Config.Keys], the metrics of a Group's members are exported as instruments such as
// resilience.member.breaker.state, with resilience.key. Without it, no key is exported.
//
// # Many policies
//
// The SDK keeps 2000 attribute sets of an instrument and sums up the others under otel.metric.overflow, which does
// not show which breaker is open. Raise the limit for more than 150 policies of a kind; a saga has 12 sets for
// each of its steps:
//
//	metric.NewMeterProvider(metric.WithReader(reader), metric.WithCardinalityLimit(20_000))
//
// # Traces
//
// Call and Attempt create spans. Observe sets these attributes on the span that is current when a policy has an
// event:
//
//	resilience.refused_by  the policy that refused last, such as "breaker/users"
//	resilience.attempts    the number of attempts of a call that a Retrier retried or gave up
//	resilience.waited      seconds of the last wait for a slot or a token
//	resilience.stale       true if a cache served a value past its TTL
//
// The span of an attempt under a Retrier has resilience.attempt, its number from 1. The span
// of a call that failed has resilience.outcome and error.type. An attempt that a policy
// refuses has no span. [Steps] traces the steps of a saga.
//
// The directories alerts and dashboards have rules for Prometheus and a dashboard for
// Grafana. What to do about an alert is in docs/runbook.md.
package resilienceotel
