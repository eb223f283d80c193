package saga

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/internal/panics"
	store "github.com/go-resilience/resilience/saga/sagastore"
)

// These are the reasons for which a saga did not complete. An [*Error] matches them.
var (
	ErrCompensated = errors.New("saga: compensated") // its steps were undone
	ErrStuck       = errors.New("saga: stuck")       // it needs an operator
	ErrAbandoned   = errors.New("saga: abandoned")   // an operator ended it as it was

	ErrCanceled = errors.New("saga: canceled")          // the reason why a saga was undone after Cancel
	ErrDeadline = errors.New("saga: deadline exceeded") // the reason why a saga was undone after Saga.Timeout
	ErrNoSignal = errors.New("saga: no signal in time") // the error of a step after AwaitFor
)

// These are the reasons for which a call failed.
var (
	ErrNotFound      = store.ErrNotFound                             // no saga has the id
	ErrExists        = errors.New("saga: id in use")                 // by a saga of another definition or parent
	ErrNotRegistered = errors.New("saga: definition not registered") // or not in this version
	ErrNotAllowed    = errors.New("saga: not allowed")               // in the present status
	ErrNoTx          = errors.New("saga: no transactions")           // the engine or its store has none
)

var (
	// errLost is the cause of an attempt's ctx if the runner no longer holds the saga.
	errLost = errors.New("saga: no longer held")
	// errDraining is the cause of an attempt's ctx if the runner was stopped and RunnerConfig.Drain has elapsed.
	errDraining = errors.New("saga: runner stopped")
)

// An Error is the error of a saga that did not complete. It matches [ErrCompensated], [ErrStuck] or [ErrAbandoned], and
// unwraps to Err and the errors in Failed. After [Run] these are the errors of the steps. From Result they are texts,
// which match only ErrCanceled, ErrDeadline and ErrNoSignal.
type Error struct {
	Saga   string    // the Name of the definition
	ID     string    // empty from Run
	Status Status    // Compensated, Stuck or Abandoned
	Step   string    // the step at which the saga turned back or stopped
	Err    error     // the error of that step, or ErrCanceled, ErrDeadline, the end of ctx or an operator's note
	Failed []Failure // the steps that could neither be done nor undone
}

// A Failure is a step that could neither be done nor undone.
type Failure struct {
	Step string // the Name of the step
	Op   Op     // the operation that failed for good
	Err  error  // the error of its latest attempt
}

// Error returns the definition, the id, the status, the step and the errors of the saga in one line.
func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString("saga: ")
	b.WriteString(e.Saga)
	if e.ID != "" {
		fmt.Fprintf(&b, " %q", e.ID)
	}
	fmt.Fprintf(&b, ": %s", e.Status)
	if e.Step != "" {
		fmt.Fprintf(&b, ": step %s", e.Step)
	}
	if e.Err != nil {
		fmt.Fprintf(&b, ": %v", e.Err)
	}
	for _, f := range e.Failed {
		if f.Step != e.Step || f.Op == OpUndo {
			fmt.Fprintf(&b, "; %s of step %s: %v", f.Op, f.Step, f.Err)
		}
	}
	return b.String()
}

// Is reports whether target is the error of e.Status, such as [ErrCompensated].
func (e *Error) Is(target error) bool {
	switch e.Status {
	case Compensated:
		return target == ErrCompensated
	case Stuck:
		return target == ErrStuck
	case Abandoned:
		return target == ErrAbandoned
	}
	return false
}

// Unwrap returns Err and the errors in Failed.
func (e *Error) Unwrap() []error {
	errs := make([]error, 0, 1+len(e.Failed))
	if e.Err != nil {
		errs = append(errs, e.Err)
	}
	for _, f := range e.Failed {
		if f.Err != nil {
			errs = append(errs, f.Err)
		}
	}
	return errs
}

// Retryable returns false: the saga has ended.
func (e *Error) Retryable() bool { return false }

// Refused returns false: steps were called.
func (e *Error) Refused() bool { return false }

// Answered reports whether the saga was undone because of a participant's answer.
func (e *Error) Answered() bool { return e.Status == Compensated && behavior.IsAnswered(e.Err) }

// Permanent marks the error of a step that another attempt cannot help. The step may have taken effect, so it is
// undone. An error with Answered() true, and without Retryable() true, is permanent too. A refusal of a policy is not,
// even inside Permanent, nor is an error with Retryable() false, which is about one call. Permanent(nil) is nil.
func Permanent(err error) error { return wrapFinal(err, mayHaveApplied) }

// Declined marks the error of a step that its participant declined for good: no attempt of it has taken effect or ever
// will, not even one that is still on its way. The step is neither retried nor undone, and a pivot turns back.
// Declined(nil) is nil.
//
// Only a participant that remembers the decision can decline a command, as [Apply] does. Joined errors are declined
// only if all of them are. A refusal of a policy is not, even inside Declined.
func Declined(err error) error { return wrapFinal(err, declined) }

// withoutEffect marks err as the error of an attempt that took no effect and is not retried. Earlier attempts may have
// taken effect.
func withoutEffect(err error) error { return wrapFinal(err, noEffect) }

// IsDeclined reports whether err is [Declined], perhaps by a participant in another process.
func IsDeclined(err error) bool {
	return effectOf(err) == declined && !behavior.IsRefused(err)
}

func wrapFinal(err error, is effect) error {
	if err == nil {
		return nil
	}
	return &finalError{err: err, effect: is}
}

type finalError struct {
	err    error
	effect effect // mayHaveApplied means that err decides
}

func (e *finalError) Error() string   { return e.err.Error() }
func (e *finalError) Unwrap() error   { return e.err }
func (e *finalError) Retryable() bool { return false }
func (e *finalError) Answered() bool  { return true }

// MaybeApplied marks the error of a step that may have taken effect, whatever err itself says: use it if a policy
// refuses the second of two calls of a Do. MaybeApplied(nil) is nil.
func MaybeApplied(err error) error {
	if err == nil {
		return nil
	}
	return &maybeAppliedError{err}
}

type maybeAppliedError struct{ err error }

func (e *maybeAppliedError) Error() string  { return e.err.Error() }
func (e *maybeAppliedError) Unwrap() error  { return e.err }
func (e *maybeAppliedError) Refused() bool  { return false }
func (e *maybeAppliedError) Answered() bool { return false }

// isFinal reports whether the step is not retried after err. read is the classification of err. Retryable() of a
// failure has no effect: it is about one call, and the command ID makes it safe to repeat an attempt.
func isFinal(err error, read behavior.End) bool {
	if _, ok := errors.AsType[*finalError](err); ok {
		return true
	}
	child, ok := errors.AsType[*Error](err)
	return ok && child.Status.Ended() || read.Kind == behavior.Answered && !read.Retryable
}

// An end is the result of an attempt. The zero end means success.
type end struct {
	err        error
	effect     effect // the effect of a Do that was not refused
	refused    bool   // a policy refused the call
	final      bool   // the step is not retried
	retryAfter time.Duration
}

// An effect is what is known about the effect of a failed Do.
type effect int

const (
	mayHaveApplied effect = iota // the attempt may have taken effect
	noEffect                     // the attempt took no effect
	declined                     // no attempt took effect or ever will
)

// classify returns the result of an attempt from its error. failsClean means that a failed Do of the step has no
// effect.
func classify(err error, failsClean bool) (e end) {
	if err == nil {
		return e
	}
	read := behavior.Read(err)
	e = end{err: err, refused: read.Kind == behavior.Refused, final: isFinal(err, read), retryAfter: read.RetryAfter}
	if !errors.Is(err, errTxEnded) {
		e.effect = effectOf(err)
		if failsClean {
			e.effect = max(e.effect, noEffect)
		}
	}
	return e
}

// effectOf returns the effect that err reports.
func effectOf(err error) effect {
	switch e := err.(type) {
	case *finalError:
		if e.effect == mayHaveApplied {
			return effectOf(e.err)
		}
		return e.effect
	case *maybeAppliedError, *Error, *panics.Error:
		return mayHaveApplied // the wrapped error is about a part of the attempt
	case interface{ Unwrap() error }:
		return effectOf(e.Unwrap())
	case interface{ Unwrap() []error }:
		least, parts := declined, 0
		for _, part := range e.Unwrap() {
			if part == nil {
				continue
			}
			is := noEffect // the part was refused; an earlier attempt may have taken effect
			if !behavior.IsRefused(part) {
				is = effectOf(part)
			}
			least, parts = min(least, is), parts+1
		}
		if parts > 0 {
			return least
		}
	}
	return mayHaveApplied
}

// errTxEnded is the error of a DoTx or UndoTx that committed or rolled back its transaction. It may have taken effect
// without a log entry.
var errTxEnded = errors.New("saga: the step has ended its transaction itself")

var errExited = errors.New("saga: a step called runtime.Goexit")

// endedItself reports whether a transaction with error err was ended by its step. The transaction also ends when ctx
// is done.
func endedItself(ctx context.Context, err error) bool {
	return errors.Is(err, sql.ErrTxDone) && ctx.Err() == nil
}

// turnedBack is the cause of an attempt's ctx if the saga turns back. It matches the reason but does not unwrap to it,
// because errors.As would then find the Declined error of another step.
type turnedBack struct{ why error }

func (e *turnedBack) Error() string        { return "saga: turning back: " + e.why.Error() }
func (e *turnedBack) Is(target error) bool { return errors.Is(e.why, target) }
