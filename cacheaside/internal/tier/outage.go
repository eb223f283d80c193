package tier

import (
	"context"
	"fmt"
	"maps"
	"sync"
	"sync/atomic"
	"time"
)

// An outage records which shards of the Store do not answer. A shard that has failed is
// skipped for a pause. Then one call tries it, and another pause begins. If two shards
// have failed after making their callers wait, and none has answered since, or if a call
// about all shards was the first to fail, the whole Store is skipped: a Store that hangs is
// then not waited for once for each shard.
// Meanwhile the shards that have not failed are probed in the background, one at a time,
// since a cluster may have lost only one server.
type outage struct {
	pause    func() time.Duration
	troubled atomic.Bool  // a shard is down; while false, a call takes no lock
	answered atomic.Int64 // when a shard last answered, as a time.Duration

	mu    sync.Mutex
	down  map[int]time.Duration // shards that failed last, with the end of the pause of each
	row   map[int]struct{}      // shards that timed out since a shard last answered
	until time.Duration         // end of the pause of the whole Store
	last  error
	when  map[int]time.Duration // when each shard last failed, also of those that are not down

	probing bool
}

// atOnce is the longest that a failing call can take without counting as a wait.
const atOnce = 10 * time.Millisecond

// unasked is when a shard that is down no longer counts, because nobody asks it.
const unasked = time.Minute

// allShards stands for every shard in a call about all of them.
const allShards = -1

// wholly reports whether the whole Store is down. The outage is locked.
func (o *outage) wholly() bool {
	_, all := o.row[allShards]
	return all || len(o.row) > 1
}

// mayAsk returns nil if shard may be asked now, otherwise an error that says why not.
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
		return fmt.Errorf("skipped for %v after: %w", (until - now).Round(time.Millisecond), o.last)
	}
	// This call tries. Other calls wait for its outcome.
	if down {
		o.down[shard] = now + o.pause()
	}
	if whole {
		o.until = now + o.pause()
	}
	return nil
}

// beginProbe reports whether the caller is to probe shard now.
func (o *outage) beginProbe(shard int) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	_, down := o.down[shard]
	if o.probing || down {
		return false
	}
	o.probing = true
	return true
}

func (o *outage) endProbe() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.probing = false
}

// failed records a failed call of shard. It reports whether shard was not down before, and
// whether nothing was.
func (o *outage) failed(shard int, asked, now time.Duration, err error) (begun, first bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.down == nil {
		o.down, o.row, o.when = make(map[int]time.Duration), make(map[int]struct{}), make(map[int]time.Duration)
	}
	o.when[shard] = now
	_, down := o.down[shard]
	begun, first = !down, len(o.down) == 0
	o.down[shard] = now + o.pause()
	if shard == allShards && first || now-asked >= atOnce && time.Duration(o.answered.Load()) <= asked {
		o.row[shard] = struct{}{}
	}
	o.until, o.last = now+o.pause(), err
	o.troubled.Store(true)
	return begun, first
}

// lastFailures returns when each shard last failed.
func (o *outage) lastFailures() map[int]time.Duration {
	o.mu.Lock()
	defer o.mu.Unlock()
	return maps.Clone(o.when)
}

// worked records that shard has answered. It reports whether shard was down before, and
// whether nothing is down any more.
func (o *outage) worked(shard int, now time.Duration) (back, over bool) {
	o.answered.Store(int64(now))
	if !o.troubled.Load() {
		return false, false
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.down) == 0 {
		return false, false
	}
	_, back = o.down[shard]
	if shard == allShards || back && o.wholly() {
		clear(o.down)
	}
	clear(o.row)
	delete(o.down, shard)
	for other, until := range o.down {
		// Others that are due to be asked may be back as well.
		if until <= now && back || until+unasked <= now {
			delete(o.down, other)
		}
	}
	if len(o.down) > 0 {
		return back, false
	}
	o.troubled.Store(false)
	return back, true
}

// ended records how a call of shard has ended that was asked at asked. It may call a hook,
// which may end the goroutine: what the call means for others has been recorded before.
func (t *Tier) ended(ctx context.Context, shard int, asked time.Duration, err error) {
	if err != nil {
		t.failed(ctx, shard, asked, err)
	} else {
		t.worked(ctx, shard)
	}
}

func (t *Tier) mayAsk(shard int) error { return t.outage.mayAsk(shard, t.Now()) }

// failed skips shard for a while. It was asked at asked and did not answer.
func (t *Tier) failed(ctx context.Context, shard int, asked time.Duration, err error) {
	if t.ctx.Err() != nil { // Close may have ended the call
		return
	}
	begun, first := t.outage.failed(shard, asked, t.Now(), err)
	if begun {
		t.doubtRecent()
	}
	if first {
		t.Lost(ctx, err)
	}
}

func (t *Tier) worked(ctx context.Context, shard int) {
	back, over := t.outage.worked(shard, t.Now())
	if back || over {
		t.doubtRecent()
	}
	if over {
		t.Restored(ctx)
	}
}

// probe asks shard about key in the background if that may end the pause of the whole
// Store. The caller keeps Close waiting.
func (t *Tier) probe(shard int, key string) {
	if !t.outage.beginProbe(shard) {
		return
	}
	t.Go(func() {
		defer t.outage.endProbe()
		asked := t.Now()
		err := guarded(func() error {
			_, err := t.store.Acquire(t.ctx, Ask{Key: key})
			return err
		})
		t.ended(t.ctx, shard, asked, err)
	})
}
