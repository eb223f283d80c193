// Package bulkhead bounds how many calls to one dependency run at once, so that
// when it hangs nothing else runs out of goroutines, connections or memory.
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
// What to know:
//
//   - One bulkhead stands for one dependency, tenant or feature, and all calls to
//     it share it. [Group] holds one for each key.
//   - Limit bounds the calls that run, Queue bounds the calls that wait, and both hold
//     at every moment. A call that finds both full is refused immediately, with a
//     [*FullError]. If it would be served before a waiting call, however, it takes the
//     place of the one that would be served last.
//   - A slot that becomes free goes to the first waiter, by level and [Order]. With
//     FIFO, a later call takes it only if it is more important, or if the first waiter
//     costs more slots than are free (see Config.Cost).
//   - Of several Levels the more important is always served first, so a busy level may
//     starve the less important ones. Config.Reserve keeps a share of the limit for the
//     more important ones.
//   - In a chain a bulkhead comes inside of retries, so that no slot is held while a
//     retry waits, and outside of the time-out of the single call.
//   - A call holds its slot until its function returns, even if the function ignores
//     its ctx: the bulkhead then contains the damage, which is its purpose. Within a
//     resiliencehttp.Transport a call holds its slot until the body of its response
//     has been read to its end or closed. Stats.LongestHeld shows a body that is
//     never closed.
//   - Every setting but the name and the number of levels can change while calls run and
//     wait (Update), counts are exact and never go back (Stats), and observers can
//     be added at any time (Observe).
//   - A [*FullError] tells the patterns around the bulkhead that the call was not made
//     (Refused in the error protocol of this module), and whether another attempt can
//     help (Retryable).
//
// A limit that is guessed is wrong as soon as the dependency changes. An
// [AdaptiveLimit] follows the latency of the calls.
//
// Source: Bulkhead, Priority Queue and Queue-Based Load Leveling in the Cloud
// Design Patterns catalogue (https://learn.microsoft.com/azure/architecture/patterns/).
package bulkhead

import (
	"context"
	"math"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/linger"
	"github.com/go-resilience/resilience/internal/notify"
)

// A Bulkhead lets a limited number of calls run at once. It is safe for concurrent
// use. [New] makes one.
type Bulkhead struct {
	key   string // in a Group
	own   bool   // its Config came from ConfigFor
	born  time.Time
	rules atomic.Pointer[rules]

	slots   slots
	limit   atomic.Int64
	resizes atomic.Int64 // odd while the limit changes
	waiters atomic.Int64 // in queue; changed under mu
	counts  counters
	last    []atomic.Pointer[FullError] // by level: the latest refusal, to be shared

	held      heldSlots
	changes   notify.Queue[Event]
	observers notify.Observers[Event]

	updating sync.Mutex // held while rules change; taken before that of adaptive
	mu       sync.Mutex // taken last
	queue    queue
	folded   int64 // calls admitted that slots no longer counts
}

// New returns a Bulkhead. It panics with the error of cfg.Validate, if there is
// one.
func New(cfg Config) *Bulkhead {
	if err := cfg.Validate(); err != nil {
		panic(err)
	}
	return newBulkhead(newRules(cfg))
}

func newBulkhead(r *rules) *Bulkhead {
	limit := r.Limit
	if r.Adaptive != nil {
		r.adaptive = &adaptive{controller: newController(*r.Adaptive)}
		limit = r.adaptive.controller.Limit()
	}
	b := &Bulkhead{born: time.Now(), last: make([]atomic.Pointer[FullError], r.Levels)}
	b.queue.lines = make([]line, r.Levels)
	b.rules.Store(r)
	b.limit.Store(int64(limit))
	b.slots.word.Store(bias + uint64(limit))
	return b
}

// Do runs fn when there is a slot for it, and returns its error. It waits for a
// slot as Config allows. If it gets none, it returns a [*FullError] and does not call
// fn. If ctx has already ended, Do returns why.
func (b *Bulkhead) Do(ctx context.Context, fn func(context.Context) error) error {
	r := b.rules.Load()
	// Fast path: a free slot, and no levels, costs, adaptive limit or waiters.
	if r.simple && ctx.Err() == nil && b.slots.takeOne() {
		if work := linger.Of(ctx); work != nil {
			return b.outlast(ctx, 1, fn, work)
		}
		defer b.leave(1)
		return fn(ctx)
	}
	n, err := b.enter(ctx, r, r.MaxWait)
	if err != nil {
		return err
	}
	work := linger.Of(ctx)
	switch {
	case n == 0:
		return fn(ctx)
	case r.adaptive != nil:
		return b.measure(ctx, r.adaptive, n, fn, work)
	case work != nil:
		return b.outlast(ctx, n, fn, work)
	}
	defer b.leave(n)
	return fn(ctx)
}

// outlast calls fn in slots that are given back when work is over.
func (b *Bulkhead) outlast(ctx context.Context, n int, fn func(context.Context) error, work *linger.Work) error {
	return work.Hold(ctx, fn, b.hold(n))
}

// Wrap returns a function that runs next under [Bulkhead.Do].
func (b *Bulkhead) Wrap(next func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error { return b.Do(ctx, next) }
}

// Begin takes a slot as [Bulkhead.Do] does, for work that is not one function. When the
// work is over, the caller calls done with its error, from any goroutine. That gives
// the slot back and tells an adaptive limit what Do would tell it. A second call of
// done does nothing. If Begin returns an error, done is nil.
func (b *Bulkhead) Begin(ctx context.Context) (done func(error), err error) {
	r := b.rules.Load()
	return b.begin(ctx, r, r.MaxWait)
}

// TryBegin is a [Bulkhead.Begin] that never waits, whatever Config.MaxWait is: if the
// slots of the call are not free at this moment, it is refused.
func (b *Bulkhead) TryBegin(ctx context.Context) (done func(error), err error) {
	return b.begin(ctx, b.rules.Load(), 0)
}

func (b *Bulkhead) begin(ctx context.Context, r *rules, maxWait time.Duration) (done func(error), err error) {
	n, err := b.enter(ctx, r, maxWait)
	if err != nil {
		return nil, err
	}
	if n == 0 {
		return func(error) {}, nil
	}
	var started call
	if r.adaptive != nil {
		started = b.started(ctx, r.adaptive, n)
	}
	h := b.hold(n)
	return func(err error) {
		switch {
		case !b.release(h):
		case r.adaptive != nil:
			b.ended(ctx, r.adaptive, started, n, outcomeOf(ctx, err))
		default:
			b.leave(n)
		}
	}, nil
}

// enter takes the n slots of a call, or refuses it.
func (b *Bulkhead) enter(ctx context.Context, r *rules, maxWait time.Duration) (n int, err error) {
	if ctx.Err() != nil {
		return 0, ended.Error(ctx)
	}
	level := 0
	if r.Priority != nil {
		level = min(max(r.Priority(ctx), 0), r.Levels-1)
	}
	n = 1
	if r.Cost != nil {
		if n = max(r.Cost(ctx), 0); n == 0 {
			b.counts.costless.Add(1)
			return 0, nil
		}
	}
	refusal := b.try(ctx, r, level, n, maxWait)
	for refusal != nil && refusal.Reason == TooCostly {
		present := b.rules.Load() // an Update may have replaced r, and the queue goes by these
		if !b.endProbe(ctx, present, level, n) {
			break
		}
		refusal = b.try(ctx, present, level, n, maxWait)
	}
	if refusal == nil {
		return n, nil
	}
	b.counts.refused[refusal.Reason.index()].Add(1)
	if r.OnRefuse != nil {
		r.OnRefuse(ctx, refusal)
	}
	if b.observers.Any() {
		b.observers.Tell(ctx, refusal.event())
	}
	return 0, refusal
}

// try takes the n slots of a call, perhaps after a wait, or returns why it does not.
func (b *Bulkhead) try(ctx context.Context, r *rules, level, n int, maxWait time.Duration) *FullError {
	limit := int(b.limit.Load())
	kept := r.kept(limit, level)
	word, ok := b.slots.take(n, kept)
	switch {
	case ok:
		if word >= foldAt {
			b.fold()
		}
		return nil
	case n > limit-kept:
		return b.refusal(r, TooCostly, level, n)
	case maxWait == 0 && word&waiting != 0 && b.passWaiters(level, n):
		return nil
	case maxWait == 0:
		return b.refusal(r, NoSlot, level, n)
	case b.queueFull(r, level, n, kept, word):
		return b.refusal(r, QueueFull, level, n)
	}
	return b.wait(ctx, r, level, n, maxWait)
}

// passWaiters takes the n slots of a call that does not wait itself, if it may take
// them before the calls that do.
func (b *Bulkhead) passWaiters(level, n int) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	_, ok := b.admit(b.rules.Load(), level, n, b.now())
	return ok
}

// queueFull reports whether it is certain without the mutex that a call which found
// word gets no place in the queue.
func (b *Bulkhead) queueFull(r *rules, level, n, kept int, word uint64) bool {
	return level == r.Levels-1 && r.Order == FIFO && freeIn(word)-kept < n &&
		b.waiters.Load() >= int64(r.Queue)
}

// wait waits for the n slots of a call. It returns why the call is refused, or nil.
func (b *Bulkhead) wait(ctx context.Context, r *rules, level, n int, maxWait time.Duration) *FullError {
	left, own := patience(ctx, maxWait)
	w := &waiter{level: level, cost: n, since: b.now(), ready: make(chan struct{})}
	b.mu.Lock()
	queued, refusal := b.join(w, r.Queue, left, own)
	b.unlock()
	if refusal != nil {
		return refusal
	}
	if !queued {
		return nil
	}

	b.await(ctx, w, left, own)
	if w.admitted && ctx.Err() == nil {
		waited := b.now() - w.since
		b.counts.waited.Add(1)
		b.counts.waitTime.Add(int64(waited))
		b.tellWaited(ctx, w, waited)
		return nil
	}
	if w.admitted { // the slots came too late: pass them on
		b.leave(n)
		w.refusal = ContextEnded
	}
	refusal = b.describe(r, w.refusal, level, n)
	refusal.Waited, refusal.err = b.now()-w.since, ended.Error(ctx)
	return refusal
}

// await returns when w is settled: when it is handed its slots or refused, or when its
// patience ends.
func (b *Bulkhead) await(ctx context.Context, w *waiter, left time.Duration, own bool) {
	done := ctx.Done()
	var passed <-chan time.Time
	if own {
		timer := time.NewTimer(left)
		defer timer.Stop()
		passed = timer.C
	} else if done == nil {
		<-w.ready // half of what a select costs
		return
	}
	select {
	case <-w.ready:
	case <-passed:
		b.abandon(w, WaitTooLong)
	case <-done:
		b.abandon(w, ContextEnded)
	}
}

const forever = math.MaxInt64 // as patience

// patience returns how long a call can wait, and whether that is its maxWait and not the
// deadline of ctx.
func patience(ctx context.Context, maxWait time.Duration) (left time.Duration, own bool) {
	left, own = forever, false
	if maxWait > 0 {
		left, own = maxWait, true
	}
	if deadline, ok := ctx.Deadline(); ok {
		if until := time.Until(deadline); until < left {
			left, own = until, false
		}
	}
	return left, own
}

// leave gives the n slots of a call back, or hands them to waiters if there are any.
func (b *Bulkhead) leave(n int) {
	if b.slots.give(n) {
		return
	}
	b.mu.Lock()
	if !b.slots.give(n) {
		now := b.now()
		b.queue.pace.handed(n, now)
		b.grant(b.rules.Load(), now, n)
	}
	b.unlock()
}

// refusal returns the error of a call that did not wait. If the last refusal of its
// level says the same, it is that one: refusing costs little then, which is what an
// overloaded program can afford.
func (b *Bulkhead) refusal(r *rules, reason Reason, level, n int) *FullError {
	limit, inFlight := b.figures()
	queued := int(b.waiters.Load())
	last := b.last[level].Load()
	if last != nil && last.Reason == reason && last.Cost == n && last.Limit == limit &&
		last.InFlight == inFlight && last.Queued == queued && reason != TooCostly {
		return last
	}
	e := b.describe(r, reason, level, n)
	b.last[level].Store(e)
	return e
}

func (b *Bulkhead) describe(r *rules, reason Reason, level, n int) *FullError {
	limit, inFlight := b.figures()
	highest := limit // that there can be without a change from outside
	if r.Adaptive != nil {
		highest = r.Adaptive.Max
	}
	e := &FullError{
		Name:     r.Name,
		Key:      b.key,
		Reason:   reason,
		Level:    level,
		Cost:     n,
		Limit:    limit,
		InFlight: inFlight,
		Queued:   int(b.waiters.Load()),
		never:    reason == TooCostly && n > r.most(highest, level),
	}
	if reason == DeadlineTooClose {
		e.err = context.DeadlineExceeded
	}
	return e
}

// figures returns the limit and the slots in flight at one moment.
func (b *Bulkhead) figures() (limit, inFlight int) {
	for {
		resizes := b.resizes.Load()
		limit, word := int(b.limit.Load()), b.slots.word.Load()
		if resizes%2 == 0 && b.resizes.Load() == resizes {
			return limit, limit - freeIn(word)
		}
		runtime.Gosched()
	}
}

// now returns the time since b was built.
func (b *Bulkhead) now() time.Duration { return time.Since(b.born) }

// fold makes room in the word for more calls admitted.
func (b *Bulkhead) fold() {
	b.mu.Lock()
	b.folded += b.slots.fold()
	b.mu.Unlock()
}
