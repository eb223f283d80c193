package retry

import (
	"context"
	"slices"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
)

// Observe calls f with each event from now on, until stop is called: on the goroutine of Do,
// with its ctx and without a lock. A panic in f passes on to the caller.
func (r *Retrier) Observe(f func(context.Context, Event)) (stop func()) {
	return r.observers.Observe(f)
}

// An Event is something that happened to a [Retrier].
type Event struct {
	Kind        EventKind
	Name        string        // of the Retrier
	Attempt     int           // EventRetried: the number of the attempt that failed
	Attempts    int           // EventEnded: how many attempts there were
	Err         error         // EventRetried: of the attempt; EventEnded: the result of Do
	Delay       time.Duration // EventRetried: the wait before the next attempt
	RetryingFor time.Duration // EventRetried and EventEnded: the time since the first attempt failed
	Outcome     Outcome       // EventEnded
}

// Level is 4, slog's Warn, for a call that failed, and -4, Debug, otherwise.
func (e Event) Level() int {
	if e.Kind == EventEnded && e.Err != nil {
		return 4
	}
	return -4
}

// Fields calls yield with each detail.
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

type EventKind string

const (
	EventRetried EventKind = "retried" // before each wait for another attempt
	EventEnded   EventKind = "ended"   // of a call that was retried, or given up with an [*Error]
)

// An Outcome is how a call ended that was retried or given up.
type Outcome string

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

// Stats is what a [Retrier] has done since it was made. Each call of Do that returns is in one
// of the fields from FirstTry to Nested, but for one that has lost a hedge.
type Stats struct {
	FirstTry   int64 // calls whose first attempt succeeded
	Recovered  int64 // calls that succeeded by a retry
	Exhausted  int64 // calls that used up Attempts or the Backoff, or met a limit
	Permanent  int64 // calls that another attempt would not have helped
	OverBudget int64 // calls that Budget allowed no other attempt
	Deadline   int64 // calls that ran out of time
	Canceled   int64 // calls whose ctx was canceled
	Nested     int64 // calls that failed within an attempt of another Retrier

	Attempts int64 // calls of fn that have returned
	Retried  int64 // calls of fn that followed another
}

func (s Stats) Calls() int64 {
	return s.FirstTry + s.Recovered + s.Exhausted + s.Permanent + s.OverBudget + s.Deadline + s.Canceled + s.Nested
}

// counts are the figures of a Retrier. A first attempt that succeeds is counted in one place
// only; all others are rare beside it.
type counts struct {
	firstTry, retried, nested atomic.Int64
	failed                    atomic.Int64 // attempts, refused ones included
	ended                     [len(outcomes)]atomic.Int64
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

func (r *Retrier) Stats() Stats {
	c := &r.counts
	s := Stats{
		FirstTry: c.firstTry.Load(), Recovered: c.ended[0].Load(), Exhausted: c.ended[1].Load(),
		Permanent: c.ended[2].Load(), OverBudget: c.ended[3].Load(), Deadline: c.ended[4].Load(),
		Canceled: c.ended[5].Load(), Nested: c.nested.Load(), Retried: c.retried.Load(),
	}
	s.Attempts = s.FirstTry + s.Recovered + c.failed.Load()
	return s
}
