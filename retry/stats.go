package retry

import (
	"context"
	"sync/atomic"
)

// Stats is a snapshot of what a [Retrier] has done since it was made. Each call of Do
// counts once, when it returns, in one of the fields from FirstTry to Nested. A call that
// panics, in fn or in a hook, is in none of them.
type Stats struct {
	FirstTry   int64 // calls whose first attempt succeeded
	Recovered  int64 // calls that succeeded by a retry
	Exhausted  int64 // calls that used up Attempts or the Backoff, or were asked to wait for more than MaxRetryAfter
	Permanent  int64 // calls that failed with an error that another attempt would not help, or that ended at an open breaker
	OverBudget int64 // calls that Budget allowed no other attempt
	Deadline   int64 // calls that ran out of time, by MaxElapsed or by the deadline of ctx
	Canceled   int64 // calls whose ctx was canceled
	Nested     int64 // calls that failed within an attempt of another Retrier, which decides about retrying

	Attempts int64 // calls of fn, without a first one that panicked
	Retried  int64 // calls of fn that followed another
}

// Calls returns the number of calls of Do that have returned.
func (s Stats) Calls() int64 {
	return s.FirstTry + s.Recovered + s.Exhausted + s.Permanent + s.OverBudget + s.Deadline + s.Canceled + s.Nested
}

// counts are the figures of a Retrier. A first attempt that succeeds is counted in one
// place only; all others are rare beside it.
type counts struct {
	firstTry, retried atomic.Int64
	firstFailed       atomic.Int64 // calls whose first attempt failed

	recovered, exhausted, permanent, overBudget, deadline, canceled, nested atomic.Int64
}

// Stats returns a snapshot.
func (r *Retrier) Stats() Stats {
	s := Stats{
		FirstTry:   r.counts.firstTry.Load(),
		Recovered:  r.counts.recovered.Load(),
		Exhausted:  r.counts.exhausted.Load(),
		Permanent:  r.counts.permanent.Load(),
		OverBudget: r.counts.overBudget.Load(),
		Deadline:   r.counts.deadline.Load(),
		Canceled:   r.counts.canceled.Load(),
		Nested:     r.counts.nested.Load(),
		Retried:    r.counts.retried.Load(),
	}
	s.Attempts = s.FirstTry + r.counts.firstFailed.Load() + s.Retried
	return s
}

// end counts the end of a call with an outcome.
func (c *counts) end(o Outcome) {
	switch o {
	case OutcomeRecovered:
		c.recovered.Add(1)
	case OutcomeExhausted:
		c.exhausted.Add(1)
	case OutcomePermanent:
		c.permanent.Add(1)
	case OutcomeOverBudget:
		c.overBudget.Add(1)
	case OutcomeDeadline:
		c.deadline.Add(1)
	case OutcomeCanceled:
		c.canceled.Add(1)
	}
}

// endOf returns the outcome of a call whose ctx has ended.
func endOf(ctx context.Context) Outcome {
	if ctx.Err() == context.DeadlineExceeded {
		return OutcomeDeadline
	}
	return OutcomeCanceled
}
