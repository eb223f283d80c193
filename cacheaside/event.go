package cacheaside

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

// A Kind says what an [Event] is about.
type Kind string

// What a Cache tells Config.OnEvent.
const (
	Loaded         Kind = "loaded"          // a load returned a value
	LoadFailed     Kind = "load failed"     // a load returned an error other than an answer, panicked or timed out
	LoadAnswered   Kind = "load answered"   // a load returned an answer other than ErrNotFound; callers get it, and no old value
	LoadRefused    Kind = "load refused"    // a policy in Around did not let the load run; callers see it fail
	ServedStale    Kind = "served stale"    // a caller was given a value past its TTL; Err says why, if a load failed
	Overtaken      Kind = "overtaken"       // what was loaded was out of date when it came, and was not kept
	BadPayload     Kind = "bad payload"     // what the Store held could not be read: a miss
	StoreDown      Kind = "store down"      // a shard of the Store failed; it is left alone for ErrorPause
	StoreUp        Kind = "store up"        // all shards of the Store answer again
	FenceFailed    Kind = "fence failed"    // an Update went on without a fence in the Store
	NotInvalidated Kind = "not invalidated" // the Store could not be told; the Cache keeps trying
	Reinvalidated  Kind = "reinvalidated"   // the Store has been told after all
	WatchLost      Kind = "watch lost"      // no word from other processes: memory is not used
	Watching       Kind = "watching"        // changes by other processes are heard, and memory is used
	WatchRestored  Kind = "watch restored"  // the same, after WatchLost
	RefreshAhead   Kind = "refresh ahead"   // a fresh value is being refreshed early
)

// An Event is something that happened in a Cache. Fields that do not apply are
// zero.
type Event struct {
	Name string
	Kind Kind
	Key  any           // the K
	Took time.Duration // by a load
	Err  error
}

// Stats are counts since New, and the present size.
type Stats struct {
	Hit       int64 // Gets answered with a fresh value, or that none exists, from memory
	Missed    int64 // Gets that began or joined a load, or asked the Store
	Stale     int64 // Gets answered with a value past its TTL
	StoreHit  int64 // flights answered by the Store
	Loaded    int64 // loads that returned a value
	NotFound  int64 // loads that returned ErrNotFound
	Answered  int64 // loads that returned another error whose Answered is true
	Failed    int64 // loads that failed in any other way
	Refused   int64 // loads that a policy in Around did not let run
	Overtaken int64 // loads whose result was out of date when it came
	Evicted   int64 // entries that left memory for want of room
	Entries   int64 // in memory now, those past their TTL included
	Loading   int64 // loads in progress now
	Untold    int64 // keys that the Store still has to be told about
	Panics    int64 // of OnEvent
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

// counts are the counters off the path of a hit.
type counts struct {
	missed, stale, storeHit, loaded, notFound, answered, failed, refused, overtaken, evicted, panics atomic.Int64
}

// hits counts in several cells, so that parallel hits do not meet in one. A
// sync.Pool gives each processor the token, and so the cell, that it had last.
type hits struct {
	cells [32]struct {
		n atomic.Int64
		_ [120]byte // a cell has two cache lines to itself: they are fetched in pairs
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

// tell reports an event. It is never called with a lock held.
func (c *Cache[K, V]) tell(ctx context.Context, kind Kind, key K, err error) {
	if c.cfg.OnEvent != nil {
		c.event(ctx, Event{Name: c.cfg.Name, Kind: kind, Key: key, Err: err})
	}
}

// tellAll reports an event that concerns no key in particular.
func (c *Cache[K, V]) tellAll(ctx context.Context, kind Kind, err error) {
	if c.cfg.OnEvent != nil {
		c.event(ctx, Event{Name: c.cfg.Name, Kind: kind, Err: err})
	}
}

func (c *Cache[K, V]) event(ctx context.Context, e Event) {
	defer func() {
		if recover() != nil {
			c.counts.panics.Add(1)
		}
	}()
	c.cfg.OnEvent(ctx, e)
}
