package registry

import (
	"log/slog"

	"github.com/go-resilience/resilience/saga"
)

func sagaFigures(s saga.Stats, to emit) {
	for _, d := range s.Sagas {
		sagas := func(status string, n int64) {
			to.counter("saga.saga.count", "{saga}", "Sagas that this runner has recorded, by definition and status.", n, "saga", d.Saga, "status", status)
		}
		sagas("started", d.Started)
		sagas(string(saga.Completed), d.Completed)
		sagas(string(saga.Compensated), d.Compensated)
		sagas(string(saga.Stuck), d.Stuck)
		sagas(string(saga.Abandoned), d.Abandoned)
		to.seconds(Counter, "saga.life.time", "Time from start to end of the sagas that have ended, together.", d.Took, "saga", d.Saga)
	}
	for _, step := range s.Steps {
		attempts := func(outcome saga.Outcome, n int64) {
			to.counter("saga.step.count", "{attempt}", "Attempts of steps, by outcome.", n,
				"saga", step.Saga, "step", step.Step, "op", string(step.Op), "outcome", string(outcome))
		}
		attempts(saga.OutcomeDone, step.Done)
		attempts(saga.OutcomeNoEffect, step.NoEffect)
		attempts(saga.OutcomeInDoubt, step.InDoubt)
		attempts(saga.OutcomeFailed, step.Failed)
		attempts(saga.OutcomeRefused, step.Refused)
		attempts(saga.OutcomeInterrupted, step.Interrupted)
		to.seconds(Counter, "saga.step.time", "Time that attempts took, together.", step.Took,
			"saga", step.Saga, "step", step.Step, "op", string(step.Op))
	}
	to.counter("saga.claim.count", "{saga}", "Sagas that this runner has claimed.", s.Claimed)
	to.counter("saga.takeover.count", "{saga}", "Sagas taken over from an owner that had not released them.", s.TakenOver)
	to.counter("saga.lost.count", "{saga}", "Sagas that another runner took over.", s.Lost)
	to.counter("saga.failing.count", "{report}", "Reports of sagas that make no progress.", s.Failing)
	to.counter("saga.commit.count", "{commit}", "Commits in the store.", s.Commits)
	to.counter("saga.store.error.count", "{error}", "Errors of the store.", s.StoreErrors)
	to.gauge("saga.held", "{saga}", "Sagas that this runner holds.", float64(s.Held))
	to.gauge("saga.in_flight", "{attempt}", "Attempts under way.", float64(s.InFlight))
	to.gauge("saga.unregistered", "{saga}", "Due sagas whose definition no runner here has registered.", float64(s.Unregistered))
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
	case saga.EventStuck, saga.EventFailing, saga.EventLost, saga.EventTakenOver, saga.EventUnregistered, saga.EventStoreError:
		ev.Level = slog.LevelWarn
	}
	return ev
}
