package cacheaside_test

import (
	"context"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/cacheaside"
)

// An outage of the Store is one of memory, unless MemoryInOutage is set. Then the TTL
// bounds the age of values that others have changed, as does the end of the outage. The
// promise about the process's own writes stands.
func TestMemoryInAnOutageOfTheStore(t *testing.T) {
	for _, keeps := range []bool{false, true} {
		t.Run(map[bool]string{false: "is not used", true: "is used"}[keeps], func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				src := newSource()
				conn := newFakeStore().connect()
				c := cacheaside.New(cacheaside.Config[int, int]{
					Load: src.load, Store: conn, MemoryInOutage: keeps, TTL: time.Minute, Jitter: -1,
				})
				defer c.Close()
				synctest.Wait()
				mustGet(t, c, 1)
				conn.fail()
				synctest.Wait()
				for range 100 {
					mustGet(t, c, 1)
				}
				if !keeps {
					require.Equal(t, 101, src.loaded(1))
					return
				}
				require.Equal(t, 1, src.loaded(1))

				_ = c.Write(t.Context(), 1, src.write(1))
				require.Equal(t, 1, mustGet(t, c, 1)) // its own write
				require.Equal(t, 1, mustGet(t, c, 1))
				require.Equal(t, 2, src.loaded(1)) // kept too

				_ = src.write(1)(t.Context()) // a write by another process
				time.Sleep(time.Minute - 1)
				require.Equal(t, 1, mustGet(t, c, 1))
				time.Sleep(time.Nanosecond)
				require.Equal(t, 2, mustGet(t, c, 1))

				_ = src.write(1)(t.Context())
				conn.recover()
				time.Sleep(10 * time.Second)
				require.Equal(t, 3, mustGet(t, c, 1))
			})
		})
	}
}

func TestEventsOfTheSubscription(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log eventLog
		conn := newFakeStore().connect()
		c := cacheaside.New(cacheaside.Config[int, int]{Load: newSource().load, Store: conn, OnEvent: log.add})
		synctest.Wait()
		for range 2 {
			conn.fail()
			time.Sleep(time.Minute)
			conn.recover()
			time.Sleep(time.Minute)
		}
		require.NoError(t, c.Close())
		var kinds []cacheaside.EventKind
		for _, e := range log.events {
			kinds = append(kinds, e.Kind)
		}
		require.Equal(t, []cacheaside.EventKind{cacheaside.EventWatchBegun,
			cacheaside.EventWatchLost, cacheaside.EventWatchRestored, cacheaside.EventWatchLost, cacheaside.EventWatchRestored}, kinds)
	})
}

func TestMemoryInOutageKeepsLoadsFromBeforeTheStoreAnswers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src := newSource()
		conn := newFakeStore().connect()
		conn.fail()
		c := cacheaside.New(cacheaside.Config[int, int]{Load: src.load, Store: conn, MemoryInOutage: true})
		defer c.Close()
		for range 100 {
			mustGet(t, c, 1)
		}
		require.Equal(t, 1, src.loaded(1))
	})
}

func TestMemoryInOutageIsRefusedWithoutMemoryOrStore(t *testing.T) {
	load := func(context.Context, int) (int, error) { return 0, nil }
	require.ErrorContains(t, cacheaside.Config[int, int]{Load: load, MemoryInOutage: true}.Validate(), "MemoryInOutage")
	require.ErrorContains(t, cacheaside.Config[int, int]{
		Load: load, MemoryInOutage: true, Store: newFakeStore().connect(), Capacity: -1,
	}.Validate(), "MemoryInOutage")
}

// A hook that ends its goroutine ends the subscription with it. Memory is not used without.
func TestMemoryIsNotUsedAfterAHookHasEndedTheSubscription(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src, store := newSource(), newFakeStore()
		c := cacheaside.New(cacheaside.Config[int, int]{
			Load: src.load, Store: store.connect(), TTL: time.Hour,
			OnEvent: func(_ context.Context, e cacheaside.Event) {
				if e.Kind == cacheaside.EventWatchBegun {
					time.Sleep(time.Second)
					runtime.Goexit()
				}
			},
		})
		defer c.Close()
		other := cacheaside.New(cacheaside.Config[int, int]{Load: src.load, Store: store.connect()})
		defer other.Close()
		synctest.Wait()
		mustGet(t, c, 1)
		_, kept := c.Peek(1)
		require.True(t, kept)
		time.Sleep(2 * time.Second)
		for i := range 2 {
			require.NoError(t, other.Write(t.Context(), 1, src.write(1)))
			require.Equal(t, i+1, mustGet(t, c, 1))
		}
	})
}

func TestStoreIsToldAfterAHookHasEndedTheTelling(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src, conn := newSource(), newFakeStore().connect()
		c := cacheaside.New(cacheaside.Config[int, int]{
			Load: src.load, Store: conn,
			OnEvent: func(_ context.Context, e cacheaside.Event) {
				if e.Kind == cacheaside.EventReinvalidated {
					runtime.Goexit()
				}
			},
		})
		defer c.Close()
		conn.fail()
		require.ErrorIs(t, c.Invalidate(t.Context(), 1, 2), cacheaside.ErrUntold)
		require.Equal(t, int64(2), c.Stats().Untold)
		conn.recover()
		time.Sleep(time.Minute)
		require.Zero(t, c.Stats().Untold)
	})
}
