package breaker

import (
	"time"

	"github.com/go-resilience/resilience/internal/behavior"
)

// An Outcome is what an error of a call says about the dependency: [Failure], which is
// the zero Outcome, [Success], [Ignore], or that of [Trip].
type Outcome struct {
	kind outcome
	hold time.Duration
}

func (o Outcome) isFailure() bool { return o.kind == failure || o.kind == trip }

type outcome uint8

const (
	failure outcome = iota
	success
	ignore
	trip
)

var (
	Failure = Outcome{kind: failure} // the dependency failed
	Success = Outcome{kind: success} // it did its work: a "not found", for example
	Ignore  = Outcome{kind: ignore}  // nothing is known: the call was not made, or not finished
)

// Trip returns the Outcome of a failure that opens the breaker at once, for exactly d:
// neither lengthened to OpenFor nor by Jitter, and at most [Config].MaxRetryAfter.
// Zero or less means the time for which the breaker would open by itself.
func Trip(d time.Duration) Outcome { return Outcome{kind: trip, hold: max(0, d)} }

// DefaultClassify says what err means where [Config].Classify is nil: nil and answers
// are a Success, and refusals are Ignored. An error with a RetryAfter of the dependency
// is a [Trip] for that time, and any other error a Failure. The package comment says
// how errors are read.
func DefaultClassify(err error) Outcome { return classify(behavior.Read(err)) }

func classify(end behavior.End) Outcome {
	switch end.Kind {
	case behavior.Done, behavior.Answered:
		return Success
	case behavior.Refused:
		return Ignore
	default:
		if end.FailedAfter > 0 {
			return Trip(end.FailedAfter)
		}
		return Failure
	}
}
