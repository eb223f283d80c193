package saga

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/go-resilience/resilience/internal/describe"
)

// Kind returns "saga".
func (r *Runner) Kind() string { return "saga" }

// Settings returns [Runner.Config] without its functions.
func (r *Runner) Settings() any {
	cfg := r.Config()
	cfg.OnEvent, cfg.Inject, cfg.Extract = nil, nil, nil
	return cfg
}

// Figures returns what a runner shows over time: the fields of its [Stats], saga.sagas by status and
// saga.step.attempts by outcome. saga.stored, saga.due and saga.due.age_seconds are those of all
// runners on the store, so they must not be added up. They are there for each definition that is
// registered or was seen in the store, and 0 while it has no such saga.
func (r *Runner) Figures() []describe.Figure {
	var all []describe.Figure
	add := func(counter bool, v float64, name string, labels ...string) {
		if len(labels) > 0 {
			name += "{" + strings.Join(labels, ",") + "}"
		}
		all = append(all, describe.Figure{Name: name, Counter: counter, Value: v})
	}
	s := r.Stats()
	for _, d := range s.Sagas {
		of := "saga=" + d.Saga
		for _, n := range []struct {
			status string
			n      int64
		}{
			{"started", d.Started}, {"completed", d.Completed}, {"compensated", d.Compensated}, {"stuck", d.Stuck},
			{"abandoned", d.Abandoned},
		} {
			add(true, float64(n.n), "saga.sagas", of, "status="+n.status)
		}
		add(true, d.Took.Seconds(), "saga.life.time_seconds", of)
		for _, n := range []struct {
			outcome string
			n       int64
		}{
			{"done", d.Attempts.Done}, {"no_effect", d.Attempts.NoEffect}, {"in_doubt", d.Attempts.InDoubt},
			{"failed", d.Attempts.Failed}, {"refused", d.Attempts.Refused}, {"interrupted", d.Attempts.Interrupted},
		} {
			add(true, float64(n.n), "saga.step.attempts", of, "outcome="+n.outcome)
		}
		add(true, d.Attempts.Took.Seconds(), "saga.step.time_seconds", of)
	}
	for _, c := range r.stored(s) {
		of := "saga=" + c.Saga
		add(false, float64(c.Running), "saga.stored", of, "status=running")
		add(false, float64(c.Compensating), "saga.stored", of, "status=compensating")
		add(false, float64(c.Stuck), "saga.stored", of, "status=stuck")
		add(false, float64(c.Due), "saga.due", of)
		add(false, c.waits(s.Stored.Now).Seconds(), "saga.due.age_seconds", of)
	}
	for _, n := range []struct {
		name string
		n    int64
	}{
		{"claims", s.Claimed}, {"takeovers", s.TakenOver}, {"losses", s.Lost}, {"stalls", s.Stalled}, {"commits", s.Commits},
		{"deletions", s.Deleted}, {"store.errors", s.StoreErrors},
	} {
		add(true, float64(n.n), "saga."+n.name)
	}
	add(false, float64(s.Held), "saga.held")
	add(false, float64(s.InFlight), "saga.in_flight")
	return all
}

// stored returns the numbers in the store of all definitions that are registered or were seen in it,
// by name. One that has none has zeros, also before the store has answered: a metric that ends is
// taken for its last value, and one that comes late is seen by nobody.
func (r *Runner) stored(s Stats) []Count {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, d := range s.Sagas {
		r.seen[d.Saga] = Count{Saga: d.Saga}
	}
	for name := range r.seen {
		r.seen[name] = Count{Saga: name}
	}
	for _, c := range s.Stored.Sagas {
		r.seen[c.Saga] = c
	}
	return slices.SortedFunc(maps.Values(r.seen), func(a, b Count) int { return strings.Compare(a.Saga, b.Saga) })
}

// waits returns for how long the first saga that is due has waited.
func (c *Count) waits(now time.Time) time.Duration {
	if c.OldestDue.IsZero() {
		return 0
	}
	return max(now.Sub(c.OldestDue), 0)
}

// Health asks the store, and returns nil, or what is wrong with the sagas in it: some are stuck, or
// have been due for [RunnerConfig].DueAfter while no runner took them. The error is that of the
// store, if it does not answer. Its methods HealthState() string and Failed() bool return "stuck",
// "overdue" or "store down", and whether sagas fail because of it: unless they are late alone.
func (r *Runner) Health(ctx context.Context) error {
	counts, err := r.Counts(ctx)
	if err != nil {
		return &healthError{state: "store down", err: err}
	}
	return health(counts, r.cfg.DueAfter)
}

func health(counts Counts, dueAfter time.Duration) error {
	stuck, due, waits := 0, 0, time.Duration(0)
	for i := range counts.Sagas {
		c := &counts.Sagas[i]
		stuck, due, waits = stuck+c.Stuck, due+c.Due, max(waits, c.waits(counts.Now))
	}
	overdue := due > 0 && dueAfter >= 0 && waits >= dueAfter
	late := fmt.Sprintf("%s due, the first for %v", number(due), waits.Round(time.Second))
	switch {
	case stuck > 0 && overdue:
		return &healthError{state: "stuck", detail: number(stuck) + "; " + late}
	case stuck > 0:
		return &healthError{state: "stuck", detail: number(stuck)}
	case overdue:
		return &healthError{state: "overdue", detail: late}
	}
	return nil
}

// number returns a number of sagas in words. One that is CountLimit means so many or more.
func number(n int) string {
	switch {
	case n >= CountLimit:
		return fmt.Sprintf("%d sagas or more", CountLimit)
	case n == 1:
		return "1 saga"
	}
	return fmt.Sprintf("%d sagas", n)
}

type healthError struct {
	state, detail string
	err           error
}

func (e *healthError) Error() string {
	switch {
	case e.err != nil:
		return e.state + ": " + e.err.Error()
	case e.detail != "":
		return e.state + ": " + e.detail
	}
	return e.state
}

func (e *healthError) Unwrap() error        { return e.err }
func (e *healthError) HealthState() string  { return e.state }
func (e *healthError) HealthDetail() string { return e.detail }
func (e *healthError) Failed() bool         { return e.state != "overdue" }

// ObserveAny is [Runner.Observe] for a caller that does not know the type: f gets an [Event].
func (r *Runner) ObserveAny(f func(context.Context, any)) (stop func()) {
	return r.Observe(func(ctx context.Context, e Event) { f(ctx, e) })
}

// Level returns the level of the event as log/slog has it: 4, a warning, for what needs attention,
// and -4 for the rest.
func (e Event) Level() int {
	switch e.Kind {
	case EventStuck, EventStalled, EventLost, EventTakenOver, EventStoreFailed:
		return 4
	}
	return -4
}

// Fields calls yield with each detail of the event that is not zero.
func (e Event) Fields(yield func(name string, value any)) {
	yield("event", string(e.Kind))
	for _, f := range []struct{ name, value string }{
		{"saga", e.Saga}, {"id", e.ID}, {"status", string(e.Status)}, {"step", e.Step}, {"op", string(e.Op)},
		{"outcome", string(e.Outcome)},
	} {
		if f.value != "" {
			yield(f.name, f.value)
		}
	}
	if e.Attempt > 0 {
		yield("attempt", e.Attempt)
	}
	if e.Took > 0 {
		yield("took", e.Took)
	}
	if e.Err != nil {
		yield("err", e.Err)
	}
}
