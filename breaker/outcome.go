package breaker

import (
	"fmt"
	"time"

	"github.com/go-resilience/resilience/internal/behavior"
)

// An Outcome is what the error of a call says about the dependency: [Failure], which is
// the zero Outcome, [Success], [Ignore], or the result of [OpensFor].
type Outcome struct {
	kind    outcomeKind
	openFor time.Duration
}

type outcomeKind uint8

const (
	failure outcomeKind = iota
	success
	ignore
	opens
)

var (
	Failure = Outcome{kind: failure} // the dependency failed
	Success = Outcome{kind: success} // the dependency worked; its answer may be "not found"
	Ignore  = Outcome{kind: ignore}  // the call says nothing about the dependency
)

// OpensFor returns the Outcome of a failure that opens the breaker immediately, for
// exactly d: without Jitter, and at most [Config].MaxRetryAfter. Zero or less means the
// time for which the breaker would open by itself.
func OpensFor(d time.Duration) Outcome { return Outcome{kind: opens, openFor: max(0, d)} }

func (o Outcome) isFailure() bool { return o.kind == failure || o.kind == opens }

// String returns the outcome in words: "failure", "success", "ignore", or "opens for 5s".
func (o Outcome) String() string {
	switch {
	case o.openFor > 0:
		return fmt.Sprint("opens for ", o.openFor)
	case o.kind == opens:
		return "opens"
	case o.kind == ignore:
		return "ignore"
	case o.kind == success:
		return "success"
	default:
		return "failure"
	}
}

// DefaultClassify classifies err as a breaker without a [Config].Classify does. Nil and
// answers are a Success, and refusals are ignored. An error for which the dependency said
// RetryAfter is [OpensFor] that time, and any other error is a Failure. The package
// comment says how errors are read.
func DefaultClassify(err error) Outcome { return classify(behavior.Read(err)) }

func classify(end behavior.End) Outcome {
	switch end.Kind {
	case behavior.Done, behavior.Answered:
		return Success
	case behavior.Refused:
		return Ignore
	default:
		if end.FailedAfter > 0 {
			return OpensFor(end.FailedAfter)
		}
		return Failure
	}
}
