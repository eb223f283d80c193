package throttle

import (
	"fmt"
	"math"
	"math/bits"
	"time"

	"github.com/go-resilience/resilience/internal/invalid"
)

// A pace is a rate and a burst in integers. It measures in units, which are a
// power of two to the token, and counts the time that has passed in what the
// rate gives during it: a token takes the same number of units at any rate,
// without a rest, and so does the burst.
//
// The power is the smallest that makes a unit at most a nanosecond's worth, or
// a whole token above 1e9 tokens a second. The rate itself is kept to 63 bits
// and more, so that it is off by less than a nanosecond in 70 years; what is
// rounded is the time of one decision, down to the unit, and nothing adds up.
type pace struct {
	perNS uint64 // units that a nanosecond gives, times 2^shift, rounded up
	shift uint   // 1 to 63
	frac  uint   // a token is 2^frac units
	rate  float64
	burst int
}

const (
	maxRate    = 1e12
	maxBurst   = int64(1) << 61 // in units: 36 years and more to refill
	maxDebt    = int64(1) << 60 // in units, on top of a burst: 18 years and more of waiting
	maxElapsed = int64(1) << 62 // in units, after which the time is counted anew
)

// newPace returns the pace of rate and burst, which checkRate has checked.
func newPace(rate float64, burst int) pace {
	burst = burstOf(rate, burst)
	fraction, exp := math.Frexp(rate)
	mantissa := uint64(fraction * (1 << 53)) // rate is mantissa * 2^(exp-53)
	exp -= 53
	// perNS is mantissa * 2^up / 1e9, of 64 bits: the quotient fits with 40 or 41.
	up := 41
	hi, lo := mantissa>>(64-up), mantissa<<up
	if hi >= 1e9 {
		up = 40
		hi, lo = mantissa>>(64-up), mantissa<<up
	}
	perNS, rest := bits.Div64(hi, lo, 1e9)
	if rest > 0 {
		perNS++ // so that a time at which whole tokens are due has them all
	}
	frac := max(up-exp-63, 0) // a shift of 63 makes a nanosecond 1 to 2 units
	return pace{perNS: perNS, shift: uint(up - exp - frac), frac: uint(frac), rate: rate, burst: burst}
}

// burstOf returns the burst that is meant: zero stands for a second's worth.
func burstOf(rate float64, burst int) int {
	if burst == 0 {
		return int(min(max(1, math.Ceil(rate)), math.MaxInt))
	}
	return burst
}

// windowOf returns the time in which a burst refills. It is for people to read, so
// the nearest nanosecond will do: 7 a minute are 7/60 a second, a little less.
func windowOf(rate float64, burst int) time.Duration {
	return time.Duration(math.Round(float64(burst) / rate * float64(time.Second)))
}

// checkRate records what is wrong with a rate and a burst.
func checkRate(f *invalid.Fields, rate float64, burst int) {
	if !(rate > 0 && rate <= maxRate) {
		f.Need(false, "Rate", rate, "above 0 and at most 1e12 tokens a second")
		return
	}
	if burst < 0 {
		f.Need(false, "Burst", burst, "0 (for a second's worth) or more")
		return
	}
	// A double has room for both; the powers of two make the products exact.
	p := newPace(rate, burst)
	fits := p.frac < 62 && math.Ldexp(float64(p.burst), int(p.frac)) <= float64(maxBurst)
	f.Need(fits, "Rate", rate, fmt.Sprintf("enough to refill a Burst of %d within 36 years", p.burst))
}

// tokens returns n tokens in units. n is at most the burst.
func (p *pace) tokens(n int) int64 { return int64(n) << (p.frac & 63) }

// at returns what the rate gives in elapsed, in units, rounded down.
func (p *pace) at(elapsed time.Duration) int64 {
	hi, lo := bits.Mul64(uint64(elapsed), p.perNS)
	return int64(hi<<((64-p.shift)&63) | lo>>(p.shift&63))
}

// until returns how long after elapsed the units reach target: the smallest d
// with at(elapsed+d) >= target.
func (p *pace) until(elapsed time.Duration, target int64) time.Duration {
	short := target - p.at(elapsed)
	if short <= 0 {
		return 0
	}
	// The product of elapsed has already this much of the next unit.
	_, lo := bits.Mul64(uint64(elapsed), p.perNS)
	begun := lo & (1<<p.shift - 1)
	numLo, borrow := bits.Sub64(uint64(short)<<p.shift, begun, 0)
	numHi := uint64(short)>>(64-p.shift) - borrow
	numLo, carry := bits.Add64(numLo, p.perNS-1, 0) // to round up
	// A nanosecond gives a unit or more: the quotient is at most short.
	d, _ := bits.Div64(numHi+carry, numLo, p.perNS)
	return time.Duration(d)
}

// horizon returns the time during which the units cannot overflow.
func (p *pace) horizon() time.Duration { return p.until(0, maxElapsed) }

// convert returns units of the pace from as units of p: the same number of
// tokens, rounded up, and at most what a pace can owe.
func (p *pace) convert(units int64, from *pace) int64 {
	if units <= 0 {
		return 0
	}
	if p.frac <= from.frac {
		by := from.frac - p.frac
		return (units-1)>>by + 1
	}
	by := p.frac - from.frac
	if units > (maxBurst+maxDebt)>>by {
		return maxBurst + maxDebt
	}
	return units << by
}
