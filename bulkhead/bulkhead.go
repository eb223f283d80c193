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
//   - Where tenants share the slots, Config.Share keeps the flood of one from the others:
//     the shares that wait are served in turn, and a full queue refuses the calls of the
//     one that waits most.
//   - In a chain a bulkhead comes inside of retries, so that no slot is held while a
//     retry waits, and outside of the timeout of the single call.
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
// Design Patterns catalog (https://learn.microsoft.com/azure/architecture/patterns/).
package bulkhead

import (
	"context"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/keyed"
	"github.com/go-resilience/resilience/internal/linger"
	"github.com/go-resilience/resilience/internal/notify"
	"github.com/go-resilience/resilience/internal/settings"
)

// A Bulkhead lets a limited number of calls run at once. It is safe for concurrent
// use. [New] makes one.
type Bulkhead struct {
	key   string // in a Group
	born  time.Time
	rules atomic.Pointer[rules]

	resizes atomic.Int64 // odd while the limit changes
	counts  counters
	last    []atomic.Pointer[FullError] // by level: the latest refusal, to be shared

	held      heldSlots
	answered  atomic.Int64 // of held, slots of an adaptive limit's calls whose work goes on
	changes   notify.Queue[Event]
	observers notify.Observers[Event]

	setting settings.Setting[Config] // whose lock is taken before that of adaptive
	mu      sync.Mutex               // taken after it
	queue   queue
	folded  int64 // calls admitted that slots no longer counts
}

// New returns a Bulkhead. It panics with the error of cfg.Validate, if there is
// one.
func New(cfg Config) *Bulkhead {
	b := &Bulkhead{}
	b.make(newVersion(cfg))
	return b
}

func newVersion(cfg Config) *settings.Version[Config] {
	return settings.NewVersion(cfg, Config.withDefaults)
}

func (b *Bulkhead) make(v *settings.Version[Config]) {
	r := newRules(v.Filled())
	limit := r.Limit
	if r.Adaptive != nil {
		r.adaptive = &adaptive{controller: newController(*r.Adaptive)}
		limit = r.adaptive.controller.Limit()
	}
	b.born, b.last = time.Now(), make([]atomic.Pointer[FullError], r.Levels)
	b.queue.levels = make([]level, r.Levels)
	b.setting.Adopt(v, Config.withDefaults, nil)
	b.rules.Store(r)
	b.queue.limit.Store(int64(limit))
	b.queue.slots.word.Store(bias + uint64(limit))
}

// Do runs fn when there is a slot for it, and returns its error. It waits for a
// slot as Config allows. If it gets none, it returns a [*FullError] and does not call
// fn. If ctx has already ended, Do returns why.
func (b *Bulkhead) Do(ctx context.Context, fn func(context.Context) error) error {
	r := b.rules.Load()
	// Fast path: a free slot, and no levels, costs, shares, adaptive limit or waiters.
	if r.simple && ctx.Err() == nil && b.queue.slots.takeOne() {
		if work := linger.Of(ctx); work != nil {
			return b.outlast(ctx, taken{n: 1}, fn, work)
		}
		defer b.leave(taken{n: 1})
		return fn(ctx)
	}
	has, err := b.enter(ctx, r, r.MaxWait)
	if err != nil {
		return err
	}
	work := linger.Of(ctx)
	switch {
	case has.n == 0:
		return fn(ctx)
	case r.adaptive != nil:
		return b.measure(ctx, r.adaptive, has, fn, work)
	case work != nil:
		return b.outlast(ctx, has, fn, work)
	}
	defer b.leave(has)
	return fn(ctx)
}

// A claim says which share a call belongs to.
type claim struct {
	share  string
	weight int
}

// text returns the share of a call, "" for none.
func (c *claim) text() string {
	if c == nil {
		return ""
	}
	return c.share
}

// isFor reports whether text returns share, quickly where there are no shares.
func (c *claim) isFor(share string) bool {
	if c == nil {
		return share == ""
	}
	return c.share == share
}

// taken are the slots that a call has.
type taken struct {
	n     int
	share *share // that holds them; nil: none
}

// outlast calls fn in slots that are given back when work is over.
func (b *Bulkhead) outlast(ctx context.Context, has taken, fn func(context.Context) error, work *linger.Work) error {
	return work.Hold(ctx, fn, b.hold(has))
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
	has, err := b.enter(ctx, r, maxWait)
	if err != nil {
		return nil, err
	}
	if has.n == 0 {
		return func(error) {}, nil
	}
	var started call
	if r.adaptive != nil {
		started = b.started(ctx, r.adaptive, has)
	}
	h := b.hold(has)
	return func(err error) {
		switch {
		case !b.unlist(h):
		case r.adaptive != nil:
			b.ended(ctx, r.adaptive, started, has, outcomeOf(ctx, err))
		default:
			b.leave(has)
		}
	}, nil
}

// enter takes the slots of a call, or refuses it.
func (b *Bulkhead) enter(ctx context.Context, r *rules, maxWait time.Duration) (has taken, err error) {
	if ctx.Err() != nil {
		return taken{}, ended.Error(ctx)
	}
	level := 0
	if r.Priority != nil {
		level = min(max(r.Priority(ctx), 0), r.Levels-1)
	}
	n := 1
	if r.Cost != nil {
		if n = max(r.Cost(ctx), 0); n == 0 {
			b.counts.costless.Add(1)
			return taken{}, nil
		}
	}
	var c *claim
	if r.Share != nil {
		c = r.claim(ctx)
	}
	if r.adaptive != nil {
		b.makeRoom(level, n)
	}
	of, refusal := b.try(ctx, r, level, n, c, maxWait)
	for refusal != nil && refusal.Reason == TooCostly {
		present := b.rules.Load() // an Update may have replaced r, and the queue goes by these
		if !b.endProbe(ctx, present, level, n) {
			break
		}
		of, refusal = b.try(ctx, present, level, n, c, maxWait)
	}
	if refusal == nil {
		return taken{n, of}, nil
	}
	b.counts.refused[refusal.index].Add(1)
	if b.observers.Any() {
		b.observers.Tell(ctx, refusal.event())
	}
	return taken{}, refusal
}

// try takes the slots of a call, perhaps after a wait, or returns why it does not. of is the
// share that then holds them, or nil.
func (b *Bulkhead) try(ctx context.Context, r *rules, level, n int, c *claim, maxWait time.Duration) (of *share, refusal *FullError) {
	limit := int(b.queue.limit.Load())
	kept := r.kept(limit, level)
	var word uint64
	var ok bool
	if c != nil {
		of, ok = b.passWaiters(level, n, c)
	} else {
		word, ok = b.queue.slots.take(n, kept)
	}
	switch {
	case ok:
		if word >= foldAt {
			b.fold()
		}
		return of, nil
	case n > limit-kept:
		return nil, b.refusal(r, TooCostly, level, n, c)
	case maxWait == 0 && word&waiting != 0:
		if of, ok = b.passWaiters(level, n, c); ok {
			return of, nil
		}
		fallthrough
	case maxWait == 0:
		return nil, b.refusal(r, NoSlot, level, n, c)
	case c == nil && b.queueFull(r, level, n, kept, word):
		return nil, b.refusal(r, QueueFull, level, n, c)
	}
	return b.wait(ctx, r, level, n, c, maxWait)
}

// passWaiters takes the slots of a call that does not wait itself, if it may take them
// before the calls that do.
func (b *Bulkhead) passWaiters(level, n int, c *claim) (of *share, ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	of = b.shareOf(c)
	word, ok := b.queue.by(b.rules.Load(), b.now()).admit(of, level, n)
	if !ok {
		return nil, false
	}
	if word >= foldAt {
		b.folded += b.queue.slots.fold()
	}
	b.queue.shares.count(of, n, 0)
	return of, true
}

// shareOf returns the share of a call, or nil. The mutex is held.
func (b *Bulkhead) shareOf(c *claim) *share {
	if c == nil {
		return nil
	}
	return b.queue.shares.of(c.share, c.weight)
}

// queueFull reports whether it is certain without the mutex that a call which found
// word gets no place in the queue.
func (b *Bulkhead) queueFull(r *rules, level, n, kept int, word uint64) bool {
	return level == r.Levels-1 && r.Order == FIFO && freeIn(word)-kept < n &&
		b.queue.waiters.Load() >= int64(r.Queue)
}

// wait waits for the slots of a call. It returns why the call is refused, or nil.
func (b *Bulkhead) wait(ctx context.Context, r *rules, level, n int, c *claim, maxWait time.Duration) (of *share, refusal *FullError) {
	left, own := patience(ctx, maxWait)
	w := &waiter{level: level, cost: n, since: b.now(), ready: make(chan struct{})}
	b.mu.Lock()
	q := b.queue.by(b.rules.Load(), w.since)
	queued, reason := q.enter(w, b.shareOf(c), r.Queue, left, own)
	if reason != "" {
		refusal = b.refusal(q.rules, reason, level, n, c)
	}
	b.unlock()
	if refusal != nil {
		return nil, refusal
	}
	if of = w.line.share; !queued {
		return of, nil
	}

	b.await(ctx, r, w, left, own)
	if w.admitted && ctx.Err() == nil {
		waited := b.now() - w.since
		b.counts.waited.Add(1)
		b.counts.waitTime.Add(int64(waited))
		b.tellWaited(ctx, w, waited)
		return of, nil
	}
	if w.admitted { // the slots came too late: pass them on
		b.leave(w.slots())
		w.refusal = ContextEnded
	}
	refusal = b.describe(r, w.refusal, level, n, c)
	refusal.Waited, refusal.err = b.now()-w.since, ended.Error(ctx)
	return nil, refusal
}

// await returns when w is settled: when it is handed its slots or refused, or when its
// patience ends.
func (b *Bulkhead) await(ctx context.Context, r *rules, w *waiter, left time.Duration, own bool) {
	done := ctx.Done()
	var passed, stuck <-chan time.Time
	if own {
		timer := time.NewTimer(left)
		defer timer.Stop()
		passed = timer.C
	} else if done == nil && r.adaptive == nil {
		<-w.ready // half of what a select costs
		return
	}
	if r.adaptive != nil {
		ticker := time.NewTicker(cohortTime)
		defer ticker.Stop()
		stuck = ticker.C
	}
	for {
		select {
		case <-w.ready:
			return
		case <-stuck: // perhaps: all other calls may wait, too
			b.makeRoom(w.level, w.cost)
		case <-passed:
			b.abandon(w, WaitTooLong)
			return
		case <-done:
			b.abandon(w, ContextEnded)
			return
		}
	}
}

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

// abandon settles w as refused, unless it has been settled already.
func (b *Bulkhead) abandon(w *waiter, refusal Reason) {
	b.mu.Lock()
	defer b.unlock()
	if w.settled {
		return
	}
	q := b.queue.by(b.rules.Load(), b.now())
	q.settle(w, false, refusal)
	q.grant(0) // w may have held up others
}

// leave gives the slots of a call back, or hands them to waiters if there are any.
func (b *Bulkhead) leave(has taken) {
	if has.share == nil && b.queue.slots.give(has.n) {
		return
	}
	b.mu.Lock()
	b.queue.shares.count(has.share, -has.n, 0)
	if !b.queue.slots.give(has.n) {
		now := b.now()
		b.queue.pace.handed(has.n, now)
		b.queue.by(b.rules.Load(), now).grant(has.n)
	}
	b.unlock()
}

// unlock releases the mutex and then tells the waiters that were settled under it.
// Waking them takes longer than the rest of what happens under the mutex.
func (b *Bulkhead) unlock() {
	settled := b.queue.settled
	b.queue.settled = nil
	b.mu.Unlock()
	for w := settled; w != nil; w = w.older {
		close(w.ready)
	}
}

// refusal returns the error of a call that did not wait. If the last refusal of its
// level says the same, it is that one: refusing costs little then, which is what an
// overloaded program can afford.
func (b *Bulkhead) refusal(r *rules, reason Reason, level, n int, c *claim) *FullError {
	limit, inFlight := b.figures()
	queued := int(b.queue.waiters.Load())
	last := b.last[level].Load()
	if last != nil && last.Reason == reason && last.Cost == n && last.Limit == limit &&
		last.InFlight == inFlight && last.Queued == queued && c.isFor(last.Share) && reason != TooCostly {
		return last
	}
	e := b.describe(r, reason, level, n, c)
	b.last[level].Store(e)
	return e
}

func (b *Bulkhead) describe(r *rules, reason Reason, level, n int, c *claim) *FullError {
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
		Share:    keyed.Text(c.text()),
		Limit:    limit,
		InFlight: inFlight,
		Queued:   int(b.queue.waiters.Load()),
		index:    reason.index(),
		never:    n > r.most(highest, level),
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
		limit, word := int(b.queue.limit.Load()), b.queue.slots.word.Load()
		if resizes%2 == 0 && b.resizes.Load() == resizes {
			return limit, limit - freeIn(word)
		}
		runtime.Gosched()
	}
}

// now returns the time since b was built.
func (b *Bulkhead) now() time.Duration { return time.Since(b.born) }

// unix returns the time since 1970, by the clock as it was when b was built.
func (b *Bulkhead) unix() time.Duration { return time.Duration(b.born.UnixNano()) + b.now() }

// fold makes room in the word for more calls admitted.
func (b *Bulkhead) fold() {
	b.mu.Lock()
	b.folded += b.queue.slots.fold()
	b.mu.Unlock()
}
