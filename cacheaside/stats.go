package cacheaside

import (
	"sync"
	"sync/atomic"
)

// Stats are counts since New, and the present size.
type Stats struct {
	Hit       int64 // Gets answered from memory by a fresh value or a remembered ErrNotFound
	Missed    int64 // Gets that waited for a load or the Store
	Stale     int64 // Gets answered with a value past its TTL
	StoreHit  int64 // values that came from the Store
	Loaded    int64 // loads that returned a value
	NotFound  int64 // loads that returned ErrNotFound
	Answered  int64 // loads that returned another answer
	Failed    int64 // loads that failed in any other way
	Refused   int64 // loads that a policy in Middleware refused
	Overtaken int64 // loads overtaken by an invalidation
	Evicted   int64 // entries removed from memory for lack of room
	Entries   int64 // entries in memory now, including those past their TTL
	Loading   int64 // loads in progress now
	Untold    int64 // keys that the Store must still be told about
	Panics    int64 // panics of OnEvent
}

// Stats returns a snapshot.
func (c *Cache[K, V]) Stats() Stats {
	s := Stats{
		Hit:       c.hits.sum(),
		Missed:    c.counts.missed.Load(),
		Stale:     c.counts.stale.Load(),
		StoreHit:  c.counts.storeHit.Load(),
		Loaded:    c.counts.loaded.Load(),
		NotFound:  c.counts.notFound.Load(),
		Answered:  c.counts.answered.Load(),
		Failed:    c.counts.failed.Load(),
		Refused:   c.counts.refused.Load(),
		Panics:    c.counts.panics.Load(),
		Overtaken: c.counts.overtaken.Load(),
		Evicted:   c.counts.evicted.Load(),
		Loading:   int64(len(c.slots)),
	}
	if c.entries != nil {
		s.Entries = int64(c.entries.EstimatedSize())
	}
	if c.shared != nil {
		s.Untold = c.shared.untold.len()
	}
	return s
}

// counts are the counters that a hit does not touch.
type counts struct {
	missed, stale, storeHit, loaded, notFound, answered, failed, refused, overtaken, evicted, panics atomic.Int64
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
