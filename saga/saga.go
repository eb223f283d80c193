// Package saga runs a series of steps, each with the work that undoes it. Even across crashes, every saga ends
// completed or compensated, or is reported as stuck.
//
//	trip := &saga.Saga[Trip]{
//		Name: "trip", Version: 1,
//		Steps: []saga.Step[Trip]{
//			{Name: "flight", Do: bookFlight, Undo: cancelFlight},
//			{Name: "hotel", Do: bookHotel, Undo: cancelHotel},
//			{Name: "charge", Do: chargeCard, Pivot: true}, // the point of no return
//			{Name: "tickets", Do: sendTickets},
//		},
//	}
//	err := saga.Run(ctx, trip, &Trip{From: "LIS"}) // in memory, nothing durable
//
// A [Runner] runs sagas durably: each saga is a row in your own database (package sqlstore). There is no server, no
// broker and no deterministic replay.
//
//	runner := saga.NewRunner(store, saga.RunnerConfig{Name: "travel"})
//	trips := saga.Register(runner, trip)
//	go runner.Run(ctx) // in each process
//	_, err := trips.Start(ctx, "trip-17", Trip{From: "LIS"})
//	done, err := trips.Result(ctx, "trip-17") // errors.Is(err, saga.ErrCompensated): it was undone
//
// # Guarantees
//
//   - Each Do and Undo is called at least once, with a stable command id. DoTx and UndoTx apply exactly once.
//   - A saga turns back when it stops going forward and starts to undo its steps. Once a saga has turned back, no Do
//     is started that would have to be undone.
//   - While the database and one process with the definition live, every saga ends or is stuck, which
//     [Runner.Observe] reports and [Runner.Operate] resolves.
//   - Sagas are not isolated from each other.
//
// # What a Do returns
//
// A step whose reply is lost may have taken effect. It is called again with the same command id, and undone if the
// saga turns back. So a participant must apply each command id once, as [Apply] does, and Undo must work for a Do
// that never took effect. Package sagatest tests both.
//
//	                       tried again         undone   meaning
//	nil                    no                  yes      the step is done
//	any other error        up to Attempts      yes      the step may have taken effect
//	Permanent(err)         no                  yes      it may have taken effect; another attempt cannot help
//	Declined(err)          no                  no       the participant declined it for good; it never takes effect
//	MaybeApplied(err)      up to Attempts      yes      as any other error, whatever err itself reports
//	a refusal              until it is made    no       a policy, such as an open breaker, did not make the call
//	an answer              no                  yes      as Permanent, unless it is Retryable
//
// A refusal does not settle an earlier attempt that may have taken effect: the step is undone. At a pivot without an
// Undo, Permanent makes the saga stuck: an operator must find out. Only nil and Declined settle that pivot.
//
// docs/saga.md is the guide.
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

// A Saga is a definition. S is the state that its steps share. A Saga must not change once it is in use.
type Saga[S any] struct {
	Name string // 1 to 100 bytes of UTF-8
	// Version identifies the steps and the state. It must be 0 or more. It increases when a step is added, removed,
	// renamed or moved, when other steps run in parallel, or when another step is the pivot. It also increases when a
	// field of the state is renamed, gets another type or another meaning. While there are sagas of the old version,
	// pass that to [Register] too.
	//
	// A new field needs no new version: processes of an older build, which do not know the field, keep its value if the
	// Codec is nil. They do so in nested structs, maps and slices, but not in types with an UnmarshalJSON, nor in an
	// element of a slice that a step both changes and moves. Sagas that began before have the zero value.
	Version int
	Steps   []Step[S] // 1 to 1,000; for more, see [ChildrenOf]

	// Timeout is the time that the saga may take until its pivot, or without a pivot its last step, is done. After
	// that time the saga turns back, unless the outcome of a pivot without Undo is unknown. Zero means no limit.
	Timeout time.Duration
	// Codec encodes the state. Nil means JSON, which keeps fields that this build of the program does not know; see
	// Version. With another Codec, a new field needs a new Version unless the Codec keeps such fields.
	Codec Codec[S]
	// Tenant returns the tenant on whose behalf a saga with the state runs, or "": up to 100 bytes of UTF-8 without
	// NUL. It is called when the saga starts, and its result is stored with the saga. Due sagas
	// of different tenants take turns in a Runner. Nil means no tenant.
	Tenant func(s S) string

	cached atomic.Value // of cachedProgram[S]
}

// A Step is a command to a participant, and the work that undoes it. One of Do, DoTx and Child is set, or none of them
// in a step that only waits for a Delay or an Await.
type Step[S any] struct {
	Name string // 1 to 100 bytes of UTF-8 without "/"; unique in the saga

	// Do does the step. It may be called again after it took effect, with the same command id. The package
	// documentation has the meaning of its error.
	Do func(ctx context.Context, s *S) error
	// Undo undoes Do. It may be called several times, for a Do that never took effect, and before a delayed request
	// of Do reaches the participant. Undo may be nil in the pivot, in every step after it, and with ReadOnly or Child.
	Undo func(ctx context.Context, s *S) error

	// DoTx is a Do in a transaction of the store's database that also records the step, so that it applies exactly
	// once. If DoTx returns an error, tx is rolled back and changes to s are discarded. On PostgreSQL and MySQL, tx
	// is READ COMMITTED, whatever the server's default is: lock the rows that a decision depends on. On SQLite, DoTx
	// must end within LeaseTTL/3. DoTx must not end tx. It delays other steps of the saga.
	DoTx func(ctx context.Context, tx *sql.Tx, s *S) error
	// UndoTx is an Undo in such a transaction.
	UndoTx func(ctx context.Context, tx *sql.Tx, s *S) error

	// Child makes the step consist of one or more sagas. See [ChildOf].
	Child *Child[S]

	// Parallel makes the step run in parallel with the one before it. If one of them fails for good, all of them are
	// canceled and undone. The first step, a pivot, and a step with Await cannot be parallel.
	Parallel bool

	// Delay is the time that the step waits before it starts. Zero means no wait.
	Delay time.Duration
	// Await is the name of a signal that the step waits for after Delay, up to 100 bytes. See [Handle.Signal]. Empty
	// means no signal.
	Await string
	// AwaitFor limits the wait: if no signal has come after that time, the step fails with [ErrNoSignal], without
	// effect. A signal that comes later still counts if no runner has ended the wait yet. Zero means no limit.
	AwaitFor time.Duration

	// ReadOnly declares that Do changes nothing, so that the step is never undone.
	ReadOnly bool

	// Pivot marks the point of no return. Later steps are retried until they succeed; if one of them returns
	// [Permanent] or [Declined], the saga is stuck. A pivot without Undo is retried until it returns nil or Declined,
	// whatever Attempts and Saga.Timeout are, and even after [Handle.Cancel]; Permanent makes the saga stuck.
	Pivot bool

	// Timeout limits each attempt. Zero means 1 minute; [Unlimited] means no limit.
	Timeout time.Duration
	// Attempts limits the calls of Do, without refusals. Zero means 3; [Unlimited] means no limit, as always after
	// the pivot.
	Attempts int
	// UndoAttempts limits the calls of Undo, without refusals, before the saga is stuck. Zero means 20; [Unlimited]
	// means no limit.
	UndoAttempts int
	// Backoff returns the wait after attempt 1, 2 and so on, unless the error has a longer RetryAfter(), of up to 1
	// hour. Nil means Exponential(100*time.Millisecond, time.Minute).
	Backoff func(attempt int) time.Duration

	// Middleware wraps each attempt of Do and Undo, but not of DoTx and UndoTx, in policies, such as the Wrap of a
	// breaker. A Retrier in it retries only if the step has one attempt.
	Middleware func(next func(context.Context) error) func(context.Context) error
}

var defaultBackoff = Exponential(100*time.Millisecond, time.Minute)

// Exponential returns a Step.Backoff whose wait is random: up to first after the first attempt, up to twice that after
// the next one, and so on up to longest. The wait is zero if first or longest is not positive.
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
