// Package behavior reads what an error says about the call that returned it. Every package
// of this module reads errors here and nowhere else, so that all patterns read them alike.
//
// An error says it by methods, at any depth of its chain:
//
//	Refused() bool             true: this module did not make the call
//	Answered() bool            true: the dependency worked, and its answer is no
//	Retryable() bool           false: another attempt cannot help
//	RetryAfter() time.Duration > 0: another attempt cannot help sooner
//	Throttled() bool           true: the dependency turned the call away to shed load
//
// What Permanent of cenkalti/backoff has marked says Retryable() false.
//
// Of an error and the errors that it wraps, the outermost that has a method decides. Of
// joined errors (an error with Unwrap() []error), the first part that says anything decides
// for all of them. Refused parts say nothing unless all parts are refused: what was not made
// tells nothing of the calls that were.
//
// The first that applies decides: Refused, Answered, the end of the caller's ctx,
// Retryable, RetryAfter.
package behavior

import (
	"context"
	"errors"
	"reflect"
	"slices"
	"strings"
	"time"
)

// A Kind is what the end of a call says about the dependency.
type Kind uint8

const (
	Done     Kind = iota // the call succeeded
	Answered             // the dependency worked, and its answer is no
	Refused              // the call was not made
	Canceled             // the caller's ctx was canceled; this says nothing
	Overran              // the deadline of the caller's ctx passed
	Failed               // the dependency failed, or cannot be told from one that did
)

// An End is what the end of a call says.
type End struct {
	Kind Kind
	// Retryable is whether another attempt may help. It is false for Done, and for an
	// answer unless its method Retryable returns true.
	Retryable bool
	// RetryAfter is the least time until another attempt, or 0.
	RetryAfter time.Duration
	// Throttled is whether the dependency turned the call away to shed load.
	Throttled bool
}

// Read returns what err says, without regard to the caller's ctx. A nil err is Done.
func Read(err error) End {
	if err == nil {
		return End{}
	}
	p := read(err)
	kind := p.kind()
	return End{
		Kind:       kind,
		Retryable:  p.retry == yes || p.retry == unsaid && kind != Answered,
		RetryAfter: p.after,
		Throttled:  p.throttled,
	}
}

// ReadUnder returns what err says about a call made under ctx. If ctx has ended, an err that
// is neither refused nor an answer is the end of ctx. The deadline of ctx counts from the
// moment that it passes: a connection that has the same deadline often returns before ctx
// is canceled.
func ReadUnder(ctx context.Context, err error) End {
	end := Read(err)
	if end.Kind == Failed {
		switch ctx.Err() {
		case nil:
			if deadline, ok := ctx.Deadline(); ok && !time.Now().Before(deadline) {
				end.Kind = Overran
			}
		case context.DeadlineExceeded:
			end.Kind = Overran
		default:
			end.Kind = Canceled
		}
	}
	return end
}

// IsRefused reports whether the call that returned err was not made.
func IsRefused(err error) bool { return Read(err).Kind == Refused }

// IsAnswered reports whether err is an answer of a dependency that works.
func IsAnswered(err error) bool { return Read(err).Kind == Answered }

// IsTimeout reports whether err is a timeout: context.DeadlineExceeded, or an error
// with a method Timeout() bool that returns true. Of an error and what it wraps, the
// outermost that has the method decides; of joined errors, one timeout is enough.
func IsTimeout(err error) bool {
	return errors.Is(err, context.DeadlineExceeded) || saysTimeout(err)
}

func saysTimeout(err error) bool {
	switch e := err.(type) {
	case interface{ Timeout() bool }:
		return e.Timeout()
	case interface{ Unwrap() []error }:
		return slices.ContainsFunc(e.Unwrap(), saysTimeout)
	case interface{ Unwrap() error }:
		return saysTimeout(e.Unwrap())
	}
	return false
}

// IsPermanent reports whether err itself is the mark of Permanent of cenkalti/backoff, of
// whatever version: a type cannot be asked for without an import.
func IsPermanent(err error) bool {
	t := reflect.TypeOf(err)
	if t == nil || t.Kind() != reflect.Pointer ||
		!strings.HasPrefix(t.Elem().PkgPath(), "github.com/cenkalti/backoff/") {
		return false
	}
	name := t.Elem().Name()
	return name == "PermanentError" || name == "permanent" // of v4 and v5, and of v6
}

// A said is an answer to whether another attempt may help.
type said uint8

const (
	unsaid said = iota
	yes
	no
)

// A part is what an error of a chain says together with the errors that it wraps.
type part struct {
	says              bool // anything: some error of the chain has a method
	refused, answered bool
	retry             said
	after             time.Duration
	throttled         bool
}

func (p part) kind() Kind {
	switch {
	case p.refused:
		return Refused
	case p.answered:
		return Answered
	}
	return Failed
}

// read returns what err says. It asks the errors that err wraps first and then err, so that
// the outermost decides.
func read(err error) part {
	var p part
	switch e := err.(type) {
	case interface{ Unwrap() []error }:
		p = join(e.Unwrap())
	case interface{ Unwrap() error }:
		if inner := e.Unwrap(); inner != nil {
			p = read(inner)
		}
	}
	if e, ok := err.(interface{ Answered() bool }); ok {
		p.says, p.answered = true, e.Answered()
	}
	if e, ok := err.(interface{ Refused() bool }); ok {
		p.says, p.refused = true, e.Refused()
	}
	if IsPermanent(err) {
		p.says, p.retry = true, no
	}
	if e, ok := err.(interface{ Retryable() bool }); ok {
		p.says, p.retry = true, no
		if e.Retryable() {
			p.retry = yes
		}
	}
	if e, ok := err.(interface{ RetryAfter() time.Duration }); ok {
		p.says, p.after = true, max(0, e.RetryAfter())
	}
	if e, ok := err.(interface{ Throttled() bool }); ok {
		p.says, p.throttled = true, e.Throttled()
	}
	return p
}

// join returns what errors that are joined say together.
func join(errs []error) part {
	var refused, made part // the first that says anything, of those refused and of the others
	anyMade := false
	for _, err := range errs {
		if err == nil {
			continue
		}
		switch p := read(err); {
		case p.refused:
			if !refused.says {
				refused = p
			}
		default:
			anyMade = true
			if !made.says {
				made = p
			}
		}
	}
	if anyMade {
		return made
	}
	return refused
}
