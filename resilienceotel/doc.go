// Package resilienceotel exports the metrics of a program's policies to OpenTelemetry, and traces the calls that run
// under these policies.
//
//	stop, err := resilienceotel.Observe(reg, resilienceotel.Config{}) // a *registry.Registry that has its policies
//	defer stop()
//	defer reg.Observe(registry.Log(nil))() // because leases and sagas with an observer do not log by themselves
//
//	t := resilienceotel.New(resilienceotel.Config{})
//	guarded := resilience.Chain(
//		t.Call("users"), // a span and a duration for the whole call
//		retries.Wrap, circuit.Wrap, slots.Wrap,
//		t.Attempt("users"), // a span and a duration for each attempt
//	)
//
// For a client of resiliencehttp.NewClient, Attempt belongs inside the client, and Call around it:
//
//	client := resiliencehttp.NewClient(resiliencehttp.ClientConfig{
//		Base: &resiliencehttp.Transport{Middleware: t.Attempt("users")},
//	})
//	client.Transport = &resiliencehttp.Transport{Base: client.Transport, Middleware: t.Call("users")}
//
// [Observe] and [New] can be used independently of each other. The zero Config uses the global providers of package
// otel. The program examples/observed shows how to export metrics to Prometheus, and metrics and traces by the protocol
// OTLP.
//
// # Metrics
//
// [Observe] exports each metric of the policies in a [registry.Registry] as an instrument. For example, the metric
// breaker.calls has the attribute outcome. This metric becomes the instrument resilience.breaker.calls with the
// attributes resilience.outcome and resilience.name, which is the name of the policy. In Prometheus, the name of this
// instrument is resilience_breaker_calls_total, and its label is resilience_outcome.
//
// The metric of a breaker's state has one value for each state: 1 for the current state and 0 for the other states. The
// sum of a state's values over all instances of the program is therefore the number of breakers in this state.
//
// Observe also records events of the policies in these histograms. The unit is seconds, except for the number of
// attempts:
//
//	resilience.bulkhead.wait.duration  outcome                  calls that waited
//	resilience.throttle.wait.duration  outcome                  calls that waited
//	resilience.cache.load.duration     outcome                  completed loads, except canceled ones
//	resilience.retry.call.attempts     outcome                  attempts of calls that were retried or failed
//	resilience.saga.step.duration      saga, step, op, outcome  attempts of steps
//	resilience.saga.duration           saga, status             sagas, from start to end
//
// [Telemetry.Call] and [Telemetry.Attempt] record these histograms, in seconds. The attribute resilience.outcome is
// "ok", "error", "refused", "canceled" or "timeout". If the outcome is not "ok", the histograms also have the attribute
// error.type:
//
//	resilience.call.duration     calls, including their attempts and waits
//	resilience.attempt.duration  attempts
//
// The value of error.type is the result of the error's method ErrorType() string. For an error without the method
// ErrorType, error.type is the Go type of the error. The attribute error.type is never the text of the error.
//
// A Group is a policy with one member for each key, such as one breaker for each host. If [Config].Keys is set, the
// metrics of a Group's members are exported as instruments such as resilience.member.breaker.state, with the attribute
// resilience.key. Without Config.Keys, no keys are exported.
//
// # Many policies
//
// The OpenTelemetry SDK retains at most 2000 different attribute sets for each instrument. The SDK adds up all further
// sets under the attribute otel.metric.overflow. The metrics then no longer show, for example, which breaker is open.
// If the program has more than 150 policies of one kind, raise the limit of 2000 attribute sets. Also raise the limit
// if the program has many sagas, because a saga has 12 attribute sets for each of its steps.
//
//	metric.NewMeterProvider(metric.WithReader(reader), metric.WithCardinalityLimit(20_000))
//
// # Traces
//
// The methods Call and Attempt of a [Telemetry] create spans. When a policy has an event, Observe sets these attributes
// on the current span:
//
//	resilience.refused_by  the policy that refused last, such as "breaker/users"
//	resilience.attempts    the number of attempts of a call that a Retrier retried or stopped retrying
//	resilience.waited      seconds of the last wait for a slot or a token
//	resilience.stale       true if a cache served a value after its TTL
//
// If a Retrier retries a call, the span of each attempt has the attribute resilience.attempt. The value of
// resilience.attempt is 1 for the first attempt, 2 for the second attempt, and so on. The span of a call that failed
// has the attributes resilience.outcome and error.type. If a policy refuses an attempt, the attempt has no span.
// [Steps] traces the steps of a saga.
//
// The directory alerts has alerting rules for Prometheus. The directory dashboards has a dashboard for Grafana.
// docs/runbook.md describes how to act on each alert.
//
// # Stability
//
// This package is unstable until version 1.0.0: a minor version may change it.
package resilienceotel
