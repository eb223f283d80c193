package cacheaside_test

import (
	"context"
	"encoding/json"
	"errors"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/cacheaside"
	"github.com/go-resilience/resilience/cacheaside/redisstore"
	"github.com/go-resilience/resilience/internal/integration/services"
)

func acquire(t *testing.T, s cacheaside.Store, key, token string, renew bool) cacheaside.Lookup {
	t.Helper()
	look, err := s.Acquire(t.Context(), key, token, renew)
	require.NoError(t, err)
	return look
}

func fill(t *testing.T, s cacheaside.Store, key, token string) bool {
	t.Helper()
	filled, err := s.Fill(t.Context(), key, token, []byte("v-"+token), time.Minute, time.Hour)
	require.NoError(t, err)
	return filled
}

// TestStoreKeepsItsRules is the contract of cacheaside.Store, rule by rule.
func TestStoreKeepsItsRules(t *testing.T) {
	p := newProcess(t, services.Redis(t))
	for name, test := range map[string]func(t *testing.T, s *redisstore.Store){
		"the first takes the lease, the others wait": func(t *testing.T, s *redisstore.Store) {
			require.Equal(t, cacheaside.Leased, acquire(t, s, "k", "a", false).State)
			look := acquire(t, s, "k", "b", false)
			require.Equal(t, cacheaside.Busy, look.State)
			require.Nil(t, look.Value)
			require.Greater(t, look.Wait, time.Second)
			require.LessOrEqual(t, look.Wait, 3*time.Second)
			require.Equal(t, cacheaside.Leased, acquire(t, s, "k", "a", false).State, "again")
			require.False(t, fill(t, s, "k", "b"))
			require.True(t, fill(t, s, "k", "a"))
			look = acquire(t, s, "k", "b", false)
			require.Equal(t, cacheaside.Hit, look.State)
			require.Equal(t, "v-a", string(look.Value))
			require.Greater(t, look.Fresh, 50*time.Second)
			require.LessOrEqual(t, look.Fresh, time.Minute)
			require.False(t, fill(t, s, "k", "a"), "it was given back")
		},
		"a fresh value is renewed on request": func(t *testing.T, s *redisstore.Store) {
			acquire(t, s, "k", "a", false)
			require.True(t, fill(t, s, "k", "a"))
			look := acquire(t, s, "k", "b", true)
			require.Equal(t, cacheaside.Leased, look.State)
			require.Equal(t, "v-a", string(look.Value))
			require.Equal(t, cacheaside.Busy, acquire(t, s, "k", "c", true).State)
			require.Equal(t, cacheaside.Hit, acquire(t, s, "k", "c", false).State)
			require.True(t, fill(t, s, "k", "b"))
			require.Equal(t, "v-b", string(acquire(t, s, "k", "c", false).Value))
		},
		"a released lease is free": func(t *testing.T, s *redisstore.Store) {
			acquire(t, s, "k", "a", false)
			require.NoError(t, s.Release(t.Context(), "k", "b"))
			require.Equal(t, cacheaside.Busy, acquire(t, s, "k", "b", false).State)
			require.NoError(t, s.Release(t.Context(), "k", "a"))
			require.Equal(t, cacheaside.Leased, acquire(t, s, "k", "b", false).State)
			require.False(t, fill(t, s, "k", "a"))
		},
		"an invalidation takes value and lease": func(t *testing.T, s *redisstore.Store) {
			acquire(t, s, "k", "a", false)
			require.NoError(t, s.Invalidate(t.Context(), "k"))
			require.False(t, fill(t, s, "k", "a"), "absence authorises nothing")
			acquire(t, s, "k", "b", false)
			require.True(t, fill(t, s, "k", "b"))
			require.NoError(t, s.Invalidate(t.Context(), "k"))
			require.Nil(t, acquire(t, s, "k", "c", false).Value)
		},
		"an expired value is there, but not fresh": func(t *testing.T, s *redisstore.Store) {
			acquire(t, s, "k", "a", false)
			require.True(t, fill(t, s, "k", "a"))
			acquire(t, s, "k", "b", true)
			require.NoError(t, s.Expire(t.Context(), "k"))
			require.False(t, fill(t, s, "k", "b"))
			look := acquire(t, s, "k", "c", false)
			require.Equal(t, cacheaside.Leased, look.State)
			require.Equal(t, "v-a", string(look.Value))
			require.LessOrEqual(t, look.Fresh, time.Duration(0))
			require.NoError(t, s.Expire(t.Context(), "nothing"))
		},
		"everything is invalidated": func(t *testing.T, s *redisstore.Store) {
			for i := range 300 {
				acquire(t, s, strconv.Itoa(i), "a", false)
				if i%2 == 0 {
					require.True(t, fill(t, s, strconv.Itoa(i), "a"))
				}
			}
			_, err := s.Fence(t.Context(), "fenced", "w")
			require.NoError(t, err)
			require.NoError(t, s.InvalidateAll(t.Context()))
			for i := range 300 {
				require.False(t, fill(t, s, strconv.Itoa(i), "a"))
				look := acquire(t, s, strconv.Itoa(i), "b", false)
				require.Equal(t, cacheaside.Leased, look.State)
				require.Nil(t, look.Value)
			}
			require.Equal(t, cacheaside.Fenced, acquire(t, s, "fenced", "a", false).State)
			require.NoError(t, s.InvalidateAll(t.Context()))
			require.False(t, fill(t, s, "1", "b"))
		},
		"fences are counted": func(t *testing.T, s *redisstore.Store) {
			acquire(t, s, "k", "a", false)
			for _, w := range []string{"1", "2"} {
				window, err := s.Fence(t.Context(), "k", w)
				require.NoError(t, err)
				require.Equal(t, 10*time.Second, window)
			}
			require.False(t, fill(t, s, "k", "a"))
			require.NoError(t, s.Unfence(t.Context(), "k", "1"))
			require.NoError(t, s.Unfence(t.Context(), "k", "1"), "not twice")
			require.NoError(t, s.Invalidate(t.Context(), "k"), "keeps them")
			require.Equal(t, cacheaside.Fenced, acquire(t, s, "k", "a", false).State)
			require.NoError(t, s.Unfence(t.Context(), "k", "2"))
			require.Equal(t, cacheaside.Leased, acquire(t, s, "k", "a", false).State)
			require.NoError(t, s.Unfence(t.Context(), "k", "never stood"))
			require.False(t, fill(t, s, "k", "a"))
		},
	} {
		t.Run(name, func(t *testing.T) {
			prefix := newPrefix(t)
			test(t, p.store(prefix))
			everyKeyExpires(t, p, prefix)
		})
	}
}

func everyKeyExpires(t *testing.T, p *process, prefix string) {
	t.Helper()
	found := 0
	for keys := p.client.Scan(t.Context(), 0, "*", 1000).Iterator(); keys.Next(t.Context()); {
		if strings.HasPrefix(keys.Val(), "{"+prefix) {
			found++
			ttl, err := p.client.PTTL(t.Context(), keys.Val()).Result()
			require.NoError(t, err)
			require.Positive(t, ttl, keys.Val())
		}
	}
	require.Positive(t, found)
}

func TestLeaseAndFenceEndByTheClockOfRedis(t *testing.T) {
	p := newProcess(t, services.Redis(t))
	s := p.store(newPrefix(t), func(cfg *redisstore.Config) {
		cfg.Lease, cfg.Write = 50*time.Millisecond, 50*time.Millisecond
	})
	// until asks until the answer is there: by then Redis's clock has moved as far.
	until := func(key, token string, want cacheaside.State) time.Duration {
		begun := time.Now()
		for acquire(t, s, key, token, false).State != want {
			require.Less(t, time.Since(begun), time.Minute)
		}
		return time.Since(begun)
	}
	acquire(t, s, "k", "a", false)
	until("k", "b", cacheaside.Leased)
	require.False(t, fill(t, s, "k", "a"), "b has it")

	acquire(t, s, "slow", "a", false)
	time.Sleep(60 * time.Millisecond)
	require.True(t, fill(t, s, "slow", "a"), "its time has passed, but nobody took it")

	begun := time.Now()
	_, err := s.Fence(t.Context(), "w", "dead")
	require.NoError(t, err)
	until("w", "b", cacheaside.Leased)
	require.GreaterOrEqual(t, time.Since(begun), 95*time.Millisecond, "twice as long as the write")

	_, err = s.Fence(t.Context(), "x", "dead")
	require.NoError(t, err)
	time.Sleep(110 * time.Millisecond)
	_, err = s.Fence(t.Context(), "x", "alive")
	require.NoError(t, err)
	require.NoError(t, s.Unfence(t.Context(), "x", "alive"))
	require.Equal(t, cacheaside.Leased, acquire(t, s, "x", "b", false).State, "the dead are not counted for ever")
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
	heard := make(chan struct{}, 100)
	for i := range caches {
		p := newProcess(t, addr)
		onEvent, ready := up()
		ears := &listening{Store: p.store(prefix), heard: map[string]chan struct{}{}}
		caches[i] = cacheaside.New(cacheaside.Config[int, user]{
			Load: func(context.Context, int) (user, error) {
				loads.Add(1)
				return row.Load().(user), nil
			},
			Store: hearing{ears, heard}, OnEvent: onEvent,
		})
		defer caches[i].Close()
		<-ready
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
			return caches[0].Update(t.Context(), 1, func(context.Context) error { row.Store(user{"Ada", 37}); return nil })
		},
		38: func() error { row.Store(user{"Ada", 38}); return caches[0].Invalidate(t.Context(), 1) },
		39: func() error { row.Store(user{"Ada", 39}); return caches[0].InvalidateAll(t.Context()) },
		40: func() error { row.Store(user{"Ada", 40}); return caches[0].Expire(t.Context(), 1) },
	} {
		before := loads.Load()
		require.NoError(t, change())
		<-heard
		if age == 37 {
			<-heard // of the fence, and of its end
		}
		require.Equal(t, age, get(caches[1]).Age)
		require.Equal(t, age, get(caches[0]).Age)
		require.Equal(t, before+1, loads.Load())
	}
}

// hearing tells a channel of what is heard.
type hearing struct {
	*listening
	ch chan struct{}
}

func (h hearing) Watch(ctx context.Context, up func(), heard func(string)) error {
	return h.listening.Watch(ctx, up, func(key string) {
		heard(key)
		h.ch <- struct{}{}
	})
}

func TestRedisSlowDownAndBack(t *testing.T) {
	server := services.NewRedis(t)
	p := newProcess(t, server.Addr)
	var loads atomic.Int64
	events := make(chan cacheaside.Event, 1000)
	c := cacheaside.New(cacheaside.Config[int, int]{
		Load:  func(_ context.Context, k int) (int, error) { return int(loads.Add(1)), nil },
		Store: p.store(newPrefix(t), func(cfg *redisstore.Config) { cfg.Timeout, cfg.Heartbeat = time.Second, 200*time.Millisecond }),
		// Long enough that only the events below end it.
		ErrorPause: 200 * time.Millisecond,
		OnEvent:    func(_ context.Context, e cacheaside.Event) { events <- e },
	})
	defer c.Close()
	await := func(kind cacheaside.Kind) cacheaside.Event {
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
	await(cacheaside.WatchRestored)
	require.Eventually(t, isKept, time.Minute, 10*time.Millisecond)

	for name, change := range map[string]struct{ down, back func() }{
		"slow": {server.Pause, server.Resume},
		"down": {server.Kill, server.Start},
	} {
		t.Run(name, func(t *testing.T) {
			change.down()
			err := c.Update(t.Context(), 1, func(context.Context) error { return nil })
			require.ErrorIs(t, err, cacheaside.ErrNotInvalidated)
			await(cacheaside.WatchLost)
			before := p.evals.Load()
			for range 100 {
				require.Less(t, get(1), get(1), "each goes to the source")
			}
			require.Less(t, p.evals.Load()-before, int64(100), "and Redis is not asked each time")
			change.back()
			await(cacheaside.WatchRestored)
			for c.Stats().Untold > 0 {
				await(cacheaside.Reinvalidated)
			}
			require.Eventually(t, isKept, time.Minute, 10*time.Millisecond, "kept again")
		})
	}
}

func TestPayloadThatDoesNotDecodeIsReplaced(t *testing.T) {
	p := newProcess(t, services.Redis(t))
	prefix := newPrefix(t)
	old := cacheaside.New(cacheaside.Config[int, string]{
		Load: func(context.Context, int) (string, error) { return "text", nil }, Store: p.store(prefix), Capacity: -1,
	})
	defer old.Close()
	_, err := old.Get(t.Context(), 1)
	require.NoError(t, err)
	var bad []error
	c := cacheaside.New(cacheaside.Config[int, int]{
		Load: func(context.Context, int) (int, error) { return 5, nil }, Store: p.store(prefix), Capacity: -1,
		OnEvent: func(_ context.Context, e cacheaside.Event) {
			if e.Kind == cacheaside.BadPayload {
				bad = append(bad, e.Err)
			}
		},
	})
	defer c.Close()
	for range 3 {
		v, err := c.Get(t.Context(), 1)
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
	for _, capacity := range []int{0, -1} {
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
				Store:    newProcess(t, addr).store(prefix, func(cfg *redisstore.Config) { cfg.Lease = time.Minute }),
				Capacity: capacity,
			})
			defer c.Close()
			for range 250 {
				wg.Go(func() {
					if v, err := c.Get(t.Context(), 1); err != nil || v != 7 {
						t.Errorf("got %d, %v", v, err)
					}
				})
			}
		}
		wg.Wait()
		require.Equal(t, int64(1), loads.Load())
	}
}
