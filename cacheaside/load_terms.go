package cacheaside

import (
	"context"
	"time"
)

// terms are what a load sets for its own result.
type terms struct {
	ttl   time.Duration
	cost  int
	timed bool // SetTTL was called
	tags  []string
}

// SetTTL makes the result of a load fresh for ttl, without jitter, instead of
// Config.TTL. ctx is the ctx of the load. In LoadMany it applies to all results. It also
// applies to ErrNotFound. Zero or less means that the result is not kept. If Middleware
// repeats the load, only the last attempt counts, as for SetCost and SetTags. Outside a
// load SetTTL has no effect. Call it on the goroutine of the load.
func SetTTL(ctx context.Context, ttl time.Duration) {
	if l := loadOf(ctx); l != nil {
		l.terms.ttl, l.terms.timed = ttl, true
	}
}

// SetCost makes the result of a load count for cost against Config.Capacity, instead of
// Config.Cost. ctx is the ctx of the load. Less than 1 counts as 1. Outside a load
// SetCost has no effect. Call it on the goroutine of the load.
func SetCost(ctx context.Context, cost int) {
	if l := loadOf(ctx); l != nil {
		l.terms.cost = max(cost, 1)
	}
}

// Old returns the value that a load is about to replace: the one in memory, however old,
// or the one from the Store. ctx is the ctx of the load. A load can use it to ask the
// source whether the value has changed, and return the old value if not:
//
//	old, ok := cacheaside.Old[Page](ctx)
//	if ok && unchangedSince(ctx, old.ETag) {
//		return old, nil
//	}
//
// Old reports false if there is no such value: after an invalidation, in LoadMany,
// outside a load, and if V is not the value type of the Cache. A value past its TTL
// stays in memory until it is evicted, even if Stale and StaleOnError are zero.
func Old[V any](ctx context.Context) (V, bool) {
	if l := loadOf(ctx); l != nil {
		if f, ok := l.job.(interface{ previous() (V, bool) }); ok {
			return f.previous()
		}
	}
	var zero V
	return zero, false
}

// previous returns the value that f is about to replace.
func (f *flight[K, V]) previous() (v V, ok bool) {
	e := f.c.before(f, f.looked)
	if e == nil || e.absent {
		return v, false
	}
	v, _ = f.c.cfg().give(e)
	return v, true
}
