package cacheaside

import (
	"cmp"
	"context"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"time"
)

// A tier is the Store behind the memory of a Cache. It tells the Store of changes, and what it
// could not tell it tells later; a shard that does not answer it leaves alone for a while. It
// knows keys as they are written, and nothing of memory or loads.
type tier struct {
	store Store
	now   func() time.Duration
	pause func() time.Duration                                 // how long Gets skip a shard that has failed
	event func(ctx context.Context, kind EventKind, err error) // tells of an event
	ctx   context.Context                                      // ends with Close
	end   context.CancelFunc

	telling sync.WaitGroup // the goroutine that tells what is untold

	mu      sync.Mutex
	down    map[uint8]time.Duration // shards that failed last, with the end of the pause of each
	untold  map[string]untold       // changes of keys that the Store must still be told of
	all     int                     // number of the last change of all keys that it must be told of, or 0
	changes int
	tells   bool // a goroutine tells them
	closed  bool
}

// An untold is a change that the Store must still be told of.
type untold struct {
	key    string
	change int      // number of the last change of the key
	tokens []string // of fences that may still stand
}

const (
	mostUntold = 10_000 // keys; beyond it, the Store is told to invalidate all
	mostTokens = 100    // of one key; further fences fall by themselves
	mostAtOnce = 100    // keys of one call of the Store, which serves no other process meanwhile
	mostCalls  = 8      // concurrent calls of one GetMany or Invalidate
	unasked    = time.Minute
)

func newTier(s Store, now, pause func() time.Duration, event func(context.Context, EventKind, error)) *tier {
	t := &tier{store: s, now: now, pause: pause, event: event, down: make(map[uint8]time.Duration), untold: make(map[string]untold)}
	t.ctx, t.end = context.WithCancel(context.Background())
	return t
}

// newToken returns a unique token for the holder of a lease or a fence.
func newToken() string {
	return strconv.FormatUint(rand.Uint64(), 36) + strconv.FormatUint(rand.Uint64(), 36)
}

// each calls call for the indexes of n keys, those of one shard together, some of them at once.
func (t *tier) each(n int, key func(int) string, call func(shard uint8, some []int)) {
	if n == 1 {
		call(t.store.Shard(key(0)), []int{0})
		return
	}
	shards := make(map[uint8][]int)
	for i := range n {
		shard := t.store.Shard(key(i))
		shards[shard] = append(shards[shard], i)
	}
	var calls sync.WaitGroup
	free := make(chan struct{}, mostCalls)
	for shard, all := range shards {
		for some := range slices.Chunk(all, mostAtOnce) {
			if len(some) == n {
				call(shard, some)
				return
			}
			free <- struct{}{}
			calls.Go(func() {
				defer func() { <-free }()
				call(shard, some)
			})
		}
	}
	calls.Wait()
}

// mayAsk reports whether a shard may be asked now. When the pause after a failure is over, one
// call tries it, and the others wait for the outcome.
func (t *tier) mayAsk(shard uint8) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	until, down := t.down[shard]
	if !down {
		return true
	}
	now := t.now()
	if now < until {
		return false
	}
	t.down[shard] = now + t.pause()
	return true
}

// ended notes how a call of a shard has ended.
func (t *tier) ended(ctx context.Context, shard uint8, err error) {
	if err != nil && t.ctx.Err() != nil { // Close may have ended the call
		return
	}
	t.mu.Lock()
	was, now := len(t.down), t.now()
	if err != nil {
		t.down[shard] = now + t.pause()
	} else if was > 0 {
		delete(t.down, shard)
		maps.DeleteFunc(t.down, func(_ uint8, until time.Duration) bool { return until+unasked <= now }) // nobody asks it
	}
	is := len(t.down)
	t.mu.Unlock()
	switch {
	case was == 0 && is > 0:
		t.event(context.WithoutCancel(ctx), EventStoreLost, err)
	case was > 0 && is == 0:
		t.event(context.WithoutCancel(ctx), EventStoreRestored, nil)
	}
}

// trusts reports whether the Store may be asked about key: it has been told of its changes.
func (t *tier) trusts(key string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	_, untold := t.untold[key]
	return !untold && t.all == 0
}

// invalidate tells the Store that keys have changed. It returns the error of each, or nil; what
// could not be told is told later, and until then no question about the key is asked.
func (t *tier) invalidate(ctx context.Context, keys []string) []error {
	return t.tell(ctx, keys, "", t.store.Invalidate)
}

// expire is invalidate for keys whose values are no longer fresh.
func (t *tier) expire(ctx context.Context, keys []string) []error {
	return t.tell(ctx, keys, "", t.store.Expire)
}

// fence begins the write of a key, and returns how long that may take. It waits for the answer
// even if ctx ends, because a fence that nobody removes would stand until it falls.
func (t *tier) fence(ctx context.Context, key, token string) (time.Duration, error) {
	window, err := t.store.Fence(context.WithoutCancel(ctx), key, token)
	t.ended(ctx, t.store.Shard(key), err)
	if err != nil {
		return 0, err
	}
	return window, nil
}

// unfence ends the write of a key, and is invalidate.
func (t *tier) unfence(ctx context.Context, key, token string) []error {
	return t.tell(ctx, []string{key}, token, func(ctx context.Context, keys ...string) error {
		return t.store.Unfence(ctx, keys[0], token)
	})
}

// tell tells the Store of a change, even of a shard that is left alone otherwise, and even if ctx
// has ended: the change has been made.
func (t *tier) tell(ctx context.Context, keys []string, token string, call func(context.Context, ...string) error) []error {
	errs := make([]error, len(keys))
	if len(keys) == 0 {
		return nil
	}
	t.each(len(keys), func(i int) string { return keys[i] }, func(shard uint8, some []int) {
		part := make([]string, len(some))
		for n, i := range some {
			part[n] = keys[i]
		}
		err := call(context.WithoutCancel(ctx), part...)
		if err != nil {
			t.keep(token, part)
			for _, i := range some {
				errs[i] = err
			}
		}
		t.ended(ctx, shard, err)
	})
	return errs
}

// keep keeps changes of keys that could not be told.
func (t *tier) keep(token string, keys []string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, key := range keys {
		t.changes++
		u := t.untold[key]
		u.key, u.change = key, t.changes
		if token != "" && len(u.tokens) < mostTokens {
			u.tokens = append(slices.Clip(u.tokens), token)
		}
		t.untold[key] = u
	}
	if len(t.untold) > mostUntold {
		clear(t.untold)
		t.all = t.changes
	}
	t.tellLater()
}

// invalidateAll is invalidate for every key.
func (t *tier) invalidateAll(ctx context.Context) error {
	err := t.store.InvalidateAll(context.WithoutCancel(ctx))
	if err != nil {
		t.mu.Lock()
		t.changes++
		t.all = t.changes
		t.tellLater()
		t.mu.Unlock()
	}
	return err
}

// tellLater begins to tell what is untold. The tier is locked.
func (t *tier) tellLater() {
	if t.tells || t.closed {
		return
	}
	t.tells = true
	t.telling.Go(func() {
		for t.sleep() {
			if _, err := t.tellUntold(t.ctx); err == nil {
				t.mu.Lock()
				t.tells = len(t.untold) > 0 || t.all > 0
				goes := t.tells
				t.mu.Unlock()
				if !goes {
					return
				}
			}
		}
	})
}

// sleep waits before the Store is tried again, and reports whether Close has not ended it.
func (t *tier) sleep() bool {
	timer := time.NewTimer(max(t.pause(), 50*time.Millisecond))
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-t.ctx.Done():
		return false
	}
}

// tellUntold tells the Store what it could not be told before, in the order of the changes, but
// no more of a shard that does not answer. It returns the keys that are still untold, nil for all
// of them, and why.
func (t *tier) tellUntold(ctx context.Context) (left []string, failed error) {
	t.mu.Lock()
	todo := slices.SortedFunc(maps.Values(t.untold), func(a, b untold) int { return cmp.Compare(a.change, b.change) })
	all := t.all
	t.mu.Unlock()
	deaf := make(map[uint8]bool)
	for _, u := range todo {
		shard := t.store.Shard(u.key)
		var err error
		switch {
		case deaf[shard]:
			left = append(left, u.key)
			continue
		case len(u.tokens) == 0:
			err = t.store.Invalidate(ctx, u.key)
		default:
			for i := 0; i < len(u.tokens) && err == nil; i++ {
				err = t.store.Unfence(ctx, u.key, u.tokens[i])
			}
		}
		if err != nil {
			deaf[shard], failed, left = true, err, append(left, u.key)
		} else {
			t.told(ctx, func() bool {
				is := t.untold[u.key].change == u.change // it has not changed again
				if is {
					delete(t.untold, u.key)
				}
				return is
			})
		}
		t.ended(ctx, shard, err)
	}
	if all > 0 {
		if err := t.store.InvalidateAll(ctx); err != nil {
			return nil, err
		}
		t.told(ctx, func() bool {
			is := t.all == all
			if is {
				t.all = 0
			}
			return is
		})
	}
	return left, failed
}

func (t *tier) told(ctx context.Context, remove func() bool) {
	t.mu.Lock()
	removed := remove()
	t.mu.Unlock()
	if removed {
		t.event(ctx, EventReinvalidated, nil)
	}
}

// count returns the number of keys that are untold, plus one for all of them.
func (t *tier) count() int64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return int64(len(t.untold) + min(t.all, 1))
}

// stop ends the goroutines of the tier.
func (t *tier) stop() {
	t.mu.Lock()
	t.closed = true
	t.mu.Unlock()
	t.end()
	t.telling.Wait()
}

// tellLast tries once more to tell what is untold, after Close has ended everything else.
func (t *tier) tellLast() (left []string, err error) {
	if t.count() == 0 {
		return nil, nil
	}
	return t.tellUntold(context.Background())
}

// watch hears of changes by other processes until Close: it calls up when it hears them,
// heard for each, and down when it ceases to, or cannot begin to.
func (t *tier) watch(up func(), heard func(key string), down func(error)) {
	for t.ctx.Err() == nil {
		err := t.store.Watch(t.ctx, up, heard)
		down(err)
		t.sleep()
	}
}
