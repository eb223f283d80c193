package throttle_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/throttle"
)

// A bucketRedis is a fakeRedis that works as the script does, for one key and with the
// clock of the test.
type bucketRedis struct {
	rate  float64
	burst float64
	trip  time.Duration // that an answer takes

	mu    sync.Mutex
	left  float64
	at    time.Time
	trips int
}

func (b *bucketRedis) eval(_ context.Context, _ string, _ []string, args ...any) (any, error) {
	time.Sleep(b.trip)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.trips++
	if b.at.IsZero() {
		b.left, b.at = b.burst, time.Now()
	}
	b.left = min(b.burst, b.left+b.rate*time.Since(b.at).Seconds())
	b.at = time.Now()
	micros := func(tokens float64) int64 { return int64(tokens / b.rate * 1e6) }
	var last int
	for i := 6; i < len(args); i += 3 {
		if last = args[i].(int); float64(last) > b.burst {
			return nil, errors.New("more than can ever be there")
		}
		if float64(last) <= b.left {
			b.left -= float64(last)
			return []any{int64(last), int64(0), micros(b.burst - b.left)}, nil
		}
	}
	return []any{int64(0), micros(float64(last) - b.left), micros(b.burst - b.left)}, nil
}

// Whatever the load, a call waits for the trip that is under way and for its own, and
// calls are admitted at the full rate of the limit.
func TestSharedBatchDoesNotQueueUnderOverload(t *testing.T) {
	for _, times := range []int{1, 2, 20} {
		synctest.Test(t, func(t *testing.T) {
			const rate, burst, batch, seconds = 500, 100, 10, 10
			redis := &bucketRedis{rate: rate, burst: burst, trip: 10 * time.Millisecond}
			s := throttle.NewShared(throttle.SharedConfig{
				Name: "api", Eval: redis.eval, Rate: rate, Burst: burst, Batch: batch, OnOutage: throttle.RefuseAll,
			})
			var mu sync.Mutex
			var slowest time.Duration
			var calls sync.WaitGroup
			for range rate * seconds {
				for range times {
					calls.Go(func() {
						came := time.Now()
						_ = s.Wait(t.Context(), "")
						mu.Lock()
						defer mu.Unlock()
						slowest = max(slowest, time.Since(came))
					})
				}
				time.Sleep(time.Second / rate)
			}
			calls.Wait()
			require.LessOrEqual(t, slowest, 2*redis.trip)
			stats := s.Stats()
			require.EqualValues(t, rate*seconds*times, stats.Admitted+stats.Refused)
			require.LessOrEqual(t, stats.Admitted, int64(burst+rate*seconds+batch))
			require.GreaterOrEqual(t, stats.Admitted, int64(rate*seconds-1))
			require.Zero(t, stats.Failed)
		})
	}
}

// Calls that come together are asked for together, also where the limit has not
// enough for all.
func TestSharedBatchAsksForAllWaiters(t *testing.T) {
	for _, c := range []struct{ burst, calls, atLeast, most, trips int }{
		{burst: 1000, calls: 800, atLeast: 800, most: 800, trips: 2},
		{burst: 100, calls: 800, atLeast: 50, most: 100, trips: 2},
		{burst: 20, calls: 1, atLeast: 1, most: 1, trips: 1},
	} {
		synctest.Test(t, func(t *testing.T) {
			redis := &bucketRedis{rate: 1e-3, burst: float64(c.burst), trip: time.Millisecond}
			s := throttle.NewShared(throttle.SharedConfig{
				Name: "api", Eval: redis.eval, Rate: 1e-3, Burst: c.burst, Batch: 10, OnOutage: throttle.RefuseAll,
			})
			var calls sync.WaitGroup
			for range c.calls {
				calls.Go(func() {
					if err := s.Wait(t.Context(), ""); err != nil {
						limited, _ := errors.AsType[*throttle.LimitedError](err)
						require.Equal(t, throttle.OverLimit, limited.Reason)
						require.Positive(t, limited.RetryAfter())
					}
				})
			}
			calls.Wait()
			require.Zero(t, s.Stats().Failed)
			require.LessOrEqual(t, redis.trips, c.trips)
			require.GreaterOrEqual(t, s.Stats().Admitted, int64(c.atLeast))
			require.LessOrEqual(t, s.Stats().Admitted, int64(c.most))
		})
	}
}

// Calls that come during a round trip are served from its tokens, if there are enough.
// Calls that have left by then take nothing.
func TestSharedBatchServesFromLeftoverTokens(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		redis := &bucketRedis{rate: 1e-3, burst: 100, trip: 10 * time.Millisecond}
		s := throttle.NewShared(throttle.SharedConfig{
			Name: "api", Eval: redis.eval, Rate: 1e-3, Burst: 100, Batch: 10, OnOutage: throttle.RefuseAll,
		})
		var calls sync.WaitGroup
		call := func(ctx context.Context, n int) {
			for range n {
				calls.Go(func() { _ = s.Wait(ctx, "") })
			}
			synctest.Wait()
		}
		impatient, cancel := context.WithCancel(t.Context())
		call(t.Context(), 1)
		call(impatient, 20)
		call(t.Context(), 5)
		time.Sleep(5 * time.Millisecond)
		cancel()
		calls.Wait()
		for range 4 {
			require.NoError(t, s.Wait(t.Context(), ""))
		}
		require.EqualValues(t, 1, s.Stats().Asked)
		require.EqualValues(t, 10, s.Stats().Spent)
		require.NoError(t, s.Wait(t.Context(), ""))
		require.EqualValues(t, 2, s.Stats().Asked)
	})
}

// The tokens of a batch can be spent in an outage, too.
func TestSharedBatchKeepsItsTokensInAnOutage(t *testing.T) {
	n := 4
	f := &fakeRedis{answer: answers(10, 0, 0)}
	s := throttle.NewShared(throttle.SharedConfig{
		Timeout: time.Minute,
		Name:    "api", Eval: f.eval, Rate: 20, Batch: 10, OnOutage: throttle.RefuseAll, RetryEvery: time.Hour,
	})
	require.True(t, s.Take(t.Context(), "", n).OK)
	f.answer = down
	n = 7
	require.False(t, s.Take(t.Context(), "", n).OK)
	n = 6
	require.True(t, s.Take(t.Context(), "", n).OK)
	require.False(t, s.Take(t.Context(), "", n).OK)
}

// A call that costs more than there is leaves the tokens to cheaper calls. Each refused
// call is told when to come back for its own cost.
func TestSharedBatchServesTheCheapFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		type cost struct{}
		redis := &bucketRedis{rate: 1, burst: 10, trip: time.Millisecond}
		s := throttle.NewShared(throttle.SharedConfig{
			Name: "api", Eval: redis.eval, Rate: 1, Burst: 10, Batch: 2, OnOutage: throttle.RefuseAll,
			Cost: func(ctx context.Context) int { return ctx.Value(cost{}).(int) },
		})
		of := func(n int) context.Context { return context.WithValue(t.Context(), cost{}, n) }
		require.NoError(t, s.Wait(of(7), ""))
		var calls sync.WaitGroup
		admitted := make(map[int]bool)
		var mu sync.Mutex
		for _, n := range []int{9, 2, 8} {
			calls.Go(func() {
				err := s.Wait(of(n), "")
				mu.Lock()
				defer mu.Unlock()
				admitted[n] = err == nil
				if limited, isLimited := errors.AsType[*throttle.LimitedError](err); isLimited {
					// 3 tokens were left, less the 2 that one has got, or all of them.
					require.InDelta(t, time.Duration(n-1)*time.Second, limited.RetryAfter(), 2.1e9)
				}
			})
		}
		calls.Wait()
		require.Equal(t, map[int]bool{2: true, 8: false, 9: false}, admitted)
	})
}

// The tokens of calls that give up are kept for others, but less than a batch.
func TestSharedBatchHoldsLessThanABatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		redis := &bucketRedis{rate: 1e-3, burst: 100, trip: 10 * time.Millisecond}
		s := throttle.NewShared(throttle.SharedConfig{
			Name: "api", Eval: redis.eval, Rate: 1e-3, Burst: 100, Batch: 10, OnOutage: throttle.RefuseAll,
		})
		require.NoError(t, s.Wait(t.Context(), "")) // 9 are left
		for range 9 {
			require.NoError(t, s.Wait(t.Context(), ""))
		}
		impatient, cancel := context.WithTimeout(t.Context(), 25*time.Millisecond)
		defer cancel()
		var calls sync.WaitGroup
		for range 50 { // the trip for the first, and one for 49, of which none is waited for
			calls.Go(func() { _ = s.Wait(impatient, "") })
		}
		time.Sleep(5 * time.Millisecond)
		cancel()
		calls.Wait()
		time.Sleep(time.Second)
		trips := s.Stats().Asked
		held := 0
		for s.Stats().Asked == trips {
			require.NoError(t, s.Wait(t.Context(), ""))
			if s.Stats().Asked == trips {
				held++
			}
		}
		require.LessOrEqual(t, held, 9)
		require.Positive(t, held)
	})
}

// after answers as Redis does, after a time, to a client that heeds its ctx.
func after(d time.Duration) func(context.Context) (any, error) {
	return func(ctx context.Context) (any, error) {
		select {
		case <-time.After(d):
			return []any{int64(1), int64(0), int64(0)}, nil
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// faults are the ways in which Redis fails.
var faults = map[string]func(ctx context.Context) (any, error){
	"refused":        func(context.Context) (any, error) { return nil, errDown },
	"hanging":        after(time.Hour),
	"slow":           after(60 * time.Millisecond),
	"something else": func(context.Context) (any, error) { return "PONG", nil },
}

// callers are the ways in which calls are made: how long they wait at most.
var callers = map[string]func(context.Context) (context.Context, context.CancelFunc){
	"patient": context.WithCancel,
	"with a deadline": func(ctx context.Context) (context.Context, context.CancelFunc) {
		return context.WithTimeout(ctx, 20*time.Millisecond)
	},
	"that cancel": func(ctx context.Context) (context.Context, context.CancelFunc) {
		ctx, cancel := context.WithCancel(ctx)
		time.AfterFunc(10*time.Millisecond, cancel)
		return ctx, cancel
	},
}

// However Redis fails and however long calls wait, the outage is noticed after one
// Timeout. Then calls follow OnOutage without waiting, except for one each RetryEvery.
func TestSharedNoticesEachOutage(t *testing.T) {
	for fault, answer := range faults {
		for caller, within := range callers {
			for _, batch := range []int{1, 10} {
				t.Run(fmt.Sprintf("%s/callers %s/batch %d", fault, caller, batch), func(t *testing.T) {
					synctest.Test(t, func(t *testing.T) {
						var mu sync.Mutex
						healthy := false
						var told []error
						f := &fakeRedis{answer: func(ctx context.Context, args []any) (any, error) {
							mu.Lock()
							well := healthy
							mu.Unlock()
							if well {
								return []any{int64(args[6].(int)), int64(0), int64(0)}, nil
							}
							return answer(ctx)
						}}
						s := throttle.NewShared(throttle.SharedConfig{
							Name: "api", Eval: f.eval, Rate: 1000, Burst: 1000, Batch: batch, OnOutage: throttle.AdmitAll,
							OnStoreError: func(_ context.Context, err error) { told = append(told, err) },
						})
						start := time.Now()
						call := func() error {
							ctx, cancel := within(t.Context())
							defer cancel()
							came := time.Now()
							err := s.Wait(ctx, "")
							require.LessOrEqual(t, time.Since(came), 50*time.Millisecond, "Timeout")
							return err
						}
						for time.Since(start) <= 50*time.Millisecond {
							_ = call()
							time.Sleep(time.Millisecond)
						}
						time.Sleep(20 * time.Millisecond) // for one that cancels at the last moment
						synctest.Wait()
						require.True(t, s.Stats().Down)
						before, since := s.Stats(), time.Now()
						for range 1000 {
							require.NoError(t, call())
						}
						require.Zero(t, time.Since(since), "nobody waits")
						require.EqualValues(t, 1000, s.Stats().Alone-before.Alone)
						require.NotEmpty(t, told)

						// One call each second finds out how things are.
						time.Sleep(100 * time.Millisecond) // those that were under way
						before = s.Stats()
						for range 500 {
							_ = call()
							time.Sleep(10 * time.Millisecond)
						}
						require.LessOrEqual(t, s.Stats().Asked-before.Asked, int64(12), "a call that gives up makes it two round trips")
						require.InDelta(t, 5, s.Stats().Failed-before.Failed, 1)

						mu.Lock()
						healthy = true
						mu.Unlock()
						time.Sleep(1100 * time.Millisecond)
						require.NoError(t, call())
						require.False(t, s.Stats().Down)
						alone := s.Stats().Alone
						for range 100 {
							require.NoError(t, call())
						}
						require.Equal(t, alone, s.Stats().Alone, "Redis decides again")
						time.Sleep(time.Minute)
						synctest.Wait()
						require.False(t, s.Stats().Down, "nothing was under way any more")
					})
				})
			}
		}
	}
}

// One of three servers fails: the keys of the others do not notice.
func TestSharedOutageOfOneShard(t *testing.T) {
	for fault, answer := range faults {
		t.Run(fault, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				shard := func(key string) int { return int(key[len(key)-1]-'0') % 3 }
				s := throttle.NewShared(throttle.SharedConfig{
					Name: "api", Rate: 1000, Burst: 1000, OnOutage: throttle.RefuseAll,
					Eval: func(ctx context.Context, _ string, keys []string, args ...any) (any, error) {
						if shard(keys[0]) == 0 {
							return answer(ctx)
						}
						return []any{int64(1), int64(0), int64(0)}, nil
					},
				})
				of := func(i int) string { return fmt.Sprint("tenant-", i) }
				for range 50 {
					for i := range 9 {
						if err := s.Wait(t.Context(), of(i)); i%3 == 0 {
							require.ErrorIs(t, err, throttle.ErrOutage)
						} else {
							require.NoError(t, err)
						}
					}
				}
				stats := s.Stats()
				require.True(t, stats.Down)
				require.EqualValues(t, 50*3, stats.Alone)
				require.EqualValues(t, 3, stats.Failed, "one of each key")
				require.EqualValues(t, 50*6+3, stats.Asked)
			})
		})
	}
}

// A tenant that came once, in an outage, and never again does not keep the outage up: it is
// over when Redis has answered for others.
func TestSharedOutageEndsForKeysThatDoNotComeAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeRedis{answer: down}
		s := throttle.NewShared(throttle.SharedConfig{Name: "api", Rate: 1, Eval: f.eval, OnOutage: throttle.AdmitAll, RetryEvery: 5 * time.Second})
		var seen events
		defer s.Observe(seen.add)()
		for _, tenant := range []string{"a", "b", "c"} {
			require.NoError(t, s.Wait(t.Context(), tenant))
		}
		require.Len(t, seen.take(), 3)
		f.answer = answers(int64(1), int64(0), int64(0))

		time.Sleep(6 * time.Second)
		require.NoError(t, s.Wait(t.Context(), "a"))
		require.Equal(t, []throttle.Event{{Kind: throttle.EventRecovered, Name: "api", Key: "a"}}, seen.take())
		require.True(t, s.Stats().Down, "it may be another server, and b and c had no time to try it")

		time.Sleep(5 * time.Second)
		require.NoError(t, s.Wait(t.Context(), "a"))
		require.ElementsMatch(t, []throttle.Event{
			{Kind: throttle.EventRecovered, Name: "api", Key: "b"},
			{Kind: throttle.EventRecovered, Name: "api", Key: "c"},
		}, seen.take())
		require.False(t, s.Stats().Down)
		require.Zero(t, s.OutageSlots())
	})
}

// The outage of a server goes on for as long as calls find it down, whatever others answer.
func TestSharedOutageGoesOnWhileCallsTry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := throttle.NewShared(throttle.SharedConfig{
			Name: "api", Rate: 1000, Burst: 1000, OnOutage: throttle.AdmitAll,
			Eval: func(_ context.Context, _ string, keys []string, _ ...any) (any, error) {
				if strings.HasSuffix(keys[0], "down") {
					return nil, errDown
				}
				return []any{int64(1), int64(0), int64(0)}, nil
			},
		})
		var seen events
		defer s.Observe(seen.add)()
		for i := range 600 {
			require.NoError(t, s.Wait(t.Context(), "up"))
			if i%9 == 0 { // seldom, but more often than every second
				require.NoError(t, s.Wait(t.Context(), "down"))
			}
			time.Sleep(100 * time.Millisecond)
		}
		require.Len(t, seen.take(), 1)
		require.True(t, s.Stats().Down)
		require.EqualValues(t, 1, s.Stats().Outages)
	})
}

// The memory of outages is bounded whatever the keys, and freed when they are over.
func TestSharedOutageOfManyKeysIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var down error = errDown
		s := throttle.NewShared(throttle.SharedConfig{
			Name: "api", Rate: 1, OnOutage: throttle.AdmitAll,
			Eval: func(context.Context, string, []string, ...any) (any, error) { return []any{1, 0, 0}, down },
		})
		for _, down = range []error{errDown, nil} {
			for i := range 40_000 { // each slot two or three times
				require.NoError(t, s.Wait(t.Context(), fmt.Sprint(i)))
			}
			if down != nil {
				require.LessOrEqual(t, s.OutageSlots(), 16384)
				require.Greater(t, s.OutageSlots(), 12_000)
			}
			time.Sleep(time.Second)
		}
		require.Zero(t, s.OutageSlots())
		require.False(t, s.Stats().Down)
	})
}

// The slots are those of Redis Cluster: values of its specification, and of CLUSTER
// KEYSLOT.
func TestSharedOutageSlots(t *testing.T) {
	for key, slot := range map[string]uint16{
		"123456789": 12739, "foo": 12182, "": 0,
		"foo{bar}{zap}": 5061, "bar": 5061, "foo{{bar}}zap": 4015, "{bar": 4015,
		"foo{}{bar}": 8363, "{user1000}.following": 3443, "user1000": 3443, "{open": 7674,
	} {
		require.Equal(t, slot, throttle.SlotOf(key), key)
	}
}

// A client that ignores its ctx delays its own callers only.
func TestSharedNoticesAnEvalThatHeedsNoContext(t *testing.T) {
	for _, batch := range []int{1, 10} {
		synctest.Test(t, func(t *testing.T) {
			s := throttle.NewShared(throttle.SharedConfig{
				Name: "api", Rate: 100, Batch: batch, OnOutage: throttle.AdmitAll, RetryEvery: time.Hour,
				Eval: func(_ context.Context, _ string, _ []string, args ...any) (any, error) {
					time.Sleep(3 * time.Second)
					return []any{args[6], 0, 0}, nil
				},
			})
			var calls sync.WaitGroup
			for range 5 {
				calls.Go(func() { require.NoError(t, s.Wait(t.Context(), "")) })
			}
			time.Sleep(50 * time.Millisecond)
			synctest.Wait()
			require.True(t, s.Stats().Down)
			since := time.Now()
			for range 100 {
				require.NoError(t, s.Wait(t.Context(), ""))
			}
			require.Zero(t, time.Since(since))
			calls.Wait()
			require.Equal(t, batch > 1, time.Since(since) == 0, "a batch is not waited for")
			time.Sleep(time.Minute)
			require.True(t, s.Stats().Down, "an answer that comes late is none")
			require.EqualValues(t, 105, s.Stats().Alone)
		})
	}
}

// Calls that give up one after the other make one round trip to find out.
func TestSharedFindsOutOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeRedis{answer: hanging}
		s := throttle.NewShared(throttle.SharedConfig{Name: "api", Eval: f.eval, Rate: 1e4, OnOutage: throttle.RefuseAll})
		impatient, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		var calls sync.WaitGroup
		for range 1000 {
			calls.Go(func() { require.ErrorIs(t, s.Wait(impatient, ""), context.DeadlineExceeded) })
		}
		calls.Wait()
		synctest.Wait()
		require.Len(t, f.made(), 1001)
		time.Sleep(50 * time.Millisecond)
		synctest.Wait()
		require.True(t, s.Stats().Down)
		require.EqualValues(t, 1, s.Stats().Failed)
	})
}

// A Redis that answered when it was looked into may hang the next time.
func TestSharedFindsOutAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var hanging atomic.Bool
		s := throttle.NewShared(throttle.SharedConfig{
			Name: "api", Rate: 1e4, OnOutage: throttle.RefuseAll,
			Eval: func(ctx context.Context, _ string, _ []string, args ...any) (any, error) {
				if hanging.Load() || len(args) > 6 {
					<-ctx.Done()
					return nil, ctx.Err()
				}
				return []any{0, 0, 0}, nil
			},
		})
		for range 3 {
			for _, hangs := range []bool{false, true} {
				hanging.Store(hangs)
				ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
				require.ErrorIs(t, s.Wait(ctx, ""), context.DeadlineExceeded)
				cancel()
				time.Sleep(2 * time.Second)
				require.Equal(t, hangs, s.Stats().Down)
			}
		}
	})
}

// An answer that comes with the end of ctx is an answer.
func TestSharedAnswerAtTheEndOfTheContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	s := throttle.NewShared(throttle.SharedConfig{
		Timeout: time.Minute,
		Name:    "api", Rate: 1, OnOutage: throttle.RefuseAll,
		Eval: func(context.Context, string, []string, ...any) (any, error) {
			cancel()
			return []any{1, 0, 0}, nil
		},
	})
	require.NoError(t, s.Wait(ctx, ""))
	require.EqualValues(t, 1, s.Stats().Asked)
}

// Of all calls that come when it is time to try again, one does.
func TestSharedIsTriedByOneCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var told atomic.Int64
		f := &fakeRedis{answer: hanging}
		s := throttle.NewShared(throttle.SharedConfig{
			Name: "api", Eval: f.eval, Rate: 10, OnOutage: throttle.AdmitAll,
			OnStoreError: func(context.Context, error) { told.Add(1) },
		})
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		require.ErrorIs(t, s.Wait(ctx, ""), context.DeadlineExceeded)
		time.Sleep(1050 * time.Millisecond)
		require.Len(t, f.made(), 2)
		start := time.Now()
		var try sync.WaitGroup
		try.Go(func() { require.NoError(t, s.Wait(t.Context(), "")) })
		synctest.Wait()
		for range 100 {
			require.NoError(t, s.Wait(t.Context(), ""))
		}
		require.Zero(t, time.Since(start))
		require.EqualValues(t, 1, told.Load(), "of what nobody was told before")
		require.Len(t, f.made(), 3)
		try.Wait()
		require.Equal(t, 50*time.Millisecond, time.Since(start))
		require.EqualValues(t, 2, told.Load())
	})
}

// Callers that leave say nothing of a Redis that answers.
func TestSharedIsNotDownForCallersThatLeave(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeRedis{answer: func(ctx context.Context, args []any) (any, error) {
			if _, err := after(10 * time.Millisecond)(ctx); err != nil || len(args) > 6 {
				return []any{int64(1), int64(0), int64(0)}, err
			}
			return []any{int64(0), int64(0), int64(0)}, nil
		}}
		s := throttle.NewShared(throttle.SharedConfig{Name: "api", Eval: f.eval, Rate: 1e4, OnOutage: throttle.RefuseAll})
		for range 10 {
			ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
			require.ErrorIs(t, s.Wait(ctx, ""), context.DeadlineExceeded)
			cancel()
		}
		time.Sleep(time.Second)
		require.Zero(t, s.Stats().Failed)
		require.Zero(t, s.OutageSlots())
	})
}

// A panic of Eval passes through to the call, or is an outage where it is not one
// call that asks.
func TestSharedPanicOfEval(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var told error
		cfg := throttle.SharedConfig{
			Name: "api", Rate: 10, OnOutage: throttle.RefuseAll,
			Eval:         func(context.Context, string, []string, ...any) (any, error) { panic("boom") },
			OnStoreError: func(_ context.Context, err error) { told = err },
		}
		s := throttle.NewShared(cfg)
		require.PanicsWithValue(t, "boom", func() { _ = s.Wait(t.Context(), "") })
		time.Sleep(time.Minute)
		require.False(t, s.Stats().Down, "it says nothing about Redis")

		cfg.Batch = 2
		s = throttle.NewShared(cfg)
		require.ErrorIs(t, s.Wait(t.Context(), ""), throttle.ErrOutage)
		require.True(t, strings.HasPrefix(told.Error(), "throttle: api: Eval panicked: boom\n"), told)
		require.Contains(t, told.Error(), "outage_test.go", "where")

		cfg.Eval = func(context.Context, string, []string, ...any) (any, error) { runtime.Goexit(); return nil, nil }
		s = throttle.NewShared(cfg)
		require.ErrorIs(t, s.Wait(t.Context(), ""), throttle.ErrOutage)
		require.EqualError(t, told, "throttle: Eval called runtime.Goexit")
	})
}

// OnStoreError is called by the next call if all calls of a failed trip have left.
func TestSharedTellsOfEachOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		told := 0
		s := throttle.NewShared(throttle.SharedConfig{
			Name: "api", Rate: 10, OnOutage: throttle.RefuseAll, Eval: (&fakeRedis{answer: hanging}).eval,
			OnStoreError: func(_ context.Context, err error) {
				require.ErrorIs(t, err, context.DeadlineExceeded)
				told++
			},
		})
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		require.ErrorIs(t, s.Wait(ctx, ""), context.DeadlineExceeded)
		time.Sleep(time.Second)
		require.Zero(t, told)
		for range 10 {
			require.ErrorIs(t, s.Wait(t.Context(), ""), throttle.ErrOutage)
		}
		require.Equal(t, 1, told)
		time.Sleep(100 * time.Millisecond) // it is tried again
		for range 10 {
			require.ErrorIs(t, s.Wait(t.Context(), ""), throttle.ErrOutage)
		}
		require.Equal(t, 2, told)
	})
}

// The values of the call's ctx reach Eval, its end does not.
func TestSharedEvalHasTheValuesOfTheCall(t *testing.T) {
	type trace struct{}
	for _, batch := range []int{1, 2} {
		s := throttle.NewShared(throttle.SharedConfig{
			Timeout: time.Minute,
			Name:    "api", Rate: 10, Batch: batch, OnOutage: throttle.RefuseAll,
			Eval: func(ctx context.Context, _ string, _ []string, args ...any) (any, error) {
				require.Equal(t, "t1", ctx.Value(trace{}))
				_, limited := ctx.Deadline()
				require.True(t, limited)
				return []any{args[6], 0, 0}, nil
			},
		})
		require.NoError(t, s.Wait(context.WithValue(t.Context(), trace{}, "t1"), ""))
	}
}
