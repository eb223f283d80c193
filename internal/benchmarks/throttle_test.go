package benchmarks

import (
	"context"
	"os"
	"runtime"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/failsafe-go/failsafe-go/ratelimiter"
	"github.com/go-redis/redis_rate/v10"
	"github.com/redis/go-redis/v9"
	"github.com/sethvargo/go-limiter/memorystore"
	"github.com/stretchr/testify/require"
	"github.com/throttled/throttled/v2"
	"github.com/throttled/throttled/v2/store/memstore"
	"go.uber.org/ratelimit"
	"golang.org/x/time/rate"

	"github.com/go-resilience/resilience/throttle"
)

func BenchmarkThrottle(b *testing.B) { benchmark(b, throttleCases) }

// A rate that is never reached, with a burst to match: every call is admitted.
const plenty = 1e9

var throttleCases = []comparison{
	{"allow", []impl{
		{"resilience", throttleAlone(allowResilience(plenty, plenty))},
		{"xrate", throttleAlone(allowXrate(plenty, plenty))},
		{"failsafe", throttleAlone(allowFailsafe(plenty, plenty))},
		{"uber", throttleAlone(takeUber())},
		{"throttled", throttleAlone(allowThrottled(1))},
		{"sethvargo", throttleAlone(allowSethvargo(1))},
	}},
	{"allow-parallel", []impl{
		{"resilience", throttleParallel(allowResilience(plenty, plenty))},
		{"xrate", throttleParallel(allowXrate(plenty, plenty))},
		{"failsafe", throttleParallel(allowFailsafe(plenty, plenty))},
		{"uber", throttleParallel(takeUber())},
		{"throttled", throttleParallel(allowThrottled(1))},
		{"sethvargo", throttleParallel(allowSethvargo(1))},
	}},
	{"refused", []impl{
		{"resilience", throttleAlone(allowResilience(1.0/3600, 1))},
		{"xrate", throttleAlone(allowXrate(1.0/3600, 1))},
		{"failsafe", throttleAlone(allowFailsafe(1, 1))},
	}},
	{"keyed-1", []impl{
		{"resilience", throttleAlone(allowGroup(1))},
		{"xrate", throttleAlone(allowXrateMap(1))},
		{"throttled", throttleAlone(allowThrottled(1))},
		{"sethvargo", throttleAlone(allowSethvargo(1))},
	}},
	{"keyed-1M", []impl{
		{"resilience", million(allowGroup)},
		{"xrate", million(allowXrateMap)},
		{"throttled", million(allowThrottled)},
		{"sethvargo", million(allowSethvargo)},
	}},
	{"shared", []impl{
		{"resilience", sharedResilience},
		{"redis_rate", sharedRedisRate},
	}},
}

// allow decides on the i-th call.
type allow func(i int)

func throttleAlone(build func(testing.TB) allow) func(*testing.B) {
	return func(b *testing.B) {
		call := build(b)
		i := 0
		for b.Loop() {
			call(i)
			i++
		}
	}
}

func throttleParallel(build func(testing.TB) allow) func(*testing.B) {
	return func(b *testing.B) {
		call := build(b)
		b.ResetTimer()
		b.RunParallel(func(pb *testing.PB) {
			for i := 0; pb.Next(); i++ {
				call(i)
			}
		})
	}
}

func allowResilience(perSecond float64, burst int) func(testing.TB) allow {
	return func(testing.TB) allow {
		l := throttle.New(throttle.Config{Rate: perSecond, Burst: burst})
		return func(int) { l.Allow() }
	}
}

func allowXrate(perSecond float64, burst int) func(testing.TB) allow {
	return func(testing.TB) allow {
		l := rate.NewLimiter(rate.Limit(perSecond), burst)
		return func(int) { l.Allow() }
	}
}

func allowFailsafe(executions uint, _ int) func(testing.TB) allow {
	return func(testing.TB) allow {
		period := time.Second
		if executions == 1 {
			period = time.Hour
		}
		l := ratelimiter.NewBursty[any](executions, period)
		return func(int) { l.TryAcquirePermit() }
	}
}

// takeUber paces callers; it has no way to refuse one.
func takeUber() func(testing.TB) allow {
	return func(testing.TB) allow {
		l := ratelimit.New(plenty, ratelimit.WithSlack(1000))
		return func(int) { l.Take() }
	}
}

func allowGroup(keys int) func(testing.TB) allow {
	return func(testing.TB) allow {
		names := keysOf(keys)
		g := throttle.NewGroup(throttle.GroupConfig[string]{
			Config:  throttle.Config{Rate: 1e6, Burst: 1e6},
			MaxKeys: keys,
		})
		return func(i int) { g.Allow(names[i%keys]) }
	}
}

// allowXrateMap is what one writes around x/time/rate for tenants.
func allowXrateMap(keys int) func(testing.TB) allow {
	return func(testing.TB) allow {
		names := keysOf(keys)
		var mu sync.RWMutex
		limiters := make(map[string]*rate.Limiter)
		return func(i int) {
			key := names[i%keys]
			mu.RLock()
			l := limiters[key]
			mu.RUnlock()
			if l == nil {
				mu.Lock()
				if l = limiters[key]; l == nil {
					l = rate.NewLimiter(1e6, 1e6)
					limiters[key] = l
				}
				mu.Unlock()
			}
			l.Allow()
		}
	}
}

func allowThrottled(keys int) func(testing.TB) allow {
	return func(t testing.TB) allow {
		names := keysOf(keys)
		store, err := memstore.NewCtx(0) // without a bound, which is its fastest
		require.NoError(t, err)
		l, err := throttled.NewGCRARateLimiterCtx(store, throttled.RateQuota{MaxRate: throttled.PerSec(1e6), MaxBurst: 1e6})
		require.NoError(t, err)
		ctx := context.Background()
		return func(i int) { _, _, _ = l.RateLimitCtx(ctx, names[i%keys], 1) }
	}
}

func allowSethvargo(keys int) func(testing.TB) allow {
	return func(t testing.TB) allow {
		names := keysOf(keys)
		store, err := memorystore.New(&memorystore.Config{Tokens: 1e6, Interval: time.Second, InitialAlloc: 16})
		require.NoError(t, err)
		ctx := context.Background()
		t.Cleanup(func() { _ = store.Close(ctx) })
		return func(i int) { _, _, _, _, _ = store.Take(ctx, names[i%keys]) }
	}
}

var (
	namesMu sync.Mutex
	names   = map[int][]string{}
)

// keysOf returns n keys in an order that is not that of their creation. The text
// of the keys is the same for all, and belongs to none.
func keysOf(n int) []string {
	namesMu.Lock()
	defer namesMu.Unlock()
	if names[n] == nil {
		keys := make([]string, n)
		for i := range keys {
			keys[int(uint64(i)*2654435761%uint64(n))] = "tenant-" + strconv.Itoa(1e9+i)
		}
		names[n] = keys
	}
	return names[n]
}

// million measures calls for a million keys in turn, all of them known, and what
// holding them takes.
func million(build func(keys int) func(testing.TB) allow) func(*testing.B) {
	const keys = 1_000_000
	type built struct {
		call  allow
		bytes float64
	}
	var once sync.Once
	var it built
	return func(b *testing.B) {
		once.Do(func() {
			keysOf(keys)
			before := heap()
			it.call = build(keys)(keeper{b})
			for i := range keys {
				it.call(i)
			}
			it.bytes = float64(heap()-before) / keys
		})
		i := 0
		for b.Loop() {
			it.call(i)
			i++
		}
		b.ReportMetric(it.bytes, "B/key")
	}
}

// A keeper lets what a benchmark built outlive it.
type keeper struct{ testing.TB }

func (keeper) Cleanup(func()) {}

func heap() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

func throttleRedis(b *testing.B) *redis.Client {
	addr := os.Getenv("REDIS_ADDR")
	if addr == "" {
		addr = "127.0.0.1:6379"
	}
	rdb := redis.NewClient(&redis.Options{Addr: addr, ContextTimeoutEnabled: true, MaxRetries: -1})
	b.Cleanup(func() { _ = rdb.Close() })
	if err := rdb.Ping(context.Background()).Err(); err != nil {
		b.Skipf("Redis at %s cannot be reached: %v", addr, err)
	}
	return rdb
}

func sharedResilience(b *testing.B) {
	rdb := throttleRedis(b)
	l := throttle.NewShared(throttle.SharedConfig{
		Name: "benchmark", Prefix: "benchmarks:throttle:", Rate: 1e6, Burst: 1e6,
		Timeout: time.Second, OnOutage: throttle.RefuseAll,
		Eval: func(ctx context.Context, script string, keys []string, args ...any) (any, error) {
			return redis.NewScript(script).Run(ctx, rdb, keys, args...).Result()
		},
	})
	ctx := context.Background()
	for b.Loop() {
		if err := l.Wait(ctx); err != nil {
			b.Fatal(err)
		}
	}
}

func sharedRedisRate(b *testing.B) {
	rdb := throttleRedis(b)
	l := redis_rate.NewLimiter(rdb)
	ctx := context.Background()
	limit := redis_rate.Limit{Rate: 1e6, Burst: 1e6, Period: time.Second}
	for b.Loop() {
		result, err := l.Allow(ctx, "benchmarks:throttle", limit)
		if err != nil || result.Allowed == 0 {
			b.Fatal(result, err)
		}
	}
}
