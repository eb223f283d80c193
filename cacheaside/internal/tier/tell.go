package tier

import (
	"context"
	"fmt"
	"runtime/debug"
	"slices"
	"sync"
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

func (t *Tier) tell(ctx context.Context, keys []string, token string, told func(int),
	call func(context.Context, []string) error) []error {
	// The change has been made. It must be told even if the caller has left.
	ctx = context.WithoutCancel(ctx)
	errs := make([]error, len(keys))
	tell := func(shard int, some []change) {
		asked, skipped := t.Now(), t.mayAsk(shard)
		err := skipped
		if skipped == nil {
			keys := make([]string, len(some))
			for i, ch := range some {
				keys[i] = ch.key
			}
			err = guarded(func() error { return call(ctx, keys) })
		}
		for _, ch := range some {
			if err != nil {
				t.untold.add(ch.key, token)
				errs[ch.i] = err
			} else {
				t.recent.note(notice{key: ch.key, at: t.Now()})
			}
			told(ch.i)
		}
		if err != nil {
			t.catchUp()
		}
		if skipped == nil {
			t.ended(ctx, shard, asked, err)
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
	return errs
}

// A change is a key that the Store must be told about, by its index.
type change struct {
	i   int
	key string
}

// guarded turns a panic of the Store into an error: it has not answered.
func guarded(call func() error) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = fmt.Errorf("the Store panicked: %v\n%s", v, debug.Stack())
		}
	}()
	return call()
}

// complete returns err, or an error if the Store has not answered about each key.
func complete(answers, keys int, err error) error {
	if err == nil && answers != keys {
		return fmt.Errorf("the Store gave %d answers about %d keys", answers, keys)
	}
	return err
}

// InvalidateAll is Invalidate for every key. It calls told once.
func (t *Tier) InvalidateAll(ctx context.Context, told func()) error {
	ctx = context.WithoutCancel(ctx)
	asked, skipped := t.Now(), t.mayAsk(allShards)
	err := skipped
	if skipped == nil {
		err = guarded(func() error { return t.store.InvalidateAll(ctx) })
	}
	if err != nil {
		t.untold.addAll()
		t.catchUp()
	} else {
		t.recent.note(notice{all: true, at: t.Now()})
	}
	told()
	if skipped == nil {
		t.ended(ctx, allShards, asked, err)
	}
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
	err = guarded(func() (err error) {
		f.Window, err = t.store.Fence(context.WithoutCancel(ctx), key, f.token)
		return err
	})
	if err != nil {
		f.Window = 0
	}
	t.ended(ctx, shard, asked, err)
	return f, err
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
