package cacheaside

import (
	"context"
	"fmt"
	"time"

	"github.com/go-resilience/resilience/cacheaside/internal/entry"
	"github.com/go-resilience/resilience/internal/linger"
)

// A load may call Get with its ctx, on its own Cache or another. It keeps its slot
// meanwhile. Two Gets would only wait for the load that makes them, and fail with
// ErrRecursive: one of a key that this load is loading, or a load around it; and one
// whose load waits for a slot of the Cache, of which a load around it holds one.

// A loading is a call of Load or LoadMany, as its ctx knows it.
type loading struct {
	ctx    context.Context // has the values of caller, and ends separately
	cancel context.CancelFunc
	caller context.Context // of the call that began the load
	job    any             // the *task or *batch that loads
	terms  entry.Terms     // set by the load for its result
}

type loadKey struct{}

func (l *loading) init(caller context.Context, deadline time.Time, job any) {
	l.caller, l.job = caller, job
	ctx := context.WithValue(linger.Apart(context.WithoutCancel(caller)), loadKey{}, l)
	l.ctx, l.cancel = context.WithDeadline(ctx, deadline)
}

// loadOf returns the load that ctx belongs to, or nil.
func loadOf(ctx context.Context) *loading {
	l, _ := ctx.Value(loadKey{}).(*loading)
	return l
}

// A member is a job of a Cache with keys of type K.
type member[K comparable] interface {
	of(cache any) bool
	loads(key K) bool
}

// around reports whether a call with ctx is made by a load of c, or by one that such a
// load waits for, and whether one of these loads is loading key.
func (c *Cache[K, V]) around(ctx context.Context, key K) (own, same bool) {
	for l := loadOf(ctx); l != nil; l = loadOf(l.caller) {
		if l.ctx.Err() != nil { // it no longer waits
			continue
		}
		if job, ok := l.job.(member[K]); ok && job.of(c) {
			own, same = true, same || job.loads(key)
		}
	}
	return own, same
}

func (c *Cache[K, V]) recursive(key K, why string) error {
	return fmt.Errorf("%s%v: %s: %w", prefix(c.cfg().Name), key, why, ErrRecursive)
}

// SetTTL makes the result of a load fresh for ttl, without jitter, instead of
// Config.TTL. ctx is the ctx of the load. In LoadMany it applies to all results. It also
// applies to ErrNotFound. Zero or less means that the result is not kept. If Middleware
// repeats the load, only the last attempt counts. Outside a load SetTTL has no effect.
// Call it on the goroutine of the load.
func SetTTL(ctx context.Context, ttl time.Duration) {
	if l := loadOf(ctx); l != nil {
		l.terms.TTL, l.terms.Timed = ttl, true
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
