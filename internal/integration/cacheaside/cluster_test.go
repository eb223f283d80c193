package cacheaside_test

import (
	"context"
	"errors"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/cacheaside"
	"github.com/go-resilience/resilience/cacheaside/redisstore"
	"github.com/go-resilience/resilience/internal/integration/services"
)

// bucketOf returns the hash tag of the bucket that a key is in.
func bucketOf(s cacheaside.Store, prefix string, key int) string {
	return "{" + prefix + ":" + strconv.Itoa(int(s.Shard(strconv.Itoa(key)))) + "}"
}

func TestStoreOnACluster(t *testing.T) {
	c := services.NewRedisCluster(t)
	for name, connect := range connectors {
		t.Run("no Get is older than a Write/"+name, func(t *testing.T) {
			noGetIsOlderOnACluster(t, c, connect, name == "rueidis")
		})
		t.Run("changes are received/"+name, func(t *testing.T) { changesAreReceivedOnACluster(t, c, connect) })
	}
	t.Run("a master is killed", func(t *testing.T) {
		keysOfLiveMastersStayCached(t, c, c.Masters[2].Kill, c.Masters[2].Start)
	})
	t.Run("a master hangs", func(t *testing.T) {
		keysOfLiveMastersStayCached(t, c, c.Masters[2].Pause, c.Masters[2].Resume)
	})
}

// Slots move under load, a master hangs, and a master is killed. Each of three processes reads what it has written,
// and without memory what all have written.
func noGetIsOlderOnACluster(t *testing.T, c *services.RedisCluster,
	connect func(testing.TB, ...string) redisstore.Config, skip bool) {
	type promises [4]atomic.Int64 // by key: the version that a Get may not be older than
	var committed, all promises
	raise := func(n *atomic.Int64, to int64) {
		for old := n.Load(); old < to && !n.CompareAndSwap(old, to); old = n.Load() {
		}
	}
	type told struct{}
	prefix := newPrefix(t)
	var reading, writing sync.WaitGroup
	var moved, done atomic.Bool
	var writes atomic.Int64
	for range 3 {
		var own promises
		cache := cacheaside.New(cacheaside.Config[int, int64]{
			Load:  func(_ context.Context, key int) (int64, error) { return committed[key].Load(), nil },
			Store: newStore(connect(t, c.Addrs()...), prefix, impatient), ErrorPause: 20 * time.Millisecond,
		})
		cache.Observe(func(ctx context.Context, e cacheaside.Event) {
			if reached, ok := ctx.Value(told{}).(*bool); ok && e.Kind == cacheaside.EventNotPropagated {
				*reached = false
			}
		})
		awaitWatch(t, cache)
		defer cache.Close()
		writing.Go(func() {
			for key := 0; !done.Load(); key = (key + 1) % len(committed) {
				var version int64
				reached := true
				err := cache.Write(context.WithValue(t.Context(), told{}, &reached), key, func(context.Context) error {
					version = committed[key].Add(1)
					return nil
				})
				raise(&own[key], version)
				if err == nil && reached {
					raise(&all[key], version)
				}
				writes.Add(1)
			}
		})
		for range 3 {
			reading.Go(func() {
				for i := 0; i < 100 || !moved.Load(); i++ {
					key := i % len(committed)
					floor := own[key].Load()
					if skip {
						floor = max(floor, all[key].Load())
					}
					v, _, err := cache.GetWith(t.Context(), key, cacheaside.GetOptions{SkipMemory: skip})
					if err != nil || v < floor {
						t.Errorf("got version %d of %d, %v", v, floor, err)
						return
					}
				}
			})
		}
	}
	s := newStore(redisstore.Config{Eval: errEval}, prefix)
	for range 2 {
		for key := range committed {
			bucket := bucketOf(s, prefix, key)
			c.Move(bucket, (c.MasterOf(bucket)+1)%3, func() { time.Sleep(20 * time.Millisecond) })
		}
	}
	for key := range 3 {
		c.Move(bucketOf(s, prefix, key), key)
	}
	time.Sleep(50 * time.Millisecond)
	c.Masters[1].Pause()
	time.Sleep(300 * time.Millisecond)
	c.Masters[1].Resume()
	time.Sleep(50 * time.Millisecond)
	c.Masters[2].Kill()
	time.Sleep(100 * time.Millisecond)
	c.Masters[2].Start()
	time.Sleep(100 * time.Millisecond)
	moved.Store(true)
	reading.Wait()
	done.Store(true)
	writing.Wait()
	t.Logf("%d writes", writes.Load())
}

func errEval(context.Context, string, []string, ...any) (any, error) {
	return nil, errors.New("must not be called")
}

// A Write on any master invalidates the memory of another process, through the cluster bus.
func changesAreReceivedOnACluster(t *testing.T, c *services.RedisCluster,
	connect func(testing.TB, ...string) redisstore.Config) {
	prefix := newPrefix(t)
	var rows [12]atomic.Int64
	open := func() *cacheaside.Cache[int, int64] {
		cache := cacheaside.New(cacheaside.Config[int, int64]{
			Load:  func(_ context.Context, key int) (int64, error) { return rows[key].Load(), nil },
			Store: newStore(connect(t, c.Addrs()...), prefix),
		})
		t.Cleanup(func() { _ = cache.Close() })
		awaitWatch(t, cache)
		return cache
	}
	writer, reader := open(), open()
	for key := range rows {
		_, err := reader.Get(t.Context(), key)
		require.NoError(t, err)
		require.NoError(t, writer.Write(t.Context(), key, func(context.Context) error { rows[key].Store(1); return nil }))
		require.Eventually(t, func() bool {
			v, err := reader.Get(t.Context(), key)
			return err == nil && v == 1
		}, time.Minute, time.Millisecond)
	}
}

// While the third master is down, keys of the other masters are not loaded again. The third master is used again after
// it is back.
func keysOfLiveMastersStayCached(t *testing.T, c *services.RedisCluster, off, on func()) {
	caches := map[string]cached{}
	for name, connect := range connectors {
		for where, skip := range map[string]bool{"redis": true, "both": false} {
			if !skip && name == "rueidis" {
				continue // it may have subscribed at the master that is to go
			}
			// The subscription of go-redis is at the master of its channel, which lives.
			prefix := newPrefix(t)
			for c.MasterOf(prefix) == 2 {
				prefix = newPrefix(t)
			}
			s := newStore(connect(t, c.Addrs()...), prefix, func(cfg *redisstore.Config) {
				cfg.Timeout, cfg.Heartbeat = time.Second, time.Hour
			})
			x := cached{skip: skip, loads: new([100]atomic.Int64), lost: new(atomic.Int64)}
			x.Cache = cacheaside.New(cacheaside.Config[int, int]{
				Load:  func(_ context.Context, key int) (int, error) { return int(x.loads[key].Add(1)), nil },
				Store: s, ErrorPause: 1500 * time.Millisecond,
			})
			x.Cache.Observe(func(ctx context.Context, e cacheaside.Event) {
				if e.Kind == cacheaside.EventWatchLost {
					x.lost.Add(1)
				}
			})
			t.Cleanup(func() { _ = x.Close() })
			if !skip {
				awaitWatch(t, x.Cache)
			}
			for key := 0; len(x.live) < 12 || len(x.gone) < 3; key++ {
				if c.MasterOf(bucketOf(s, prefix, key)) == 2 {
					x.gone = append(x.gone, key)
				} else {
					x.live = append(x.live, key)
				}
				_, err := x.get(t, key)
				require.NoError(t, err)
			}
			caches[name+"/"+where] = x
		}
	}
	all := func(what string, test func(t *testing.T, x cached)) {
		t.Run(what, func(t *testing.T) {
			for name, x := range caches {
				t.Run(name, func(t *testing.T) {
					t.Parallel()
					test(t, x)
				})
			}
		})
	}
	back := sync.OnceFunc(on)
	t.Cleanup(back)
	off()
	all("gone", func(t *testing.T, x cached) {
		var asked atomic.Bool
		var asking sync.WaitGroup
		asking.Go(func() {
			for i := range 4 {
				_, err := x.get(t, x.gone[i%3])
				assert.NoError(t, err)
			}
			asked.Store(true)
		})
		gets := 0
		for ; gets < 200 || !asked.Load(); gets++ {
			_, err := x.get(t, x.live[gets%len(x.live)])
			require.NoError(t, err)
		}
		asking.Wait()
		loads := -len(x.live)
		for _, key := range x.live {
			loads += int(x.loads[key].Load())
		}
		// a few are loads if the machine stops while two keys of the third master are queried
		require.LessOrEqual(t, loads, gets/10)
		if !x.skip {
			require.Zero(t, x.lost.Load(), "the subscription is with a live master")
		}
	})
	back()
	all("back", func(t *testing.T, x cached) {
		for _, key := range x.gone {
			require.Eventually(t, func() bool {
				first, err := x.get(t, key)
				require.NoError(t, err)
				second, err := x.get(t, key)
				require.NoError(t, err)
				return first == second
			}, time.Minute, 10*time.Millisecond)
		}
	})
}

// A cached is a Cache on a cluster that loses one master.
type cached struct {
	*cacheaside.Cache[int, int]
	live, gone []int
	skip       bool
	loads      *[100]atomic.Int64
	lost       *atomic.Int64 // subscriptions
}

func (x cached) get(t *testing.T, key int) (int, error) {
	v, _, err := x.GetWith(t.Context(), key, cacheaside.GetOptions{SkipMemory: x.skip})
	return v, err
}
