package cacheaside

import "context"

// Old returns the value that a load, to which ctx was given, is about to replace: the
// one in memory, however old it is, or the one that the Store had. A load can thus ask
// the source whether that has changed, and return the old value if it has not:
//
//	old, ok := cacheaside.Old[Page](ctx)
//	if ok && unchangedSince(ctx, old.ETag) {
//		return old, nil
//	}
//
// It reports false where there is none: after an invalidation, in LoadMany, outside a
// load, and if V is not the type of the values of the Cache. A value that is past its
// TTL stays in memory until it is evicted, also where Stale and StaleOnError are 0.
func Old[V any](ctx context.Context) (V, bool) {
	if l := loadOf(ctx); l != nil {
		if f, ok := l.job.(interface{ previous() (V, bool) }); ok {
			return f.previous()
		}
	}
	var zero V
	return zero, false
}

// previous returns the value that f is to replace.
func (f *flight[K, V]) previous() (v V, ok bool) {
	c := f.c
	e := c.peek(f.key)
	if old := f.old.Load(); e == nil && old != nil && c.tags.holds(old.entry.tags) {
		f.shard.mu.Lock()
		if c.entries == nil || f.shard.flights[f.key] == f && f.version == c.version(f.slot) {
			e = old.entry
		}
		f.shard.mu.Unlock()
	}
	if e == nil || e.absent {
		return v, false
	}
	v, _ = c.give(e)
	return v, true
}
