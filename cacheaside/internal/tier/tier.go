// Package tier is the cache that processes share, behind the memory of each: it asks a
// Store and tells it of changes. What it could not tell, it tells later; a shard that does
// not answer, it skips for a while. It knows keys and values as they are written, and
// nothing of memory or loads.
package tier

import (
	"context"
	"iter"
	"math/rand/v2"
	"strconv"
	"sync"
	"time"
)

// A Store is cacheaside.Store, which has the documentation.
type Store interface {
	Shard(key string) uint8
	Acquire(ctx context.Context, asks ...Ask) ([]Lookup, error)
	Fill(ctx context.Context, values ...Filling) ([]bool, error)
	Release(ctx context.Context, key, token string) error
	Invalidate(ctx context.Context, keys ...string) error
	Expire(ctx context.Context, keys ...string) error
	InvalidateAll(ctx context.Context) error
	Fence(ctx context.Context, key, token string) (time.Duration, error)
	Unfence(ctx context.Context, key, token string) error
	Watch(ctx context.Context, up func(), heard func(key string)) error
}

// An Ask is what a cache asks a Store about one key.
type Ask struct {
	Key     string
	Token   string // identifies the caller that wants the lease; "" only looks
	Refresh bool   // take the lease even if the value is fresh
}

// A Lookup is the answer of a Store to an Ask.
type Lookup struct {
	State State
	Value []byte        // nil if there is none
	Fresh time.Duration // how much longer Value is fresh; negative: how long ago it ceased to be
	Wait  time.Duration // if Busy: how much longer the lease lasts
	Grant string        // if Leased: what Fill must present
}

// A Filling is a value for a Store. It is fresh for Fresh from now and deleted after Keep.
type Filling struct {
	Key         string
	Grant       string
	Value       []byte
	Fresh, Keep time.Duration
}

// A State says what the caller of Acquire does next.
type State string

const (
	Hit    State = "hit"    // use the value, which is fresh
	Leased State = "leased" // load the value, then call Fill or Release
	Busy   State = "busy"   // another process loads the value; ask again
	Fenced State = "fenced" // a write is under way; load the value and do not keep it
	Missed State = "missed" // there is no fresh value, and the Ask did not want the lease
)

// A Host is the cache in front of a Tier.
type Host struct {
	Now      func() time.Duration // since the cache began
	Pause    func() time.Duration // how long a shard that has failed is skipped
	Go       func(func())         // starts a goroutine for which the Close of the cache waits
	Lost     func(ctx context.Context, err error)
	Restored func(ctx context.Context)
	Retold   func(ctx context.Context) // the Store has been told of a key, or of all, at last
}

// A Tier asks a Store and tells it of changes.
type Tier struct {
	Host
	store  Store
	ctx    context.Context // ends with Close
	cancel context.CancelFunc

	outage outage
	fills  [256]fillQueue // one for each shard

	// What the Store must still be told: invalidations that it could not be told of
	// (untold) or may have lost (doubted), and leases that it may have granted without an
	// answer.
	untold, doubted untold
	abandoned       abandoned
	recent          recent
	behind          sync.Mutex // guards:
	catchingUp      bool       // a goroutine is telling it
	closing         bool
}

// New returns a Tier.
func New(store Store, host Host) *Tier {
	t := &Tier{Host: host, store: store}
	t.outage.pause = host.Pause
	for i := range t.fills {
		t.fills[i].turn = make(chan struct{}, 1)
	}
	t.ctx, t.cancel = context.WithCancel(context.Background())
	return t
}

func (t *Tier) shardOf(key string) int { return int(t.store.Shard(key)) }

// byShard groups items by the shard of their keys, in the order of the first of each.
func byShard[T any](t *Tier, items []T, key func(T) string) iter.Seq2[int, []T] {
	var order []int
	shards := make(map[int][]T)
	for _, item := range items {
		shard := t.shardOf(key(item))
		if shards[shard] == nil {
			order = append(order, shard)
		}
		shards[shard] = append(shards[shard], item)
	}
	return func(yield func(int, []T) bool) {
		for _, shard := range order {
			if !yield(shard, shards[shard]) {
				return
			}
		}
	}
}

// mostAtOnce bounds the keys of one call of the Store, which serves no other process
// meanwhile. mostCalls bounds the concurrent calls of one GetMany or Invalidate.
const (
	mostAtOnce = 100
	mostCalls  = 8
)

// newToken returns a unique token for the holder of a lease or a fence.
func newToken() string {
	return strconv.FormatUint(rand.Uint64(), 36) + strconv.FormatUint(rand.Uint64(), 36)
}

// sleep waits before a background goroutine tries the Store again, and reports whether
// Close has not ended it.
func (t *Tier) sleep() bool {
	timer := time.NewTimer(max(t.Pause(), 50*time.Millisecond))
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-t.ctx.Done():
		return false
	}
}

// Watch hears of changes by other processes until Close: it calls up when it hears them,
// heard for each, and down when it ceases to, or cannot begin to.
func (t *Tier) Watch(up func(), heard func(key string), down func(error)) {
	for t.ctx.Err() == nil {
		hears := false
		err := guarded(func() error {
			return t.store.Watch(t.ctx, func() {
				hears = true
				t.doubtRecent()
				up()
			}, heard)
		})
		if hears {
			t.doubtRecent()
		}
		down(err)
		t.sleep()
	}
}
