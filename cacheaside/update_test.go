package cacheaside_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/cacheaside"
)

type config = cacheaside.Config[int, int]

func update(t *testing.T, c *cacheaside.Cache[int, int], change func(*config)) {
	t.Helper()
	require.NoError(t, c.Update(change))
}

func TestConfigHasItsDefaults(t *testing.T) {
	c := newCache(t, config{Name: "users", Load: identity, Jitter: cacheaside.None})
	require.Equal(t, "users", c.Describe().Name)
	cfg := c.Config()
	require.Equal(t, 5*time.Minute, cfg.TTL)
	require.Equal(t, time.Second, cfg.ErrorPause)
	require.Equal(t, 30*time.Second, cfg.LoadTimeout)
	require.Equal(t, 10_000, cfg.Capacity)
	require.EqualValues(t, cacheaside.None, cfg.Jitter)
	withoutJitter := newCache(t, config{Load: identity})
	require.Equal(t, 0.1, withoutJitter.Config().Jitter)

	again := newCache(t, cfg)
	require.Equal(t, cfg.Jitter, again.Config().Jitter, "a Config makes the same Cache again")
	require.Equal(t, 5*time.Minute, c.Config().TTL)
}

func TestUpdateKeepsEntriesAndTheirTimes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src := newSource()
		c := newCache(t, config{Load: src.load, TTL: time.Minute, Jitter: cacheaside.None})
		mustGet(t, c, 1)
		update(t, c, func(cfg *config) { cfg.TTL = time.Second })
		mustGet(t, c, 2)
		time.Sleep(2 * time.Second)
		mustGet(t, c, 1)
		mustGet(t, c, 2)
		require.Equal(t, 1, src.loaded(1), "fresh for the minute that it was loaded with")
		require.Equal(t, 2, src.loaded(2), "fresh for the new second")
		require.Equal(t, int64(1), c.Stats().Hits)
	})
}

func TestUpdateOfCapacityEvictsNoMoreThanNeeded(t *testing.T) {
	c := newCache(t, config{Load: identity, Capacity: 1000})
	for i := range 2000 {
		mustGet(t, c, i)
		require.LessOrEqual(t, c.Stats().Entries, int64(1000))
	}
	before := c.Stats().Entries
	require.Greater(t, before, int64(900))
	update(t, c, func(cfg *config) { cfg.Capacity = 5000 })
	require.Equal(t, before, c.Stats().Entries)
	for i := range 3000 {
		mustGet(t, c, i)
	}
	require.Greater(t, c.Stats().Entries, int64(2900))
	update(t, c, func(cfg *config) { cfg.Capacity = 10 })
	require.LessOrEqual(t, c.Stats().Entries, int64(10))
	require.Positive(t, c.Stats().Entries)
}

func TestLoadsInFlightKeepSettings(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n = 500 // several in each shard
		c := newCache(t, config{LoadTimeout: 10 * time.Second, Load: func(ctx context.Context, k int) (int, error) {
			if k%2 == 0 {
				time.Sleep(time.Minute) // ignores its ctx
			}
			<-ctx.Done()
			return 0, ctx.Err()
		}})
		var wg sync.WaitGroup
		get := func(keys int, want time.Duration) {
			for k := range n {
				wg.Go(func() {
					begun := time.Now()
					_, err := c.Get(t.Context(), keys+k)
					var timeout *cacheaside.TimeoutError
					if !errors.As(err, &timeout) || timeout.After != want || time.Since(begun) != want {
						t.Errorf("%v after %v, want a timeout after %v", err, time.Since(begun), want)
					}
				})
			}
			synctest.Wait()
		}
		get(0, 10*time.Second)
		update(t, c, func(cfg *config) { cfg.LoadTimeout = time.Second })
		get(n, time.Second)
		update(t, c, func(cfg *config) { cfg.LoadTimeout = 20 * time.Second })
		get(2*n, 20*time.Second)
		wg.Wait()
		require.Equal(t, int64(3*n), c.Stats().TimedOut)
	})
}

func TestUpdateOfMiddlewareAppliesToLaterLoads(t *testing.T) {
	c := newCache(t, config{Load: identity})
	mustGet(t, c, 1)
	wrapped := 0
	update(t, c, func(cfg *config) {
		cfg.Middleware = func(next func(context.Context) error) func(context.Context) error {
			return func(ctx context.Context) error { wrapped++; return next(ctx) }
		}
		cfg.Clone = func(v int) int { return 10 * v }
	})
	require.Equal(t, 10, mustGet(t, c, 1))
	require.Equal(t, 20, mustGet(t, c, 2))
	require.Equal(t, 1, wrapped)
}

// Update removes LoadMany after GetMany has started, here while GetMany copies a value.
func TestUpdateRemovesLoadMany(t *testing.T) {
	var c *cacheaside.Cache[int, int]
	begun := false
	c = newCache(t, config{
		Load:     identity,
		LoadMany: func(context.Context, []int) (map[int]int, error) { return nil, errLoad },
		Clone: func(v int) int {
			if begun {
				update(t, c, func(cfg *config) { cfg.LoadMany = nil })
			}
			return v
		},
	})
	mustGet(t, c, 1)
	begun = true
	got, err := c.GetMany(t.Context(), []int{1, 2, 3})
	require.NoError(t, err)
	require.Equal(t, map[int]int{1: 1, 2: 2, 3: 3}, got)
}

func TestUpdateOfErrorPauseReachesTheStore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		conn := newFakeStore().connect()
		c := newCache(t, config{Load: identity, Store: unwatched{conn}, ErrorPause: time.Hour})
		update(t, c, func(cfg *config) { cfg.ErrorPause = time.Minute })
		conn.fail()
		mustGet(t, c, 1)
		conn.recover()
		asked := conn.called("Acquire")
		mustGet(t, c, 1)
		require.Equal(t, asked, conn.called("Acquire"), "skipped for a minute")
		time.Sleep(time.Minute)
		mustGet(t, c, 1)
		require.Equal(t, asked+1, conn.called("Acquire"))
	})
}

func TestUpdateRefusesFieldsThatCannotChange(t *testing.T) {
	load := func(n int) func(context.Context, int) (int, error) {
		return func(context.Context, int) (int, error) { return n, nil }
	}
	many := func(context.Context, []int) (map[int]int, error) { return nil, nil }
	cfg := config{Name: "users", Load: load(1), LoadMany: many,
		Store: flaky{newFakeStore().connect(), func(string) bool { return false }}}
	c := newCache(t, cfg)
	mustGet(t, c, 1)
	for field, change := range map[string]func(*config){
		"Name":    func(cfg *config) { cfg.Name = "other" },
		"Store":   func(cfg *config) { cfg.Store = newFakeStore().connect() },
		"Codec":   func(cfg *config) { cfg.Codec = plain{} },
		"Version": func(cfg *config) { cfg.Version = 7 },
	} {
		err := c.Update(func(cfg *config) { cfg.TTL = time.Second; change(cfg) })
		require.ErrorContains(t, err, "cacheaside.Config."+field+" is ")
		require.ErrorContains(t, err, "before: it cannot change")
		require.Equal(t, 5*time.Minute, c.Config().TTL, "nothing changes")
	}
	update(t, c, func(cfg *config) { cfg.TTL, cfg.Load = time.Hour, load(2) })
	require.Equal(t, time.Hour, c.Config().TTL)
	require.Equal(t, 1, mustGet(t, c, 1))
	require.NoError(t, c.Invalidate(t.Context(), 1))
	require.Equal(t, 2, mustGet(t, c, 1), "the next load calls the new Load")
}

// TestUpdateUnderLoad changes every setting that can change while calls run. No call may
// be lost or get a wrong value.
func TestUpdateUnderLoad(t *testing.T) {
	c := cacheaside.New(config{Load: func(_ context.Context, k int) (int, error) {
		if k%16 == 0 {
			time.Sleep(10 * time.Microsecond)
		}
		return k, nil
	}})
	var calls, done sync.WaitGroup
	var stop atomic.Bool
	var requests atomic.Int64
	for range 32 {
		calls.Go(func() {
			for !stop.Load() {
				k := rand.IntN(5000)
				requests.Add(1)
				if v, err := c.Get(context.Background(), k); err != nil || v != k {
					t.Errorf("Get(%d) returned %d, %v", k, v, err)
					return
				}
				if k%50 == 0 {
					_ = c.Invalidate(context.Background(), k)
				}
			}
		})
	}
	done.Go(func() {
		for i := range 300 {
			err := c.Update(func(cfg *config) {
				cfg.Capacity = 100 + rand.IntN(1000)
				cfg.TTL, cfg.StaleWhileRevalidate = time.Duration(1+rand.IntN(1e6)), time.Duration(rand.IntN(1e6))
				cfg.FinishLoads = i%3 == 0
				cfg.LoadTimeout = 10*time.Second + time.Duration(rand.IntN(1e9))
			})
			if err != nil {
				t.Errorf("Update: %v", err)
			}
			time.Sleep(100 * time.Microsecond)
		}
	})
	done.Wait()
	stop.Store(true)
	calls.Wait()
	require.NoError(t, c.Close())
	s := c.Stats()
	require.Zero(t, c.Tracked(), "each load has ended")
	require.Equal(t, requests.Load(), s.Hits+s.Stale+s.Misses, "each Get is counted once")
}

func TestObserveUntilStop(t *testing.T) {
	var told []string
	c := newCache(t, config{Name: "users", Load: func(_ context.Context, key int) (int, error) {
		if key == 4 {
			return 0, errLoad
		}
		return key, nil
	}})
	var last cacheaside.Event
	stopA := c.Observe(func(ctx context.Context, e cacheaside.Event) {
		_ = c.Invalidate(ctx, 99) // an observer may call the Cache
		told, last = append(told, "a"), e
	})
	stopB := c.Observe(func(context.Context, cacheaside.Event) { told = append(told, "b") })
	mustGet(t, c, 1)
	require.Equal(t, []string{"a", "b"}, told)
	require.Equal(t, cacheaside.Event{Kind: cacheaside.EventLoaded, Name: "users", Key: 1, Took: last.Took}, last)
	_, err := c.Get(t.Context(), 4)
	require.ErrorIs(t, err, errLoad)
	require.Equal(t, cacheaside.Event{Kind: cacheaside.EventLoadFailed, Name: "users", Key: 4, Err: errLoad,
		Took: last.Took}, last)
	told = told[:2]
	stopA()
	mustGet(t, c, 2)
	require.Equal(t, []string{"a", "b", "b"}, told)
	stopB()
	mustGet(t, c, 3)
	require.Len(t, told, 3)
}

// Each request is counted by its result, and each load by its outcome, exactly once. Each load is
// reported with its duration.
func TestStatsCountEachRequestAndLoadOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var how atomic.Value
		how.Store("value")
		var log eventLog
		c := cacheaside.New(config{
			TTL: time.Minute, Jitter: cacheaside.None, StaleIfError: time.Hour, ErrorPause: cacheaside.None,
			LoadTimeout: 10 * time.Second,
			Load: func(ctx context.Context, k int) (int, error) {
				time.Sleep(time.Second)
				switch how.Load() {
				case "not found":
					return 0, cacheaside.ErrNotFound
				case "answered":
					return 0, forbidden{}
				case "failed":
					return 0, errLoad
				case "refused":
					return 0, refusal{}
				case "panicked":
					panic("boom")
				case "hangs":
					time.Sleep(time.Hour) // ignores its ctx
				}
				return k, nil
			},
		})
		c.Observe(log.add)
		get := func(outcome string, key int) {
			how.Store(outcome)
			_, _ = c.Get(t.Context(), key)
		}
		for i, outcome := range []string{"value", "not found", "answered", "failed", "refused", "panicked", "hangs"} {
			get(outcome, i)
		}
		get("value", 0) // a hit
		time.Sleep(2 * time.Minute)
		get("failed", 0) // stale
		ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
		defer cancel()
		how.Store("value")
		_, err := c.Get(ctx, 100)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		time.Sleep(time.Second)
		_, _ = c.GetMany(t.Context(), []int{0, 101, 102}) // 0 has been loaded too long ago

		s := c.Stats()
		require.Equal(t, []int64{1, 1, 11}, []int64{s.Hits, s.Stale, s.Misses})
		require.Equal(t, []int64{4, 1, 1, 2, 1, 1, 1, 1},
			[]int64{s.Loaded, s.NotFound, s.Answered, s.Failed, s.Refused, s.Panicked, s.TimedOut, s.Canceled})
		took := map[cacheaside.EventKind][]time.Duration{}
		for _, e := range log.events {
			took[e.Kind] = append(took[e.Kind], e.Took)
			require.Equal(t, e.Kind == cacheaside.EventLoaded || e.Kind == cacheaside.EventNotFound, e.Err == nil, e.Kind)
		}
		for _, kind := range []cacheaside.EventKind{cacheaside.EventNotFound, cacheaside.EventLoadAnswered,
			cacheaside.EventLoadRefused} {
			require.Equal(t, []time.Duration{time.Second}, took[kind], kind)
		}
		require.Equal(t, []time.Duration{time.Second, time.Second, 10 * time.Second, time.Second},
			took[cacheaside.EventLoadFailed])

		require.NoError(t, c.Close()) // the load that hangs has returned
		after := c.Stats()
		require.Equal(t, s.Loaded, after.Loaded, "the load that hung was counted when it timed out")
		require.Equal(t, s.TimedOut, after.TimedOut)
	})
}

// plain is a Codec.
type plain struct{}

func (plain) Encode(int) ([]byte, error) { return nil, nil }
func (plain) Decode([]byte) (int, error) { return 0, nil }

// A kept is a Codec that cannot be compared.
type kept struct{ encode func(int) []byte }

func (k kept) Encode(v int) ([]byte, error)  { return k.encode(v), nil }
func (kept) Decode(data []byte) (int, error) { return int(data[0]), nil }

// Update does not change the Codec. It returns an error if the new Codec can be compared and differs.
func TestUpdateLeavesTheCodec(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		encoded := ""
		codec := func(name string) kept {
			return kept{func(v int) []byte { encoded += name; return []byte{byte(v)} }}
		}
		cfg := config{Load: identity, Store: newFakeStore().connect(), Codec: codec("first")}
		c := newCache(t, cfg)
		synctest.Wait()
		update(t, c, func(cfg *config) { cfg.Codec = codec("other") })
		mustGet(t, c, 1)
		require.Equal(t, "first", encoded)
		for _, other := range []cacheaside.Codec[int]{nil, plain{}} {
			require.ErrorContains(t, c.Update(func(cfg *config) { cfg.Codec = other }),
				"Config.Codec is another: must be the same as before")
		}
		cfg.Codec = nil
		c = newCache(t, cfg)
		update(t, c, func(cfg *config) { cfg.TTL = time.Second })
		require.ErrorContains(t, c.Update(func(cfg *config) { cfg.Codec = codec("other") }),
			"Config.Codec is another: must be the same as before")
	})
}
