package throttle_test

import (
	"context"
	"encoding/binary"
	"flag"
	"math"
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

// A script makes the choices of a model: two bytes for each.
type script []byte

func (s *script) IntN(n int) int {
	if len(*s) < 2 {
		return 0
	}
	choice := binary.LittleEndian.Uint16(*s)
	*s = (*s)[2:]
	return int(choice) % n
}

// scripts adds random scripts to a fuzz target.
func scripts(f *testing.F) {
	for seed := range uint64(4) {
		random := rand.New(rand.NewPCG(seed, 8))
		var b []byte
		for range 300 {
			b = binary.LittleEndian.AppendUint16(b, uint16(random.Uint32()))
		}
		f.Add(b)
	}
}

// seeds are those of a model: n, a fortieth of them with -short, or as many as -seeds says, of a range of their own.
var (
	moreSeeds = flag.Int("seeds", 0, "seeds of each model")
	firstSeed = flag.Int("first", 0, "first seed of each model")
)

func play(t *testing.T, n int, stream uint64, f func(t *testing.T, choose interface{ IntN(n int) int })) {
	switch {
	case *moreSeeds > 0:
		n = *moreSeeds
	case testing.Short():
		n = max(4, n/40)
	}
	for seed := range uint64(n) {
		seed += uint64(*firstSeed)
		synctest.Test(t, func(t *testing.T) { f(t, rand.New(rand.NewPCG(seed, stream))) })
		if t.Failed() {
			t.Fatal("seed ", seed)
		}
	}
}

// A ledger judges what a limiter has admitted, in exact arithmetic. A call that waits takes
// its tokens at the moment at which they are there.
type ledger struct {
	rate    *big.Rat
	burst   int
	changes int // of the rate: each may take a part of a token
	start   time.Time
	now     *big.Rat // in nanoseconds since start
	debt    *big.Rat // tokens that are missing in the burst
	given   *big.Rat // tokens that the rate has given since the beginning
	spent   int      // by calls, less what was given back
	all     int      // spent and charged, less what was given back
	forgave int
	least   *big.Rat // of what was spent before an interval, less what was given by then
	waiting []*patron
}

type patron struct {
	n      int
	cancel context.CancelFunc
	went   time.Time
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

// over returns by how many tokens n more would be too many.
func (b *ledger) over(n int) *big.Rat {
	return new(big.Rat).Add(b.debt, big.NewRat(int64(n-b.burst), 1))
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
func (b *ledger) admit(t *testing.T, n int) {
	t.Helper()
	require.LessOrEqual(t, b.over(n).Sign(), 0, "over the limit by %v tokens", b.over(n))
	b.debt.Add(b.debt, big.NewRat(int64(n), 1))
	if begins := new(big.Rat).Sub(big.NewRat(int64(b.spent), 1), b.given); b.least == nil || begins.Cmp(b.least) < 0 {
		b.least = begins
	}
	b.spent, b.all = b.spent+n, b.all+n
	seen := new(big.Rat).Sub(big.NewRat(int64(b.spent), 1), b.given)
	require.LessOrEqual(t, seen.Sub(seen, b.least).Cmp(big.NewRat(int64(b.burst), 1)), 0, "an interval has seen too many")
}

// settle corrects n tokens to used.
func (b *ledger) settle(n, used int) {
	more := used - n
	if more < 0 {
		b.spent += more
	} else if b.changes == 0 { // what is forgiven is known exactly
		most := new(big.Rat).Sub(big.NewRat(int64(2*b.burst), 1), b.debt)
		whole := max(0, int(new(big.Int).Quo(most.Num(), most.Denom()).Int64()))
		if more > whole {
			b.forgave, more = b.forgave+more-whole, whole
		}
	}
	b.all += more
	if b.debt.Add(b.debt, big.NewRat(int64(more), 1)); b.debt.Sign() < 0 {
		b.debt.SetInt64(0)
	}
}

// queued returns the tokens for which calls wait.
func (b *ledger) queued() (n int) {
	for _, p := range b.waiting {
		n += p.n
	}
	return n
}

// playDay has a limiter decide on calls of all kinds for up to a day.
func playDay(t *testing.T, choose interface{ IntN(n int) int }, events int) {
	pick := func() (rate float64, exact *big.Rat, burst int) {
		p, q := []int{1, 7, 1000, 1 + choose.IntN(50_000)}[choose.IntN(4)], []int{1, 60, 3600,
			1 + choose.IntN(50_000)}[choose.IntN(4)]
		if choose.IntN(3) == 0 {
			p *= 1e4
		}
		token := (int64(q)*1e9 + int64(p) - 1) / int64(p) // the time of a token is rounded up
		return float64(p) / float64(q), big.NewRat(1, token), 6 + choose.IntN(20)
	}
	rate, exact, burst := pick()
	l := throttle.New(throttle.Config{Rate: rate, Burst: burst, MaxWait: -1, Cost: cost})
	b := &ledger{rate: exact, burst: burst, start: time.Now(), now: new(big.Rat), debt: new(big.Rat), given: new(big.Rat)}
	var mu sync.Mutex
	var went []*patron
	// judge judges the calls that have got their tokens since.
	judge := func() {
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
			require.Same(t, b.waiting[0], p, "in the order of arrival")
			if over := b.over(p.n); over.Sign() > 0 {
				b.advance(new(big.Rat).Add(b.now, over.Quo(over, b.rate)))
			}
			early := new(big.Rat).Sub(b.at(p.went), b.now)
			require.GreaterOrEqual(t, early.Sign(), 0, "it went %v ns too soon", early)
			token := new(big.Rat)
			if b.changes > 0 {
				token.Inv(b.rate)
			}
			require.Negative(t, early.Cmp(token.Add(token, big.NewRat(1, 1))), "it went %v ns too late", early)
			b.admit(t, p.n)
			b.waiting = b.waiting[1:]
		}
		went = nil
		b.advance(b.at(time.Now()))
		if len(b.waiting) > 0 {
			require.True(t, b.short(b.over(b.waiting[0].n)), "the first could go")
		}
		s := l.Stats()
		require.Equal(t, len(b.waiting), s.Queued)
		if b.changes == 0 {
			require.EqualValues(t, b.all, s.Spent-s.Refunded)
			require.EqualValues(t, b.forgave, s.Forgiven)
		}
	}
	var loans []loan
	end := time.Now().Add(24 * time.Hour)
	for range events {
		token := time.Duration(max(1, min(1e9/rate, 3.6e12)))
		pause := []time.Duration{
			0, 1, token * time.Duration(choose.IntN(4)), token * time.Duration(choose.IntN(1000)) / 250,
			time.Duration(choose.IntN(60_000)) * time.Millisecond * 10,
		}[choose.IntN(5)]
		if time.Now().Add(pause).After(end) {
			break
		}
		time.Sleep(pause)
		judge()
		n := 1 + choose.IntN(4)
		switch choose.IntN(10) {
		case 0: // gives up
			if len(b.waiting) > 0 {
				i := choose.IntN(len(b.waiting))
				b.waiting[i].cancel()
				b.waiting = slices.Concat(b.waiting[:i], b.waiting[i+1:])
			}
		case 1, 2:
			if len(loans) > 0 {
				i := choose.IntN(len(loans))
				used := choose.IntN(2*loans[i].n + 3)
				if choose.IntN(8) == 0 {
					used += 3 * b.burst
				}
				if b.changes > 0 {
					used = min(used, loans[i].n) // what is forgiven is a matter of a part of a token
				}
				loans[i].Settle(used)
				b.settle(loans[i].n, used)
				loans[i].Settle(choose.IntN(99)) // once
				loans = slices.Concat(loans[:i], loans[i+1:])
			}
		case 3:
			if choose.IntN(4) > 0 {
				continue
			}
			next, nextExact, nextBurst := rate, b.rate, 6+choose.IntN(20)
			if choose.IntN(3) > 0 {
				next, nextExact, nextBurst = pick()
				b.changes++
			}
			switch choose.IntN(4) { // a limit that admits nothing or everything in between changes nothing
			case 0:
				require.NoError(t, l.Update(func(c *throttle.Config) { c.Burst = throttle.None }))
			case 1:
				if len(b.waiting) == 0 {
					require.NoError(t, l.Update(func(c *throttle.Config) { c.Rate, c.Burst = throttle.Unlimited, 0 }))
				}
			}
			require.NoError(t, l.Update(func(c *throttle.Config) { c.Rate, c.Burst = next, nextBurst }))
			rate, b.rate, b.burst = next, nextExact, nextBurst
		case 4, 5, 6:
			p := &patron{n: n}
			var ctx context.Context
			ctx, p.cancel = context.WithCancel(of(n))
			defer p.cancel()
			b.waiting = append(b.waiting, p)
			go func() {
				if l.Wait(ctx) == nil {
					p.went = time.Now()
					mu.Lock()
					defer mu.Unlock()
					went = append(went, p)
				}
			}()
		default:
			over := b.over(b.queued() + n)
			wait := new(big.Rat).Quo(over, b.rate) // in nanoseconds
			if wait.Sign() > 0 && wait.Cmp(big.NewRat(2, 1)) < 0 || b.changes > 0 && b.short(over) && over.Sign() <= 0 {
				continue // it may be that it waits for a nanosecond
			}
			now, cancel := context.WithTimeout(t.Context(), 1)
			r, err := l.Reserve(now, n)
			cancel()
			if err == nil {
				b.admit(t, n)
				loans = append(loans, loan{Reservation: r, n: n})
			} else {
				require.Equal(t, throttle.DeadlineTooClose, reason(err))
				require.True(t, b.short(over), "refused: %v tokens over", over)
			}
		}
		judge()
	}
	for _, p := range slices.Backward(b.waiting) { // or one that has not been told moves up, and goes
		p.cancel()
	}
	b.waiting = nil
	judge()
	if b.changes > 0 {
		return
	}
	// The balance is exact.
	missing := new(big.Rat).Set(b.debt)
	tokens := new(big.Int).Quo(new(big.Int).Add(missing.Num(), new(big.Int).Sub(missing.Denom(), big.NewInt(1))),
		missing.Denom())
	require.EqualValues(t, max(0, int64(b.burst)-tokens.Int64()), take(l, 0).Remaining)
	ns := new(big.Rat).Quo(missing, b.rate)
	f, _ := ns.Float64()
	require.EqualValues(t, math.Round(f), take(l, 0).ResetAfter)
}

// Whatever is asked of a limiter in a day, no interval sees more than the burst and what the
// rate gives in it, no call is kept waiting or refused that had its tokens, and the balance
// after all reservations and settlements is exact. So it is until the rate changes, and within
// a token from then on.
func TestADayIsExact(t *testing.T) {
	play(t, 5000, 7, func(t *testing.T, choose interface{ IntN(n int) int }) { playDay(t, choose, 60) })
}

// FuzzDay plays a script: two bytes for each choice of playDay.
func FuzzDay(f *testing.F) {
	scripts(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		synctest.Test(t, func(t *testing.T) { playDay(t, (*script)(&b), min(len(b)/6+1, 200)) })
	})
}
