// Package saga runs a series of steps, each with the work that undoes it, so that
// the whole ends either completed or compensated, whatever crashes. A saga that can do
// neither becomes stuck and is reported.
//
//	trip := &saga.Saga[Trip]{
//		Name: "trip", Version: 1,
//		Steps: []saga.Step[Trip]{
//			{Name: "flight", Do: bookFlight, Undo: cancelFlight},
//			{Name: "hotel", Do: bookHotel, Undo: cancelHotel},
//			{Name: "charge", Do: chargeCard, Pivot: true},
//			{Name: "tickets", Do: sendTickets},
//		},
//	}
//	err := saga.Run(ctx, trip, &Trip{From: "LIS"}) // in memory, nothing durable
//
// A [Runner] runs the same definition durably: the progress of each saga is a row in
// the user's own database (package sqlstore) or in memory ([NewMemory]). There is no
// server, no broker and no deterministic replay.
//
//	runner := saga.NewRunner(store, saga.RunnerConfig{})
//	saga.Register(runner, trip)
//	go func() { slog.Info("sagas end", "err", runner.Run(ctx)) }()
//	_, err := saga.Start(ctx, runner, trip, "trip-17", Trip{From: "LIS"})
//	done, err := trip.Result(ctx, runner, "trip-17")
//
// Most programs need a [Saga] with Steps, each with a Name, Do and Undo, one of them perhaps the
// Pivot; [Run], or [NewRunner], [Register], [Runner.Run], [Start] and [Saga.Result]; and [Apply] in
// each participant. RunnerConfig.OnEvent tells when a saga is stuck, and [Runner.Operate] mends it.
//
// # The guarantee
//
//   - Each Do and Undo is called at least once, with a stable command id. With a
//     participant that applies an id once, its effect is applied once.
//   - DoTx and UndoTx apply exactly once.
//   - Once "compensating" is recorded, no owner starts a Do that is to be undone, and
//     [Apply] declines a late one.
//   - While the database and one process with the definition live, every saga ends
//     completed, compensated or visibly stuck.
//   - There is no isolation between sagas.
//
// A step whose reply is lost is in doubt: it may have taken effect, it runs again with the same
// command id, and it is undone if the saga turns back. So Undo must work for a Do that never took
// effect, and a participant must apply each command id once: sagatest.Check tests both. The page
// docs/saga.md says more: of doubt, pivots, refusals, waits, the state, and new versions.
//
// Patterns: Compensating Transaction, Scheduler Agent Supervisor and, for its
// holds, Leader Election, in Cloud Design Patterns
// (https://learn.microsoft.com/azure/architecture/patterns/compensating-transaction).
// The name is from Garcia-Molina and Salem, Sagas, 1987.
package saga

import (
	"context"
	"database/sql"
	"math/rand/v2"
	"sync/atomic"
	"time"
)

// A Saga is a definition: a plain value that Validate checks, and that does not change
// once it is in use. S is the state that its steps share.
type Saga[S any] struct {
	Name string // 1 to 100 bytes
	// Version is 0 or more. Increase it when the steps change, and keep the old version registered
	// while there are sagas of it.
	Version int
	Steps   []Step[S] // 1 to 1000; for more, see ChildrenOf

	// Timeout is how long the saga may take, from its start, until its pivot is done,
	// or its last step if it has no pivot. Then it turns back. Zero means no deadline.
	Timeout time.Duration
	// Codec encodes the state. Nil means JSON, which must keep every field of S. Run
	// does not use it.
	Codec Codec[S]

	cached atomic.Value // of cachedProgram[S]
}

// A Step is one part of a saga: a command to a participant, and its undoing.
type Step[S any] struct {
	Name string // 1 to 100 bytes without "/"; unique in the saga

	// Do does the step. Exactly one of Do, DoTx and Saga is set, or none with a Delay or an
	// Await. Do may be called again, with the same command id, after it took effect. Each call is an
	// attempt of an operation of its own: a retrier inside does not multiply them (see Middleware).
	Do func(ctx context.Context, s *S) error
	// Undo undoes Do. It may be called several times, and for a Do that never took effect, even for
	// one that arrives later. Its ctx does not end with the caller's. It may be nil in a step that is
	// ReadOnly, only waits or has a Saga, and in the pivot and the steps after it.
	Undo func(ctx context.Context, s *S) error

	// DoTx is a Do in a transaction of the store's database, which also writes the saga's log, so
	// that it applies exactly once. An error rolls back the transaction and the changes to s. DoTx
	// must not end tx. One DoTx or UndoTx of a saga runs at a time. Other steps of its group begin before
	// it or together with it; then no attempt of that saga begins until it has ended, not even a
	// further one of those. On SQLite each may take at most half of RunnerConfig.LeaseTTL.
	DoTx func(ctx context.Context, tx *sql.Tx, s *S) error
	// UndoTx is an Undo in such a transaction.
	UndoTx func(ctx context.Context, tx *sql.Tx, s *S) error

	// Parallel makes the step run beside the one before it, and beside those that this one runs
	// beside: a group, which the next step without Parallel waits for. If one of a group fails for
	// good, the ctx of the others ends, and then all are undone, at the same time. Neither the pivot nor
	// a step with an Await can be in a group. The first step is not Parallel, as none is before it.
	Parallel bool

	// Delay is how long the step waits before it begins. A step with a Delay or an Await may have no
	// Do. A saga that waits for longer than a third of RunnerConfig.LeaseTTL is written back meanwhile.
	Delay time.Duration
	// Await is the name of a signal for which the step waits after its Delay: see [Runner.Signal] and
	// [SignalFrom]. Empty means none; at most 100 bytes.
	Await string
	// AwaitFor is how long the step waits for its signal. Then it fails without effect,
	// with [ErrNoSignal]. Zero means no limit.
	AwaitFor time.Duration

	// Saga makes the step consist of sagas of their own: see [ChildOf]. The step has no Undo, since
	// its children have.
	Saga *Child[S]

	// ReadOnly says that Do changes nothing: the step is never undone and never in doubt.
	ReadOnly bool

	// Pivot marks the step after which the saga no longer turns back: the rest is tried until it
	// works, and an Abort or a Void of a step after it makes the saga stuck. At most one step is the
	// pivot. One without Undo that is in doubt is tried until its answer is known, whatever Attempts
	// and Saga.Timeout say: nil, or a [Void]. An [Abort] leaves it open, and the saga is stuck.
	Pivot bool

	// Timeout bounds each attempt of Do and Undo through its ctx. Zero means 1 minute; under Run, no
	// timeout for a Do before the pivot is done.
	Timeout time.Duration
	// Attempts is how often Do is called at most. Zero means 3, negative means no limit, as there is
	// none once the pivot is done. Refused attempts do not count. With the default Backoff 3 failures
	// are over in a fraction of a second: for a participant that is down set -1 and a Saga.Timeout.
	Attempts int
	// UndoAttempts is how often Undo is called before the saga is stuck. Zero means
	// 20, negative means no limit. Refused attempts do not count.
	UndoAttempts int
	// Backoff returns the wait after failed or refused attempt 1, 2 and so on of Do or Undo. Nil means
	// Exponential(100*time.Millisecond, time.Minute). The wait is longer if the error
	// has a RetryAfter() that is longer, of which at most an hour counts.
	Backoff func(attempt int) time.Duration

	// Middleware wraps each attempt of Do and of Undo: the Wrap of a Breaker, Bulkhead or
	// Limiter, or a Chain. It must be nil with DoTx and with UndoTx. A Retrier here makes one attempt
	// for each attempt of the saga; with Attempts (UndoAttempts) 1 it retries by its own rules.
	Middleware func(next func(context.Context) error) func(context.Context) error
}

var defaultBackoff = Exponential(100*time.Millisecond, time.Minute)

// Exponential returns a Step.Backoff with full jitter: each wait is a random time between
// zero and a limit. The limit is first after the first attempt, doubles with each further
// attempt, and is at most longest. If one of them is zero or negative there is no wait.
//
// The limit depends on the number of the attempt alone, so that a process that takes a
// saga over continues with it.
func Exponential(first, longest time.Duration) func(attempt int) time.Duration {
	return func(attempt int) time.Duration {
		if first <= 0 || longest <= 0 {
			return 0
		}
		d := longest
		if n := max(attempt, 1) - 1; first <= longest>>n {
			d = first << n
		}
		return rand.N(d) + 1
	}
}
