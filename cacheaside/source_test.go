package cacheaside_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/cacheaside"
)

// GetWith returns the source of its result.
func TestGetWithReturnsTheSource(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fails := false
		shared := newFakeStore()
		open := func() *cacheaside.Cache[int, int] {
			c := cacheaside.New(cacheaside.Config[int, int]{
				TTL: time.Minute, Jitter: cacheaside.None, StaleIfError: time.Hour, NotFoundTTL: time.Minute,
				Store: shared.connect(), ErrorPause: cacheaside.None,
				Load: func(_ context.Context, key int) (int, error) {
					switch {
					case key < 0:
						return 0, cacheaside.ErrNotFound
					case fails:
						return 0, errLoad
					}
					return key, nil
				},
			})
			synctest.Wait()
			return c
		}
		a, b := open(), open()
		defer a.Close()
		defer b.Close()
		is := func(c *cacheaside.Cache[int, int], key int, skip bool, want cacheaside.Source, wantErr error) {
			t.Helper()
			_, source, err := c.GetWith(t.Context(), key, cacheaside.GetOptions{SkipMemory: skip})
			require.Equal(t, want, source)
			require.ErrorIs(t, err, wantErr)
		}
		is(a, 1, false, cacheaside.SourceLoaded, nil)
		is(a, 1, false, cacheaside.SourceFresh, nil)
		is(b, 1, true, cacheaside.SourceFresh, nil)
		is(a, -1, false, cacheaside.SourceLoaded, cacheaside.ErrNotFound)
		is(a, -1, false, cacheaside.SourceFresh, cacheaside.ErrNotFound)
		is(b, -1, false, cacheaside.SourceFresh, cacheaside.ErrNotFound)
		fails = true
		is(a, 2, false, "", errLoad)
		time.Sleep(2 * time.Minute)
		is(a, 1, false, cacheaside.SourceStale, nil)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, source, err := a.GetWith(ctx, 1, cacheaside.GetOptions{})
		require.ErrorIs(t, err, context.Canceled)
		require.Empty(t, source)
	})
}
