package cacheaside_test

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/cacheaside"
)

// A value with any damaged byte is loaded again, once.
func TestDamagedPayloadIsReloaded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shared := newFakeStore()
		loads := 0
		var log eventLog
		c := newCache(t, cacheaside.Config[int, string]{
			Load:  func(context.Context, int) (string, error) { loads++; return "value", nil },
			Store: unwatched{shared.connect()},
		})
		c.Observe(log.add)
		mustGet(t, c, 1)
		intact := shared.items["1"].of(0).value
		for i := range intact {
			for bit := range 8 {
				damaged := append([]byte(nil), intact...)
				damaged[i] ^= 1 << bit
				shared.items["1"].of(0).value = damaged
				before := loads
				require.Equal(t, "value", mustGet(t, c, 1), "byte %d, bit %d", i, bit)
				require.Equal(t, "value", mustGet(t, c, 1))
				require.Equal(t, before+1, loads, "byte %d, bit %d", i, bit)
			}
		}
		for n := range intact {
			shared.items["1"].of(0).value = intact[:n]
			require.Equal(t, "value", mustGet(t, c, 1))
		}
		require.Equal(t, 9*len(intact), log.count(cacheaside.EventCodecFailed))
		for _, e := range log.events {
			require.NotContains(t, fmt.Sprint(e.Err), "panicked")
		}
	})
}

// A Codec that panics is like a Codec that returns an error: the value is loaded again, or cached in memory only, and
// other keys of the call are not affected.
func TestCodecThatPanics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log eventLog
		shared := newFakeStore()
		cfg := cacheaside.Config[int, brittle]{
			LoadMany: func(_ context.Context, keys []int) (map[int]brittle, error) {
				found := make(map[int]brittle)
				for _, key := range keys {
					found[key] = brittle{Key: key}
				}
				return found, nil
			},
			Load: func(_ context.Context, key int) (brittle, error) { return brittle{Key: key}, nil },
		}
		for i := range 2 {
			cfg.Store = shared.connect()
			c := newCache(t, cfg)
			c.Observe(log.add)
			synctest.Wait()
			for range 2 {
				found, err := c.GetMany(t.Context(), []int{1, noText, badText})
				require.NoError(t, err)
				require.Len(t, found, 3)
			}
			require.Equal(t, 1+2*i, log.count(cacheaside.EventCodecFailed))
		}
	})
}

const noText, badText = 2, 3

// A brittle has methods that panic.
type brittle struct{ Key int }

func (b brittle) MarshalText() ([]byte, error) {
	if b.Key == noText {
		panic("cannot be written")
	}
	return []byte{byte('0' + b.Key)}, nil
}

func (b *brittle) UnmarshalText(text []byte) error {
	if b.Key = int(text[0] - '0'); b.Key == badText {
		panic("cannot be read")
	}
	return nil
}
