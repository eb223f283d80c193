package retry

import (
	"context"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience/internal/describe"
	"github.com/go-resilience/resilience/internal/ended"
)

// Observe calls f with each event until stop is called: on the goroutine of Do, with its ctx and
// without a lock. A panic in f passes on to the caller.
func (r *Retrier) Observe(f func(context.Context, Event)) (stop func()) {
	return r.observers.Observe(f)
}

// ObserveAny is Observe for whoever does not know Event.
func (r *Retrier) ObserveAny(f func(context.Context, any)) (stop func()) {
	return r.Observe(func(ctx context.Context, e Event) { f(ctx, e) })
}

// An Event is something that happened to a [Retrier].
type Event struct {
	Kind        EventKind
	Name        string        // of the Retrier
	Attempt     int           // EventRetried: the number of the attempt that failed
	Attempts    int           // EventEnded: how many there were
	Err         error         // EventRetried: of the attempt; EventEnded: the result of Do
	Delay       time.Duration // EventRetried: before the next attempt
	RetryingFor time.Duration // since the first attempt failed
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
	say := func(name string, value any, is bool) {
		if is {
			yield(name, value)
		}
	}
	say("event", string(e.Kind), true)
	say("attempt", e.Attempt, e.Attempt > 0)
	say("attempts", e.Attempts, e.Attempts > 0)
	say("in", e.Delay, e.Delay > 0)
	say("outcome", string(e.Outcome), e.Outcome != "")
	say("retrying_for", e.RetryingFor, e.RetryingFor > 0)
	say("err", e.Err, e.Err != nil)
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
	firstTry          Outcome = "first try" // these two only in figures
	nested            Outcome = "nested"
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

// Stats is what a [Retrier] has done. Each call of Do that returns is in one of the fields from
// FirstTry to Nested, but for one that has lost a hedge.
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

// counts are the figures of a Retrier. A first attempt that succeeds is counted in one place
// only; all others are rare beside it.
type counts struct {
	ended           [len(outcomes)]atomic.Int64
	failed, retried atomic.Int64 // attempts
}

// outcomes are in the order of Stats.
var outcomes = [...]Outcome{
	firstTry, OutcomeRecovered, OutcomeExhausted, OutcomePermanent,
	OutcomeOverBudget, OutcomeDeadline, OutcomeCanceled, nested,
}

// end counts the end of a call with an outcome, unless that is "".
func (c *counts) end(o Outcome) {
	if i := slices.Index(outcomes[:], o); i >= 0 {
		c.ended[i].Add(1)
	}
}

func (r *Retrier) Stats() Stats {
	n := func(i int) int64 { return r.counts.ended[i].Load() }
	s := Stats{n(0), n(1), n(2), n(3), n(4), n(5), n(6), n(7), r.counts.failed.Load(), r.counts.retried.Load()}
	s.Attempts += s.FirstTry + s.Recovered
	return s
}

func (r *Retrier) Kind() string { return "retry" }

// Figures returns retry.calls by outcome, as in Stats, and retry.attempts.
func (r *Retrier) Figures() (all []describe.Figure) {
	for i, o := range outcomes {
		name := "retry.calls{outcome=" + strings.ReplaceAll(string(o), " ", "_") + "}"
		all = append(all, describe.Figure{Name: name, Counter: true, Value: float64(r.counts.ended[i].Load())})
	}
	return append(all, describe.Figure{Name: "retry.attempts", Counter: true, Value: float64(r.Stats().Attempts)})
}

// Health returns an error while the Budget of r is spent.
func (r *Retrier) Health() error { return r.setting.Load().Budget.Health() }

// Needed reports whether the Budget of r holds less than a new one: a resilience.Group keeps r then.
func (r *Retrier) Needed() bool { return r.setting.Load().Budget.Needed() }
