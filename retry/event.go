package retry

import (
	"context"
	"time"
)

// Observe calls f with each event from now on, until stop is called: synchronously, with the
// ctx of Do, after OnRetry, and while no lock is held. A panic in f passes on to
// the caller of Do. A second call of stop does nothing.
func (r *Retrier) Observe(f func(context.Context, Event)) (stop func()) {
	return r.observers.Observe(f)
}

// An Event is something that happened to a [Retrier], a [Budget], a [BudgetGroup] or a
// [Hedger].
type Event struct {
	Kind        EventKind
	Name        string        // of the Retrier, Budget, BudgetGroup or Hedger
	Key         string        // of a Budget in a BudgetGroup; "(other keys)" of the one that keys share
	Attempt     int           // EventRetried: the number of the attempt that failed; EventHedged: the number of the call of fn, from 2
	Attempts    int           // EventEnded: how many attempts or calls of fn there were
	Err         error         // EventRetried: of the attempt; EventEnded: the result of Do
	Delay       time.Duration // EventRetried: the wait before the next attempt
	RetryingFor time.Duration // EventRetried and EventEnded of a Retrier: the time since the first attempt failed
	Outcome     Outcome       // EventEnded
}

// An EventKind says what an [Event] is.
type EventKind string

const (
	// EventRetried is an event of a Retrier before each wait for another attempt.
	EventRetried EventKind = "retried"
	// EventEnded is an event at the end of a call that was retried or hedged, or that a
	// Retrier gave up with an [*Error].
	EventEnded EventKind = "ended"
	// EventOverBudget is an event of a Budget, and of a Hedger with a Budget, for each
	// retry or further call that the Budget did not allow.
	EventOverBudget EventKind = "over budget"
	// EventHedged is an event of a Hedger before each further call.
	EventHedged EventKind = "hedged"
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
	OutcomeFirstWon Outcome = "first won"
	OutcomeHedgeWon Outcome = "hedge won"
	OutcomeFailed   Outcome = "failed"
)
