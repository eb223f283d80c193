package throttle_test

import (
	"context"
	"encoding/binary"
	"math/big"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/throttle"
)

// A ledger judges what a limiter has admitted, in exact arithmetic. A call that waits takes
// its tokens at the moment at which they are there, which is up to a nanosecond before a clock
// that ticks in nanoseconds can tell.
type ledger struct {
	rate    *big.Rat
	burst   int
	changes int // of the rate: each may take a part of a token
	start   time.Time
	now     *big.Rat // in nanoseconds since start
	debt    *big.Rat // tokens that are missing in the burst
	given   *big.Rat // tokens that the rate has given since the beginning
	spent   int
	least   *big.Rat // of what was spent before an interval, less what was given by then
	waiting []*patron
}

type patron struct {
	n, level int
	cancel   context.CancelFunc
	went     time.Time
}

// at returns a time in nanoseconds since start.
func (b *ledger) at(t time.Time) *big.Rat { return big.NewRat(int64(t.Sub(b.start)), 1) }

func (b *ledger) advance(then *big.Rat) {
	gives := new(big.Rat).Sub(then, b.now)
	gives.Mul(gives, b.rate)
	b.now = then
	b.given.Add(b.given, gives)
	if b.debt.Sub(b.debt, gives); b.debt.Sign() < 0 {
		b.debt.SetInt64(0)
	}
}

// over returns by how many tokens n more would be too many for a level.
func (b *ledger) over(n, level int) *big.Rat {
	most := b.burst
	if level == 1 {
		most = room(b.burst, 0.3)
	}
	return new(big.Rat).Add(b.debt, big.NewRat(int64(n-most), 1))
}

// short reports whether that many tokens too many are a reason to refuse a call: all that
// are, and a part of one after changes of the rate.
func (b *ledger) short(over *big.Rat) bool {
	if b.changes == 0 {
		return over.Sign() > 0
	}
	return over.Cmp(big.NewRat(-1, 1)) > 0
}

// admit requires that n tokens were there, and that no interval that ends now has seen more
// than the burst and what the rate gave in it.
func (b *ledger) admit(t *testing.T, n, level int) {
	t.Helper()
	require.LessOrEqual(t, b.over(n, level).Sign(), 0, "over the limit by %v tokens", b.over(n, level))
	b.debt.Add(b.debt, big.NewRat(int64(n), 1))
	if begins := new(big.Rat).Sub(big.NewRat(int64(b.spent), 1), b.given); b.least == nil || begins.Cmp(b.least) < 0 {
		b.least = begins
	}
	b.spent += n
	seen := new(big.Rat).Sub(big.NewRat(int64(b.spent), 1), b.given)
	require.LessOrEqual(t, seen.Sub(seen, b.least).Cmp(big.NewRat(int64(b.burst), 1)), 0, "an interval has seen too many")
}

// queued returns the tokens for which calls of a level and those above it wait.
func (b *ledger) queued(level int) (n int) {
	for _, p := range b.waiting {
		if p.level <= level {
			n += p.n
		}
	}
	return n
}

// playDay has a limiter decide on calls of all kinds for up to a day.
func playDay(t *testing.T, choose interface{ IntN(n int) int }, events int) {
	type cost struct{}
	pick := func() (rate float64, exact *big.Rat, burst int) {
		p, q := []int{1, 7, 1000, 1 + choose.IntN(50_000)}[choose.IntN(4)], []int{1, 60, 3600, 1 + choose.IntN(50_000)}[choose.IntN(4)]
		if choose.IntN(3) == 0 {
			p *= 1e7
		}
		return float64(p) / float64(q), big.NewRat(int64(p), int64(q)*1e9), 6 + choose.IntN(20)
	}
	rate, exact, burst := pick()
	l := throttle.New(throttle.Config{
		Rate: rate, Burst: burst, MaxWait: -1, Levels: 2, Reserve: []float64{0.3}, Priority: levelOf,
		Cost: func(ctx context.Context) int { return ctx.Value(cost{}).(int) },
	})
	b := &ledger{rate: exact, burst: burst, start: time.Now(), now: new(big.Rat), debt: new(big.Rat), given: new(big.Rat)}
	var mu sync.Mutex
	var went []*patron
	// settle judges the calls that have got their tokens since.
	settle := func() {
		synctest.Wait()
		mu.Lock()
		defer mu.Unlock()
		slices.SortStableFunc(went, func(p, q *patron) int {
			if c := p.went.Compare(q.went); c != 0 {
				return c
			}
			return slices.Index(b.waiting, p) - slices.Index(b.waiting, q)
		})
		for _, p := range went {
			require.Same(t, b.waiting[0], p, "in the order of levels and of arrival")
			if over := b.over(p.n, p.level); over.Sign() > 0 {
				b.advance(new(big.Rat).Add(b.now, over.Quo(over, b.rate)))
			}
			early := new(big.Rat).Sub(b.at(p.went), b.now)
			require.GreaterOrEqual(t, early.Sign(), 0, "it went %v ns too soon", early)
			token := new(big.Rat)
			if b.changes > 0 {
				token.Inv(b.rate)
			}
			require.Negative(t, early.Cmp(token.Add(token, big.NewRat(1, 1))), "it went %v ns too late", early)
			b.admit(t, p.n, p.level)
			b.waiting = b.waiting[1:]
		}
		went = nil
		b.advance(b.at(time.Now()))
		if len(b.waiting) > 0 {
			require.True(t, b.short(b.over(b.waiting[0].n, b.waiting[0].level)), "the first could go")
		}
		require.Equal(t, len(b.waiting), l.Stats().Queued)
	}
	end := time.Now().Add(24 * time.Hour)
	for range events {
		token := time.Duration(max(1, min(1e9/rate, 3.6e12)))
		pause := []time.Duration{0, 1, token * time.Duration(choose.IntN(4)), token * time.Duration(choose.IntN(1000)) / 250, time.Duration(choose.IntN(60_000)) * time.Millisecond * 10}[choose.IntN(5)]
		if time.Now().Add(pause).After(end) {
			break
		}
		time.Sleep(pause)
		settle()
		n, level := 1+choose.IntN(4), choose.IntN(2)
		switch choose.IntN(10) {
		case 0: // gives up
			if len(b.waiting) > 0 {
				i := choose.IntN(len(b.waiting))
				b.waiting[i].cancel()
				b.waiting = slices.Concat(b.waiting[:i], b.waiting[i+1:])
			}
		case 1:
			if n = min(n, b.spent); n > 0 {
				l.Refund(n)
				b.spent -= n
				if b.debt.Sub(b.debt, big.NewRat(int64(n), 1)); b.debt.Sign() < 0 {
					b.debt.SetInt64(0)
				}
			}
		case 2:
			var limit throttle.Limit
			limit.Rate, exact, limit.Burst = pick()
			if choose.IntN(3) == 0 {
				limit.Rate, exact = rate, b.rate
			} else {
				b.changes++
			}
			require.NoError(t, setLimit(l, limit))
			rate, b.rate, b.burst = limit.Rate, exact, limit.Burst
		case 3, 4, 5:
			p := &patron{n: n, level: level}
			var ctx context.Context
			ctx, p.cancel = context.WithCancel(context.WithValue(at(t.Context(), level), cost{}, n))
			defer p.cancel()
			i := len(b.waiting)
			for level == 0 && i > 0 && b.waiting[i-1].level == 1 {
				i--
			}
			b.waiting = slices.Insert(b.waiting, i, p)
			go func() {
				if l.Wait(ctx) == nil {
					p.went = time.Now()
					mu.Lock()
					defer mu.Unlock()
					went = append(went, p)
				}
			}()
		default:
			over := b.over(b.queued(1)+n, 1)
			if d := l.Take(n); d.OK {
				b.admit(t, n, 1)
			} else {
				require.True(t, b.short(over), "refused: %v tokens over", over)
			}
		}
		settle()
	}
	for _, p := range slices.Backward(b.waiting) { // or one that has not been told moves up, and goes
		p.cancel()
	}
	b.waiting = nil
	settle()
}

// Whatever is asked of a limiter in a day, no interval sees more than the burst and what the
// rate gives in it, and no call is kept waiting or refused that had its tokens. That is exact
// until the rate changes, and within a token from then on.
func TestADayIsExact(t *testing.T) {
	for seed := range uint64(5000) {
		synctest.Test(t, func(t *testing.T) { playDay(t, rand.New(rand.NewPCG(seed, 7)), 60) })
		if t.Failed() {
			t.Fatal("seed ", seed)
		}
	}
}

// FuzzDay plays a script: two bytes for each choice of playDay.
func FuzzDay(f *testing.F) {
	for seed := range uint64(4) {
		random := rand.New(rand.NewPCG(seed, 8))
		var b []byte
		for range 300 {
			b = binary.LittleEndian.AppendUint16(b, uint16(random.Uint32()))
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		synctest.Test(t, func(t *testing.T) { playDay(t, (*script)(&b), min(len(b)/6+1, 200)) })
	})
}
