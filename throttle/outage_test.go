package throttle_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/linger"
	"github.com/go-resilience/resilience/throttle"
)

// A bucketRedis is a fakeRedis that works as the script does, for one key without quotas and
// with the clock of the test.
type bucketRedis struct {
	mu  sync.Mutex
	tat time.Time
}

func (b *bucketRedis) eval(_ context.Context, _ string, _ []string, args ...any) (any, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := time.Now()
	micros := func(n any) time.Duration {
		text := fmt.Sprint(n)
		us, _ := strconv.ParseInt(text, 10, 64)
		return time.Duration(us) * time.Microsecond
	}
	if b.tat.Before(now) {
		b.tat = now
	}
	b.tat = b.tat.Add(micros(args[10])) // spent alone
	if b.tat.Before(now) {
		b.tat = now
	}
	if latest := now.Add(2*micros(args[0]) + time.Microsecond); b.tat.After(latest) {
		b.tat = latest
	}
	next := b.tat.Add(micros(args[7]))
	wait := max(0, next.Sub(now)-micros(args[2]))
	taken := 0
	if wait == 0 {
		b.tat, taken = next, args[6].(int)
	}
	return []any{taken, wait.Microseconds(), b.tat.Sub(now).Microseconds()}, nil
}

// slowly answers with what eval returns, after a time, to a client that heeds its ctx.
func slowly(ctx context.Context, d time.Duration, value any, err error) (any, error) {
	select {
	case <-time.After(d):
		return value, err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// One answer in 1.5 s comes late, at each of several instances that call all the time. The
// plan is kept, and used up.
func TestSharedLateAnswersGiveNothing(t *testing.T) {
	const rate, burst, seconds = 3, 5, 40
	for _, instances := range []int{2, 8} {
		for seed := range uint64(8) {
			synctest.Test(t, func(t *testing.T) {
				redis := &bucketRedis{}
				var admitted, late atomic.Int64
				var all sync.WaitGroup
				for i := range instances {
					random := rand.New(rand.NewPCG(seed, uint64(i)))
					var next atomic.Int64
					next.Store(time.Now().UnixNano() + random.Int64N(15e8))
					s := throttle.NewShared(throttle.SharedConfig{
						Name: "plan", Rate: rate, Burst: burst, Instances: instances,
						Eval: func(ctx context.Context, script string, keys []string, args ...any) (any, error) {
							value, err := redis.eval(ctx, script, keys, args...)
							if time.Now().UnixNano() < next.Load() {
								return slowly(ctx, time.Millisecond, value, err)
							}
							next.Add(15e8)
							late.Add(1)
							return slowly(ctx, 200*time.Millisecond, value, err)
						},
					})
					all.Go(func() {
						for end := time.Now().Add(seconds * time.Second); time.Now().Before(end); {
							if s.Allow(t.Context(), "") {
								admitted.Add(1)
							}
							time.Sleep(time.Duration(20e6 + random.Int64N(40e6)))
						}
						require.Zero(t, s.Stats().Outages)
					})
				}
				all.Wait()
				const plan = burst + rate*seconds
				t.Logf("%d instances: %d admitted, %d late answers", instances, admitted.Load(), late.Load())
				require.InDelta(t, 27*instances, late.Load(), float64(instances))
				require.LessOrEqual(t, float64(admitted.Load()), 1.05*plan)
				require.GreaterOrEqual(t, float64(admitted.Load()), 0.9*plan)
				time.Sleep(5 * time.Second)
			})
		}
	}
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

// However Redis fails and however long calls wait, the outage is noticed after two
// Timeouts. Then calls follow OnOutage without waiting, except for one each RetryEvery.
func TestSharedNoticesEachOutage(t *testing.T) {
	for fault, answer := range faults {
		for caller, within := range callers {
			t.Run(fmt.Sprintf("%s/callers %s", fault, caller), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					var mu sync.Mutex
					healthy := false
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
						Name: "api", Eval: f.eval, Rate: 1000, Burst: 1000, OnOutage: throttle.AdmitAll,
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
					for time.Since(start) <= 110*time.Millisecond {
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

					// One call each second finds out how things are.
					time.Sleep(100 * time.Millisecond) // those that were under way
					before = s.Stats()
					for range 500 {
						_ = call()
						time.Sleep(10 * time.Millisecond)
					}
					require.LessOrEqual(t, s.Stats().Asked-before.Asked, int64(6))
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
				each := 1
				if fault == "hanging" || fault == "slow" {
					each = 2
				}
				require.EqualValues(t, 3*each, stats.Failed)
				require.EqualValues(t, 50*6+3*each, stats.Asked)
				time.Sleep(time.Minute) // for the trips under way
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
	synctest.Test(t, func(t *testing.T) {
		s := throttle.NewShared(throttle.SharedConfig{
			Name: "api", Rate: 100, OnOutage: throttle.AdmitAll, RetryEvery: time.Hour,
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
		require.Zero(t, time.Since(since), "nobody waits for Eval itself")
		time.Sleep(time.Minute)
		require.True(t, s.Stats().Down, "an answer that comes late is none")
		require.EqualValues(t, 105, s.Stats().Alone)
	})
}

// Tokens of a call that has left are lost: given back later, when the burst is full again,
// they would be more than the burst.
func TestSharedAdmitsNoMoreForCallsThatLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		redis := &bucketRedis{}
		instance := func() *throttle.Shared {
			return throttle.NewShared(throttle.SharedConfig{
				Name: "api", Rate: 1, Burst: 3, OnOutage: throttle.RefuseAll,
				Eval: func(ctx context.Context, script string, keys []string, args ...any) (any, error) {
					value, err := redis.eval(ctx, script, keys, args...)
					return slowly(ctx, 10*time.Millisecond, value, err)
				},
			})
		}
		one, other := instance(), instance()
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
		require.ErrorIs(t, one.Wait(ctx, ""), context.DeadlineExceeded)
		cancel()
		time.Sleep(time.Minute)
		for range 3 {
			require.True(t, other.Allow(t.Context(), ""))
		}
		require.False(t, one.Allow(t.Context(), ""))
		require.Zero(t, one.Stats().Failed)
		require.Zero(t, one.OutageSlots())
	})
}

// What was admitted alone is debited when Redis answers again, as if it had been when it was
// admitted: tokens that have refilled since are not.
func TestSharedDebitsWhatItAdmittedAlone(t *testing.T) {
	for _, c := range []struct {
		outage time.Duration
		left   int // of 20, after 5 at once at the beginning of the outage
	}{{0, 14}, {2 * time.Second, 16}, {time.Minute, 19}} {
		synctest.Test(t, func(t *testing.T) {
			redis := &bucketRedis{}
			away := true
			s := throttle.NewShared(throttle.SharedConfig{
				Name: "api", Rate: 1, Burst: 20, Instances: 1, RetryEvery: time.Millisecond,
				Eval: func(ctx context.Context, script string, keys []string, args ...any) (any, error) {
					if away {
						return nil, errDown
					}
					return redis.eval(ctx, script, keys, args...)
				},
			})
			for range 5 {
				require.True(t, s.Allow(t.Context(), ""))
			}
			time.Sleep(c.outage)
			away = false
			time.Sleep(time.Millisecond)
			require.True(t, s.Peek(t.Context(), "").OK, "Redis answers")
			require.Equal(t, c.left, s.Take(t.Context(), "", 1).Remaining)
		})
	}
}

// told returns the tokens of debts that Redis has been told of.
func told(f *fakeRedis) (tokens int) {
	for _, c := range f.made() {
		if len(c.args) > 9 {
			tokens += c.args[9].(int)
		}
	}
	return tokens
}

// Each key has a debt of its own, of which Redis is told again if its answer is lost.
func TestSharedOwesForEachKey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeRedis{answer: down}
		s := throttle.NewShared(throttle.SharedConfig{Name: "api", Rate: 1e-3, Burst: 1, Eval: f.eval, OnOutage: throttle.AdmitAll})
		keys := []string{"a", "b", "c"}
		for i, key := range keys {
			for range i + 1 {
				require.True(t, s.Allow(t.Context(), key))
			}
		}
		owing := 0 // more of each key: the call by which Redis was told
		for _, last := range []bool{false, true} {
			time.Sleep(1500 * time.Millisecond) // a call of each key tries Redis
			for i, key := range keys {
				f.answer = answers(1, 0, 0)
				require.True(t, s.Allow(t.Context(), key), "the outage is over")
				if !last {
					f.answer = down
				}
				before := told(f)
				require.True(t, s.Allow(t.Context(), key))
				require.Equal(t, i+1+owing, told(f)-before, key)
			}
			owing++
		}
	})
}

// However much was admitted alone, what is owed is never less than nothing: that would give
// tokens.
func TestSharedOwesMoreThanCanBeSaid(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeRedis{answer: down}
		s := throttle.NewShared(throttle.SharedConfig{Name: "api", Rate: 1.0 / (30 * 24 * 3600), Burst: 400, Eval: f.eval, OnOutage: throttle.AdmitAll})
		for range 9000 {
			require.True(t, s.Take(t.Context(), "", 400).OK)
		}
		f.answer = answers(0, 0, 0)
		time.Sleep(time.Second)
		for range 2 { // the outage is over, and the debt is told of
			s.Peek(t.Context(), "")
		}
		require.Equal(t, 9000*400, told(f))
		calls := f.made()
		require.Positive(t, calls[len(calls)-1].args[10])
	})
}

// A Redis that works but whose answers are lost is told of no debt in the outage.
func TestSharedTellsOfADebtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeRedis{answer: hanging}
		s := throttle.NewShared(throttle.SharedConfig{Name: "api", Rate: 1, Eval: f.eval, OnOutage: throttle.AdmitAll})
		for range 300 {
			require.True(t, s.Allow(t.Context(), ""))
			time.Sleep(100 * time.Millisecond)
		}
		time.Sleep(2 * time.Second)
		require.LessOrEqual(t, told(f), 1, "before the outage had begun")
		f.answer = answers(1, 0, 0)
		for range 3 {
			require.True(t, s.Allow(t.Context(), ""))
		}
		require.InDelta(t, s.Stats().Alone, told(f), 1)
	})
}

// Instances that have kept to the limit in an outage, however long it was, owe next to nothing.
func TestSharedOwesNothingForCallsWithinTheLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		redis := &bucketRedis{}
		away := true
		cfg := throttle.SharedConfig{Name: "api", Rate: 10, Burst: 10, Instances: 2}
		cfg.Eval = func(ctx context.Context, script string, keys []string, args ...any) (any, error) {
			if away {
				return nil, errDown
			}
			return redis.eval(ctx, script, keys, args...)
		}
		instances := []*throttle.Shared{throttle.NewShared(cfg), throttle.NewShared(cfg)}
		for i := range 400 {
			away = i < 200
			for _, s := range instances {
				require.True(t, s.Allow(t.Context(), ""), i)
			}
			time.Sleep(250 * time.Millisecond)
		}
	})
}

func TestSharedResetThatFailsForgetsNoDebt(t *testing.T) {
	for resets, owed := range map[bool]int{false: 3, true: 0} {
		synctest.Test(t, func(t *testing.T) {
			f := &fakeRedis{answer: down}
			s := throttle.NewShared(throttle.SharedConfig{Name: "api", Rate: 1, Burst: 3, Eval: f.eval, OnOutage: throttle.AdmitAll})
			require.True(t, s.Take(t.Context(), "", 3).OK)
			require.ErrorIs(t, s.Reset(t.Context(), ""), throttle.ErrOutage)
			f.answer = answers(0, 0, 0)
			if resets {
				require.NoError(t, s.Reset(t.Context(), ""))
			}
			time.Sleep(time.Second)
			s.Peek(t.Context(), "")
			s.Peek(t.Context(), "")
			require.Equal(t, owed, told(f))
		})
	}
}

// Of all calls that come when it is time to try again, one does.
func TestSharedIsTriedByOneCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeRedis{answer: hanging}
		s := throttle.NewShared(throttle.SharedConfig{Name: "api", Eval: f.eval, Rate: 10, OnOutage: throttle.AdmitAll})
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		require.ErrorIs(t, s.Wait(ctx, ""), context.DeadlineExceeded)
		time.Sleep(2100 * time.Millisecond) // a Timeout and a RetryEvery, and another RetryEvery
		require.Len(t, f.made(), 1)
		start := time.Now()
		var try sync.WaitGroup
		try.Go(func() { require.NoError(t, s.Wait(t.Context(), "")) })
		synctest.Wait()
		for range 100 {
			require.NoError(t, s.Wait(t.Context(), ""))
		}
		require.Zero(t, time.Since(start))
		require.Len(t, f.made(), 2)
		try.Wait()
		require.Equal(t, 50*time.Millisecond, time.Since(start))
		time.Sleep(time.Minute) // for the trips under way
	})
}

// A panic of Eval is an outage: it runs on a goroutine of its own.
func TestSharedPanicOfEval(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := throttle.SharedConfig{
			Name: "api", Rate: 10, OnOutage: throttle.RefuseAll,
			Eval: func(context.Context, string, []string, ...any) (any, error) { panic("boom") },
		}
		s := throttle.NewShared(cfg)
		err := s.Wait(t.Context(), "")
		require.ErrorIs(t, err, throttle.ErrOutage)
		require.ErrorContains(t, err, ": throttle: api: Eval panicked: boom\n")
		require.ErrorContains(t, err, "outage_test.go", "where")

		cfg.Eval = func(context.Context, string, []string, ...any) (any, error) { runtime.Goexit(); return nil, nil }
		s = throttle.NewShared(cfg)
		err = s.Wait(t.Context(), "")
		require.ErrorIs(t, err, throttle.ErrOutage)
		require.ErrorContains(t, err, ": throttle: Eval called runtime.Goexit")
	})
}

// An outage that is found out when all calls have left is told of by the next call, although
// that does not ask Redis.
func TestSharedNextCallTellsOfAnOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := throttle.NewShared(throttle.SharedConfig{Name: "api", Rate: 10, OnOutage: throttle.AdmitAll, Eval: (&fakeRedis{answer: hanging}).eval})
		var seen events
		defer s.Observe(seen.add)()
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		require.ErrorIs(t, s.Wait(ctx, "a"), context.DeadlineExceeded)
		time.Sleep(1100 * time.Millisecond)
		seen.take()
		require.True(t, s.Stats().Down)
		require.NoError(t, s.Wait(t.Context(), "a"))
		require.EqualValues(t, 1, s.Stats().Asked)
		require.Equal(t, []throttle.Event{{Kind: throttle.EventOutageBegan, Name: "api", Key: "a", Err: context.DeadlineExceeded}}, seen.take())
	})
}

// The values of the call's ctx reach Eval, its end does not.
func TestSharedEvalHasTheValuesOfTheCall(t *testing.T) {
	type trace struct{}
	s := throttle.NewShared(throttle.SharedConfig{
		Timeout: time.Minute,
		Name:    "api", Rate: 10, OnOutage: throttle.RefuseAll,
		Eval: func(ctx context.Context, _ string, _ []string, args ...any) (any, error) {
			require.Equal(t, "t1", ctx.Value(trace{}))
			_, limited := ctx.Deadline()
			require.True(t, limited)
			return []any{args[6], 0, 0}, nil
		},
	})
	require.NoError(t, s.Wait(context.WithValue(t.Context(), trace{}, "t1"), ""))
}

// What Redis took for nobody, as its answer came late or the call had left, pays for what was
// admitted alone.
func TestSharedLateAnswersPayForDebts(t *testing.T) {
	for _, c := range []struct {
		before, paid, owed int // tokens: admitted before the call, those of its answer, and what is left
	}{{0, 3, 0}, {2, 3, 2}, {2, 0, 5}} {
		synctest.Test(t, func(t *testing.T) {
			f := &fakeRedis{answer: down}
			s := throttle.NewShared(throttle.SharedConfig{Name: "api", Rate: 0.001, Burst: 10, Eval: f.eval, OnOutage: throttle.AdmitAll})
			require.True(t, s.Take(t.Context(), "", c.before).OK)
			time.Sleep(time.Second)
			synctest.Wait()
			f.answer = func(ctx context.Context, _ []any) (any, error) {
				return slowly(ctx, 500*time.Millisecond, []any{c.paid, 0, 0}, nil)
			}
			require.True(t, s.Take(t.Context(), "", 3).OK)
			time.Sleep(2 * time.Second)
			synctest.Wait()
			f.answer = answers(0, 0, 0)
			s.Peek(t.Context(), "")
			s.Peek(t.Context(), "")
			require.Equal(t, c.owed, told(f))
		})
	}
	synctest.Test(t, func(t *testing.T) {
		f := &fakeRedis{answer: down}
		s := throttle.NewShared(throttle.SharedConfig{Name: "api", Rate: 0.001, Burst: 10, Eval: f.eval, OnOutage: throttle.AdmitAll})
		require.True(t, s.Take(t.Context(), "", 5).OK)
		time.Sleep(time.Second)
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
		defer cancel()
		synctest.Wait()
		f.answer = func(ctx context.Context, _ []any) (any, error) {
			return slowly(ctx, 20*time.Millisecond, []any{3, 0, 0}, nil)
		}
		require.False(t, s.Take(ctx, "", 3).OK, "it has left")
		time.Sleep(time.Second)
		synctest.Wait()
		f.answer = answers(0, 0, 0)
		s.Peek(t.Context(), "")
		require.Equal(t, 2, told(f))
	})
}

// An answer that never comes says nothing if Redis has answered another call since.
func TestSharedAnswerThatIsLostIsNoOutageAfterAnother(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeRedis{answer: hanging}
		s := throttle.NewShared(throttle.SharedConfig{Name: "api", Rate: 1, Eval: f.eval, OnOutage: throttle.AdmitAll})
		require.True(t, s.Allow(t.Context(), ""))
		synctest.Wait()
		f.answer = answers(1, 0, 0)
		require.True(t, s.Allow(t.Context(), ""))
		time.Sleep(time.Minute)
		require.EqualValues(t, 0, s.Stats().Outages)
		require.EqualValues(t, 1, s.Stats().Failed)
	})
}

// What Redis refuses takes nothing from the part of this instance, and a Reset is told of no
// debt.
func TestSharedRefusalTakesNothingHere(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeRedis{answer: answers(0, 1000, 1000)}
		s := throttle.NewShared(throttle.SharedConfig{Name: "api", Rate: 0.001, Burst: 8, Instances: 2, Eval: f.eval})
		require.NoError(t, s.Refund(t.Context(), "", 0))
		require.Empty(t, f.made(), "nothing to tell")
		for range 4 {
			require.False(t, s.Allow(t.Context(), ""))
		}
		f.answer = down
		for range 4 {
			require.True(t, s.Allow(t.Context(), ""))
		}
		require.False(t, s.Allow(t.Context(), ""))
		f.answer = answers(0, 0, 0)
		time.Sleep(time.Second)
		require.NoError(t, s.Reset(t.Context(), "other"), "the outage is over")
		time.Sleep(time.Second)
		require.NoError(t, s.Reset(t.Context(), "other"))
		require.NoError(t, s.Reset(t.Context(), ""))
		require.Zero(t, told(f))
	})
}

// Calls, outages of some keys, recoveries and Updates at once lose no call.
func TestSharedUnderStress(t *testing.T) {
	var asked atomic.Int64
	s := throttle.NewShared(throttle.SharedConfig{
		Name: "api", Rate: 1e6, Burst: 1000, Instances: 2, RetryEvery: time.Microsecond, Timeout: time.Minute,
		Eval: func(_ context.Context, _ string, keys []string, args ...any) (any, error) {
			if asked.Add(1)%3 == 0 && !strings.HasSuffix(keys[0], "up") {
				return nil, errDown
			}
			return []any{args[6], 0, 0}, nil
		},
	})
	var calls sync.WaitGroup
	const each = 300
	for i := range 6 {
		calls.Go(func() {
			for n := range each {
				_ = s.Wait(t.Context(), []string{"up", "a", "b"}[(i+n)%3])
			}
		})
	}
	for i := range 3 {
		calls.Go(func() {
			for n := range 50 {
				switch i {
				case 0:
					_ = s.Set("a", throttle.Limit{Rate: 1e6, Burst: 100 + n})
				default:
					if err := s.Update(func(c *throttle.SharedConfig) { c.Burst++ }); err != nil {
						t.Error(err)
					}
				}
			}
		})
	}
	calls.Wait()
	stats := s.Stats()
	require.EqualValues(t, 6*each, stats.Admitted+stats.Refused)
	require.EqualValues(t, asked.Load(), stats.Asked)
	require.Equal(t, 1100, s.Config().Burst, "no Update is lost")
}

func TestSharedWithTheLongestTimeout(t *testing.T) {
	s := throttle.NewShared(throttle.SharedConfig{
		Name: "api", Rate: 10, Timeout: math.MaxInt64, OnOutage: throttle.RefuseAll,
		Eval: func(ctx context.Context, _ string, _ []string, _ ...any) (any, error) {
			return []any{int64(1), int64(0), int64(0)}, ctx.Err()
		},
	})
	require.NoError(t, s.Wait(t.Context(), ""))
}

// The answer of Redis may come when the call that asked is being read. What a client of Redis
// holds is not held for that.
func TestSharedAsksApartFromTheWorkOfItsCall(t *testing.T) {
	ctx, work := linger.Begin(t.Context())
	s := throttle.NewShared(throttle.SharedConfig{
		Name: "api", Rate: 10, Timeout: time.Minute, OnOutage: throttle.RefuseAll,
		Eval: func(ctx context.Context, _ string, _ []string, _ ...any) (any, error) {
			if linger.Of(ctx) != nil {
				return nil, errors.New("a part of the work")
			}
			return []any{int64(1), int64(0), int64(0)}, nil
		},
	})
	require.NoError(t, s.Do(ctx, "", func(ctx context.Context) error {
		require.Same(t, work, linger.Of(ctx))
		return nil
	}))
}
