// Package delay computes the waits between attempts. Package retry uses the Backoffs with full jitter. Clients that
// retry only for a short time use the Backoffs with equal jitter.
package delay

import (
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/cenkalti/backoff/v4"
)

// A Backoff returns the delays between the attempts of one call. A negative delay means that no retry follows.
// Backoff and retry.Backoff are aliases of the same type.
type Backoff = interface {
	NextBackOff() time.Duration
	Reset()
}

// A Jitter returns a random delay from 0 to bound. bound is not negative.
type Jitter func(bound time.Duration) time.Duration

// Full returns a random delay from 0 to bound. This is the "full jitter" of Brooker, "Exponential Backoff And Jitter"
// (AWS Architecture Blog, 2015). Full jitter spreads retries the most.
func Full(bound time.Duration) time.Duration {
	return time.Duration(rand.Uint64N(uint64(bound) + 1)) // unsigned, because bound may be the largest Duration
}

// Equal returns a random delay from bound/2 to bound. This is the "equal jitter" of the same article. With it, the
// sum of the delays is at least half the sum of the bounds. Therefore a few attempts are enough for a short outage.
func Equal(bound time.Duration) time.Duration { return bound - Full(bound/2) }

// Exponential returns a function that creates Backoffs. Each delay of a Backoff is jitter(bound). The bound starts at
// first and doubles with each retry up to longest. [Check] reports arguments that are out of range.
func Exponential(first, longest time.Duration, jitter Jitter) func() Backoff {
	if first <= 0 || longest < first {
		return func() Backoff {
			return &misconfigured{
				fmt.Sprintf("Exponential(%v, %v)", first, longest), "Exponential(first, longest) with 0 < first <= longest",
			}
		}
	}
	return func() Backoff {
		// The jitter of ExponentialBackOff is not used, because it could exceed MaxInterval. MaxElapsedTime
		// is zero, because the Retrier has its own time limits.
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

// Constant returns a function that creates Backoffs whose delays are all d. [Check] reports a d that is out of range.
func Constant(d time.Duration) func() Backoff {
	var b Backoff = backoff.NewConstantBackOff(d) // has no state, so all calls share it
	if d < 0 {
		b = &misconfigured{fmt.Sprintf("Constant(%v)", d), "Constant(d) with d 0 or more"}
	}
	return func() Backoff { return b }
}

// Check reports whether b was created with arguments that are out of range. If so, is is the call that created b, and
// must describes the valid calls. Otherwise, or if b is not from this package, both are empty.
func Check(b Backoff) (is, must string) {
	if m, ok := b.(*misconfigured); ok {
		return m.is, m.must
	}
	return "", ""
}

// A misconfigured Backoff was created with arguments that are out of range. Validate methods use [Check] to reject
// it. If it is used nevertheless, no retry follows.
type misconfigured struct{ is, must string }

func (*misconfigured) NextBackOff() time.Duration { return backoff.Stop }
func (*misconfigured) Reset()                     {}
