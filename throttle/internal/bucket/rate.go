// Package bucket is the arithmetic of a token bucket, and of the periods of a calendar. It
// reads no clock, holds no lock and rounds nothing.
//
// The state of a bucket is one time, the theoretical arrival time of the generic cell rate
// algorithm (ITU-T I.371): the moment at which the burst is full again. A call moves it ahead
// by the time that its tokens take to refill, and may do so if that leaves it ahead of now by
// at most the time of the burst.
package bucket

import (
	"math"
	"math/big"
	"math/bits"
)

// A Rate is a number of tokens a second: num / den. Its times are in nanoseconds and parts of
// one: num of them are a nanosecond, and 1e9 * den are a token. So whole tokens have no
// remainder.
type Rate struct {
	num, den uint64 // below 2^55
	token    Time
}

// A Time is a number of nanoseconds and of parts of one, fewer than make another: what a rate
// leaves over. Times of one Rate are counted and compared without rounding.
type Time struct {
	NS   int64
	Part uint64
}

const (
	// MaxRate is the highest rate, in tokens a second.
	MaxRate = 1e12

	// Longest is the longest time of tokens, in nanoseconds: 54 years.
	Longest = 54 * 365 * 24 * 3600 * 1e9
)

// Unlimited is the rate at which tokens take no time.
var Unlimited = Rate{num: 1, den: 1}

// NewRate returns a rate, and false if it is not above 0 and at most MaxRate, or if a token
// takes longer than Longest. It takes perSecond as the fraction that it was computed from:
// 7.0/60 is 7 tokens in 60 seconds, and not the float64 next to it.
func NewRate(perSecond float64) (r Rate, ok bool) {
	if !(perSecond > 1e9/float64(Longest) && perSecond <= MaxRate) {
		return r, false
	}
	r.num, r.den = fraction(perSecond)
	hi, lo := bits.Mul64(1e9, r.den)
	ns, part := bits.Div64(hi, lo, r.num)
	r.token = Time{int64(ns), part}
	return r, true
}

// fraction returns the first convergent of f's continued fraction that is f as a float64.
func fraction(f float64) (num, den uint64) {
	significand, exp := math.Frexp(f)
	a, shift := uint64(significand*(1<<53)), uint(53-exp) // f is a / 2^shift
	for a&1 == 0 && shift > 0 {
		a, shift = a>>1, shift-1
	}
	lastNum, lastDen := uint64(0), uint64(1)
	num, den = 1, 0
	next := func(term uint64) bool {
		lastNum, lastDen, num, den = num, den, term*num+lastNum, term*den+lastDen
		return quotient(num, den) == f
	}
	b := uint64(1) << shift
	if shift >= 64 { // the first two terms, where b has two words
		next(0)
		term, rest := bits.Div64(1<<(shift-64), 0, a)
		if next(term) {
			return num, den
		}
		b = rest
	}
	for !next(a / b) {
		a, b = b, a%b
	}
	return num, den
}

// quotient returns the float64 that is nearest to num / den.
func quotient(num, den uint64) float64 {
	if den < 1<<53 { // num is below: no convergent of a float64 has more than its significand
		return float64(num) / float64(den)
	}
	q := new(big.Rat).SetFrac(new(big.Int).SetUint64(num), new(big.Int).SetUint64(den))
	f, _ := q.Float64()
	return f
}

// IsUnlimited reports whether tokens take no time.
func (r *Rate) IsUnlimited() bool { return r.token == Time{} }

// Of returns the time of n tokens, at most Longest.
func (r *Rate) Of(n int) Time {
	if n == 1 {
		return r.token
	}
	tooLong, ns := bits.Mul64(uint64(n), uint64(r.token.NS))
	t := Time{NS: int64(ns)}
	if r.token.Part != 0 {
		hi, lo := bits.Mul64(uint64(n), r.token.Part)
		more, part := bits.Div64(hi, lo, r.num)
		ns, carry := bits.Add64(ns, more, 0)
		t = Time{int64(ns), part}
		tooLong |= carry
	}
	if tooLong != 0 || uint64(t.NS) >= Longest {
		return Time{NS: Longest}
	}
	return t
}

// Tokens returns the whole tokens that the rate gives in t, 0 or more.
func (r *Rate) Tokens(t Time) int {
	if r.IsUnlimited() {
		return math.MaxInt
	}
	if t.NS < 0 {
		return 0
	}
	hi, lo := r.parts(t)
	hi, lo, _ = divide(hi, lo, 1e9)
	hi, lo, _ = divide(hi, lo, r.den)
	if hi != 0 || lo > math.MaxInt {
		return math.MaxInt
	}
	return int(lo)
}

// Add returns t + u.
func (r *Rate) Add(t, u Time) Time {
	t.NS += u.NS
	if t.Part += u.Part; t.Part >= r.num {
		t.Part -= r.num
		t.NS++
	}
	return t
}

// Sub returns t - u. If that is below 0, so is NS.
func (r *Rate) Sub(t, u Time) Time {
	t.NS -= u.NS
	if t.Part < u.Part {
		t.Part += r.num
		t.NS--
	}
	t.Part -= u.Part
	return t
}

// Due returns when a level that may spend the tokens of room at once can take those of cost.
func (r *Rate) Due(tat, cost, room Time) Time { return r.Sub(r.Add(tat, cost), room) }

// Pay returns the tat after the tokens of cost have been taken.
func (r *Rate) Pay(tat Time, now int64, cost Time) Time {
	return r.Add(Later(tat, Time{NS: now}), cost)
}

// Back returns the tat after the tokens of cost have been given back. What is more than the
// burst is lost.
func (r *Rate) Back(tat Time, now int64, cost Time) Time {
	if !tat.After(now) {
		return tat
	}
	return Later(r.Sub(tat, cost), Time{NS: now})
}

// Follow returns the tat of the rate before as one of r: as many tokens are missing as were,
// rounded up to a part, and at most those of Longest.
func (r *Rate) Follow(tat Time, now int64, before *Rate) Time {
	switch {
	case !tat.After(now):
		return Time{NS: tat.NS}
	case r.IsUnlimited():
		return Time{NS: now}
	}
	return r.Add(Time{NS: now}, r.convert(before.Sub(tat, Time{NS: now}), before))
}

// convert returns the time of r in which it gives as many tokens as from does in t.
func (r *Rate) convert(t Time, from *Rate) Time {
	hi, lo := from.parts(t)
	// Times r.den, in three words, and divided by from.den.
	carried, low := bits.Mul64(lo, r.den)
	high, mid := bits.Mul64(hi, r.den)
	mid, carry := bits.Add64(mid, carried, 0)
	high += carry
	high, mid, rest := divide(high, mid, from.den)
	low, rest = bits.Div64(rest, low, from.den)
	if high != 0 || mid >= r.num {
		return Time{NS: Longest}
	}
	ns, part := bits.Div64(mid, low, r.num)
	if ns >= Longest {
		return Time{NS: Longest}
	}
	up := Time{}
	if rest > 0 {
		up.Part = 1
	}
	return r.Add(Time{int64(ns), part}, up)
}

// Owed returns the tat with the tokens that from gives in ns taken on top, or as many of
// them as are left of the tokens of burst.
func (r *Rate) Owed(tat Time, now int64, ns int64, from *Rate, burst Time) Time {
	tat = Later(tat, Time{NS: now})
	return Earlier(r.Add(tat, r.convert(Time{NS: ns}, from)), Later(tat, r.Add(Time{NS: now}, burst)))
}

// parts returns t in parts of a nanosecond.
func (r *Rate) parts(t Time) (hi, lo uint64) {
	hi, lo = bits.Mul64(uint64(t.NS), r.num)
	lo, carry := bits.Add64(lo, t.Part, 0)
	return hi + carry, lo
}

// After reports whether t is later than now.
func (t Time) After(now int64) bool { return t.NS > now || t.NS == now && t.Part > 0 }

// Reaches reports whether t is u or later.
func (t Time) Reaches(u Time) bool { return t.NS > u.NS || t.NS == u.NS && t.Part >= u.Part }

// Up returns t in nanoseconds, rounded up.
func (t Time) Up() int64 {
	if t.Part > 0 {
		return t.NS + 1
	}
	return t.NS
}

// Later returns the later of two times of one rate.
func Later(t, u Time) Time {
	if t.Reaches(u) {
		return t
	}
	return u
}

// Earlier returns the earlier of two times of one rate.
func Earlier(t, u Time) Time {
	if t.Reaches(u) {
		return u
	}
	return t
}

// divide returns a number of two words divided by d, rounded down, and the rest.
func divide(hi, lo, d uint64) (quotientHi, quotientLo, rest uint64) {
	quotientHi, rest = hi/d, hi%d
	quotientLo, rest = bits.Div64(rest, lo, d)
	return quotientHi, quotientLo, rest
}
