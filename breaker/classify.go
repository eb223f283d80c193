package breaker

import (
	"context"
	"errors"
	"time"
)

// An Outcome is what an error of a call says about the dependency: [Failure],
// which is the zero Outcome, [Success], [Ignore], or that of [Trip].
type Outcome struct {
	kind outcome
	hold time.Duration
}

type outcome uint8

const (
	failure outcome = iota
	success
	ignore
	trip
)

var (
	Failure = Outcome{kind: failure} // the dependency failed
	Success = Outcome{kind: success} // it did its work: a "not found", for example
	Ignore  = Outcome{kind: ignore}  // nothing is known: the call was not made, or not finished
)

// Trip returns the Outcome of a failure that opens the breaker at once, for at
// least d and at least the time for which it would open anyway.
func Trip(d time.Duration) Outcome { return Outcome{kind: trip, hold: d} }

// DefaultClassify says what err means where [Config].Classify is nil.
//
// An error with a method RetryAfter() time.Duration that returns a positive
// duration opens the breaker at once for at least that long: the dependency has
// asked to be left alone. An error with a method Refused() bool that returns true
// is ignored: a policy further in has made no call. Any other error is a failure.
func DefaultClassify(err error) Outcome {
	if err == nil {
		return Success
	}
	type refusal interface {
		error
		Refused() bool
	}
	if e, ok := errors.AsType[refusal](err); ok && e.Refused() {
		return Ignore
	}
	type delayed interface {
		error
		RetryAfter() time.Duration
	}
	if e, ok := errors.AsType[delayed](err); ok && e.RetryAfter() > 0 {
		return Trip(e.RetryAfter())
	}
	return Failure
}

// A verdict is what the circuit is told of a call, in the place of its error. A
// fast success is nil. Any other error that reaches it is gobreaker's own word for
// a panic.
type verdict struct {
	err    error // the error of the call; nil for a slow success
	failed bool
	slow   bool
	trips  bool
	hold   time.Duration // of a trip, at least
}

// errIgnored is the verdict that changes nothing, errMoved that on a call which
// was not made.
var errIgnored, errMoved error = &verdict{}, &verdict{}

func (v *verdict) Error() string { return "breaker: verdict" }

// judge returns the verdict on a call that began at an instant and ended now.
func (b *Breaker) judge(ctx context.Context, err error, begun time.Duration) error {
	slow := b.cfg.SlowAfter > 0 && b.now()-begun >= b.cfg.SlowAfter
	if err == nil {
		if slow {
			return &verdict{slow: true}
		}
		return nil
	}
	if ctx.Err() != nil {
		return errIgnored
	}
	switch o := b.cfg.Classify(err); o.kind {
	case success:
		if slow {
			return &verdict{slow: true}
		}
		return nil
	case ignore:
		return errIgnored
	default:
		return &verdict{err: err, failed: true, slow: slow, trips: o.kind == trip, hold: o.hold}
	}
}
