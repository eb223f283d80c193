package fleet_test

import (
	"context"
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/throttle"
	"github.com/go-resilience/resilience/throttle/fleet"
)

func TestCloseFlushesSettlements(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &redis{takes: 5 * time.Millisecond}
		l := fleet.New(fleet.Config{Name: "n", Eval: r.eval,
			Meters: of(fleet.Rate("a/rate", 100, 5).Estimated(), fleet.Slots("a/slots", 9))})
		require.NoError(t, l.Do(t.Context(), ok))
		estimated, err := l.Reserve(t.Context())
		require.NoError(t, err)
		open, err := l.Reserve(t.Context())
		require.NoError(t, err)
		estimated.Settle(2)

		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		require.NoError(t, l.Close(ctx))
		require.Equal(t, 2, r.count("settle"))
		require.Equal(t, 1, r.count("free"), "the slot of the reservation that was not settled")
		require.Zero(t, l.Stats().Unsettled)
		<-open.Lost()
		require.Zero(t, l.Stats().LostSlots)

		for range 2 {
			err = l.Do(t.Context(), ok)
			require.ErrorIs(t, err, fleet.ErrClosed)
			require.True(t, resilience.Refused(err))
			require.ErrorIs(t, l.Cooldown(t.Context(), "a", time.Hour), fleet.ErrClosed)
			require.NoError(t, l.Close(ctx), "again")
		}
		open.Settle(2) // later
		require.NoError(t, l.Close(ctx))
		require.Equal(t, 3, r.count("settle"))
		time.Sleep(time.Minute)
		require.Zero(t, r.count("renew"))
	})
}

// TestCloseReportsLostSettlements closes while Redis is down: for less time than settlements are
// repeated, and for more.
func TestCloseReportsLostSettlements(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &redis{}
		l := fleet.New(fleet.Config{Name: "n", Eval: r.eval, Meters: of(fleet.Slots("a/slots", 9))})
		for range 3 {
			_, err := l.Reserve(t.Context())
			require.NoError(t, err)
		}
		r.set(func(r *redis) { r.err = errDown })
		start := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), 1500*time.Millisecond)
		defer cancel()
		err := l.Close(ctx)
		require.EqualError(t, err, "fleet: n: 3 settlements did not reach Redis: context deadline exceeded")
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Equal(t, 1500*time.Millisecond, time.Since(start))
		require.EqualError(t, l.Close(t.Context()), "fleet: n: 3 settlements did not reach Redis")
		require.Equal(t, 10*time.Second, time.Since(start))
		require.NoError(t, l.Close(t.Context()), "nothing is left to be sent")
	})
}

// TestCloseDuringCalls closes while calls wait, run, and ask Redis.
func TestCloseDuringCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &redis{}
		l := fleet.New(fleet.Config{Name: "n", Eval: r.eval, MaxWait: fleet.Unlimited, Meters: of(fleet.Slots("a/slots", 2))})
		var calls sync.WaitGroup
		calls.Go(func() {
			_ = l.Do(t.Context(), func(ctx context.Context) error {
				<-ctx.Done()
				require.ErrorIs(t, context.Cause(ctx), fleet.ErrLost)
				return nil
			})
		})
		synctest.Wait()
		r.set(func(r *redis) {
			r.answer = func([]any) []any {
				return []any{int64(0), time.Now().UnixMicro(), int64(2), int64(10_000), int64(0), int64(0), int64(0)}
			}
		})
		calls.Go(func() { require.ErrorIs(t, l.Do(t.Context(), ok), fleet.ErrClosed, "it waits") })
		time.Sleep(time.Second)
		r.set(func(r *redis) { r.answer, r.takes = nil, 50*time.Millisecond })
		asked := r.count("take")
		calls.Go(func() { require.ErrorIs(t, l.Do(t.Context(), ok), fleet.ErrClosed, "it has asked Redis") })
		synctest.Wait()
		require.Greater(t, r.count("take"), asked)
		require.NoError(t, l.Close(t.Context()))
		calls.Wait()
		require.Equal(t, 4, r.count("free")+r.count("settle"), "of each of them, and of Do when its call returned")
		require.GreaterOrEqual(t, r.count("settle"), 2, "of Do, and of the call that Redis admitted after Close")
		require.Zero(t, l.Stats().Unsettled)
	})
}

// TestCloseUnderStress closes while goroutines reserve and settle. Afterwards Redis has no slot
// left, and each admitted call
// was corrected once, whatever Close came between.
func TestCloseUnderStress(t *testing.T) {
	for range 20 {
		var mu sync.Mutex
		slots, tokens := map[any]bool{}, int64(0)
		l := fleet.New(fleet.Config{
			Name: "n", Timeout: time.Minute, Meters: of(fleet.Rate("a/tokens", 1e9, 5).Estimated(), fleet.Slots("a/slots", 1e6)),
			Eval: func(_ context.Context, _ string, _ []string, args ...any) (any, error) {
				mu.Lock()
				defer mu.Unlock()
				answer := []any{int64(1), time.Now().UnixMicro(), int64(0), int64(0)}
				switch args[0] {
				case "take":
					slots[args[1]] = true
				case "settle":
					if more := args[7].(int64) / 1_000_000; more != -5 { // not of a call that Redis admitted after Close
						tokens += more
					}
					delete(slots, args[1])
					return answer[:3], nil
				case "free":
					delete(slots, args[1])
				}
				return answer, nil
			},
		})
		var calls sync.WaitGroup
		for i := range 8 {
			calls.Go(func() {
				for n := 0; ; n++ {
					r, err := l.Reserve(t.Context())
					if err != nil {
						require.ErrorIs(t, err, fleet.ErrClosed)
						return
					}
					if (n+i)%3 > 0 {
						r.Settle(7)
					}
				}
			})
		}
		runtime.Gosched()
		require.NoError(t, l.Close(t.Context()))
		calls.Wait() // a reservation may be settled after Close
		require.NoError(t, l.Close(t.Context()))
		mu.Lock()
		require.Empty(t, slots)
		require.Zero(t, tokens%2, "each correction is of two tokens")
		require.LessOrEqual(t, tokens, 2*l.Stats().Admitted)
		mu.Unlock()
	}
}

// TestKeysAreEncoded compares the keys in Redis of tenants whose names have braces.
func TestKeysAreEncoded(t *testing.T) {
	seen := map[string]string{}
	for _, tenant := range []string{"", "%", "%25", "{", "}", "{}", "{a}", "a}b", "}{", "%7B", "a", ":", "{a",
		"a{b}c{d}"} {
		var key string
		l := fleet.New(fleet.Config{
			Name: "n{x}", Meters: of(fleet.Rate(tenant+"/calls", 10, 1), fleet.Rate(tenant, 10, 1),
				fleet.Slots(tenant+"/{}", 1)),
			Eval: func(_ context.Context, _ string, keys []string, args ...any) (any, error) {
				if args[0] == "take" {
					key = keys[0]
					require.Equal(t, "n%7Bx%7D:", key[:len("n%7Bx%7D:")])
					for _, other := range keys {
						require.Equal(t, hashTag(key), hashTag(other), "on one node of a cluster")
					}
				}
				return []any{int64(1), time.Now().UnixMicro(), int64(0), int64(0), int64(0)}, nil
			},
		})
		require.NoError(t, l.Do(t.Context(), ok), tenant)
		require.NotEmpty(t, hashTag(key), tenant)
		require.NotContains(t, seen, key, "%q and %q", tenant, seen[key])
		seen[key] = tenant
		require.NoError(t, l.Close(t.Context()))
	}
}

// hashTag returns the part of a key that Redis Cluster hashes; the whole key if it has no tag.
func hashTag(key string) string {
	for i := range key {
		if key[i] != '{' {
			continue
		}
		for j := i + 1; j < len(key); j++ {
			if key[j] == '}' && j > i+1 {
				return key[i+1 : j]
			}
			if key[j] == '}' {
				return key
			}
		}
		return key
	}
	return key
}

// TestNamedLimits has meters that admit nothing, and meters without a limit.
func TestNamedLimits(t *testing.T) {
	day := throttle.Window{Per: throttle.Day}
	const none, unlimited = throttle.None, throttle.Unlimited
	for name, c := range map[string]struct {
		meter  fleet.Meter
		reason throttle.Reason // empty: it admits everything
	}{
		"no rate":         {fleet.Rate("a", none, 1), throttle.OverLimit},
		"no rate, burst":  {fleet.Rate("a", throttle.PerMinute(none), 1).Burst(20), throttle.OverLimit},
		"no burst":        {fleet.Rate("a", 5, 1).Burst(none), throttle.OverLimit},
		"no quota":        {fleet.Quota("a", none, day, 1), throttle.OverQuota},
		"no slots":        {fleet.Slots("a", none), throttle.OverLimit},
		"nothing of none": {fleet.Rate("a", none, 0).Estimated(), ""},
		"any rate":        {fleet.Rate("a", unlimited, 1<<40).Burst(20).Estimated(), ""},
		"any burst":       {fleet.Rate("a", 5, 1<<40).Burst(unlimited).Estimated(), ""},
		"any quota":       {fleet.Quota("a", unlimited, day, 1<<60).Estimated(), ""},
		"any slots":       {fleet.Slots("a", unlimited), ""},
	} {
		for _, away := range []bool{false, true} {
			synctest.Test(t, func(t *testing.T) {
				r := &redis{}
				if away {
					r.err = errDown
				}
				l := fleet.New(fleet.Config{Name: "n", Eval: r.eval, OnOutage: fleet.Local, Instances: 3, Meters: of(c.meter)})
				for range 20 {
					reservation, err := l.Reserve(t.Context())
					if c.reason == "" {
						require.NoError(t, err, name)
						defer reservation.Settle(1 << 60)
						continue
					}
					limited, _ := errorsAs(err)
					require.Equal(t, c.reason, limited.Reason, name)
					require.Zero(t, limited.RetryAfter(), name)
					require.Zero(t, limited.Limit, name)
					require.False(t, limited.Retryable(), name)
				}
				if c.reason != "" {
					require.Zero(t, r.count("take"), "%s: Redis is not asked", name)
				}
			})
		}
	}
}

func errorsAs(err error) (*throttle.LimitedError, bool) {
	limited, ok := err.(*throttle.LimitedError)
	return limited, ok
}
