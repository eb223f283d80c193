package throttle_test

import (
	"context"
	"errors"
	"math/rand/v2"
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
	at     time.Duration
	tokens int
}

// requireBound checks the tokens that were admitted in every interval that begins and
// ends with an admission.
func requireBound(t *testing.T, all []admission, rate float64, burst int) {
	t.Helper()
	slices.SortFunc(all, func(a, b admission) int { return int(a.at - b.at) })
	for _, first := range all {
		sum := 0
		for _, a := range all {
			if a.at < first.at {
				continue
			}
			sum += a.tokens
			most := float64(burst) + rate*(a.at-first.at+1).Seconds() + 1e-6
			if float64(sum) > most {
				require.FailNow(t, "over the limit", "%d tokens in %v, from %v on: at most %v", sum, a.at-first.at,
					first.at, most)
			}
		}
	}
}

// A thousand callers of all kinds, on a clock that is exact.
func TestBoundHoldsOverEveryInterval(t *testing.T) {
	for _, burst := range []int{1, 7, 40} {
		synctest.Test(t, func(t *testing.T) {
			const rate = 300
			l := throttle.New(throttle.Config{Rate: rate, Burst: burst, MaxWait: 2 * time.Second, Cost: cost})
			var waited atomic.Int64
			l.Observe(func(_ context.Context, e throttle.Event) {
				if e.Kind == throttle.EventWaited {
					waited.Add(1)
				}
			})
			start := time.Now()
			var mu sync.Mutex
			var all []admission
			var tokens int
			admitted := func(n int) {
				mu.Lock()
				defer mu.Unlock()
				now := time.Since(start)
				all = append(all, admission{now, n})
				tokens += n
			}
			var calls sync.WaitGroup
			for i := range 1000 {
				calls.Go(func() {
					random := rand.New(rand.NewPCG(uint64(i), 1))
					for range 5 {
						time.Sleep(time.Duration(random.IntN(1e9)))
						n := 1 + random.IntN(min(burst, 4))
						ctx, cancel := context.WithCancel(of(n))
						switch i % 3 {
						case 0:
							if l.Allow() {
								admitted(1)
							}
						case 1: // gives up half way
							timer := time.AfterFunc(time.Duration(random.IntN(1e9)), cancel)
							if l.Wait(ctx) == nil {
								admitted(n)
							}
							timer.Stop()
						case 2:
							if l.Wait(ctx) == nil {
								admitted(n)
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
			require.Greater(t, waited.Load(), int64(100))
			time.Sleep(time.Hour)
			require.Equal(t, burst, take(l, 0).Remaining, "nothing was lost")
			require.Zero(t, take(l, 0).ResetAfter)
		})
	}
}

// Twenty thousand callers wait, and all but one give up: the last to come first,
// the first first, or as it happens.
func TestManyWaitersCancelTogether(t *testing.T) {
	for name, order := range map[string]func(i, n int) int{
		"in order":         func(i, _ int) int { return i },
		"in reverse order": func(i, n int) int { return n - 1 - i },
		"in no order":      func(i, n int) int { return i * 7919 % n },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				callers := 20_000
				if testing.Short() {
					callers = 2000
				}
				l := throttle.New(throttle.Config{Rate: 1, Burst: 1, MaxWait: -1})
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
				require.Equal(t, throttle.Stats{Admitted: 2, Refused: int64(callers), Spent: 2}, counts(l.Stats()))
			})
		})
	}
}

// No call waits for longer than the units can count.
func TestWaitingIsBoundedByDecades(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const year = 365 * 24 * time.Hour
		l := throttle.New(throttle.Config{Rate: every(10 * year), Burst: 1, MaxWait: -1})
		require.True(t, l.Allow())
		ctx, cancel := context.WithCancel(t.Context())
		var tooLong atomic.Int64
		for range 10 {
			go func() {
				if reason(l.Wait(ctx)) == throttle.WaitTooLong {
					tooLong.Add(1)
				}
			}()
			synctest.Wait()
		}
		require.Equal(t, 3, l.Stats().Queued)
		require.EqualValues(t, 7, tooLong.Load())
		cancel()
		synctest.Wait()
	})
}

// A call waits no longer than MaxWait, also if others have gone into debt meanwhile.
func TestDebtMakesAWaitTooLong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := throttle.New(throttle.Config{Rate: 1, Burst: 4, MaxWait: 3 * time.Second})
		r, err := l.Reserve(t.Context(), 4)
		require.NoError(t, err)
		start := time.Now()
		var calls sync.WaitGroup
		for range 2 {
			calls.Go(func() {
				err := l.Wait(t.Context())
				require.Equal(t, throttle.WaitTooLong, reason(err))
				limited, _ := errors.AsType[*throttle.LimitedError](err)
				require.Equal(t, 3*time.Second, limited.Waited)
				require.Contains(t, []time.Duration{2 * time.Second, 3 * time.Second}, limited.RetryAfter(),
					"alone, or behind the other")
				require.Equal(t, 3*time.Second, time.Since(start))
			})
		}
		synctest.Wait()
		r.Settle(8)
		calls.Wait()
		require.EqualValues(t, 8, l.Stats().Spent)
	})
}

// A costly call that has waited for MaxWait in vain moves up those behind it, at once.
func TestTimedOutWaiterMovesOthersUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := throttle.New(throttle.Config{Rate: 1, Burst: 4, MaxWait: 3 * time.Second, Cost: cost})
		r, err := l.Reserve(t.Context(), 4)
		require.NoError(t, err)
		start := time.Now()
		go func() { _ = l.Wait(of(3)) }()
		synctest.Wait()
		r.Settle(5)
		time.Sleep(2 * time.Second)
		require.NoError(t, l.Wait(of(1)))
		require.Equal(t, 3*time.Second, time.Since(start))
	})
}

// A lateContext ends at a time, but tells it only who asks again: the end comes after its turn.
type lateContext struct {
	context.Context
	at    time.Time
	asked int
}

func (c *lateContext) Err() error {
	if time.Now().Before(c.at) {
		return nil
	}
	if c.asked++; c.asked > 1 {
		return context.Canceled
	}
	return nil
}

// A call whose ctx has ended is not made, also if its turn has come before.
func TestEndedWaiterTakesNoTokens(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := throttle.New(throttle.Config{Rate: 1, Burst: 1, MaxWait: -1})
		require.True(t, l.Allow())
		err := l.Wait(&lateContext{Context: t.Context(), at: time.Now().Add(time.Second)})
		require.Equal(t, throttle.ContextEnded, reason(err))
		require.ErrorIs(t, err, context.Canceled)
	})
}

// A call whose ctx ends at the moment at which its turn comes is admitted or refused. If it is
// refused after its turn has come, the token of the rate is lost, and that of the quota is not.
func TestTokenAtTheEndOfTheContext(t *testing.T) {
	refused := 0
	for range 50 {
		synctest.Test(t, func(t *testing.T) {
			l := throttle.New(throttle.Config{Rate: 1, Burst: 1, MaxWait: -1,
				Quotas: []throttle.Quota{{N: 3, Window: throttle.Window{Every: time.Hour}}}})
			require.True(t, l.Allow())
			ctx, cancel := context.WithCancel(t.Context())
			time.AfterFunc(time.Second, cancel)
			var calls sync.WaitGroup
			var err error
			calls.Go(func() { err = l.Wait(ctx) })
			synctest.Wait()
			start := time.Now()
			require.NoError(t, l.Wait(t.Context()))
			second := time.Since(start)
			calls.Wait()
			require.Contains(t, []throttle.Reason{"", throttle.ContextEnded}, reason(err))
			require.Contains(t, []time.Duration{time.Second, 2 * time.Second}, second)
			require.True(t, err != nil || second == 2*time.Second)
			time.Sleep(time.Second)
			require.Equal(t, err != nil, l.Allow(), "the quota has the token of the one who left")
			if err != nil {
				refused++
			}
		})
	}
	require.NotZero(t, refused)
}
