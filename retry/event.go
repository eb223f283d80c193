package retry

import (
	"context"
	"slices"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
)

// Observe calls f with each event from now on, until stop is called: synchronously, with the
// ctx of Do, after OnRetry, and while no lock is held. A panic in f passes on to
// the caller of Do. A second call of stop does nothing.
func (r *Retrier) Observe(f func(context.Context, Event)) (stop func()) {
	return r.observers.Observe(f)
}

// An Event is something that happened to a [Retrier] or a [Budget].
type Event struct {
	Kind        EventKind
	Name        string        // of the Retrier or Budget
	Attempt     int           // EventRetried: the number of the attempt that failed
	Attempts    int           // EventEnded: how many attempts there were
	Err         error         // EventRetried: of the attempt; EventEnded: the result of Do
	Delay       time.Duration // EventRetried: the wait before the next attempt
	RetryingFor time.Duration // EventRetried and EventEnded: the time since the first attempt failed
	Outcome     Outcome       // EventEnded
}

// Level is 4, slog's Warn, for a call that failed and for a Budget that is spent, and -4,
// Debug, for what is normal.
func (e Event) Level() int {
	if e.Kind == EventOverBudget || e.Kind == EventEnded && e.Err != nil {
		return 4
	}
	return -4
}

// Fields calls yield with each detail of e that says something.
func (e Event) Fields(yield func(name string, value any)) {
	for _, f := range []struct {
		name  string
		value any
		says  bool
	}{
		{"event", string(e.Kind), true},
		{"attempt", e.Attempt, e.Attempt > 0},
		{"attempts", e.Attempts, e.Attempts > 0},
		{"in", e.Delay, e.Delay > 0},
		{"outcome", string(e.Outcome), e.Outcome != ""},
		{"retrying_for", e.RetryingFor, e.RetryingFor > 0},
		{"err", e.Err, e.Err != nil},
	} {
		if f.says {
			yield(f.name, f.value)
		}
	}
}

// An EventKind says what an [Event] is.
type EventKind string

const (
	// EventRetried is an event of a Retrier before each wait for another attempt.
	EventRetried EventKind = "retried"
	// EventEnded is an event at the end of a call that was retried, or that a Retrier gave
	// up with an [*Error].
	EventEnded EventKind = "ended"
	// EventOverBudget is an event of a Budget for each retry that it did not allow.
	EventOverBudget EventKind = "over budget"
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

// endOf returns the outcome of a call whose ctx has ended. It returns "" for the call of a
// hedge that has lost: that is no failure, nobody is told, and it counts nowhere.
func endOf(ctx context.Context) Outcome {
	switch {
	case ended.Lost(ctx):
		return ""
	case ctx.Err() == context.DeadlineExceeded:
		return OutcomeDeadline
	}
	return OutcomeCanceled
}

// Stats is a snapshot of what a [Retrier] has done since it was made. Each call of Do counts
// once, when it returns, in one of the fields from FirstTry to Nested. A call that panics, in
// fn or in a hook, and one that has lost a hedge are in none of them.
type Stats struct {
	FirstTry   int64 // calls whose first attempt succeeded
	Recovered  int64 // calls that succeeded by a retry
	Exhausted  int64 // calls that used up Attempts or the Backoff, or were asked to wait for more than MaxRetryAfter
	Permanent  int64 // calls that failed with an error that another attempt would not help, or that ended at an open breaker
	OverBudget int64 // calls that Budget allowed no other attempt
	Deadline   int64 // calls that ran out of time
	Canceled   int64 // calls whose ctx was canceled
	Nested     int64 // calls that failed within an attempt of another Retrier, which decides about retrying

	Attempts int64 // calls of fn, without a first one that panicked
	Retried  int64 // calls of fn that followed another
}

// Calls returns the number of calls of Do that have returned.
func (s Stats) Calls() int64 {
	return s.FirstTry + s.Recovered + s.Exhausted + s.Permanent + s.OverBudget + s.Deadline + s.Canceled + s.Nested
}

// counts are the figures of a Retrier. A first attempt that succeeds is counted in one place
// only; all others are rare beside it.
type counts struct {
	firstTry, firstFailed, retried, nested atomic.Int64
	ended                                  [len(outcomes)]atomic.Int64
}

var outcomes = [...]Outcome{
	OutcomeRecovered, OutcomeExhausted, OutcomePermanent, OutcomeOverBudget, OutcomeDeadline, OutcomeCanceled,
}

// end counts the end of a call with an outcome, unless that is "".
func (c *counts) end(o Outcome) {
	if i := slices.Index(outcomes[:], o); i >= 0 {
		c.ended[i].Add(1)
	}
}

// Stats returns a snapshot.
func (r *Retrier) Stats() Stats {
	c := &r.counts
	s := Stats{
		FirstTry: c.firstTry.Load(), Recovered: c.ended[0].Load(), Exhausted: c.ended[1].Load(),
		Permanent: c.ended[2].Load(), OverBudget: c.ended[3].Load(), Deadline: c.ended[4].Load(),
		Canceled: c.ended[5].Load(), Nested: c.nested.Load(), Retried: c.retried.Load(),
	}
	s.Attempts = s.FirstTry + c.firstFailed.Load() + s.Retried
	return s
}
