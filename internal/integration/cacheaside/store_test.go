package cacheaside_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/cacheaside"
	"github.com/go-resilience/resilience/cacheaside/redisstore"
	"github.com/go-resilience/resilience/internal/integration/services"
)

func acquire(t *testing.T, s cacheaside.Store, key, token string, refresh bool) cacheaside.Response {
	t.Helper()
	looks, err := s.Acquire(t.Context(), cacheaside.Request{Key: key, Token: token, Refresh: refresh})
	require.NoError(t, err)
	require.Len(t, looks, 1)
	return looks[0]
}

// lease acquires key and returns the grant.
func lease(t *testing.T, s cacheaside.Store, key, token string) string {
	t.Helper()
	look := acquire(t, s, key, token, false)
	require.Equal(t, cacheaside.Leased, look.State)
	require.NotEmpty(t, look.Grant)
	return look.Grant
}

// fill fills value under grant and reports whether nothing was invalidated since.
func fill(t *testing.T, s cacheaside.Store, key, grant, value string) bool {
	t.Helper()
	current, err := s.Fill(t.Context(), cacheaside.Entry{
		Key: key, Grant: grant, Value: []byte(value), Fresh: time.Minute, Keep: time.Hour})
	require.NoError(t, err)
	require.Len(t, current, 1)
	return current[0]
}

// value returns the value of key in the Store, fresh or not.
func value(t *testing.T, s cacheaside.Store, key string) string {
	t.Helper()
	look := acquire(t, s, key, "looks", false)
	require.NoError(t, s.Release(t.Context(), cacheaside.Request{Key: key, Token: "looks"}, false))
	return string(look.Value)
}

// Damaged keys are replaced, and other keys of the call are not affected.
func TestDamagedKeysAreReplaced(t *testing.T) {
	p := newProcess(t, services.Redis(t))
	for name, damage := range map[string]func(c *redis.Client, hash string) error{
		"a string": func(c *redis.Client, hash string) error { return c.Set(t.Context(), hash, "x", time.Hour).Err() },
		"a list": func(c *redis.Client, hash string) error {
			if err := c.Del(t.Context(), hash).Err(); err != nil {
				return err
			}
			return c.LPush(t.Context(), hash, "x").Err()
		},
		"no times": func(c *redis.Client, hash string) error { return c.HDel(t.Context(), hash, "f0", "k0", "l0").Err() },
		"times are text": func(c *redis.Client, hash string) error {
			return c.HSet(t.Context(), hash, "f0", "x", "k0", "y", "l0", "z", "w", "u").Err()
		},
		"the epoch is text": func(c *redis.Client, hash string) error { return c.HSet(t.Context(), hash, "e0", "x").Err() },
		"a list for the epoch": func(c *redis.Client, hash string) error {
			epoch, _, _ := strings.Cut(hash, ":k")
			if err := c.Del(t.Context(), epoch).Err(); err != nil {
				return err
			}
			return c.LPush(t.Context(), epoch, "x").Err()
		},
		"text for the epoch": func(c *redis.Client, hash string) error {
			epoch, _, _ := strings.Cut(hash, ":k")
			return c.Set(t.Context(), epoch, "text", time.Hour).Err()
		},
	} {
		for call, do := range map[string]func(s cacheaside.Store, key, grant string) error{
			"nothing":    func(cacheaside.Store, string, string) error { return nil },
			"invalidate": func(s cacheaside.Store, key, _ string) error { return s.Invalidate(t.Context(), key) },
			"expire":     func(s cacheaside.Store, key, _ string) error { return s.Expire(t.Context(), key) },
			"release": func(s cacheaside.Store, key, _ string) error {
				return s.Release(t.Context(), cacheaside.Request{Key: key, Token: "a"}, false)
			},
			"all": func(s cacheaside.Store, _, _ string) error { return s.InvalidateAll(t.Context()) },
			"fill": func(s cacheaside.Store, key, grant string) error {
				_, err := s.Fill(t.Context(),
					cacheaside.Entry{Key: key, Grant: grant, Value: []byte("v"), Fresh: time.Hour, Keep: time.Hour})
				return err
			},
			"update": func(s cacheaside.Store, key, _ string) error {
				if _, err := s.Fence(t.Context(), key, "w"); err != nil {
					return err
				}
				return s.Unfence(t.Context(), key, "w")
			},
			"unfence": func(s cacheaside.Store, key, _ string) error { return s.Unfence(t.Context(), key, "w") },
		} {
			t.Run(name+"/"+call, func(t *testing.T) {
				prefix := newPrefix(t)
				s := p.store(prefix)
				require.True(t, fill(t, s, "k", lease(t, s, "k", "x"), "old"))
				grant := acquire(t, s, "k", "a", true).Grant
				hash := p.client.Keys(t.Context(), "{"+prefix+"*}:k").Val()[0]
				require.NoError(t, damage(p.client, hash))
				require.NoError(t, do(s, "k", grant))
				look := acquire(t, s, "k", "a", true)
				require.Equal(t, cacheaside.Leased, look.State)
				require.True(t, fill(t, s, "k", look.Grant, "new"))
				require.Equal(t, "new", value(t, s, "k"))
			})
		}
	}
}

// Hashes have no fields that are no longer needed.
func TestHashesHoldNoMoreThanTheyNeed(t *testing.T) {
	p := newProcess(t, services.Redis(t))
	prefix := newPrefix(t)
	s := p.store(prefix)
	filled := func(key string) {
		t.Helper()
		require.True(t, fill(t, s, key, lease(t, s, key, "a"), "v"))
		require.Equal(t, []string{"d0", "e0", "f0", "g0", "k0", "l0", "t0", "v0"}, fieldsOf(t, p, prefix, key))
	}
	filled("k")
	acquire(t, s, "k", "b", true)
	require.NoError(t, s.Expire(t.Context(), "k"))
	require.Equal(t, []string{"e0", "f0", "k0", "v0"}, fieldsOf(t, p, prefix, "k"))
	acquire(t, s, "k", "b", true)
	require.NoError(t, s.Invalidate(t.Context(), "k"))
	require.Empty(t, fieldsOf(t, p, prefix, "k"))
	filled("k")
	_, err := s.Fence(t.Context(), "k", "1")
	require.NoError(t, err)
	require.Equal(t, []string{"w"}, fieldsOf(t, p, prefix, "k"))
	require.NoError(t, s.Unfence(t.Context(), "k", "1"))
	require.Empty(t, fieldsOf(t, p, prefix, "k"))
}

// fieldsOf returns the names of the fields of the hash of key.
func fieldsOf(t *testing.T, p *process, prefix, key string) []string {
	t.Helper()
	found, err := p.client.Keys(t.Context(), "{"+prefix+"*}:"+key).Result()
	require.NoError(t, err)
	if len(found) == 0 {
		return nil
	}
	names, err := p.client.HKeys(t.Context(), found[0]).Result()
	require.NoError(t, err)
	slices.Sort(names)
	return names
}

func TestLeaseAndFenceEndByTheClockOfRedis(t *testing.T) {
	p := newProcess(t, services.Redis(t))
	prefix := newPrefix(t)
	s := p.store(prefix, func(cfg *redisstore.Config) {
		cfg.LeaseTTL, cfg.WriteTimeout = 50*time.Millisecond, 50*time.Millisecond
	})
	// until repeats the query until the response is as wanted. By then, the same time has passed on Redis's clock.
	until := func(key, token string, want cacheaside.State) time.Duration {
		begun := time.Now()
		for acquire(t, s, key, token, false).State != want {
			require.Less(t, time.Since(begun), time.Minute)
		}
		return time.Since(begun)
	}
	grant := lease(t, s, "k", "a")
	until("k", "b", cacheaside.Leased)
	until("k", "c", cacheaside.Leased)
	require.NoError(t, s.Release(t.Context(), cacheaside.Request{Key: "k", Token: "a"}, false), "c has it")
	require.Equal(t, cacheaside.Busy, acquire(t, s, "k", "a", false).State)
	require.True(t, fill(t, s, "k", grant, "of a"), "it was taken over, but nothing was invalidated")
	require.Equal(t, "of a", value(t, s, "k"))

	slow := lease(t, s, "slow", "a")
	time.Sleep(60 * time.Millisecond)
	require.True(t, fill(t, s, "slow", slow, "v"), "it has expired, but no process has taken it")

	require.True(t, fill(t, s, "w", lease(t, s, "w", "a"), "old"))
	begun := time.Now()
	_, err := s.Fence(t.Context(), "w", "dead")
	require.NoError(t, err)
	until("w", "b", cacheaside.Leased)
	require.GreaterOrEqual(t, time.Since(begun), 95*time.Millisecond, "twice as long as the write")
	require.Empty(t, value(t, s, "w"))

	// The longest of them counts.
	long := p.store(prefix, func(cfg *redisstore.Config) { cfg.WriteTimeout = time.Minute })
	_, err = long.Fence(t.Context(), "two", "long")
	require.NoError(t, err)
	_, err = s.Fence(t.Context(), "two", "short")
	require.NoError(t, err)
	time.Sleep(110 * time.Millisecond)
	require.Equal(t, cacheaside.Fenced, acquire(t, s, "two", "b", false).State)

	_, err = s.Fence(t.Context(), "x", "dead")
	require.NoError(t, err)
	_, err = long.Fence(t.Context(), "x", "alive")
	require.NoError(t, err)
	time.Sleep(110 * time.Millisecond)
	require.NoError(t, s.Unfence(t.Context(), "x", "alive"))
	require.Empty(t, fieldsOf(t, p, prefix, "x"), "nothing of the dead process remains")
	require.Equal(t, cacheaside.Leased, acquire(t, s, "x", "b", false).State)
}

// A listening Store can report when it has received all messages published so far.
type listening struct {
	cacheaside.Store
	mu    sync.Mutex
	heard map[string]chan struct{}
}

func (l *listening) Watch(ctx context.Context, up func(), heard func(string)) error {
	return l.Store.Watch(ctx, func() {
		up() // memory is cleared, so missed messages do not matter
		l.mu.Lock()
		defer l.mu.Unlock()
		for _, ch := range l.heard {
			close(ch)
		}
		clear(l.heard)
	}, func(key string) {
		heard(key)
		l.mu.Lock()
		defer l.mu.Unlock()
		if ch := l.heard[key]; ch != nil {
			close(ch)
			delete(l.heard, key)
		}
	})
}

// catchUp returns when l has received all messages that were published before.
func (l *listening) catchUp(ctx context.Context, from cacheaside.Store) error {
	key, ch := fmt.Sprintf("mark-%x", rand.Uint64()), make(chan struct{})
	l.mu.Lock()
	l.heard[key] = ch
	l.mu.Unlock()
	if err := from.Invalidate(ctx, key); err != nil {
		return err
	}
	<-ch
	return nil
}

func TestValuesAreShared(t *testing.T) {
	addr := services.Redis(t)
	prefix := newPrefix(t)
	type user struct {
		Name string
		Age  int
	}
	var loads atomic.Int64
	var row atomic.Value
	row.Store(user{"Ada", 36})
	caches := make([]*cacheaside.Cache[int, user], 2)
	ears, stores := make([]*listening, 2), make([]cacheaside.Store, 2)
	for i := range caches {
		p := newProcess(t, addr)
		stores[i] = p.store(prefix)
		ears[i] = &listening{Store: stores[i], heard: map[string]chan struct{}{}}
		caches[i] = cacheaside.New(cacheaside.Config[int, user]{
			Load: func(context.Context, int) (user, error) {
				loads.Add(1)
				return row.Load().(user), nil
			},
			Store: ears[i],
		})
		defer caches[i].Close()
		awaitWatch(t, caches[i])
	}
	get := func(c *cacheaside.Cache[int, user]) user {
		v, err := c.Get(t.Context(), 1)
		require.NoError(t, err)
		return v
	}
	require.Equal(t, user{"Ada", 36}, get(caches[0]))
	require.Equal(t, user{"Ada", 36}, get(caches[1]))
	require.Equal(t, int64(1), loads.Load())
	for age, change := range map[int]func() error{
		37: func() error {
			return caches[0].Write(t.Context(), 1, func(context.Context) error { row.Store(user{"Ada", 37}); return nil })
		},
		38: func() error { row.Store(user{"Ada", 38}); return caches[0].Invalidate(t.Context(), 1) },
		39: func() error { row.Store(user{"Ada", 39}); return caches[0].InvalidateAll(t.Context()) },
		40: func() error { row.Store(user{"Ada", 40}); return caches[0].Expire(t.Context(), 1) },
	} {
		before := loads.Load()
		require.NoError(t, change())
		require.NoError(t, ears[1].catchUp(t.Context(), stores[0]))
		require.Equal(t, age, get(caches[1]).Age)
		require.Equal(t, age, get(caches[0]).Age)
		require.Equal(t, before+1, loads.Load())
	}
}

func TestRedisSlowDownAndBack(t *testing.T) {
	server := services.NewRedis(t)
	p := newProcess(t, server.Addr)
	var loads atomic.Int64
	events := make(chan cacheaside.Event, 1000)
	c := cacheaside.New(cacheaside.Config[int, int]{
		Load: func(_ context.Context, k int) (int, error) { return int(loads.Add(1)), nil },
		Store: p.store(newPrefix(t),
			func(cfg *redisstore.Config) { cfg.Timeout, cfg.Heartbeat = time.Second, 200*time.Millisecond }),
		// Long enough that only the events below end it.
		ErrorPause: 200 * time.Millisecond,
	})
	c.Observe(func(_ context.Context, e cacheaside.Event) { events <- e })
	defer c.Close()
	await := func(kind cacheaside.EventKind) cacheaside.Event {
		t.Helper()
		for deadline := time.After(time.Minute); ; {
			select {
			case e := <-events:
				if e.Kind == kind {
					return e
				}
			case <-deadline:
				t.Fatalf("no event %q", kind)
			}
		}
	}
	get := func(key int) int {
		t.Helper()
		v, err := c.Get(t.Context(), key)
		require.NoError(t, err)
		return v
	}
	isKept := func() bool {
		first := get(1)
		return first == get(1)
	}
	await(cacheaside.EventWatchBegan)
	require.Eventually(t, isKept, time.Minute, 10*time.Millisecond)

	for name, change := range map[string]struct{ down, back func() }{
		"slow": {server.Pause, server.Resume},
		"down": {server.Kill, server.Start},
	} {
		t.Run(name, func(t *testing.T) {
			change.down()
			err := c.Write(t.Context(), 1, func(context.Context) error { return nil })
			require.ErrorIs(t, err, cacheaside.ErrNotPropagated)
			await(cacheaside.EventWatchLost)
			before := p.evals.Load()
			for range 100 {
				require.Less(t, get(1), get(1), "each goes to the source")
			}
			require.Less(t, p.evals.Load()-before, int64(100), "Redis is not queried each time")
			change.back()
			await(cacheaside.EventWatchBegan)
			require.Eventually(t, func() bool { return c.Stats().PendingInvalidations == 0 }, time.Minute, 10*time.Millisecond)
			require.Eventually(t, isKept, time.Minute, 10*time.Millisecond, "kept again")
		})
	}
}

func TestPayloadThatDoesNotDecodeIsReplaced(t *testing.T) {
	p := newProcess(t, services.Redis(t))
	prefix := newPrefix(t)
	old := cacheaside.New(cacheaside.Config[int, string]{
		Load: func(context.Context, int) (string, error) { return "text", nil }, Store: p.store(prefix),
	})
	defer old.Close()
	_, err := old.Get(t.Context(), 1)
	require.NoError(t, err)
	var bad []error
	c := cacheaside.New(cacheaside.Config[int, int]{
		Load: func(context.Context, int) (int, error) { return 5, nil }, Store: p.store(prefix),
	})
	c.Observe(func(_ context.Context, e cacheaside.Event) {
		if e.Kind == cacheaside.EventCodecFailed {
			bad = append(bad, e.Err)
		}
	})
	defer c.Close()
	for range 3 {
		v, _, err := c.GetWith(t.Context(), 1, cacheaside.GetOptions{SkipMemory: true})
		require.NoError(t, err)
		require.Equal(t, 5, v)
	}
	require.NotEmpty(t, bad)
	var mistyped *json.UnmarshalTypeError
	require.True(t, errors.As(bad[0], &mistyped), "%v", bad[0])
	require.Equal(t, int64(1), c.Stats().Loaded)
}

// A thousand callers of a cold key, in four processes, make one load.
func TestColdKeyIsLoadedOnceByAllProcesses(t *testing.T) {
	addr := services.Redis(t)
	for _, skip := range []bool{false, true} {
		prefix := newPrefix(t)
		var loads atomic.Int64
		var wg sync.WaitGroup
		for range 4 {
			c := cacheaside.New(cacheaside.Config[int, int]{
				Load: func(context.Context, int) (int, error) {
					loads.Add(1)
					time.Sleep(20 * time.Millisecond)
					return 7, nil
				},
				Store: newProcess(t, addr).store(prefix, func(cfg *redisstore.Config) { cfg.LeaseTTL = time.Minute }),
			})
			defer c.Close()
			for range 250 {
				wg.Go(func() {
					if v, _, err := c.GetWith(t.Context(), 1, cacheaside.GetOptions{SkipMemory: skip}); err != nil || v != 7 {
						t.Errorf("got %d, %v", v, err)
					}
				})
			}
		}
		wg.Wait()
		require.Equal(t, int64(1), loads.Load())
	}
}
