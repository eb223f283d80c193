package cacheaside

import (
	"sync"
	"sync/atomic"
	"time"
)

// Stats are cumulative counters since New, which never go back, and gauges of the
// present state.
type Stats struct {
	// Requests: the Gets, and the keys of GetMany. Each counts once.
	Hits   int64 // answered from memory by a fresh value or a remembered ErrNotFound
	Stale  int64 // answered with a value past its TTL
	Misses int64 // waited for a load or the Store, and did not get a value past its TTL

	// Loads by outcome. Each counts once, and a LoadMany once for each key.
	Loaded   int64 // returned a value
	NotFound int64 // returned ErrNotFound
	Answered int64 // returned another answer, such as resilience.Answer(err)
	Failed   int64 // returned another error
	Panicked int64 // panicked, or called runtime.Goexit
	Refused  int64 // refused by a policy in Middleware
	TimedOut int64 // did not return within LoadTimeout
	Canceled int64 // canceled because all callers left, or by Close

	LoadTime   time.Duration // total duration of the calls of Load and LoadMany, with Middleware
	StoreHits  int64         // values that came from the Store
	Overtaken  int64         // loads overtaken by an invalidation; their results were not kept
	Evicted    int64         // entries removed from memory for lack of room
	HookPanics int64         // of OnEvent and observers

	Entries int64 // in memory now, including those past their TTL
	Loading int64 // loads in progress now
	Untold  int64 // keys that the Store must still be told about
}

// Stats returns a snapshot.
func (c *Cache[K, V]) Stats() Stats {
	s := Stats{
		Hits:       c.hits.sum(),
		Stale:      c.counts.stale.Load(),
		Misses:     c.counts.misses.Load(),
		Loaded:     c.counts.loaded.Load(),
		NotFound:   c.counts.notFound.Load(),
		Answered:   c.counts.answered.Load(),
		Failed:     c.counts.failed.Load(),
		Panicked:   c.counts.panicked.Load(),
		Refused:    c.counts.refused.Load(),
		TimedOut:   c.counts.timedOut.Load(),
		Canceled:   c.counts.canceled.Load(),
		LoadTime:   time.Duration(c.counts.loadTime.Load()),
		StoreHits:  c.counts.storeHits.Load(),
		Overtaken:  c.counts.overtaken.Load(),
		Evicted:    c.counts.evicted.Load(),
		HookPanics: c.panics.Count(),
		Loading:    int64(c.slots.inUse()),
	}
	if c.entries != nil {
		s.Entries = int64(c.entries.EstimatedSize())
	}
	if c.tier != nil {
		s.Untold = c.tier.Untold()
	}
	return s
}

// counts are the counters that a hit does not touch.
type counts struct {
	stale, misses                                                             atomic.Int64
	loaded, notFound, answered, failed, panicked, refused, timedOut, canceled atomic.Int64
	loadTime, storeHits, overtaken, evicted                                   atomic.Int64
}

// hits counts in several cells to avoid contention between parallel hits. A sync.Pool
// returns to each processor the token, and so the cell, that it used last.
type hits struct {
	cells [32]struct {
		n atomic.Int64
		_ [120]byte // two cache lines for each cell, since they are fetched in pairs
	}
	tokens sync.Pool // of *uint32, an index into cells
	last   atomic.Uint32
}

func (h *hits) add() { h.addMany(1) }

func (h *hits) addMany(n int64) {
	token, _ := h.tokens.Get().(*uint32)
	if token == nil {
		token = new(uint32)
		*token = h.last.Add(1)
	}
	h.cells[*token%uint32(len(h.cells))].n.Add(n)
	h.tokens.Put(token)
}

func (h *hits) sum() (n int64) {
	for i := range h.cells {
		n += h.cells[i].n.Load()
	}
	return n
}
