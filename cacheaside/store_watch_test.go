package cacheaside_test

import (
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
