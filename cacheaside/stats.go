package cacheaside

import (
	"context"
	"fmt"

	"github.com/go-resilience/resilience/internal/describe"
)

// Stats are counters since New, and gauges.
type Stats struct {
	// Each Get, and each key of a GetMany, is one of these.
	Hits   int64 // a fresh value, or ErrNotFound, from memory
	Stale  int64 // a value past its TTL
	Misses int64 // others, which waited for a load or the Store

	// Each load, and each key of a LoadMany, is one of these.
	Loaded   int64
	NotFound int64
	Answered int64 // with another answer
	Failed   int64 // with another error
	Panicked int64 // or called runtime.Goexit
	Refused  int64 // by a policy in Middleware
	TimedOut int64 // by LoadTimeout
	Canceled int64 // because all callers left, or by Close

	Overtaken int64 // loads that an invalidation overtook

	Entries int64 // gauge: in memory, including those past their TTL
	Untold  int64 // gauge: keys that the Store must still be told about
}

func (c *Cache[K, V]) Stats() Stats {
	c.mu.Lock()
	s := c.stats
	c.mu.Unlock()
	s.Hits, s.Stale, s.Misses = c.hits.Load(), c.stale.Load(), c.misses.Load()
	s.Entries = int64(c.entries.EstimatedSize())
	if c.tier != nil {
		s.Untold = c.tier.count()
	}
	return s
}

func (c *Cache[K, V]) Kind() string { return "cache" }

// Settings returns Config without functions, Store and Codec.
func (c *Cache[K, V]) Settings() any {
	cfg := c.Config()
	cfg.Load, cfg.LoadMany, cfg.Middleware, cfg.Key = nil, nil, nil, nil
	cfg.Clone, cfg.OnEvent, cfg.Store, cfg.Codec = nil, nil, nil, nil
	return cfg
}

func (c *Cache[K, V]) Figures() []describe.Figure {
	s := c.Stats()
	figure := func(name string, counter bool, v int64) describe.Figure {
		return describe.Figure{Name: name, Counter: counter, Value: float64(v)}
	}
	return []describe.Figure{
		figure("cache.requests{result=hit}", true, s.Hits),
		figure("cache.requests{result=stale}", true, s.Stale),
		figure("cache.requests{result=miss}", true, s.Misses),
		figure("cache.loads{outcome=loaded}", true, s.Loaded),
		figure("cache.loads{outcome=not_found}", true, s.NotFound),
		figure("cache.loads{outcome=answered}", true, s.Answered),
		figure("cache.loads{outcome=failed}", true, s.Failed),
		figure("cache.loads{outcome=panicked}", true, s.Panicked),
		figure("cache.loads{outcome=refused}", true, s.Refused),
		figure("cache.loads{outcome=timed_out}", true, s.TimedOut),
		figure("cache.loads{outcome=canceled}", true, s.Canceled),
		figure("cache.overtaken_loads", true, s.Overtaken),
		figure("cache.entries", false, s.Entries),
		figure("cache.untold", false, s.Untold),
	}
}

// Health returns an error while the Store must still be told of invalidations.
func (c *Cache[K, V]) Health() error {
	if c.tier != nil {
		if n := c.tier.count(); n > 0 {
			return untoldNow(n)
		}
	}
	return nil
}

// untoldNow is the error of Health.
type untoldNow int64

func (n untoldNow) Error() string        { return n.HealthState() + ": " + n.HealthDetail() }
func (n untoldNow) HealthState() string  { return "invalidations untold" }
func (n untoldNow) HealthDetail() string { return fmt.Sprintf("%d keys", int64(n)) }

// ObserveAny is Observe for a program that does not know Event.
func (c *Cache[K, V]) ObserveAny(f func(context.Context, any)) (stop func()) {
	return c.Observe(func(ctx context.Context, e Event) { f(ctx, e) })
}

// Level returns the level of package slog: warn for what has failed, otherwise debug.
func (e Event) Level() int {
	switch e.Kind {
	case EventLoadFailed, EventCodecFailed, EventStoreLost, EventStoreRestored, EventFenceFailed,
		EventNotInvalidated, EventWatchLost:
		return 4
	}
	return -4
}

// Fields calls yield with the details of the event.
func (e Event) Fields(yield func(name string, value any)) {
	yield("event", string(e.Kind))
	if e.Key != nil {
		yield("key", fmt.Sprint(e.Key))
	}
	if e.Took > 0 {
		yield("took", e.Took)
	}
	if e.Err != nil {
		yield("err", e.Err)
	}
}
