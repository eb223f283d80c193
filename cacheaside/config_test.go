package cacheaside_test

import (
	"context"
	"encoding"
	"errors"
	"math"
	"reflect"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/cacheaside"
)

func TestValidateNamesTheFieldAndItsRange(t *testing.T) {
	type config = cacheaside.Config[int, string]
	for field, change := range map[string]func(*config){
		"Load is nil":                 func(c *config) { c.Load = nil },
		"TTL is -1s":                  func(c *config) { c.TTL = -time.Second },
		"Jitter is 1.5":               func(c *config) { c.Jitter = 1.5 },
		"Jitter is -1":                func(c *config) { c.Jitter = -1 },
		"ErrorPause is -1ns":          func(c *config) { c.ErrorPause = -1 },
		"Jitter is NaN":               func(c *config) { c.Jitter = math.NaN() },
		"StaleWhileRevalidate is -1s": func(c *config) { c.StaleWhileRevalidate = -time.Second },
		"StaleIfError is -1s":         func(c *config) { c.StaleIfError = -time.Second },
		"RefreshAhead is -1":          func(c *config) { c.RefreshAhead = -1 },
		"RefreshAhead is NaN":         func(c *config) { c.RefreshAhead = math.NaN() },
		"RefreshAhead is +Inf":        func(c *config) { c.RefreshAhead = math.Inf(1) },
		"NotFoundTTL is -1s":          func(c *config) { c.NotFoundTTL = -time.Second },
		"LoadTimeout is -1s":          func(c *config) { c.LoadTimeout = -time.Second },
		"SoftTimeout is -1s":          func(c *config) { c.SoftTimeout = -time.Second },
		"SoftTimeout is 1s":           func(c *config) { c.SoftTimeout = time.Second },
		"ReplicaLag is -1s":           func(c *config) { c.ReplicaLag = -time.Second },
		"Capacity is -1":              func(c *config) { c.Capacity = -1 },
		"Capacity is 0":               func(c *config) { c.Weight = func(int, string) int { return 1 } },
	} {
		cfg := config{Load: func(context.Context, int) (string, error) { return "", nil }}
		require.NoError(t, cfg.Validate())
		change(&cfg)
		err := cfg.Validate()
		require.ErrorContains(t, err, "cacheaside.Config."+field+": must be ")
		require.PanicsWithError(t, err.Error(), func() { cacheaside.New(cfg) })
	}
	require.NoError(t, config{Load: func(context.Context, int) (string, error) { return "", nil }, Jitter: 1}.Validate())
	require.NoError(t, config{
		Load:   func(context.Context, int) (string, error) { return "", nil },
		Jitter: cacheaside.None, ErrorPause: cacheaside.None,
	}.Validate())
}

func needsKey[K comparable](t *testing.T, needs bool) {
	err := cacheaside.Config[K, int]{
		Load:  func(context.Context, K) (int, error) { return 0, nil },
		Store: newFakeStore().connect(),
	}.Validate()
	if needs {
		require.ErrorContains(t, err, "Config.Key is nil", reflect.TypeFor[K]())
	} else {
		require.NoError(t, err, reflect.TypeFor[K]())
	}
}

func needsCodec[V any](t *testing.T, needs bool) {
	err := cacheaside.Config[int, V]{
		Load:  func(context.Context, int) (v V, err error) { return },
		Store: newFakeStore().connect(),
	}.Validate()
	if needs {
		require.ErrorContains(t, err, "Config.Codec is nil", reflect.TypeFor[V]())
	} else {
		require.NoError(t, err, reflect.TypeFor[V]())
	}
	require.NoError(t, cacheaside.Config[int, V]{
		Load:  func(context.Context, int) (v V, err error) { return },
		Store: newFakeStore().connect(), Codec: ownCodec[V]{},
	}.Validate())
}

type ownCodec[V any] struct{ cacheaside.Codec[V] }

type (
	named   string
	pair    struct{ A, B string }
	hidden  struct{ a int }
	inner   struct{ b pair }
	recurse struct{ Next *recurse }
	textual struct{ a int }
	written struct{ a int }
	masked  string
	cents   int
)

func (textual) MarshalText() ([]byte, error)  { return nil, nil }
func (*textual) UnmarshalText([]byte) error   { return nil }
func (*written) MarshalJSON() ([]byte, error) { return nil, nil }
func (*written) UnmarshalJSON([]byte) error   { return nil }
func (masked) MarshalJSON() ([]byte, error)   { return nil, nil }
func (masked) UnmarshalText([]byte) error     { return nil }
func (cents) MarshalText() ([]byte, error)    { return nil, nil }

func TestStoreRequiresLosslessKeyAndCodec(t *testing.T) {
	needsKey[string](t, false)
	needsKey[named](t, false)
	needsKey[int](t, false)
	needsKey[uintptr](t, false)
	needsKey[pair](t, true)
	needsKey[float64](t, true)
	needsKey[bool](t, true)

	type (
		deep   struct{ A struct{ B []any } }
		tagged struct {
			A int
			F func() `json:"-"`
		}
		list []list
	)
	needsCodec[string](t, false)
	needsCodec[*pair](t, false)
	needsCodec[time.Time](t, false)
	needsCodec[tagged](t, false)
	needsCodec[list](t, false)
	needsCodec[map[int]map[string][]byte](t, false)
	needsCodec[map[string]recurse](t, false)
	_, _, _, _ = hidden{}.a, inner{}.b, textual{}.a, written{}.a
	needsCodec[textual](t, false)
	needsCodec[*textual](t, false)
	needsCodec[written](t, false)
	needsCodec[*written](t, false)
	needsCodec[map[textual]int](t, false)
	needsCodec[masked](t, true)
	needsCodec[*masked](t, true)
	needsCodec[[]cents](t, true)
	needsCodec[map[cents]int](t, true)
	needsCodec[hidden](t, true)
	needsCodec[*hidden](t, true)
	needsCodec[inner](t, true)
	needsCodec[struct{ hidden }](t, true)
	needsCodec[struct{ named }](t, true)
	needsCodec[struct {
		pair
		_ [0]func() // cannot be compared
	}](t, false)
	needsCodec[[]hidden](t, true)
	needsCodec[map[string][]any](t, true)
	needsCodec[deep](t, true)
	needsCodec[map[pair]int](t, true)
	needsCodec[map[encoding.TextMarshaler]int](t, true)
	needsCodec[error](t, true)
	needsCodec[func()](t, true)
	needsCodec[chan int](t, true)
	needsCodec[complex128](t, true)
}

// sloppy has a String method that gives every value the same text.
type sloppy int

func (sloppy) String() string { return "sloppy" }

func TestPlainKeysAreUnchanged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shared := newFakeStore()
		c := newCache(t, cacheaside.Config[sloppy, int]{
			Load:  func(_ context.Context, k sloppy) (int, error) { return int(k), nil },
			Store: shared.connect(),
		})
		u := newCache(t, cacheaside.Config[uint8, int]{
			Load:  func(_ context.Context, k uint8) (int, error) { return int(k), nil },
			Store: shared.connect(),
		})
		for _, k := range []sloppy{1, 2, -3} {
			v, err := c.Get(t.Context(), k)
			require.NoError(t, err)
			require.Equal(t, int(k), v)
		}
		v, err := u.Get(t.Context(), 7)
		require.NoError(t, err)
		require.Equal(t, 7, v)
		for _, written := range []string{"1", "2", "-3", "7"} {
			require.Contains(t, shared.items, written)
		}
	})
}

func TestJitterShortensTheTTL(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n = 2000
		src := newSource()
		c := newCache(t, cacheaside.Config[int, int]{Load: src.load, TTL: 100 * time.Second, Jitter: 0.5})
		for i := range n {
			mustGet(t, c, i)
		}
		alive := func() (k int) {
			for i := range n {
				if _, ok := c.Peek(i); ok {
					k++
				}
			}
			return k
		}
		time.Sleep(50*time.Second - 1)
		require.Equal(t, n, alive())
		time.Sleep(25 * time.Second)
		require.InDelta(t, n/2, alive(), n/8) // more than ten standard deviations
		time.Sleep(25*time.Second + 1)
		require.Zero(t, alive())
	})
}

// XFetch refreshes when -ln(u) x beta x delta reaches the time left, that is with
// probability exp(-left / (beta x delta)).
func TestRefreshAheadDistribution(t *testing.T) {
	n := 4000
	if testing.Short() {
		n = 1000
	}
	for _, beta := range []float64{1, 2} {
		for _, left := range []time.Duration{500 * time.Millisecond, time.Second, 3 * time.Second, 80 * time.Second} {
			synctest.Test(t, func(t *testing.T) {
				var loads atomic.Int64
				slow := true
				c := newCache(t, cacheaside.Config[int, int]{
					TTL: 100 * time.Second, Jitter: cacheaside.None, RefreshAhead: beta,
					Load: func(context.Context, int) (int, error) {
						loads.Add(1)
						if slow {
							time.Sleep(time.Second) // delta
						}
						return 1, nil
					},
				})
				var keys []int
				for i := range n {
					keys = append(keys, i)
				}
				_, err := c.GetMany(t.Context(), keys)
				require.NoError(t, err)
				time.Sleep(99*time.Second - left) // the load has taken a second
				loads.Store(0)
				slow = false
				for i := range n {
					mustGet(t, c, i)
				}
				synctest.Wait()
				p := math.Exp(-left.Seconds() / beta)
				require.InDelta(t, p*float64(n), loads.Load(), 6*math.Sqrt(float64(n)*p*(1-p))+1)
				require.Equal(t, int64(n), c.Stats().Hits, "served during the refresh")
			})
		}
	}
}

// A value in the Store has the duration of its load, so RefreshAhead works in other processes.
func TestRefreshAheadOfStoredValue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var loads atomic.Int64
		shared := newFakeStore()
		cfg := cacheaside.Config[int, int64]{
			TTL: 100 * time.Second, Jitter: cacheaside.None, RefreshAhead: 1, Store: shared.connect(),
			Load: func(context.Context, int) (int64, error) {
				time.Sleep(time.Second)
				return loads.Add(1), nil
			},
		}
		other := newCache(t, cfg)
		cfg.Store = shared.connect()
		c := newCache(t, cfg)
		synctest.Wait()
		mustGet(t, other, 1)
		mustGet(t, c, 1)
		synctest.Wait()
		require.Equal(t, int64(1), loads.Load(), "far from the end")
		time.Sleep(99*time.Second - time.Microsecond) // it is as good as certain
		require.Equal(t, int64(1), mustGet(t, c, 1))
		require.Equal(t, int64(1), mustGet(t, c, 1))
		time.Sleep(2 * time.Second)
		begun := time.Now()
		require.Equal(t, int64(2), mustGet(t, c, 1))
		require.Equal(t, int64(2), mustGet(t, c, 1))
		require.Zero(t, time.Since(begun))
		synctest.Wait()
		require.Equal(t, int64(2), loads.Load())
	})
}

func TestLoadSetsItsOwnTTL(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var loads atomic.Int64
		c := newCache(t, cacheaside.Config[int, int]{
			TTL: time.Minute, Jitter: cacheaside.None, StaleWhileRevalidate: time.Hour, NotFoundTTL: time.Minute,
			Load: func(ctx context.Context, k int) (int, error) {
				loads.Add(1)
				ctx, cancel := context.WithCancel(ctx)
				defer cancel()
				switch k {
				case 1:
					cacheaside.SetTTL(ctx, 10*time.Minute)
				case 2:
					cacheaside.SetTTL(ctx, 0)
				case 3:
					cacheaside.SetTTL(ctx, time.Hour)
					return 0, cacheaside.ErrNotFound
				case 4:
					cacheaside.SetTTL(ctx, math.MaxInt64)
				}
				return k, nil
			},
		})
		cacheaside.SetTTL(t.Context(), time.Hour) // no effect outside a load
		mustGet(t, c, 1)
		mustGet(t, c, 4)
		_, err := c.Get(t.Context(), 3)
		require.ErrorIs(t, err, cacheaside.ErrNotFound)
		time.Sleep(10*time.Minute - 1)
		_, ok := c.Peek(1)
		require.True(t, ok)
		_, err = c.Get(t.Context(), 3)
		require.ErrorIs(t, err, cacheaside.ErrNotFound)
		_, ok = c.Peek(3)
		require.False(t, ok, "the absence of a key is not a value")
		require.Equal(t, int64(3), loads.Load())
		time.Sleep(time.Nanosecond)
		_, ok = c.Peek(1)
		require.False(t, ok)
		mustGet(t, c, 2)
		mustGet(t, c, 2)
		require.Equal(t, int64(5), loads.Load())
		time.Sleep(1000 * 24 * time.Hour)
		_, ok = c.Peek(4)
		require.True(t, ok)
	})
}

// A value that has expired when its load returns is not cached, neither in memory nor in the Store. The same holds for
// a value with a TTL of zero.
func TestExpiredValueIsNotCached(t *testing.T) {
	for name, ttl := range map[string]time.Duration{"already expired": 0, "expires with the load": time.Second} {
		bubble(t, name, func(t *testing.T) {
			shared := newFakeStore()
			c := newCache(t, cacheaside.Config[int, int]{
				Store: shared.connect(),
				Load: func(ctx context.Context, k int) (int, error) {
					cacheaside.SetTTL(ctx, ttl)
					time.Sleep(time.Second)
					return k, nil
				}})
			synctest.Wait()
			mustGet(t, c, 1)
			require.Zero(t, c.Stats().Entries)
			require.Zero(t, shared.called("Fill"))
			require.Equal(t, 1, shared.called("Release"))
		})
	}
}

func TestMiddlewareWrapsEachLoad(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var loads, calls atomic.Int64
		swallow := false
		c := newCache(t, cacheaside.Config[int, int]{
			Name: "users",
			Load: func(context.Context, int) (int, error) {
				if loads.Add(1) < 3 {
					return 0, errLoad
				}
				return 7, nil
			},
			Middleware: func(next func(context.Context) error) func(context.Context) error {
				return func(ctx context.Context) error {
					calls.Add(1)
					if swallow {
						return nil
					}
					for {
						if err := next(ctx); err == nil {
							return nil
						}
					}
				}
			},
		})
		require.Equal(t, 7, mustGet(t, c, 1))
		require.Equal(t, int64(3), loads.Load())
		require.Equal(t, int64(1), calls.Load())
		swallow = true
		_, err := c.Get(t.Context(), 2)
		require.EqualError(t, err, "cacheaside: users: Middleware returned nil without a value from Load")
	})
}

func TestCloneKeepsCallersApart(t *testing.T) {
	c := newCache(t, cacheaside.Config[int, []int]{
		Load:  func(context.Context, int) ([]int, error) { return []int{1}, nil },
		Clone: func(v []int) []int { return append([]int(nil), v...) },
	})
	for range 3 {
		v := mustGet(t, c, 1)
		require.Equal(t, []int{1}, v)
		v[0] = 2
	}
	v, ok := c.Peek(1)
	require.True(t, ok)
	require.Equal(t, []int{1}, v)
}

func TestDoneContextIsHonored(t *testing.T) {
	c := newCache(t, cacheaside.Config[int, int]{
		Load: func(context.Context, int) (int, error) { panic("called") },
	})
	cause := errors.New("shutting down")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(cause)
	_, err := c.Get(ctx, 1)
	require.ErrorIs(t, err, cause)
	require.ErrorIs(t, err, context.Canceled)
	_, err = c.GetMany(ctx, []int{1})
	require.ErrorIs(t, err, cause)
	require.ErrorIs(t, c.Write(ctx, 1, func(context.Context) error { panic("called") }), cause)
	require.NoError(t, c.Invalidate(ctx, 1), "memory is invalidated even if ctx is done")
}

// The ctx of a load has the values of the caller's ctx, but its own deadline. It is canceled when the load returns.
func TestContextOfALoad(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		type key struct{}
		var of context.Context
		c := newCache(t, cacheaside.Config[int, string]{
			LoadTimeout: time.Hour,
			Load: func(ctx context.Context, _ int) (string, error) {
				of = ctx
				deadline, ok := ctx.Deadline()
				require.True(t, ok)
				require.Equal(t, time.Hour, time.Until(deadline))
				require.NoError(t, ctx.Err())
				return ctx.Value(key{}).(string), nil
			},
		})
		ctx, cancel := context.WithTimeout(context.WithValue(t.Context(), key{}, "trace"), time.Minute)
		defer cancel()
		v, err := c.Get(ctx, 1)
		require.NoError(t, err)
		require.Equal(t, "trace", v)
		synctest.Wait()
		require.Equal(t, context.Canceled, of.Err())
	})
}

func TestNothingIsLeftAfterClose(t *testing.T) {
	before := runtime.NumGoroutine()
	for _, capacity := range []int{0, -1} {
		conn := newFakeStore().connect()
		c := cacheaside.New(cacheaside.Config[int, int]{
			Load: func(ctx context.Context, k int) (int, error) {
				if k < 50 {
					return k, nil
				}
				<-ctx.Done()
				return 0, context.Cause(ctx)
			},
			Store: watchedIf(capacity == 0, conn), StaleWhileRevalidate: time.Minute, TTL: 1, Jitter: cacheaside.None,
			ErrorPause: time.Millisecond,
		})
		var wg sync.WaitGroup
		for i := range 100 {
			wg.Go(func() {
				_, err := c.Get(context.Background(), i)
				if i >= 50 && !errors.Is(err, cacheaside.ErrClosed) {
					t.Errorf("%d: %v", i, err)
				}
			})
		}
		for c.Tracked() < 2*50 {
			runtime.Gosched()
		}
		require.NoError(t, c.Invalidate(t.Context(), 60)) // detaches a flight
		conn.fail()
		require.Error(t, c.Invalidate(t.Context(), 1))
		require.Error(t, c.Close())
		require.NoError(t, c.Close())
		wg.Wait()

		_, err := c.Get(t.Context(), 1)
		require.ErrorIs(t, err, cacheaside.ErrClosed)
		_, err = c.GetMany(t.Context(), []int{1})
		require.ErrorIs(t, err, cacheaside.ErrClosed)
		require.ErrorIs(t, c.Write(t.Context(), 1, nil), cacheaside.ErrClosed)
		require.ErrorIs(t, c.Invalidate(t.Context(), 1), cacheaside.ErrClosed)
		require.ErrorIs(t, c.Expire(t.Context(), 1), cacheaside.ErrClosed)
		require.ErrorIs(t, c.InvalidateAll(t.Context()), cacheaside.ErrClosed)
		_, ok := c.Peek(1)
		require.False(t, ok)
	}
	// The last goroutines may still be ending.
	for i := 0; runtime.NumGoroutine() > before; i++ {
		if i > 1_000_000 {
			stacks := make([]byte, 1<<20)
			t.Fatalf("%d goroutines before, %d after:\n%s", before, runtime.NumGoroutine(), stacks[:runtime.Stack(stacks, true)])
		}
		runtime.Gosched()
	}
}
