// Package bulkhead bounds how many calls to one dependency run at once, so that
// when it hangs nothing else runs out of goroutines, connections or memory.
//
//	slots := bulkhead.New(bulkhead.Config{
//		Name:    "users",
//		Limit:   16,                     // calls at once
//		Queue:   32,                     // callers that may wait for a slot
//		MaxWait: 100 * time.Millisecond, // and for how long
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
//   - Limit bounds the calls that run, Queue bounds the callers that wait, and both
//     hold at every moment. A call that finds both full is refused immediately, with
//     a [*FullError], unless it would be served before a caller that waits: then it
//     takes the place of the one that would be served last.
//   - A slot that becomes free goes to the first waiter, by level and [Order]. By
//     FIFO, a later call takes it only if it is more important, or if the first
//     waiter needs more slots than are free (see [WithWeight]).
//   - Of several Levels the more important is always served first, so a level may
//     starve below a busy one. Reserve keeps slots free for the levels above.
//   - In a chain it comes inside of retries, so that no slot is held while a retry
//     waits, and outside of the time-out of the single call.
//   - A call holds its slot until its function returns, also if the function ignores
//     its ctx: the bulkhead then contains the damage, which is its purpose. Within a
//     resiliencehttp.Transport a call holds its slot until the body of its response
//     has been read to its end or closed. Stats.LongestHeld shows a body that is
//     never closed.
//   - A refusal says so (Refused in the error protocol of this module), and whether
//     another attempt can help (Retryable).
//
// A limit that is guessed is wrong as soon as the dependency changes. [Adaptive]
// finds it from the latency of the calls.
//
// Source: Bulkhead, Priority Queue and Queue-Based Load Leveling in the Cloud
// Design Patterns catalogue (https://learn.microsoft.com/azure/architecture/patterns/).
package bulkhead

import (
	"context"
	"fmt"
	"math"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/invalid"
	"github.com/go-resilience/resilience/internal/linger"
)

// Config says how a [Bulkhead] works. No number in it may be negative.
type Config struct {
	// Name appears in errors and events. Optional.
	Name string

	// Limit is how many calls may run at once: 1 to 1 073 741 823. It is required
	// unless Adaptive is set, and must be 0 then.
	Limit int

	// Queue is how many callers may wait for a slot. Zero means none: a call that
	// finds no free slot is refused immediately.
	Queue int

	// MaxWait is how long a caller may wait. Zero means until its ctx ends. It
	// needs a Queue.
	MaxWait time.Duration

	// Order says which of the callers of one level is served first, and so which one
	// loses its place in a full queue. Zero means FIFO.
	Order Order

	// Levels is the number of priority levels. Zero means 1. More need a Priority.
	Levels int

	// Priority returns the level of a call: 0 is the most important. What it
	// returns is clamped to 0 ... Levels-1. It is asked about every call, before
	// any wait, and must be fast. It needs Levels.
	Priority func(context.Context) int

	// Reserve holds, for each level, the slots that are kept free for it and the
	// levels above it. A call takes a slot only if it leaves free what is kept
	// for the levels above its own. With a Limit of 10 and Reserve {2, 3}, level
	// 0 may take every slot, level 1 all but the last 2, and level 2 all but the
	// last 5. What is kept for a level is free to those above it.
	//
	// It may be shorter than Levels: what is missing is 0. So is the last level's,
	// which has no level below to keep slots from. The sum must be less than Limit,
	// or than Adaptive.Min.
	Reserve []int

	// Adaptive, if not nil, makes the bulkhead find its limit by itself.
	Adaptive *Adaptive

	// OnReject, if not nil, is called for each call that is refused, with its ctx.
	OnReject func(context.Context, *FullError)

	// OnLimit, if not nil, is called after each change of the limit, in order and
	// one at a time, by whoever changed it.
	OnLimit func(LimitChange)
}

// Validate returns an error that says which fields cannot mean anything, or nil.
func (c Config) Validate() error {
	f := invalid.Fields{Type: "bulkhead.Config"}
	least := c.Limit
	if c.Adaptive == nil {
		f.Need(c.Limit >= 1 && c.Limit <= maxLimit, "Limit", c.Limit, fmt.Sprintf("1 to %d, or Adaptive must be set", maxLimit))
	} else {
		f.Need(c.Limit == 0, "Limit", c.Limit, "0 where Adaptive is set, which has an Initial limit of its own")
		c.Adaptive.validate(&f)
		least = c.Adaptive.withDefaults().Min
	}
	f.Need(c.Queue >= 0 && c.Queue <= math.MaxInt32, "Queue", c.Queue, fmt.Sprintf("0 (nobody waits) to %d", math.MaxInt32))
	f.Need(c.MaxWait >= 0, "MaxWait", c.MaxWait, "0 (until ctx ends) or more")
	f.Need(c.MaxWait <= 0 || c.Queue > 0, "MaxWait", c.MaxWait, "0 where Queue is 0: nobody waits")
	f.Need(c.Order >= FIFO && c.Order <= CoDel, "Order", int(c.Order), "FIFO, LIFO or CoDel")
	f.Need(c.Levels >= 0 && c.Levels <= 1000, "Levels", c.Levels, "0 (for 1) to 1000")
	f.Need(c.Levels < 2 || c.Priority != nil, "Levels", c.Levels, "0 or 1 where Priority is nil")
	f.Need(c.Levels > 1 || c.Priority == nil, "Levels", c.Levels, "2 or more where Priority is set")
	c.validateReserve(&f, least)
	return f.Err()
}

func (c Config) validateReserve(f *invalid.Fields, least int) {
	levels := max(c.Levels, 1)
	if len(c.Reserve) > levels {
		f.Need(false, "Reserve", c.Reserve, fmt.Sprintf("of %d levels at most, as Levels says", levels))
		return
	}
	kept := 0
	for level, n := range c.Reserve {
		field := fmt.Sprintf("Reserve[%d]", level)
		f.Need(n >= 0 && n <= maxLimit, field, n, fmt.Sprintf("0 to %d", maxLimit))
		if level == levels-1 {
			f.Need(n == 0, field, n, "0: there is no level below, from which to keep slots")
		}
		kept += max(n, 0)
	}
	f.Need(kept == 0 || kept < least, "Reserve", c.Reserve, fmt.Sprintf("less, together, than the limit of at least %d", least))
}

// A Bulkhead lets a limited number of calls run at once. It is safe for
// concurrent use, and built by [New].
type Bulkhead struct {
	cfg   Config
	plain bool  // no Priority and not Adaptive
	kept  []int // by level: the slots that a call has to leave free
	born  time.Time

	slots   slots
	limit   atomic.Int64
	resizes atomic.Int64 // changes of limit that have begun or ended: odd while there is one
	waiters atomic.Int64 // in queue; changed under mu
	waited  atomic.Int64 // calls that waited and were admitted
	refused [reasons]atomic.Int64
	last    []atomic.Pointer[FullError] // by level: the latest refusal, to be shared

	adaptive adaptive // used if cfg.Adaptive is set

	holds holds

	mu         sync.Mutex
	queue      queue
	folded     int64         // calls admitted that slots no longer counts
	changes    []LimitChange // that OnLimit has not seen
	announcing bool
}

// New returns a Bulkhead. It panics with the error of cfg.Validate, if there is
// one.
func New(cfg Config) *Bulkhead {
	if err := cfg.Validate(); err != nil {
		panic(err)
	}
	cfg.Levels = max(cfg.Levels, 1)
	b := &Bulkhead{
		cfg:   cfg,
		plain: cfg.Priority == nil && cfg.Adaptive == nil,
		kept:  make([]int, cfg.Levels),
		born:  time.Now(),
		last:  make([]atomic.Pointer[FullError], cfg.Levels),
	}
	for level, n := range cfg.Reserve {
		for below := level + 1; below < cfg.Levels; below++ {
			b.kept[below] += n
		}
	}
	limit := cfg.Limit
	if cfg.Adaptive != nil {
		b.adaptive.controller = newController(cfg.Adaptive.withDefaults())
		limit = b.adaptive.controller.Limit()
	}
	b.queue.lines = make([]line, cfg.Levels)
	b.limit.Store(int64(limit))
	b.slots.word.Store(bias + uint64(limit))
	return b
}

// Do runs fn when there is a slot for it, and returns its error. It waits for a
// slot as Config allows, or returns a [*FullError] and does not call fn. If ctx
// has already ended, it returns why.
func (b *Bulkhead) Do(ctx context.Context, fn func(context.Context) error) error {
	// Fast path: a free slot and no weights, priorities, adaptive limit or waiters.
	if word := b.slots.word.Load(); b.plain && oneFree(word) && !weighted.Load() && ctx.Err() == nil && b.slots.takeOne(word) {
		if work := linger.Of(ctx); work != nil {
			return b.outlast(ctx, 1, fn, work)
		}
		defer b.leave(1)
		return fn(ctx)
	}
	n, err := b.enter(ctx)
	if err != nil {
		return err
	}
	work := linger.Of(ctx)
	switch {
	case b.cfg.Adaptive != nil:
		return b.measure(ctx, n, fn, work)
	case work != nil:
		return b.outlast(ctx, n, fn, work)
	}
	defer b.leave(n)
	return fn(ctx)
}

// outlast does fn in slots that are given back when work is over.
func (b *Bulkhead) outlast(ctx context.Context, n int, fn func(context.Context) error, work *linger.Work) error {
	h := b.hold()
	return work.Hold(ctx, fn, func() {
		b.drop(h)
		b.leave(n)
	})
}

// Wrap returns a function that does next as [Bulkhead.Do] does it.
func (b *Bulkhead) Wrap(next func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error { return b.Do(ctx, next) }
}

// Begin takes a slot as [Bulkhead.Do] does, for work that is not one function. The
// caller calls done with the error of the work when that is over, from any goroutine:
// it gives the slot back and tells an adaptive limit what Do would tell it. Calling
// done again does nothing. If Begin returns an error, done is nil.
func (b *Bulkhead) Begin(ctx context.Context) (done func(error), err error) {
	n, err := b.enter(ctx)
	if err != nil {
		return nil, err
	}
	var started call
	if b.cfg.Adaptive != nil {
		started = b.begin(n)
	}
	h := b.hold()
	return func(err error) {
		switch {
		case !b.drop(h):
		case b.cfg.Adaptive != nil:
			b.end(started, n, outcomeOf(ctx, err))
		default:
			b.leave(n)
		}
	}, nil
}

// TryAcquire takes a slot if one is free at this moment for a call of weight 1
// and the least important level. It never waits. Its refusals are counted, but
// not reported to OnReject, and its calls tell an adaptive limit nothing.
func (b *Bulkhead) TryAcquire() (release func(), ok bool) {
	level := b.cfg.Levels - 1
	word, ok := b.slots.take(1, b.kept[level])
	switch {
	case ok && word >= foldAt:
		b.fold()
	case !ok && word&waiting != 0:
		b.mu.Lock()
		_, ok = b.admit(level, 1, b.now())
		b.mu.Unlock()
	}
	if !ok {
		b.refused[NoSlot].Add(1)
		return nil, false
	}
	return b.releaseOnce(1), true
}

func (b *Bulkhead) releaseOnce(n int) func() {
	var released atomic.Bool
	return func() {
		if released.CompareAndSwap(false, true) {
			b.leave(n)
		}
	}
}

// enter takes the n slots of a call, or refuses it.
func (b *Bulkhead) enter(ctx context.Context) (n int, err error) {
	if ctx.Err() != nil {
		return 0, ended.Error(ctx)
	}
	level := 0
	if b.cfg.Priority != nil {
		level = min(max(b.cfg.Priority(ctx), 0), b.cfg.Levels-1)
	}
	n = 1
	if weighted.Load() {
		n = weightOf(ctx)
	}
	refusal := b.try(ctx, level, n)
	for refusal != nil && refusal.Reason == TooHeavy && b.endProbe(n, level) {
		refusal = b.try(ctx, level, n)
	}
	if refusal == nil {
		return n, nil
	}
	b.refused[refusal.Reason].Add(1)
	if b.cfg.OnReject != nil {
		b.cfg.OnReject(ctx, refusal)
	}
	return 0, refusal
}

// try takes the n slots of a call, perhaps after a wait, or returns why it does not.
func (b *Bulkhead) try(ctx context.Context, level, n int) *FullError {
	word, ok := b.slots.take(n, b.kept[level])
	switch {
	case ok:
		if word >= foldAt {
			b.fold()
		}
		return nil
	case b.tooHeavy(n, level):
		return b.refusal(TooHeavy, level, n)
	case b.cfg.Queue == 0:
		return b.refusal(NoSlot, level, n)
	case b.noPlace(level, n, word):
		return b.refusal(QueueFull, level, n)
	}
	return b.wait(ctx, level, n)
}

// noPlace reports whether it is certain without the mutex that a call which found
// word gets no place in the queue.
func (b *Bulkhead) noPlace(level, n int, word uint64) bool {
	return level == b.cfg.Levels-1 && b.cfg.Order == FIFO && freeIn(word)-b.kept[level] < n &&
		b.waiters.Load() >= int64(b.cfg.Queue)
}

// tooHeavy reports whether a call cannot have n slots even if all were free.
func (b *Bulkhead) tooHeavy(n, level int) bool {
	return n > 1 && n > int(b.limit.Load())-b.kept[level]
}

// wait waits for the n slots of a call. It returns why the call is refused, or nil.
func (b *Bulkhead) wait(ctx context.Context, level, n int) *FullError {
	patience, own := b.patience(ctx)
	// Made out of the mutex, which is to be held for a short time.
	w := &waiter{level: level, weight: n, since: b.now(), ready: make(chan struct{})}
	b.mu.Lock()
	queued, refusal := b.join(w, patience)
	b.unlock()
	if refusal != nil {
		return refusal
	}
	if !queued {
		return nil
	}

	b.await(ctx, w, patience, own)
	if w.admitted && ctx.Err() == nil {
		b.waited.Add(1)
		return nil
	}
	if w.admitted { // the slots came too late: pass them on
		b.leave(n)
		w.refusal = ContextEnded
	}
	refusal = b.describe(w.refusal, level, n)
	refusal.Waited, refusal.err = b.now()-w.since, ended.Error(ctx)
	return refusal
}

// await returns when w is settled: when it is handed its slots or refused, or when its
// patience ends.
func (b *Bulkhead) await(ctx context.Context, w *waiter, patience time.Duration, own bool) {
	done := ctx.Done()
	var passed <-chan time.Time
	if own {
		timer := time.NewTimer(patience)
		defer timer.Stop()
		passed = timer.C
	} else if done == nil {
		<-w.ready // half of what a select costs
		return
	}
	select {
	case <-w.ready:
	case <-passed:
		b.abandon(w, MaxWaitPassed)
	case <-done:
		b.abandon(w, ContextEnded)
	}
}

const forever = math.MaxInt64 // as patience

// patience returns how long a caller can wait, and whether it is MaxWait that
// bounds it, not the deadline of ctx.
func (b *Bulkhead) patience(ctx context.Context) (left time.Duration, own bool) {
	left, own = forever, false
	if b.cfg.MaxWait > 0 {
		left, own = b.cfg.MaxWait, true
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
	var now time.Duration // reading the clock is a good part of a hand-over
	if b.cfg.Order == CoDel {
		now = b.now()
	}
	b.mu.Lock()
	if !b.slots.give(n) {
		if b.queue.pace.handed(n) {
			now = b.now()
			b.queue.pace.ended(now)
		}
		b.grant(now, n)
	}
	b.unlock()
}

// refusal returns the error of a call that did not wait. It is the one of the
// level's last refusal if that says the same: being refused costs little then,
// which is what an overloaded program can afford.
func (b *Bulkhead) refusal(reason Reason, level, n int) *FullError {
	limit, inFlight := b.figures()
	queued := int(b.waiters.Load())
	last := b.last[level].Load()
	if last != nil && last.Reason == reason && last.Weight == n && last.Limit == limit &&
		last.InFlight == inFlight && last.Queued == queued {
		return last
	}
	e := b.describe(reason, level, n)
	b.last[level].Store(e)
	return e
}

func (b *Bulkhead) describe(reason Reason, level, n int) *FullError {
	limit, inFlight := b.figures()
	return &FullError{
		Name:     b.cfg.Name,
		Reason:   reason,
		Level:    level,
		Weight:   n,
		Limit:    limit,
		InFlight: inFlight,
		Queued:   int(b.waiters.Load()),
		never:    reason == TooHeavy && n > b.mostLimit()-b.kept[level],
	}
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

// mostLimit returns the highest limit that there can be without SetLimit.
func (b *Bulkhead) mostLimit() int {
	if b.cfg.Adaptive != nil {
		return b.adaptive.controller.cfg.Max
	}
	return int(b.limit.Load())
}

// now returns the time since b was built.
func (b *Bulkhead) now() time.Duration { return time.Since(b.born) }

// fold makes room in the word for more calls admitted.
func (b *Bulkhead) fold() {
	b.mu.Lock()
	b.folded += b.slots.fold()
	b.mu.Unlock()
}

// Stats are the figures of a [Bulkhead] at one moment.
type Stats struct {
	Limit       int              // slots
	InFlight    int              // slots that are taken; above Limit after that has shrunk
	Queued      []int            // callers that wait, by level
	Admitted    int64            // calls that got a slot
	Refused     int64            // calls that did not, other than those whose ctx had ended before
	Refusals    map[Reason]int64 // Refused by reason, without those that did not occur
	Waited      int64            // calls of Admitted that had to wait
	LongestWait time.Duration    // how long the oldest of the callers that wait now has waited

	// LongestHeld is how long the oldest of the slots has been held that Begin took
	// or that belong to a response, which a resiliencehttp.Transport holds until its
	// body has been read. One that grows without end is a done that is never called
	// or a body that is never closed. Slots of other calls are not timed.
	LongestHeld time.Duration
}

// Stats returns the present figures. It is cheap enough to be called each second.
func (b *Bulkhead) Stats() Stats {
	s := Stats{Queued: make([]int, b.cfg.Levels), Refusals: make(map[Reason]int64)}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.folded += b.slots.fold()
	s.Limit = int(b.limit.Load())
	s.InFlight = s.Limit - freeIn(b.slots.word.Load())
	for level := range b.queue.lines {
		l := &b.queue.lines[level]
		s.Queued[level] = l.waiters
		if l.oldest != nil {
			s.LongestWait = max(s.LongestWait, b.now()-l.oldest.since)
		}
	}
	s.LongestHeld = b.longestHeld()
	s.Waited = b.waited.Load()
	s.Admitted = b.folded + s.Waited
	for reason := range Reason(reasons) {
		if n := b.refused[reason].Load(); n > 0 {
			s.Refusals[reason] = n
			s.Refused += n
		}
	}
	return s
}
