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

func TestEventsOfTheSubscription(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log eventLog
		conn := newFakeStore().connect()
		c := cacheaside.New(cacheaside.Config[int, int]{Load: newSource().load, Store: conn})
		synctest.Wait()
		c.Observe(log.add) // the first event may come before, and the gauge shows it
		require.EqualValues(t, 1, c.Stats().Watching)
		for range 2 {
			conn.fail()
			time.Sleep(time.Minute)
			require.EqualValues(t, 0, c.Stats().Watching)
			conn.recover()
			time.Sleep(time.Minute)
			require.EqualValues(t, 1, c.Stats().Watching)
		}
		require.NoError(t, c.Close())
		var kinds []cacheaside.EventKind
		for _, e := range log.events {
			kinds = append(kinds, e.Kind)
		}
		require.Equal(t, []cacheaside.EventKind{
			cacheaside.EventWatchLost, cacheaside.EventWatchBegan, cacheaside.EventWatchLost, cacheaside.EventWatchBegan,
		}, kinds)
	})
}

// TestPanicOfObserverIsLogged: on a goroutine of the Cache, the panic would end the program.
func TestPanicOfObserverIsLogged(t *testing.T) {
	var printed bytes.Buffer
	log.SetOutput(&printed)
	defer log.SetOutput(os.Stderr)
	synctest.Test(t, func(t *testing.T) {
		c := cacheaside.New(config{Load: identity, Store: newFakeStore().connect()})
		c.Observe(func(_ context.Context, e cacheaside.Event) {
			panic(e.Kind)
		})
		synctest.Wait()
		mustGet(t, c, 1)
		_, ok := c.Peek(1)
		require.True(t, ok, "the Store is watched")
		require.NoError(t, c.Close())
	})
	require.Contains(t, printed.String(), "cacheaside: an observer panicked: loaded")
}
