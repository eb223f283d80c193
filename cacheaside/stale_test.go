package cacheaside_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/cacheaside"
)

var errLoad = errors.New("the database is down")

// TestStaleness has a table of all combinations of the age of a value, the outcome of its load, and the configuration.
// For each it has the result of a Get, the time after which the Get returns, and the result of the next Get. The value
// was loaded at 0 and is fresh for a minute. A load takes a second, or ten if it is slow.
func TestStaleness(t *testing.T) {
	const (
		freshAge = 30 * time.Second
		staleAge = 65 * time.Second // expired for 5 seconds
		deadAge  = 10 * time.Minute
	)
	type config = cacheaside.Config[int, string]
	plain := func(*config) {}
	swr := func(c *config) { c.StaleWhileRevalidate = 10 * time.Second }
	onError := func(c *config) { c.StaleIfError = 5 * time.Minute }
	soft := func(c *config) { c.StaleIfError, c.SoftTimeout = 5*time.Minute, 3*time.Second }
	both := func(c *config) { swr(c); onError(c) }
	remembered := func(c *config) { onError(c); c.NotFoundTTL = time.Minute }
	for _, test := range []struct {
		name   string
		config func(*config)
		age    time.Duration
		load   string // ok, slow, fails, missing
		want   string // old, new, error, missing
		after  time.Duration
		loads  int // loads that the Get starts
		next   string
	}{
		{"fresh", plain, freshAge, "ok", "old", 0, 0, "old"},
		{"fresh, fails", both, freshAge, "fails", "old", 0, 0, "old"},

		{"old", plain, staleAge, "ok", "new", time.Second, 1, "new"},
		{"old, slow", plain, staleAge, "slow", "new", 10 * time.Second, 1, "new"},
		{"old, fails", plain, staleAge, "fails", "error", time.Second, 1, "error"},
		{"old, missing", plain, staleAge, "missing", "missing", time.Second, 1, "missing"},

		{"stale while revalidated", swr, staleAge, "ok", "old", 0, 1, "new"},
		{"stale while revalidated, slow", swr, staleAge, "slow", "old", 0, 1, "new"},
		{"stale while revalidated, fails", swr, staleAge, "fails", "old", 0, 1, "error"},
		{"stale while revalidated, missing", swr, staleAge, "missing", "old", 0, 1, "missing"},
		{"too old to be revalidated", swr, deadAge, "ok", "new", time.Second, 1, "new"},
		{"too old to be revalidated, fails", swr, deadAge, "fails", "error", time.Second, 1, "error"},

		{"stale on error", onError, staleAge, "ok", "new", time.Second, 1, "new"},
		{"stale on error, slow", onError, staleAge, "slow", "new", 10 * time.Second, 1, "new"},
		{"stale on error, fails", onError, staleAge, "fails", "old", time.Second, 1, "old"},
		{"stale on error, missing", onError, staleAge, "missing", "missing", time.Second, 1, "missing"},
		{"too old even on error", onError, deadAge, "fails", "error", time.Second, 1, "error"},

		{"soft timeout", soft, staleAge, "ok", "new", time.Second, 1, "new"},
		{"soft timeout, slow", soft, staleAge, "slow", "old", 3 * time.Second, 1, "new"},
		{"soft timeout, fails", soft, staleAge, "fails", "old", time.Second, 1, "old"},
		{"soft timeout, missing", soft, staleAge, "missing", "missing", time.Second, 1, "missing"},
		{"soft timeout, unusable", soft, deadAge, "slow", "new", 10 * time.Second, 1, "new"},

		{"both", both, staleAge, "fails", "old", 0, 1, "old"},
		{"both, only on error", both, 80 * time.Second, "fails", "old", time.Second, 1, "old"},
		{"both, only on error, ok", both, 80 * time.Second, "ok", "new", time.Second, 1, "new"},

		{"missing is remembered", remembered, staleAge, "missing", "missing", time.Second, 1, "missing"},
	} {
		for _, tier := range []string{"memory", "store", "both"} {
			bubble(t, tier+"/"+test.name, func(t *testing.T) {
				var how atomic.Value
				var loads atomic.Int64
				how.Store("old")
				cfg := config{
					TTL: time.Minute, Jitter: cacheaside.None, ErrorPause: time.Hour,
					Load: func(ctx context.Context, _ int) (string, error) {
						loads.Add(1)
						switch how.Load() {
						case "old":
							return "old", nil
						case "slow":
							time.Sleep(10 * time.Second)
						default:
							time.Sleep(time.Second)
						}
						switch how.Load() {
						case "fails":
							return "", errLoad
						case "missing":
							return "", fmt.Errorf("user 1: %w", cacheaside.ErrNotFound)
						}
						return "new", nil
					},
				}
				test.config(&cfg)
				cfg.Store = newFakeStore().tier(tier)
				c := newCache(t, cfg)
				synctest.Wait()
				_, err := c.Get(t.Context(), 1)
				require.NoError(t, err)
				time.Sleep(test.age)
				loads.Store(0)
				how.Store(test.load)

				check := func(want string) {
					v, err := c.Get(t.Context(), 1)
					switch want {
					case "error":
						require.ErrorIs(t, err, errLoad)
					case "missing":
						require.ErrorIs(t, err, cacheaside.ErrNotFound)
					default:
						require.NoError(t, err)
						require.Equal(t, want, v)
					}
				}
				start := time.Now()
				check(test.want)
				require.Equal(t, test.after, time.Since(start), "after")
				time.Sleep(20 * time.Second) // everything in the background has ended
				require.Equal(t, int64(test.loads), loads.Load(), "loads")
				check(test.next)
				if test.name == "missing is remembered" {
					require.Equal(t, int64(1), loads.Load())
				}
			})
		}
	}
}

// A stale value is served after a failed load even if memory has evicted it during the load.
func TestEvictedStaleValueServedOnFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c *cacheaside.Cache[int, int]
		loads := 0
		c = newCache(t, cacheaside.Config[int, int]{
			TTL: time.Minute, StaleIfError: time.Hour, Capacity: 10, Weight: func(int, int) int { return 10 },
			Load: func(context.Context, int) (int, error) {
				if loads++; loads == 1 {
					return 1, nil
				}
				require.NoError(t, c.Update(func(cfg *cacheaside.Config[int, int]) { cfg.Capacity = 5 }))
				require.Zero(t, c.Stats().Entries)
				return 0, errLoad
			},
		})
		mustGet(t, c, 1)
		time.Sleep(2 * time.Minute)
		require.Equal(t, 1, mustGet(t, c, 1))
		require.Equal(t, 2, loads)
	})
}

// Callers of a load that Close cancels get ErrClosed, and no stale value.
func TestCloseServesNoStaleValue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hang := false
		c := cacheaside.New(cacheaside.Config[int, int]{
			TTL: time.Minute, StaleIfError: time.Hour, Store: unwatched{newFakeStore().connect()},
			Load: func(ctx context.Context, key int) (int, error) {
				if hang {
					<-ctx.Done()
				}
				return key, ctx.Err()
			},
		})
		mustGet(t, c, 1)
		time.Sleep(2 * time.Minute)
		hang = true
		go func() {
			time.Sleep(time.Second)
			_ = c.Close()
		}()
		_, err := c.Get(t.Context(), 1)
		require.ErrorIs(t, err, cacheaside.ErrClosed)
		synctest.Wait()
	})
}

// The absence of a key is not served as a stale value when a load fails.
func TestAbsenceIsNotServedWhenALoadFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var loads atomic.Int32
		c := newCache(t, cacheaside.Config[int, int]{
			NotFoundTTL: time.Minute, StaleIfError: time.Hour,
			Load: func(context.Context, int) (int, error) {
				if loads.Add(1) == 1 {
					time.Sleep(2 * time.Second)
					return 0, errLoad
				}
				return 0, cacheaside.ErrNotFound
			},
		})
		go func() {
			time.Sleep(time.Second)
			_, _, err := c.GetWith(t.Context(), 1, cacheaside.GetOptions{SkipMemory: true})
			require.ErrorIs(t, err, cacheaside.ErrNotFound)
		}()
		_, err := c.Get(t.Context(), 1)
		require.Equal(t, errLoad, err)
	})
}

// A load that has its result is no longer late, however long an observer takes.
func TestSoftTimeoutDuringObserver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCache(t, cacheaside.Config[int, int]{
			StaleIfError: time.Hour, SoftTimeout: 2 * time.Second,
			Load: func(context.Context, int) (int, error) { time.Sleep(time.Second); return 1, nil },
		})
		c.Observe(func(context.Context, cacheaside.Event) { time.Sleep(2 * time.Second) })
		require.Equal(t, 1, mustGet(t, c, 1))
		s := c.Stats()
		require.Equal(t, []int64{0, 1}, []int64{s.Stale, s.Misses})
	})
}

// Times that are meant as "forever" do not overflow into the past.
func TestLongTimesDoNotOverflow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		loads := 0
		c := newCache(t, cacheaside.Config[int, int]{
			TTL: time.Minute, Jitter: cacheaside.None, StaleIfError: math.MaxInt64, ErrorPause: math.MaxInt64,
			SoftTimeout: math.MaxInt64,
			Load: func(context.Context, int) (int, error) {
				loads++
				time.Sleep(time.Second)
				if loads == 2 {
					return 0, errLoad
				}
				return loads, nil
			},
		})
		var took []time.Duration
		for range 3 {
			began := time.Now()
			v, err := c.Get(t.Context(), 1)
			require.NoError(t, err)
			require.Equal(t, 1, v)
			took = append(took, time.Since(began))
			time.Sleep(time.Hour)
		}
		require.Equal(t, 2, loads, "the source has failed, and is not called again")
		require.Equal(t, []time.Duration{time.Second, time.Second, 0}, took, "callers wait for a load")
	})
}

func TestErrorPauseSparesFailingSource(t *testing.T) {
	for _, tier := range []string{"memory", "both", "store"} {
		bubble(t, tier, func(t *testing.T) {
			var loads atomic.Int64
			var failing atomic.Bool
			var stale []error
			c := newCache(t, cacheaside.Config[int, int]{
				TTL: time.Minute, Jitter: cacheaside.None, StaleIfError: time.Hour, ErrorPause: 10 * time.Second,
				Store: newFakeStore().tier(tier),
				Load: func(context.Context, int) (int, error) {
					loads.Add(1)
					if failing.Load() {
						return 0, errLoad
					}
					return 1, nil
				},
			})
			c.Observe(func(_ context.Context, e cacheaside.Event) {
				if e.Kind == cacheaside.EventServedStale {
					stale = append(stale, e.Err)
				}
			})
			synctest.Wait()
			mustGet(t, c, 1)
			failing.Store(true)
			time.Sleep(time.Minute)
			for range 100 {
				require.Equal(t, 1, mustGet(t, c, 1))
			}
			require.Equal(t, int64(2), loads.Load())
			require.Len(t, stale, 100)
			require.ErrorIs(t, stale[0], errLoad)
			require.NoError(t, stale[1], "served without a load")
			time.Sleep(10 * time.Second)
			mustGet(t, c, 1)
			require.Equal(t, int64(3), loads.Load())
			failing.Store(false)
			time.Sleep(10 * time.Second)
			mustGet(t, c, 1)
			mustGet(t, c, 1)
			require.Equal(t, int64(4), loads.Load())
			require.Equal(t, int64(101), c.Stats().Stale)

			// An invalidation ends the pause, because there is no value left to serve.
			time.Sleep(2 * time.Minute)
			failing.Store(true)
			require.Equal(t, 1, mustGet(t, c, 1))
			require.NoError(t, c.Invalidate(t.Context(), 1))
			_, err := c.Get(t.Context(), 1)
			require.ErrorIs(t, err, errLoad)
			failing.Store(false)
			require.Equal(t, 1, mustGet(t, c, 1))
			require.Equal(t, int64(4), c.Stats().Failed)
			require.Equal(t, int64(3), c.Stats().Loaded)
			require.Zero(t, c.Tracked())
		})
	}
}
