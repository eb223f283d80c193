package throttle_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/integration/services"
	"github.com/go-resilience/resilience/resilienceredis"
	"github.com/go-resilience/resilience/throttle"
)

// A service with plans over two instances: the free plan has 10 calls a second and 1000 a
// day, the paid one 100 a second. Each is held exactly, whatever the instances do, and a
// customer who changes to the paid plan has its limit at once.
func TestPlansOverTwoInstances(t *testing.T) {
	rdb := client(t, services.Redis(t))
	p := prefix(t, rdb)
	free := throttle.Limit{Rate: 10, Quotas: []throttle.Quota{{N: 1000, Every: 24 * time.Hour}}}
	paid := throttle.Limit{Rate: 100}
	var upgraded atomic.Bool
	var instances [2]*throttle.Shared
	for i := range instances {
		instances[i] = throttle.NewShared(throttle.SharedConfig{
			Name: "plans", Prefix: p, Eval: resilienceredis.Eval(rdb), Timeout: patient, OnOutage: throttle.RefuseAll,
			Rate: free.Rate, Burst: free.Burst, Quotas: free.Quotas,
			LimitFor: func(customer string) throttle.Limit {
				if strings.HasPrefix(customer, "paid") || customer == "free 1" && upgraded.Load() {
					return paid
				}
				return throttle.Limit{}
			},
		})
	}
	// hammer calls as fast as it can, at both instances, and returns what was admitted.
	hammer := func(customer string, calls int) int {
		var admitted atomic.Int64
		var workers sync.WaitGroup
		for _, s := range instances {
			workers.Go(func() {
				for range calls {
					if s.Allow(t.Context(), customer) {
						admitted.Add(1)
					}
				}
			})
		}
		workers.Wait()
		return int(admitted.Load())
	}
	begin := time.Now()
	counts := map[string]int{}
	for _, customer := range []string{"free 1", "free 2", "paid 1"} {
		counts[customer] = hammer(customer, 300)
	}
	seconds := time.Since(begin).Seconds()
	for customer, n := range counts {
		limit := free
		if strings.HasPrefix(customer, "paid") {
			limit = paid
		}
		require.LessOrEqual(t, float64(n), limit.Rate+limit.Rate*seconds+1, customer)
		require.GreaterOrEqual(t, n, int(limit.Rate), "%s: a burst", customer)
	}

	// The day: what the rate leaves is spent without waiting for it.
	spent := counts["free 2"]
	for _, s := range instances {
		require.NoError(t, s.Set("free 2", throttle.Limit{Quotas: free.Quotas}))
	}
	require.Equal(t, 1000-spent, hammer("free 2", 1000), "of 1000 a day, not one more or less")
	d := instances[0].Take(t.Context(), "free 2", 1)
	require.Equal(t, free.Quotas[0], d.Quota)
	require.Equal(t, 1000, d.Limit)
	require.InDelta(t, 24*time.Hour, d.RetryAfter, float64(time.Hour))
	err := instances[1].Wait(t.Context(), "free 2")
	require.ErrorIs(t, err, throttle.ErrLimited)
	require.ErrorContains(t, err, "plans[free 2]: limited (over the quota of 1000 per 24h0m0s), retry after 23h")
	require.NoError(t, instances[0].Refund(t.Context(), "free 2", 3))
	require.Equal(t, 3, hammer("free 2", 10))
	require.NoError(t, instances[1].Reset(t.Context(), "free 2"))
	require.Equal(t, 1000, instances[0].Peek(t.Context(), "free 2").Remaining)

	upgraded.Store(true)
	upgrade := instances[0].Take(t.Context(), "free 1", 1)
	require.Equal(t, 100, upgrade.Limit)
	require.LessOrEqual(t, upgrade.RetryAfter, time.Second, "what it owes of its last burst")
}

// Windows of several quotas, of a calendar too, are taken from together or not at all, by
// all instances and at the edges of their periods.
func TestSharedQuotasAreOneDecision(t *testing.T) {
	rdb := client(t, services.Redis(t))
	tokyo, err := time.LoadLocation("Asia/Tokyo")
	require.NoError(t, err)
	var seconds atomic.Int64 // on Redis's clock
	seconds.Store(time.Date(2026, 10, 31, 14, 59, 50, 0, time.UTC).Unix())
	eval := atClock(rdb, &seconds)
	cfg := throttle.SharedConfig{
		Name: "quotas", Prefix: prefix(t, rdb), Eval: eval, Timeout: patient, OnOutage: throttle.RefuseAll, Rate: 5, Burst: 5,
		Quotas: []throttle.Quota{{N: 8, Every: time.Minute}, {N: 10, Per: throttle.Month, In: tokyo}},
	}
	a, b := throttle.NewShared(cfg), throttle.NewShared(cfg)
	ctx := t.Context()
	require.True(t, a.Take(ctx, "x", 5).OK)
	d := b.Take(ctx, "x", 1)
	require.Equal(t, throttle.Quota{}, d.Quota, "the rate refuses")
	require.Equal(t, 200*time.Millisecond, d.RetryAfter)
	seconds.Add(1)
	d = b.Take(ctx, "x", 4)
	require.Equal(t, cfg.Quotas[0], d.Quota, "3 are left of a minute")
	require.Equal(t, 59*time.Second, d.RetryAfter)
	d = b.Take(ctx, "x", 3)
	require.True(t, d.OK)
	require.Equal(t, cfg.Quotas[0], d.Quota)
	require.Zero(t, d.Remaining)
	seconds.Add(8) // one second before midnight in Tokyo
	d = a.Take(ctx, "x", 3)
	require.Equal(t, throttle.OverQuota, limited(t, a.Wait(ctx, "x")).Reason)
	require.Equal(t, cfg.Quotas[0], d.Quota)
	require.Equal(t, 51*time.Second, d.RetryAfter, "the minute is over last")
	seconds.Add(1)
	require.Equal(t, cfg.Quotas[0], b.Take(ctx, "x", 1).Quota, "a new month, in the same minute")
	seconds.Add(51)
	d = b.Take(ctx, "x", 5)
	require.True(t, d.OK)
	seconds.Add(60)
	require.True(t, b.Take(ctx, "x", 5).OK)
	seconds.Add(60)
	d = a.Take(ctx, "x", 1)
	require.Equal(t, cfg.Quotas[1].String(), d.Quota.String(), "10 of November are spent")
	require.Equal(t, 30*24*time.Hour, d.Window)
	require.Equal(t, 30*24*time.Hour-171*time.Second, d.RetryAfter)

	// A configuration that does not know the quotas does not lose them.
	plain := cfg
	plain.Quotas = nil
	require.True(t, throttle.NewShared(plain).Take(ctx, "x", 5).OK)
	require.Equal(t, throttle.OverQuota, limited(t, b.Wait(ctx, "x")).Reason)
	require.Zero(t, a.Stats().Failed+b.Stats().Failed)
}

// atClock returns an Eval for which it is that second of Unix time in Redis. Keys live for
// an hour.
func atClock(rdb redis.Scripter, seconds *atomic.Int64) evalFunc {
	return func(ctx context.Context, script string, keys []string, args ...any) (any, error) {
		script = strings.Replace(script, "redis.call('TIME')", fmt.Sprintf("{'%d', '000000'}", seconds.Load()), 1)
		script = ttl.ReplaceAllString(script, "'PX', 3600000)\n")
		return rdb.Eval(ctx, script, keys, args...).Result()
	}
}

func limited(t *testing.T, err error) *throttle.LimitedError {
	t.Helper()
	e, ok := errors.AsType[*throttle.LimitedError](err)
	require.True(t, ok, "%v", err)
	return e
}
