package retry

import (
	"context"
	"slices"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
)

// Observe calls f with each event until stop is called. f runs on the goroutine that called Do, without a lock.
func (r *Retrier) Observe(f func(context.Context, Event)) (stop func()) {
	return r.observers.Observe(f)
}

// An Event reports a retry or the result of a call. The result of a call is reported only if the call was retried or
// returned an [*Error]. If package hedge cancels a call because a parallel call has won, the result is not reported.
type Event struct {
	Kind        EventKind     // the kind of the event
	Name        string        // the Retrier's name
	Attempts    int           // the number of attempts so far
	Err         error         // the attempt's error; if Kind is EventEnded, the error that Do returns
	Delay       time.Duration // the wait before the next attempt; 0 if Kind is EventEnded
	RetryingFor time.Duration // the time since the first attempt failed
	Outcome     Outcome       // the call's outcome; empty unless Kind is EventEnded
}

// An EventKind is the kind of an [Event].
type EventKind string

const (
	EventRetried EventKind = "retried" // a call starts to wait before another attempt
	EventEnded   EventKind = "ended"   // a call has ended, after a retry or with an [*Error]
)

// An Outcome specifies how a call ended.
type Outcome string

const (
	OutcomeRecovered  Outcome = "recovered"   // a retry succeeded
	OutcomeExhausted  Outcome = "exhausted"   // the error matches [ErrExhausted]
	OutcomePermanent  Outcome = "permanent"   // another attempt could not help, or an open breaker refused the attempt
	OutcomeOverBudget Outcome = "over_budget" // the error matches [ErrOverBudget]
	OutcomeDeadline   Outcome = "deadline"    // ctx's deadline has passed, or left no time for another attempt
	OutcomeCanceled   Outcome = "canceled"    // the caller canceled the call

	outcomeFirstTry Outcome = "first_try" // only in metrics
	outcomeNested   Outcome = "nested"    // only in metrics
	outcomeLost     Outcome = ""          // the hedge's other call won; causes no event, not in metrics
)

// contextOutcome returns the outcome of a call whose ctx is done. If package hedge canceled the call because a
// parallel call won, the outcome is outcomeLost.
func contextOutcome(ctx context.Context) Outcome {
	switch {
	case ended.Lost(ctx):
		return outcomeLost
	case ctx.Err() == context.DeadlineExceeded:
		return OutcomeDeadline
	}
	return OutcomeCanceled
}

// Stats are the counters of a [Retrier]. Each call that has returned is counted in exactly one of the fields
// FirstTry, Recovered, Exhausted, Permanent, OverBudget, Deadline, Canceled and Nested. If package hedge cancels a
// call because a parallel call has won, the canceled call is not counted at all.
type Stats struct {
	FirstTry   int64 `counter:"calls{outcome=first_try}"`   // calls that succeeded at the first attempt
	Recovered  int64 `counter:"calls{outcome=recovered}"`   // calls that succeeded after a retry
	Exhausted  int64 `counter:"calls{outcome=exhausted}"`   // see [OutcomeExhausted]
	Permanent  int64 `counter:"calls{outcome=permanent}"`   // see [OutcomePermanent]
	OverBudget int64 `counter:"calls{outcome=over_budget}"` // see [OutcomeOverBudget]
	Deadline   int64 `counter:"calls{outcome=deadline}"`    // see [OutcomeDeadline]
	Canceled   int64 `counter:"calls{outcome=canceled}"`    // see [OutcomeCanceled]
	Nested     int64 `counter:"calls{outcome=nested}"`      // calls that failed within an attempt of another Retrier

	Attempts int64 `counter:"attempts"` // attempts that have returned
	Retried  int64 `counter:"retries"`  // attempts after the first
}

// counts are the counters of a Retrier. In the most common case, which is a successful first attempt, only one
// counter is incremented.
type counts struct {
	ended           [len(outcomes)]atomic.Int64 // calls by outcome, in the order of outcomes
	failed, retried atomic.Int64                // failed attempts, and attempts after the first
}

// outcomes are in the order of the fields of Stats.
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
