// Package bulkhead limits how many calls to a dependency run at once, so that one that hangs does not use up
// the goroutines, connections and memory of all others.
//
//	slots := bulkhead.New(bulkhead.Config{
//		Name:    "users",
//		Limit:   16,                     // calls at once
//		MaxWait: 100 * time.Millisecond, // how long a call may wait for a slot
//		Queue:   32,                     // how many calls may wait
//	})
//	err := slots.Do(ctx, func(ctx context.Context) error { return fetchUser(ctx, 42) })
//	if errors.Is(err, bulkhead.ErrFull) {
//		// The call was not made.
//	}
//
// All calls to a dependency share one bulkhead. In a chain it belongs inside retries, which then hold no slot
// while they wait. A call holds its slot until its function returns, and within a resiliencehttp.Transport
// until the response has been read or closed.
//
// # Overload
//
// A call that cannot be served in time is refused as soon as that is known. A call that has to wait is refused
// with [DeadlineTooClose] if its ctx has less time left than calls typically take, which is the median of the
// last 31 calls that their callers did not cut short. A call that finds a free slot is never refused.
//
// Calls that wait are served oldest first while their callers are patient. The newest call is served first if the queue
// has not been empty for longer than a tenth of MaxWait, and a caller has canceled a call that waited within the last
// MaxWait. The oldest call has the least time left then. If MaxWait is [Unlimited], one second counts instead.
//
// Use package bulkhead/adaptive, which finds the limit by itself, if the capacity of the dependency is not known,
// or is shared with others. A fixed limit above that capacity lets calls queue in the dependency, where no order
// of this queue helps.
//
// Sources: Bulkhead, Priority Queue (Cloud Design Patterns).
package bulkhead

import (
	"context"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/linger"
	"github.com/go-resilience/resilience/internal/notify"
	"github.com/go-resilience/resilience/internal/settings"
)

// Unlimited, in a field that accepts it, means that there is no limit.
const Unlimited = -1

// A Bulkhead limits concurrency. It is safe for concurrent use.
type Bulkhead struct {
	setting   settings.Setting[Config] // its lock is taken before mu
	observers notify.Observers[Event]

	mu      sync.Mutex
	limit   int
	running int // slots taken
	untimed int // calls that find free slots until one of them is timed
	queue   queue
	service service
	stats   Stats // the counters
}

// New returns a Bulkhead. It panics if cfg is invalid; see [Config.Validate].
func New(cfg Config) *Bulkhead {
	b := &Bulkhead{limit: cfg.Limit}
	b.setting.Init(cfg, Config.withDefaults)
	b.stats.Refusals = make(map[Reason]int64, len(reasons))
	for _, r := range reasons {
		b.stats.Refusals[r] = 0
	}
	return b
}

// Do runs fn once it has its slots, and returns its error. It returns a [*FullError] if there are no slots in time, and
// the error and cause of ctx if ctx is already done.
func (b *Bulkhead) Do(ctx context.Context, fn func(context.Context) error) error {
	held, err := b.acquire(ctx)
	if err != nil {
		return err
	}
	if held.timing != untimed || linger.Under(ctx) {
		return b.doTimed(ctx, held, fn)
	}
	defer b.release(held)
	return fn(ctx)
}

// doTimed runs fn in slots whose call is timed, or outlasts fn.
func (b *Bulkhead) doTimed(ctx context.Context, held slots, fn func(context.Context) error) (err error) {
	if linger.Under(ctx) {
		return linger.WorkOf(ctx).Hold(ctx, fn, func(err error) { b.endWork(ctx, held, err) }, nil)
	}
	defer func() { b.end(ctx, held, err) }()
	return fn(ctx)
}

// Wrap returns a function that runs next under [Bulkhead.Do].
func (b *Bulkhead) Wrap(next func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error { return b.Do(ctx, next) }
}

// Begin is [Bulkhead.Do] for work that is not a single function. The first call of done, from any goroutine, releases
// the slots; its argument is the error of the work. done is nil if Begin returns an error.
func (b *Bulkhead) Begin(ctx context.Context) (done func(error), err error) {
	held, err := b.acquire(ctx)
	if err != nil {
		return nil, err
	}
	var over atomic.Bool
	if held.timing == untimed { // most calls: neither ctx nor the error is needed
		return func(error) {
			if !over.Swap(true) {
				b.release(held)
			}
		}, nil
	}
	return func(err error) {
		if over.Swap(true) {
			return
		}
		if linger.Under(ctx) {
			b.endWork(ctx, held, err)
		} else {
			b.end(ctx, held, err)
		}
	}, nil
}

// slots are the slots that a call needs or holds.
type slots struct {
	cost   int
	share  *share
	timing timing
	start  time.Duration // when a timed call got them
}

// A timing is the reason for measuring the time for which a call holds its slots.
type timing uint8

const (
	untimed timing = iota
	sampled        // the call found free slots
	waited         // the call had to wait for its slots
)

// acquire takes the slots of a call, perhaps after a wait, or refuses the call.
func (b *Bulkhead) acquire(ctx context.Context) (slots, error) {
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
	needed := slots{cost: cost, share: b.queue.shareFor(name)}
	if cost == 0 || cost <= b.limit-b.running && !b.queue.hasWaiterUpTo(level) {
		if b.untimed--; b.untimed < 0 && cost > 0 {
			b.untimed = b.service.untimed()
			needed.timing, needed.start = sampled, now()
		}
		b.take(needed)
		b.mu.Unlock()
		return needed, nil
	}
	return b.wait(ctx, cfg, &waiter{slots: needed, level: level})
}

// wait puts a call that finds no slots into the queue, if it may wait, and returns when it has them or is refused.
// b.mu is held, and wait unlocks it.
func (b *Bulkhead) wait(ctx context.Context, cfg *Config, w *waiter) (slots, error) {
	w.since, w.expires, w.deadline = now(), never, never
	if cfg.MaxWait > 0 {
		w.expires = after(w.since, cfg.MaxWait)
	}
	if deadline, ok := ctx.Deadline(); ok {
		w.deadline = after(w.since, time.Until(deadline))
	}
	if reason := b.rejection(cfg, w); reason != "" {
		b.refuse(w, reason, w.since)
		b.mu.Unlock()
	} else {
		w.ended, w.ready = ctx.Done(), make(chan struct{})
		b.queue.add(w)
		end := w.end(&b.service)
		b.mu.Unlock()
		b.await(w, end)
	}
	return b.settle(ctx, cfg, w)
}

// rejection returns why a call may not wait, or "". In a full queue it displaces another call, if it may.
func (b *Bulkhead) rejection(cfg *Config, w *waiter) Reason {
	switch {
	case w.cost > b.limit:
		return TooCostly
	case cfg.MaxWait == 0:
		return NoSlot
	case w.hopeless(w.since, &b.service):
		return DeadlineTooClose
	case b.queue.waiting < cfg.Queue:
		return ""
	}
	other := b.queue.victim(w)
	if other == nil {
		return QueueFull
	}
	b.turnAway(other, Displaced, w.since)
	return ""
}

// settle reports the end of a wait to observers and returns the slots of the call, or its refusal.
func (b *Bulkhead) settle(ctx context.Context, cfg *Config, w *waiter) (slots, error) {
	held, refusal := w.slots, w.refusal
	event := Event{Kind: EventWaited, Name: cfg.Name, Waited: w.start - w.since, Refusal: refusal}
	if refusal != nil {
		event.Kind, event.Waited = EventRefused, refusal.Waited
		refusal.err = ended.Error(ctx)
	}
	notified := false
	defer func() {
		if !notified && refusal == nil { // an observer has panicked
			b.release(held)
		}
	}()
	b.observers.Tell(ctx, event)
	notified = true
	if refusal != nil {
		return slots{}, refusal
	}
	return held, nil
}

// await returns when w has its slots or is refused, which it is at end unless that moves.
func (b *Bulkhead) await(w *waiter, end time.Duration) {
	for at, over := w.since, false; !over; {
		var timer <-chan time.Time
		if end != never {
			timer = time.After(end - at)
		}
		select {
		case <-w.ready:
			return
		case <-w.ended:
		case <-timer:
		}
		at = now()
		over, end = b.recheck(w, at)
	}
}

// recheck refuses w if it may wait no longer. Otherwise it reports whether the wait is over, and when to recheck.
func (b *Bulkhead) recheck(w *waiter, at time.Duration) (over bool, end time.Duration) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if w.line == nil {
		return true, 0
	}
	reason := w.overdue(at, &b.service)
	if reason == "" { // calls have become shorter
		return false, w.end(&b.service)
	}
	b.turnAway(w, reason, at)
	b.admitWaiters(at) // w may have held them up
	return true, 0
}

// end releases the slots of a timed call that returned err.
func (b *Bulkhead) end(ctx context.Context, held slots, err error) {
	b.releaseTimed(held, endingOf(ctx, err))
}

// endWork releases the slots of a call whose work ended with err, perhaps after its function had returned.
func (b *Bulkhead) endWork(ctx context.Context, held slots, err error) {
	if held.timing == untimed {
		b.release(held)
	} else {
		b.releaseTimed(held, endingOfWork(ctx, err))
	}
}

// release releases the slots of a call.
func (b *Bulkhead) release(held slots) {
	if held.cost == 0 {
		return
	}
	b.mu.Lock()
	b.running -= held.cost
	b.queue.count(held.share, -held.cost, 0)
	if b.queue.waiting > 0 {
		b.admitWaiters(now())
	}
	b.mu.Unlock()
}

// releaseTimed releases the slots of a call that is timed, and learns from its end.
func (b *Bulkhead) releaseTimed(held slots, e ending) {
	b.mu.Lock()
	defer b.mu.Unlock()
	at := now()
	if !e.cut {
		b.service.add(at - held.start)
	}
	if held.timing == waited && e.gone {
		b.queue.abandon(at)
	}
	b.running -= held.cost
	b.queue.count(held.share, -held.cost, 0)
	b.admitWaiters(at)
}

// take gives a call its slots. b.mu is held.
func (b *Bulkhead) take(needed slots) {
	b.running += needed.cost
	b.queue.count(needed.share, needed.cost, 0)
	b.stats.Admitted++
}

// admitWaiters gives free slots to the calls that wait, until there are too few for the next call. b.mu is held.
func (b *Bulkhead) admitWaiters(at time.Duration) {
	for b.queue.waiting > 0 && b.running < b.limit {
		w := b.queue.next(at, b.setting.Load().MaxWait)
		if reason := w.overdue(at, &b.service); reason != "" { // its slots would come too late
			b.turnAway(w, reason, at)
			continue
		}
		if w.cost > b.limit-b.running {
			return
		}
		b.queue.remove(w, true)
		w.timing, w.start = waited, at
		b.take(w.slots)
		b.stats.Waited++
		b.stats.WaitTime += at - w.since
		close(w.ready)
	}
}

// turnAway refuses a call that waits. b.mu is held.
func (b *Bulkhead) turnAway(w *waiter, reason Reason, at time.Duration) {
	b.queue.remove(w, false)
	if reason == ContextEnded {
		b.queue.abandon(at)
	}
	b.refuse(w, reason, at)
	close(w.ready)
}

// refuse records why a call gets no slots. b.mu is held.
func (b *Bulkhead) refuse(w *waiter, reason Reason, at time.Duration) {
	b.stats.Refusals[reason]++
	b.stats.Refused++
	if reason == DeadlineTooClose {
		b.untimed = 0
		b.service.renew()
	}
	w.refusal = &FullError{
		Name: b.setting.Load().Name, Reason: reason, Level: w.level, Cost: w.cost, Share: short(w.share.name),
		Limit: b.limit, InFlight: b.running, Queued: b.queue.waiting, Waited: at - w.since,
	}
}

// Update calls change with the configuration and applies the result:
//
//	err := slots.Update(func(c *bulkhead.Config) { c.Limit += 10 })
//
// If the result is invalid, nothing changes. Name and Levels cannot change. Calls that run or wait continue; one that
// waits and costs more than a new limit is refused. change must not use b.
func (b *Bulkhead) Update(change func(*Config)) error {
	return b.setting.Update(change, allow, b.applyConfig)
}

// applyConfig puts the limit of a new Config into effect.
func (b *Bulkhead) applyConfig(cfg *Config) {
	b.mu.Lock()
	defer b.mu.Unlock()
	at := now()
	b.limit = cfg.Limit
	for _, l := range slices.Clone(b.queue.lines) { // turnAway removes empty lines
		for w := l.oldest; w != nil; w = w.newer {
			if w.cost > b.limit {
				b.turnAway(w, TooCostly, at)
			}
		}
	}
	b.admitWaiters(at)
}

// now returns the time since the program started. It reads one clock, and time.Now two.
func now() time.Duration { return time.Since(started) }

var started = time.Now()

const never = time.Duration(math.MaxInt64)

// after returns the moment that is d after at, or never if that is more than a century away.
func after(at, d time.Duration) time.Duration {
	if d > never/2 {
		return never
	}
	return at + d
}
