package cacheaside_test

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/cacheaside"
)

// gauge counts loads, and how many ran at once.
type gauge struct{ loads, now, most atomic.Int64 }

func (g *gauge) enter() (n int64, leave func()) {
	n = g.loads.Add(1)
	if now := g.now.Add(1); now > g.most.Load() {
		g.most.Store(now)
	}
	return n, func() { g.now.Add(-1) }
}

// Even if nothing is kept, neither in memory nor in the Store, one load of a key runs at
// a time, and each caller gets one that began after its call.
func TestWithoutMemoryLoadsTakeTurns(t *testing.T) {
	for name, trouble := range map[string]func(t *testing.T, own, other *fakeConn){
		"behind a fence": func(t *testing.T, _, other *fakeConn) {
			_, err := other.Fence(t.Context(), "1", "w")
			require.NoError(t, err)
		},
		"while the Store is down": func(_ *testing.T, own, _ *fakeConn) { own.fail() },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				shared := newFakeStore()
				shared.write = time.Hour
				conn := shared.connect()
				var g gauge
				c := cacheaside.New(cacheaside.Config[int, int64]{
					Load: func(context.Context, int) (int64, error) {
						n, leave := g.enter()
						defer leave()
						time.Sleep(time.Second)
						return n, nil
					},
					Store: conn, Capacity: -1, ErrorPause: time.Hour,
				})
				defer c.Close()
				trouble(t, conn, shared.connect())
				var wg sync.WaitGroup
				for range 500 {
					wg.Go(func() {
						begun := g.loads.Load()
						if v, err := c.Get(t.Context(), 1); err != nil || v <= begun {
							t.Errorf("got load %d, %v; %d had begun before", v, err, begun)
						}
					})
					time.Sleep(5 * time.Millisecond)
				}
				wg.Wait()
				require.Equal(t, int64(1), g.most.Load())
				require.LessOrEqual(t, g.loads.Load(), int64(5))
				got, err := c.GetMany(t.Context(), []int{1, 2, 3})
				require.NoError(t, err)
				require.Len(t, got, 3)
			})
		})
	}
}

// A caller that leaves while it waits its turn delays no other, and a failing load fails
// only the callers that wait for it.
func TestTurnsPassWhenCallersLeaveAndLoadsFail(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shared := newFakeStore()
		_, err := shared.connect().Fence(t.Context(), "1", "w")
		require.NoError(t, err)
		var loads atomic.Int64
		c := cacheaside.New(cacheaside.Config[int, int64]{
			Load: func(context.Context, int) (int64, error) {
				time.Sleep(time.Second)
				if loads.Add(1) == 1 {
					return 0, errLoad
				}
				return 2, nil
			},
			Store: shared.connect(), Capacity: -1,
		})
		defer c.Close()
		var wg sync.WaitGroup
		wg.Go(func() {
			if _, err := c.Get(t.Context(), 1); err != errLoad {
				t.Errorf("the first: %v", err)
			}
		})
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		_, err = c.Get(ctx, 1) // joins the waiting flight
		require.ErrorIs(t, err, context.DeadlineExceeded)
		start := time.Now()
		require.Equal(t, int64(2), mustGet(t, c, 1))
		require.Equal(t, 1900*time.Millisecond, time.Since(start))
		wg.Wait()
		require.Equal(t, int64(2), loads.Load())
	})
}

// When all callers of the next turn have left, the turn is skipped.
func TestTurnWithoutCallersIsSkipped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shared := newFakeStore()
		_, err := shared.connect().Fence(t.Context(), "1", "w")
		require.NoError(t, err)
		var loads atomic.Int64
		c := cacheaside.New(cacheaside.Config[int, int64]{
			Load: func(context.Context, int) (int64, error) {
				defer time.Sleep(time.Second)
				return loads.Add(1), nil
			},
			Store: slowly{Store: shared.connect(), takes: 10 * time.Millisecond}, Capacity: -1,
		})
		defer c.Close()
		var wg sync.WaitGroup
		wg.Go(func() { _, _ = c.Get(t.Context(), 1) })
		time.Sleep(100 * time.Millisecond)
		for range 10 {
			wg.Go(func() {
				ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
				defer cancel()
				_, _ = c.Get(ctx, 1)
			})
		}
		wg.Wait()
		time.Sleep(time.Minute)
		require.Equal(t, int64(1), loads.Load())
		require.Zero(t, c.Tracked())
	})
}

// Callers that wait for a load of another process ask the Store together, and still
// never get a value that was read before their call.
func TestWithoutMemoryCallersWaitTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shared := newFakeStore()
		other := shared.connect()
		looks, err := other.Acquire(t.Context(), cacheaside.Ask{Key: "1", Token: "other"})
		require.NoError(t, err)
		c := cacheaside.New(cacheaside.Config[int, int]{
			Load:  func(context.Context, int) (int, error) { return 0, errLoad },
			Store: shared.connect(), Capacity: -1,
		})
		defer c.Close()
		asked := shared.called("Acquire")
		var wg sync.WaitGroup
		for range 500 {
			wg.Go(func() {
				if v, err := c.Get(t.Context(), 1); err != nil || v != 7 {
					t.Errorf("%d, %v", v, err)
				}
			})
		}
		time.Sleep(time.Second)
		payload := fillWith(t, 7)
		_, err = other.Fill(t.Context(), cacheaside.Filling{Key: "1", Grant: looks[0].Grant, Value: payload, Fresh: time.Minute, Keep: time.Minute})
		require.NoError(t, err)
		start := time.Now()
		wg.Wait()
		require.LessOrEqual(t, time.Since(start), 200*time.Millisecond)
		require.Less(t, shared.called("Acquire")-asked, 500+60, "once each, and then together")
	})
}

// slow takes a millisecond to answer, so that several callers ask before the first has
// its answer.
type slow struct{ *fakeConn }

func (s slow) Acquire(ctx context.Context, asks ...cacheaside.Ask) ([]cacheaside.Lookup, error) {
	time.Sleep(time.Millisecond)
	return s.fakeConn.Acquire(ctx, asks...)
}

// Without memory, a flight that takes its answer from another is no load of its own: it
// is not counted when the other times out, is canceled, or ends with Close.
func TestFlightThatFollowsAnotherIsNotCounted(t *testing.T) {
	var failing chan struct{}
	for name, test := range map[string]struct {
		end   func(c *cacheaside.Cache[int, int], cancel func())
		count func(cacheaside.Stats) int64
	}{
		"timeout": {
			func(*cacheaside.Cache[int, int], func()) {},
			func(s cacheaside.Stats) int64 { return s.TimedOut },
		},
		"cancel": {
			func(_ *cacheaside.Cache[int, int], cancel func()) { cancel() },
			func(s cacheaside.Stats) int64 { return s.Canceled },
		},
		"close": {
			func(c *cacheaside.Cache[int, int], _ func()) { c.Close() },
			func(s cacheaside.Stats) int64 { return s.Canceled },
		},
		"failure": {
			func(*cacheaside.Cache[int, int], func()) { close(failing) },
			func(s cacheaside.Stats) int64 { return s.Failed },
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				failing = make(chan struct{})
				shared := newFakeStore()
				shared.lease = time.Hour
				var failed atomic.Int64
				c := cacheaside.New(cacheaside.Config[int, int]{
					Load: func(ctx context.Context, _ int) (int, error) {
						select {
						case <-ctx.Done():
							return 0, ctx.Err()
						case <-failing:
							return 0, errLoad
						}
					},
					Store: slow{shared.connect()}, Capacity: -1, LoadTimeout: time.Minute,
					OnEvent: func(_ context.Context, e cacheaside.Event) {
						if e.Kind == cacheaside.EventLoadFailed {
							failed.Add(1)
						}
					},
				})
				defer c.Close()
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				var wg sync.WaitGroup
				for range 10 { // one loads, one asks the Store again and again, and eight follow that one
					wg.Go(func() {
						if _, err := c.Get(ctx, 1); err == nil {
							t.Error("no error")
						}
					})
				}
				time.Sleep(time.Second)
				test.end(c, cancel)
				wg.Wait()
				synctest.Wait()
				require.Equal(t, int64(2), test.count(c.Stats()))
				if name == "timeout" {
					require.Equal(t, int64(2), failed.Load())
				}
			})
		})
	}
}

// Once the Store has been asked, later callers cannot use its answer.
func TestNoCallerJoinsAnAskThatIsUnderWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shared := newFakeStore()
		other := shared.connect()
		looks, err := other.Acquire(t.Context(), cacheaside.Ask{Key: "1", Token: "other"})
		require.NoError(t, err)
		l := late{shared.connect(), make(chan struct{}), new(atomic.Bool)}
		c := cacheaside.New(cacheaside.Config[int, int]{
			Load:  func(context.Context, int) (int, error) { return 8, nil },
			Store: l, Capacity: -1,
		})
		defer c.Close()
		var wg sync.WaitGroup
		wg.Go(func() {
			if v, err := c.Get(t.Context(), 1); err != nil || v != 7 {
				t.Errorf("before: %d, %v", v, err)
			}
		})
		synctest.Wait() // it is about to ask again
		_, err = other.Fill(t.Context(), cacheaside.Filling{Key: "1", Grant: looks[0].Grant, Value: fillWith(t, 7), Fresh: time.Minute, Keep: time.Minute})
		require.NoError(t, err)
		l.on.Store(true)
		time.Sleep(time.Second) // it has asked, and the answer is on its way
		l.on.Store(false)
		require.NoError(t, other.Invalidate(t.Context(), "1"))
		done := make(chan int, 1)
		wg.Go(func() {
			v, _ := c.Get(t.Context(), 1)
			done <- v
		})
		synctest.Wait()
		close(l.hold)
		wg.Wait()
		require.Equal(t, 8, <-done)
	})
}

// fillWith returns the payload that a cache writes for value.
func fillWith(t *testing.T, value int) []byte {
	shared := newFakeStore()
	c := cacheaside.New(cacheaside.Config[int, int]{
		Load:  func(context.Context, int) (int, error) { return value, nil },
		Store: shared.connect(), Capacity: -1,
	})
	defer c.Close()
	mustGet(t, c, 1)
	return shared.items["1"].value
}

// An old value for one caller is not served to a caller that asked after the
// invalidation, though both wait for the same flight.
func TestWithoutMemoryNoOldValueAfterAnInvalidation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shared := newFakeStore()
		other := shared.connect()
		var failing atomic.Bool
		c := cacheaside.New(cacheaside.Config[int, int]{
			TTL: time.Minute, Jitter: -1, StaleOnError: time.Hour,
			Load: func(context.Context, int) (int, error) {
				if failing.Load() {
					return 0, errLoad
				}
				return 1, nil
			},
			Store: shared.connect(), Capacity: -1,
		})
		defer c.Close()
		mustGet(t, c, 1)
		time.Sleep(2 * time.Minute)
		failing.Store(true)
		_, err := other.Acquire(t.Context(), cacheaside.Ask{Key: "1", Token: "dies"})
		require.NoError(t, err)
		var wg sync.WaitGroup
		wg.Go(func() {
			if v, err := c.Get(t.Context(), 1); err != nil || v != 1 {
				t.Errorf("before: %d, %v", v, err)
			}
		})
		time.Sleep(10 * time.Millisecond) // it has read the old value and waits for the lease
		require.NoError(t, other.Invalidate(t.Context(), "1"))
		_, err = other.Acquire(t.Context(), cacheaside.Ask{Key: "1", Token: "dies, too"})
		require.NoError(t, err)
		_, err = c.Get(t.Context(), 1)
		require.ErrorIs(t, err, errLoad)
		wg.Wait()
	})
}

// Without memory, the old value is in the Store, and the pause after a failed load
// applies there too.
func TestErrorPauseHoldsWithoutMemory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shared := newFakeStore()
		var loads atomic.Int64
		var failing atomic.Bool
		var log eventLog
		c := cacheaside.New(cacheaside.Config[int, int]{
			TTL: time.Minute, Jitter: -1, StaleOnError: time.Hour, ErrorPause: 10 * time.Second,
			Load: func(context.Context, int) (int, error) {
				loads.Add(1)
				if failing.Load() {
					return 0, errLoad
				}
				return 1, nil
			},
			Store: shared.connect(), Capacity: -1, OnEvent: log.add,
		})
		defer c.Close()
		mustGet(t, c, 1)
		time.Sleep(2 * time.Minute)
		failing.Store(true)
		for range 100 {
			require.Equal(t, 1, mustGet(t, c, 1))
		}
		require.Equal(t, int64(2), loads.Load())
		require.Equal(t, int64(100), c.Stats().Stale)
		require.Equal(t, 100, log.count(cacheaside.EventServedStale))
		time.Sleep(10 * time.Second)
		mustGet(t, c, 1)
		require.Equal(t, int64(3), loads.Load())

		// An invalidation ends the pause, since it leaves nothing to serve.
		require.NoError(t, c.Invalidate(t.Context(), 1))
		_, err := c.Get(t.Context(), 1)
		require.ErrorIs(t, err, errLoad)
		require.Equal(t, int64(4), loads.Load())
		failing.Store(false)
		require.Equal(t, 1, mustGet(t, c, 1))
		require.Zero(t, c.Tracked())
	})
}

// unheard hears nothing of other processes: their messages are on their way.
type unheard struct{ cacheaside.Store }

func (unheard) Watch(ctx context.Context, up func(), _ func(string)) error {
	up()
	<-ctx.Done()
	return ctx.Err()
}

// A flight that was overtaken, and that callers may join again while it waits its turn,
// has no old value for them.
func TestFlightThatStandsAgainHasNoOldValue(t *testing.T) {
	type cache = *cacheaside.Cache[int, int]
	for name, get := range map[string]func(context.Context, cache) (int, error){
		"Get": func(ctx context.Context, c cache) (int, error) { return c.Get(ctx, 1) },
		"GetMany": func(ctx context.Context, c cache) (int, error) {
			found, err := c.GetMany(ctx, []int{1})
			return found[1], err
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				src, shared := newSource(), newFakeStore()
				store := late{unheard{shared.connect()}, make(chan struct{}), new(atomic.Bool)}
				c := cacheaside.New(cacheaside.Config[int, int]{
					Load: func(ctx context.Context, key int) (int, error) {
						if src.loaded(1) > 0 {
							time.Sleep(time.Second)
						}
						return src.load(ctx, key)
					},
					TTL: time.Minute, StaleOnError: time.Hour, SoftTimeout: 10 * time.Millisecond, Store: store,
				})
				defer c.Close()
				synctest.Wait()
				require.Equal(t, 0, mustGet(t, c, 1))
				time.Sleep(2 * time.Minute)
				_, err := shared.connect().Fence(t.Context(), "1", "another process")
				require.NoError(t, err)
				require.Equal(t, 0, mustGet(t, c, 1)) // its flight loads alone
				store.on.Store(true)
				require.Equal(t, 0, mustGet(t, c, 1)) // the next one asks the Store
				require.NoError(t, c.Write(t.Context(), 1, src.write(1)))
				close(store.hold) // the answer: still fenced
				synctest.Wait()
				v, err := get(t.Context(), c)
				require.NoError(t, err)
				require.Equal(t, 1, v)
			})
		})
	}
}

// The old value is served once SoftTimeout has passed and the Store has answered, also to a
// caller that joins a flight which waits for another process.
func TestSoftTimeoutOfAnOldValueThatTheStoreHas(t *testing.T) {
	for name, capacity := range map[string]int{"memory": 0, "no memory": -1} {
		for who, elsewhere := range map[string]bool{"it loads": false, "another process loads": true} {
			t.Run(name+"/"+who, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					var takes atomic.Int64
					shared := newFakeStore()
					shared.lease = time.Minute
					cfg := cacheaside.Config[int, int]{
						Load: func(context.Context, int) (int, error) {
							time.Sleep(time.Duration(takes.Load()))
							return 1, nil
						},
						TTL: time.Minute, Jitter: -1, StaleOnError: time.Hour, SoftTimeout: 100 * time.Millisecond,
						Store: shared.connect(), Capacity: capacity,
					}
					other := cacheaside.New(cfg)
					defer other.Close()
					cfg.Store = slowly{Store: shared.connect(), takes: 200 * time.Millisecond}
					c := cacheaside.New(cfg)
					defer c.Close()
					synctest.Wait()
					mustGet(t, other, 1)
					time.Sleep(2 * time.Minute)
					takes.Store(int64(20 * time.Second))
					if elsewhere {
						mustGet(t, other, 1)
					}
					for i := range 30 {
						start := time.Now()
						require.Equal(t, 1, mustGet(t, c, 1))
						require.Less(t, time.Since(start), 600*time.Millisecond, i) // two answers, and a rest
						time.Sleep(77 * time.Millisecond)
					}
					require.Equal(t, 1, shared.called("Fill"))
				})
			})
		}
	}
}

// A load that waited for another process gets no old value from before an invalidation.
func TestWithoutMemoryOldIsWhatTheStoreHoldsNow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shared := newFakeStore()
		other := shared.connect()
		var olds []bool
		c := cacheaside.New(cacheaside.Config[int, int]{
			TTL: time.Minute, StaleOnError: time.Hour, Store: shared.connect(), Capacity: -1,
			Load: func(ctx context.Context, _ int) (int, error) {
				_, ok := cacheaside.Old[int](ctx)
				olds = append(olds, ok)
				return 1, nil
			},
		})
		defer c.Close()
		mustGet(t, c, 1)
		time.Sleep(2 * time.Minute)
		mustGet(t, c, 1)
		time.Sleep(2 * time.Minute)
		_, err := other.Acquire(t.Context(), cacheaside.Ask{Key: "1", Token: "other"})
		require.NoError(t, err)
		go func() {
			time.Sleep(time.Second)
			_ = other.Invalidate(context.Background(), "1")
		}()
		mustGet(t, c, 1)
		require.Equal(t, []bool{false, true, false}, olds)
	})
}
