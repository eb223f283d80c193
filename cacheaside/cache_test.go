package cacheaside_test

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/cacheaside"
)

// source is a store of record: a version of each key, and how often each was read.
type source struct {
	mu       sync.Mutex
	versions map[int]int
	loads    map[int]int
}

func newSource() *source { return &source{versions: map[int]int{}, loads: map[int]int{}} }

func (s *source) load(_ context.Context, key int) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.loads[key]++
	return s.versions[key], nil
}

func (s *source) write(key int) func(context.Context) error {
	return func(context.Context) error {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.versions[key]++
		return nil
	}
}

func (s *source) loaded(key int) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.loads[key]
}

func TestFirstCallersCancelDoesNotFailTheOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCache(t, cacheaside.Config[int, string]{
			Load: func(ctx context.Context, key int) (string, error) {
				select {
				case <-time.After(10 * time.Second):
					return "loaded", nil
				case <-ctx.Done():
					return "", ctx.Err()
				}
			},
		})
		cause := errors.New("the browser went away")
		first, cancel := context.WithCancelCause(t.Context())
		second, cancelSecond := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancelSecond()
		var wg sync.WaitGroup
		start := time.Now()
		wg.Go(func() {
			_, err := c.Get(first, 1)
			if !errors.Is(err, cause) || !errors.Is(err, context.Canceled) || time.Since(start) != time.Second {
				t.Errorf("first: %v after %v", err, time.Since(start))
			}
		})
		synctest.Wait()
		wg.Go(func() {
			_, err := c.Get(second, 1)
			if !errors.Is(err, context.DeadlineExceeded) || time.Since(start) != 3*time.Second {
				t.Errorf("second: %v after %v", err, time.Since(start))
			}
		})
		wg.Go(func() {
			v, err := c.Get(t.Context(), 1)
			if err != nil || v != "loaded" || time.Since(start) != 10*time.Second {
				t.Errorf("third: %q, %v after %v", v, err, time.Since(start))
			}
		})
		time.Sleep(time.Second)
		cancel(cause)
		wg.Wait()
	})
}

func TestLastCallerCancelsLoad(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var loads atomic.Int64
		canceled := make(chan struct{}, 1)
		c := newCache(t, cacheaside.Config[int, int]{
			Load: func(ctx context.Context, key int) (int, error) {
				if loads.Add(1) == 1 {
					<-ctx.Done()
					canceled <- struct{}{}
					return 1, nil // late, and not kept
				}
				return 2, nil
			},
		})
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := c.Get(ctx, 1)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		<-canceled
		v, err := c.Get(t.Context(), 1)
		require.NoError(t, err)
		require.Equal(t, 2, v)
		synctest.Wait()
		v, err = c.Get(t.Context(), 1)
		require.NoError(t, err)
		require.Equal(t, 2, v)
		require.EqualValues(t, 1, c.Stats().Canceled)
		require.Zero(t, c.Stats().Overtaken, "it was canceled")
	})
}

func TestInvalidatedLoadNeverWrites(t *testing.T) {
	for name, invalidate := range map[string]func(*cacheaside.Cache[int, int]) error{
		"Invalidate":    func(c *cacheaside.Cache[int, int]) error { return c.Invalidate(context.Background(), 1) },
		"InvalidateAll": func(c *cacheaside.Cache[int, int]) error { return c.InvalidateAll(context.Background()) },
		"Expire":        func(c *cacheaside.Cache[int, int]) error { return c.Expire(context.Background(), 1) },
		"Write": func(c *cacheaside.Cache[int, int]) error {
			return c.Write(context.Background(), 1, func(context.Context) error { return nil })
		},
	} {
		bubble(t, name, func(t *testing.T) {
			var version atomic.Int64
			version.Store(1)
			c := newCache(t, cacheaside.Config[int, int]{
				Load: func(ctx context.Context, key int) (int, error) {
					v := version.Load()
					time.Sleep(time.Second)
					return int(v), nil
				},
			})
			var wg sync.WaitGroup
			wg.Go(func() {
				if v, err := c.Get(t.Context(), 1); err != nil || v != 1 {
					t.Errorf("a caller from before the invalidation gets the loaded value: %d, %v", v, err)
				}
			})
			synctest.Wait()
			version.Store(2)
			require.NoError(t, invalidate(c))
			wg.Go(func() {
				if v, err := c.Get(t.Context(), 1); err != nil || v != 2 {
					t.Errorf("a caller from after the invalidation gets the new value: %d, %v", v, err)
				}
			})
			wg.Wait()
			v, err := c.Get(t.Context(), 1)
			require.NoError(t, err)
			require.Equal(t, 2, v)
			require.Equal(t, int64(1), c.Stats().Overtaken)
		})
	}
}

func TestPanicGoexitAndHangBecomeErrors(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		boom := errors.New("boom")
		var how atomic.Value
		c := cacheaside.New(cacheaside.Config[int, int]{
			Name:        "users",
			LoadTimeout: 2 * time.Second,
			Load: func(ctx context.Context, key int) (int, error) {
				switch how.Load() {
				case "panic":
					panic(boom)
				case "goexit":
					runtime.Goexit()
				case "hang":
					time.Sleep(time.Hour) // ignores its ctx
				case "slow":
					<-ctx.Done()
					return 0, boom
				}
				return 5, nil
			},
		})
		all := func(check func(error)) {
			var wg sync.WaitGroup
			for range 10 {
				wg.Go(func() {
					_, err := c.Get(t.Context(), 1)
					check(err)
				})
			}
			wg.Wait()
		}
		how.Store("panic")
		all(func(err error) {
			var p interface {
				Stack() []byte
				Retryable() bool
			}
			if !errors.As(err, &p) || !errors.Is(err, boom) || len(p.Stack()) == 0 || p.Retryable() ||
				err.Error() != "cacheaside: users: load panicked: boom" {
				t.Errorf("panic: %v", err)
			}
		})
		how.Store("goexit")
		all(func(err error) {
			if errors.Unwrap(err) != nil || err.Error() != "cacheaside: users: load called runtime.Goexit" {
				t.Errorf("goexit: %v", err)
			}
		})
		how.Store("slow")
		start := time.Now()
		all(func(err error) {
			var timeout *cacheaside.TimeoutError
			if !errors.As(err, &timeout) || !errors.Is(err, context.DeadlineExceeded) || !timeout.Timeout() ||
				time.Since(start) != 2*time.Second {
				t.Errorf("slow: %v after %v", err, time.Since(start))
			}
		})
		how.Store("hang")
		start = time.Now()
		all(func(err error) {
			if !errors.Is(err, context.DeadlineExceeded) || time.Since(start) != 2*time.Second ||
				err.Error() != "cacheaside: users: load timed out after 2s" {
				t.Errorf("hang: %v after %v", err, time.Since(start))
			}
		})
		how.Store("")
		v, err := c.Get(t.Context(), 1)
		require.NoError(t, err)
		require.Equal(t, 5, v)
		require.NoError(t, c.Close()) // waits for the load that hangs
		require.GreaterOrEqual(t, time.Since(start), time.Hour)
	})
}

// Close waits for the observers of a load that timed out, even if the load has returned.
func TestCloseWaitsForTimeoutObserver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		c := cacheaside.New(cacheaside.Config[int, int]{
			LoadTimeout: time.Second,
			Load: func(context.Context, int) (int, error) {
				time.Sleep(time.Second + time.Millisecond)
				return 1, nil
			},
		})
		c.Observe(func(_ context.Context, e cacheaside.Event) {
			if e.Kind == cacheaside.EventLoadFailed {
				time.Sleep(time.Second)
			}
		})
		_, err := c.Get(t.Context(), 1)
		require.Error(t, err)
		time.Sleep(time.Second / 2)
		require.NoError(t, c.Close())
		require.Equal(t, 2*time.Second, time.Since(start))
	})
}
