// Package bulkhead limits how many calls to a dependency run at the same time. With a bulkhead, a dependency that
// hangs cannot use up the goroutines, connections and memory that other work needs.
//
//	slots := bulkhead.New(bulkhead.Config{
//		Name:    "users",
//		Limit:   16,                     // running calls
//		MaxWait: 100 * time.Millisecond, // maximum time that a call waits for a slot
//		Queue:   32,                     // maximum number of waiting calls
//	})
//	err := slots.Do(ctx, func(ctx context.Context) error { return fetchUser(ctx, 42) })
//	if errors.Is(err, bulkhead.ErrFull) {
//		// The call was not made.
//	}
//
// Use one bulkhead for all calls to a dependency. In a chain of policies, place the bulkhead inside the retrier, so
// that a call holds no slot during the pause before a retry. A call holds its slot until its function returns. Within a
// resiliencehttp.Transport, the call holds its slot until the response has been read or closed.
//
// # Overload
//
// The bulkhead does not let a call wait if the call would get its slot too late to finish. If a call has to wait, and
// its ctx has less time left than a call typically takes, the bulkhead refuses the call with [DeadlineTooClose]. If
// calls become slower while a call waits, its refusal may be later than this rule says. The time that a call
// typically takes is the median of the last 31 measurements. Each measurement is the time for which a call held its
// slots. The bulkhead measures each call that had to wait, and some of the other calls. The bulkhead does not
// measure calls that were cut short by their callers. Before the 8th measurement, no call is refused with
// DeadlineTooClose. A call that does not have to wait is never refused.
//
// Usually, the oldest waiting call is served first. If callers cancel many waiting calls, the newest waiting call is
// served first, because the oldest call has the least time left. For each priority level, the bulkhead counts
// cancellations as follows:
//
//   - When the ctx of a call that had to wait is done before the call ends, the count increases by 8, up to 64.
//   - When a waiting call gets its slots, the count decreases by 1, down to 0.
//   - When a call starts to wait while no other call waits at its level, the count becomes 0.
//
// While the count of a level is 48 or more, the newest waiting call at the level is served first.
//
// If the capacity of the dependency is not known, or is shared with other clients, use package bulkhead/adaptive,
// which finds the limit by itself. If a fixed limit is above the capacity, calls queue in the dependency, where the
// bulkhead cannot choose their order.
//
// # Stability
//
// Shares are unstable until version 1.0.0: a minor version may change [Config].Share, [ShareStats], Stats.Shares and
// FullError.Share.
//
// Sources: the Bulkhead pattern and the Priority Queue pattern (Cloud Design Patterns).
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

// Unlimited means that there is no limit. Unlimited is valid only for fields whose comment mentions it.
const Unlimited = -1

// A Bulkhead limits the number of calls that run at the same time. A Bulkhead is safe for concurrent use.
type Bulkhead struct {
	setting   settings.Setting[Config] // setting's lock is acquired before mu if both locks are needed
	observers notify.Observers[Event]

	mu      sync.Mutex
	limit   int
	running int // number of slots taken
	untimed int // number of calls that do not have to wait before the next such call is measured
	queue   queue
	service service
	stats   Stats // only the counters are set
}

// New returns a Bulkhead. New panics if cfg is invalid; see [Config.Validate].
func New(cfg Config) *Bulkhead {
	b := &Bulkhead{limit: cfg.Limit}
	b.setting.Init(cfg, Config.withDefaults)
	b.queue = queue{shares: make(map[string]*share), pressure: make([]pressure, b.setting.Load().Levels)}
	b.stats.Refusals = make(map[Reason]int64, len(reasons))
	for _, r := range reasons {
		b.stats.Refusals[r] = 0
	}
	return b
}

// Do acquires the slots for a call, calls fn, and returns fn's error. If the call does not get its slots in time, Do
// returns a [*FullError]. If ctx is already done, Do returns an error that matches the error and the cause of ctx.
func (b *Bulkhead) Do(ctx context.Context, fn func(context.Context) error) error {
	held, err := b.acquire(ctx)
	if err != nil {
		return err
	}
	if held.timing != nil || linger.Under(ctx) {
		return b.doTimed(ctx, held, fn)
	}
	defer b.release(held, ending{})
	return fn(ctx)
}

// doTimed calls fn for a call that is measured, or whose work may continue after fn has returned.
func (b *Bulkhead) doTimed(ctx context.Context, held slots, fn func(context.Context) error) (err error) {
	if linger.Under(ctx) {
		return linger.WorkOf(ctx).Hold(ctx, fn, func(err error) { b.end(ctx, held, err, endingOfWork) }, nil)
	}
	defer func() { b.end(ctx, held, err, endingOf) }()
	return fn(ctx)
}

// Wrap returns a function that calls [Bulkhead.Do](ctx, next).
func (b *Bulkhead) Wrap(next func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error { return b.Do(ctx, next) }
}

// Begin acquires the slots for work that is not a single function. When the work ends, call done with the error of the
// work. Only the first call to done has an effect: it releases the slots. done may be called from any goroutine. If
// Begin returns an error, done is nil.
func (b *Bulkhead) Begin(ctx context.Context) (done func(error), err error) {
	held, err := b.acquire(ctx)
	if err != nil {
		return nil, err
	}
	var over atomic.Bool
	return func(err error) {
		switch {
		case over.Swap(true):
		case linger.Under(ctx):
			b.end(ctx, held, err, endingOfWork)
		default:
			b.end(ctx, held, err, endingOf)
		}
	}, nil
}

// A slots value describes the slots that a call needs or holds. The compiler holds the value in registers only if the
// type has at most four fields.
type slots struct {
	cost   int
	share  *share
	timing *timing // nil if the call is not measured
}

// A timing exists for a call that is measured: the bulkhead measures the time for which the call holds its slots.
type timing struct {
	start  time.Duration // time at which the call got its slots
	waited bool          // the call had to wait for its slots
	level  int           // the call's level, set if waited
}

// acquire takes the slots for a call, and waits for the slots if necessary. If the call is refused, acquire returns the
// refusal.
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
			needed.timing = &timing{start: now()}
		}
		b.take(needed)
		b.stats.Admitted++
		b.mu.Unlock()
		return needed, nil
	}
	return b.wait(ctx, cfg, &waiter{slots: needed, level: level})
}

// wait is called for a call that has not found enough free slots. If the call may wait, wait adds the call to the
// queue. wait returns when the call has its slots or is refused. The caller holds b.mu, and wait unlocks it.
func (b *Bulkhead) wait(ctx context.Context, cfg *Config, w *waiter) (slots, error) {
	w.since, w.expires, w.deadline = now(), never, never
	if cfg.MaxWait > 0 {
		w.expires = after(w.since, cfg.MaxWait)
	}
	if deadline, ok := ctx.Deadline(); ok {
		w.deadline = after(w.since, time.Until(deadline))
	}
	reason, displaced := b.rejection(cfg, w)
	if reason != "" {
		b.refuse(w, reason, w.since)
		b.mu.Unlock()
	} else {
		w.ended, w.ready = ctx.Done(), make(chan struct{})
		b.queue.add(w)
		if displaced {
			b.admitWaiters(w.since) // free slots may have been reserved for the displaced call
		}
		end := w.end(&b.service)
		b.mu.Unlock()
		b.await(w, end)
	}
	return b.settle(ctx, cfg, w)
}

// rejection returns the reason why w may not wait, or "" if w may wait. If the queue is full, w may displace another
// call. rejection then refuses the other call and returns true.
func (b *Bulkhead) rejection(cfg *Config, w *waiter) (reason Reason, displaced bool) {
	switch {
	case w.cost > b.limit:
		return TooCostly, false
	case cfg.MaxWait == 0:
		return NoSlot, false
	case w.hopeless(w.since, &b.service):
		return DeadlineTooClose, false
	case b.queue.waiting < cfg.Queue:
		return "", false
	}
	other := b.queue.victim(w)
	if other == nil {
		return QueueFull, false
	}
	b.turnAway(other, Displaced, w.since)
	return "", true
}

// settle counts w if w has its slots, and notifies the observers that w has its slots or is refused. It returns the
// slots or the refusal. If ctx has ended since w got its slots, settle releases the slots and refuses w.
func (b *Bulkhead) settle(ctx context.Context, cfg *Config, w *waiter) (slots, error) {
	if w.refusal == nil && !b.countAdmission(w, ctx.Err() != nil) {
		b.release(w.slots, ending{cut: true, gone: true})
	}
	if w.refusal != nil {
		w.refusal.err = ended.Error(ctx)
		if a, ok := ctx.(adaptive); ok && w.refusal.Reason == TooCostly {
			w.refusal.mayGrow = w.cost <= a.MaxLimit()
		}
		b.observers.Tell(ctx, Event{EventRefused, cfg.Name, w.refusal.Waited, w.refusal})
		return slots{}, w.refusal
	}
	if b.observers.Any() {
		notified := false
		defer func() {
			if !notified { // an observer has panicked, so the time of the slots is not that of a call
				b.release(w.slots, ending{cut: true})
			}
		}()
		b.observers.Tell(ctx, Event{EventWaited, cfg.Name, w.timing.start - w.since, nil})
		notified = true
	}
	return w.slots, nil
}

// countAdmission counts w, which has its slots, as admitted. If late is true, it refuses w instead. It reports whether
// w is admitted.
func (b *Bulkhead) countAdmission(w *waiter, late bool) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if late {
		b.refuse(w, ContextEnded, w.timing.start)
		return false
	}
	b.stats.Admitted++
	b.stats.Waited++
	b.stats.WaitTime += w.timing.start - w.since
	return true
}

// await returns when w has its slots or is refused. It rechecks w at the time end, and when w's ctx is done. If w may
// wait longer, recheck returns the time of the next recheck.
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

// recheck refuses w if w may not wait any longer. recheck reports whether the wait is over. If the wait is not over,
// end is the time of the next recheck.
func (b *Bulkhead) recheck(w *waiter, at time.Duration) (over bool, end time.Duration) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if w.line == nil {
		return true, 0
	}
	reason := w.overdue(at, &b.service)
	if reason == "" { // calls have become shorter, so w may wait longer
		return false, w.end(&b.service)
	}
	b.turnAway(w, reason, at)
	b.admitWaiters(at) // free slots may have been reserved for w
	return true, 0
}

// end releases the slots of a call that ended with err. If the call is measured, end uses read to determine how the
// call ended.
func (b *Bulkhead) end(ctx context.Context, held slots, err error, read func(context.Context, error) ending) {
	e := ending{cut: true} // the value of e if a method of err panics
	defer func() { b.release(held, e) }()
	if held.timing != nil {
		e = read(ctx, err)
	}
}

// release releases the slots of a call. If the call was measured and was not cut short, release records the time for
// which the call held the slots. If the call had to wait and its ctx is done, release records the cancellation.
func (b *Bulkhead) release(held slots, e ending) {
	if held.cost == 0 {
		return
	}
	b.mu.Lock()
	b.running -= held.cost
	b.queue.count(held.share, -held.cost, 0)
	if held.timing != nil || b.queue.waiting > 0 { // most calls need no reading of the clock
		at := now()
		if t := held.timing; t != nil && !e.cut {
			b.service.add(at - t.start)
		}
		if t := held.timing; t != nil && t.waited && e.gone {
			b.queue.abandon(t.level)
		}
		b.admitWaiters(at)
	}
	b.mu.Unlock()
}

// take gives a call its slots. The caller holds b.mu.
func (b *Bulkhead) take(needed slots) {
	b.running += needed.cost
	b.queue.count(needed.share, needed.cost, 0)
}

// admitWaiters gives free slots to waiting calls. It stops when too few slots are free for the next call. The caller
// holds b.mu.
func (b *Bulkhead) admitWaiters(at time.Duration) {
	for b.queue.waiting > 0 && b.running < b.limit {
		w := b.queue.next()
		if reason := w.overdue(at, &b.service); reason != "" { // the call cannot be served in time
			b.turnAway(w, reason, at)
			continue
		}
		if w.cost > b.limit-b.running {
			return
		}
		b.queue.remove(w, true)
		w.admission = timing{start: at, waited: true, level: w.level}
		w.timing = &w.admission
		b.take(w.slots)
		close(w.ready)
	}
}

// turnAway refuses a call that is in the queue. The caller holds b.mu.
func (b *Bulkhead) turnAway(w *waiter, reason Reason, at time.Duration) {
	b.queue.remove(w, false)
	if reason == ContextEnded {
		b.queue.abandon(w.level)
	}
	b.refuse(w, reason, at)
	close(w.ready)
}

// refuse records that a call is refused, and the reason. The caller holds b.mu.
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
// If the result is invalid, Update returns an error and changes nothing. Name and Levels cannot change. Running calls
// continue. A waiting call continues to wait and keeps its MaxWait, but a waiting call that costs more than the new
// limit is refused. MaxWait may be Unlimited, which is -1, so the function must test for Unlimited before it calculates
// with MaxWait. The function must not call methods of b, because Update holds a lock.
func (b *Bulkhead) Update(change func(*Config)) error {
	return b.setting.Update(change, allow, b.applyConfig)
}

// applyConfig applies the limit of a new Config.
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

// now returns the time since the program started. It reads one clock, while time.Now would read two clocks.
func now() time.Duration { return time.Since(started) }

var started = time.Now()

const never = time.Duration(math.MaxInt64)

// after returns the time at + d. If d is longer than about 146 years, it returns never.
func after(at, d time.Duration) time.Duration {
	if d > never/2 {
		return never
	}
	return at + d
}
