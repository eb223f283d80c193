package retry

import "github.com/go-resilience/resilience/internal/behavior"

// A failure is what is known of an attempt that has failed.
type failure struct {
	behavior.End
	permanent bool // marked as such
	ended     bool // ctx has ended
	itself    bool // so, and the first attempt says it
	made      bool // an attempt was not refused, this or an earlier one
	waits     bool // a refusal is waited for
	worth     bool // a failure is worth another attempt
	last      bool // there are no more Attempts
}

// A verdict is what follows from a failure.
type verdict int

const (
	again     verdict = iota // another attempt, if the budget and the time allow it
	final                    // the error of the attempt is that of the call
	stopped                  // the end of ctx is, as the attempt says
	cut                      // the end of ctx ends the attempts
	turnedOff                // the refusal ends the attempts that were made
	exhausted                // no attempt is left
)

func (f failure) verdict() verdict {
	switch {
	case f.permanent, f.Kind == behavior.Answered && !f.Retryable:
		return final
	case f.itself:
		return stopped
	case f.ended:
		return cut
	case f.Kind == behavior.Refused && !f.waits && f.made:
		return turnedOff
	case f.Kind == behavior.Refused && !f.waits, f.Kind == behavior.Failed && !f.worth:
		return final
	case f.last:
		return exhausted
	}
	return again
}
