package storetest

import (
	"context"
	"math/rand/v2"
	"sync"
	"sync/atomic"

	"github.com/go-resilience/resilience/cacheaside"
)

// noStaleGet tests the guarantee of package cacheaside on the Store: a Get that starts after a Write has returned does
// not return a value from before that Write. Two processes share the Store, and each reads and writes. Their Gets skip
// memory, so each process also sees the Writes of the other.
func noStaleGet(s *suite) {
	const keys, reads = 4, 2_000
	var rows, written [keys]atomic.Int64 // the source's values, and those of the last returned Write
	var caches []*cacheaside.Cache[int, int64]
	for _, store := range []cacheaside.Store{s.store, s.backend.Connect()} {
		c := cacheaside.New(cacheaside.Config[int, int64]{
			Load:  func(_ context.Context, key int) (int64, error) { return rows[key].Load(), nil },
			Store: store,
		})
		defer c.Close()
		caches = append(caches, c)
	}
	var readers, writers sync.WaitGroup
	var done atomic.Bool
	for i := range 4 {
		writers.Go(func() {
			for !done.Load() {
				key, wrote := rand.IntN(keys), int64(0)
				err := caches[i%2].Write(s.ctx, key, func(context.Context) error {
					wrote = rows[key].Add(1)
					return nil
				})
				if err != nil {
					s.Errorf("Write: %v", err)
					return
				}
				raise(&written[key], wrote)
			}
		})
		readers.Go(func() {
			for range reads / 4 {
				key := rand.IntN(keys)
				least := written[key].Load()
				got, _, err := caches[i%2].GetWith(s.ctx, key, cacheaside.GetOptions{SkipMemory: true})
				if err != nil || got < least {
					s.Errorf("Get(%d) returned %d, %v after a Write of %d had returned", key, got, err, least)
					return
				}
			}
		})
	}
	readers.Wait()
	done.Store(true)
	writers.Wait()
}

// raise makes n at least to.
func raise(n *atomic.Int64, to int64) {
	for {
		was := n.Load()
		if was >= to || n.CompareAndSwap(was, to) {
			return
		}
	}
}
