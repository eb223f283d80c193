// Package saga runs sagas. A saga is a sequence of steps that can be undone. Each step has a function that does its
// work (Do) and a function that undoes it (Undo). Every saga ends as completed (all steps are done) or compensated (all
// steps are undone), or is reported as stuck until an operator acts. With a [Runner], this is true even if processes
// crash.
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
//	err := saga.Run(ctx, trip, &Trip{From: "LIS"}) // in memory: lost if the process crashes
//
// A [Runner] runs sagas durably: each saga is stored as a row in your own database; see package sqlstore. Sagas need no
// additional server and no message broker. The code of a saga need not be deterministic, because a saga is not restored
// by running its code again.
//
//	runner := saga.NewRunner(store, saga.RunnerConfig{Name: "travel"})
//	trips := saga.Register(runner, trip)
//	go runner.Run(ctx) // in each process
//	_, err := trips.Start(ctx, "trip-17", Trip{From: "LIS"})
//	done, err := trips.Result(ctx, "trip-17") // errors.Is(err, saga.ErrCompensated): it was undone
//
// # Guarantees
//
//   - A Do or Undo may be called more than once, always with the same command ID (see [Command]). The database changes
//     of a DoTx or UndoTx are applied exactly once.
//   - A saga turns back when it stops going forward and starts to undo its steps. After a saga has turned back, it
//     starts no Do that would have to be undone.
//   - If the database and at least one process with the saga's definition are running, runners continue every saga
//     until it ends or becomes stuck. Some waits have no limit: for a signal without AwaitFor, for a policy that
//     refuses each attempt, and for a step after the pivot that keeps failing. [Runner.Observe] reports stuck sagas,
//     and steps that keep failing ([EventStalled]). [Runner.Operate] lets an operator resolve them.
//   - Sagas are not isolated from each other: the effects of a step are visible before its saga ends.
//
// # Results of a Do
//
// A participant is the service or database that a step calls. If a participant's reply is lost, the step may have taken
// effect. The step's Do is called again with the same command ID, and the step is undone if the saga turns back. So a
// participant must apply each command ID only once, as [Apply] does, and Undo must work even if Do never took effect.
// Package sagatest tests that participants ignore repeated commands, and that each Undo works at any time.
//
// The result of a Do decides whether the step is retried, and whether it is undone if the saga turns back:
//
//	                       retried           undone   meaning
//	nil                    no                yes      the step is done
//	any other error        up to Attempts    yes      the step may have taken effect
//	Permanent(err)         no                yes      the step may have taken effect; another attempt cannot help
//	Declined(err)          no                no       the participant rejected the command; it never takes effect
//	MaybeApplied(err)      up to Attempts    yes      the step may have taken effect, whatever err itself reports
//	a refusal              without a limit   no       a policy, such as an open breaker, did not make the call
//	an answer              no                yes      as Permanent(err), unless the error is Retryable
//	a panic                up to Attempts    yes      the step may have taken effect; for Run, see there
//
// A refusal is an error whose Refused method returns true. An answer is an error whose Answered method returns true. An
// answer whose Retryable method also returns true has the same result as "any other error". A DoTx that returns an
// error, and a step with ReadOnly, took no effect, so they are not undone.
//
// If an earlier attempt of a step may have taken effect, a saga that turns back undoes the step, even if later attempts
// were refused. If a pivot without an Undo returns Permanent, the saga is stuck, and an operator must find out whether
// the pivot took effect. Only nil and Declined report with certainty whether such a pivot took effect.
//
// docs/saga.md is the guide.
//
// Sources: Compensating Transaction, Scheduler Agent Supervisor (Cloud Design Patterns); Garcia-Molina and Salem,
// Sagas, SIGMOD 1987.
//
// # Stability
//
// These parts of the package are unstable until version 1.0.0, and a minor version may change them: child sagas
// ([Child]), the actions of operators ([Operation]), and the types that only engines use ([Engine]). Package sagastore,
// which defines the interface of a [Store], is also unstable.
package saga

import (
	"context"
	"database/sql"
	"math/rand/v2"
	"sync/atomic"
	"time"
)

const (
	Unlimited = -1       // means no limit, in fields whose comments mention Unlimited
	None      = -1 << 31 // means a duration of zero, in fields whose comments mention None
)

// A Saga is the definition of a saga: its name, its steps and its limits. S is the type of the state that the steps
// share. A Saga must not be changed after it was passed to [Run], [Register] or [Define].
type Saga[S any] struct {
	Name string // 1 to 100 bytes of UTF-8 without NUL
	// Version identifies the steps and the type of the state. Version must be 0 or more. Start with version 1, because an
	// operator cannot move a saga to version 0; see Operation.Version. Increase Version if a step is added, removed,
	// renamed or moved, if a different set of steps runs in parallel, or if a different step is the pivot. Also increase
	// Version if a field of the state is renamed, or if the type or the meaning of a field changes. While sagas of the old
	// version exist, pass the old definition to [Register] together with the new one.
	//
	// A new field of the state needs no new Version if Codec is nil. Processes of an older build do not know the new
	// field, but they preserve its value, even in nested structs, maps and slices. There are two exceptions. The value of
	// a new field is lost if the field is inside a type that has its own methods for JSON or text encoding, such as
	// UnmarshalJSON. The value is also lost if the field is in an element of a slice, and one step both changes the
	// element and either moves it to another index or shortens the slice. In a saga that was started before a field
	// existed, the field has its zero value.
	Version int
	Steps   []Step[S] // 1 to 1,000; for more, see [ChildrenOf]

	// Timeout is the time that the saga may take until its pivot is done or, without a pivot, until its last step is done.
	// After Timeout, the saga turns back, unless the outcome of a pivot without Undo is unknown. Zero means no limit.
	Timeout time.Duration
	// Codec encodes and decodes the state. Nil means JSON, which preserves fields that this build of the program does not
	// know; see Version. With another Codec, a new field of the state needs a new Version, unless the Codec also preserves
	// unknown fields.
	Codec Codec[S]
	// Tenant returns the tenant for which a saga with the state s runs: up to 100 bytes of UTF-8 without NUL, or "" for no
	// tenant. Tenant is called when the saga starts, and its result is stored with the saga. A Runner alternates between
	// the due sagas of different tenants, so a tenant with many sagas does not delay the others. Nil means no tenant.
	Tenant func(s S) string

	cached atomic.Value // of cachedProgram[S]
}

// A Step is a command to a participant (the service or database that the step calls), and the function that undoes it.
// A step that only waits for a Delay or an Await has no Do, DoTx or Child. Every other step has exactly one of them.
type Step[S any] struct {
	Name string // 1 to 100 bytes of UTF-8 without "/" or NUL; unique in the saga

	// Do does the work of the step. Do may be called again after it took effect, with the same command ID. See the package
	// documentation for the meaning of the error that Do returns. The changes of Do to s are recorded with the result of
	// the attempt, even if Do returns an error.
	Do func(ctx context.Context, s *S) error
	// Undo undoes Do. Undo may be called several times, even if Do never took effect. Undo may also be called before a
	// delayed request of Do reaches the participant. The participant must then reject the delayed request. The pivot and
	// the steps after it need no Undo. All other steps need an Undo or UndoTx, except steps with ReadOnly, steps with a
	// Child, and steps that only wait. These three kinds of steps must have neither Undo nor UndoTx.
	Undo func(ctx context.Context, s *S) error

	// DoTx is like Do, but its changes are applied exactly once. DoTx makes its changes in tx, a transaction of the
	// store's database. In the same transaction, the runner records that the step is done. If DoTx returns an error, tx is
	// rolled back and changes to s are discarded. DoTx must not commit tx or roll it back. While DoTx runs, the runner
	// does not record the results of the saga's parallel steps.
	//
	// On PostgreSQL and MySQL, the isolation level of tx is READ COMMITTED, whatever the server's default is. So lock the
	// rows that a decision depends on. On SQLite, DoTx must return within a third of RunnerConfig.LeaseTTL.
	DoTx func(ctx context.Context, tx *sql.Tx, s *S) error
	// UndoTx is like Undo, but makes its changes in a transaction as DoTx does.
	UndoTx func(ctx context.Context, tx *sql.Tx, s *S) error

	// Child makes the step start one or more other sagas and wait for them. See [ChildOf].
	Child *Child[S]

	// Parallel makes the step run in parallel with the step before it. If one of several parallel steps before the pivot
	// fails permanently, the others are canceled, and all parallel steps that may have taken effect are undone. With a
	// Runner, each parallel step has its own copy of s, and the changes are merged. If two steps have changed the same
	// field to different values, the attempt that ends later fails, and is retried with the merged state. The first step
	// cannot be Parallel. A pivot and a step with Await cannot run in parallel with other steps.
	Parallel bool

	// Delay is the time that the step waits before it starts. Zero means no wait.
	Delay time.Duration
	// Await is the name of a signal. After Delay has elapsed, the step waits for this signal. The name has up to 100
	// bytes. [Handle.Signal] sends a signal. Empty means that the step waits for no signal.
	Await string
	// AwaitFor limits the time for which the step waits for the signal. If the signal has not arrived after AwaitFor, Do
	// is not called, and the step fails with [ErrNoSignal]. A signal that arrives after AwaitFor still counts if no runner
	// has ended the wait yet. Zero means no limit.
	AwaitFor time.Duration

	// ReadOnly declares that Do changes nothing. A read-only step is never undone.
	ReadOnly bool

	// Pivot marks the point of no return: once this step is done, the saga no longer turns back. The steps after the pivot
	// are retried until they succeed. If a step after the pivot returns [Permanent] or [Declined], the saga is stuck.
	//
	// A pivot without Undo that may have taken effect is retried until it returns nil or Declined. Attempts, Saga.Timeout
	// and [Handle.Cancel] do not end these retries. If a pivot without Undo returns Permanent, the saga is stuck.
	Pivot bool

	// Timeout limits the duration of each attempt. Zero means 1 minute; [Unlimited] means no limit.
	Timeout time.Duration
	// Attempts limits the number of attempts of Do. Attempts that a policy refused, or that were interrupted because the
	// runner stopped or lost the saga, do not count. Zero means 3; [Unlimited] means no limit. Steps after the pivot never
	// have a limit.
	Attempts int
	// UndoAttempts limits the number of attempts of Undo. If the last attempt fails, the saga is stuck. The same attempts
	// as for Attempts do not count. Zero means 20; [Unlimited] means no limit.
	UndoAttempts int
	// Backoff returns the wait after a failed or refused attempt. The argument is the number of the attempt, from 1, and
	// includes the latest consecutive refusals. After a refusal, the wait is at least 10ms. If the attempt's error has a
	// RetryAfter method that returns a longer wait, the step uses the longer wait, up to about 1 hour. Nil means
	// Exponential(100*time.Millisecond, time.Minute).
	Backoff func(attempt int) time.Duration

	// Middleware wraps each attempt of Do and Undo in policies, for example in the Wrap method of a breaker. Middleware
	// must be nil with DoTx, UndoTx and Child. A Retrier in Middleware retries a Do only if Attempts is 1, and an Undo
	// only if UndoAttempts is 1.
	Middleware func(next func(context.Context) error) func(context.Context) error
}

var defaultBackoff = Exponential(100*time.Millisecond, time.Minute)

// Exponential returns a Step.Backoff with random waits. After the first attempt, the maximum wait is the argument
// first. With each further attempt, the maximum wait doubles, up to the argument longest. All waits are zero if first
// or longest is not positive.
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
