package throttle_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/throttle"
)

type admission struct {
	from, to time.Duration // it was between these
	tokens   int
}

// requireBound checks the tokens that were admitted in every interval that begins and
// ends with an admission.
func requireBound(t *testing.T, all []admission, rate float64, burst int) {
	t.Helper()
	slices.SortFunc(all, func(a, b admission) int { return int(a.to - b.to) })
	for _, first := range all {
		sum := 0
		for _, a := range all {
			if a.from < first.from {
				continue
			}
			sum += a.tokens
			most := float64(burst) + rate*(a.to-first.from+1).Seconds() + 1e-6
			if float64(sum) > most {
				require.FailNow(t, "over the limit", "%d tokens in %v, from %v on: at most %v", sum, a.to-first.from, first.from, most)
			}
		}
	}
}

// A thousand callers of all kinds, on a clock that is exact.
func TestBoundHoldsOverEveryInterval(t *testing.T) {
	for _, burst := range []int{1, 7, 40} {
		synctest.Test(t, func(t *testing.T) {
			const rate = 300
			type cost struct{}
			l := throttle.New(throttle.Config{
				Rate: rate, Burst: burst, MaxWait: 2 * time.Second,
				Levels: 2, Reserve: []float64{0.3},
				Priority: func(ctx context.Context) int { return ctx.Value(cost{}).(int) % 2 },
				Cost:     func(ctx context.Context) int { return 1 + ctx.Value(cost{}).(int)%min(burst, 4) },
			})
			start := time.Now()
			var mu sync.Mutex
			var all []admission
			var tokens int
			admitted := func(n int) {
				mu.Lock()
				defer mu.Unlock()
				now := time.Since(start)
				all = append(all, admission{now, now, n})
				tokens += n
			}
			var calls sync.WaitGroup
			for i := range 1000 {
				calls.Go(func() {
					random := rand.New(rand.NewPCG(uint64(i), 1))
					for range 5 {
						time.Sleep(time.Duration(random.IntN(1e9)))
						number := random.IntN(100)
						ctx, cancel := context.WithCancel(context.WithValue(t.Context(), cost{}, number))
						switch i % 3 {
						case 0:
							if l.Take(1).OK {
								admitted(1)
							}
						case 1: // gives up half way
							timer := time.AfterFunc(time.Duration(random.IntN(1e9)), cancel)
							if l.Wait(ctx) == nil {
								admitted(1 + number%min(burst, 4))
							}
							timer.Stop()
						case 2:
							if l.Wait(ctx) == nil {
								admitted(1 + number%min(burst, 4))
							}
						}
						cancel()
					}
				})
			}
			calls.Wait()
			requireBound(t, all, rate, burst)
			s := l.Stats()
			require.EqualValues(t, tokens, s.Spent)
			require.EqualValues(t, len(all), s.Admitted)
			require.Zero(t, s.Queued)
			require.Greater(t, s.Waited, int64(100))
			time.Sleep(time.Hour)
			require.Equal(t, throttle.Decision{OK: true, Limit: burst, Window: time.Duration(burst) * time.Second / rate, Remaining: burst - burst*3/10}, l.Peek(), "nothing was lost")
		})
	}
}

// Other calls use the tokens of waiters that gave up: the server is never idle while a
// call waits.
func TestNoTokenIsLostWhenWaitersGiveUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := throttle.New(throttle.Config{Rate: 100, Burst: 1, MaxWait: -1})
		start := time.Now()
		var served atomic.Int64
		var calls sync.WaitGroup
		for i := range 1000 {
			calls.Go(func() {
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				if i%2 == 0 {
					time.AfterFunc(time.Millisecond, cancel)
				}
				if l.Wait(ctx) == nil {
					served.Add(1)
				}
			})
			synctest.Wait()
		}
		calls.Wait()
		require.EqualValues(t, 501, served.Load(), "one of those that give up was served at once")
		require.Equal(t, 5*time.Second, time.Since(start))
	})
}

// Twenty thousand callers wait, and all but one give up: the last to come first,
// the first first, or as it happens.
func TestManyGiveUpAtOnce(t *testing.T) {
	for name, order := range map[string]func(i, n int) int{
		"in order":         func(i, _ int) int { return i },
		"in reverse order": func(i, n int) int { return n - 1 - i },
		"in no order":      func(i, n int) int { return i * 7919 % n },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				const callers = 20_000
				l := throttle.New(throttle.Config{Rate: 1, Burst: 1, MaxWait: -1, Queue: callers + 1})
				require.True(t, l.Allow())
				start := time.Now()
				cancels := make([]context.CancelFunc, callers)
				var calls sync.WaitGroup
				for i := range cancels {
					var ctx context.Context
					ctx, cancels[i] = context.WithCancel(t.Context())
					calls.Go(func() { require.Equal(t, throttle.ContextEnded, reason(l.Wait(ctx))) })
				}
				synctest.Wait()
				require.Equal(t, callers, l.Stats().Queued)
				var last sync.WaitGroup
				last.Go(func() { require.NoError(t, l.Wait(t.Context())) })
				synctest.Wait()
				for i := range cancels {
					cancels[order(i, callers)]()
				}
				calls.Wait()
				last.Wait()
				require.Equal(t, time.Second, time.Since(start))
				require.Equal(t, throttle.Stats{Totals: throttle.Totals{Admitted: 2, Refused: callers, Spent: 2, Waited: 1}}, counts(l.Stats()))
			})
		})
	}
}

// On the clock of the machine: whatever it does, no more than the bound.
func TestStressNeverOverTheLimit(t *testing.T) {
	const rate, burst = 20_000, 50
	l := throttle.New(throttle.Config{Rate: rate, Burst: burst, MaxWait: 20 * time.Millisecond})
	start := time.Now()
	var mu sync.Mutex
	var all []admission
	var ended atomic.Int64
	var calls sync.WaitGroup
	for i := range 1000 {
		calls.Go(func() {
			random := rand.New(rand.NewPCG(uint64(i), 2))
			for range 20 {
				ctx, cancel := context.WithTimeout(t.Context(), time.Duration(random.IntN(2e7)))
				from := time.Since(start)
				var ok bool
				if i%2 == 0 {
					ok = l.Allow()
				} else {
					err := l.Wait(ctx)
					ok = err == nil
					if err != nil && !errors.Is(err, throttle.ErrLimited) {
						ended.Add(1) // before it was asked
					}
				}
				if ok {
					mu.Lock()
					all = append(all, admission{from, time.Since(start), 1})
					mu.Unlock()
				}
				cancel()
			}
		})
	}
	calls.Wait()
	s := l.Stats()
	require.EqualValues(t, 20_000, s.Admitted+s.Refused+ended.Load())
	require.EqualValues(t, len(all), s.Admitted)
	require.Zero(t, s.Queued)
	most := burst + rate*time.Since(start).Seconds() + 1
	require.LessOrEqual(t, float64(len(all)), most)
	requireBound(t, all[:min(len(all), 3000)], rate, burst)
}

func TestQueueIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := throttle.New(throttle.Config{Rate: 1, Burst: 1, MaxWait: -1, Queue: 2})
		require.True(t, l.Allow())
		var calls sync.WaitGroup
		for range 2 {
			calls.Go(func() { require.NoError(t, l.Wait(t.Context())) })
		}
		synctest.Wait()
		err := l.Wait(t.Context())
		limited, _ := errors.AsType[*throttle.LimitedError](err)
		require.Equal(t, throttle.QueueFull, limited.Reason)
		require.Equal(t, 3*time.Second, limited.RetryAfter())
		calls.Wait()
	})
}

type level struct{}

// at returns a ctx whose calls are of a level, by levelOf.
func at(ctx context.Context, n int) context.Context { return context.WithValue(ctx, level{}, n) }

func levelOf(ctx context.Context) int { return ctx.Value(level{}).(int) }

func reason(err error) throttle.Reason {
	limited, _ := errors.AsType[*throttle.LimitedError](err)
	if limited == nil {
		return ""
	}
	return limited.Reason
}

// No call waits for longer than the units can count.
func TestWaitingIsBoundedByDecades(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const year = 365 * 24 * time.Hour
		l := throttle.New(throttle.Config{Rate: every(10 * year), Burst: 1, MaxWait: -1})
		require.True(t, l.Allow())
		ctx, cancel := context.WithCancel(t.Context())
		var ends tally
		for range 10 {
			go func() { ends.add(l.Wait(ctx)) }()
			synctest.Wait()
		}
		waiting := l.Stats().Queued
		require.GreaterOrEqual(t, waiting, 1)
		require.LessOrEqual(t, waiting, 4)
		require.Equal(t, map[throttle.Reason]int{throttle.WaitTooLong: 10 - waiting}, ends.all())
		cancel()
		synctest.Wait()
	})
}

// A tally counts how calls ended.
type tally struct {
	mu   sync.Mutex
	ends map[throttle.Reason]int
}

func (c *tally) add(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ends == nil {
		c.ends = make(map[throttle.Reason]int)
	}
	c.ends[reason(err)]++
}

func (c *tally) all() map[throttle.Reason]int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return maps.Clone(c.ends)
}

func TestEssentialCallsOvertakeTheOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := throttle.New(throttle.Config{Rate: 10, Burst: 10, MaxWait: -1, Levels: 2, Reserve: []float64{0.5}, Priority: levelOf})
		essential, rest := at(t.Context(), 0), at(t.Context(), 1)
		start := time.Now()
		for range 5 {
			require.NoError(t, l.Wait(rest))
		}
		var calls sync.WaitGroup
		var restAt time.Duration
		calls.Go(func() {
			require.NoError(t, l.Wait(rest))
			restAt = time.Since(start)
		})
		synctest.Wait()
		for range 5 { // all that is left, of which the one that waits was to have one
			require.NoError(t, l.Wait(essential))
		}
		require.Zero(t, time.Since(start))
		require.NoError(t, l.Wait(essential))
		require.Equal(t, 100*time.Millisecond, time.Since(start))
		calls.Wait()
		require.Equal(t, 700*time.Millisecond, restAt, "7 more than were there for its level, less the one it takes")
	})
}

// However many less important calls wait, a call waits only for the calls that are as
// important as itself, or more.
// What has been granted holds up no call behind it any more.
func TestWaitIsThatOfTheCallsStillInLine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := throttle.New(throttle.Config{Rate: 1, Burst: 1, MaxWait: time.Minute})
		require.True(t, l.Allow())
		for range 2 {
			go func() { _ = l.Wait(t.Context()) }()
			synctest.Wait()
		}
		time.Sleep(1500 * time.Millisecond)
		ctx, cancel := context.WithTimeout(t.Context(), 1600*time.Millisecond)
		defer cancel()
		require.NoError(t, l.Wait(ctx))
	})
}

func TestWaitingIsInTheOrderOfLevels(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := throttle.New(throttle.Config{
			Rate: 10, Burst: 1, MaxWait: -1, Levels: 3, Reserve: []float64{}, Priority: levelOf,
		})
		start := time.Now()
		require.True(t, l.Allow())
		var calls sync.WaitGroup
		var order []int
		for _, n := range []int{2, 2, 1, 2, 0, 1, 0, 2} {
			calls.Go(func() {
				require.NoError(t, l.Wait(at(t.Context(), n)))
				order = append(order, n)
				require.Equal(t, time.Duration(len(order))*100*time.Millisecond, time.Since(start))
			})
			synctest.Wait()
		}
		calls.Wait()
		require.Equal(t, []int{0, 0, 1, 1, 2, 2, 2, 2}, order)
		require.Equal(t, throttle.Stats{Totals: throttle.Totals{Admitted: 9, Spent: 9, Waited: 8}}, counts(l.Stats()))
	})
}

// Of calls that wait for tokens of different costs, the first of the most important
// goes first, even where there would be enough for another.
func TestWaitingCallIsNotOvertakenByACheaperOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		type cost struct{}
		l := throttle.New(throttle.Config{
			Rate: 10, Burst: 10, MaxWait: -1, Levels: 2, Reserve: []float64{}, Priority: levelOf,
			Cost: func(ctx context.Context) int { return ctx.Value(cost{}).(int) },
		})
		start := time.Now()
		require.True(t, l.Take(10).OK)
		took := make(map[string]time.Duration)
		var mu sync.Mutex
		var calls sync.WaitGroup
		call := func(name string, n, level int) {
			calls.Go(func() {
				require.NoError(t, l.Wait(context.WithValue(at(t.Context(), level), cost{}, n)))
				mu.Lock()
				defer mu.Unlock()
				took[name] = time.Since(start)
			})
			synctest.Wait()
		}
		call("cheap and unimportant", 1, 1)
		call("costly", 8, 0)
		call("cheap", 1, 0)
		call("last", 1, 1)
		calls.Wait()
		require.Equal(t, map[string]time.Duration{
			"costly": 800 * time.Millisecond, "cheap": 900 * time.Millisecond,
			"cheap and unimportant": time.Second, "last": 1100 * time.Millisecond,
		}, took)
	})
}

// A full queue makes room for a more important call: the last of the least important
// leaves it.
func TestFullQueueMakesRoomForMoreImportantCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := throttle.New(throttle.Config{
			Rate: 1, Burst: 1, MaxWait: -1, Queue: 4, Levels: 3, Reserve: []float64{}, Priority: levelOf,
		})
		start := time.Now()
		require.True(t, l.Allow())
		type end struct {
			why throttle.Reason
			at  time.Duration
		}
		ends := make(map[string]end)
		var mu sync.Mutex
		var calls sync.WaitGroup
		call := func(name string, n int) {
			calls.Go(func() {
				err := l.Wait(at(t.Context(), n))
				mu.Lock()
				defer mu.Unlock()
				ends[name] = end{reason(err), time.Since(start)}
			})
			synctest.Wait()
		}
		ended := func(name string) end {
			mu.Lock()
			defer mu.Unlock()
			return ends[name]
		}
		call("2a", 2)
		call("2b", 2)
		call("1a", 1)
		call("1b", 1)
		require.Equal(t, 4, l.Stats().Queued)
		call("2c", 2)
		require.Equal(t, end{why: throttle.QueueFull}, ended("2c"), "as important as the least that wait")
		call("0a", 0)
		require.Equal(t, end{why: throttle.Displaced}, ended("2b"), "displaced at once")
		call("1c", 1)
		require.Equal(t, end{why: throttle.Displaced}, ended("2a"))
		call("1d", 1)
		require.Equal(t, end{why: throttle.QueueFull}, ended("1d"))
		call("0b", 0)
		require.Equal(t, end{why: throttle.Displaced}, ended("1c"))
		require.Equal(t, 4, l.Stats().Queued)
		calls.Wait()
		require.Equal(t, []time.Duration{time.Second, 2 * time.Second, 3 * time.Second, 4 * time.Second},
			[]time.Duration{ends["0a"].at, ends["0b"].at, ends["1a"].at, ends["1b"].at})
		require.Equal(t, throttle.Stats{Totals: throttle.Totals{Admitted: 5, Refused: 5, Spent: 5, Waited: 4}}, counts(l.Stats()))
	})
}

// A call that is overtaken waits no longer than MaxWait for all that.
func TestOvertakenCallWaitsNoLongerThanMaxWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := throttle.New(throttle.Config{
			Rate: 1, Burst: 1, MaxWait: 2 * time.Second, Levels: 2, Reserve: []float64{}, Priority: levelOf,
		})
		start := time.Now()
		require.True(t, l.Allow())
		var calls sync.WaitGroup
		calls.Go(func() {
			err := l.Wait(at(t.Context(), 1)) // after a second, as things are
			require.Equal(t, throttle.WaitTooLong, reason(err))
			require.Equal(t, 2*time.Second, time.Since(start))
		})
		synctest.Wait()
		time.Sleep(500 * time.Millisecond)
		for range 2 {
			calls.Go(func() { require.NoError(t, l.Wait(at(t.Context(), 0))) })
		}
		synctest.Wait()
		require.Equal(t, throttle.WaitTooLong, reason(l.Wait(at(t.Context(), 0))))
		calls.Wait()
		require.Equal(t, 2*time.Second, time.Since(start))
		require.Equal(t, throttle.Stats{Totals: throttle.Totals{Admitted: 3, Refused: 2, Spent: 3, Waited: 2}}, counts(l.Stats()))
		time.Sleep(time.Second)
		require.True(t, l.Allow(), "what it did not use is there")
	})
}

// Calls of all levels come, are displaced and give up: none is lost, and no token.
func TestLevelsUnderLoadLoseNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const rate, burst = 1000, 10
		l := throttle.New(throttle.Config{
			Rate: rate, Burst: burst, MaxWait: 200 * time.Millisecond, Queue: 50, Levels: 3, Reserve: []float64{1. / 3, 1. / 3}, Priority: levelOf,
			Cost: func(ctx context.Context) int { return 1 + ctx.Value(level{}).(int) },
		})
		start := time.Now()
		var mu sync.Mutex
		var all []admission
		ends := make(map[int]map[throttle.Reason]int)
		var calls sync.WaitGroup
		random := rand.New(rand.NewPCG(1, 9))
		for i := range 5000 {
			n := random.IntN(3)
			patience := time.Duration(random.IntN(4e8))
			calls.Go(func() {
				ctx, cancel := context.WithCancel(at(t.Context(), n))
				defer cancel()
				if i%5 == 0 {
					time.AfterFunc(patience, cancel)
				}
				err := l.Wait(ctx)
				mu.Lock()
				defer mu.Unlock()
				if ends[n] == nil {
					ends[n] = make(map[throttle.Reason]int)
				}
				ends[n][reason(err)]++
				if err == nil {
					all = append(all, admission{time.Since(start), time.Since(start), 1 + n})
				}
			})
			time.Sleep(time.Second * 6 / 10 / rate) // 3 1/3 x the rate in tokens
		}
		calls.Wait()
		requireBound(t, all, rate, burst)
		refusals := func(n int) int {
			return ends[n][throttle.QueueFull] + ends[n][throttle.Displaced] + ends[n][throttle.WaitTooLong]
		}
		require.Zero(t, refusals(0), "level 0 is well within the rate")
		require.NotZero(t, refusals(1))
		require.Greater(t, refusals(2), ends[2][""])
		require.NotZero(t, ends[2][throttle.Displaced])
		s := l.Stats()
		require.Zero(t, s.Queued)
		spent := 0
		for _, a := range all {
			spent += a.tokens
		}
		require.EqualValues(t, spent, s.Spent)
		require.InDelta(t, rate*time.Since(start).Seconds()+burst, spent, 0.1*float64(spent), "nothing was left unused")
		time.Sleep(time.Hour)
		require.Zero(t, l.Peek().ResetAfter)
	})
}

// A waiter gives up after an essential call has overtaken it.
func TestWaiterGivesUpAfterOthersOvertookIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		type level struct{}
		l := throttle.New(throttle.Config{
			Rate: 10, Burst: 10, MaxWait: -1, Levels: 2, Reserve: []float64{0.5},
			Priority: func(ctx context.Context) int { return ctx.Value(level{}).(int) },
		})
		essential := context.WithValue(t.Context(), level{}, 0)
		rest, cancel := context.WithCancel(context.WithValue(t.Context(), level{}, 1))
		for range 5 {
			require.NoError(t, l.Wait(rest))
		}
		var calls sync.WaitGroup
		calls.Go(func() { require.ErrorIs(t, l.Wait(rest), context.Canceled) })
		synctest.Wait()
		for range 2 {
			require.NoError(t, l.Wait(essential))
		}
		cancel()
		calls.Wait()
		spent := 0
		for start := time.Now(); time.Since(start) == 0; spent++ {
			require.NoError(t, l.Wait(essential))
		}
		require.Equal(t, 4, spent, "three were left, and the fourth had to wait")
	})
}

func TestRefundGoesToWaitersFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := throttle.New(throttle.Config{Rate: 1, Burst: 10, MaxWait: -1, Cost: func(context.Context) int { return 10 }})
		require.True(t, l.Take(10).OK)
		start := time.Now()
		time.Sleep(8 * time.Second)
		var calls sync.WaitGroup
		calls.Go(func() { require.NoError(t, l.Wait(t.Context())) })
		synctest.Wait()
		l.Refund(10)
		calls.Wait()
		require.Equal(t, 8*time.Second, time.Since(start))
		require.Zero(t, l.Peek().Remaining, "8 had come back by then: that makes a burst of 10, not 18")
		require.EqualValues(t, 10, l.Stats().Refunded)
	})
}

func TestRefundNeverOverfills(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := throttle.New(throttle.Config{Rate: 1, Burst: 5})
		l.Refund(3)
		require.Equal(t, 5, l.Peek().Remaining)
		require.True(t, l.Take(2).OK)
		l.Refund(1)
		require.Equal(t, 4, l.Peek().Remaining)
		time.Sleep(500 * time.Millisecond) // half a token is owed
		require.True(t, l.Take(4).OK)
		l.Refund(4)
		require.Equal(t, 500*time.Millisecond, l.Peek().ResetAfter, "4 tokens, and not 4 and a half")
		l.Refund(1 << 62)
		l.Refund(-5)
		require.Equal(t, 5, l.Peek().Remaining)
		require.Zero(t, l.Peek().ResetAfter)
	})
}

// If the token comes at the moment at which ctx ends, it is given back, spent or lost. It
// is never doubled.
func TestTokenThatComesWhenTheContextEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		quotas := []throttle.Quota{{N: 1000, Every: 1000 * time.Hour}}
		l := throttle.New(throttle.Config{Rate: 1, Burst: 1, MaxWait: -1, Quotas: quotas})
		for range 50 {
			require.True(t, l.Allow())
			ctx, cancel := context.WithCancel(t.Context())
			time.AfterFunc(time.Second, cancel)
			before := l.Stats().Spent
			err := l.Wait(ctx)
			spent := l.Stats().Spent - before
			if err != nil {
				require.ErrorIs(t, err, context.Canceled)
			} else {
				require.EqualValues(t, 1, spent)
			}
			require.Equal(t, spent == 0, l.Allow())
			require.False(t, l.Allow())
			time.Sleep(time.Minute)
			cancel()
		}
		require.NoError(t, setLimit(l, throttle.Limit{Rate: 1, Burst: 1000, Quotas: quotas}))
		require.EqualValues(t, 1000-l.Stats().Spent, l.Peek().Remaining, "the quota has the same")
	})
}

// A slowContext is canceled by the time at which it is asked twice. Each question takes
// a while.
type slowContext struct {
	context.Context
	asked atomic.Int64
}

func (c *slowContext) Err() error {
	switch c.asked.Add(1) {
	case 1:
		return nil
	case 2:
		time.Sleep(1500 * time.Millisecond)
	}
	return context.Canceled
}

// A call that notices late that its ctx has ended has had its time: others have
// run since, so that its tokens are worth nothing any more.
func TestUnusedTokenIsNotGivenBackLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := throttle.New(throttle.Config{Rate: 1, Burst: 1, MaxWait: -1})
		start := time.Now()
		require.True(t, l.Allow())
		var calls sync.WaitGroup
		at := make([]time.Duration, 3)
		for i := range at {
			calls.Go(func() {
				ctx := t.Context()
				if i == 0 {
					ctx = &slowContext{Context: ctx}
				}
				err := l.Wait(ctx)
				require.Equal(t, i == 0, err != nil)
				at[i] = time.Since(start)
			})
			synctest.Wait()
		}
		calls.Wait()
		require.Equal(t, []time.Duration{2500 * time.Millisecond, 2 * time.Second, 3 * time.Second}, at)
		require.Equal(t, throttle.Stats{Totals: throttle.Totals{Admitted: 3, Refused: 1, Waited: 2, Spent: 4}}, counts(l.Stats()))
	})
}

func TestSetLimitKeepsTheDebt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := throttle.New(throttle.Config{Rate: 10, Burst: 10})
		require.True(t, l.Take(7).OK)
		require.NoError(t, setLimit(l, throttle.Limit{Rate: 1, Burst: 20}))
		require.Equal(t, throttle.Decision{OK: true, Limit: 20, Window: 20 * time.Second, Remaining: 13, ResetAfter: 7 * time.Second}, l.Peek())
		require.NoError(t, setLimit(l, throttle.Limit{Rate: 1, Burst: 5}))
		require.Equal(t, throttle.Decision{Limit: 5, Window: 5 * time.Second, RetryAfter: 3 * time.Second, ResetAfter: 7 * time.Second}, l.Peek())
		require.NoError(t, setLimit(l, throttle.Limit{Rate: 100, Burst: 0}))
		require.Equal(t, 93, l.Peek().Remaining)
		require.EqualError(t, setLimit(l, throttle.Limit{Rate: 0, Burst: 5}), "throttle.Config.Rate is 0: must be above 0 and at most 1e12 tokens a second")
		require.Equal(t, 93, l.Peek().Remaining)
	})
}

// A part of a token that is owed is a whole one at a rate that knows no parts.
func TestSetLimitRoundsTheDebtUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := throttle.New(throttle.Config{Rate: 1, Burst: 5})
		require.True(t, l.Take(3).OK)
		time.Sleep(500 * time.Millisecond)
		require.NoError(t, setLimit(l, throttle.Limit{Rate: 1e12, Burst: 5}))
		require.Equal(t, 2, l.Peek().Remaining)
	})
}

func TestSetLimitChangesTheWaitOfWaiters(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := throttle.New(throttle.Config{Rate: 1, Burst: 1, MaxWait: -1})
		start := time.Now()
		require.True(t, l.Allow())
		var calls sync.WaitGroup
		at := make([]time.Duration, 4)
		for i := range at {
			calls.Go(func() {
				require.NoError(t, l.Wait(t.Context()))
				at[i] = time.Since(start)
			})
			synctest.Wait()
		}
		time.Sleep(1500 * time.Millisecond) // half a token of the second
		require.NoError(t, setLimit(l, throttle.Limit{Rate: 10, Burst: 1}))
		time.Sleep(100 * time.Millisecond)
		require.NoError(t, setLimit(l, throttle.Limit{Rate: 0.1, Burst: 1}))
		calls.Wait()
		require.Equal(t, []time.Duration{time.Second, 1550 * time.Millisecond, 6600 * time.Millisecond, 16600 * time.Millisecond}, at)
	})
}

func TestSetLimitBelowTheCostOfAWaiter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := throttle.New(throttle.Config{Rate: 1, Burst: 10, MaxWait: -1, Cost: func(context.Context) int { return 8 }})
		start := time.Now()
		require.True(t, l.Take(10).OK)
		var calls sync.WaitGroup
		calls.Go(func() { require.NoError(t, l.Wait(t.Context())) })
		time.Sleep(4 * time.Second) // 14 are owed
		require.NoError(t, setLimit(l, throttle.Limit{Rate: 1, Burst: 5}))
		calls.Wait()
		require.Equal(t, 13*time.Second, time.Since(start), "5 are owed: as if it had taken them one by one")
		require.Zero(t, l.Peek().Remaining)
		err := l.Wait(t.Context())
		limited, _ := errors.AsType[*throttle.LimitedError](err)
		require.Equal(t, throttle.TooCostly, limited.Reason)
	})
}

// A call that takes more than the new burst saves up tokens while it waits. Calls that
// overtake it can spend no more than a burst of them, also after it gives up.
func TestWaitForMoreThanABurstGainsNothingForOthers(t *testing.T) {
	type cost struct{}
	for _, gives := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			l := throttle.New(throttle.Config{
				Rate: 1, Burst: 10, MaxWait: -1, Levels: 2, Reserve: []float64{}, Priority: levelOf,
				Cost: func(ctx context.Context) int { return ctx.Value(cost{}).(int) },
			})
			of := func(ctx context.Context, n, level int) context.Context {
				return context.WithValue(at(ctx, level), cost{}, n)
			}
			require.True(t, l.Take(10).OK)
			waits, giveUp := context.WithCancel(of(t.Context(), 8, 1))
			defer giveUp()
			var call sync.WaitGroup
			call.Go(func() {
				err := l.Wait(waits)
				require.Equal(t, gives, err != nil)
				if gives {
					limited, _ := errors.AsType[*throttle.LimitedError](err)
					require.Zero(t, limited.RetryAfter(), "never")
				}
			})
			time.Sleep(4 * time.Second)
			require.NoError(t, setLimit(l, throttle.Limit{Rate: 1, Burst: 5}))
			time.Sleep(8 * time.Second) // it has saved 7 tokens
			if gives {
				giveUp()
				call.Wait()
			}
			now, cancel := context.WithDeadline(of(t.Context(), 1, 0), time.Now().Add(1))
			defer cancel()
			admitted := 0
			for l.Wait(now) == nil {
				admitted++
			}
			require.Equal(t, 5, admitted)
			call.Wait()
		})
	}
}

// A call behind it that gives up takes nothing of that along.
func TestGivingUpBehindAWaiterForMoreThanABurst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		type cost struct{}
		l := throttle.New(throttle.Config{
			Rate: 1, Burst: 10, MaxWait: -1, Cost: func(ctx context.Context) int { return ctx.Value(cost{}).(int) },
		})
		start := time.Now()
		require.True(t, l.Take(10).OK)
		var calls sync.WaitGroup
		calls.Go(func() { require.NoError(t, l.Wait(context.WithValue(t.Context(), cost{}, 8))) })
		synctest.Wait()
		ctx, cancel := context.WithCancel(context.WithValue(t.Context(), cost{}, 1))
		calls.Go(func() { require.Equal(t, throttle.ContextEnded, reason(l.Wait(ctx))) })
		time.Sleep(4 * time.Second)
		require.NoError(t, setLimit(l, throttle.Limit{Rate: 1, Burst: 5}))
		time.Sleep(8 * time.Second)
		cancel()
		calls.Wait()
		require.Equal(t, 13*time.Second, time.Since(start))
		require.Zero(t, l.Peek().Remaining)
		require.Equal(t, time.Second, l.Peek().RetryAfter)
	})
}

// Nor do the calls behind it gain what it has saved, once it gives up.
func TestWaiterForMoreThanABurstThatGivesUpLeavesABurst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		type cost struct{}
		l := throttle.New(throttle.Config{
			Rate: 1, Burst: 10, MaxWait: -1, Cost: func(ctx context.Context) int { return ctx.Value(cost{}).(int) },
		})
		require.True(t, l.Take(10).OK)
		first, cancel := context.WithCancel(context.WithValue(t.Context(), cost{}, 8))
		var calls sync.WaitGroup
		calls.Go(func() { require.Equal(t, throttle.ContextEnded, reason(l.Wait(first))) })
		synctest.Wait()
		for range 9 {
			calls.Go(func() { require.NoError(t, l.Wait(context.WithValue(t.Context(), cost{}, 1))) })
		}
		time.Sleep(4 * time.Second)
		require.NoError(t, setLimit(l, throttle.Limit{Rate: 1, Burst: 5}))
		time.Sleep(8 * time.Second) // it has saved 2 tokens more than a burst
		cancel()
		synctest.Wait()
		require.Equal(t, 4, l.Stats().Queued, "5 of 9 went")
		calls.Wait()
	})
}

// At a new rate at which the waiters would wait for centuries, they are not granted at
// once: 54 years' worth of the debt is kept.
func TestSetLimitAtWhichManyWaitForCenturies(t *testing.T) {
	for waiting := range 10 {
		synctest.Test(t, func(t *testing.T) {
			const year = 365 * 24 * time.Hour
			l := throttle.New(throttle.Config{Rate: 1e9, MaxWait: -1, Cost: func(context.Context) int { return 1e9 }})
			require.True(t, l.Take(1e9).OK)
			ctx, cancel := context.WithCancel(t.Context())
			for range waiting {
				go func() { _ = l.Wait(ctx) }()
			}
			synctest.Wait()
			require.NoError(t, setLimit(l, throttle.Limit{Rate: every(30 * year), Burst: 1}))
			require.False(t, l.Allow())
			require.Greater(t, l.Peek().RetryAfter, 54*year-30*year)
			time.Sleep(20 * year)
			synctest.Wait()
			require.Equal(t, waiting, l.Stats().Queued)
			require.False(t, l.Allow())
			cancel()
			synctest.Wait()
			require.Zero(t, l.Stats().Queued)
		})
	}
}

// underSetLimit calls call many times from several goroutines, while another keeps
// setting the limits of l in turn.
func underSetLimit(t *testing.T, l *throttle.Limiter, callers, each int, call func(), limits ...throttle.Config) {
	t.Helper()
	var calls, setter sync.WaitGroup
	for range callers {
		calls.Go(func() {
			for range each {
				call()
			}
		})
	}
	done := make(chan struct{})
	setter.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-done:
				return
			default:
				limit := limits[i%len(limits)]
				require.NoError(t, setLimit(l, throttle.Limit{Rate: limit.Rate, Burst: limit.Burst}))
			}
		}
	})
	calls.Wait()
	close(done)
	setter.Wait()
}

// Each call finds its token, and each token is gone after it, in whatever epoch.
func TestSetLimitUnderLoad(t *testing.T) {
	const burst, callers, each = 1_000_000, 8, 100_000
	start := time.Now()
	l := throttle.New(throttle.Config{Rate: 0.001, Burst: burst})
	underSetLimit(t, l, callers, each, func() { l.Allow() },
		throttle.Config{Rate: 0.001, Burst: burst}, // the units of these differ by far
		throttle.Config{Rate: 1, Burst: burst},
		throttle.Config{Rate: 0.05, Burst: burst},
	)
	require.EqualValues(t, callers*each, l.Stats().Admitted)
	refilled := time.Since(start).Seconds() // at most, in tokens
	require.InDelta(t, burst-callers*each+refilled/2, l.Peek().Remaining, refilled/2+1)
}

// A call whose cost was below the burst when it came is not admitted by a smaller burst.
// At this rate the tokens that it took too much would be back a moment later.
func TestSetLimitUnderCallsThatHaveBecomeTooCostly(t *testing.T) {
	l := throttle.New(throttle.Config{Rate: 1e9, Burst: 100})
	var over atomic.Int64
	underSetLimit(t, l, 4, 100_000, func() {
		if d := l.Take(70); d.OK && d.Limit < 70 {
			over.Add(1)
		}
	}, throttle.Config{Rate: 1e9, Burst: 5}, throttle.Config{Rate: 1e9, Burst: 100})
	require.Zero(t, over.Load(), "70 tokens out of a burst of 5")
}

// A caller that gives up takes the same time however many wait.
func BenchmarkGiveUp(b *testing.B) {
	for _, waiting := range []int{1000, 100_000} {
		b.Run(fmt.Sprint(waiting), func(b *testing.B) {
			l := throttle.New(throttle.Config{Rate: 1e-3, Burst: 1, MaxWait: -1, Queue: waiting + 1})
			l.Allow()
			all, cancelAll := context.WithCancel(b.Context())
			var calls sync.WaitGroup
			for range waiting {
				calls.Go(func() { _ = l.Wait(all) })
			}
			for l.Stats().Queued < waiting {
				runtime.Gosched()
			}
			ctx := &endedOnceAsked{Context: b.Context()}
			for b.Loop() {
				ctx.asked = false
				_ = l.Wait(ctx)
			}
			cancelAll()
			calls.Wait()
		})
	}
}

// An endedOnceAsked has ended when it is asked for the second time.
type endedOnceAsked struct {
	context.Context
	asked bool
}

func (c *endedOnceAsked) Err() error {
	if c.asked {
		return context.Canceled
	}
	c.asked = true
	return nil
}

func (c *endedOnceAsked) Done() <-chan struct{} { return ended }

var ended = func() chan struct{} { c := make(chan struct{}); close(c); return c }()
