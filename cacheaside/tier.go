package cacheaside

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"runtime/debug"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience/internal/panics"
)

// A tier calls the Store of a Cache. After a call to a shard of the Store has failed, the tier does not call that shard
// for a pause. It also retries the invalidations that did not reach the Store. Its keys are strings, converted by
// Config.Key. It does not depend on the memory or the loads of the Cache.
type tier struct {
	store Store
	now   func() time.Duration
	pause func() time.Duration                                 // the time for which a shard is not called after a failure
	event func(ctx context.Context, kind EventKind, err error) // reports an event
	ctx   context.Context                                      // canceled by Close
	end   context.CancelFunc
	wake  chan struct{} // has an element if there may be pending invalidations

	mu      sync.Mutex
	outage  outage
	pending map[string]*change // changes of single keys that have not reached the Store
	all     *change            // a change of all keys that has not reached the Store; nil if there is none
}

// A change is an invalidation of a key, or of all keys, that has not reached the Store. If the key is invalidated
// again, another change replaces it.
type change struct {
	tokens []string // tokens of fences that may still be in place
}

const (
	mostFences  = 100    // tokens of fences per key; fences beyond this number expire
	mostPending = 10_000 // keys with pending changes; if there are more, all keys are invalidated
	mostAtOnce  = 100    // keys per call, because a Store may serve no other process during the call
	mostCalls   = 8      // concurrent calls by one GetMany or Invalidate
)

func newTier(s Store, now, pause func() time.Duration, event func(context.Context, EventKind, error)) *tier {
	t := &tier{store: s, now: now, pause: pause, event: event, wake: make(chan struct{}, 1)}
	t.pending = make(map[string]*change)
	t.ctx, t.end = context.WithCancel(context.Background())
	return t
}

// newToken returns a unique token for the holder of a lease or a fence.
func newToken() string {
	var token [26]byte
	return string(strconv.AppendUint(strconv.AppendUint(token[:0], rand.Uint64(), 36), rand.Uint64(), 36))
}

// each calls call with the elements of all that belong to one shard, at most mostAtOnce per call. At most mostCalls
// calls run in parallel. If one of them panics, each panics when all calls have returned.
func each[T any](t *tier, all []T, key func(T) string, call func(shard uint8, some []T)) {
	if len(all) == 1 {
		call(t.store.Shard(key(all[0])), all)
		return
	}
	shards := make(map[uint8][]T)
	for _, x := range all {
		shard := t.store.Shard(key(x))
		shards[shard] = append(shards[shard], x)
	}
	var calls sync.WaitGroup
	var panicked atomic.Pointer[panics.Error]
	free := make(chan struct{}, mostCalls)
	for shard, keys := range shards {
		for some := range slices.Chunk(keys, mostAtOnce) {
			free <- struct{}{}
			calls.Go(func() {
				defer func() {
					if v := recover(); v != nil {
						panicked.Store(panics.New(fmt.Sprint(v), v, debug.Stack()))
					}
					<-free
				}()
				call(shard, some)
			})
		}
	}
	calls.Wait()
	if p := panicked.Load(); p != nil {
		panic(p) // on the goroutine of the caller, as for a single element
	}
}

// try calls a shard and records the result. If the shard must not be called now, try returns errPaused. change reports
// whether the call propagates a change to the Store. try waits for the result even if ctx is done.
func (t *tier) try(ctx context.Context, shard uint8, change bool, call func(context.Context) error) error {
	if !t.admit(shard, change) {
		return errPaused
	}
	return t.call(ctx, shard, call)
}

// admit reports whether a shard may be called. If so, the caller must record the result of the call.
func (t *tier) admit(shard uint8, change bool) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.outage.admit(shard, change, t.now(), t.pause())
}

// call calls a shard, even if the shard is down, and records the result.
func (t *tier) call(ctx context.Context, shard uint8, call func(context.Context) error) error {
	ctx, began := context.WithoutCancel(ctx), t.now()
	err := call(ctx)
	t.record(ctx, shard, began, err)
	return err
}

// record records the result of a call to a shard that started at began.
func (t *tier) record(ctx context.Context, shard uint8, began time.Duration, err error) {
	if err != nil && t.ctx.Err() != nil { // Close may have canceled the call
		return
	}
	t.mu.Lock()
	was := t.outage.down
	if err != nil {
		t.outage.fail(shard, began, t.now(), t.pause())
	} else {
		t.outage.succeed(shard, t.now())
	}
	is := t.outage.down
	t.mu.Unlock()
	switch {
	case was == 0 && is > 0:
		t.event(context.WithoutCancel(ctx), EventStoreLost, err)
	case was > 0 && is == 0:
		t.event(context.WithoutCancel(ctx), EventStoreRestored, nil)
	}
}

// trusts reports whether the Store may be queried about key, because all changes of key have reached it.
func (t *tier) trusts(key string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.pending[key] == nil && t.all == nil
}

// propagate propagates a change of keys to the Store, even if ctx is done, because the source has changed. It returns
// the errors of the keys whose change did not reach the Store. These keys are invalidated later, and until then the
// Store is not queried about them. propagate does not call a shard that is known to hang, because a Write must not wait
// for such a shard. If the change is the end of a Write, token is the token of its fence; otherwise it is "".
func (t *tier) propagate(ctx context.Context, keys []string, token string,
	call func(context.Context, ...string) error) (failed map[string]error) {
	each(t, keys, asStoreKey, func(shard uint8, some []string) {
		err := t.try(ctx, shard, true, func(ctx context.Context) error { return call(ctx, some...) })
		if err != nil {
			t.mu.Lock()
			if failed == nil {
				failed = make(map[string]error)
			}
			for _, key := range some {
				failed[key] = err
				t.addPending(key, token)
			}
			t.mu.Unlock()
		}
	})
	return failed
}

// asStoreKey returns key unchanged, for elements that are already keys of the Store.
func asStoreKey(key string) string { return key }

// invalidateAll is like propagate, for every key.
func (t *tier) invalidateAll(ctx context.Context) error {
	err := t.store.InvalidateAll(context.WithoutCancel(ctx))
	if err != nil {
		t.mu.Lock()
		t.addAll()
		t.mu.Unlock()
	}
	return err
}

// addPending records a change of key that did not reach the Store, and schedules a retry. token is the token of its
// fence, or "". The tier is locked.
func (t *tier) addPending(key, token string) {
	next := new(change)
	if was := t.pending[key]; was != nil && len(was.tokens) < mostFences {
		next.tokens = slices.Clip(was.tokens)
	}
	if token != "" {
		next.tokens = append(next.tokens, token)
	}
	t.pending[key] = next
	if len(t.pending) > mostPending {
		clear(t.pending)
		t.addAll()
	}
	t.awake()
}

// addAll is like addPending, for every key.
func (t *tier) addAll() {
	t.all = new(change)
	t.awake()
}

func (t *tier) awake() {
	select {
	case t.wake <- struct{}{}:
	default:
	}
}

// retryInvalidations retries the pending invalidations until Close.
func (t *tier) retryInvalidations() {
	for {
		select {
		case <-t.wake:
		case <-t.ctx.Done():
			return
		}
		if !t.sleep() {
			return
		}
		if _, failed := t.flushPending(t.ctx); failed != nil {
			t.awake()
		}
	}
}

// sleep waits before the next attempt. It returns false if Close has interrupted it.
func (t *tier) sleep() bool {
	select {
	case <-time.After(max(t.pause(), 50*time.Millisecond)):
		return true
	case <-t.ctx.Done():
		return false
	}
}

// flushPending retries the pending invalidations. It also calls shards that are down, because no caller waits for it,
// and because the pause of one shard must not delay the invalidations of another. It returns the keys that are still
// pending, and the last error. If all keys are pending, it returns nil instead of the keys.
func (t *tier) flushPending(ctx context.Context) (left []string, failed error) {
	t.mu.Lock()
	all, pending := t.all, maps.Clone(t.pending)
	t.mu.Unlock()
	if all != nil {
		failed = t.store.InvalidateAll(ctx)
		t.mu.Lock()
		if failed == nil && t.all == all {
			t.all = nil
		}
		t.mu.Unlock()
	}
	each(t, slices.Sorted(maps.Keys(pending)), asStoreKey, func(shard uint8, some []string) {
		err := t.call(ctx, shard, func(context.Context) error { // ctx is canceled by Close
			err := t.store.Invalidate(ctx, some...)
			for _, key := range some {
				for _, token := range pending[key].tokens {
					if err == nil {
						err = t.store.Unfence(ctx, key, token)
					}
				}
			}
			return err
		})
		t.mu.Lock()
		defer t.mu.Unlock()
		for _, key := range some {
			switch {
			case err != nil:
				left, failed = append(left, key), err
			case t.pending[key] == pending[key]:
				delete(t.pending, key)
			}
		}
	})
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.all != nil {
		left = nil
	}
	return left, failed
}

// count returns the number of keys with pending invalidations, plus one if all keys have one.
func (t *tier) count() int64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := int64(len(t.pending))
	if t.all != nil {
		n++
	}
	return n
}
