package tier

import (
	"context"
	"fmt"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Invalidate tells the Store of keys that have changed, and calls told for each, by its
// index, once the Store was told or could not be. It returns the error for each key, or
// nil. If the Store could not be told, it is told later; until then no question about the
// key is answered.
func (t *Tier) Invalidate(ctx context.Context, keys []string, told func(i int)) []error {
	return t.tell(ctx, keys, "", told, func(ctx context.Context, keys []string) error {
		return t.store.Invalidate(ctx, keys...)
	})
}

// Expire is Invalidate for keys whose values are no longer fresh.
func (t *Tier) Expire(ctx context.Context, keys []string, told func(i int)) []error {
	return t.tell(ctx, keys, "", told, func(ctx context.Context, keys []string) error {
		return t.store.Expire(ctx, keys...)
	})
}

// Drop is Invalidate for a key that no longer exists in the store of record.
func (t *Tier) Drop(ctx context.Context, key string) { t.Invalidate(ctx, []string{key}, func(int) {}) }

func (t *Tier) tell(ctx context.Context, keys []string, token string, told func(int),
	call func(context.Context, []string) error) []error {
	// The change has been made. It must be told even if the caller has left.
	ctx = context.WithoutCancel(ctx)
	errs, failed := make([]error, len(keys)), new(atomic.Bool)
	tell := func(shard int, some []change) {
		err := t.tellShard(ctx, shard, some, call)
		for _, ch := range some {
			if err != nil {
				t.untold.add(ch.key, token)
				errs[ch.i] = err
				failed.Store(true)
			}
			told(ch.i)
		}
	}
	changes := make([]change, len(keys))
	for i, key := range keys {
		changes[i] = change{i, key}
	}
	var telling sync.WaitGroup
	free := make(chan struct{}, mostCalls)
	for shard, changes := range byShard(t, changes, func(ch change) string { return ch.key }) {
		for some := range slices.Chunk(changes, mostAtOnce) {
			if len(some) == len(keys) { // the usual case
				tell(shard, some)
				continue
			}
			telling.Go(func() {
				free <- struct{}{}
				defer func() { <-free }()
				tell(shard, some)
			})
		}
	}
	telling.Wait()
	if failed.Load() {
		t.catchUp()
	}
	return errs
}

// A change is a key that the Store must be told about, by its index.
type change struct {
	i   int
	key string
}

// tellShard tells the Store of changes to keys of one shard, unless the shard is down.
func (t *Tier) tellShard(ctx context.Context, shard int, changes []change,
	call func(context.Context, []string) error) error {
	asked := t.Now()
	if err := t.mayAsk(shard); err != nil {
		return err
	}
	keys := make([]string, len(changes))
	for i, ch := range changes {
		keys[i] = ch.key
	}
	if err := guarded(func() error { return call(ctx, keys) }); err != nil {
		t.failed(ctx, shard, asked, err)
		return err
	}
	for _, key := range keys {
		t.recent.note(notice{key: key, at: t.Now()})
	}
	t.worked(ctx, shard)
	return nil
}

// guarded turns a panic of the Store into an error: memory must be told all the same, and a
// goroutine of the cache has no caller to pass it to.
func guarded(call func() error) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = fmt.Errorf("the Store panicked: %v\n%s", v, debug.Stack())
		}
	}()
	return call()
}

// InvalidateAll is Invalidate for every key.
func (t *Tier) InvalidateAll(ctx context.Context) error {
	ctx = context.WithoutCancel(ctx)
	asked := t.Now()
	err := t.mayAsk(allShards)
	if err == nil {
		if err = guarded(func() error { return t.store.InvalidateAll(ctx) }); err == nil {
			t.recent.note(notice{all: true, at: t.Now()})
			t.worked(ctx, allShards)
			return nil
		}
		t.failed(ctx, allShards, asked, err)
	}
	t.untold.addAll()
	t.catchUp()
	return err
}

// A Fence keeps the value of a key out of the Store during a write. The zero Fence does
// not.
type Fence struct {
	Window time.Duration // how long the write may take; 0 if the Store has not answered
	token  string        // "" if it was not asked
}

// Fence begins the write of a key.
func (t *Tier) Fence(ctx context.Context, key string) (f Fence, err error) {
	shard, asked := t.shardOf(key), t.Now()
	if err := t.mayAsk(shard); err != nil {
		return f, err
	}
	f.token = newToken()
	// Wait for the answer even if ctx ends: a fence that nobody removes would stand until
	// it falls.
	if f.Window, err = t.store.Fence(context.WithoutCancel(ctx), key, f.token); err != nil {
		t.failed(ctx, shard, asked, err)
		return Fence{token: f.token}, err
	}
	t.worked(ctx, shard)
	return f, nil
}

// Unfence ends the write of a key, the only one of keys: it is Invalidate, and removes the
// fence.
func (t *Tier) Unfence(ctx context.Context, keys []string, f Fence, told func(i int)) []error {
	return t.tell(ctx, keys, f.token, told, func(ctx context.Context, keys []string) error {
		if f.token == "" {
			return t.store.Invalidate(ctx, keys...)
		}
		return t.store.Unfence(ctx, keys[0], f.token)
	})
}
