package retry

import (
	"context"
	"slices"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
)

// Observe calls f with each event until stop is called, on the goroutine of Do and without holding a lock.
func (r *Retrier) Observe(f func(context.Context, Event)) (stop func()) {
	return r.observers.Observe(f)
}

// An Event is something that happened to a [Retrier].
type Event struct {
	Kind        EventKind     // what happened
	Name        string        // of the Retrier
	Attempts    int           // so far
	Err         error         // of the attempt, or of Do if the call has ended
	Delay       time.Duration // before the next attempt, of EventRetried
	RetryingFor time.Duration // since the first attempt failed
	Outcome     Outcome       // of EventEnded
}

// An EventKind says what an [Event] is.
type EventKind string

const (
	EventRetried EventKind = "retried" // before the wait for another attempt
	EventEnded   EventKind = "ended"   // a call that was retried, or given up, has ended
)

// An Outcome says how a call that was retried has ended.
type Outcome string

const (
	OutcomeRecovered  Outcome = "recovered"   // a retry succeeded
	OutcomeExhausted  Outcome = "exhausted"   // see [ErrExhausted]
	OutcomePermanent  Outcome = "permanent"   // the error was not worth another attempt
	OutcomeOverBudget Outcome = "over_budget" // see [ErrOverBudget]
	OutcomeDeadline   Outcome = "deadline"    // no time was left
	OutcomeCanceled   Outcome = "canceled"    // by the caller

	outcomeFirstTry Outcome = "first_try" // only in metrics
	outcomeNested   Outcome = "nested"    // only in metrics
	outcomeLost     Outcome = ""          // the call lost a hedge: neither an event nor in metrics
)

// contextOutcome returns the outcome of a call whose ctx is done. If the call lost a hedge, that is no failure.
func contextOutcome(ctx context.Context) Outcome {
	switch {
	case ended.Lost(ctx):
		return outcomeLost
	case ctx.Err() == context.DeadlineExceeded:
		return OutcomeDeadline
	}
	return OutcomeCanceled
}

// Stats are the counters of a [Retrier]. Each call that has returned is in exactly one of FirstTry to
// Nested, except for calls that lost a hedge.
type Stats struct {
	FirstTry   int64 `counter:"calls{outcome=first_try}"`   // succeeded at the first attempt
	Recovered  int64 `counter:"calls{outcome=recovered}"`   // succeeded after a retry
	Exhausted  int64 `counter:"calls{outcome=exhausted}"`   // see [OutcomeExhausted]
	Permanent  int64 `counter:"calls{outcome=permanent}"`   // see [OutcomePermanent]
	OverBudget int64 `counter:"calls{outcome=over_budget}"` // see [OutcomeOverBudget]
	Deadline   int64 `counter:"calls{outcome=deadline}"`    // see [OutcomeDeadline]
	Canceled   int64 `counter:"calls{outcome=canceled}"`    // see [OutcomeCanceled]
	Nested     int64 `counter:"calls{outcome=nested}"`      // failed within an attempt of another Retrier

	Attempts int64 `counter:"attempts"` // that have returned
	Retried  int64 `counter:"retries"`  // attempts after the first
}

// counts are the counters of a Retrier. A first attempt that succeeds, the most common case, adds to only one
// of them.
type counts struct {
	ended           [len(outcomes)]atomic.Int64
	failed, retried atomic.Int64 // attempts
}

// outcomes are in the order of Stats.
var outcomes = [...]Outcome{
	outcomeFirstTry, OutcomeRecovered, OutcomeExhausted, OutcomePermanent,
	OutcomeOverBudget, OutcomeDeadline, OutcomeCanceled, outcomeNested,
}

// end counts a call that has ended.
func (c *counts) end(o Outcome) {
	if i := slices.Index(outcomes[:], o); i >= 0 {
		c.ended[i].Add(1)
	}
}

// Stats returns the counters of r.
func (r *Retrier) Stats() Stats {
	n := func(i int) int64 { return r.counts.ended[i].Load() }
	s := Stats{n(0), n(1), n(2), n(3), n(4), n(5), n(6), n(7), r.counts.failed.Load(), r.counts.retried.Load()}
	s.Attempts += s.FirstTry + s.Recovered
	return s
}
