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

// Observe calls f with each event until stop is called, on the goroutine of Do and without a lock.
func (r *Retrier) Observe(f func(context.Context, Event)) (stop func()) {
	return r.observers.Observe(f)
}

func (r *Retrier) ObserveAny(f func(context.Context, any)) (stop func()) {
	return r.Observe(func(ctx context.Context, e Event) { f(ctx, e) })
}

// An Event is what happened to a [Retrier].
type Event struct {
	Kind        string
	Name        string
	Attempt     int           // EventRetried: which one failed
	Attempts    int           // EventEnded: how many there were
	Err         error         // EventRetried: of the attempt; EventEnded: of Do
	Delay       time.Duration // EventRetried: before the next attempt
	RetryingFor time.Duration
	Outcome     string // EventEnded: "recovered", "exhausted", "permanent", "over budget", "deadline", "canceled"
}

func (e Event) Level() int {
	if e.Kind == EventEnded && e.Err != nil {
		return 4
	}
	return -4
}

func (e Event) Fields(yield func(name string, value any)) {
	say := func(name string, value any, is bool) {
		if is {
			yield(name, value)
		}
	}
	say("event", e.Kind, true)
	say("attempt", e.Attempt, e.Attempt > 0)
	say("attempts", e.Attempts, e.Attempts > 0)
	say("in", e.Delay, e.Delay > 0)
	say("outcome", e.Outcome, e.Outcome != "")
	say("retrying_for", e.RetryingFor, e.RetryingFor > 0)
	say("err", e.Err, e.Err != nil)
}

// Kinds of events.
const (
	EventRetried = "retried" // before each wait for another attempt
	EventEnded   = "ended"   // of a call that was retried, or given up with an [*Error]
)

// Outcomes of a call.
const (
	firstTry   = "first try" // only in figures
	recovered  = "recovered"
	exhausted  = "exhausted"
	permanent  = "permanent"
	overBudget = "over budget"
	deadline   = "deadline"
	canceled   = "canceled"
	nested     = "nested" // only in figures
)

// endOf returns the outcome of a call whose ctx has ended. It returns "" for the call of a
// hedge that has lost: that is no failure, nobody is told, and it counts nowhere.
func endOf(ctx context.Context) (outcome string) {
	switch {
	case ended.Lost(ctx):
		return ""
	case ctx.Err() == context.DeadlineExceeded:
		return deadline
	}
	return canceled
}

// Stats counts what a [Retrier] has done. Each call that has returned, but for one that lost a hedge,
// is in one of FirstTry to Nested.
type Stats struct {
	FirstTry   int64 // succeeded in the first attempt
	Recovered  int64 // by a retry
	Exhausted  int64 // used up Attempts or the Backoff, or met a limit
	Permanent  int64
	OverBudget int64
	Deadline   int64 // ran out of time
	Canceled   int64
	Nested     int64 // failed within an attempt of another Retrier

	Attempts int64 // that have returned
	Retried  int64 // attempts that followed another
}

// counts are the figures of a Retrier. A first attempt that succeeds is counted in one place
// only; all others are rare beside it.
type counts struct {
	ended           [len(outcomes)]atomic.Int64
	failed, retried atomic.Int64 // attempts
}

// outcomes are in the order of Stats.
var outcomes = [...]string{firstTry, recovered, exhausted, permanent, overBudget, deadline, canceled, nested}

// end counts the end of a call with an outcome, unless that is "".
func (c *counts) end(outcome string) {
	if i := slices.Index(outcomes[:], outcome); i >= 0 {
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

func (r *Retrier) Figures() (all []describe.Figure) {
	for i, o := range outcomes {
		name := "retry.calls{outcome=" + strings.ReplaceAll(o, " ", "_") + "}"
		all = append(all, describe.Count(name, r.counts.ended[i].Load()))
	}
	return append(all, describe.Count("retry.attempts", r.Stats().Attempts))
}

func (r *Retrier) Health() error { return r.setting.Load().Budget.Health() }

func (r *Retrier) Needed() bool { return r.setting.Load().Budget.Needed() }
