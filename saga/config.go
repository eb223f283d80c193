package saga

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/go-resilience/resilience/internal/invalid"
	"github.com/go-resilience/resilience/internal/settings"
)

// RunnerConfig configures a [Runner]. The zero RunnerConfig is usable.
//
// The goroutines that run sagas call the hooks, several at the same time. A panic in a
// hook is logged by slog's default logger.
type RunnerConfig struct {
	// Name appears in the names of owners, in events and in logs. It may be empty, and
	// cannot change.
	Name string

	// Lease is how long a saga remains this runner's without a heartbeat. The runner
	// sends three heartbeats in that time. When a process crashes, other runners take
	// over its sagas after their leases. Zero means 15 seconds; at least 10
	// milliseconds.
	Lease time.Duration
	// Poll is how often the runner asks the store for due sagas, and how often Result
	// looks whether another process has ended its saga. Zero means 1 second.
	Poll time.Duration
	// Concurrency is how many sagas the runner holds at most. Zero means 64.
	Concurrency int
	// Park is the longest wait for which the runner holds a saga whose steps all wait
	// for their next attempt. A saga with a longer wait is written back and becomes due
	// when it is over. Zero means 5 seconds.
	Park time.Duration
	// Drain is how long running attempts may continue after the ctx of Run has ended.
	// Then their ctx ends too, and the runner no longer extends leases. Zero means 10
	// seconds, negative means no time at all.
	Drain time.Duration
	// MaxTakeovers is how often a saga may be taken over from crashed owners, without a
	// Do or an Undo that succeeds in between, before it is stuck. It stops a saga that kills
	// one process after the other. Zero means 10, negative means no limit.
	MaxTakeovers int

	// OnEvent is called after each entry in the log of a saga, by the runner that wrote
	// it, except for the EventCreated of a StartTx, and after each attempt that failed and will be repeated (EventRetry).
	// [Runner.Observe] has more kinds of events.
	OnEvent func(context.Context, Event)

	// FailingAfter is how long a saga may make no progress, while its attempts fail,
	// are refused or do not end, before OnFailing is called. OnFailing is called again
	// each time that the time without progress has doubled. Zero means 10 minutes,
	// negative means never.
	FailingAfter time.Duration
	// OnFailing is called for a saga that makes no progress: a step after the pivot
	// that never works, an Undo that is always refused, an attempt that ignores its
	// ctx. Nil means a warning by slog's default logger.
	OnFailing func(context.Context, FailingSaga)

	// OnStuck is called at least once for each saga that becomes stuck and needs an
	// operator. If the process dies before OnStuck returns, another runner calls it a
	// few leases later. Nil means a warning by slog's default logger.
	OnStuck func(context.Context, StuckSaga)
	// OnUnregistered is called every few leases for due sagas whose definition is not
	// registered with this runner. Nil means a warning by slog's default logger.
	OnUnregistered func(context.Context, Unregistered)
	// OnStoreError is called when the store fails. The runner tries again. Nil means a
	// warning by slog's default logger, at most one each second.
	OnStoreError func(context.Context, error)
}

// A StuckSaga is a saga that has become stuck, with everything that an operator needs
// to mend it.
type StuckSaga struct {
	Runner   string // the runner's Name
	Instance        // with the Actions that the operator may take
}

// A FailingSaga is a saga that makes no progress. The Error of its Steps says why, and
// Since for how long.
type FailingSaga struct {
	Runner string // the runner's Name
	Instance
}

// Validate returns an error that lists everything that is wrong with the
// configuration, or nil.
func (c RunnerConfig) Validate() error {
	f := invalid.Fields{Type: "saga.RunnerConfig"}
	f.Need(c.Lease == 0 || c.Lease >= 10*time.Millisecond, "Lease", c.Lease, "0 (for 15s), or 10ms or more")
	f.Need(c.Poll >= 0, "Poll", c.Poll, "0 (for 1s) or more")
	f.Need(c.Concurrency >= 0, "Concurrency", c.Concurrency, "0 (for 64) or more")
	f.Need(c.Park >= 0, "Park", c.Park, "0 (for 5s) or more")
	return f.Err()
}

func (c RunnerConfig) withDefaults() RunnerConfig {
	c.Lease = cmp.Or(c.Lease, 15*time.Second)
	c.Poll = cmp.Or(c.Poll, time.Second)
	c.Concurrency = cmp.Or(c.Concurrency, 64)
	c.Park = cmp.Or(c.Park, 5*time.Second)
	c.Drain = cmp.Or(c.Drain, 10*time.Second)
	c.MaxTakeovers = cmp.Or(c.MaxTakeovers, 10)
	c.FailingAfter = cmp.Or(c.FailingAfter, 10*time.Minute)
	return c
}

// Name returns the Name of the RunnerConfig.
func (r *Runner) Name() string { return r.config().Name }

// Config returns the present configuration, with its defaults.
func (r *Runner) Config() RunnerConfig { return *r.config() }

func (r *Runner) config() *RunnerConfig { return r.cfg.Load() }

// Update changes the configuration of a runner, which may be running. change is called
// with the present configuration, and must not call the runner. If the result is invalid,
// Update returns the error of [RunnerConfig.Validate] and nothing changes. Concurrent
// Updates are made one after the other.
//
//   - Nothing that the runner does is interrupted. It keeps its sagas, their attempts, its
//     figures and its observers.
//   - Lease holds for sagas that are claimed from now on, and for each held saga from its
//     next heartbeat, which the runner sends immediately. Until then a saga keeps the lease
//     that it has.
//   - With a higher Concurrency the runner claims more sagas immediately. With a lower one
//     it keeps the sagas that it holds, and claims none while they are too many.
//   - Poll, Park, MaxTakeovers, FailingAfter and the hooks hold from now on, for held sagas
//     too. Drain holds for the next stop.
//   - Name cannot change, since it is part of the name by which the runner owns its sagas.
//     The Store is not part of the configuration and cannot change either.
func (r *Runner) Update(change func(*RunnerConfig)) error {
	r.updating.Lock()
	defer r.updating.Unlock()
	was := r.config()
	next := settings.Change(r.given, *was, change)
	if next.Name != was.Name {
		return fmt.Errorf("saga.RunnerConfig.Name is %q: must be %q, since it cannot change", next.Name, was.Name)
	}
	if err := next.Validate(); err != nil {
		return err
	}
	filled := next.withDefaults()
	r.given = next
	r.cfg.Store(&filled)
	if filled.Lease != was.Lease {
		r.beatNow()
	}
	r.Wake() // with the new Concurrency, and then after the new Poll
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, e := range r.held {
		e.nudge() // to look at the new FailingAfter and Park
	}
	return nil
}
