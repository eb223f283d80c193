package saga

import (
	"errors"
	"fmt"
	"runtime/debug"
	"strings"

	"github.com/go-resilience/resilience/internal/behavior"
)

// How a saga can end other than completed, and why a call is refused.
var (
	// ErrCompensated: everything that was done has been undone.
	ErrCompensated = errors.New("saga: compensated")
	// ErrStuck: it can go neither on nor back without a person.
	ErrStuck = errors.New("saga: stuck")
	// ErrAbandoned: a person has given it up as it was.
	ErrAbandoned = errors.New("saga: abandoned")

	// ErrCanceled is the cause of a compensation that Cancel asked for.
	ErrCanceled = errors.New("saga: canceled")
	// ErrDeadline is the cause of a compensation after Saga.Deadline.
	ErrDeadline = errors.New("saga: deadline passed")

	// ErrNotFound: no saga has this id.
	ErrNotFound = errors.New("saga: not found")
	// ErrExists: the id belongs to a saga of another definition.
	ErrExists = errors.New("saga: id in use by another definition")
	// ErrNotRegistered: the runner does not know this definition or version.
	ErrNotRegistered = errors.New("saga: definition not registered")
	// ErrNotAllowed: the saga's present status does not allow the action.
	ErrNotAllowed = errors.New("saga: not allowed")
	// ErrNoTx: DoTx, UndoTx and StartTx need a store that is a TxStore.
	ErrNoTx = errors.New("saga: the store has no transactions")

	// ErrFenced: another owner has the saga; nothing was written. Stores return
	// it from Commit and CommitTx.
	ErrFenced = errors.New("saga: fenced: another owner has the saga")
	// ErrLost is the cause with which the ctx of an attempt ends when its runner
	// no longer holds the saga.
	ErrLost = errors.New("saga: lease lost")
	// ErrDraining is the cause with which the ctx of an attempt ends when its
	// runner was stopped and RunnerConfig.Drain has passed.
	ErrDraining = errors.New("saga: runner stopped")

	// ErrUndone is what Barrier refuses a Do with, whose Undo came first.
	ErrUndone = errors.New("saga: command refused: its undo came first")
)

// An Error says why a saga did not complete, and what became of its steps.
//
// It is [ErrCompensated], [ErrStuck] or [ErrAbandoned], and unwraps to Err and
// to the errors of Failed.
type Error struct {
	Name   string   // the definition's Name
	ID     string   // the saga's id; "" from Run
	Status Status   // Compensated, Stuck or Abandoned
	Step   string   // the step that made it turn back or stop; "": none did
	Err    error    // what that step returned, or ErrCanceled, ErrDeadline, the end of ctx
	Undone []string // steps that were undone, in the order in which they were
	Failed []Failure
}

// A Failure is a step that could neither be done nor undone.
type Failure struct {
	Step string
	Op   Op
	Err  error
}

func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString("saga: ")
	b.WriteString(e.Name)
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

// Is reports whether target is the sentinel of e.Status.
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

// Unwrap returns Err and the errors of Failed.
func (e *Error) Unwrap() []error {
	errs := make([]error, 0, 1+len(e.Failed))
	if e.Err != nil {
		errs = append(errs, e.Err)
	}
	for _, f := range e.Failed {
		if f.Err != nil && f.Err != e.Err {
			errs = append(errs, f.Err)
		}
	}
	return errs
}

// Retryable reports false: a saga that has ended does not end otherwise if it
// is asked again.
func (e *Error) Retryable() bool { return false }

// Refused reports false: steps were called, whatever the error of the last one
// says.
func (e *Error) Refused() bool { return false }

// Answered reports whether a participant's answer made the saga turn back, and
// everything has been undone.
func (e *Error) Answered() bool { return e.Status == Compensated && behavior.IsAnswered(e.Err) }

// Abort returns err as an answer after which a step is not tried again. The step
// may have taken effect: a Do that aborts is undone. Abort(nil) is nil.
//
// Any other answer, which is an error with Answered() true that does not say
// Retryable() true, aborts too. A refusal does not, also inside an Abort: to give
// up on it, return an error that has only its text.
func Abort(err error) error { return wrapFinal(err, false) }

// NoEffect returns err as the answer of a Do that certainly took no effect: the
// hotel is full, the card is refused. The step is not tried again, and needs no
// undo unless an earlier attempt is in doubt. NoEffect(nil) is nil.
//
// Of joined errors, each must be a NoEffect or a refusal: a NoEffect beside a
// time-out leaves the step in doubt.
func NoEffect(err error) error { return wrapFinal(err, true) }

func wrapFinal(err error, noEffect bool) error {
	if err == nil {
		return nil
	}
	return &finalError{err: err, noEffect: noEffect}
}

type finalError struct {
	err      error
	noEffect bool
}

func (e *finalError) Error() string   { return e.err.Error() }
func (e *finalError) Unwrap() error   { return e.err }
func (e *finalError) Retryable() bool { return false }
func (e *finalError) Answered() bool  { return true }

// InDoubt returns err as the error of a Do that may have taken effect, whatever
// err itself says. A Do that calls several participants needs it: if a policy
// refuses the second call, its error says that nothing was called, and what the
// first call did would not be undone. InDoubt(nil) is nil.
func InDoubt(err error) error {
	if err == nil {
		return nil
	}
	return &doubtError{err}
}

type doubtError struct{ err error }

func (e *doubtError) Error() string  { return e.err.Error() }
func (e *doubtError) Unwrap() error  { return e.err }
func (e *doubtError) Refused() bool  { return false }
func (e *doubtError) Answered() bool { return false }

// isFinal reports whether another attempt is pointless after err, which says end.
// Retryable() of a failure does not count: it speaks of one call, and an attempt has
// a command id that makes it safe to repeat.
func isFinal(err error, end behavior.End) bool {
	if _, ok := errors.AsType[*finalError](err); ok {
		return true
	}
	child, ok := errors.AsType[*Error](err)
	return ok && child.Status.Ended() || end.Kind == behavior.Answered && !end.Retryable
}

// noEffect reports whether err says that the attempt certainly took no effect.
func noEffect(err error) bool {
	switch e := err.(type) {
	case *finalError:
		return e.noEffect || noEffect(e.err)
	case *doubtError, *Error, *PanicError:
		return false // what is inside speaks of less than the whole attempt
	case interface{ Unwrap() error }:
		return noEffect(e.Unwrap())
	case interface{ Unwrap() []error }:
		found := false
		for _, part := range e.Unwrap() {
			switch {
			case part == nil || behavior.IsRefused(part):
			case noEffect(part):
				found = true
			default:
				return false
			}
		}
		return found
	}
	return false
}

// turnedBack is the cause with which the ctx of an attempt ends when its saga is
// to turn back. It is what made it turn, but has nothing in it for errors.As: a
// NoEffect was the answer of another step.
type turnedBack struct{ why error }

func (e *turnedBack) Error() string        { return "saga: turning back: " + e.why.Error() }
func (e *turnedBack) Is(target error) bool { return errors.Is(e.why, target) }

// A PanicError is what a panic in a step, a Codec or a Backoff counts as in a
// [Runner], where no caller is there to see it. Run lets the panics of steps pass.
type PanicError struct {
	Value any
	Stack []byte
}

// Refused and Answered report false: an error that a step panics with says
// nothing of what the step did before.
func (e *PanicError) Refused() bool  { return false }
func (e *PanicError) Answered() bool { return false }

func (e *PanicError) Error() string { return fmt.Sprintf("saga: panic: %v", e.Value) }

// caught turns a panic into a PanicError. It is deferred around code of the user
// that runs on a goroutine of this package.
func caught(err *error) {
	if v := recover(); v != nil {
		*err = &PanicError{v, debug.Stack()}
	}
}

// Unwrap returns Value, if it is an error.
func (e *PanicError) Unwrap() error {
	err, _ := e.Value.(error)
	return err
}
