package registry

import (
	"fmt"
	"log/slog"

	"github.com/go-resilience/resilience/cacheaside"
)

func init() {
	oldReaders = append(oldReaders, func(p Policy) any { return read(p, "cache", cacheFigures, cacheEvent, cacheHealth) })
}

func cacheFigures(s cacheaside.Stats, to emit) {
	requests := func(result string, n int64) {
		to.counter("cache.requests", "{request}", "Gets, by result.", n, Attr{"result", result})
	}
	requests("hit", s.Hits)
	requests("stale", s.Stale)
	requests("miss", s.Misses)
	loads := func(outcome string, n int64) {
		to.counter("cache.loads", "{load}", "Loads that have ended, by outcome.", n, Attr{"outcome", outcome})
	}
	loads("loaded", s.Loaded)
	loads("not_found", s.NotFound)
	loads("answered", s.Answered)
	loads("failed", s.Failed)
	loads("panicked", s.Panicked)
	loads("refused", s.Refused)
	loads("timed_out", s.TimedOut)
	loads("canceled", s.Canceled)
	to.seconds(true, "cache.load.time", "Time that loads took, together.", s.LoadTime)
	to.counter("cache.store.hits", "{value}", "Values that came from the Store.", s.StoreHits)
	to.counter("cache.overtaken_loads", "{load}", "Loads overtaken by an invalidation.", s.Overtaken)
	to.counter("cache.evictions", "{entry}", "Entries removed from memory for lack of room.", s.Evicted)
	to.counter("cache.hook.panics", "{panic}", "Panics of hooks and observers.", s.HookPanics)
	to.gauge("cache.entries", "{entry}", "Entries in memory.", float64(s.Entries))
	to.gauge("cache.loading", "{load}", "Loads under way.", float64(s.Loading))
	to.gauge("cache.untold", "{key}", "Keys that the Store must still be told about.", float64(s.Untold))
}

func cacheEvent(e cacheaside.Event) oldEvent {
	var attrs []slog.Attr
	key := ""
	if e.Key != nil {
		key = fmt.Sprint(e.Key)
	}
	if e.Took > 0 {
		attrs = append(attrs, slog.Duration("took", e.Took))
	}
	ev := happened(e.Kind, key, e.Err, attrs...)
	switch e.Kind {
	case cacheaside.EventLoadFailed, cacheaside.EventCodecFailed, cacheaside.EventStoreLost, cacheaside.EventStoreRestored, cacheaside.EventFenceFailed,
		cacheaside.EventNotInvalidated, cacheaside.EventWatchLost, cacheaside.EventWatchRestored:
		ev.level = slog.LevelWarn
	}
	return ev
}

func cacheHealth(s cacheaside.Stats) *ailment {
	if s.Untold == 0 {
		return nil
	}
	return &ailment{state: "invalidations untold", detail: fmt.Sprintf("%d keys", s.Untold)}
}
