package benchmarks

import (
	"context"
	"math/rand/v2"
	"os"
	"runtime"
	"strconv"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/failsafe-go/failsafe-go/ratelimiter"
	"github.com/go-redis/redis_rate/v10"
	"github.com/redis/go-redis/v9"
	"github.com/sethvargo/go-limiter/memorystore"
	"github.com/stretchr/testify/require"
	"github.com/throttled/throttled/v2"
	"github.com/throttled/throttled/v2/store/goredisstore.v9"
	"github.com/throttled/throttled/v2/store/memstore"
	"go.uber.org/ratelimit"
	"golang.org/x/time/rate"

	"github.com/go-resilience/resilience/resilienceredis"
	"github.com/go-resilience/resilience/throttle"
	"github.com/go-resilience/resilience/throttle/fleet"
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
		{"resilience of four meters", fleetOfFour},
		{"redis_rate", sharedRedisRate},
		{"throttled", sharedThrottled},
	}},
}

// allow decides on a call; key is the text of its key, where there are several.
type allow func(key string)

func throttleAlone(build func(testing.TB) allow) func(*testing.B) {
	return func(b *testing.B) {
		call := build(b)
		for b.Loop() {
			call(oneKey)
		}
	}
}

func throttleParallel(build func(testing.TB) allow) func(*testing.B) {
	return func(b *testing.B) {
		call := build(b)
		b.ResetTimer()
		b.RunParallel(func(pb *testing.PB) {
			for pb.Next() {
				call(oneKey)
			}
		})
	}
}

func allowResilience(perSecond float64, burst int) func(testing.TB) allow {
	return func(testing.TB) allow {
		l := throttle.New(throttle.Config{Rate: perSecond, Burst: burst})
		return func(string) { l.Allow() }
	}
}

func allowXrate(perSecond float64, burst int) func(testing.TB) allow {
	return func(testing.TB) allow {
		l := rate.NewLimiter(rate.Limit(perSecond), burst)
		return func(string) { l.Allow() }
	}
}

func allowFailsafe(executions uint, _ int) func(testing.TB) allow {
	return func(testing.TB) allow {
		period := time.Second
		if executions == 1 {
			period = time.Hour
		}
		l := ratelimiter.NewBursty[any](executions, period)
		return func(string) { l.TryAcquirePermit() }
	}
}

// takeUber paces callers; it has no way to refuse one.
func takeUber() func(testing.TB) allow {
	return func(testing.TB) allow {
		l := ratelimit.New(plenty, ratelimit.WithSlack(1000))
		return func(string) { l.Take() }
	}
}

func allowGroup(keys int) func(testing.TB) allow {
	return func(testing.TB) allow {
		g := throttle.NewGroup(throttle.GroupConfig[string]{
			Config:  throttle.Config{Rate: 1e6, Burst: 1e6},
			MaxKeys: keys,
		})
		return func(key string) { g.Allow(key) }
	}
}

// allowXrateMap is what one writes around x/time/rate for tenants.
func allowXrateMap(keys int) func(testing.TB) allow {
	return func(testing.TB) allow {
		var mu sync.RWMutex
		limiters := make(map[string]*rate.Limiter)
		return func(key string) {
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
		store, err := memstore.NewCtx(0) // without a bound, which is its fastest
		require.NoError(t, err)
		l, err := throttled.NewGCRARateLimiterCtx(store, throttled.RateQuota{MaxRate: throttled.PerSec(1e6), MaxBurst: 1e6})
		require.NoError(t, err)
		ctx := context.Background()
		return func(key string) { _, _, _ = l.RateLimitCtx(ctx, key, 1) }
	}
}

func allowSethvargo(keys int) func(testing.TB) allow {
	return func(t testing.TB) allow {
		store, err := memorystore.New(&memorystore.Config{Tokens: 1e6, Interval: time.Second, InitialAlloc: 16})
		require.NoError(t, err)
		ctx := context.Background()
		t.Cleanup(func() { _ = store.Close(ctx) })
		return func(key string) { _, _, _, _, _ = store.Take(ctx, key) }
	}
}

const oneKey = "tenant-1000000000"

// million measures calls for a million keys in random order, all of them known, and
// what holding them takes. As in a server, the text of a key has just come, and so
// is not that which is held, nor out of the caches; it is made in place, as that
// takes no time worth speaking of.
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
			names := make([]string, keys)
			for i := range names {
				names[i] = "tenant-" + strconv.Itoa(1e9+i)
			}
			before := heap()
			it.call = build(keys)(keeper{b})
			for _, name := range names {
				it.call(name)
			}
			it.bytes = float64(heap()-before) / keys
			runtime.KeepAlive(names)
		})
		text := []byte(oneKey)
		key := unsafe.String(&text[0], len(text))
		order := rand.NewPCG(1, 2)
		for b.Loop() {
			strconv.AppendInt(text[:len("tenant-")], 1e9+int64(order.Uint64()%keys), 10)
			it.call(key)
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

func sharedResilience(b *testing.B) { benchFleet(b, fleet.Rate("a/calls", 1e6, 1)) }

func fleetOfFour(b *testing.B) {
	benchFleet(b, fleet.Rate("a/calls", 1e6, 1), fleet.Rate("a/tokens", 1e6, 1),
		fleet.Quota("a/day", 1e15, throttle.Window{Per: throttle.Day}, 1),
		fleet.Quota("a/month", 1e15, throttle.Window{Per: throttle.Month}, 1))
}

func benchFleet(b *testing.B, meters ...fleet.Meter) {
	rdb := throttleRedis(b)
	l := fleet.New(fleet.Config{
		Name: "benchmarks:throttle", Timeout: time.Second, Eval: resilienceredis.Eval(rdb),
		Meters: func(context.Context) []fleet.Meter { return meters },
	})
	sharedParallel(b, rdb, func() error { _, err := l.Reserve(context.Background()); return err })
}

func sharedRedisRate(b *testing.B) {
	rdb := throttleRedis(b)
	l := redis_rate.NewLimiter(rdb)
	limit := redis_rate.Limit{Rate: 1e6, Burst: 1e6, Period: time.Second}
	sharedParallel(b, rdb, func() error {
		result, err := l.Allow(context.Background(), "benchmarks:throttle", limit)
		if err == nil && result.Allowed == 0 {
			err = throttle.ErrLimited
		}
		return err
	})
}

func sharedThrottled(b *testing.B) {
	rdb := throttleRedis(b)
	store, err := goredisstore.NewCtx(rdb, "benchmarks:throttle:")
	succeeded(b, err)
	l, err := throttled.NewGCRARateLimiterCtx(store, throttled.RateQuota{MaxRate: throttled.PerSec(1e6), MaxBurst: 1e6})
	succeeded(b, err)
	l.SetMaxCASAttemptsLimit(1 << 20) // it repeats a call that another one came before
	sharedParallel(b, rdb, func() error {
		limited, _, err := l.RateLimitCtx(context.Background(), "benchmarks:throttle", 1)
		if err == nil && limited {
			err = throttle.ErrLimited
		}
		return err
	})
}

// sharedParallel has several calls under way at any time. One at a time would
// measure how long the machine takes to wake an idle process, which differs from
// run to run by more than the limiters do. It reports the CPU time of this process and
// of Redis for each call.
func sharedParallel(b *testing.B, rdb *redis.Client, call func() error) {
	b.SetParallelism(8)
	before, serving := cpu(), serverCPU(b, rdb)
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			if err := call(); err != nil {
				b.Error(err)
				return
			}
		}
	})
	b.ReportMetric((cpu()-before).Seconds()*1e6/float64(b.N), "cpu-us/op")
	b.ReportMetric((serverCPU(b, rdb)-serving)*1e6/float64(b.N), "server-us/op")
}
