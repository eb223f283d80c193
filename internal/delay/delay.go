// Package delay computes the waits between attempts. Package retry exports the Backoffs with full jitter;
// clients that retry within a short time use the ones with equal jitter.
package delay

import (
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/cenkalti/backoff/v4"
)

// A Backoff returns the delays of one call; a negative delay ends the retrying. It is an alias, like
// retry.Backoff, so that the two are one type.
type Backoff = interface {
	NextBackOff() time.Duration
	Reset()
}

// A Jitter returns a random delay that is at most bound, which is not negative.
type Jitter func(bound time.Duration) time.Duration

// Full returns a delay in [0, bound]: the "full jitter" of Brooker, "Exponential Backoff And Jitter"
// (AWS Architecture Blog, 2015). It spreads retries the most.
func Full(bound time.Duration) time.Duration {
	return time.Duration(rand.Uint64N(uint64(bound) + 1)) // unsigned: bound may be the largest Duration
}

// Equal returns a delay in [bound/2, bound]: the "equal jitter" of the same article. Its waits add up to at
// least half of the bounds, so that a few attempts last through a short outage.
func Equal(bound time.Duration) time.Duration { return bound - Full(bound/2) }

// Exponential returns a factory of Backoffs whose delays are jitter of a bound, which starts at first and
// doubles with each retry up to longest. See [Check] for its limits.
func Exponential(first, longest time.Duration, jitter Jitter) func() Backoff {
	if first <= 0 || longest < first {
		return func() Backoff {
			return &misconfigured{
				fmt.Sprintf("Exponential(%v, %v)", first, longest), "Exponential(first, longest) with 0 < first <= longest",
			}
		}
	}
	return func() Backoff {
		// The jitter of ExponentialBackOff could exceed MaxInterval. MaxElapsedTime is zero because the
		// Retrier has its own limits of time.
		b := &exponential{jitter, backoff.ExponentialBackOff{
			InitialInterval: first, Multiplier: 2, MaxInterval: longest, Stop: backoff.Stop, Clock: backoff.SystemClock,
		}}
		b.Reset()
		return b
	}
}

type exponential struct {
	jitter Jitter
	backoff.ExponentialBackOff
}

func (b *exponential) NextBackOff() time.Duration {
	return b.jitter(b.ExponentialBackOff.NextBackOff())
}

// Constant returns a factory of Backoffs whose delays are d. See [Check] for its limits.
func Constant(d time.Duration) func() Backoff {
	var b Backoff = backoff.NewConstantBackOff(d) // has no state
	if d < 0 {
		b = &misconfigured{fmt.Sprintf("Constant(%v)", d), "Constant(d) with d 0 or more"}
	}
	return func() Backoff { return b }
}

// Check returns how b was made and how it must be made, or empty strings if b is valid or not of this package.
func Check(b Backoff) (is, must string) {
	if m, ok := b.(*misconfigured); ok {
		return m.is, m.must
	}
	return "", ""
}

// A misconfigured Backoff has arguments that are out of range. Configurations reject it; if it is used
// nevertheless, it ends the retrying.
type misconfigured struct{ is, must string }

func (*misconfigured) NextBackOff() time.Duration { return backoff.Stop }
func (*misconfigured) Reset()                     {}
