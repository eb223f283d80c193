// Package behavior classifies the errors that calls return. Every package of this module reads errors only
// through this package, so all patterns classify an error in the same way.
//
// An error is classified by optional methods, which may belong to any error in its chain:
//
//	Refused() bool             true: this module did not make the call
//	Answered() bool            true: the dependency worked and returned a negative answer
//	Retryable() bool           false: another attempt cannot help
//	RetryAfter() time.Duration > 0: another attempt cannot help before this time
//	Throttled() bool           true: the dependency rejected the call to shed load
//
// The errors of github.com/cenkalti/backoff, v4 to v6, are read as well. An error that its function Permanent
// has marked is not retryable. Its RetryAfterError has a RetryAfter.
//
// If an error and an error that it wraps have the same method, the outer error decides. Of joined errors (an
// error with Unwrap() []error), the first part that has any of the methods decides for all parts, with two
// exceptions. The longest RetryAfter counts. Refused parts are ignored unless all parts are refused, because
// a refusal does not describe the calls that were made.
//
// If several of the following apply, the first decides: Refused, Answered, the end of the caller's ctx,
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

// A Kind is the class of a call's result. It describes how the dependency behaved.
type Kind uint8

const (
	Done     Kind = iota // the call succeeded
	Answered             // the dependency worked and returned a negative answer
	Refused              // this module did not make the call
	Canceled             // the caller's ctx was canceled; how the dependency behaved is unknown
	Overran              // the deadline of the caller's ctx passed
	Failed               // the dependency failed, or the error looks like a failure of the dependency
)

// An End is the classified result of a call.
type End struct {
	Kind Kind
	// Retryable reports whether another attempt may help. It is false for Done. For an answer, it is false
	// unless the error's method Retryable returns true.
	Retryable bool
	// RetryAfter is the minimum time until another attempt, or 0.
	RetryAfter time.Duration
	// Throttled reports whether the dependency rejected the call to shed load.
	Throttled bool
}

// Read classifies err without regard to the caller's ctx. A nil err is Done.
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

// ReadUnder classifies err as the result of a call under ctx. If ctx has ended, an err that is neither a
// refusal nor an answer is Canceled or Overran. If the deadline of ctx has passed, err is Overran even if ctx
// is not canceled yet: a connection with the same deadline often returns before ctx is canceled.
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

// IsTimeout reports whether err is a timeout: context.DeadlineExceeded, or an error with a method Timeout()
// bool that returns true. If err and an error that it wraps both have the method, the outer error decides. Of
// joined errors, one timeout is enough.
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

// IsPermanent reports whether err itself is a mark that Permanent of cenkalti/backoff has returned.
func IsPermanent(err error) bool {
	name, _ := backoffType(err)
	return isPermanent(name)
}

// isPermanent reports whether name is the type of such a mark: PermanentError in v4 and v5, permanent in v6.
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

// WithoutPermanent returns err without its outermost marks of Permanent.
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

// backoffType returns the type name and the value of the struct that err points to, if cenkalti/backoff
// defines the type. Otherwise name is empty. Reflection recognizes every major version. A type assertion
// would have to import each version.
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

// A said is the result of an optional method Retryable.
type said uint8

const (
	unsaid said = iota
	yes
	no
)

// A part is the classification of an error and of the errors that it wraps.
type part struct {
	says              bool // whether any error of the chain has one of the methods
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

// read classifies err. It reads the errors that err wraps before err itself, so the outermost error decides.
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
	case name == "RetryAfterError": // a type of v5 and v6
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

// join classifies joined errors as one error.
func join(errs []error) part {
	// For refused calls and for the other calls, the first part that has a method, with the longest RetryAfter.
	var refused, made part
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
