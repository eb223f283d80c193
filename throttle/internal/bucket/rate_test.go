package bucket_test

import (
	"fmt"
	"math"
	"math/big"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/throttle/internal/bucket"
)

const second = int64(time.Second)

func of(t testing.TB, perSecond float64) *bucket.Rate {
	t.Helper()
	r, ok := bucket.NewRate(perSecond)
	require.True(t, ok)
	return &r
}

// fraction returns what a rate means, in arithmetic without bounds: the first convergent
// of its continued fraction that rounds to it.
func fraction(perSecond float64) *big.Rat {
	rest := new(big.Rat).SetFloat64(perSecond)
	lastNum, lastDen, num, den := big.NewInt(0), big.NewInt(1), big.NewInt(1), big.NewInt(0)
	for {
		term := new(big.Int).Quo(rest.Num(), rest.Denom())
		lastNum, num = num, new(big.Int).Add(new(big.Int).Mul(term, num), lastNum)
		lastDen, den = den, new(big.Int).Add(new(big.Int).Mul(term, den), lastDen)
		found := new(big.Rat).SetFrac(num, den)
		if f, _ := found.Float64(); f == perSecond {
			return found
		}
		rest.Inv(rest.Sub(rest, new(big.Rat).SetInt(term)))
	}
}

func ceil(r *big.Rat) *big.Int {
	return new(big.Int).Neg(new(big.Int).Div(new(big.Int).Neg(r.Num()), r.Denom()))
}

// nanoseconds returns the time of tokens.
func nanoseconds(tokens, rate *big.Rat) *big.Rat {
	ns := new(big.Rat).Mul(tokens, big.NewRat(1e9, 1))
	return ns.Quo(ns, rate)
}

func TestARateIsTheFractionThatItWasComputedFrom(t *testing.T) {
	for _, c := range []struct {
		perSecond float64
		n         int
		ns        int64 // of n tokens, exactly
	}{
		{1, 1, second}, {1.0 / 60, 1, 60 * second}, {7.0 / 60, 7, 60 * second}, {1000.0 / 3600, 1000, 3600 * second},
		{1.0 / 86400, 1, 86400 * second}, {0.1, 3, 30 * second}, {1.0 / 3, 1e6, 3e6 * second}, {2.7, 27, 10 * second},
		{1e12, 1000, 1}, {1e12, 1e15, 1000 * second}, {1e9 / 3, 1, 3}, {3e9, 3, 1}, {1e9 / float64(bucket.Longest/54), 1, bucket.Longest / 54},
	} {
		r := of(t, c.perSecond)
		require.Equal(t, bucket.Time{NS: c.ns}, r.Of(c.n), "%d at %v", c.n, c.perSecond)
		require.Equal(t, c.n, r.Tokens(r.Of(c.n)))
		require.Less(t, r.Tokens(bucket.Time{NS: c.ns - 1}), c.n, "%d at %v", c.n, c.perSecond)
	}
}

func TestRatesThatAreNone(t *testing.T) {
	for _, perSecond := range []float64{0, -1, math.NaN(), math.Inf(1), 1.1e12, 1e-10, 1e9 / float64(bucket.Longest), math.SmallestNonzeroFloat64} {
		_, ok := bucket.NewRate(perSecond)
		require.False(t, ok, perSecond)
	}
	require.Equal(t, bucket.Time{NS: bucket.Longest}, of(t, 1e-9).Of(math.MaxInt))
	require.Equal(t, bucket.Time{NS: bucket.Longest}, of(t, 1e9/2.1).Of(math.MaxInt), "more nanoseconds than a word has")
	for _, ns := range []int64{12e15, bucket.Longest} {
		require.Equal(t, math.MaxInt, of(t, bucket.MaxRate).Tokens(bucket.Time{NS: ns}))
	}
	r := bucket.Unlimited
	require.True(t, r.IsUnlimited())
	require.Zero(t, r.Of(math.MaxInt))
	require.Equal(t, math.MaxInt, r.Tokens(bucket.Time{}))
}

// Ten tokens at ten a second: half a second ahead of now is half of the burst.
func TestDecisions(t *testing.T) {
	const now, tenth = 1000 * second, second / 10
	r := of(t, 10)
	at := func(ns int64) bucket.Time { return bucket.Time{NS: now + ns} }
	for _, c := range []struct {
		name      string
		got, want bucket.Time
	}{
		{"all of a full burst is there", r.Due(at(0), r.Of(10), r.Of(10)), at(0)},
		{"one more than is left", r.Due(at(5*tenth), r.Of(6), r.Of(10)), at(tenth)},
		{"what a level may not spend", r.Due(at(0), r.Of(6), r.Of(5)), at(tenth)},
		{"a pause gives no more than a burst", r.Pay(at(-3600*second), now, r.Of(1)), at(tenth)},
		{"tokens are taken on top of others", r.Pay(at(5*tenth), now, r.Of(2)), at(7 * tenth)},
		{"tokens come back", r.Back(at(5*tenth), now, r.Of(2)), at(3 * tenth)},
		{"but no more than fill the burst", r.Back(at(5*tenth), now, r.Of(9)), at(0)},
		{"nor into the past", r.Back(at(-5*tenth), now, r.Of(9)), at(-5 * tenth)},
		{"half the rate, as many tokens", of(t, 5).Follow(at(5*tenth), now, r), at(10 * tenth)},
		{"as many tokens within a nanosecond", of(t, 1e12).Follow(at(5*second/2), now, of(t, 1)), bucket.Time{NS: now, Part: 2.5e9}},
		{"a full burst stays one", of(t, 5).Follow(at(-5*tenth), now, r), at(-5 * tenth)},
		{"no debt is longer than the longest", of(t, 1e-9).Follow(at(3600*second), now, of(t, 1e9)), at(bucket.Longest)},
		{"what was owed before, after a pause", r.Owed(at(-3600*second), now, 2*second, of(t, 1), r.Of(10)), at(2 * tenth)},
		{"as many tokens as there ever are", of(t, 1e-9).Follow(at(bucket.Longest), now, of(t, bucket.MaxRate)), at(bucket.Longest)},
		{"what was owed before", r.Owed(at(0), now, 2*second, of(t, 1), r.Of(10)), at(2 * tenth)},
		{"on top of what is owed", r.Owed(at(5*tenth), now, 2*second, of(t, 1), r.Of(10)), at(7 * tenth)},
		{"as far as there is a burst", r.Owed(at(5*tenth), now, 20*second, of(t, 1), r.Of(10)), at(10 * tenth)},
	} {
		require.Equal(t, c.want, c.got, c.name)
	}
	require.True(t, at(1).After(now))
	require.False(t, at(0).After(now))
	require.True(t, bucket.Time{NS: now, Part: 1}.After(now))
	require.EqualValues(t, now+1, bucket.Time{NS: now, Part: 1}.Up())
	times := []bucket.Time{{NS: 1}, {NS: 1, Part: 5}, {NS: 1, Part: 6}, {NS: 2}, {NS: 2, Part: 5}} // in their order
	for i, a := range times {
		for j, b := range times {
			require.Equal(t, i >= j, a.Reaches(b), "%v, %v", a, b)
		}
	}
}

// playRate compares the times of tokens with arithmetic that has no bounds.
func playRate(t *testing.T, perSecond, other float64, n uint32, ns uint64) {
	r, ok := bucket.NewRate(perSecond)
	from, ok2 := bucket.NewRate(other)
	if !ok || !ok2 {
		return
	}
	rate, tokens := fraction(perSecond), new(big.Rat).SetInt64(int64(n))
	exact := nanoseconds(tokens, rate)
	if ceil(exact).Cmp(big.NewInt(bucket.Longest)) >= 0 {
		require.EqualValues(t, bucket.Longest, r.Of(int(n)).NS)
		return
	}
	require.Equal(t, ceil(exact).Int64(), r.Of(int(n)).Up())
	require.EqualValues(t, n, r.Tokens(r.Of(int(n))), "whole tokens have no remainder")
	sum := bucket.Time{}
	for range n % 1000 {
		sum = r.Add(sum, r.Of(1))
	}
	require.Equal(t, r.Of(int(n%1000)), sum)
	require.Zero(t, r.Sub(sum, r.Of(int(n%1000))))

	ns %= bucket.Longest
	given := new(big.Rat).Mul(new(big.Rat).SetFrac(new(big.Int).SetUint64(ns), big.NewInt(1e9)), rate)
	if whole := new(big.Int).Quo(given.Num(), given.Denom()); whole.IsInt64() {
		require.Equal(t, whole.Int64(), int64(r.Tokens(bucket.Time{NS: int64(ns)})))
	}
	const now = 12345
	owed := new(big.Rat).Mul(new(big.Rat).SetFrac(new(big.Int).SetUint64(ns), big.NewInt(1e9)), fraction(other))
	want, got := ceil(nanoseconds(owed, rate)), r.Follow(bucket.Time{NS: now + int64(ns)}, now, &from).Up()-now
	if want.Cmp(big.NewInt(bucket.Longest)) >= 0 {
		require.EqualValues(t, bucket.Longest, got)
		return
	}
	require.GreaterOrEqual(t, got, want.Int64(), "no token is given")
	require.LessOrEqual(t, got, want.Int64()+1, "a part at most is taken")
}

func TestTimesAreExact(t *testing.T) {
	for seed := range uint64(20_000) {
		random := rand.New(rand.NewPCG(seed, 1))
		perSecond := func() float64 {
			switch random.IntN(3) {
			case 0:
				return float64(1+random.IntN(10_000)) / float64(1+random.IntN(100_000))
			case 1:
				return 1e9 / float64(1+random.IntN(1e15))
			}
			return math.Exp(math.Log(1e-9) + random.Float64()*math.Log(1e21))
		}
		playRate(t, perSecond(), perSecond(), uint32(random.Uint64()>>(32+random.IntN(32))), random.Uint64()>>(2+random.IntN(60)))
	}
}

// The float64s beside a simple fraction need one whose parts float64 division rounds.
func TestTheNeighborsOfAFractionAreRates(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 100_000 {
		simple := float64(1+rng.IntN(100)) / float64(1+rng.Int64N(1<<rng.IntN(30)))
		for _, perSecond := range []float64{math.Nextafter(simple, 0), math.Nextafter(simple, 1e12)} {
			r := of(t, perSecond)
			token := new(big.Float).SetRat(new(big.Rat).Quo(big.NewRat(1e9, 1), new(big.Rat).SetFloat64(perSecond)))
			ns, _ := token.Int64()
			require.InDelta(t, ns, r.Of(1).NS, 1, "%v", perSecond)
		}
	}
}

func FuzzRate(f *testing.F) {
	f.Add(1e12, 1e-9, uint32(5), uint64(1))
	f.Add(1+0x1p-52, 1/(1e9+0x1p-22), uint32(math.MaxUint32), uint64(1)<<60)
	f.Add(0.3, 7.0/60, uint32(21), uint64(3600*second))
	f.Fuzz(playRate)
}

func BenchmarkNewRate(b *testing.B) {
	for _, perSecond := range []float64{100, 7.0 / 60, math.Pi * 1e-8} {
		b.Run(fmt.Sprint(perSecond), func(b *testing.B) {
			for b.Loop() {
				bucket.NewRate(perSecond)
			}
		})
	}
}
