// Package bulkhead bounds how many calls to a dependency run at once: one that hangs does not
// use up the goroutines, connections and memory of all others.
//
//		slots := bulkhead.New(bulkhead.Config{
//			Name:    "users",
//			Limit:   16,                     // calls at once
//			MaxWait: 100 * time.Millisecond, // how long a call may wait for a slot
//			Queue:   32,                     // how many calls may wait
//		})
//		err := slots.Do(ctx, func(ctx context.Context) error { return fetchUser(ctx, 42) })
//		if errors.Is(err, bulkhead.ErrFull) {
//			// The call was never made.
//		}
//
//	  - All calls to a dependency share one bulkhead; a resilience.Group has one for each key.
//	  - A call that finds Limit and Queue full is refused with a [*FullError]. A free slot goes to
//	    the most important level, and there to who has waited longest, unless there is a Share,
//	    which keeps the flood of one tenant from the others.
//	  - In a chain it is inside of retries, whose waits then hold no slot, and outside of the
//	    timeout of a single call.
//	  - A call holds its slot until its function returns, whatever its ctx, and under a
//	    resiliencehttp.Transport until the response's body has been read to its end or closed.
//	  - Package bulkhead/adaptive finds the limit by the latency of the calls.
//
// Source: Bulkhead, Priority Queue and Queue-Based Load Leveling in the Cloud
// Design Patterns catalog (https://learn.microsoft.com/azure/architecture/patterns/).
package bulkhead

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/linger"
	"github.com/go-resilience/resilience/internal/notify"
	"github.com/go-resilience/resilience/internal/settings"
)

// A Bulkhead is safe for concurrent use. [New] makes one.
type Bulkhead struct {
	setting   settings.Setting[Config] // whose lock is taken before mu
	observers notify.Observers[Event]

	mu              sync.Mutex
	limit           int
	running         int // slots that are taken
	queue           queue
	admitted, waits int64
	waitTime        time.Duration
	refusals        map[Reason]int64
}

// New panics with the error of cfg.Validate, if there is one.
func New(cfg Config) *Bulkhead {
	b := &Bulkhead{limit: cfg.Limit}
	b.setting.Init(cfg, Config.withDefaults)
	return b
}

// Do runs fn when it has a slot, and returns its error. If it gets none, it returns a
// [*FullError]; if ctx has already ended, it returns why.
func (b *Bulkhead) Do(ctx context.Context, fn func(context.Context) error) error {
	has, err := b.enter(ctx)
	if err != nil {
		return err
	}
	if work := linger.Of(ctx); work != nil {
		return work.Hold(ctx, fn, func(error) { b.leave(has) }, nil)
	}
	defer b.leave(has)
	return fn(ctx)
}

// Wrap returns a function that runs next under [Bulkhead.Do].
func (b *Bulkhead) Wrap(next func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error { return b.Do(ctx, next) }
}

// Begin is [Bulkhead.Do] for work that is not one function. done, called with the error of the
// work and from any goroutine, gives the slot back; only its first call counts. It is nil if
// there is an error.
func (b *Bulkhead) Begin(ctx context.Context) (done func(error), err error) {
	has, err := b.enter(ctx)
	if err != nil {
		return nil, err
	}
	var over atomic.Bool
	return func(error) {
		if !over.Swap(true) {
			b.leave(has)
		}
	}, nil
}

// slots are those that a call has.
type slots struct {
	n     int
	share *share
}

// enter takes the slots of a call, perhaps after a wait, or refuses it.
func (b *Bulkhead) enter(ctx context.Context) (slots, error) {
	if ctx.Err() != nil {
		return slots{}, ended.Error(ctx)
	}
	cfg := b.setting.Load()
	level, cost, name := 0, 1, ""
	if cfg.Priority != nil {
		level = min(max(cfg.Priority(ctx), 0), cfg.Levels-1)
	}
	if cfg.Cost != nil {
		cost = max(cfg.Cost(ctx), 0)
	}
	if cfg.Share != nil {
		name = cfg.Share(ctx)
	}

	b.mu.Lock()
	share := b.queue.shareOf(name)
	if cost == 0 {
		b.admitted++
		b.mu.Unlock()
		return slots{}, nil
	}
	if cost <= b.limit-b.running && !b.queue.waitsUpTo(level) {
		b.take(share, cost)
		b.admitted++
		b.mu.Unlock()
		return slots{cost, share}, nil
	}
	return b.wait(ctx, cfg, &waiter{level: level, cost: cost, share: share})
}

// wait puts a call that finds no slots into the queue, if it may wait, and returns when it has
// them or is refused. b.mu is held, and wait releases it.
func (b *Bulkhead) wait(ctx context.Context, cfg *Config, w *waiter) (slots, error) {
	switch {
	case w.cost > b.limit:
		b.refuse(w, TooCostly)
	case cfg.MaxWait == 0:
		b.refuse(w, NoSlot)
	case b.queue.waiting < cfg.Queue: // there is a place
	default:
		if other := b.queue.victim(w); other != nil {
			b.turnAway(other, Displaced)
		} else {
			b.refuse(w, QueueFull)
		}
	}
	queued := w.refusal == nil
	if queued {
		w.since, w.ready = now(), make(chan struct{})
		b.queue.add(w, cfg.Levels)
	}
	b.mu.Unlock()

	if queued {
		b.await(ctx, w, cfg.MaxWait)
	}
	if w.refusal != nil {
		b.observers.Tell(ctx, Event{Name: cfg.Name, Waited: w.refusal.Waited, Refusal: w.refusal})
		return slots{}, w.refusal
	}
	has := slots{w.cost, w.share}
	if b.observers.Any() {
		b.tellWaited(ctx, has, Event{Name: cfg.Name, Waited: w.waited})
	}
	return has, nil
}

// await waits until w has its slots, or is refused.
func (b *Bulkhead) await(ctx context.Context, w *waiter, maxWait time.Duration) {
	var passed <-chan time.Time
	if maxWait > 0 {
		timer := time.NewTimer(maxWait)
		defer timer.Stop()
		passed = timer.C
	}
	why := ContextEnded
	select {
	case <-w.ready:
	case <-ctx.Done():
	case <-passed:
		why = WaitTooLong
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	w.waited = now() - w.since
	switch {
	case w.line != nil: // it waits still, and may have held up others
		b.queue.remove(w, false)
		b.refuse(w, why)
		b.grant()
	case w.refusal != nil:
	case ctx.Err() != nil: // the slots came too late
		b.take(w.share, -w.cost)
		b.refuse(w, ContextEnded)
		b.grant()
	default:
		b.admitted++
		b.waits++
		b.waitTime += w.waited
	}
	if w.refusal != nil {
		w.refusal.err = ended.Error(ctx)
	}
}

// tellWaited tells observers of a wait. If one of them panics, the slots are given back.
func (b *Bulkhead) tellWaited(ctx context.Context, has slots, e Event) {
	told := false
	defer func() {
		if !told {
			b.leave(has)
		}
	}()
	b.observers.Tell(ctx, e)
	told = true
}

// leave gives the slots of a call back.
func (b *Bulkhead) leave(has slots) {
	if has.n == 0 {
		return
	}
	b.mu.Lock()
	b.take(has.share, -has.n)
	if b.queue.waiting > 0 {
		b.grant()
	}
	b.mu.Unlock()
}

// take notes that the calls of a share have n slots more, or -n fewer. b.mu is held.
func (b *Bulkhead) take(share *share, n int) {
	b.running += n
	b.queue.addHeld(share, n)
}

// grant hands free slots to the calls that wait, until they do not suffice for the next one.
// b.mu is held.
func (b *Bulkhead) grant() {
	for b.queue.waiting > 0 && b.running < b.limit {
		w := b.queue.pickNext()
		if w.cost > b.limit-b.running {
			return
		}
		b.queue.remove(w, true)
		b.take(w.share, w.cost)
		close(w.ready)
	}
}

// turnAway refuses a call that waits. b.mu is held.
func (b *Bulkhead) turnAway(w *waiter, why Reason) {
	b.queue.remove(w, false)
	w.waited = now() - w.since
	b.refuse(w, why)
	close(w.ready)
}

// now is the time since the program began: one look at the clock, where time.Now takes two.
func now() time.Duration { return time.Since(began) }

var began = time.Now()

// refuse notes why a call gets no slots. b.mu is held.
func (b *Bulkhead) refuse(w *waiter, why Reason) {
	if b.refusals == nil {
		b.refusals = make(map[Reason]int64)
	}
	b.refusals[why]++
	name := b.setting.Load().Name
	w.refusal = &FullError{
		Name: name, Reason: why, Level: w.level, Cost: w.cost, Share: short(w.share.name),
		Limit: b.limit, InFlight: b.running, Queued: b.queue.waiting, Waited: w.waited,
	}
}

// SetLimit changes Config.Limit, as [Bulkhead.Update] does.
func (b *Bulkhead) SetLimit(n int) error { return b.Update(func(c *Config) { c.Limit = n }) }

// Update has change write to the Config as it was given, where a zero field means its default.
// If the result is not valid, Update returns an error that names the field, and nothing changes.
// Name and Levels cannot change.
//
// New slots go to waiting calls at once. When the limit shrinks, calls in flight finish, and a
// waiting call that costs more is refused. Waiting calls keep their place, level, cost, share and
// MaxWait, also in a queue that is longer than its new bound.
//
// change must not use the bulkhead.
func (b *Bulkhead) Update(change func(*Config)) error {
	return b.setting.Update(change, allow, b.follow)
}

// follow puts the limit of a new Config into effect.
func (b *Bulkhead) follow(cfg *Config) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.limit = cfg.Limit
	for w := range b.queue.calls {
		if w.cost > b.limit {
			b.turnAway(w, TooCostly)
		}
	}
	b.grant()
}
