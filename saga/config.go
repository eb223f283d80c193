package saga

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/go-resilience/resilience/internal/invalid"
)

// RunnerConfig configures a [Runner]. The zero RunnerConfig is usable.
//
// Each call of a hook has a goroutine of its own, for which the runner, or the caller of its
// method or of Start, waits. There may be several at the same time. A panic and a
// runtime.Goexit in a hook are logged by slog's default logger; a panic in Inject is the
// error of Start.
type RunnerConfig struct {
	// Name appears in the names of owners, in events and in logs. It may be empty, has up
	// to 100 bytes, and cannot change.
	Name string

	// LeaseTTL is how long a saga remains this runner's without a heartbeat. The runner
	// sends three heartbeats in that time. When a process crashes, other runners take
	// over its sagas after their leases. Zero means 15 seconds; at least 10
	// milliseconds.
	LeaseTTL time.Duration
	// Poll is how often the runner asks the store for due sagas, and how often Result
	// looks whether another process has ended its saga. Zero means 1 second.
	Poll time.Duration
	// Concurrency is how many sagas the runner holds at most. Zero means 64.
	Concurrency int
	// Park is the longest wait, for a next attempt, a Delay or the end of an AwaitFor, for
	// which the runner holds a saga that only waits. A saga with a longer wait, or one that
	// waits without a limit for a signal or a child, is written back. Zero means 5 seconds.
	Park time.Duration
	// Drain is how long running attempts may continue after the ctx of Run has ended.
	// Then their ctx ends too, and the runner no longer extends leases. Zero means 10
	// seconds, negative means no time at all.
	Drain time.Duration
	// MaxTakeovers is how often a saga may be taken over from crashed owners, without a
	// Do or an Undo that succeeds in between, before it is stuck. It stops a saga that kills
	// one process after the other. Zero means 10, negative means no limit.
	MaxTakeovers int

	// Inject returns what a saga carries to its steps from the ctx of its Start or
	// StartTx, such as a trace context as text. It is stored with the saga and written
	// again with each commit, so keep it short: a text of more than 4 KiB, and one that is
	// not UTF-8, is not carried. Nil means nothing.
	Inject func(context.Context) string
	// Extract returns ctx with what a saga carries, for the Do, DoTx, Undo and UndoTx of
	// its steps and for the hooks, in whichever process they run. The result must be ctx
	// or derived from it. Extract is called when a runner begins to hold the saga, unless
	// it carries nothing. Nil means ctx as it is.
	Extract func(ctx context.Context, carried string) context.Context

	// Keep says how long sagas that have ended stay in the store. Runners delete them
	// later, in small batches. The zero Keep keeps all.
	Keep Keep

	// OnEvent is called after each entry in the log of a saga, by the runner that wrote
	// it, except for the EventCreated of a StartTx, and after each attempt that failed and
	// will be repeated (EventAttemptFailed).
	// [Runner.Observe] has more kinds of events.
	OnEvent func(context.Context, Event)

	// StalledAfter is how long a saga may make no progress, while its attempts fail,
	// are refused or do not end, before OnStalled is called. OnStalled is called again
	// each time that the time without progress has doubled. Zero means 10 minutes,
	// negative means never.
	StalledAfter time.Duration
	// DueAfter is how long a saga may be due, while no runner takes it, before the Health of
	// a registry says that sagas are overdue. Zero means 1 minute, negative means never.
	DueAfter time.Duration
	// OnStalled is called for a saga that makes no progress: a step after the pivot
	// that never works, an Undo that is always refused, an attempt that ignores its
	// ctx. Nil means a warning by slog's default logger.
	OnStalled func(context.Context, StalledSaga)

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

// A StalledSaga is a saga that makes no progress. The Error of its Steps says why, and
// Since for how long.
type StalledSaga struct {
	Runner string // the runner's Name
	Instance
}

// Validate returns an error that lists everything that is wrong with the
// configuration, or nil.
func (c RunnerConfig) Validate() error {
	f := invalid.Fields{Type: "saga.RunnerConfig"}
	f.Need(c.Name == "" || validName(c.Name), "Name", quoted(c.Name), fmt.Sprintf(`"", or up to %d bytes of UTF-8 without NUL`, maxName))
	f.Need(c.LeaseTTL == 0 || c.LeaseTTL >= 10*time.Millisecond, "LeaseTTL", c.LeaseTTL, "0 (for 15s), or 10ms or more")
	f.Need(c.Poll >= 0, "Poll", c.Poll, "0 (for 1s) or more")
	f.Need(c.Concurrency >= 0, "Concurrency", c.Concurrency, "0 (for 64) or more")
	f.Need(c.Park >= 0, "Park", c.Park, "0 (for 5s) or more")
	for _, k := range []struct {
		name string
		time.Duration
	}{{"Completed", c.Keep.Completed}, {"Compensated", c.Keep.Compensated}, {"Abandoned", c.Keep.Abandoned}} {
		f.Need(k.Duration >= 0, "Keep."+k.name, k.Duration, "0 (for ever) or more")
	}
	return f.Err()
}

func (c RunnerConfig) withDefaults() RunnerConfig {
	c.LeaseTTL = cmp.Or(c.LeaseTTL, 15*time.Second)
	c.Poll = cmp.Or(c.Poll, time.Second)
	c.Concurrency = cmp.Or(c.Concurrency, 64)
	c.Park = cmp.Or(c.Park, 5*time.Second)
	c.Drain = cmp.Or(c.Drain, 10*time.Second)
	c.MaxTakeovers = cmp.Or(c.MaxTakeovers, 10)
	c.StalledAfter = cmp.Or(c.StalledAfter, 10*time.Minute)
	c.DueAfter = cmp.Or(c.DueAfter, time.Minute)
	return c
}

// Name returns the Name of the RunnerConfig.
func (r *Runner) Name() string { return r.config().Name }

// Config returns the present configuration, with its defaults.
func (r *Runner) Config() RunnerConfig { return r.setting.Config() }

func (r *Runner) config() *RunnerConfig { return r.setting.Load() }

// Update changes the configuration of a runner, which may be running. change is called
// with the present configuration, and must not call the runner. If the result is invalid,
// Update returns the error of [RunnerConfig.Validate] and nothing changes. Concurrent
// Updates are made one after the other.
//
//   - Nothing that the runner does is interrupted. It keeps its sagas, their attempts, its
//     figures and its observers.
//   - LeaseTTL holds for sagas that are claimed from now on, and for each held saga from its
//     next heartbeat, which the runner sends immediately. Until then a saga keeps the lease
//     that it has.
//   - With a higher Concurrency the runner claims more sagas immediately. With a lower one
//     it keeps the sagas that it holds, and claims none while they are too many.
//   - Inject and Extract hold for sagas that are started, and claimed, from now on.
//   - Poll, Park, MaxTakeovers, StalledAfter, DueAfter, Keep and the On hooks hold from now on, for held sagas
//     too. Drain holds for the next stop.
//   - Name cannot change, since it is part of the name by which the runner owns its sagas.
//     The Store is not part of the configuration and cannot change either.
func (r *Runner) Update(change func(*RunnerConfig)) error {
	return r.setting.Update(change, nil, func(*RunnerConfig) {
		r.beatNow() // with the new LeaseTTL
		r.Wake()    // with the new Concurrency, and then after the new Poll
		r.mu.Lock()
		defer r.mu.Unlock()
		for _, e := range r.held {
			e.nudge() // to look at the new StalledAfter and Park
		}
	})
}

// Preview returns what Config would return after the Update, or the error of Update, and
// changes nothing.
func (r *Runner) Preview(change func(*RunnerConfig)) (RunnerConfig, error) {
	return r.setting.Preview(change)
}
