package retry

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/cenkalti/backoff/v4"
)

// Constant waits d before each retry. It needs d >= 0.
//
// Constant and its like return factories for Config.Backoff: a BackOff has state and
// belongs to one call, a factory may be shared. [Config.Validate] reports arguments without
// meaning, such as a negative delay.
//
// Constant, [Linear], [Doubling] and [Delays] are exact. Clients that fail together and
// wait for exactly the same time return together, so most programs want the random delays
// of [Exponential], [Decorrelated] or [FullJitter].
func Constant(d time.Duration) func() backoff.BackOff {
	if d < 0 {
		return misused("Constant(%v)", "given 0 or more", d)
	}
	b := &constant{d} // has no state
	return func() backoff.BackOff { return b }
}

// Linear waits first before the first retry, step longer before each further one, and at
// most longest. It needs 0 <= first <= longest and step >= 0.
func Linear(first, step, longest time.Duration) func() backoff.BackOff {
	if first < 0 || step < 0 || longest < first {
		return misused("Linear(%v, %v, %v)", "given 0 or more, and longest at least first", first, step, longest)
	}
	return func() backoff.BackOff { return &linear{first: first, step: step, longest: longest, next: first} }
}

// Doubling waits first before the first retry, twice as long before each further one, and
// at most longest. It needs 0 < first <= longest. [Exponential] is the same with full
// jitter.
func Doubling(first, longest time.Duration) func() backoff.BackOff {
	if first <= 0 || longest < first {
		return misused("Doubling(%v, %v)", "given more than 0, and longest at least first", first, longest)
	}
	return doubling(first, longest)
}

// doubling has the engine compute the delays, without its jitter, which would exceed
// MaxInterval.
func doubling(first, longest time.Duration) func() backoff.BackOff {
	return func() backoff.BackOff {
		b := &backoff.ExponentialBackOff{
			InitialInterval: first,
			Multiplier:      2,
			MaxInterval:     longest,
			MaxElapsedTime:  0, // the Retrier has its own time limits
			Stop:            backoff.Stop,
			Clock:           backoff.SystemClock,
		}
		b.Reset()
		return b
	}
}

// Exponential waits a random time between 0 and a bound that begins at first, doubles with
// each retry, and stays at longest. This is full jitter, the kind that makes the least
// work for a server that recovers (Brooker, "Exponential Backoff And Jitter", AWS
// Architecture Blog, 2015). It needs 0 < first <= longest.
func Exponential(first, longest time.Duration) func() backoff.BackOff {
	if first <= 0 || longest < first {
		return misused("Exponential(%v, %v)", "given more than 0, and longest at least first", first, longest)
	}
	return FullJitter(doubling(first, longest))
}

// FullJitter waits a random time between 0 and each delay of delays, which must not be
// nil.
func FullJitter(delays func() backoff.BackOff) func() backoff.BackOff {
	if delays == nil {
		return misused("FullJitter(nil)", "given the delays")
	}
	return func() backoff.BackOff {
		switch b := delays().(type) {
		case nil:
			return nil // Validate says so
		case *misuse:
			return b
		default:
			return &jittered{b}
		}
	}
}

// Decorrelated waits a random time between first and three times the delay before it, and
// at most longest. This is decorrelated jitter, from the same source as [Exponential]'s.
// It needs 0 < first <= longest.
func Decorrelated(first, longest time.Duration) func() backoff.BackOff {
	if first <= 0 || longest < first {
		return misused("Decorrelated(%v, %v)", "given more than 0, and longest at least first", first, longest)
	}
	return func() backoff.BackOff { return &decorrelated{first: first, longest: longest, last: first} }
}

// Immediately makes the first n retries without a wait and takes the delays of the others
// from then. A nil then means Exponential(100ms, 10s). It needs n >= 0.
func Immediately(n int, then func() backoff.BackOff) func() backoff.BackOff {
	if n < 0 {
		return misused("Immediately(%d, ...)", "given 0 or more", n)
	}
	if then == nil {
		then = Exponential(defaultFirst, defaultLongest)
	}
	return func() backoff.BackOff {
		switch b := then().(type) {
		case nil:
			return nil // Validate says so
		case *misuse:
			return b
		default:
			return &immediate{n: n, then: b}
		}
	}
}

// Delays waits for each d in turn and then ends the retrying. It needs each d >= 0, and
// Attempts must be 0, negative, or one more than the number of delays.
func Delays(d ...time.Duration) func() backoff.BackOff {
	for _, each := range d {
		if each < 0 {
			return misused("Delays(..., %v, ...)", "given 0 or more", each)
		}
	}
	d = slices.Clone(d)
	return func() backoff.BackOff { return &delays{all: d} }
}

const (
	defaultFirst   = 100 * time.Millisecond
	defaultLongest = 10 * time.Second
)

type constant struct{ d time.Duration }

func (b *constant) Reset()                     {}
func (b *constant) NextBackOff() time.Duration { return b.d }

type linear struct{ first, step, longest, next time.Duration }

func (b *linear) Reset() { b.next = b.first }

func (b *linear) NextBackOff() time.Duration {
	d := b.next
	if b.next > b.longest-b.step { // the sum might overflow
		b.next = b.longest
	} else {
		b.next += b.step
	}
	return d
}

type jittered struct{ delays backoff.BackOff }

func (b *jittered) Reset() { b.delays.Reset() }

func (b *jittered) NextBackOff() time.Duration {
	d := b.delays.NextBackOff()
	if d < 0 {
		return backoff.Stop
	}
	return fullJitter(d)
}

func (b *jittered) retries() (int, bool) { return retriesOf(b.delays) }

type decorrelated struct{ first, longest, last time.Duration }

func (b *decorrelated) Reset() { b.last = b.first }

func (b *decorrelated) NextBackOff() time.Duration {
	most := b.longest
	if b.last <= b.longest/3 { // the product might overflow
		most = b.last * 3
	}
	b.last = b.first + fullJitter(most-b.first)
	return b.last
}

type immediate struct {
	n, made int
	then    backoff.BackOff
}

func (b *immediate) Reset() {
	b.made = 0
	b.then.Reset()
}

func (b *immediate) NextBackOff() time.Duration {
	if b.made < b.n {
		b.made++
		return 0
	}
	return b.then.NextBackOff()
}

func (b *immediate) retries() (int, bool) {
	n, ok := retriesOf(b.then)
	return b.n + min(n, math.MaxInt-1-b.n), ok // one more is still an int
}

type delays struct {
	all  []time.Duration
	made int
}

func (b *delays) Reset() { b.made = 0 }

func (b *delays) NextBackOff() time.Duration {
	if b.made == len(b.all) {
		return backoff.Stop
	}
	b.made++
	return b.all[b.made-1]
}

func (b *delays) retries() (int, bool) { return len(b.all), true }

// retriesOf returns how many delays b has. ok is false if that is not known.
func retriesOf(b backoff.BackOff) (n int, ok bool) {
	if finite, ok := b.(interface{ retries() (int, bool) }); ok {
		return finite.retries()
	}
	return 0, false
}

// A misuse is the BackOff of a factory whose arguments mean nothing. Validate reports it.
// It never retries.
type misuse struct{ what, want string }

func misused(format, want string, args ...any) func() backoff.BackOff {
	m := &misuse{what: fmt.Sprintf(format, args...), want: want}
	return func() backoff.BackOff { return m }
}

func (m *misuse) Reset()                     {}
func (m *misuse) NextBackOff() time.Duration { return backoff.Stop }

// fullJitter returns a random delay in [0, bound].
func fullJitter(bound time.Duration) time.Duration {
	return time.Duration(rand.Uint64N(uint64(bound) + 1)) // unsigned: bound may be the largest there is
}
