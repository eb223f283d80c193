package retry

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/cenkalti/backoff/v4"
)

// A Backoff, such as a BackOff of github.com/cenkalti/backoff/v4, returns the delays of one call;
// a negative one ends the retrying.
type Backoff = interface {
	NextBackOff() time.Duration
	Reset() // before the first
}

// Constant waits d before each retry: clients that failed together return together. It panics if d is
// negative.
func Constant(d time.Duration) func() Backoff {
	if d < 0 {
		panic(fmt.Errorf("retry: Constant(%v): must be given 0 or more", d))
	}
	b := backoff.NewConstantBackOff(d) // has no state
	return func() Backoff { return b }
}

// Exponential waits a random time up to a bound that begins at first and doubles with each retry up to
// longest (full jitter: Brooker, "Exponential Backoff And Jitter", 2015). It panics unless 0 < first <= longest.
func Exponential(first, longest time.Duration) func() Backoff {
	if first <= 0 || longest < first {
		panic(fmt.Errorf("retry: Exponential(%v, %v): must be given more than 0, and longest at least first", first, longest))
	}
	return func() Backoff {
		// The engine computes the bounds. Its own jitter would exceed MaxInterval. It has no
		// MaxElapsedTime, since the Retrier has its own time limits.
		b := &jittered{&backoff.ExponentialBackOff{
			InitialInterval: first, Multiplier: 2, MaxInterval: longest, Stop: backoff.Stop, Clock: backoff.SystemClock,
		}}
		b.Reset()
		return b
	}
}

type jittered struct{ *backoff.ExponentialBackOff }

func (b *jittered) NextBackOff() time.Duration { return fullJitter(b.ExponentialBackOff.NextBackOff()) }

// fullJitter returns a random delay in [0, bound].
func fullJitter(bound time.Duration) time.Duration {
	return time.Duration(rand.Uint64N(uint64(bound) + 1)) // unsigned: bound may be the largest there is
}

// Permanent is [backoff.Permanent]: another attempt cannot help err, unless an error that wraps it is
// Retryable() bool. A Retrier removes a mark that is the outermost error.
func Permanent(err error) error { return backoff.Permanent(err) }

// marked reports whether a mark is in the tree of err.
func marked(err error) bool { return errors.Is(err, new(backoff.PermanentError)) }

// unmarked returns err without its outermost marks.
func unmarked(err error) error {
	for {
		mark, ok := err.(*backoff.PermanentError)
		if !ok || mark.Err == nil {
			return err
		}
		err = mark.Err
	}
}
