package retry

import (
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/cenkalti/backoff/v4"
)

// A Backoff returns the delays of one call, and a negative one to end the retrying. The
// BackOff of github.com/cenkalti/backoff/v4 is one.
type Backoff = interface {
	NextBackOff() time.Duration
	Reset() // is called once in each call, before the first NextBackOff
}

// Constant waits d before each retry. It needs d >= 0; [Config.Validate] reports what is not.
// Clients that fail together return together then: most programs want [Exponential].
func Constant(d time.Duration) func() Backoff {
	if d < 0 {
		return misused("Constant(%v)", "given 0 or more", d)
	}
	b := &constant{d} // has no state
	return func() Backoff { return b }
}

// Exponential waits a random time between 0 and a bound that begins at first, doubles with
// each retry, and stays at longest (full jitter: Brooker, "Exponential Backoff And Jitter",
// AWS Architecture Blog, 2015). It needs 0 < first <= longest; [Config.Validate] reports what
// is not.
func Exponential(first, longest time.Duration) func() Backoff {
	if first <= 0 || longest < first {
		return misused("Exponential(%v, %v)", "given more than 0, and longest at least first", first, longest)
	}
	return func() Backoff {
		// The engine computes the bounds. Its own jitter would exceed MaxInterval.
		b := &backoff.ExponentialBackOff{
			InitialInterval: first,
			Multiplier:      2,
			MaxInterval:     longest,
			MaxElapsedTime:  0, // the Retrier has its own time limits
			Stop:            backoff.Stop,
			Clock:           backoff.SystemClock,
		}
		b.Reset()
		return &jittered{b}
	}
}

type constant struct{ d time.Duration }

func (b *constant) Reset()                     {}
func (b *constant) NextBackOff() time.Duration { return b.d }

type jittered struct{ *backoff.ExponentialBackOff }

func (b *jittered) NextBackOff() time.Duration {
	return fullJitter(b.ExponentialBackOff.NextBackOff())
}

// A misuse is the Backoff of a factory whose arguments mean nothing. Validate reports it.
// It never retries.
type misuse struct{ what, want string }

func misused(format, want string, args ...any) func() Backoff {
	m := &misuse{what: fmt.Sprintf(format, args...), want: want}
	return func() Backoff { return m }
}

func (m *misuse) Reset()                     {}
func (m *misuse) NextBackOff() time.Duration { return backoff.Stop }

// fullJitter returns a random delay in [0, bound].
func fullJitter(bound time.Duration) time.Duration {
	return time.Duration(rand.Uint64N(uint64(bound) + 1)) // unsigned: bound may be the largest there is
}
