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

// These errors report why a saga did not complete. Use [errors.Is] to compare an [*Error] with these errors.
var (
	ErrCompensated = errors.New("saga: compensated") // the saga's steps were undone
	ErrStuck       = errors.New("saga: stuck")       // the saga needs an operator; see Runner.Operate
	ErrAbandoned   = errors.New("saga: abandoned")   // an operator ended the saga without undoing its steps

	ErrCanceled = errors.New("saga: canceled")          // the saga was undone because of Handle.Cancel
	ErrDeadline = errors.New("saga: deadline exceeded") // the saga was undone because of Saga.Timeout
	ErrNoSignal = errors.New("saga: no signal in time") // a step failed because of Step.AwaitFor
)

// These errors report why a call to a method of a Handle or an Engine failed.
var (
	ErrNotFound      = store.ErrNotFound                             // no saga has the id
	ErrExists        = errors.New("saga: id in use")                 // a saga of another definition or parent has the id
	ErrNotRegistered = errors.New("saga: definition not registered") // the saga's definition or its version is unknown
	ErrNotAllowed    = errors.New("saga: not allowed")               // the saga's status does not allow the operation
	ErrNoTx          = errors.New("saga: no transactions")           // the engine or its store has no transactions
)

var (
	// errLost is the cause with which an attempt's ctx is canceled if the runner no longer holds the saga.
	errLost = errors.New("saga: no longer held")
	// errDraining is the cause with which an attempt's ctx is canceled if the runner was stopped and RunnerConfig.Drain
	// has elapsed.
	errDraining = errors.New("saga: runner stopped")
)

// An Error is the error of a saga that did not complete. An Error matches [ErrCompensated], [ErrStuck] or
// [ErrAbandoned], and unwraps to Err and to the errors in Failed. An Error from [Run] contains the errors that the
// steps returned. An Error from [Handle.Result] contains only the recorded texts of these errors. So in an Error from
// Handle.Result, Err can match only ErrCanceled, ErrDeadline and ErrNoSignal.
type Error struct {
	Saga   string    // the Name of the definition
	ID     string    // the saga's id; empty from Run
	Status Status    // Compensated, Stuck or Abandoned
	Step   string    // the step at which the saga turned back or got stuck
	Err    error     // one of: Step's error, ErrCanceled, ErrDeadline, the ctx's error, an operator's note
	Failed []Failure // the steps that could neither be done nor undone
}

// A Failure is a step that could neither be done nor undone.
type Failure struct {
	Step string // the Name of the step
	Op   Op     // the operation that failed permanently
	Err  error  // the error of the latest attempt of Op
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

// Is reports whether target is the error for e.Status: [ErrCompensated], [ErrStuck] or [ErrAbandoned].
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

// Retryable returns false: the saga has ended or needs an operator.
func (e *Error) Retryable() bool { return false }

// Refused returns false, because steps of the saga were called.
func (e *Error) Refused() bool { return false }

// Answered reports whether the saga was undone because of a participant's answer.
func (e *Error) Answered() bool { return e.Status == Compensated && behavior.IsAnswered(e.Err) }

// Permanent marks err as permanent: another attempt of the step cannot help. The step is not retried. The step may have
// taken effect, so it is undone when the saga turns back. Permanent(nil) is nil.
//
// An error whose Answered method returns true is also permanent, unless its Retryable method returns true. A Retryable
// method that returns false does not make an error permanent, because the method is about a single call, not about the
// step. The error of a policy that refused the call is never permanent, even if it was passed to Permanent.
func Permanent(err error) error { return wrapFinal(err, mayHaveApplied) }

// Declined marks err as the participant's final rejection of a command. Declined means that no attempt of the step has
// taken effect, and that no attempt will take effect later, even if a request is still in transit. The step is neither
// retried nor undone. If the step is the pivot, the saga turns back. Declined(nil) is nil.
//
// A participant may return Declined only if it records the decision, as [Apply] does. Joined errors count as declined
// only if each of the errors is declined. The error of a policy that refused the call is never declined, even if it was
// passed to Declined.
func Declined(err error) error { return wrapFinal(err, declined) }

// withoutEffect marks err as the error of an attempt that took no effect and must not be retried. Earlier attempts may
// have taken effect.
func withoutEffect(err error) error { return wrapFinal(err, noEffect) }

// IsDeclined reports whether err was marked by [Declined], possibly by a participant in another process. It returns
// false for an [*Error], which reports the end of a saga; test the field Err of the *Error instead.
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
	effect effect // effectOf reads the effect from err if this field is mayHaveApplied
}

func (e *finalError) Error() string   { return e.err.Error() }
func (e *finalError) Unwrap() error   { return e.err }
func (e *finalError) Retryable() bool { return false }
func (e *finalError) Answered() bool  { return true }

// MaybeApplied marks err as the error of a step that may have taken effect, whatever err itself reports. Use
// MaybeApplied if a Do makes two calls and a policy refuses the second call. MaybeApplied(nil) is nil.
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

// isFinal reports whether the step is not retried after err. read is the classification of err. If err is not a
// participant's answer, its Retryable method has no effect: it is about one call, and the command ID makes it safe to
// repeat an attempt.
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

// An effect describes whether a failed Do may have taken effect.
type effect int

const (
	mayHaveApplied effect = iota // the attempt may have taken effect
	noEffect                     // the attempt took no effect
	declined                     // no attempt took effect or ever will
)

// classify returns the result of an attempt that returned err. failsClean reports whether a Do of the step has no
// effect if it fails.
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
		return mayHaveApplied // the wrapped error is about only a part of the attempt
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

// errTxEnded is the error of a DoTx or UndoTx that committed or rolled back its transaction. The step may have taken
// effect although the log has no entry for it.
var errTxEnded = errors.New("saga: step has ended its transaction itself")

var errExited = errors.New("saga: step called runtime.Goexit")

// endedItself reports whether a step has committed or rolled back its transaction itself. err is the error of a later
// operation on the transaction. If ctx is done, the step did not end the transaction: database/sql rolled it back.
func endedItself(ctx context.Context, err error) bool {
	return errors.Is(err, sql.ErrTxDone) && ctx.Err() == nil
}

// turnedBack is the cause with which an attempt's ctx is canceled if the saga turns back. It matches the reason but
// does not unwrap to it: otherwise errors.As would find the Declined error of another step.
type turnedBack struct{ why error }

func (e *turnedBack) Error() string        { return "saga: turning back: " + e.why.Error() }
func (e *turnedBack) Is(target error) bool { return errors.Is(e.why, target) }
