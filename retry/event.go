package retry

import (
	"context"
	"time"
)

// Observe has f called with each event of r, with the ctx of Do. Observers are called in
// the order in which they were added, after OnRetry and OnGiveUp, and no lock is held. stop
// removes f.
func (r *Retrier) Observe(f func(context.Context, Event)) (stop func()) {
	return r.observers.Observe(f)
}

// An Event is something that happened to a [Retrier], a [Budget] or a [Hedger].
type Event struct {
	Kind     EventKind
	Name     string        // of the Retrier, Budget or Hedger
	Attempt  int           // EventRetry: the number of the attempt that failed; EventEnd: how many there were; EventHedge: the number of the call, from 2
	Err      error         // EventRetry: of the attempt; EventEnd: the result of Do
	Delay    time.Duration // EventRetry: the wait before the next attempt
	Retrying time.Duration // EventRetry and EventEnd of a Retrier: the time since the first attempt failed
	Outcome  Outcome       // EventEnd
}

// An EventKind is a kind of [Event].
type EventKind string

const (
	// EventRetry is an event of a Retrier before each wait for another attempt.
	EventRetry EventKind = "retry"
	// EventEnd is the end of a call that was retried or hedged, or that a Retrier gave
	// up with an [*Error].
	EventEnd EventKind = "end"
	// EventOverBudget is an event of a Budget, and of a Hedger with a Budget, for each
	// retry or further call that the Budget did not allow.
	EventOverBudget EventKind = "over budget"
	// EventHedge is an event of a Hedger before each further call.
	EventHedge EventKind = "hedge"
)

// An Outcome is how a call ended.
type Outcome string

// The outcomes of a call that a [Retrier] retried or gave up. [Stats] has a field for each.
const (
	OutcomeRecovered  Outcome = "recovered"
	OutcomeExhausted  Outcome = "exhausted"
	OutcomePermanent  Outcome = "permanent"
	OutcomeOverBudget Outcome = "over budget"
	OutcomeDeadline   Outcome = "deadline"
	OutcomeCanceled   Outcome = "canceled"
)

// The outcomes of a call that a [Hedger] hedged. [HedgeStats] has a field for each.
const (
	OutcomeFirst  Outcome = "first"
	OutcomeHedge  Outcome = "hedge"
	OutcomeFailed Outcome = "failed"
)
