package cacheaside_test

import (
	"bytes"
	"context"
	"log"
	"os"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/cacheaside"
)

// An outage of the Store is one of memory.
func TestMemoryInAnOutageOfTheStore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src := newSource()
		conn := newFakeStore().connect()
		c := cacheaside.New(cacheaside.Config[int, int]{Load: src.load, Store: conn, TTL: time.Minute, Jitter: cacheaside.None})
		defer c.Close()
		synctest.Wait()
		mustGet(t, c, 1)
		conn.fail()
		synctest.Wait()
		for range 100 {
			mustGet(t, c, 1)
		}
		require.Equal(t, 101, src.loaded(1))
	})
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
		require.Equal(t, []cacheaside.EventKind{cacheaside.EventWatchBegan,
			cacheaside.EventWatchLost, cacheaside.EventWatchBegan, cacheaside.EventWatchLost, cacheaside.EventWatchBegan}, kinds)
	})
}

// Where a hook panics on a goroutine of the Cache, nobody else would recover it.
func TestPanicOfAHookIsLogged(t *testing.T) {
	var printed bytes.Buffer
	log.SetOutput(&printed)
	defer log.SetOutput(os.Stderr)
	synctest.Test(t, func(t *testing.T) {
		c := cacheaside.New(config{Load: identity, Store: newFakeStore().connect(), OnEvent: func(_ context.Context, e cacheaside.Event) {
			panic(e.Kind)
		}})
		synctest.Wait()
		mustGet(t, c, 1)
		_, ok := c.Peek(1)
		require.True(t, ok, "the Store is watched")
		require.NoError(t, c.Close())
	})
	require.Contains(t, printed.String(), "cacheaside: a hook panicked: watch_began")
}
