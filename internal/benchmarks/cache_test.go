package benchmarks

import (
	"context"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/Yiling-J/theine-go"
	rediscache "github.com/go-redis/cache/v9"
	"github.com/maypok86/otter/v2"
	"github.com/redis/go-redis/v9"
	"github.com/viccon/sturdyc"
	"golang.org/x/sync/singleflight"

	"github.com/go-resilience/resilience/cacheaside"
	"github.com/go-resilience/resilience/cacheaside/redisstore"
	"github.com/go-resilience/resilience/resilienceredis"
)

func BenchmarkCache(b *testing.B) { benchmark(b, cacheCases) }

const (
	cacheCapacity = 10_000
	cacheTTL      = 5 * time.Minute
)

// A cacheUnderTest loads the values that it does not have.
type cacheUnderTest struct {
	get    func(key string) (int, error)
	forget func(key string)
	close  func()
}

// cachesUnderTest builds each cache as its documentation describes for a cache that loads, with the same capacity and
// TTL. The caches differ in their other features, and the results include the cost of these.
var cachesUnderTest = []struct {
	name string
	make func(load func(context.Context, string) (int, error)) cacheUnderTest
}{
	{"resilience", func(load func(context.Context, string) (int, error)) cacheUnderTest {
		c := cacheaside.New(cacheaside.Config[string, int]{Load: load, Capacity: cacheCapacity, TTL: cacheTTL})
		return cacheUnderTest{
			get:    func(key string) (int, error) { return c.Get(context.Background(), key) },
			forget: func(key string) { _ = c.Invalidate(context.Background(), key) },
			close:  func() { _ = c.Close() },
		}
	}},
	{"otter", func(load func(context.Context, string) (int, error)) cacheUnderTest {
		c := otter.Must(&otter.Options[string, int]{
			MaximumSize: cacheCapacity, ExpiryCalculator: otter.ExpiryWriting[string, int](cacheTTL)})
		return cacheUnderTest{
			get: func(key string) (int, error) {
				if v, ok := c.GetIfPresent(key); ok {
					return v, nil
				}
				return c.Get(context.Background(), key, otter.LoaderFunc[string, int](load))
			},
			forget: func(key string) { c.Invalidate(key) },
			close:  func() { c.StopAllGoroutines() },
		}
	}},
	{"sturdyc", func(load func(context.Context, string) (int, error)) cacheUnderTest {
		c := sturdyc.New[int](cacheCapacity, 64, cacheTTL, 10)
		return cacheUnderTest{
			get: func(key string) (int, error) {
				return c.GetOrFetch(context.Background(), key, func(ctx context.Context) (int, error) { return load(ctx, key) })
			},
			forget: c.Delete,
			close:  func() {},
		}
	}},
	{"theine", func(load func(context.Context, string) (int, error)) cacheUnderTest {
		c, err := theine.NewBuilder[string, int](cacheCapacity).Loading(
			func(ctx context.Context, key string) (theine.Loaded[int], error) {
				v, err := load(ctx, key)
				return theine.Loaded[int]{Value: v, Cost: 1, TTL: cacheTTL}, err
			}).Build()
		if err != nil {
			panic(err)
		}
		return cacheUnderTest{
			get:    func(key string) (int, error) { return c.Get(context.Background(), key) },
			forget: c.Delete,
			close:  c.Close,
		}
	}},
	{"go-redis-cache", func(load func(context.Context, string) (int, error)) cacheUnderTest {
		c := rediscache.New(&rediscache.Options{LocalCache: rediscache.NewTinyLFU(cacheCapacity, cacheTTL)})
		return cacheUnderTest{
			get: func(key string) (v int, err error) {
				err = c.Once(&rediscache.Item{Key: key, Value: &v, TTL: cacheTTL, Do: func(item *rediscache.Item) (any, error) {
					return load(item.Context(), key)
				}})
				return v, err
			},
			forget: c.DeleteFromLocalCache,
			close:  func() {},
		}
	}},
	{"singleflight-map", func(load func(context.Context, string) (int, error)) cacheUnderTest {
		var flights singleflight.Group
		var values sync.Map // without a capacity and a TTL
		return cacheUnderTest{
			get: func(key string) (int, error) {
				if v, ok := values.Load(key); ok {
					return v.(int), nil
				}
				v, err, _ := flights.Do(key, func() (any, error) {
					v, err := load(context.Background(), key)
					if err == nil {
						values.Store(key, v)
					}
					return v, err
				})
				if err != nil {
					return 0, err
				}
				return v.(int), nil
			},
			forget: func(key string) { values.Delete(key) },
			close:  func() {},
		}
	}},
}

var cacheCases = []comparison{
	{"hit", cacheImpls(func(b *testing.B, c cacheUnderTest, _ *atomic.Int64) {
		fillCache(b, c)
		for i := 0; b.Loop(); i++ {
			getCached(b, c, cacheKeys[i%len(cacheKeys)])
		}
	})},
	{"hit-parallel", cacheImpls(func(b *testing.B, c cacheUnderTest, _ *atomic.Int64) {
		fillCache(b, c)
		b.ResetTimer()
		b.RunParallel(func(pb *testing.PB) {
			for i := rand.IntN(len(cacheKeys)); pb.Next(); i++ {
				getCached(b, c, cacheKeys[i%len(cacheKeys)])
			}
		})
	})},
	{"miss", cacheImpls(func(b *testing.B, c cacheUnderTest, loads *atomic.Int64) {
		i := 0
		for b.Loop() {
			i++
			getCached(b, c, strconv.Itoa(i))
		}
		if loads.Load() < int64(b.N) {
			b.Errorf("%d loads for %d keys", loads.Load(), b.N)
		}
	})},
	{"miss-1ms", cacheImpls(func(b *testing.B, c cacheUnderTest, _ *atomic.Int64) {
		i := 0
		for b.Loop() {
			i++
			getCached(b, c, "slow"+strconv.Itoa(i))
		}
	})},
	{"cold-1000", cacheImpls(func(b *testing.B, c cacheUnderTest, loads *atomic.Int64) {
		i := 0
		for b.Loop() {
			i++
			key := "slow" + strconv.Itoa(i)
			var wg sync.WaitGroup
			for range 1000 {
				wg.Go(func() { getCached(b, c, key) })
			}
			wg.Wait()
		}
		b.ReportMetric(float64(loads.Load())/float64(b.N), "loads/op")
	})},
	// Nine reads for each write, which makes the application forget the key.
	{"zipf", cacheImpls(func(b *testing.B, c cacheUnderTest, _ *atomic.Int64) {
		fillCache(b, c)
		zipf := rand.NewZipf(rand.New(rand.NewPCG(1, 2)), 1.1, 1, uint64(len(cacheKeys)-1))
		drawn := make([]string, 1<<14)
		for i := range drawn {
			drawn[i] = cacheKeys[zipf.Uint64()]
		}
		for i := 0; b.Loop(); i++ {
			key := drawn[i%len(drawn)]
			if i%10 == 9 {
				c.forget(key)
			} else {
				getCached(b, c, key)
			}
		}
	})},
}

// tierCases are a cache in Redis, without memory: "get" returns a value in Redis, "load" loads a missing value, and
// "write" changes a value, for which go-redis/cache calls Delete.
var tierCases = []comparison{
	{"get", tierImpls(func(t tier, _ int) error { return t.get(t.prefix + "there") })},
	{"load", tierImpls(func(t tier, i int) error { return t.get(t.prefix + strconv.Itoa(i)) })},
	{"write", tierImpls(func(t tier, _ int) error { return t.write(t.prefix + "there") })},
}

func BenchmarkCacheInRedis(b *testing.B) { benchmark(b, tierCases) }

type tier struct {
	prefix     string
	get, write func(key string) error
}

func tierImpls(call func(t tier, i int) error) []impl {
	measure := func(b *testing.B, t tier, rdb *redis.Client) {
		i := 0
		t.prefix = "benchmarks:cache:" + strconv.FormatUint(rand.Uint64(), 36) + ":"
		there := t.prefix + "there"
		succeeded(b, t.get(there))
		before, server := cpu(), serverCPU(b, rdb)
		for b.Loop() {
			i++
			succeeded(b, call(t, i))
		}
		spent, serving := cpu()-before, serverCPU(b, rdb)-server
		b.ReportMetric(spent.Seconds()*1e6/float64(b.N), "cpu-us/op")
		b.ReportMetric(serving*1e6/float64(b.N), "server-us/op")
	}
	return []impl{
		{"resilience", func(b *testing.B) {
			rdb, ctx := throttleRedis(b), context.Background()
			c := cacheaside.New(cacheaside.Config[string, int]{
				Load: func(_ context.Context, key string) (int, error) { return len(key), nil },
				Store: redisstore.New(redisstore.Config{Prefix: "benchmarks:cache", Eval: resilienceredis.Eval(rdb),
					Timeout: time.Second}),
			})
			defer c.Close()
			measure(b, tier{
				get: func(key string) error {
					_, _, err := c.GetWith(ctx, key, cacheaside.GetOptions{SkipMemory: true})
					return err
				},
				write: func(key string) error { return c.Write(ctx, key, func(context.Context) error { return nil }) },
			}, rdb)
		}},
		{"go-redis-cache", func(b *testing.B) {
			rdb, ctx := throttleRedis(b), context.Background()
			c := rediscache.New(&rediscache.Options{Redis: rdb})
			measure(b, tier{
				get: func(key string) error {
					var v int
					return c.Once(&rediscache.Item{Key: key, Value: &v, TTL: cacheTTL,
						Do: func(*rediscache.Item) (any, error) { return len(key), nil }})
				},
				write: func(key string) error { return c.Delete(ctx, key) },
			}, rdb)
		}},
	}
}

// serverCPU returns the seconds of CPU that the server has used, for whomever.
func serverCPU(b *testing.B, rdb *redis.Client) (seconds float64) {
	info, err := rdb.Info(context.Background(), "cpu").Result()
	succeeded(b, err)
	for _, name := range []string{"used_cpu_user:", "used_cpu_sys:"} {
		_, value, _ := strings.Cut(info, name)
		value, _, _ = strings.Cut(value, "\r\n")
		part, err := strconv.ParseFloat(value, 64)
		succeeded(b, err)
		seconds += part
	}
	return seconds
}

var cacheKeys = func() []string {
	keys := make([]string, 1024)
	for i := range keys {
		keys[i] = "user:" + strconv.Itoa(i)
	}
	return keys
}()

func cacheImpls(run func(*testing.B, cacheUnderTest, *atomic.Int64)) []impl {
	var impls []impl
	for _, under := range cachesUnderTest {
		impls = append(impls, impl{under.name, func(b *testing.B) {
			var loads atomic.Int64
			c := under.make(func(_ context.Context, key string) (int, error) {
				loads.Add(1)
				if key[0] == 's' {
					time.Sleep(time.Millisecond)
				}
				return len(key), nil
			})
			defer c.close()
			run(b, c, &loads)
		}})
	}
	return impls
}

func fillCache(b *testing.B, c cacheUnderTest) {
	for _, key := range cacheKeys {
		getCached(b, c, key)
	}
}

func getCached(b *testing.B, c cacheUnderTest, key string) {
	if v, err := c.get(key); err != nil || v != len(key) {
		b.Errorf("%s: got %d, %v", key, v, err)
	}
}
