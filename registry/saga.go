package registry

import (
	"log/slog"
	"time"

	"github.com/go-resilience/resilience/saga"
)

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
	}
	for _, step := range s.Steps {
		attempts := func(outcome saga.Outcome, n int64) {
			to.counter("saga.step.attempts", "{attempt}", "Attempts of steps, by outcome.", n,
				Attr{"saga", step.Saga}, Attr{"step", step.Step}, Attr{"op", label(step.Op)}, Attr{"outcome", label(outcome)})
		}
		attempts(saga.OutcomeDone, step.Done)
		attempts(saga.OutcomeNoEffect, step.NoEffect)
		attempts(saga.OutcomeInDoubt, step.InDoubt)
		attempts(saga.OutcomeFailed, step.Failed)
		attempts(saga.OutcomeRefused, step.Refused)
		attempts(saga.OutcomeInterrupted, step.Interrupted)
		to.seconds(true, "saga.step.time", "Time that attempts took, together.", step.Took,
			Attr{"saga", step.Saga}, Attr{"step", step.Step}, Attr{"op", label(step.Op)})
	}
	// Of all runners on the store; a number that is store.CountLimit means so many or more.
	for i := range s.Stored.Sagas {
		c := &s.Stored.Sagas[i]
		for _, status := range []saga.Status{saga.Running, saga.Compensating, saga.Stuck} {
			to.alone("saga.stored", "{saga}", "Sagas in the store that have not ended, those of all runners, by definition and status. At most 10000. Not to be added up.",
				float64(*c.Of(status)), Attr{"saga", c.Saga}, Attr{"status", string(status)})
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
	to.counter("saga.stalls", "{report}", "Reports of sagas that make no progress.", s.Stalled)
	to.counter("saga.commits", "{commit}", "Writes of a held saga's progress.", s.Commits)
	to.counter("saga.deletions", "{saga}", "Sagas that this runner has deleted, some time after their end.", s.Deleted)
	to.counter("saga.hook.panics", "{panic}", "Panics of hooks and observers.", s.HookPanics)
	to.counter("saga.store.errors", "{error}", "Errors of the store.", s.StoreErrors)
	to.gauge("saga.held", "{saga}", "Sagas that this runner holds.", float64(s.Held))
	to.gauge("saga.in_flight", "{attempt}", "Attempts under way.", float64(s.InFlight))
	to.gauge("saga.unregistered", "{saga}", "Due sagas whose definition is not registered with this runner.", float64(s.Unregistered))
}

func sagaEvent(e saga.Event) Event {
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
	if e.Count > 0 {
		attrs = append(attrs, slog.Int("count", e.Count))
	}
	ev := happened(e.Kind, "", e.Err, attrs...)
	switch e.Kind {
	case saga.EventStuck, saga.EventStalled, saga.EventLost, saga.EventTakenOver, saga.EventUnregistered, saga.EventStoreFailed:
		ev.Level = slog.LevelWarn
	}
	return ev
}
