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
// The runner, or the caller of its method or of Start, waits for each call of a hook. There may
// be several at the same time. A panic of a hook passes on to the caller on whose goroutine it runs,
// as in Start; on a goroutine of the runner it is printed by package log with its stack, and does
// not end the saga.
type RunnerConfig struct {
	// Name appears in the names of owners, in logs, in a registry and in metrics. It is the
	// same in all processes of a program: their owners differ all the same. It may be empty
	// outside of a registry, has up to 100 bytes, and cannot change.
	Name string

	// LeaseTTL is how long a saga remains this runner's without a heartbeat. The runner
	// sends three heartbeats in that time. When a process crashes, other runners take
	// over its sagas after that time. A saga that waits longer than a third of it, for a next
	// attempt, a Delay or the end of an AwaitFor, or without a limit for a signal or a child, is
	// written back meanwhile. Zero means 15 seconds; at least 10 milliseconds.
	LeaseTTL time.Duration
	// Poll is how often the runner asks the store for due sagas, and how often Result
	// looks whether another process has ended its saga. Zero means 1 second.
	Poll time.Duration
	// Concurrency is how many sagas the runner holds at most. Zero means 64.
	Concurrency int
	// Drain is how long running attempts may continue after the ctx of Run has ended.
	// Then their ctx ends too, and the runner sends no more heartbeats. Zero means 10
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

	// OnEvent is called for each [Event] of the runner. Nil means that slog's default logger
	// warns of EventStuck and EventStalled and, once a second at most, of EventStoreFailed.
	// [Runner.Observe] adds observers beside it.
	OnEvent func(context.Context, Event)
}

// Validate returns an error that lists everything that is wrong with the
// configuration, or nil.
func (c RunnerConfig) Validate() error {
	f := invalid.Fields{Type: "saga.RunnerConfig"}
	f.Need(c.Name == "" || validName(c.Name), "Name", quoted(c.Name, maxName),
		fmt.Sprintf(`"", or up to %d bytes of UTF-8 without NUL`, maxName))
	f.Need(c.LeaseTTL == 0 || c.LeaseTTL >= 10*time.Millisecond, "LeaseTTL", c.LeaseTTL, "0 (for 15s), or 10ms or more")
	f.Need(c.Poll >= 0, "Poll", c.Poll, "0 (for 1s) or more")
	f.Need(c.Concurrency >= 0, "Concurrency", c.Concurrency, "0 (for 64) or more")
	f.Need(c.Keep.Completed >= 0, "Keep.Completed", c.Keep.Completed, "0 (forever) or more")
	f.Need(c.Keep.Compensated >= 0, "Keep.Compensated", c.Keep.Compensated, "0 (forever) or more")
	f.Need(c.Keep.Abandoned >= 0, "Keep.Abandoned", c.Keep.Abandoned, "0 (forever) or more")
	return f.Err()
}

func (c RunnerConfig) withDefaults() RunnerConfig {
	c.LeaseTTL = cmp.Or(c.LeaseTTL, 15*time.Second)
	c.Poll = cmp.Or(c.Poll, time.Second)
	c.Concurrency = cmp.Or(c.Concurrency, 64)
	c.Drain = cmp.Or(c.Drain, 10*time.Second)
	c.MaxTakeovers = cmp.Or(c.MaxTakeovers, 10)
	return c
}

// Keep says how long sagas that have ended stay in the store. Zero means forever.
//
// When a saga is deleted, its log and its signals go with it, Result and Get no longer
// find it, and a Start with its id runs it again. A time must therefore be longer than the
// time in which a Start may be repeated.
//
// The children of a saga that have ended are deleted just before it, whatever their status
// is, and never sooner. A child that has not ended, because its parent was abandoned, is kept
// as a saga of its own.
type Keep struct {
	Completed   time.Duration
	Compensated time.Duration
	Abandoned   time.Duration
}
