// Package delay computes the waits between attempts. Package retry exports the Backoffs with full jitter.
// Clients that retry within a short time use the Backoffs with equal jitter.
package delay

import (
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/cenkalti/backoff/v4"
)

// A Backoff returns the delays between the attempts of one call. A negative delay ends the retrying. Backoff
// and retry.Backoff are aliases, so they are the same type.
type Backoff = interface {
	NextBackOff() time.Duration
	Reset()
}

// A Jitter returns a random delay of at most bound. bound is not negative.
type Jitter func(bound time.Duration) time.Duration

// Full returns a delay in [0, bound]. This is the "full jitter" of Brooker, "Exponential Backoff And Jitter"
// (AWS Architecture Blog, 2015). Full jitter spreads retries the most.
func Full(bound time.Duration) time.Duration {
	return time.Duration(rand.Uint64N(uint64(bound) + 1)) // unsigned: bound may be the largest Duration
}

// Equal returns a delay in [bound/2, bound]. This is the "equal jitter" of the same article. The sum of the
// delays is at least half the sum of the bounds, so a few attempts last through a short outage.
func Equal(bound time.Duration) time.Duration { return bound - Full(bound/2) }

// Exponential returns a factory of Backoffs. Each delay is a jitter of a bound. The bound starts at first and
// doubles with each retry up to longest. [Check] reports arguments that are out of range.
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

// Constant returns a factory of Backoffs whose delays are all d. [Check] reports a d that is out of range.
func Constant(d time.Duration) func() Backoff {
	var b Backoff = backoff.NewConstantBackOff(d) // has no state
	if d < 0 {
		b = &misconfigured{fmt.Sprintf("Constant(%v)", d), "Constant(d) with d 0 or more"}
	}
	return func() Backoff { return b }
}

// Check reports whether b was created with arguments that are out of range. If so, it returns the call that
// created b and the form that the call must have. Otherwise, or if b is not from this package, it returns
// empty strings.
func Check(b Backoff) (is, must string) {
	if m, ok := b.(*misconfigured); ok {
		return m.is, m.must
	}
	return "", ""
}

// A misconfigured Backoff has arguments that are out of range. Configurations reject a misconfigured Backoff.
// If it is used nevertheless, it ends the retrying.
type misconfigured struct{ is, must string }

func (*misconfigured) NextBackOff() time.Duration { return backoff.Stop }
func (*misconfigured) Reset()                     {}
