package resilienceotel

import (
	"context"
	"errors"

	"go.opentelemetry.io/otel/attribute"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/retry"
)

// namespace is in front of the names of instruments and attributes.
const namespace = "resilience."

// Attributes of metrics and spans. The name of a metric contains the names of further attributes.
const (
	nameKey      = attribute.Key(namespace + "name")       // of a policy, or of a Call or Attempt
	keyKey       = attribute.Key(namespace + "key")        // of a Group's member that Config.Keys allows
	outcomeKey   = attribute.Key(namespace + "outcome")    // the same texts as in the names of metrics
	refusedByKey = attribute.Key(namespace + "refused_by") // the policy that refused last: "breaker/users"
	attemptKey   = attribute.Key(namespace + "attempt")    // the number of an attempt, from 1
	attemptsKey  = attribute.Key(namespace + "attempts")   // how many attempts a call made
	waitedKey    = attribute.Key(namespace + "waited")     // seconds of the last wait for a slot or a token
	staleKey     = attribute.Key(namespace + "stale")      // true: a cache served a value past its TTL
	sagaKey      = attribute.Key(namespace + "saga")       // the Name of the definition
	statusKey    = attribute.Key(namespace + "status")     // of a saga that has ended
	stepKey      = attribute.Key(namespace + "step")
	opKey        = attribute.Key(namespace + "op")
)

// An outcome is how a call has ended.
type outcome string

const (
	ok       outcome = "ok"
	failed   outcome = "error"
	refused  outcome = "refused"
	canceled outcome = "canceled"
	timeout  outcome = "timeout"
)

// outcomeOf returns the outcome of a call that was made under ctx.
func outcomeOf(ctx context.Context, err error) outcome {
	if err == error(panicked{}) {
		return failed
	}
	switch resilience.ResultOf(ctx, err) {
	case resilience.ResultSuccess, resilience.ResultAnswer:
		return ok
	case resilience.ResultRefusal:
		return refused
	case resilience.ResultIgnored:
		if ctx.Err() == context.Canceled {
			return canceled
		}
		return timeout
	}
	if resilience.IsTimeout(err) {
		return timeout
	}
	return failed
}

// errorType returns the attribute error.type of an error, or of the last one that a
// Retrier gave up on.
func errorType(err error) attribute.KeyValue {
	for {
		gaveUp, ok := errors.AsType[*retry.Error](err)
		if !ok || gaveUp.Err == nil {
			return semconv.ErrorType(err)
		}
		err = gaveUp.Err
	}
}
