// Package saga runs a series of steps, each with the work that undoes it. Whatever crashes, a saga ends
// completed or compensated, or it is stuck, visibly.
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
// A [Runner] runs it durably: each saga is a row in the user's own database (package sqlstore). There is
// no server, no broker and no deterministic replay.
//
//	runner := saga.NewRunner(store, saga.RunnerConfig{})
//	saga.Register(runner, trip)
//	go func() { slog.Info("sagas end", "err", runner.Run(ctx)) }()
//	_, err := saga.Start(ctx, runner, trip, "trip-17", Trip{From: "LIS"})
//	done, err := trip.Result(ctx, runner, "trip-17")
//
// # The guarantee
//
//   - Each Do and Undo is called at least once, with a stable command id; DoTx and UndoTx apply
//     exactly once.
//   - Once a saga has turned back, no owner starts a Do that is to be undone.
//   - While the database and one process with the definition live, every saga ends or is visibly stuck:
//     OnEvent tells, and [Runner.Operate] mends it.
//   - There is no isolation between sagas.
//
// A step whose reply is lost is in doubt: it runs again with the same command id, and is undone if the saga
// turns back. So Undo must work for a Do that never took effect, and a participant must apply each command
// id once, as [Apply] does; sagatest.Check tests both. More is in docs/saga.md.
//
// Sources: Compensating Transaction, Scheduler Agent Supervisor (Cloud Design Patterns); Garcia-Molina and Salem,
// Sagas, SIGMOD 1987.
package saga

import (
	"context"
	"database/sql"
	"math/rand/v2"
	"sync/atomic"
	"time"
)

const (
	Unlimited = -1       // means no limit, in a field that accepts Unlimited
	None      = -1 << 31 // means no time, in a field that accepts None
)

// A Saga is a definition, which does not change once it is in use. S is the state that its steps share.
type Saga[S any] struct {
	Name string // 1 to 100 bytes
	// Version increases when the steps change, or which run in parallel. Keep the old one registered while there
	// are sagas of it.
	Version int
	Steps   []Step[S] // 1 to 1000; for more, see ChildrenOf

	// Timeout is how long the pivot, or without one the last step, may take to be done before the saga turns
	// back. Zero means no limit.
	Timeout time.Duration
	// Codec encodes the state. Nil means JSON.
	Codec Codec[S]
	// Tenant returns on whose behalf a saga with the state runs, or "": up to 100 bytes of UTF-8 without NUL. It is
	// called when the saga starts, and stored with it. Nil means none.
	Tenant func(s S) string

	cached atomic.Value // of cachedProgram[S]
}

// A Step is a command to a participant, and its undoing.
type Step[S any] struct {
	Name string // 1 to 100 bytes without "/"; unique in the saga

	// Do does the step, perhaps again after it took effect, with the same command id. One of Do, DoTx and Saga
	// is set, or none with a Delay or an Await.
	Do func(ctx context.Context, s *S) error
	// Undo undoes Do, perhaps several times, also a Do that never took effect or arrives later. It may be nil
	// from the pivot on, and with ReadOnly or Saga.
	Undo func(ctx context.Context, s *S) error

	// DoTx is a Do in a transaction of the store's database that also records the step: it applies exactly
	// once. An error rolls back, also the changes to s. Whatever the default of a PostgreSQL or MySQL is, tx is
	// READ COMMITTED: lock the rows that a decision rests on. DoTx must not end tx, and delays other steps of the
	// saga. On SQLite it has a third of LeaseTTL.
	DoTx func(ctx context.Context, tx *sql.Tx, s *S) error
	// UndoTx is an Undo in such a transaction.
	UndoTx func(ctx context.Context, tx *sql.Tx, s *S) error

	// Parallel makes the step run beside the one before it. If one of them fails for good, the ctx of the
	// others ends, and all are undone together. A pivot and a step with an Await run beside no other, and the
	// first step beside none.
	Parallel bool

	// Delay is how long the step waits before it begins, and Await the signal, of up to 100 bytes, that it
	// waits for after that: see [Runner.Signal].
	Delay time.Duration
	Await string
	// AwaitFor bounds that wait, which then fails with [ErrNoSignal] and without effect. Zero means no limit.
	AwaitFor time.Duration

	// Saga makes the step one of sagas: see [ChildOf].
	Child *Child[S]

	// ReadOnly says that Do changes nothing, so that it is never undone nor in doubt.
	ReadOnly bool

	// Pivot marks the one step after which the saga no longer turns back: the rest is tried until it works, or
	// a [Permanent] or [Declined] error makes the saga stuck. A pivot in doubt without Undo is tried until it returns nil or a
	// Declined error, whatever Attempts and Saga.Timeout say; a Permanent error makes the saga stuck.
	Pivot bool

	// Timeout bounds each attempt. Zero means 1 minute; under Run, no limit for a Do up to the pivot.
	Timeout time.Duration
	// Attempts is how often Do is called at most, refusals aside. Zero means 3, negative no limit, as past
	// the pivot.
	Attempts int
	// UndoAttempts is how often Undo is called, refusals aside, before the saga is stuck. Zero means 20,
	// negative no limit.
	UndoAttempts int
	// Backoff returns the wait after attempt 1, 2 and so on, unless the error has a longer RetryAfter(), of
	// up to an hour. Nil means Exponential(100*time.Millisecond, time.Minute).
	Backoff func(attempt int) time.Duration

	// Middleware wraps each attempt of Do and Undo, such as the Wrap of a Breaker; not of DoTx and UndoTx. A
	// Retrier in it retries only where the step has one attempt.
	Middleware func(next func(context.Context) error) func(context.Context) error
}

var defaultBackoff = Exponential(100*time.Millisecond, time.Minute)

// Exponential returns a Step.Backoff whose wait is random, up to first after the first attempt, twice that after
// the next, and so on up to longest.
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
