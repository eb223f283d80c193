// Package bulkhead bounds how many calls to a dependency run at once: one that hangs does not
// use up the goroutines, connections and memory of all others.
//
//	slots := bulkhead.New(bulkhead.Config{
//		Name:    "users",
//		Limit:   16,                     // calls at once
//		MaxWait: 100 * time.Millisecond, // how long a call may wait for a slot
//		Queue:   32,                     // how many calls may wait
//	})
//	err := slots.Do(ctx, func(ctx context.Context) error { return fetchUser(ctx, 42) })
//	if errors.Is(err, bulkhead.ErrFull) {
//		// The call was never made.
//	}
//
// All calls to a dependency share one bulkhead. In a chain it is inside of retries, whose waits then
// hold no slot. A call holds its slot until its function returns, whatever its ctx, and under a
// resiliencehttp.Transport until the response's body has been read or closed. Package
// bulkhead/adaptive finds the limit by itself.
//
// Sources: Bulkhead, Priority Queue (Cloud Design Patterns).
package bulkhead

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/linger"
	"github.com/go-resilience/resilience/internal/notify"
	"github.com/go-resilience/resilience/internal/settings"
)

// A Bulkhead is safe for concurrent use.
type Bulkhead struct {
	setting   settings.Setting[Config] // whose lock is taken before mu
	observers notify.Observers[Event]

	mu      sync.Mutex
	limit   int
	running int // slots that are taken
	queue   queue
	totals  Totals
}

// New panics if cfg is not valid.
func New(cfg Config) *Bulkhead {
	b := &Bulkhead{limit: cfg.Limit}
	b.setting.Init(cfg, Config.withDefaults)
	return b
}

// Do runs fn when it has a slot, and returns its error, or a [*FullError], or why ctx had ended
// before.
func (b *Bulkhead) Do(ctx context.Context, fn func(context.Context) error) error {
	has, err := b.enter(ctx)
	if err != nil {
		return err
	}
	if linger.Under(ctx) {
		return linger.WorkOf(ctx).Hold(ctx, fn, func(error) { b.leave(has) }, nil)
	}
	defer b.leave(has)
	return fn(ctx)
}

func (b *Bulkhead) Wrap(next func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error { return b.Do(ctx, next) }
}

// Begin is [Bulkhead.Do] for work that is not one function. The first call of done, from any
// goroutine, gives the slot back. It is nil if there is an error.
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

// slots are those that a call asks for, or has.
type slots struct {
	cost  int
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
	asked := slots{cost, b.queue.shareOf(name)}
	if cost == 0 || cost <= b.limit-b.running && !b.queue.waitsUpTo(level) {
		b.take(asked)
		b.mu.Unlock()
		return asked, nil
	}
	return b.wait(ctx, cfg, &waiter{slots: asked, level: level})
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
		w.since, w.ended, w.ready = now(), ctx.Done(), make(chan struct{})
		b.queue.add(w)
	}
	b.mu.Unlock()

	if queued {
		b.await(w, cfg.MaxWait)
	}
	has, refusal := w.slots, w.refusal
	if refusal != nil {
		refusal.err = ended.Error(ctx)
	}
	told := false
	defer func() {
		if !told && refusal == nil { // an observer has panicked
			b.leave(has)
		}
	}()
	b.observers.Tell(ctx, Event{cfg.Name, w.waited, refusal})
	told = true
	if refusal != nil {
		return slots{}, refusal
	}
	return has, nil
}

// await waits until w has its slots or is refused, by who closes w.ready or because it has waited
// for too long.
func (b *Bulkhead) await(w *waiter, maxWait time.Duration) {
	var passed <-chan time.Time
	if maxWait > 0 {
		passed = time.After(maxWait)
	}
	why := ContextEnded
	select {
	case <-w.ready:
		return
	case <-w.ended:
	case <-passed:
		why = WaitTooLong
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if w.line != nil { // it waits still, and may have held up others
		b.turnAway(w, why)
		b.grant()
	}
}

// leave gives the slots of a call back.
func (b *Bulkhead) leave(has slots) {
	if has.cost == 0 {
		return
	}
	b.mu.Lock()
	b.running -= has.cost
	b.queue.count(has.share, -has.cost, 0)
	if b.queue.waiting > 0 {
		b.grant()
	}
	b.mu.Unlock()
}

// take gives a call its slots. b.mu is held.
func (b *Bulkhead) take(asked slots) {
	b.running += asked.cost
	b.queue.count(asked.share, asked.cost, 0)
	b.totals.Admitted++
}

// grant hands free slots to the calls that wait, until they do not suffice for the next one.
// b.mu is held.
func (b *Bulkhead) grant() {
	for b.queue.waiting > 0 && b.running < b.limit {
		w := b.queue.next()
		select {
		case <-w.ended: // and w does not know yet: the slots would come too late
			b.turnAway(w, ContextEnded)
			continue
		default:
		}
		if w.cost > b.limit-b.running {
			return
		}
		b.queue.remove(w, true)
		b.take(w.slots)
		w.waited = now() - w.since
		b.totals.Waited++
		b.totals.WaitTime += w.waited
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
	if b.totals.Refusals == nil {
		b.totals.Refusals = make(map[Reason]int64)
	}
	b.totals.Refusals[why]++
	b.totals.Refused++
	w.refusal = &FullError{
		Name: b.setting.Load().Name, Reason: why, Level: w.level, Cost: w.cost, Share: short(w.share.name),
		Limit: b.limit, InFlight: b.running, Queued: b.queue.waiting, Waited: w.waited,
	}
}

// SetLimit is [Bulkhead.Update] of the Limit.
func (b *Bulkhead) SetLimit(n int) error { return b.Update(func(c *Config) { c.Limit = n }) }

// Update has change, which must not use the bulkhead, write to the Config as it was given: a zero
// field means its default. If the result is not valid, nothing changes. Name and Levels cannot
// change. Calls that run or wait go on as they began; one that waits and costs more than a new limit
// is refused.
func (b *Bulkhead) Update(change func(*Config)) error {
	return b.setting.Update(change, allow, b.follow)
}

// follow puts the limit of a new Config into effect.
func (b *Bulkhead) follow(cfg *Config) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.limit = cfg.Limit
	for _, l := range slices.Clone(b.queue.lines) { // a line that is empty goes
		for w := l.oldest; w != nil; w = w.newer {
			if w.cost > b.limit {
				b.turnAway(w, TooCostly)
			}
		}
	}
	b.grant()
}
