package harm_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/cacheaside"
	"github.com/go-resilience/resilience/cacheaside/redisstore"
	"github.com/go-resilience/resilience/internal/integration/harm"
	"github.com/go-resilience/resilience/internal/integration/services"
	"github.com/go-resilience/resilience/resilienceredis"
)

const (
	// prefix is redisstore.Config.Prefix.
	prefix = "harm"
	// callers is the number of callers. Each has a key, and the keys are in most of the 64 shards.
	callers = 60
	// source is how long a load takes.
	source = 20 * time.Millisecond
	// errorPause is the default of cacheaside.Config.ErrorPause.
	errorPause = time.Second
	// timeout is redisstore.Config.Timeout, longer than its default, so that a busy machine is no outage.
	timeout = time.Second
	// leaseTTL is the default of redisstore.Config.LeaseTTL.
	leaseTTL = 3 * time.Second
)

// A shared is a cache whose values are in Redis. It counts the callers that wait for Redis in vain.
type shared struct {
	*cacheaside.Cache[int, string]
	loads [200]atomic.Int64 // by key
	// waited counts round trips to a Redis in trouble that got no reply.
	waited  atomic.Int64
	trouble atomic.Pointer[func(bucket string) bool] // whether the Redis of a bucket is in trouble
}

func newShared(t *testing.T, client redis.UniversalClient) *shared {
	c := new(shared)
	eval := resilienceredis.Eval(client)
	c.Cache = cacheaside.New(cacheaside.Config[int, string]{
		Load: func(_ context.Context, key int) (string, error) {
			c.loads[key].Add(1)
			time.Sleep(source)
			return fmt.Sprint("value of ", key), nil
		},
		Store: redisstore.New(redisstore.Config{Prefix: prefix, Timeout: timeout, Eval: func(
			ctx context.Context, script string, keys []string, args ...any,
		) (any, error) {
			inTrouble := c.trouble.Load()
			v, err := eval(ctx, script, keys, args...)
			if _, replied := errors.AsType[redis.Error](err); inTrouble != nil && (*inTrouble)(bucket(keys[0])) &&
				err != nil && !replied {
				c.waited.Add(1)
			}
			return v, err
		}}),
	})
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// bucket returns the hash tag of a key in Redis, which names the shard.
func bucket(key string) string {
	tag, _, _ := strings.Cut(key, "}")
	return tag + "}"
}

// troubled counts round trips from now on, if in returns true for their bucket.
func (c *shared) troubled(in func(bucket string) bool) { c.trouble.Store(&in) }

func everywhere(string) bool { return true }

// get gets a value from Redis, or loads it. It does not use the memory of c.
func (c *shared) get(t *testing.T, key int) (took time.Duration) {
	began := time.Now()
	v, _, err := c.GetWith(t.Context(), key, cacheaside.GetOptions{SkipMemory: true})
	assert.NoError(t, err)
	assert.Equal(t, fmt.Sprint("value of ", key), v)
	return time.Since(began)
}

// A measure has the times of calls during a fault.
type measure struct {
	lasted  time.Duration
	took    []time.Duration // by Gets
	sources []time.Duration // by the source alone, measured at the same time
}

// ask runs a caller for each key, which gets it in a loop until d has passed, and as many callers that use the source
// alone. One Get comes first: callers that arrive before the first failure all wait.
func (c *shared) ask(t *testing.T, keys []int, d time.Duration) (m measure) {
	var mu sync.Mutex
	var callers sync.WaitGroup
	began := time.Now()
	c.get(t, keys[0])
	caller := func(once func() time.Duration, times *[]time.Duration) {
		for time.Since(began) < d {
			took := once()
			mu.Lock()
			*times = append(*times, took)
			mu.Unlock()
			time.Sleep(source)
		}
	}
	for _, key := range keys {
		callers.Go(func() { caller(func() time.Duration { return c.get(t, key) }, &m.took) })
		callers.Go(func() {
			caller(func() time.Duration {
				began := time.Now()
				time.Sleep(source)
				return time.Since(began)
			}, &m.sources)
		})
	}
	callers.Wait()
	m.lasted = time.Since(began)
	return m
}

// median returns the median of d, which must not be empty.
func median(d []time.Duration) time.Duration {
	slices.Sort(d)
	return d[len(d)/2]
}

// judge applies the rules. waits is the number of callers that waited for Redis.
func (m measure) judge(waits int64) (r harm.Result) {
	// The first pause is not a full one, and neither is the last.
	may := 2 * (int64(m.lasted/errorPause) + 2)
	get, alone := median(m.took), median(m.sources)
	r.Cells = []string{
		fmt.Sprint(len(m.took)), fmt.Sprintf("%d (%d)", waits, may), fmt.Sprintf("%.2f", float64(get)/float64(alone)),
	}
	r.Break(waits <= may, "%d callers waited for Redis in %v, %d may", waits, m.lasted.Round(time.Millisecond), may)
	// Most calls must take at most 10% longer than the source alone. On a busy machine they can take twice as long, but
	// a call that waits for Redis takes timeout longer.
	r.Break(get-alone < timeout/4, "the median of a Get is %v, of the source alone %v", get, alone)
	return r
}

func redisClient(t testing.TB, addr string) *redis.Client {
	c := redis.NewClient(&redis.Options{Addr: addr, ContextTimeoutEnabled: true, MaxRetries: -1, PoolSize: 64})
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// keysFrom returns n keys.
func keysFrom(first, n int) (keys []int) {
	for i := range n {
		keys = append(keys, first+i)
	}
	return keys
}

// warm loads the values into Redis, and opens the connections of the client.
func (c *shared) warm(t *testing.T, keys []int) {
	var callers sync.WaitGroup
	for _, key := range keys {
		callers.Go(func() { c.get(t, key) })
	}
	callers.Wait()
}

// hangs is a row in which Redis is paused.
func hangs(t *testing.T) harm.Result {
	server := services.NewRedis(t)
	c, keys := newShared(t, redisClient(t, server.Addr)), keysFrom(0, callers)
	c.warm(t, keys)
	server.Pause()
	defer server.Resume()
	c.troubled(everywhere)
	return c.ask(t, keys, 3*time.Second).judge(c.waited.Load())
}

// restarts is a row in which Redis is killed and started again without its data.
func restarts(t *testing.T) harm.Result {
	server := services.NewRedis(t)
	client := redisClient(t, server.Addr)
	c, keys := newShared(t, client), keysFrom(0, callers)
	c.warm(t, keys)
	server.Kill()
	c.troubled(everywhere)
	r := c.ask(t, keys, 3*time.Second).judge(c.waited.Load())
	server.Start()
	other := newShared(t, client)
	r.Break(eventually(20*errorPause, func() bool {
		c.get(t, 0)
		before := other.loads[0].Load()
		other.get(t, 0)
		return other.loads[0].Load() == before
	}), "Redis is not used again within 20 pauses")
	return r
}

// full is a row in which Redis refuses writes because its memory is full.
func full(t *testing.T) harm.Result {
	server := services.NewRedis(t)
	client := redisClient(t, server.Addr)
	newShared(t, client).warm(t, keysFrom(0, callers/2))
	require.NoError(t, client.ConfigSet(t.Context(), "maxmemory-policy", "noeviction").Err())
	require.NoError(t, client.ConfigSet(t.Context(), "maxmemory", "4mb").Err())
	for i := 0; ; i++ {
		require.Less(t, i, 10_000)
		if err := client.Append(t.Context(), "ballast", strings.Repeat("x", 4096)).Err(); err != nil {
			require.ErrorContains(t, err, "OOM")
			break
		}
	}
	c := newShared(t, client)
	c.troubled(everywhere)
	return c.ask(t, keysFrom(0, callers), 3*time.Second).judge(c.waited.Load()) // Redis has half of the values
}

// tooLarge is a row in which Redis closes the connection of a client that sends a value of more than a megabyte.
func tooLarge(t *testing.T) (r harm.Result) {
	server := services.NewRedis(t)
	client := redisClient(t, server.Addr)
	require.NoError(t, client.ConfigSet(t.Context(), "proto-max-bulk-len", "1048576").Err())
	small := "small"
	shards := redisstore.New(redisstore.Config{Prefix: prefix, Eval: resilienceredis.Eval(client)})
	for i := 0; shards.Shard(small) != shards.Shard("large"); i++ {
		small = fmt.Sprint("small ", i)
	}
	var loads, lost atomic.Int64
	gets, waits := 0, 0
	for range 3 {
		c := cacheaside.New(cacheaside.Config[string, string]{
			Store: redisstore.New(redisstore.Config{
				Prefix: prefix, Timeout: 5 * timeout, Eval: resilienceredis.Eval(client),
			}),
			Load: func(_ context.Context, key string) (string, error) {
				time.Sleep(source)
				if key == small {
					loads.Add(1)
					return "small", nil
				}
				return strings.Repeat("x", 2<<20), nil
			},
		})
		c.Observe(func(_ context.Context, e cacheaside.Event) {
			if e.Kind == cacheaside.EventStoreLost {
				lost.Add(1)
			}
		})
		for _, key := range []string{"large", small} {
			began := time.Now()
			_, err := c.Get(t.Context(), key)
			require.NoError(t, err)
			gets++
			// A process waits for up to leaseTTL if it takes the load of another one to be running. A load is done after
			// source.
			if time.Since(began) > leaseTTL/2 {
				waits++
			}
		}
		_ = c.Close()
	}
	r.Cells = []string{fmt.Sprint(gets), fmt.Sprintf("%d (0)", waits), "-"}
	r.Break(waits == 0, "%d of %d Gets waited for a load that had already ended", waits, gets)
	r.Break(loads.Load() == 1, "a small value in the same shard was loaded %d times", loads.Load())
	r.Break(lost.Load() == 0, "the store counted as lost %d times", lost.Load())
	return r
}

// node returns a row in which one of three masters is off.
func node(off, on func(*services.RedisServer)) func(t *testing.T) harm.Result {
	return func(t *testing.T) harm.Result {
		cluster := services.NewRedisCluster(t)
		client := redis.NewClusterClient(&redis.ClusterOptions{
			Addrs: cluster.Addrs(), ContextTimeoutEnabled: true, MaxRetries: -1, PoolSize: 64,
		})
		t.Cleanup(func() { _ = client.Close() })
		store := redisstore.New(redisstore.Config{Prefix: prefix, Eval: resilienceredis.Eval(client)})
		c := newShared(t, client)
		masterOf := make(map[string]int) // by bucket
		var live, gone []int
		for key := 0; key < 200 && (len(live) < callers/2 || len(gone) < callers/2); key++ {
			bucket := fmt.Sprintf("{%s:%d}", prefix, store.Shard(fmt.Sprint(key)))
			if _, known := masterOf[bucket]; !known {
				masterOf[bucket] = cluster.MasterOf(bucket)
			}
			if masterOf[bucket] == 2 {
				gone = append(gone, key)
			} else if len(live) < callers/2 {
				live = append(live, key)
			}
		}
		c.warm(t, live)
		c.warm(t, gone)
		off(cluster.Masters[2])
		defer on(cluster.Masters[2])
		c.troubled(func(bucket string) bool { return masterOf[bucket] == 2 })
		before := loadsOf(c, live)
		var m measure
		var gets int
		var asking sync.WaitGroup
		asking.Go(func() { m = c.ask(t, gone, 3*time.Second) })
		asking.Go(func() { gets = len(c.ask(t, live, 3*time.Second).took) })
		asking.Wait()
		r := m.judge(c.waited.Load())
		// A few are loads if the machine stops for longer than timeout.
		loads := loadsOf(c, live) - before
		r.Break(loads <= gets/10, "%d of %d Gets of keys of other masters were loads", loads, gets)
		return r
	}
}

func loadsOf(c *shared, keys []int) (n int) {
	for _, key := range keys {
		n += int(c.loads[key].Load())
	}
	return n
}

// eventually reports whether ok becomes true within d.
func eventually(d time.Duration, ok func() bool) bool {
	for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if ok() {
			return true
		}
	}
	return false
}

func cacheTable() *harm.Table {
	return &harm.Table{
		Name: "cacheaside",
		Title: "For 3s, 60 callers get different values from a cache with redisstore. ErrorPause is 1s. Waited: round " +
			"trips to the Redis in trouble that got no reply, and in brackets the limit, two in each pause. Time: the " +
			"median of a Get, divided by the median of the source alone. It should be at most 1.1; the test only fails " +
			"if most calls wait.",
		Head: []string{"Gets", "waited", "time"},
		Rows: []harm.Row{
			{Name: "hang", Trouble: "Redis hangs", Run: hangs},
			{Name: "restart", Trouble: "Redis is killed and started again", Run: restarts},
			{Name: "full", Trouble: "Redis is full and refuses writes", Run: full},
			{Name: "value", Trouble: "Redis refuses one value, which three processes load one after the other", Run: tooLarge},
			{Name: "node hangs", Trouble: "one of three masters of a Cluster hangs",
				Run: node((*services.RedisServer).Pause, (*services.RedisServer).Resume)},
			{Name: "node dies", Trouble: "one of three masters of a Cluster is killed",
				Run: node((*services.RedisServer).Kill, func(*services.RedisServer) {})},
		},
	}
}
