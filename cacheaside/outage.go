package cacheaside

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
)

// An outage is what is known of the shards of the Store that do not answer. A shard
// that has failed is left alone for a pause; then one call tries it, and another
// pause begins. When two shards have failed and none has answered in between, the
// whole Store is left alone, so that a Store that hangs is not waited for once for
// each of its shards.
type outage struct {
	pause    time.Duration
	troubled atomic.Bool // something is down: while false, asking takes no lock

	mu    sync.Mutex
	down  map[int]time.Duration // the shards that failed last, each with the end of its pause
	row   map[int]struct{}      // the shards that failed since one has answered
	until time.Duration         // the end of the pause of the whole Store
	last  error
}

// allShards stands for every shard where a call is about all of them.
const allShards = -1

// wholly reports whether the whole Store is down. The outage is locked.
func (o *outage) wholly() bool {
	_, all := o.row[allShards]
	return all || len(o.row) > 1
}

// mayAsk reports whether shard is to be asked now; if not, the error says why.
func (o *outage) mayAsk(shard int, now time.Duration) error {
	if !o.troubled.Load() {
		return nil
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	until, down := o.down[shard]
	whole := o.wholly()
	if whole {
		until = max(until, o.until)
	}
	if now < until {
		return fmt.Errorf("not asked for %v, because of: %w", (until - now).Round(time.Millisecond), o.last)
	}
	// This call tries; the others wait until it is known how it went.
	if down {
		o.down[shard] = now + o.pause
	}
	if whole {
		o.until = now + o.pause
	}
	return nil
}

// failed notes that shard did not answer; it reports whether all was well before.
func (o *outage) failed(shard int, now time.Duration, err error) (first bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.down == nil {
		o.down, o.row = make(map[int]time.Duration), make(map[int]struct{})
	}
	first = len(o.down) == 0
	o.down[shard], o.row[shard] = now+o.pause, struct{}{}
	o.until, o.last = now+o.pause, err
	o.troubled.Store(true)
	return first
}

// worked notes that shard has answered; it reports whether nothing is down any more.
func (o *outage) worked(shard int, now time.Duration) (over bool) {
	if !o.troubled.Load() {
		return false
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.down) == 0 {
		return false
	}
	if shard == allShards || o.wholly() {
		clear(o.down)
	}
	clear(o.row)
	delete(o.down, shard)
	for other, until := range o.down {
		if until <= now { // to be asked in any case
			delete(o.down, other)
		}
	}
	if len(o.down) > 0 {
		return false
	}
	o.troubled.Store(false)
	return true
}

func (s *shared[K, V]) mayAsk(shard int) error { return s.outage.mayAsk(shard, s.c.now()) }

// failed leaves shard alone for a while.
func (s *shared[K, V]) failed(ctx context.Context, shard int, err error) {
	if s.outage.failed(shard, s.c.now(), err) {
		s.doubtRecent()
		s.c.tellAll(ctx, StoreDown, err)
	}
}

func (s *shared[K, V]) worked(ctx context.Context, shard int) {
	if s.outage.worked(shard, s.c.now()) {
		s.doubtRecent()
		s.c.tellAll(ctx, StoreUp, nil)
	}
}
