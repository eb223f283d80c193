package throttle

import (
	"math"
	"math/bits"
	"time"
)

// A pace is a rate and a burst in integers. It measures in units. A token is a power
// of two of units, which does not depend on the rate, so tokens and bursts have no
// remainder. Time that has passed is counted in the units that the rate gives in it.
//
// The power is the smallest one that makes a unit at most a nanosecond's worth of the
// rate, or a whole token above 1e9 tokens a second. The rate is kept to 63 bits or
// more, so that it is off by less than a nanosecond in 70 years. Only the time of one
// decision is rounded, down to the unit; errors do not add up.
type pace struct {
	perNS uint64 // units in a nanosecond, times 2^shift, rounded up
	shift uint   // 1 to 63
	frac  uint   // a token is 2^frac units
	rate  float64
	burst int
}

const (
	maxRate    = 1e12
	maxBurst   = int64(1) << 61 // in units: 36 years and more to refill
	maxDebt    = int64(1) << 60 // in units, on top of a burst: 18 years and more of waiting
	maxElapsed = int64(1) << 62 // in units, after which a new epoch begins
)

// newPace returns the pace of a rate and a burst that checkRate accepts.
func newPace(rate float64, burst int) pace {
	burst = burstOf(rate, burst)
	fraction, exp := math.Frexp(rate)
	mantissa := uint64(fraction * (1 << 53)) // rate is mantissa * 2^(exp-53)
	exp -= 53
	// perNS is mantissa * 2^up / 1e9. With an up of 40 or 41 it has 64 bits.
	up := 41
	hi, lo := mantissa>>(64-up), mantissa<<up
	if hi >= 1e9 {
		up = 40
		hi, lo = mantissa>>(64-up), mantissa<<up
	}
	perNS, rest := bits.Div64(hi, lo, 1e9)
	if rest > 0 {
		perNS++ // so that whole tokens are there at the time at which they are due
	}
	frac := max(up-exp-63, 0) // a shift of 63 makes a nanosecond 1 to 2 units
	return pace{perNS: perNS, shift: uint(up - exp - frac), frac: uint(frac), rate: rate, burst: burst}
}

// tokens returns n tokens in units. n is at most the burst.
func (p *pace) tokens(n int) int64 { return int64(n) << (p.frac & 63) }

// at returns the units that the rate gives in elapsed, rounded down.
func (p *pace) at(elapsed time.Duration) int64 {
	hi, lo := bits.Mul64(uint64(elapsed), p.perNS)
	return int64(hi<<((64-p.shift)&63) | lo>>(p.shift&63))
}

// until returns how long after elapsed the units reach target: the smallest d >= 0
// with at(elapsed+d) >= target.
func (p *pace) until(elapsed time.Duration, target int64) time.Duration {
	short := target - p.at(elapsed)
	if short <= 0 {
		return 0
	}
	// elapsed already gives this part of the next unit.
	_, lo := bits.Mul64(uint64(elapsed), p.perNS)
	begun := lo & (1<<p.shift - 1)
	numLo, borrow := bits.Sub64(uint64(short)<<p.shift, begun, 0)
	numHi := uint64(short)>>(64-p.shift) - borrow
	numLo, carry := bits.Add64(numLo, p.perNS-1, 0) // to round up
	// A nanosecond gives at least one unit, so the quotient is at most short.
	d, _ := bits.Div64(numHi+carry, numLo, p.perNS)
	return time.Duration(d)
}

// horizon returns the time during which the units cannot overflow.
func (p *pace) horizon() time.Duration { return p.until(0, maxElapsed) }

// convert returns units of the pace from as units of p: the same number of tokens,
// rounded up, but at most the longest debt of a pace.
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
