// Package behavior classifies the errors that calls return. All packages of this module use this package to classify
// errors, so all policies treat an error in the same way.
//
// An error is classified by optional methods. The error itself or any error in its chain may have these methods:
//
//	Refused() bool             true: this module did not start the call
//	Answered() bool            true: the dependency worked and returned a negative answer
//	Retryable() bool           false: another attempt cannot help
//	RetryAfter() time.Duration > 0: another attempt cannot help before this time
//	Throttled() bool           true: the dependency rejected the call to shed load
//
// The package also supports the errors of github.com/cenkalti/backoff, v4 to v6. An error that the function Permanent
// of backoff returned is not retryable. A RetryAfterError of backoff has a RetryAfter.
//
// If an error and an error that it wraps have the same method, the outer error decides. Joined errors are the parts
// of an error with the method Unwrap() []error. The first part that has any of the methods decides for all parts,
// with two exceptions. The longest RetryAfter of all parts counts. Refused parts are ignored unless all parts are
// refused, because a refusal does not describe the admitted calls.
//
// If several of the following properties apply, the first one decides: Refused, Answered, the end of the caller's
// ctx, Retryable, RetryAfter.
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
	Refused              // this module did not start the call
	Canceled             // the caller's ctx was canceled; how the dependency behaved is unknown
	Overran              // the deadline of the caller's ctx passed
	Failed               // the dependency failed, or the error has none of the methods
)

// An End is the classified result of a call.
type End struct {
	Kind Kind
	// Retryable reports whether another attempt may succeed. It is false if the call succeeded. If Kind is Answered, it
	// is false unless the error has a method Retryable() bool that returns true.
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

// ReadUnder classifies err as the result of a call under ctx. If err would be Failed and ctx is done, err is Canceled
// or Overran. If the deadline of ctx has expired, err is Overran even if ctx is not canceled yet, because a
// connection with the same deadline often returns before ctx is canceled.
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

// IsRefused reports whether err means that the call was not made.
func IsRefused(err error) bool { return Read(err).Kind == Refused }

// IsAnswered reports whether err is an answer of a dependency that works.
func IsAnswered(err error) bool { return Read(err).Kind == Answered }

// IsTimeout reports whether err is context.DeadlineExceeded or has a method Timeout() bool that returns true. If err
// and an error that it wraps both have the method, the outer error decides. If err joins several errors, one timeout
// is enough.
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

// IsPermanent reports whether the function Permanent of cenkalti/backoff created err itself. HasPermanent also checks
// the errors that err wraps.
func IsPermanent(err error) bool {
	name, _ := backoffType(err)
	return isPermanent(name)
}

// isPermanent reports whether name is the type of an error that Permanent creates: PermanentError in v4 and v5,
// permanent in v6.
func isPermanent(name string) bool { return name == "PermanentError" || name == "permanent" }

// HasPermanent reports whether Permanent created err or an error that it wraps.
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

// WithoutPermanent returns err without the outermost errors that Permanent created.
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

// backoffType returns the type name and the value of the struct that err points to, if cenkalti/backoff defines the
// type. Otherwise name is empty. backoffType uses reflection, which works for every major version. A type assertion
// would need an import of each version.
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

// A said is the result of an optional method Retryable: unsaid if no error of the chain has the method.
type said uint8

const (
	unsaid said = iota
	yes
	no
)

// A part is the classification of an error and of the errors that it wraps.
type part struct {
	says              bool // an error of the chain has one of the methods
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
	// refused describes the refused parts, and made describes the other parts. Each of them is the first such part that
	// has any of the methods, with the longest RetryAfter of these parts.
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
