package saga

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log"
	"maps"
	mathrand "math/rand/v2"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/go-resilience/resilience/internal/notify"
	"github.com/go-resilience/resilience/saga/internal/memory"
	store "github.com/go-resilience/resilience/saga/sagastore"
)

// A Runner is an [Engine] that keeps its sagas in a [Store]. A Runner claims due sagas, runs their steps, and takes
// over the sagas of crashed processes. Each process has its own Runner; there is no leader. A Runner is safe for
// concurrent use.
type Runner struct {
	// This file has the code that runs sagas. The runner claims and holds a saga. Then, in a loop, it decides, records the
	// decision, and performs calls.

	store store.Store
	tx    store.TxStore // nil if the store has no transactions
	owner string
	cfg   RunnerConfig  // includes the default values; does not change
	wake  chan struct{} // a value makes the runner claim now

	chance    func(below time.Duration) time.Duration
	observers notify.Observers[Event]

	mu       sync.Mutex
	programs map[store.Definition]*program
	held     map[string]*hold
	reserved int             // the number of places that are reserved for a Start or claim in progress
	base     context.Context // the ctx of every attempt; nil while Run is not active
	draining bool
	backlog  bool                           // the last claim returned as many sagas as it requested
	waiters  map[string][]chan store.Record // channels of calls to Wait, by the saga's id

	unread map[string]unreadable // sagas that another build of the program may be able to read, by id

	claimErr, heartbeatErr error     // the errors of the latest claim and heartbeat, or nil
	failed                 time.Time // when a claim or heartbeat last failed; zero means never

	starting sync.Map // the once that reports EventCreated of a start in progress, by Nonce

	work sync.WaitGroup

	counters counters
}

var _ TxEngine = (*Runner)(nil)

// NewMemory returns a Store that keeps sagas in the memory of the process, for tests.
func NewMemory() Store { return memory.New() }

// A Store contains the sagas of a [Runner]. [NewMemory] and package sqlstore provide stores. Package sagastore
// documents the interface for other stores.
type Store = store.Store

// NewRunner returns a Runner. The Runner runs no saga until [Runner.Run] is called. NewRunner panics if st is nil or
// cfg is invalid; see [RunnerConfig.Validate].
func NewRunner(st Store, cfg RunnerConfig) *Runner {
	err := cfg.Validate()
	if st == nil {
		err = errors.Join(errors.New("saga: Store is nil: must be set"), err)
	}
	if err != nil {
		panic(err)
	}
	r := &Runner{
		store: st, cfg: cfg.withDefaults(), owner: rand.Text()[:12], chance: mathrand.N[time.Duration],
		wake: make(chan struct{}, 1), programs: make(map[store.Definition]*program),
		held: make(map[string]*hold), waiters: make(map[string][]chan store.Record), unread: make(map[string]unreadable),
		counters: counters{sagas: make(map[string]map[string]int64), stored: make(map[string]Count)},
	}
	r.tx, _ = st.(store.TxStore)
	if cfg.Name != "" {
		r.owner = cfg.Name + "-" + r.owner
	}
	return r
}

// Config returns the configuration, with the default values in place of zero values.
func (r *Runner) Config() RunnerConfig { return r.cfg }

// Register implements [Engine]. Programs call the function [Register].
func (r *Runner) Register(d *Definition) error { return r.register(d.p, nil) }

func (r *Runner) register(p *program, err error) error {
	if err == nil && p.needsTx && r.tx == nil {
		err = fmt.Errorf("%w: %s has a DoTx or UndoTx", ErrNoTx, p.name)
	}
	if err == nil {
		err = p.kept()
	}
	if err != nil {
		return err
	}
	r.mu.Lock()
	known := r.programs[p.definition()]
	if known == nil {
		r.programs[p.definition()] = p
	}
	r.mu.Unlock()
	switch known {
	case p:
		return nil
	case nil:
	default:
		return fmt.Errorf("saga: %s version %d is registered already", p.name, p.version)
	}
	r.counters.register(p.name)
	for i := range p.steps {
		if c := p.steps[i].child; c != nil {
			if err := r.register(c.program()); err != nil {
				return err
			}
		}
	}
	return nil
}

func (r *Runner) program(saga string, version int) (*program, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if p := r.programs[store.Definition{Saga: saga, Version: version}]; p != nil {
		return p, nil
	}
	return nil, fmt.Errorf("%w: %s version %d", ErrNotRegistered, saga, version)
}

// Wake makes the runner query the store for due sagas now, for example after the commit of a [Handle.StartTx].
func (r *Runner) Wake() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// Run runs sagas until ctx is done, and then returns nil. Run returns an error immediately if another Run is in
// progress or the store was not migrated. If ctx is already done, Run returns nil without using the store.
//
// When ctx is done, Run waits up to RunnerConfig.Drain for attempts in progress. Then Run releases the runner's sagas,
// and other runners can claim them. If a saga cannot be released, another runner takes the saga over when the lease has
// expired. Once ctx is done, Run returns within about Drain plus LeaseTTL, unless a step ignores its ctx or an observer
// does not return.
func (r *Runner) Run(ctx context.Context) error {
	if ctx.Err() != nil {
		return nil
	}
	if c, ok := r.store.(store.Checker); ok {
		call, cancel := context.WithTimeout(ctx, r.cfg.LeaseTTL/3)
		err := c.Check(call)
		cancel()
		if errors.Is(err, store.ErrNotMigrated) {
			return fmt.Errorf("saga: run: %w", err)
		}
		if err != nil && ctx.Err() == nil { // the store may answer later
			r.storeFailed(ctx, fmt.Errorf("saga: run: %w", err))
		}
	}
	base, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	defer cancel(errDraining)
	r.mu.Lock()
	if r.base != nil {
		r.mu.Unlock()
		return errors.New("saga: runner is running already")
	}
	r.base, r.draining = base, false
	r.mu.Unlock()

	var loops errgroup.Group
	for _, loop := range []func(){
		func() { r.claimLoop(ctx) },
		func() { r.listenLoop(ctx) },
		func() { r.survey(ctx) },
		func() { every(ctx, r.cfg.Poll, nil, func() time.Duration { return r.sweep(ctx) }) },
		// The heartbeats stop when the ctx of the attempts is canceled. Otherwise the runner could hold a saga forever, if a
		// step does not return, or if the store accepts heartbeats but no commit.
		func() { every(base, r.cfg.LeaseTTL/3, nil, func() time.Duration { return r.heartbeat(base) }) },
	} {
		loops.Go(func() error { loop(); return nil })
	}
	<-ctx.Done()
	r.mu.Lock()
	r.draining = true
	for _, h := range r.held {
		h.nudge()
	}
	r.mu.Unlock()
	if r.cfg.Drain == None {
		cancel(errDraining)
	} else {
		defer time.AfterFunc(r.cfg.Drain, func() { cancel(errDraining) }).Stop()
	}
	r.work.Wait()
	cancel(errDraining)
	_ = loops.Wait()
	r.mu.Lock()
	r.base, r.claimErr, r.heartbeatErr = nil, nil, nil
	r.mu.Unlock()
	return nil
}

func (r *Runner) isDraining() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.draining
}

// every calls fn until ctx is done: first after the wait first, and then after each wait that fn returns. A value from
// wake ends a wait early.
func every(ctx context.Context, first time.Duration, wake <-chan struct{}, fn func() time.Duration) {
	for wait := first; ; wait = fn() {
		if wait > 0 {
			select {
			case <-ctx.Done():
			case <-time.After(wait):
			case <-wake:
			}
		}
		if ctx.Err() != nil {
			return
		}
	}
}

// claimLoop claims sagas at each Poll and when the runner is woken. After a failure of the store, nothing ends the
// pause early, because the load on the store may be the reason for the failure.
func (r *Runner) claimLoop(ctx context.Context) {
	var failing, next time.Time
	every(ctx, 0, r.wake, func() time.Duration {
		if left := time.Until(next); left > 0 {
			return left
		}
		began := time.Now()
		err := r.claim(ctx)
		// The jitter prevents processes from claiming at the same time.
		wait := r.cfg.Poll - r.chance(r.cfg.Poll/8+1)
		if err == nil {
			failing = time.Time{}
			return wait
		}
		if failing.IsZero() {
			failing = began
		}
		wait = pauseFor(failing, wait, r.cfg.LeaseTTL)
		r.storeFailed(ctx, fmt.Errorf("saga: claim (the next is in %v): %w", wait.Round(time.Millisecond), err))
		next = time.Now().Add(wait)
		return wait
	})
}

// pauseFor returns the pause before the next call to a store that has been failing since the time since. The pause
// equals the time for which the store has been failing, but is at least least and at most most.
func pauseFor(since time.Time, least, most time.Duration) time.Duration {
	return max(least, min(time.Since(since), most))
}

// claim claims as many sagas as there are free places.
func (r *Runner) claim(ctx context.Context) error {
	r.mu.Lock()
	req := store.ClaimRequest{Owner: r.owner, LeaseTTL: r.cfg.LeaseTTL, Definitions: slices.Collect(maps.Keys(r.programs))}
	if len(req.Definitions) > 0 {
		req.Limit = r.reserve(r.cfg.Concurrency)
		r.backlog = req.Limit == 0
	}
	r.mu.Unlock()
	if req.Limit == 0 {
		return nil
	}
	since := time.Now()
	// ctx does not cancel the claim: the runner must learn which sagas it has claimed, to release them.
	call, cancel := context.WithTimeout(context.WithoutCancel(ctx), r.cfg.LeaseTTL/3)
	recs, err := r.store.Claim(call, req)
	cancel()
	if err != nil {
		recs = nil
	}
	r.failing(&r.claimErr, "claim", err)
	for _, rec := range recs {
		r.counters.count(func(s *Stats) {
			if rec.Previous != "" {
				s.TakenOver++
			} else {
				s.Claimed++
			}
		})
		r.hold(rec, since)()
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.backlog = len(recs) == req.Limit
	r.unreserve(req.Limit) // some of the sagas may have ended by now and left places free
	return err
}

// failing records the error of the latest claim or heartbeat, or nil, for the health check.
func (r *Runner) failing(latest *error, call string, err error) {
	if err != nil {
		err = fmt.Errorf("saga: %s: %w", call, err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	*latest = err
	if err != nil {
		r.failed = time.Now()
	}
}

// failedWithin reports whether a claim or heartbeat of this runner has failed in the last d.
func (r *Runner) failedWithin(d time.Duration) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return !r.failed.IsZero() && time.Since(r.failed) < d
}

// reserve reserves up to n free places for sagas that the runner is about to hold, and returns the number of reserved
// places. Run does not return before unreserve is called. The caller holds r.mu.
func (r *Runner) reserve(n int) int {
	if r.base == nil || r.draining {
		return 0
	}
	n = max(min(n, r.cfg.Concurrency-len(r.held)-r.reserved), 0)
	if n > 0 {
		r.reserved += n
		r.work.Add(1)
	}
	return n
}

// unreserve releases the places of a reserve. The caller holds r.mu.
func (r *Runner) unreserve(n int) {
	r.reserved -= n
	r.work.Done()
	r.claimRest()
}

// claimRest wakes the claim loop if the last claim left due sagas in the store and a quarter of the places is free. The
// caller holds r.mu.
func (r *Runner) claimRest() {
	if r.backlog && len(r.held)+r.reserved <= r.cfg.Concurrency*3/4 {
		r.backlog = false
		r.Wake()
	}
}

// gatherFor is the time for which the runner collects notifications for one claim.
const gatherFor = 2 * time.Millisecond

// listenLoop lets the store wake the runner when sagas become due, if the store is a Notifier.
func (r *Runner) listenLoop(ctx context.Context) {
	n, ok := r.store.(store.Notifier)
	if !ok {
		return
	}
	var gathering atomic.Bool
	notify := func() {
		if gathering.CompareAndSwap(false, true) {
			time.AfterFunc(gatherFor, func() { gathering.Store(false); r.Wake() })
		}
	}
	every(ctx, 0, nil, func() time.Duration {
		if err := n.Listen(ctx, notify); ctx.Err() == nil {
			r.storeFailed(ctx, fmt.Errorf("saga: listen: %w", err))
		}
		return r.cfg.Poll
	})
}

// heartbeat extends the leases of all held sagas with one call to the store.
func (r *Runner) heartbeat(ctx context.Context) (next time.Duration) {
	term, began := r.cfg.LeaseTTL, time.Now()
	r.mu.Lock()
	held := make(map[store.Held]*hold, len(r.held))
	req := store.HeartbeatRequest{Owner: r.owner, LeaseTTL: term}
	for id, h := range r.held {
		if !h.isLost() { // a lost saga is in r.held until its attempts have returned
			key := store.Held{ID: id, Epoch: h.rec.Epoch}
			held[key], req.Held = h, append(req.Held, key)
		}
	}
	r.mu.Unlock()
	if len(held) == 0 {
		r.failing(&r.heartbeatErr, "heartbeat", nil)
		return term / 3
	}
	// The first try has a short timeout, because a half-open connection must not cost the leases. The second try has a
	// longer timeout, in case the store is slow. An exclusive store has a single writer and no network connection: it can
	// only be slow, so the short try is omitted.
	tries := []time.Duration{term / 8, term / 3}
	if r.tx != nil && r.tx.Exclusive() {
		tries = tries[1:]
	}
	for _, timeout := range tries {
		since := time.Now()
		call, cancel := context.WithTimeout(context.WithoutCancel(ctx), timeout)
		renewed, err := r.store.Heartbeat(call, req)
		cancel()
		r.failing(&r.heartbeatErr, "heartbeat", err)
		if err != nil { // a timer of each hold ends the hold's lease if no heartbeat succeeds
			r.storeFailed(ctx, fmt.Errorf("saga: heartbeat: %w", err))
			continue
		}
		for _, n := range renewed {
			key := store.Held{ID: n.ID, Epoch: n.Epoch}
			h := held[key]
			if h == nil {
				continue
			}
			if !n.Locked {
				h.renew(since)
			}
			if n.CancelRequested {
				h.cancel(n.CancelNote)
			}
			delete(held, key)
		}
		for _, h := range held {
			h.lose()
		}
		break
	}
	return time.Until(began.Add(term / 3))
}

// sweepBatch is the number of sagas of each status that one call to the store deletes.
const sweepBatch = 200

// sweep deletes a small batch of sagas of each status whose retention has elapsed, and returns the wait before the next
// call. A busy runner also deletes sagas, because it ends many of them.
func (r *Runner) sweep(ctx context.Context) (next time.Duration) {
	next = 3 * r.cfg.LeaseTTL
	for _, kept := range r.cfg.Retention.byStatus() {
		if kept.age == Unlimited {
			continue
		}
		call, cancel := context.WithTimeout(ctx, r.cfg.LeaseTTL)
		n, err := r.store.DeleteEnded(call, kept.status, kept.age, sweepBatch)
		cancel()
		if err != nil {
			if ctx.Err() != nil {
				return next
			}
			r.storeFailed(ctx, fmt.Errorf("saga: sweep: %w", err))
			continue
		}
		r.counters.count(func(s *Stats) { s.Deleted += int64(n) })
		if n >= sweepBatch {
			next = r.cfg.Poll / 10
		}
	}
	return next
}

// hold makes this runner the holder of a saga. since is the local time from which the lease counts. hold returns the
// function that runs the saga. The caller has reserved a place.
func (r *Runner) hold(rec store.Record, since time.Time) (run func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	p := r.programs[store.Definition{Saga: rec.Saga, Version: rec.Version}]
	if p == nil {
		return func() {} // another runner takes the saga over when the lease has expired
	}
	if before := r.held[rec.ID]; before != nil {
		if before.rec.Epoch >= rec.Epoch {
			return func() {}
		}
		before.lose()
	}
	h := &hold{
		r: r, p: p, rec: rec, since: since, until: since.Add(r.cfg.LeaseTTL),
		results: make(chan *attempt, len(p.steps)), running: make(map[string]context.CancelCauseFunc),
		signal: make(chan struct{}, 1),
	}
	h.ctx, h.stop = context.WithCancelCause(r.base)
	h.timer = time.AfterFunc(time.Until(h.until), h.lose)
	r.held[rec.ID] = h
	return func() { r.work.Go(h.run) }
}

// start starts a saga in the store unless it exists, and runs it in this runner if a place is free. Observers are
// notified after the runner holds the new saga. From then on, heartbeats extend its lease, so observers may take longer
// than a lease.
func (r *Runner) start(ctx context.Context, req store.StartRequest) (store.Record, error) {
	defer r.claimAtOnce(&req)()
	report := newOnce()
	r.starting.Store(req.Nonce, report)
	defer r.starting.Delete(req.Nonce)
	since := time.Now()
	call, cancel := ctx, context.CancelFunc(func() {})
	if req.Owner != "" {
		// After a LeaseTTL, the lease of the new saga has expired, so the place must not remain reserved.
		call, cancel = context.WithTimeout(ctx, r.cfg.LeaseTTL)
	}
	rec, created, err := r.store.Start(call, req)
	cancel()
	if err != nil {
		// The reply of the store may be lost. If the saga exists, its nonce shows whether this call started it. If so, this
		// runner may own the saga and must run it, even if ctx is done.
		load, cancel := ctx, context.CancelFunc(func() {})
		if req.Owner != "" {
			load, cancel = context.WithTimeout(context.WithoutCancel(ctx), r.cfg.LeaseTTL/8)
		}
		found, lerr := r.store.Load(load, req.ID)
		cancel()
		if lerr != nil {
			return rec, fmt.Errorf("saga: start of %q: %w", req.ID, err)
		}
		rec, created = found, found.Nonce == req.Nonce
	}
	if rec.Saga != req.Saga || rec.Parent != req.Parent && req.Parent != "" {
		return rec, fmt.Errorf("%w: %q is a %s", ErrExists, req.ID, rec.Saga)
	}
	if rec.Owner == "" {
		defer r.Wake()
	} else if created && rec.Owner == req.Owner && rec.Epoch == 1 {
		run := r.hold(rec, since)
		defer run()
	}
	if created {
		report.do(func() {
			r.reportEntry(ctx, &rec, store.Entry{Kind: EventCreated, Seq: 1, Epoch: rec.Epoch, At: rec.CreatedAt})
		})
	}
	return rec, nil
}

// drop removes a saga that the runner no longer holds. rec is the last known record of the saga.
func (r *Runner) drop(rec store.Record, h *hold) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.held[rec.ID] == h {
		delete(r.held, rec.ID)
	}
	r.claimRest()
	r.wakeResults(rec)
}

// A hold is one saga that a runner holds, in one epoch. The goroutine of run owns all fields above mu. Until the saga
// has ended or is released, it decides, records the decision, and performs the decision's calls, each on a separate
// goroutine.
type hold struct {
	r     *Runner
	p     *program
	rec   store.Record // the record as last recorded; Now is still the time of the claim
	since time.Time    // the local time at which the store's clock was rec.Now

	m        *machine                           // the latest snapshot
	in       Input                              // the events since the latest snapshot
	running  map[string]context.CancelCauseFunc // cancels the attempts in progress, by step
	inTx     bool                               // an attempt in progress has a transaction
	open     *attempt                           // the attempt whose transaction is to be committed
	readLast bool                               // the signals were read after no more signals could arrive

	ctx     context.Context         // the ctx of the attempts, canceled when the saga is lost
	stop    context.CancelCauseFunc // cancels ctx
	results chan *attempt
	timer   *time.Timer   // calls lose at the time until
	signal  chan struct{} // reports a change of a field below

	mu         sync.Mutex
	until      time.Time // the end of the lease by the local clock
	lost       bool      // another runner has the saga, or may have it by now
	released   bool      // the saga was released in the store, or has ended
	cancelNote *string   // the note of a request to turn back, or nil
	overdue    []overdue // attempts in progress that did not return after their timeout
}

// renew extends the lease after a heartbeat that was sent at the time since. It does nothing if the lease has expired,
// even if the timer has not fired yet: isLost may already have reported that the saga is lost.
func (h *hold) renew(since time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if time.Now().Before(h.until) {
		h.until = since.Add(h.r.cfg.LeaseTTL)
		h.timer.Reset(time.Until(h.until))
	}
}

// lose marks the saga as lost, because another runner has it or may have it by now, and cancels its attempts.
func (h *hold) lose() {
	h.mu.Lock()
	h.lost = true
	h.mu.Unlock()
	h.stop(errLost)
	h.nudge()
}

// isLost reports whether this runner must no longer act for the saga, because another runner may hold it. If the
// process was suspended, isLost returns true even before the timers fire.
func (h *hold) isLost() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.lost || !time.Now().Before(h.until)
}

func (h *hold) isReleased() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.released
}

// isHeld reports whether the saga is neither released nor lost.
func (h *hold) isHeld() bool { return !h.isReleased() && !h.isLost() }

// nudge wakes the goroutine of the saga.
func (h *hold) nudge() {
	select {
	case h.signal <- struct{}{}:
	default:
	}
}

// cancel passes a request to cancel to the goroutine of the saga.
func (h *hold) cancel(note string) {
	h.mu.Lock()
	h.cancelNote = &note
	h.mu.Unlock()
	h.nudge()
}

// overrun is called if an attempt has not returned a LeaseTTL after its timeout.
func (h *hold) overrun(a overdue) {
	h.mu.Lock()
	h.overdue = append(h.overdue, a)
	h.mu.Unlock()
	h.nudge()
}

// ended removes the entry that overrun added for an attempt. The attempt has returned.
func (h *hold) ended(t *attempt) {
	if t.hangs != nil {
		t.hangs.Stop()
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.overdue = slices.DeleteFunc(h.overdue, func(a overdue) bool { return a.step == t.Step })
}

// hangsInTx reports whether the attempt with the transaction is overdue and this is not recorded yet. The transaction
// was rolled back when the ctx of the attempt was canceled, so the saga can be written.
func (h *hold) hangsInTx() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.ContainsFunc(h.overdue, func(a overdue) bool {
		return h.m.hasTx(h.m.index(a.step)) && !slices.Contains(h.m.hung, a.step)
	})
}

// now returns the current time of the store's clock, which is computed from the local clock.
func (h *hold) now() time.Time { return h.rec.Now.Add(time.Since(h.since)) }

// run runs the saga until it ends, is parked, is released because the runner stops, or is lost.
func (h *hold) run() {
	defer h.stop(nil)
	defer h.timer.Stop()
	h.follow()
	if h.m.Status.Ended() { // in the store perhaps, too, if the saga is lost
		h.notifyParent()
	}
	if !h.isReleased() {
		h.r.counters.count(func(s *Stats) { s.Lost++ })
		h.r.reportEvent(h.ctx, &h.rec, Event{Kind: EventLost, At: h.now()})
	}
	h.leave()
	h.rec.Now = h.now()
	h.r.drop(h.rec, h)
}

// follow does the work of run. If a function that is not a step panics, such as a Codec, the saga is stuck. Otherwise
// the panic would crash the process, and then each process that takes the saga over.
func (h *hold) follow() {
	defer func() {
		if v := recover(); v != nil {
			log.Printf("saga: %s panicked outside of a step: %v\n%s", h.p.name, v, debug.Stack())
			if !h.isReleased() {
				h.giveUp(fmt.Errorf("saga: panic outside of a step: %v", v))
			}
		}
	}()
	for h.load(); h.isHeld(); {
		if h.inTx && !h.hangsInTx() {
			h.waitInTx()
			continue
		}
		if !h.readSignals(h.now()) {
			continue
		}
		d := h.decide(h.m, false)
		h.accept(&d)
		if d.changed {
			h.record(&d)
			continue
		}
		if h.isLost() {
			continue
		}
		h.perform(d.Calls)
		h.end(&d)
		if !h.inTx {
			h.wait(d.WakeAt)
		}
	}
}

// decide returns the next decision about m, which is the latest snapshot, or a copy of it if the decision may be
// discarded. idle means that no attempt can start now.
func (h *hold) decide(m *machine, idle bool) Decision {
	h.in.Now = h.now()
	h.in.runner.lease, h.in.runner.idle, h.in.runner.stops = h.r.cfg.LeaseTTL, idle, h.r.isDraining()
	h.mu.Lock()
	note := h.cancelNote
	h.in.runner.overdue = slices.Clone(h.overdue)
	h.mu.Unlock()
	if note != nil {
		h.in.runner.cancel, h.rec.CancelNote = note, *note
	}
	return m.decide(&h.in)
}

// accept makes the decision the latest snapshot, and reports the attempts that it counted.
func (h *hold) accept(d *Decision) {
	h.m, h.in = d.Snapshot.m, Input{}
	for i := range d.answers {
		h.reportAnswer(&d.answers[i])
	}
}

// load makes the machine from the record. If the record cannot be read, load releases the saga for another build of the
// program. If no build has read the saga for a long time, load makes it stuck.
func (h *hold) load() {
	var err error
	readable := false
	h.m, err = load(h.p, &h.rec)
	if h.r.noteReadable(&h.rec, err); err != nil && h.leaveToOthers(err) {
		return
	}
	if err == nil {
		_, err = h.p.decode(h.rec.State)
		readable = err == nil
	}
	if extract := h.r.cfg.Extract; extract != nil && h.m.carried != "" {
		hook(h.ctx, "Extract", func(ctx context.Context, carried string) {
			if with := extract(ctx, carried); with != nil {
				h.ctx = with
			}
		}, h.m.carried)
	}
	if report, ok := h.r.starting.Load(h.rec.Nonce); ok { // claimed before the start has reported EventCreated
		report.(once).do(func() {
			h.r.reportEntry(h.ctx, &h.rec, store.Entry{Kind: EventCreated, Seq: 1, At: h.rec.CreatedAt})
		})
	}
	h.r.reportCreated(h.ctx, &h.rec, h.m.unreported)
	if most := h.r.cfg.MaxTakeovers; err == nil && most != Unlimited && h.rec.Takeovers > 0 {
		if h.r.failedWithin(h.rec.Now.Sub(h.m.since)) {
			h.m.Takeovers = 0 // the owners may have lost the saga because the store failed, not because they crashed
		} else if h.rec.Takeovers > most {
			err = fmt.Errorf("saga: taken over %d times without a result", h.rec.Takeovers)
		}
	}
	h.in.runner.look, h.in.runner.takenFrom, h.in.runner.stick = true, h.rec.Previous, err
	if err == nil {
		if h.rec.CancelRequested {
			h.cancel(h.rec.CancelNote)
		}
		return
	}
	d := h.decide(h.m, false)
	h.accept(&d)
	req := h.request(&d)
	if !readable {
		req.State, req.Progress = h.rec.State, h.rec.Progress // both remain unchanged
	}
	h.write(req, true)
}

// readSignals reads the signals of the saga at three times: after the saga was claimed, before a wait for a signal can
// end, and, for the Undos, when no more signals can arrive. A signal that arrives later wakes the saga as soon as the
// saga is parked. readSignals returns false if the saga is lost.
func (h *hold) readSignals(now time.Time) bool {
	last := h.rec.Status != Running // no signal is accepted any more
	if !h.p.awaits || h.m.signals != nil && !h.m.onSignal(now) && (!last || h.readLast) {
		return true
	}
	for since := time.Now(); !h.isLost(); h.pause(since) {
		ctx, cancel := h.storeCtx()
		list, err := h.r.store.Messages(ctx, h.rec.ID)
		cancel()
		if err != nil {
			h.r.storeFailed(h.ctx, fmt.Errorf("saga: signals of %q: %w", h.rec.ID, err))
			continue
		}
		h.readLast, h.in.Signals = last, make(map[string][]byte, len(list))
		for _, sig := range list {
			h.in.Signals[sig.Name] = sig.Payload
		}
		return true
	}
	return false
}

// record writes a decision to the store. After it has returned, the saga may be released or lost.
func (h *hold) record(d *Decision) { h.write(h.request(d), false) }

// giveUp makes the saga stuck because of err, and discards the changes that were not recorded. For the steps that had
// started by then, the outcome is unknown. giveUp retries the commit until the saga is lost.
func (h *hold) giveUp(err error) {
	m, failed := load(h.p, &h.rec)
	if failed == nil {
		h.m = m
	} else {
		err = failed
	}
	h.in = Input{runner: runnerInput{doubt: true, stick: err}}
	d := h.decide(h.m, false)
	h.accept(&d)
	h.write(h.request(&d), true)
}

// request returns the commit of a decision.
func (h *hold) request(d *Decision) store.CommitRequest {
	req := d.Snapshot.m.commit()
	req.ID, req.Epoch, req.Seq, req.Nonce = h.rec.ID, h.rec.Epoch, h.rec.Seq, mathrand.Int64()
	req.Release, req.WakeIn = d.release, d.wakeIn
	if !bytes.Equal(d.Snapshot.m.State, h.rec.State) {
		req.State = d.Snapshot.m.State
	}
	return req
}

// unwritable is the number of consecutive rejections after which the runner may give up a commit, if the rejections
// have also lasted for a LeaseTTL. In that time the store has accepted the saga's heartbeats.
const unwritable = 10

// probes is the number of other commits that the store must accept in a row, with a rejection after each, before the
// runner gives up a commit. With a single probe, a store that rejects nine of ten commits would make sagas stuck.
const probes = 5

// write commits req and notifies the observers. If the reply of the store is lost, write reads from the record whether
// the commit has happened. Until the commit has happened or the saga is lost, write repeats the commit. Unless last is
// true, write makes the saga stuck instead if the store keeps rejecting the commit, but accepts other commits of the
// saga. If the store rejects the other commits, too, the reason is not in the state.
func (h *hold) write(req store.CommitRequest, last bool) {
	since := time.Now()
	first, rejections, accepted := since, 0, 0
	for {
		rejected, err := h.commit(req)
		if err == nil || h.isLost() {
			return
		}
		if rejections++; !rejected {
			first, rejections, accepted = time.Now(), 0, 0
		}
		if accepted == probes {
			h.giveUp(fmt.Errorf("saga: state cannot be recorded: %w", err))
			return
		}
		if !last && rejections > unwritable && time.Since(first) >= h.r.cfg.LeaseTTL {
			if h.writable(err) { // the store may have started to work again after it rejected req
				accepted++
				req.Seq, req.Nonce = h.rec.Seq, mathrand.Int64()
				continue
			}
			accepted = 0
		}
		h.pause(since)
	}
}

// writable reports whether the store accepts a commit of the state that is recorded already. why is the error of the
// commit that the store rejects.
func (h *hold) writable(why error) bool {
	m, err := load(h.p, &h.rec)
	if err != nil {
		return false
	}
	m.note(store.Entry{Kind: EventResumed, Error: storable(why.Error())})
	_, err = h.commit(h.request(&Decision{Snapshot: Snapshot{m}}))
	return err == nil
}

// commit makes one try to commit req, and returns nil if the commit has happened. rejected reports whether the store
// has returned the error. Otherwise the call has timed out, perhaps because the store is down.
func (h *hold) commit(req store.CommitRequest) (rejected bool, err error) {
	ctx, cancel := h.storeCtx()
	receipt, err := h.r.store.Commit(ctx, req)
	rejected = ctx.Err() == nil
	cancel()
	h.commitFailed(err)
	if !h.happened(req, receipt, err) {
		return rejected, err
	}
	h.written(req)
	return false, nil
}

// happened reports whether a commit that returned err has happened, and records its receipt. If the reply is lost, the
// record shows the result:
//
//   - If the record has the commit's nonce, the commit has happened.
//   - If the record is unchanged, the commit has not happened, and may be written again. That is safe even if an
//     earlier try is still in progress, because the fence (Epoch and Seq) admits only one of them.
//   - Otherwise the record was written by another owner, or by a transaction of this owner whose COMMIT arrived late.
//     In both cases this hold no longer knows the saga's state, and marks the saga as lost.
func (h *hold) happened(req store.CommitRequest, rc store.Receipt, err error) bool {
	for since := time.Now(); err != nil; {
		if h.isLost() {
			return false
		}
		ctx, cancel := h.storeCtx()
		rec, lerr := h.r.store.Load(ctx, req.ID)
		cancel()
		switch {
		case errors.Is(lerr, ErrNotFound):
			h.lose()
		case lerr != nil:
			h.r.storeFailed(h.ctx, fmt.Errorf("saga: commit of %q: %w", req.ID, lerr))
			h.pause(since)
		case rec.Nonce == req.Nonce:
			rc, err = store.Receipt{CancelRequested: rec.CancelRequested, CancelNote: rec.CancelNote}, nil
		case rec.Epoch == req.Epoch && rec.Seq == req.Seq:
			return false
		default:
			h.lose()
		}
	}
	if rc.CancelRequested {
		h.rec.CancelRequested = true
		h.cancel(rc.CancelNote)
	}
	if rc.Woken {
		h.r.Wake()
	}
	return true
}

// commitFailed notifies the observers of the error of a commit, if err means that the store has failed.
func (h *hold) commitFailed(err error) {
	if err != nil && !errors.Is(err, store.ErrFenced) {
		h.r.storeFailed(h.ctx, fmt.Errorf("saga: commit of %q: %w", h.rec.ID, err))
	}
}

// written records that req is committed, and notifies the observers.
func (h *hold) written(req store.CommitRequest) {
	h.mu.Lock()
	h.released = req.Release
	h.mu.Unlock()
	if req.State != nil {
		h.rec.State = req.State
	}
	now := h.now()
	h.rec.Status, h.rec.Progress, h.rec.LastError = req.Status, req.Progress, req.LastError
	h.rec.Failures, h.rec.Takeovers, h.rec.UpdatedAt = req.Failures, req.Takeovers, now
	if req.Release {
		h.rec.Owner, h.rec.WakeAt = "", now.Add(req.WakeIn)
	}
	h.r.counters.count(func(s *Stats) { s.Commits++ })
	h.r.reportLog(h.ctx, &h.rec, req, now)
	h.rec.Seq = req.After()
}

// storeCtx returns the ctx of one call to the store. It is not canceled with the ctx of the attempts. It has a timeout,
// because a database may not answer.
func (h *hold) storeCtx() (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(h.ctx), h.r.cfg.LeaseTTL/2)
}

// pause waits before the next call to a store that has been failing since the time since. The pause grows with that
// time. In the first LeaseTTL, after which the lease may have expired, it is at most LeaseTTL/20. Later it is at most
// LeaseTTL. If the saga is lost, the pause is short again.
func (h *hold) pause(since time.Time) {
	term := h.r.cfg.LeaseTTL
	soon := pauseFor(since, time.Millisecond, term/20)
	t := time.NewTimer(h.r.chance(pauseFor(since.Add(term), soon, term)) + 1)
	defer t.Stop()
	select {
	case <-t.C:
	case <-h.ctx.Done():
		time.Sleep(h.r.chance(soon) + 1) // wait here as well, since the lease may not have expired yet
	}
}

// perform performs calls, each on a separate goroutine.
func (h *hold) perform(calls []Call) {
	for _, c := range calls {
		t := &attempt{Call: c, p: h.p, h: h}
		if _, tx := h.p.steps[h.p.index(c.Step)].calls(c.Op); tx != nil {
			h.inTx = true
			if h.r.tx.Exclusive() {
				// An exclusive store accepts no heartbeat during the transaction. So the transaction may take only a third of the
				// lease: the claim from which the lease counts may have waited for one such transaction, and the first heartbeat
				// may wait for another one.
				if most := h.r.cfg.LeaseTTL / 3; t.Timeout == 0 || t.Timeout > most {
					t.Timeout = most
				}
			}
		}
		ctx, cancel := context.WithCancelCause(h.ctx)
		t.cancel, h.running[c.Step] = cancel, cancel
		if t.Timeout > 0 {
			a := overdue{c.Step, c.Command.Attempt}
			t.hangs = time.AfterFunc(t.Timeout+h.r.cfg.LeaseTTL, func() { h.overrun(a) })
		}
		h.r.counters.count(func(s *Stats) { s.InFlight++ })
		go func() {
			defer func() { h.results <- t }() // even if the step calls runtime.Goexit
			t.perform(ctx)
		}()
	}
}

// end cancels the attempts that the decision stops.
func (h *hold) end(d *Decision) {
	for _, step := range d.Stop {
		if cancel := h.running[step]; cancel != nil {
			cancel(&turnedBack{d.why})
		}
	}
}

// waitInTx waits while an attempt has a transaction, and then commits the transaction with everything that must be
// recorded. In an exclusive store, no other write is possible during the transaction. So the answers of other attempts
// are not recorded before that.
func (h *hold) waitInTx() {
	d := h.decide(h.m.clone(), true) // finds the attempts to cancel; the decision is discarded
	h.end(&d)
	h.wait(d.deadline)
	if h.open != nil {
		h.commitOpen()
	}
}

// wait waits until an attempt has ended, the hold is woken, or the time at has come. Then it collects all attempts that
// have ended. So one commit records parallel steps that end at the same time.
func (h *hold) wait(at time.Time) {
	var alarm <-chan time.Time
	if !at.IsZero() {
		t := time.NewTimer(at.Sub(h.now()))
		defer t.Stop()
		alarm = t.C
	}
	select {
	case t := <-h.results:
		h.collect(t)
	case <-alarm:
	case <-h.signal:
	}
	for { // collects everything that has arrived
		select {
		case t := <-h.results:
			h.collect(t)
		case <-h.signal:
		default:
			return
		}
	}
}

// collect receives the answer of an attempt, and its transaction if one is open.
func (h *hold) collect(t *attempt) {
	delete(h.running, t.Step)
	h.ended(t)
	h.r.counters.count(func(s *Stats) { s.InFlight-- })
	t.answer.at = h.now()
	h.in.Answers = append(h.in.Answers, t.answer)
	if t.tx != nil {
		h.open = t
		return
	}
	t.cancel(nil)
	if _, tx := h.p.steps[t.n].calls(t.Op); tx != nil {
		h.inTx = false
	}
}

// reportAnswer counts an attempt that has ended, and notifies the observers.
func (h *hold) reportAnswer(a *Answer) {
	if a.waits {
		return
	}
	h.r.counters.countSaga(h.p.name, "outcome="+string(a.Outcome))
	h.r.reportEvent(h.ctx, &h.rec, Event{
		Kind: EventAttempted, Step: a.Step, Op: a.Op, Attempt: a.attempt,
		Outcome: a.Outcome, Took: a.took, Err: a.err, At: a.at,
	})
	if a.stalled > 0 {
		h.r.counters.count(func(s *Stats) { s.Stalled++ })
		h.r.reportEvent(h.ctx, &h.rec, Event{
			Kind: EventStalled, Step: a.Step, Op: a.Op, Attempt: a.stalled, Err: a.err, At: h.now(),
		})
	}
}

// commitOpen commits the transaction of a DoTx or UndoTx that has succeeded, together with the decision that follows
// from its result. The statement that checks the fence (Epoch and Seq) is the last one of the transaction. If the
// transaction does not commit, the attempt has failed without effect.
func (h *hold) commitOpen() {
	t := h.open
	h.open, h.inTx = nil, false
	defer t.cancel(nil) // rolls tx back unless it has ended
	answer := &h.in.Answers[slices.IndexFunc(h.in.Answers, func(a Answer) bool { return a.Step == t.Step })]
	d := h.decide(h.m.clone(), false)
	done := slices.ContainsFunc(d.answers, func(a Answer) bool { return a.Step == t.Step && a.Outcome == OutcomeDone })
	if !done || h.isLost() {
		_ = t.tx.Rollback()
		if done {
			answer.Outcome = OutcomeInterrupted
		}
		return // the next decision records the results without the transaction
	}
	req := h.request(&d)
	ctx, cancel := h.storeCtx()
	receipt, err := h.r.tx.CommitTx(ctx, t.tx, req)
	cancel()
	if err == nil {
		err = t.tx.Commit()
	} else {
		if endedItself(t.ctx, err) {
			err = Permanent(errTxEnded)
		}
		_ = t.tx.Rollback()
	}
	if !isCut(t.ctx) { // otherwise the cancellation has rolled tx back
		h.commitFailed(err)
	}
	if h.happened(req, receipt, err) {
		h.accept(&d)
		h.written(req)
		return
	}
	// The changes to the state are discarded with the transaction.
	t.fail(err)
	t.answer.State = nil
	*answer = t.answer
}

// leave cancels the attempts of a saga that is no longer held, and waits for them. Then it reports the attempts whose
// answers no decision has counted.
func (h *hold) leave() {
	h.stop(errLost)
	for range len(h.running) {
		t := <-h.results
		h.ended(t)
		h.r.counters.count(func(s *Stats) { s.InFlight-- })
		if t.tx != nil {
			_ = t.tx.Rollback()
		}
		t.cancel(nil)
		t.answer.Outcome, t.answer.at = OutcomeInterrupted, h.now()
		h.in.Answers = append(h.in.Answers, t.answer)
	}
	for i := range h.in.Answers {
		h.reportAnswer(&h.in.Answers[i])
	}
}
