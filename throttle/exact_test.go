package throttle_test

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/big"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/throttle"
)

// A reference is a limiter in exact arithmetic, in tokens.
type reference struct {
	rate, burst *big.Rat
	tat, now    *big.Rat // tokens since the last change of the rate
	last        time.Time
	slack       *big.Rat // by how much the limiter may differ: a nanosecond's worth of each rate it has had
	drift       *big.Rat // and as a part of all tokens that the rates have given
}

func newReference(rate float64, burst int) *reference {
	r := &reference{tat: new(big.Rat), now: new(big.Rat), slack: new(big.Rat), drift: new(big.Rat), last: time.Now()}
	r.set(rate, burst)
	return r
}

func (r *reference) set(rate float64, burst int) {
	if r.rate != nil {
		r.advance()
		r.slack.Add(r.slack, r.nanosecond())
		r.tat.Sub(r.tat, r.now)
		if r.tat.Sign() < 0 {
			r.tat.SetInt64(0)
		}
		r.now.SetInt64(0)
	}
	if burst == 0 {
		burst = int(max(1, math.Ceil(rate)))
	}
	r.rate, r.burst = new(big.Rat).SetFloat64(rate), new(big.Rat).SetInt64(int64(burst))
	r.slack.Add(r.slack, r.nanosecond())
}

func (r *reference) nanosecond() *big.Rat { return new(big.Rat).Mul(r.rate, big.NewRat(1, 1e9)) }

func (r *reference) advance() {
	elapsed := new(big.Rat).SetInt64(time.Since(r.last).Nanoseconds())
	r.last = time.Now()
	elapsed.Mul(elapsed, r.nanosecond())
	r.now.Add(r.now, elapsed)
	r.drift.Add(r.drift, elapsed)
}

// tolerance is by how much the limiter may differ, in tokens. It takes a rate as the fraction
// that it was computed from, and the reference as the float64 next to it.
func (r *reference) tolerance() *big.Rat {
	tokens := new(big.Rat).Add(r.drift, r.ahead())
	return tokens.Mul(tokens, big.NewRat(1, 1<<53)).Add(tokens, r.slack)
}

func (r *reference) ahead() *big.Rat {
	if r.tat.Cmp(r.now) < 0 {
		return new(big.Rat)
	}
	return new(big.Rat).Sub(r.tat, r.now)
}

// short returns how many tokens are missing to take n; 0 or less if none are.
func (r *reference) short(n int) *big.Rat {
	short := r.ahead()
	short.Add(short, new(big.Rat).SetInt64(int64(n)))
	return short.Sub(short, r.burst)
}

func (r *reference) take(n int) {
	r.tat.Add(r.now, r.ahead())
	r.tat.Add(r.tat, new(big.Rat).SetInt64(int64(n)))
}

func (r *reference) refund(n int) {
	by := new(big.Rat).SetInt64(int64(n))
	if ahead := r.ahead(); by.Cmp(ahead) > 0 {
		by = ahead
	}
	r.tat.Sub(r.tat, by)
}

// kept is the shortest time that the longest debt can take to refill after a change of
// the rate.
const kept = 54 * 365 * 24 * time.Hour

// FuzzExactness runs a limiter beside the reference. The operations are 9 bytes
// each: a kind, and a number.
func FuzzExactness(f *testing.F) {
	ops := func(numbers ...uint64) (b []byte) {
		for i := 0; i < len(numbers); i += 2 {
			b = append(b, byte(numbers[i]))
			b = binary.LittleEndian.AppendUint64(b, numbers[i+1])
		}
		return b
	}
	const take, sleep, refund, set = 0, 1, 2, 3
	const second, year = uint64(time.Second), 365 * 24 * uint64(time.Hour)
	takeOf := func(n uint64) uint64 { return n << 1 }
	rateOf := math.Float64bits
	const month = 1 / (30.0 * 24 * 3600)

	takes := ops(take, takeOf(1), take, takeOf(1), sleep, second/3, take, takeOf(1), sleep, 1, take, takeOf(1), take, takeOf(5), refund, 1, take, takeOf(2))
	for _, rate := range []float64{1, 3, 1e9, 1.1e9, 1e12, month, 1e5 / 3, math.Pi} {
		f.Add(rate, uint32(5), takes)
	}
	// A second's worth at once, at 1e12 and at less than one a second.
	f.Add(1e12, uint32(0), ops(take, takeOf(1e12), take, takeOf(1), sleep, 1, take, takeOf(1000), take, takeOf(1)))
	f.Add(0.1, uint32(0), ops(take, takeOf(1), take, takeOf(1), sleep, 10*second-1, take, takeOf(1), sleep, 1, take, takeOf(1)))
	// Changes of the rate: by far, in the middle of a token, with a burst overdrawn.
	f.Add(7.0, uint32(0), ops(take, takeOf(3), set, rateOf(1e10), take, takeOf(9), set, rateOf(0.5), take, takeOf(1), sleep, 3*year, take, takeOf(1)))
	f.Add(1e12, uint32(1e9), ops(take, takeOf(1e9), set, rateOf(month), take, takeOf(1), sleep, year, take, takeOf(1), set, rateOf(1e12), sleep, 1, take, takeOf(5)))
	f.Add(3.0, uint32(9), ops(take, takeOf(9), sleep, second/2, set, rateOf(2.5), sleep, second/2, set, rateOf(3.5), take, takeOf(1), take, takeOf(2)))
	// Refunds: more than was taken, while something is owed in part, and of nothing.
	f.Add(2.0, uint32(4), ops(take, takeOf(4), sleep, second/3, refund, 999, take, takeOf(4), take, takeOf(1), refund, 0, sleep, second/5, refund, 1, take, takeOf(2)))
	// The far future.
	f.Add(1.0, uint32(100), ops(take, takeOf(60), sleep, 15*year, take, takeOf(60), take, takeOf(41), sleep, 18*year, sleep, 18*year, sleep, 18*year, sleep, 18*year, take, takeOf(100), take, takeOf(1)))
	f.Add(1e12, uint32(100), ops(take, takeOf(100), sleep, year/7, take, takeOf(100), sleep, year/7, take, takeOf(100), take, takeOf(1), set, rateOf(1e9), sleep, year, take, takeOf(1)))
	f.Add(2*month, uint32(50), ops(take, takeOf(50), sleep, 18*year, sleep, 18*year, take, takeOf(30), sleep, 18*year, sleep, 18*year, set, rateOf(month), take, takeOf(21), take, takeOf(20)))
	f.Fuzz(func(t *testing.T, rate float64, burst uint32, script []byte) {
		cfg := throttle.Config{Rate: rate, Burst: int(burst)}
		if cfg.Validate() != nil {
			t.Skip()
		}
		synctest.Test(t, func(t *testing.T) {
			start := time.Now()
			l := throttle.New(cfg)
			r := newReference(rate, cfg.Burst)
			for ; len(script) >= 9; script = script[9:] {
				number := binary.LittleEndian.Uint64(script[1:])
				switch script[0] % 4 {
				case 0:
					compareTake(t, l, r, int(number>>1>>(number>>58)))
				case 1:
					if pause := time.Duration(number % (1 << 59)); time.Since(start)+pause < 200*365*24*time.Hour {
						time.Sleep(pause >> (number >> 59))
					}
				case 2:
					n := int(number % 1000)
					r.advance()
					r.refund(n)
					l.Refund(n)
				case 3:
					rate := math.Float64frombits(number)
					if setLimit(l, throttle.Limit{Rate: rate, Burst: int(number % 99)}) == nil {
						r.set(rate, int(number%99))
					}
					if debt := new(big.Rat).Quo(r.ahead(), r.nanosecond()); debt.Cmp(big.NewRat(int64(kept), 1)) > 0 {
						require.GreaterOrEqual(t, l.Peek().ResetAfter, kept)
						return // it does not know how much more
					}
				}
			}
		})
	})
}

func compareTake(t *testing.T, l *throttle.Limiter, r *reference, n int) {
	r.advance()
	short, slack := r.short(n), r.tolerance()
	d := l.Take(n)
	tooCostly := r.burst.Cmp(new(big.Rat).SetInt64(int64(n))) < 0
	switch {
	case n == 0:
		require.True(t, d.OK)
	case tooCostly:
		require.False(t, d.OK)
		require.Equal(t, time.Duration(math.MaxInt64), d.RetryAfter)
	default:
		if new(big.Rat).Abs(short).Cmp(slack) > 0 {
			require.Equal(t, short.Sign() <= 0, d.OK, "%v tokens short, slack %v", short.FloatString(12), slack.FloatString(12))
		}
		if !d.OK {
			require.Positive(t, d.RetryAfter)
			wait := new(big.Rat).Quo(short, r.nanosecond())
			slack := new(big.Rat).Quo(slack, r.nanosecond())
			slack.Add(slack, big.NewRat(1, 1)) // it is rounded up
			off := wait.Sub(wait, new(big.Rat).SetInt64(int64(d.RetryAfter)))
			if d.RetryAfter != math.MaxInt64 {
				require.LessOrEqual(t, off.Abs(off).Cmp(slack), 0, "RetryAfter %v is off by %vns", d.RetryAfter, off.FloatString(3))
			}
		}
		if d.OK {
			r.take(n)
		}
	}
	left := new(big.Rat).Sub(r.burst, r.ahead())
	left.Sub(left, new(big.Rat).SetInt64(int64(d.Remaining)))
	if d.Remaining > 0 { // a smaller burst can be overdrawn
		require.GreaterOrEqual(t, new(big.Rat).Add(left, slack).Sign(), 0, "Remaining %d", d.Remaining)
	}
	require.LessOrEqual(t, left.Cmp(new(big.Rat).Add(slack, big.NewRat(1, 1))), 0, "Remaining %d", d.Remaining)
}

func TestRandomOperationsAreExact(t *testing.T) {
	rates := []float64{1e-6, 1 / 3.0, 1, 3, 10, 1000, 1e6 / 7, 1e9, 1.5e9, 1e12}
	for _, rate := range rates {
		t.Run(fmt.Sprint(rate), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				random := rand.New(rand.NewPCG(1, math.Float64bits(rate)))
				burst := 1 + random.IntN(50)
				l := throttle.New(throttle.Config{Rate: rate, Burst: burst})
				r := newReference(rate, burst)
				for range 2000 {
					switch random.IntN(8) {
					case 0:
						n := random.IntN(burst)
						r.advance()
						r.refund(n)
						l.Refund(n)
					case 1, 2, 3: // about the time of a few tokens
						time.Sleep(time.Duration(min(random.ExpFloat64()*2e9/rate, 1e15)))
					default:
						compareTake(t, l, r, 1+random.IntN(1+burst/2))
					}
				}
			})
		})
	}
}

func TestCenturiesAtOnce(t *testing.T) {
	for _, rate := range []float64{1e-6, 1, 3.7, 1e9, 1e12} {
		synctest.Test(t, func(t *testing.T) {
			l := throttle.New(throttle.Config{Rate: rate, Burst: 100})
			g := throttle.NewGroup(throttle.GroupConfig[int]{Config: throttle.Config{Rate: rate, Burst: 100}})
			require.True(t, l.Take(100).OK)
			require.True(t, g.Take(1, 100).OK)
			time.Sleep(250 * 365 * 24 * time.Hour)
			require.Equal(t, 100, l.Peek().Remaining)
			require.Equal(t, 100, g.Peek(1).Remaining)
		})
	}
}

func TestDebtOutlivesTheCountOfTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const year = 365 * 24 * time.Hour
		l := throttle.New(throttle.Config{Rate: every(10 * year), Burst: 3})
		for round := range 20 {
			time.Sleep(10*year + 100) // 73 years pass with a debt of 1 to 3 tokens
			l.Take(3)
			l.Take(2)
			l.Take(1)
			require.Zero(t, l.Peek().Remaining)
			require.InDelta(t, 10*year, l.Peek().RetryAfter, 1e4, "of 3e17: what a float64 can say of the rate; round %d", round)
		}
	})
}
