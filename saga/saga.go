// Package saga runs a series of steps, each with the work that undoes it, that
// ends completed or compensated whatever crashes, and says so loudly when it
// cannot.
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
// The same definition survives the process when a [Runner] runs it: its progress
// is then a row in the user's own database (package sqlstore), or in any other
// [Store]. There is no server, no broker and no deterministic replay.
//
//	runner := saga.NewRunner(store, saga.RunnerConfig{})
//	saga.Register(runner, trip)
//	go runner.Run(ctx)
//	_, err := saga.Start(ctx, runner, trip, "trip-17", Trip{From: "LIS"})
//	done, err := trip.Result(ctx, runner, "trip-17")
//
// # The guarantee
//
// Each Do and Undo is called at least once with a stable command id; with a
// participant that applies an id once, its effect is applied once; DoTx and
// UndoTx apply exactly once; once compensating is recorded no owner starts a
// Do, and a late one is refused by the barrier; while the database and one
// process with the definition live, every saga ends completed, compensated or
// visibly stuck. There is no isolation between sagas.
//
// # What to know
//
// A step that was started and has no result may have taken effect: the reply
// was lost, the process died between the effect and its record. Such a step is
// in doubt. It is run again with the same command id (see [CommandFrom]), and
// undone like a done one if the saga turns back. So is a Do that failed, unless
// its error is [NoEffect]: Undo must bear a Do that never took effect, and a
// participant must apply each command id once ([Barrier] does it in a
// participant's own database; sagatest.Check tries it out).
//
// An error that says Refused() true means that a policy of this module (an open
// breaker, a full bulkhead, a limiter) did not make the call. Then the attempt was
// not made: the step is not in doubt, and is tried again after RetryAfter and at
// least the backoff, until Deadline or Cancel turns the saga back; an Undo is tried
// for as long as it takes. Refusals do not count against Attempts and UndoAttempts,
// and the log shows the first of a row. If the process crashes while it holds the
// saga, a step that was refused is in doubt as any other that was started. A Do
// that calls several participants returns the refusal of a later one as [InDoubt].
//
// The record "compensating" is committed before the first Undo, but for that of
// an alternative which has failed (see Step.Or). After it nothing goes forward
// again. The end of the caller's ctx never reaches an
// Undo, which runs on a detached ctx with a time-out of its own.
//
// What Do writes in the state is recorded when it returns, also with an error.
// It is not recorded when the process dies, so that nothing may depend on it
// that an Undo needs: derive such things from the command id. Steps that run in
// parallel are each to write fields of their own. Under a Runner each works on
// a copy of the state, and what it changed is taken over when it returns; a
// step that changed what another has changed meanwhile is run again.
//
// A definition whose steps change gets a new Version. Register the old one
// beside it for as long as sagas of it are under way: a runner leaves the
// versions that it does not know alone, and reports them.
//
// Patterns: Compensating Transaction, Scheduler Agent Supervisor and, for its
// leases, Leader Election, in Cloud Design Patterns
// (https://learn.microsoft.com/azure/architecture/patterns/compensating-transaction).
// The name is from Garcia-Molina and Salem, Sagas, 1987.
package saga

import (
	"context"
	"database/sql"
	"encoding/json"
	"sync/atomic"
	"time"
)

// A Saga is a definition: a plain value, checked by Validate and not to be
// changed once it is in use. S is the state that its steps share.
type Saga[S any] struct {
	Name     string        // 1 to 100 bytes
	Version  int           // 0 or more; see the package comment
	Steps    []Step[S]     // at least one
	Deadline time.Duration // from the start; passed before the pivot, or without one the last step, is done: compensate. 0: none
	Codec    Codec[S]      // nil: JSON, which must keep each field of S. Run does not use it

	cached atomic.Value // of cachedProgram[S]
}

// A Step is one part of a saga: a command to a participant, and its undoing.
type Step[S any] struct {
	Name string // 1 to 100 bytes, without "/"; unique in the saga, alternatives included

	// Do does the step. It may be called again, with the same command id, after
	// it took effect. Its ctx begins an operation of its own, of which each call is
	// an attempt: retriers inside do not multiply the saga's (see Around).
	Do func(ctx context.Context, s *S) error
	// Undo undoes Do. It may be called again, and for a Do that never took
	// effect, even one that arrives later. It may be nil in the pivot, after it and
	// in a step that is ReadOnly.
	Undo func(ctx context.Context, s *S) error

	// DoTx is Do in a transaction of the store's database, which commits together
	// with the saga's log: exactly once. An error rolls it back, and what it
	// wrote in s. DoTx may neither commit tx nor roll it back. A Runner runs the
	// DoTx and UndoTx of one saga one at a time, and meanwhile begins no other of
	// its steps. On SQLite each has at most half of RunnerConfig.Lease.
	DoTx func(ctx context.Context, tx *sql.Tx, s *S) error
	// UndoTx is Undo in such a transaction.
	UndoTx func(ctx context.Context, tx *sql.Tx, s *S) error

	// After names the steps that must be done before this one begins. nil: the
	// one before it in Steps; empty: none. Steps that may run in parallel do.
	After []string
	// UndoAfter names the steps that must be undone before this one is. nil:
	// those that come After this one; empty: none.
	UndoAfter []string

	// Or lists alternatives, tried in turn when this one has failed, before
	// anything else is undone. What a failed one may have done is undone first.
	// An alternative has no After, UndoAfter, Or or Pivot of its own.
	Or []Step[S]

	// ReadOnly says that Do changes nothing: there is nothing to undo, and nothing
	// is ever in doubt. Undo and UndoTx must be nil.
	ReadOnly bool
	// BestEffort says that the saga goes on, and completes, without this step if
	// its attempts have failed or it aborts. Only for steps that come after the
	// pivot, without Or. The log shows that it failed. A refusal is waited for.
	BestEffort bool

	// Pivot marks the step that decides: until it is done the saga can turn back;
	// from then on the steps that remain are tried until they work. At most one.
	// A pivot that has no Undo and is in doubt is itself tried until its answer is
	// known, whatever Attempts and Deadline say: return a NoEffect where it
	// certainly took none. An Abort then makes the saga stuck.
	Pivot bool

	// Timeout bounds each attempt of Do and Undo through its ctx. 0: 1 minute,
	// except for a Do under Run, which has the caller's ctx.
	Timeout time.Duration
	// Attempts is how often Do is called at most. 0: 3; negative: no limit, which
	// also holds after the pivot for a step that has no alternative left and is not
	// BestEffort. An attempt that a policy refused is not counted: see the package comment.
	Attempts int
	// UndoAttempts is how often Undo is called before the saga is stuck. 0: 20;
	// negative: no limit. An attempt that a policy refused is not counted.
	UndoAttempts int
	// Backoff is the wait after the attempt-th attempt of Do or Undo has failed:
	// 1, 2 and so on; refusals since the last attempt count, too. nil:
	// Exponential(100*time.Millisecond, time.Minute). An error with RetryAfter()
	// can make it longer.
	Backoff func(attempt int) time.Duration

	// Around wraps each attempt of Do, UndoAround each of Undo: the Wrap of a
	// Breaker, Bulkhead or Limiter, or a Chain. Not for DoTx and UndoTx.
	//
	// The saga retries the step, so a Retrier inside makes one attempt for each of
	// the saga's, in Around as in Do. Only with Attempts (or UndoAttempts) 1 it
	// retries by its own rules.
	Around, UndoAround func(next func(context.Context) error) func(context.Context) error

	// Settle is how long a request already sent may still take effect after its
	// Do has returned: what is in doubt is not undone sooner. 0: at once.
	Settle time.Duration
}

// A Codec turns the state of a saga into bytes and back.
type Codec[S any] interface {
	Encode(s *S) ([]byte, error)
	Decode(data []byte, s *S) error
}

type jsonCodec[S any] struct{}

func (jsonCodec[S]) Encode(s *S) ([]byte, error)    { return json.Marshal(s) }
func (jsonCodec[S]) Decode(data []byte, s *S) error { return json.Unmarshal(data, s) }

// A Status is where a saga is.
type Status string

// Running goes on to Completed, Compensating or Stuck; Compensating to
// Compensated or Stuck; Stuck, by a person's hand, to Running, Compensating or
// Abandoned. Completed, Compensated and Abandoned are ends.
const (
	Running      Status = "running"
	Compensating Status = "compensating"
	Completed    Status = "completed"
	Compensated  Status = "compensated"
	Stuck        Status = "stuck"
	Abandoned    Status = "abandoned"
)

// Ended reports whether nothing will ever happen to a saga with this status.
func (s Status) Ended() bool { return s == Completed || s == Compensated || s == Abandoned }

// A StepStatus is where a step, or one of its alternatives, is.
type StepStatus string

// Idle goes on to StepStarted; that to StepDone, StepNoEffect or StepFailed;
// what may have taken effect to StepUndoing, and that to StepUndone or
// StepUndoFailed. A person can make it StepSkipped.
const (
	StepIdle       StepStatus = "idle"
	StepStarted    StepStatus = "started"
	StepDone       StepStatus = "done"
	StepNoEffect   StepStatus = "noeffect" // certainly without effect: nothing to undo
	StepFailed     StepStatus = "failed"   // given up, perhaps with an effect
	StepUndoing    StepStatus = "undoing"
	StepUndone     StepStatus = "undone"
	StepUndoFailed StepStatus = "undofailed"
	StepSkipped    StepStatus = "skipped"
)

// An Op is what a command asks for.
type Op string

// The operations of a step.
const (
	OpDo   Op = "do"
	OpUndo Op = "undo"
)

// The events of a saga's log. Those of a step have its name and Op.
const (
	EventCreated      = "created"
	EventDone         = "done"
	EventNoEffect     = "noeffect"
	EventFailed       = "failed"
	EventUndone       = "undone"
	EventUndoFailed   = "undofailed"
	EventSkipped      = "skipped"      // by a person
	EventRefused      = "refused"      // by a policy of this module, before the participant was called
	EventParked       = "parked"       // to be tried again later
	EventReleased     = "released"     // handed over by a runner that stops
	EventResumed      = "resumed"      // went on with what was ready
	EventTakenOver    = "takenover"    // from an owner that crashed or was cut off
	EventCanceled     = "canceled"     // the request reached the owner
	EventRetried      = "retried"      // by a person
	EventCompensating = "compensating" // the point of no return backwards
	EventCompleted    = "completed"
	EventCompensated  = "compensated"
	EventStuck        = "stuck"
	EventAbandoned    = "abandoned" // by a person
)
