package cacheaside_test

import (
	"context"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/cacheaside"
)

// record is one key of a store of record: the committed version, and the newest version
// whose write has returned.
type record struct {
	committed atomic.Int64
	returned  atomic.Int64
}

const readers = 8

// finish raises returned to version.
func (r *record) finish(version int64) {
	for {
		old := r.returned.Load()
		if old >= version || r.returned.CompareAndSwap(old, version) {
			return
		}
	}
}

// stress runs writers and readers against c. It counts the Gets that returned a value older than the last write that
// had returned before the Get. The writers write until each reader has made its share of reads.
func stress(t *testing.T, writers, keys, reads int,
	write func(c *cacheaside.Cache[int, int64], key int, commit func()) bool) (violations, writes int64) {
	t.Helper()
	records := make([]record, keys)
	c := newCache(t, cacheaside.Config[int, int64]{Load: func(_ context.Context, key int) (int64, error) {
		v := records[key].committed.Load()
		runtime.Gosched() // between reading the row and returning it
		return v, nil
	}})
	var bad, written atomic.Int64
	var writing, reading sync.WaitGroup
	var done atomic.Bool
	for w := range writers {
		writing.Go(func() {
			for i := 0; !done.Load(); i++ {
				key := (w*7 + i) % keys
				var version int64
				if write(c, key, func() { version = records[key].committed.Add(1) }) {
					records[key].finish(version)
				}
				written.Add(1)
				runtime.Gosched()
			}
		})
	}
	for range readers {
		reading.Go(func() {
			for i := range reads / readers {
				key := i % keys
				floor := records[key].returned.Load()
				v, err := c.Get(context.Background(), key)
				if err != nil {
					t.Errorf("get: %v", err)
					return
				}
				if v < floor {
					bad.Add(1)
				}
			}
		})
	}
	reading.Wait()
	done.Store(true)
	writing.Wait()
	return bad.Load(), written.Load()
}

func TestGetSeesReturnedWrite(t *testing.T) {
	update := func(c *cacheaside.Cache[int, int64], key int, commit func()) bool {
		return c.Write(context.Background(), key, func(context.Context) error { commit(); return nil }) == nil
	}
	// A writer interrupted between commit and invalidation, in the ways that a process
	// survives.
	crash := func(c *cacheaside.Cache[int, int64], key int, commit func()) bool {
		if n := commits.Add(1); n%5 > 0 {
			return update(c, key, commit)
		} else if n%2 == 0 {
			func() {
				defer func() { _ = recover() }()
				_ = c.Write(context.Background(), key, func(context.Context) error { commit(); panic("crash") })
			}()
		} else {
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				_ = c.Write(context.Background(), key, func(context.Context) error { commit(); runtime.Goexit(); return nil })
			}()
			<-ended
		}
		return true
	}
	mixed := func(c *cacheaside.Cache[int, int64], key int, commit func()) bool {
		switch commits.Add(1) % 3 {
		case 0:
			commit()
			return c.Invalidate(context.Background(), key) == nil
		case 1:
			commit()
			return c.InvalidateAll(context.Background()) == nil
		}
		return update(c, key, commit)
	}
	for _, test := range []struct {
		name          string
		writers, keys int
		write         func(*cacheaside.Cache[int, int64], int, func()) bool
	}{
		{"many keys", 4, 16, update},
		{"three writers, one key", 3, 1, update},
		{"writers that panic or exit", 4, 4, crash},
		{"all kinds of invalidation", 4, 4, mixed},
	} {
		t.Run(test.name, func(t *testing.T) {
			reads := 100_000
			if testing.Short() {
				reads = 30_000
			}
			violations, writes := stress(t, test.writers, test.keys, reads, test.write)
			t.Logf("%d reads, %d writes, %d violations", reads, writes, violations)
			require.Zero(t, violations)
		})
	}
}

var commits atomic.Int64
