package cacheaside

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/go-resilience/resilience/policy"
)

// Stats are the metrics of a [Cache]: counters since New, and gauges.
type Stats struct {
	// Each Get, and each key of a GetMany, counts once.
	Hits   int64 `counter:"gets{outcome=hit}"`   // the value, or a cached ErrNotFound, was fresh in memory
	Stale  int64 `counter:"gets{outcome=stale}"` // the value was served after its TTL
	Misses int64 `counter:"gets{outcome=miss}"`  // the call waited for a load or for the Store

	// Each Load, and each key of a LoadMany, counts once.
	Loaded   int64 `counter:"loads{outcome=loaded}"`
	NotFound int64 `counter:"loads{outcome=not_found}"`
	Answered int64 `counter:"loads{outcome=answered}"` // the load returned an answer other than ErrNotFound
	Failed   int64 `counter:"loads{outcome=failed}"`
	Panicked int64 `counter:"loads{outcome=panicked}"` // the load panicked or called runtime.Goexit
	Refused  int64 `counter:"loads{outcome=refused}"`  // a policy in Middleware refused the load
	TimedOut int64 `counter:"loads{outcome=timed_out}"`
	Canceled int64 `counter:"loads{outcome=canceled}"` // all callers canceled, or Close was called

	Overtaken int64 `counter:"overtaken"` // loads not cached in memory because of an invalidation or SkipMemory

	Entries              int64 `gauge:"entries"`  // entries in memory, including stale entries
	PendingInvalidations int64 `gauge:"pending"`  // keys whose invalidation has not reached the Store (all keys: 1)
	Watching             int64 `gauge:"watching"` // 1 while values are cached in memory
}

// Stats returns the metrics of c.
func (c *Cache[K, V]) Stats() Stats {
	c.mu.Lock()
	s := c.stats
	if c.memoryEnabled {
		s.Watching = 1
	}
	c.mu.Unlock()
	s.Hits, s.Stale, s.Misses = int64(c.hits.Snapshot().Hits), c.stale.Load(), c.misses.Load()
	s.Entries = int64(c.entries.EstimatedSize())
	if c.tier != nil {
		s.PendingInvalidations = c.tier.count()
	}
	return s
}

// Describe implements [policy.Describer]. The Health of the Cache is a warning while invalidations have not reached
// the Store.
func (c *Cache[K, V]) Describe() policy.Description {
	return policy.Description{
		Kind:    "cache",
		Name:    c.cfg().Name,
		Metrics: func() []policy.Metric { return policy.Metrics("cache", c.Stats()) },
		Health:  c.health,
		Config:  func() any { return c.Config() },
		Update: func(dryRun bool, change func(cfg any) error) error {
			return c.setting.Change(dryRun, change, allow, c.follow)
		},
		Observe: policy.Events(c.Observe, Event.describe),
	}
}

func (c *Cache[K, V]) health(context.Context) policy.Health {
	if n := c.Stats().PendingInvalidations; n > 0 {
		return policy.Health{Status: policy.Warn, State: "invalidations_pending", Detail: fmt.Sprintf("%d keys", n)}
	}
	return policy.Health{}
}

func (e Event) describe() policy.Event {
	d := policy.Event{Kind: "cache", Name: e.Name, What: string(e.Kind), Level: slog.LevelDebug, Err: e.Err}
	switch e.Kind {
	case EventLoadFailed, EventCodecFailed, EventStoreLost, EventFenceFailed, EventNotPropagated, EventWatchLost:
		d.Level = slog.LevelWarn
	case EventStoreRestored, EventWatchBegan:
		d.Level = slog.LevelInfo
	}
	if e.Key != nil {
		d.Key = fmt.Sprint(e.Key)
	}
	if e.Took > 0 {
		d.Attrs = append(d.Attrs, slog.Duration("took", e.Took))
	}
	return d
}
