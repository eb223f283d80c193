package cacheaside

import (
	"context"
	"fmt"
	"slices"
	"time"
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
	job    any             // the *flight or *batch that loads
	terms  terms           // set by the load for its result
}

type loadKey struct{}

func (l *loading) init(caller context.Context, deadline time.Time, job any) {
	l.caller, l.job = caller, job
	ctx := context.WithValue(context.WithoutCancel(caller), loadKey{}, l)
	l.ctx, l.cancel = context.WithDeadline(ctx, deadline)
}

// loadOf returns the load that ctx belongs to, or nil.
func loadOf(ctx context.Context) *loading {
	l, _ := ctx.Value(loadKey{}).(*loading)
	return l
}

// around reports whether a call with ctx is made by a load of c, or by one that such a
// load waits for, and whether one of these loads is loading key.
func (c *Cache[K, V]) around(ctx context.Context, key K) (own, same bool) {
	for l := loadOf(ctx); l != nil; l = loadOf(l.caller) {
		if l.ctx.Err() != nil { // it no longer waits
			continue
		}
		switch job := l.job.(type) {
		case *flight[K, V]:
			own = own || job.c == c
			same = same || job.c == c && job.key == key
		case *batch[K, V]:
			own = own || job.c == c
			same = same || job.c == c && slices.ContainsFunc(job.needed, func(f *flight[K, V]) bool { return f.key == key })
		}
	}
	return own, same
}

// queue records that f begins or ceases to wait for a slot.
func (f *flight[K, V]) queue(waits bool) {
	f.shard.mu.Lock()
	defer f.shard.mu.Unlock()
	f.queued = waits
	switch {
	case !waits:
		f.jam = nil
	case f.jam != nil:
		close(f.jam)
	}
}

// jammed returns a channel that is closed once f waits for a slot.
func (f *flight[K, V]) jammed() <-chan struct{} {
	f.shard.mu.Lock()
	defer f.shard.mu.Unlock()
	if f.jam == nil {
		f.jam = make(chan struct{})
		if f.queued {
			close(f.jam)
		}
	}
	return f.jam
}

func (c *Cache[K, V]) recursive(key K, why string) error {
	return fmt.Errorf("%s%v: %s: %w", prefix(c.cfg().Name), key, why, ErrRecursive)
}
