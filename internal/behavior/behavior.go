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
// The marks of github.com/cenkalti/backoff, v4 to v6, are read as well: an error that its Permanent
// has marked is not retryable, and its RetryAfterError has a RetryAfter.
//
// Of an error and the errors that it wraps, the outermost that has a method decides. Of
// joined errors (an error with Unwrap() []error), the first part that has any of the methods
// decides for all of them, except that the longest RetryAfter counts. Refused parts are
// ignored unless all parts are refused: a refusal does not describe the calls that were made.
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

// IsPermanent reports whether err itself is a mark of Permanent of cenkalti/backoff.
func IsPermanent(err error) bool {
	name, _ := backoffType(err)
	return isPermanent(name)
}

// isPermanent reports whether name is the type of a mark of Permanent: of v4 and v5, or of v6.
func isPermanent(name string) bool { return name == "PermanentError" || name == "permanent" }

// HasPermanent reports whether err or an error that it wraps is a mark of Permanent.
func HasPermanent(err error) bool {
	if IsPermanent(err) {
		return true
	}
	switch e := err.(type) {
	case interface{ Unwrap() []error }:
		return slices.ContainsFunc(e.Unwrap(), HasPermanent)
	case interface{ Unwrap() error }:
		return HasPermanent(e.Unwrap())
	}
	return false
}

// WithoutPermanent returns err without the marks of Permanent that are its outermost errors.
func WithoutPermanent(err error) error {
	for IsPermanent(err) {
		inner := errors.Unwrap(err)
		if inner == nil {
			break
		}
		err = inner
	}
	return err
}

// backoffType returns the name and the value of the struct that err points to if its type is one of cenkalti/backoff,
// and "" otherwise. Reflection recognizes every major version; a type assertion would have to import each of them.
func backoffType(err error) (name string, v reflect.Value) {
	v = reflect.ValueOf(err)
	if v.Kind() != reflect.Pointer || v.IsNil() {
		return "", v
	}
	v = v.Elem()
	if t := v.Type(); t.Kind() == reflect.Struct && strings.HasPrefix(t.PkgPath(), "github.com/cenkalti/backoff/") {
		return t.Name(), v
	}
	return "", v
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
	switch name, v := backoffType(err); {
	case isPermanent(name):
		p.says, p.retry = true, no
	case name == "RetryAfterError": // of v5 and v6
		if f := v.FieldByName("Duration"); f.IsValid() && f.CanInt() {
			p.says, p.after = true, max(0, time.Duration(f.Int()))
		}
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

// join returns what joined errors mean together.
func join(errs []error) part {
	var refused, made part // the first part with a method and the longest RetryAfter, of refused calls and of others
	anyMade := false
	for _, err := range errs {
		if err == nil {
			continue
		}
		p := read(err)
		first := &refused
		if !p.refused {
			first, anyMade = &made, true
		}
		after := max(first.after, p.after)
		if !first.says {
			*first = p
		}
		first.after = after
	}
	if anyMade {
		return made
	}
	return refused
}
