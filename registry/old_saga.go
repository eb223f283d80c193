package registry

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/go-resilience/resilience/saga"
)

func init() {
	oldReaders = append(oldReaders, func(p Policy) any {
		c, ok := p.(runner)
		if !ok {
			return nil
		}
		return &oldSaga{read(p, "saga", sagaFigures, sagaEvent, nil).(*oldReader[saga.Stats, saga.Event]), c}
	})
}

func sagaFigures(s saga.Stats, to emit) {
	for _, d := range s.Sagas {
		sagas := func(status string, n int64) {
			to.counter("saga.sagas", "{saga}", "Sagas that this runner has recorded, by definition and status.", n, Attr{"saga", d.Saga}, Attr{"status", status})
		}
		sagas("started", d.Started)
		sagas(label(saga.Completed), d.Completed)
		sagas(label(saga.Compensated), d.Compensated)
		sagas(label(saga.Stuck), d.Stuck)
		sagas(label(saga.Abandoned), d.Abandoned)
		to.seconds(true, "saga.life.time", "Time from start to end of the sagas that have ended, together.", d.Took, Attr{"saga", d.Saga})
		attempts := func(outcome saga.Outcome, n int64) {
			to.counter("saga.step.attempts", "{attempt}", "Attempts of steps, by outcome.", n,
				Attr{"saga", d.Saga}, Attr{"outcome", label(outcome)})
		}
		attempts(saga.OutcomeDone, d.Attempts.Done)
		attempts(saga.OutcomeNoEffect, d.Attempts.NoEffect)
		attempts(saga.OutcomeInDoubt, d.Attempts.InDoubt)
		attempts(saga.OutcomeFailed, d.Attempts.Failed)
		attempts(saga.OutcomeRefused, d.Attempts.Refused)
		attempts(saga.OutcomeInterrupted, d.Attempts.Interrupted)
		to.seconds(true, "saga.step.time", "Time that attempts took, together.", d.Attempts.Took, Attr{"saga", d.Saga})
	}
	// Of all runners on the store; a number that is saga.CountLimit means so many or more.
	for i := range s.Stored.Sagas {
		c := &s.Stored.Sagas[i]
		for _, of := range []struct {
			status saga.Status
			n      int
		}{{saga.Running, c.Running}, {saga.Compensating, c.Compensating}, {saga.Stuck, c.Stuck}} {
			to.alone("saga.stored", "{saga}", "Sagas in the store that have not ended, those of all runners, by definition and status. At most 10000. Not to be added up.",
				float64(of.n), Attr{"saga", c.Saga}, Attr{"status", string(of.status)})
		}
		to.alone("saga.due", "{saga}", "Sagas in the store that wait for a runner. At most 10000. Not to be added up.", float64(c.Due), Attr{"saga", c.Saga})
		var age time.Duration
		if !c.OldestDue.IsZero() {
			age = max(s.Stored.Now.Sub(c.OldestDue), 0)
		}
		to.seconds(false, "saga.due.age", "Time that the first of them has waited. Not to be added up.", age, Attr{"saga", c.Saga})
	}
	to.counter("saga.claims", "{saga}", "Sagas that this runner has claimed.", s.Claimed)
	to.counter("saga.takeovers", "{saga}", "Sagas taken over from an owner that had not released them.", s.TakenOver)
	to.counter("saga.losses", "{saga}", "Sagas that this runner lost: claimed by another, abandoned while held, or their lease ended.", s.Lost)
	to.counter("saga.stalls", "{report}", "Reports of steps that fail again and again.", s.Stalled)
	to.counter("saga.commits", "{commit}", "Writes of a held saga's progress.", s.Commits)
	to.counter("saga.deletions", "{saga}", "Sagas that this runner has deleted, some time after their end.", s.Deleted)
	to.counter("saga.store.errors", "{error}", "Errors of the store.", s.StoreErrors)
	to.gauge("saga.held", "{saga}", "Sagas that this runner holds.", float64(s.Held))
	to.gauge("saga.in_flight", "{attempt}", "Attempts under way.", float64(s.InFlight))
}

func sagaEvent(e saga.Event) oldEvent {
	var attrs []slog.Attr
	add := func(key, value string) {
		if value != "" {
			attrs = append(attrs, slog.String(key, value))
		}
	}
	add("saga", e.Saga)
	add("id", e.ID)
	add("status", string(e.Status))
	add("step", e.Step)
	add("op", string(e.Op))
	add("outcome", string(e.Outcome))
	if e.Attempt > 0 {
		attrs = append(attrs, slog.Int("attempt", e.Attempt))
	}
	if e.Took > 0 {
		attrs = append(attrs, slog.Duration("took", e.Took))
	}
	ev := happened(e.Kind, "", e.Err, attrs...)
	switch e.Kind {
	case saga.EventStuck, saga.EventStalled, saga.EventLost, saga.EventTakenOver, saga.EventStoreFailed:
		ev.level = slog.LevelWarn
	}
	return ev
}

type runner interface {
	observed[saga.Stats, saga.Event]
	Counts(context.Context) (saga.Counts, error)
	Config() saga.RunnerConfig
}

type oldSaga struct {
	*oldReader[saga.Stats, saga.Event]
	runner runner
}

func (o *oldSaga) Health(ctx context.Context) error {
	counts, err := o.runner.Counts(ctx)
	if err != nil {
		return &ailment{state: "store down", fails: true, err: err}
	}
	if ill := sagaHealth(counts, o.runner.Config().DueAfter); ill != nil {
		return ill
	}
	return nil
}

// sagaHealth judges the sagas in a store, which may be due for up to a time; negative means
// any time.
func sagaHealth(counts saga.Counts, dueAfter time.Duration) *ailment {
	stuck, due := 0, 0
	var waits time.Duration // of the first that became due
	for i := range counts.Sagas {
		c := &counts.Sagas[i]
		stuck += c.Stuck
		if due += c.Due; c.Due > 0 {
			waits = max(waits, counts.Now.Sub(c.OldestDue))
		}
	}
	overdue := ""
	if dueAfter >= 0 && waits >= dueAfter && due > 0 {
		overdue = fmt.Sprintf("%s due, the first for %v", sagas(due), waits.Round(time.Second))
	}
	switch {
	case stuck > 0 && overdue != "":
		return &ailment{state: "stuck", fails: true, detail: sagas(stuck) + "; " + overdue}
	case stuck > 0:
		return &ailment{state: "stuck", fails: true, detail: sagas(stuck)}
	case overdue != "":
		return &ailment{state: "overdue", detail: overdue}
	}
	return nil
}

// sagas returns a number of sagas in words. A Count has no number above saga.CountLimit.
func sagas(n int) string {
	switch {
	case n >= saga.CountLimit:
		return fmt.Sprintf("%d sagas or more", saga.CountLimit)
	case n == 1:
		return "1 saga"
	}
	return fmt.Sprintf("%d sagas", n)
}
