package resilienceotel

import (
	"context"
	"errors"

	"go.opentelemetry.io/otel/attribute"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/retry"
)

// namespace is the prefix of the names of all instruments and attributes of this package.
const namespace = "resilience."

// Keys of the attributes of metrics and spans. Further keys come from the names of the policies' metrics.
const (
	nameKey      = attribute.Key(namespace + "name")       // the name of a policy, or of a Call or Attempt
	keyKey       = attribute.Key(namespace + "key")        // the key of a Group's member, if Config.Keys allows it
	outcomeKey   = attribute.Key(namespace + "outcome")    // the outcome of a call, a wait, a load or a step
	refusedByKey = attribute.Key(namespace + "refused_by") // the policy that refused last: "breaker/users"
	attemptKey   = attribute.Key(namespace + "attempt")    // the number of an attempt, from 1
	attemptsKey  = attribute.Key(namespace + "attempts")   // the number of attempts of a call
	waitedKey    = attribute.Key(namespace + "waited")     // seconds of the last wait for a slot or a token
	staleKey     = attribute.Key(namespace + "stale")      // true if a cache served a value after its TTL
	sagaKey      = attribute.Key(namespace + "saga")       // the Name of the saga's definition
	statusKey    = attribute.Key(namespace + "status")     // the status of a saga that has ended
	stepKey      = attribute.Key(namespace + "step")
	opKey        = attribute.Key(namespace + "op")
)

// An outcome is the result of a call or an attempt.
type outcome string

const (
	ok       outcome = "ok"
	failed   outcome = "error"
	refused  outcome = "refused"
	canceled outcome = "canceled"
	timeout  outcome = "timeout"
)

// outcomeOf returns the outcome of a call that had ctx and returned err.
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

// errorType returns the attribute error.type of err. If err is the error of a Retrier that stopped retrying, errorType
// uses the error of the last attempt.
func errorType(err error) attribute.KeyValue {
	for {
		gaveUp, ok := errors.AsType[*retry.Error](err)
		if !ok || gaveUp.Err == nil {
			return semconv.ErrorType(err)
		}
		err = gaveUp.Err
	}
}
