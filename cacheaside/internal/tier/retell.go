package tier

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"sync"
	"time"
)

// trusts reports whether the value of key in the Store may be used.
func (t *Tier) trusts(key string) bool { return !t.untold.has(key) && !t.doubted.has(key) }

// catchUp makes sure that a goroutine is telling the Store what it has missed.
func (t *Tier) catchUp() {
	t.behind.Lock()
	defer t.behind.Unlock()
	if t.catchingUp || t.closing {
		return
	}
	t.catchingUp = true
	t.Go(t.retell)
}

// retell tells the Store what it has missed.
func (t *Tier) retell() {
	over := false
	defer func() {
		if !over && !t.caughtUp() { // a hook has ended the goroutine
			t.Go(t.retell)
		}
	}()
	for !over && t.sleep() {
		t.tellUntold(t.ctx)
		over = t.caughtUp()
	}
}

// caughtUp reports whether there is nothing left to tell. Then nobody is telling it.
func (t *Tier) caughtUp() bool {
	t.behind.Lock()
	defer t.behind.Unlock()
	t.catchingUp = !t.closing && (t.untold.len() > 0 || t.doubted.len() > 0 || t.abandoned.len() > 0)
	return !t.catchingUp
}

// tellUntold tells the Store once. What one part of it fails with delays no other.
func (t *Tier) tellUntold(ctx context.Context) {
	_ = t.tellEach(ctx, &t.doubted)
	_ = t.tellEach(ctx, &t.untold) // may raise doubts
	t.releaseAbandoned(ctx)
}

// tellEach tells the Store of u until two calls have failed, and returns the first error. It
// begins with the change of all keys, and with the shards that have failed least recently.
func (t *Tier) tellEach(ctx context.Context, u *untold) (first error) {
	keys, all := u.snapshot()
	failures := 0
	fail := func(shard int, asked time.Duration, err error) {
		t.failed(ctx, shard, asked, err)
		if failures++; failures == 1 {
			first = err
		}
	}
	if all > 0 {
		asked := t.Now()
		if err := guarded(func() error { return t.store.InvalidateAll(ctx) }); err != nil {
			fail(allShards, asked, err) // perhaps of one shard
		} else {
			t.worked(ctx, allShards)
			t.recent.note(notice{all: true, at: t.Now()})
			u.toldAll(all)
			if u == &t.untold {
				t.Retold(ctx)
			}
		}
	}
	shards, failed := maps.Collect(byShard(t, keys, func(k untoldKey) string { return k.key })), t.outage.lastFailures()
	order := slices.SortedFunc(maps.Keys(shards), func(a, b int) int {
		return cmp.Or(cmp.Compare(failed[a], failed[b]), cmp.Compare(shards[a][0].change, shards[b][0].change))
	})
	for _, shard := range order {
		asked := t.Now()
		if err := guarded(func() error { return t.catchUpShard(ctx, u, shard, shards[shard]) }); err != nil {
			fail(shard, asked, err)
		}
		if failures > 1 { // the whole Store may be down
			break
		}
	}
	return first
}

// catchUpShard tells the Store of keys of one shard until a call fails.
func (t *Tier) catchUpShard(ctx context.Context, u *untold, shard int, keys []untoldKey) error {
	var plain []untoldKey
	for _, k := range keys {
		for _, token := range k.tokens {
			if err := t.store.Unfence(ctx, k.key, token); err != nil {
				return err
			}
		}
		if len(k.tokens) == 0 {
			plain = append(plain, k)
		} else {
			t.told(ctx, u, shard, k)
		}
	}
	for some := range slices.Chunk(plain, mostAtOnce) {
		names := make([]string, len(some))
		for i, k := range some {
			names[i] = k.key
		}
		if err := t.store.Invalidate(ctx, names...); err != nil {
			return err
		}
		t.told(ctx, u, shard, some...)
	}
	return nil
}

// told records that the Store has been told of keys of one shard.
func (t *Tier) told(ctx context.Context, u *untold, shard int, keys ...untoldKey) {
	t.worked(ctx, shard)
	for _, k := range keys {
		t.recent.note(notice{key: k.key, at: t.Now()})
		u.told(k)
		if u == &t.untold {
			t.Retold(ctx)
		}
	}
}

// Untold returns the number of keys that the Store must still be told about.
func (t *Tier) Untold() int64 { return t.untold.len() }

// Close ends the goroutines and tells the Store one last time. It returns the keys of
// which it could not, nil for all keys.
func (t *Tier) Close() (keys []string, err error) {
	t.behind.Lock()
	t.closing = true
	t.behind.Unlock()
	t.cancel()
	if t.untold.len() == 0 {
		return nil, nil
	}
	if err = t.tellEach(context.Background(), &t.untold); err == nil {
		return nil, nil
	}
	untold, all := t.untold.snapshot()
	if all == 0 && len(untold) == 0 { // told meanwhile
		return nil, nil
	}
	if all == 0 {
		for _, k := range untold {
			keys = append(keys, k.key)
		}
		slices.Sort(keys)
	}
	return keys, err
}

// recent records what the Store was told last. A Store that fails over to a lagging
// replica forgets some of it, and is told again after the connection was lost.
type recent struct {
	mu    sync.Mutex
	tells [512]notice
	next  int
}

type notice struct {
	key  string
	all  bool // all keys
	at   time.Duration
	told bool // false if nothing was noted here yet
}

// recentFor is the replication lag that is covered, unless the Store was told more than
// len(recent.tells) times in that time.
const recentFor = 10 * time.Second

func (r *recent) note(x notice) {
	r.mu.Lock()
	defer r.mu.Unlock()
	x.told = true
	r.tells[r.next] = x
	r.next = (r.next + 1) % len(r.tells)
}

// since returns what was told at or after a time.
func (r *recent) since(at time.Duration) (tells []notice) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, x := range r.tells {
		if x.told && x.at >= at {
			tells = append(tells, x)
		}
	}
	return tells
}

// doubtRecent stops this process from using the Store for the keys that it was told
// about recently, until it has been told again.
func (t *Tier) doubtRecent() {
	tells := t.recent.since(t.Now() - recentFor)
	for _, x := range tells {
		if x.all {
			t.doubted.addAll()
		} else {
			t.doubted.add(x.key, "")
		}
	}
	if len(tells) > 0 {
		t.catchUp()
	}
}
