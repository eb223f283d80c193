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
// # What most programs need
//
// A [Saga] with a Name and Steps, and of a [Step] the Name, Do, Undo and Pivot. If the work may
// die with the process: [Run]. If it may not: [NewRunner] with a store, [Register],
// [Runner.Run], [Start] and [Saga.Result], and in each participant [Apply], which makes a
// command that comes twice take effect once. RunnerConfig.OnEvent tells when a saga is stuck,
// and [Runner.Operate] mends it. Everything else may be left until there is a need for it.
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
// # Steps in doubt
//
// Consider a step whose reply is lost, or whose process dies after the effect and
// before the record. The step has started, has no result, and may have taken effect:
// it is in doubt. It runs again with the same command id (see [CommandFrom]). If the
// saga turns back, it is undone as a done step is. A Do that fails is in doubt too,
// unless its error is a [Void], which says that no attempt took effect or ever will.
//
// Two things follow. Undo must work for a Do that never took effect. A participant
// must apply each command id once: [Apply] does so in a participant's own database,
// and sagatest.Check tests it.
//
// # The pivot
//
// A pivot is what cannot well be undone: to charge a card, to send a letter. Without an
// Undo it cannot be left in doubt: it is tried until its answer is known. So a participant
// that declines must do it by a [Void], since a lost reply may have come before:
//
//	func chargeCard(ctx context.Context, t *Trip) error {
//		err := bank.Charge(ctx, saga.CommandFrom(ctx).ID, t.Price)
//		if errors.Is(err, bank.ErrDeclined) {
//			return saga.Void(err) // the bank keeps its answer under the id
//		}
//		return err
//	}
//
// After a lost reply an [Abort] leaves open whether the card was charged, and the saga is
// stuck. If the participant keeps no answers, give the pivot an Undo, such as a refund:
// then the saga turns back after Attempts, at its Timeout and by Cancel, also if it does not
// know whether the pivot took effect. That is the price: it gives orders up that it would
// only have had to ask about once more.
//
// # Refusals
//
// An error with Refused() true means that a policy of this module (an open breaker, a
// full bulkhead, a limiter) did not make the call. Such an attempt was not made. The
// step is not in doubt, and the refusal does not count against Attempts or
// UndoAttempts. The step is tried again after RetryAfter, and at least the backoff,
// until Saga.Timeout or Cancel turns the saga back. An Undo is tried until it is made. The
// log has one entry for several refusals in a row.
//
// If the process crashes while it holds the saga, a refused step is in doubt like any
// other started step. If a Do calls several participants and a policy refuses a later
// call, return that error as [InDoubt].
//
// # Turning back
//
// The record "compensating" is committed before the first Undo. After it, no Do
// starts again. The end of the caller's ctx never reaches an Undo, which runs on a detached
// ctx with a timeout of its own.
//
// # Waiting
//
// A step can wait for a time (Step.Delay), for something outside (Step.Await and
// [Runner.Signal]: a payment, an approval) and for sagas of its own (Step.Saga with
// [ChildOf] and [ChildrenOf]). A saga that only waits is written back. It holds no place in
// a runner, and nothing of it is in doubt, except a step whose children have been started.
//
//	{Name: "invoice", Do: sendInvoice, Undo: payBackIfPaid},
//	{Name: "payment", Await: "paid", AwaitFor: 72 * time.Hour},
//	{Name: "parcels", Saga: saga.ChildrenOf(parcel, parcelsOf, nil), Delay: time.Hour},
//
// # State
//
// The changes that Do makes to the state are recorded when it returns, with or without
// an error. They are lost if the process dies before, so Undo must not depend on them:
// derive what Undo needs from the command id. Parallel steps must write to different
// fields. Under a Runner, each parallel step works on a copy, and its changes are
// merged when it returns: structs by field, maps by entry, anything else as a whole. An
// attempt that changed what another step has changed in the meantime has failed in doubt,
// and the step is tried again within its Attempts.
//
// # Versions
//
// Increase Version when the steps of a definition change. Keep the old version
// registered while there are sagas of it. A runner leaves versions that it does not
// know alone, and reports them.
//
// Patterns: Compensating Transaction, Scheduler Agent Supervisor and, for its
// leases, Leader Election, in Cloud Design Patterns
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
	Name    string    // 1 to 100 bytes
	Version int       // 0 or more; see the package comment
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
	// Await. Do may be called again, with the same command id, after it took
	// effect. Its ctx begins an operation of its own, in which each call of Do is one
	// attempt: a retrier inside does not multiply the saga's attempts (see Middleware).
	Do func(ctx context.Context, s *S) error
	// Undo undoes Do. It may be called several times, and for a Do that never took
	// effect, even for one that arrives later. It may be nil in a step that is ReadOnly, only
	// waits or has a Saga, and in the pivot and the steps after it.
	Undo func(ctx context.Context, s *S) error

	// DoTx is a Do in a transaction of the store's database. The transaction also
	// writes the saga's log, so DoTx applies exactly once. An error rolls back the
	// transaction and the changes to s. DoTx must neither commit tx nor roll it back. A
	// Runner runs one DoTx or UndoTx of a saga at a time. Parallel steps that became ready
	// together with it run beside it, and other steps of that saga start when it has
	// ended. On SQLite each may take at most half of RunnerConfig.LeaseTTL.
	DoTx func(ctx context.Context, tx *sql.Tx, s *S) error
	// UndoTx is an Undo in such a transaction.
	UndoTx func(ctx context.Context, tx *sql.Tx, s *S) error

	// Parallel makes the step run beside the one before it in Steps, and beside those that
	// this one runs beside: a group, which the next step without Parallel waits for. If a
	// step of a group fails for good, the ctx of the others ends, and when they have
	// returned all are undone, at the same time. Not the first step, and neither the pivot
	// nor a step with an Await can be in a group.
	Parallel bool

	// Delay is how long the step waits before it begins, from the time at which the steps
	// before it are done. Zero means no wait. A step with a Delay or an Await
	// may have no Do: it is done when the wait is over. The saga keeps no place in a runner
	// during a wait that is longer than a third of RunnerConfig.LeaseTTL.
	Delay time.Duration
	// Await is the name of a signal for which the step waits before it begins, after its
	// Delay. See [Runner.Signal] and [SignalFrom]. Empty means none; at most 100 bytes.
	Await string
	// AwaitFor is how long the step waits for its signal. Then it fails without effect,
	// with [ErrNoSignal]. Zero means no limit.
	AwaitFor time.Duration

	// Saga makes the step consist of one or more sagas of their own, instead of a Do: see
	// [ChildOf]. The step has no Undo, since its children have.
	Saga *Child[S]

	// ReadOnly says that Do changes nothing. The step is never undone and never in
	// doubt. Undo and UndoTx must be nil.
	ReadOnly bool

	// Pivot marks the step after which the saga no longer turns back: the remaining
	// steps are tried until they work. An Abort or a Void of one of them makes the saga
	// stuck. (If the saga can do without such a step, let its Do return nil when
	// [CommandFrom] says that this is the last attempt that you want.) At most one step is
	// the pivot.
	//
	// A pivot without Undo that is in doubt is tried until its answer is known, whatever
	// Attempts and Saga.Timeout say. The answer is nil or a [Void]; an Abort makes the saga
	// stuck. See "The pivot" in the package comment.
	Pivot bool

	// Timeout bounds each attempt of Do and Undo through its ctx. Zero means 1 minute.
	// Under Run, zero means no timeout for a Do before the pivot is done: it has the
	// caller's ctx.
	Timeout time.Duration
	// Attempts is how often Do is called at most. Zero means 3, negative means no
	// limit. With the default Backoff, 3 failures that return immediately are over in a
	// fraction of a second: to outlast a participant that is down, set -1 and a
	// Saga.Timeout. Once the pivot is done, there is no limit. Refused attempts do not count.
	Attempts int
	// UndoAttempts is how often Undo is called before the saga is stuck. Zero means
	// 20, negative means no limit. Refused attempts do not count.
	UndoAttempts int
	// Backoff returns the wait after failed attempt 1, 2 and so on of Do or Undo.
	// Refusals since the last attempt count as attempts here. Nil means
	// Exponential(100*time.Millisecond, time.Minute). The wait is longer if the error
	// has a RetryAfter() that is longer, of which at most an hour counts.
	Backoff func(attempt int) time.Duration

	// Middleware wraps each attempt of Do and of Undo: the Wrap of a Breaker, Bulkhead or
	// Limiter, or a Chain. It must be nil with DoTx and with UndoTx. To guard one of
	// the two alone, call the policy in it.
	//
	// The saga retries the step, so a Retrier here, or in Do or Undo, makes one attempt for
	// each attempt of the saga. With Attempts (UndoAttempts) 1 it retries by its own rules.
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
