package saga

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"database/sql"
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

	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/notify"
	"github.com/go-resilience/resilience/internal/panics"
	store "github.com/go-resilience/resilience/internal/sagastore"
	"github.com/go-resilience/resilience/internal/sqltx"
	"github.com/go-resilience/resilience/saga/internal/memory"
)

// A Runner claims due sagas, runs their steps, and takes over those of crashed processes. Each process has its
// own; there is no leader.
type Runner struct {
	// This file follows a saga: claim, hold, and then next, record, attempt, did, again and again.

	store store.Store
	tx    store.TxStore // nil if the store has no transactions
	owner string
	cfg   RunnerConfig  // with its defaults; it does not change
	wake  chan struct{} // claim now

	chance    func(below time.Duration) time.Duration
	observers notify.Observers[Event]

	mu       sync.Mutex
	programs map[store.Definition]*program
	held     map[string]*hold
	reserved int             // places kept for a Start or claim under way
	base     context.Context // of every attempt; nil while Run is not under way
	draining bool
	backlog  bool                           // the last claim returned as many as it asked for
	waiters  map[string][]chan store.Record // by id, for Result
	work     sync.WaitGroup

	figures figures
}

// NewMemory returns a store that keeps sagas in the process.
func NewMemory() Store { return memory.New() }

// A Store is that of [NewMemory] or of package sqlstore.
type Store = store.Store

// NewRunner returns a runner on st, which runs no saga before Run is called. It panics if st is nil or cfg not
// valid.
func NewRunner(st Store, cfg RunnerConfig) *Runner {
	err := cfg.Validate()
	if st == nil {
		err = errors.Join(errors.New("saga.NewRunner needs a Store, not nil"), err)
	}
	if err != nil {
		panic(err)
	}
	r := &Runner{
		store: st, cfg: cfg.withDefaults(), owner: rand.Text()[:12], chance: mathrand.N[time.Duration],
		wake: make(chan struct{}, 1), programs: make(map[store.Definition]*program),
		held: make(map[string]*hold), waiters: make(map[string][]chan store.Record),
		figures: figures{sagas: make(map[string]map[string]int64), stored: make(map[string]Count)},
	}
	r.tx, _ = st.(store.TxStore)
	if cfg.Name != "" {
		r.owner = cfg.Name + "-" + r.owner
	}
	return r
}

// Name returns the Name of the RunnerConfig.

// Config returns the configuration, with its defaults.
func (r *Runner) Config() RunnerConfig { return r.cfg }

// Register makes definitions, and those of their children, known to a runner; versions side by side. It panics
// if one is not valid, needs transactions that the store has not, has the name and version of another, or if JSON
// does not keep all fields of S and there is no Codec.
func Register[S any](r *Runner, sagas ...*Saga[S]) {
	for _, sg := range sagas {
		if err := r.register(sg.program()); err != nil {
			panic(err)
		}
	}
}

func (r *Runner) register(p *program, err error) error {
	if err == nil && p.needsTx && r.tx == nil {
		err = fmt.Errorf("%w: %s has a DoTx or UndoTx", errNoTx, p.name)
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
	r.figures.register(p.name)
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

// Wake makes the runner ask for due sagas now, such as after the commit of a [StartTx].
func (r *Runner) Wake() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// Run runs sagas until ctx ends, and returns nil, or at once an error if it cannot begin: ctx has ended, another
// Run is under way, or the store was not migrated.
//
// When ctx ends, Run waits up to RunnerConfig.Drain for the running attempts, and writes back its sagas for other
// runners; what cannot be written they take over. It returns within about Drain and LeaseTTL, unless a step
// ignores its ctx or a hook does not return.
func (r *Runner) Run(ctx context.Context) error {
	if ctx.Err() != nil {
		return ended.Error(ctx)
	}
	if c, ok := r.store.(store.Checker); ok {
		call, cancel := context.WithTimeout(ctx, r.cfg.LeaseTTL/3)
		err := c.Check(call)
		cancel()
		if errors.Is(err, store.ErrNotMigrated) {
			return fmt.Errorf("saga: run: %w", err)
		}
		if err != nil && ctx.Err() == nil { // it may answer later
			r.storeFailed(ctx, fmt.Errorf("saga: run: %w", err))
		}
	}
	ctx = context.WithValue(ctx, oursKey{}, true)
	base, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	defer cancel(errDraining)
	r.mu.Lock()
	if r.base != nil {
		r.mu.Unlock()
		return errors.New("saga: the runner is running already")
	}
	r.base, r.draining = base, false
	r.mu.Unlock()

	var loops errgroup.Group
	for _, loop := range []func(){
		func() { r.claimLoop(ctx) },
		func() { r.listenLoop(ctx) },
		func() { every(ctx, r.cfg.Poll, nil, func() time.Duration { return r.sweep(ctx) }) },
		// The heartbeat ends with the ctx of the attempts. Otherwise a step that hangs, or a store that
		// accepts heartbeats and fails every commit, would keep a saga forever.
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
	defer time.AfterFunc(r.cfg.Drain, func() { cancel(errDraining) }).Stop()
	r.work.Wait()
	cancel(errDraining)
	_ = loops.Wait()
	r.mu.Lock()
	r.base = nil
	r.mu.Unlock()
	return nil
}

func (r *Runner) isDraining() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.draining
}

// every calls fn after the first wait, after each that fn returns, and when wake is told, until
// ctx ends.
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

// claimLoop claims sagas at each Poll, and when it is woken. While the store fails nothing wakes
// it, since the store may fail because of how often it is asked.
func (r *Runner) claimLoop(ctx context.Context) {
	var failing, next time.Time
	every(ctx, 0, r.wake, func() time.Duration {
		if left := time.Until(next); left > 0 {
			return left
		}
		began := time.Now()
		err := r.claim(ctx)
		// The jitter keeps processes from asking at the same time.
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

// pauseFor returns how long a store is left alone that has failed since then: for as long as
// it has failed, but no less than least and no longer than most.
func pauseFor(since time.Time, least, most time.Duration) time.Duration {
	return max(least, min(time.Since(since), most))
}

// claim claims as many sagas as there are places for.
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
	// The end of ctx does not cut the claim short: claimed sagas must be written back.
	call, cancel := context.WithTimeout(context.WithoutCancel(ctx), r.cfg.LeaseTTL/3)
	recs, err := r.store.Claim(call, req)
	cancel()
	if err != nil {
		recs = nil
	}
	for _, rec := range recs {
		r.figures.count(func(s *Stats) {
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
	r.unreserve(req.Limit) // some may have ended already
	return err
}

// reserve keeps up to n places free for sagas that are about to be held, and returns how
// many. The runner does not stop before unreserve. The caller holds r.mu.
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

// unreserve gives the places of one reserve back. The caller holds r.mu.
func (r *Runner) unreserve(n int) {
	r.reserved -= n
	r.work.Done()
	r.claimRest()
}

// claimRest makes the runner claim what its last claim has left for want of places, when it has
// enough of them. The caller holds r.mu.
func (r *Runner) claimRest() {
	if r.backlog && len(r.held)+r.reserved <= r.cfg.Concurrency*3/4 {
		r.backlog = false
		r.Wake()
	}
}

// gatherFor is how long the runner gathers notifications for one claim.
const gatherFor = 2 * time.Millisecond

// listenLoop lets the store wake the runner.
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

// heartbeat keeps all held sagas, with one statement for all.
func (r *Runner) heartbeat(ctx context.Context) (next time.Duration) {
	term, began := r.cfg.LeaseTTL, time.Now()
	r.mu.Lock()
	held := make(map[store.Held]*hold, len(r.held))
	req := store.HeartbeatRequest{Owner: r.owner, LeaseTTL: term}
	for id, h := range r.held {
		if !h.isLost() { // else it waits for a step that ignores its ctx
			key := store.Held{ID: id, Epoch: h.rec.Epoch}
			held[key], req.Held = h, append(req.Held, key)
		}
	}
	r.mu.Unlock()
	if len(held) == 0 {
		return term / 3
	}
	// The first try has little time, so that a half-open connection does not cost the sagas. The
	// second has more, in case the store is slow. A store with a single writer is local, and can only
	// be slow.
	tries := []time.Duration{term / 8, term / 3}
	if r.tx != nil && r.tx.Exclusive() {
		tries = tries[1:]
	}
	for _, timeout := range tries {
		since := time.Now()
		call, cancel := context.WithTimeout(context.WithoutCancel(ctx), timeout)
		renewed, err := r.store.Heartbeat(call, req)
		cancel()
		if err != nil { // each hold has a timer for its end
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

// sweepBatch is how many sagas one call of the store deletes, of each status.
const sweepBatch = 200

// sweep deletes sagas that have been kept for long enough, a small batch of each status, and
// returns when to go on. A runner that is busy does so as well, since it ends many.
func (r *Runner) sweep(ctx context.Context) (next time.Duration) {
	next = 3 * r.cfg.LeaseTTL
	for _, kept := range []struct {
		status Status
		age    time.Duration
	}{{Completed, r.cfg.Keep.Completed}, {Compensated, r.cfg.Keep.Compensated}, {Abandoned, r.cfg.Keep.Abandoned}} {
		if kept.age <= 0 {
			continue
		}
		call, cancel := context.WithTimeout(ctx, r.cfg.LeaseTTL)
		n, err := r.store.DeleteEnded(call, kept.status, kept.age, sweepBatch)
		cancel()
		if err != nil {
			if ctx.Err() == nil {
				r.storeFailed(ctx, fmt.Errorf("saga: sweep: %w", err))
			}
			continue
		}
		r.figures.count(func(s *Stats) { s.Deleted += int64(n) })
		if n >= sweepBatch {
			next = r.cfg.Poll / 10
		}
	}
	return next
}

// hold makes this runner the holder of a saga, which it has been since then by the local clock. It
// returns what runs the saga. The caller has reserved a place.
func (r *Runner) hold(rec store.Record, since time.Time) (run func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	p := r.programs[store.Definition{Saga: rec.Saga, Version: rec.Version}]
	if p == nil {
		return func() {} // another runner takes it over
	}
	if before := r.held[rec.ID]; before != nil {
		if before.rec.Epoch >= rec.Epoch {
			return func() {}
		}
		before.lose()
	}
	h := &hold{
		r: r, p: p, rec: rec, seq: rec.Seq, since: since, tx: -1, until: since.Add(r.cfg.LeaseTTL),
		results: make(chan result, len(p.steps)), running: make([]context.CancelCauseFunc, len(p.steps)),
		id: identity{p: p, id: rec.ID, epoch: rec.Epoch}, signal: make(chan struct{}, 1),
	}
	h.ctx, h.stop = context.WithCancelCause(r.base)
	h.timer = time.AfterFunc(time.Until(h.until), h.lose)
	r.held[rec.ID] = h
	return func() { r.work.Go(h.run) }
}

// start has the store start a saga, unless it exists, and runs it here if there is a place. The hooks are
// told of a new one while it is held, so that they may take longer than a hold.
func (r *Runner) start(ctx context.Context, req store.StartRequest) (store.Record, error) {
	defer r.claimAtOnce(&req)()
	since := time.Now()
	rec, created, err := r.store.Start(ctx, req)
	if err != nil {
		// The answer may be lost. If the saga exists, its nonce says whether this call
		// has started it.
		found, lerr := r.store.Load(ctx, req.ID)
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
		defer run() // also if a hook panics
	}
	if created {
		r.tellEntry(ctx, &rec, store.Entry{Kind: EventCreated, Seq: 1, Epoch: rec.Epoch, At: rec.CreatedAt})
	}
	return rec, nil
}

// drop forgets a saga that is no longer held. rec is how it was last recorded.
func (r *Runner) drop(rec store.Record, h *hold) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.held[rec.ID] == h {
		delete(r.held, rec.ID)
	}
	r.claimRest()
	r.wakeResults(rec)
}

// A hold is one saga that a runner holds, in one epoch. The goroutine of run owns the machine, the
// state and all writes. Each attempt has a goroutine of its own, which sends it a result.
type hold struct {
	r     *Runner
	p     *program
	id    identity
	rec   store.Record // as claimed; Status, Data, Steps and LastError as last recorded
	seq   int64        // of the record now
	since time.Time    // rec.Now by the local clock

	m       *machine
	carried string // of the machine, for the attempts
	s       any    // the state, a *S, if the steps are a chain; each of others has a copy
	data    []byte // the state, encoded

	results  chan result
	running  []context.CancelCauseFunc // by step
	tx       int                       // the step that has a transaction, or -1
	open     *result                   // its result, to be committed
	readLast bool                      // the signals were read when no more could come

	ctx    context.Context         // of the attempts: ends when the saga is lost
	stop   context.CancelCauseFunc // ends ctx
	timer  *time.Timer             // fires at the end
	signal chan struct{}           // something below has changed

	mu         sync.Mutex
	until      time.Time // the end, by the local clock
	lost       bool      // another runner has the saga, or may have by now
	released   bool      // the saga is written back or has ended
	cancelNote *string   // of a request to turn back, or nil
}

// A result is the result of an attempt.
type result struct {
	step     int
	op       Op
	attempt  int
	refusals int               // in a row before it
	signals  map[string][]byte // when it began
	err      error
	took     time.Duration
	s        any                // the state, or its copy
	base     []byte             // what that is a copy of
	children int                // of the step, as recorded
	retried  bool               // start those again that have failed
	cut      bool               // its ctx ended because the runner stopped or lost the saga
	ctx      context.Context    // of the attempt
	tx       *sql.Tx            // still open after a DoTx or UndoTx that succeeded
	end      context.CancelFunc // ends ctx, and with it tx
}

// renew moves the end of the hold, after a heartbeat that was sent at since. It does not if the hold is over,
// although its timer may not have fired: isLost has said so.
func (h *hold) renew(since time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if time.Now().Before(h.until) {
		h.until = since.Add(h.r.cfg.LeaseTTL)
		h.timer.Reset(time.Until(h.until))
	}
}

// lose gives up a saga that another runner has, or may have by now, and ends its attempts.
func (h *hold) lose() {
	h.mu.Lock()
	h.lost = true
	h.mu.Unlock()
	h.stop(errLost)
	h.nudge()
}

// isLost reports whether this owner may no longer act. A process that was stopped learns
// it here before its timers fire.
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

// isHeld reports whether the saga is still to be followed: it is neither released nor lost.
func (h *hold) isHeld() bool { return !h.isReleased() && !h.isLost() }

// nudge wakes the goroutine of the saga.
func (h *hold) nudge() {
	select {
	case h.signal <- struct{}{}:
	default:
	}
}

// cancel passes on a request to turn back.
func (h *hold) cancel(note string) {
	h.mu.Lock()
	h.cancelNote = &note
	h.mu.Unlock()
	h.nudge()
}

// takeCancel takes in a request to turn back.
func (h *hold) takeCancel() {
	h.mu.Lock()
	note := h.cancelNote
	h.mu.Unlock()
	if note != nil && h.m.cancel(*note) {
		h.rec.CancelNote = *note
	}
}

// now returns the store's clock, as well as it is known here.
func (h *hold) now() time.Time { return h.rec.Now.Add(time.Since(h.since)) }

// run runs the saga until it ends, is written back to wait for its next attempt, is
// handed over because the runner stops, or is lost.
func (h *hold) run() {
	defer h.stop(nil)
	defer h.timer.Stop()
	h.follow()
	if !h.isReleased() {
		h.r.figures.count(func(s *Stats) { s.Lost++ })
		h.r.tellOf(h.ctx, &h.rec, Event{Kind: EventLost, At: h.now()})
	}
	h.leave()
	h.r.drop(h.rec, h)
}

// follow does the work of run. A panic of the user's code outside of an attempt, such as in a Backoff or a
// Codec, makes the saga stuck: it would end the process, and then each that takes the saga over.
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
		h.takeCancel()
		now := h.now()
		// A transaction of this saga may be the only one that can write. It will commit what there is to
		// record.
		if h.tx < 0 {
			if !h.readSignals(now) {
				continue
			}
			h.m.advance(now)
			h.record(now)
			if !h.isHeld() || !h.readSignals(now) {
				continue
			}
			h.takeCancel() // the record may have told of it, and taken long
			h.launch(h.now())
		}
		endUseless(h.m, h.running, now)
		h.wait(now)
		if h.open != nil {
			h.commitOpen()
		}
	}
}

// endUseless ends the ctx of running attempts, if the saga is to turn back and need not know their
// results.
func endUseless(m *machine, running []context.CancelCauseFunc, now time.Time) {
	if _, why := m.turning(now); why != nil {
		for i, cancel := range running {
			if m.useless(i) {
				cancel(&turnedBack{why})
			}
		}
	}
}

// load makes the machine and the state from the record. If it cannot, the saga is stuck.
func (h *hold) load() {
	var err error
	h.m, err = load(h.p, &h.rec)
	if err == nil {
		h.data = h.rec.Data
		h.s, err = h.p.decode(h.data)
	}
	h.carried = h.m.carried
	h.m.lookAgain()
	if extract := h.r.cfg.Extract; extract != nil && h.carried != "" {
		hook(h.ctx, "Extract", func(ctx context.Context, carried string) {
			if with := extract(ctx, carried); with != nil {
				h.ctx = with
			}
		}, h.carried)
	}
	if h.rec.Previous != "" {
		h.m.takeOver(h.rec.Previous)
	}
	if most := h.r.cfg.MaxTakeovers; err == nil && most >= 0 && h.rec.Takeovers > most {
		err = fmt.Errorf("saga: taken over %d times without a result", h.rec.Takeovers)
	}
	if err == nil {
		if h.rec.CancelRequested {
			h.m.cancel(h.rec.CancelNote)
		}
		return
	}
	if h.rec.Previous != "" {
		h.m.Takeovers = max(h.m.Takeovers, 1) // also from this runner itself: load asks whether there was one
	}
	h.m.stick("", err)
	req := h.request(true, 0)
	if h.s == nil {
		req.Data, req.Steps = h.rec.Data, h.rec.Steps // as they are, since they cannot be read
	}
	_ = h.write(req, true)
}

// readSignals reads the signals when the saga was claimed, before a wait for one can end, and when no
// more can come, for the Undos. One that comes later than that wakes the saga as soon as it is written
// back to wait. It reports false if the saga is lost.
func (h *hold) readSignals(now time.Time) bool {
	last := h.rec.Status != Running // no signal is kept any more
	if !h.p.awaits || h.m.signals != nil && !h.m.onSignal(now) && (!last || h.readLast) {
		return true
	}
	for since := time.Now(); !h.isLost(); h.pause(since) {
		ctx, cancel := h.storeCtx()
		list, err := h.r.store.Signals(ctx, h.rec.ID)
		cancel()
		if err != nil {
			h.r.storeFailed(h.ctx, fmt.Errorf("saga: signals of %q: %w", h.rec.ID, err))
			continue
		}
		h.readLast, h.m.signals = last, make(map[string][]byte, len(list))
		for _, sig := range list {
			h.m.signals[sig.Name] = sig.Payload
		}
		return true
	}
	return false
}

// record writes what has changed, and gives the saga up if nothing is to be done for a
// while. Afterwards the saga may be lost.
func (h *hold) record(now time.Time) {
	req, changed := h.next(now)
	if !changed {
		return
	}
	if err := h.write(req, false); err != nil && err != errLost {
		h.giveUp(err)
	}
}

// giveUp makes the saga stuck because of err, as it was last recorded. Steps that had started then are in
// doubt.
func (h *hold) giveUp(err error) {
	m, failed := load(h.p, &h.rec)
	if failed != nil {
		m, err = h.m, failed
	}
	m.doubt(true)
	m.stick("", err)
	h.m, h.data = m, h.rec.Data
	_ = h.write(h.request(true, 0), true)
}

// next returns the commit of what has changed. The saga is given up if the machine says so.
func (h *hold) next(now time.Time) (req store.CommitRequest, changed bool) {
	entry, wakeIn, release := h.m.release(now, h.r.isDraining(), h.r.cfg.LeaseTTL)
	if release && entry.Kind != "" {
		h.m.note(entry)
	}
	if !h.m.changed {
		return req, false
	}
	return h.request(release, wakeIn), true
}

// request returns the commit of the machine's present state.
func (h *hold) request(release bool, wakeIn time.Duration) store.CommitRequest {
	if len(h.m.log) == 0 {
		h.m.note(store.Entry{Kind: eventResumed})
	}
	req := h.m.commit(release)
	req.ID, req.Epoch, req.Seq, req.Nonce = h.rec.ID, h.rec.Epoch, h.seq, mathrand.Int64()
	req.Release, req.WakeIn = release, wakeIn
	if !bytes.Equal(h.data, h.rec.Data) {
		req.Data = h.data
	}
	return req
}

// A commit is given up after so many failures, if they have also lasted for a LeaseTTL. In
// that time the store has accepted the saga's heartbeats, so the fault is in the commit.
const unwritable = 10

// write commits req, and calls the hooks. If the answer is lost, it finds out whether the commit has
// happened, and repeats it if not. It returns errLost if the saga is lost, and another error if the
// commit cannot be written, unless it is the last resort.
func (h *hold) write(req store.CommitRequest, last bool) error {
	since := time.Now()
	for tries := 0; ; tries++ {
		ctx, cancel := h.storeCtx()
		receipt, err := h.r.store.Commit(ctx, req)
		cancel()
		h.commitFailed(err)
		switch {
		case h.happened(req, receipt, err):
			h.written(req)
			return nil
		case h.isLost():
			return errLost
		case !last && tries >= unwritable && time.Since(since) >= h.r.cfg.LeaseTTL:
			return fmt.Errorf("saga: the state cannot be recorded: %w", err)
		}
		h.pause(since)
	}
}

// happened reports whether a commit has happened that returned err, and takes in its receipt. If the
// answer is lost, the record says so: then it has the nonce of the commit.
//
// A record that has not changed may be written again, even if an earlier try is still
// under way: the fence admits only one of them. Any other record was written by another
// owner, or by a transaction of this one whose COMMIT arrived late. In both cases this
// hold no longer knows the saga's state, and loses it.
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
		h.cancel(rc.CancelNote)
	}
	if rc.Woken {
		h.r.Wake()
	}
	return true
}

// commitFailed tells of the error of a commit, if the store has failed.
func (h *hold) commitFailed(err error) {
	if err != nil && !errors.Is(err, store.ErrFenced) {
		h.r.storeFailed(h.ctx, fmt.Errorf("saga: commit of %q: %w", h.rec.ID, err))
	}
}

// written notes that req is committed, and calls the hooks.
func (h *hold) written(req store.CommitRequest) {
	h.seq = req.After()
	h.mu.Lock()
	h.released = req.Release
	h.mu.Unlock()
	h.m.committed()
	if req.Data != nil {
		h.rec.Data = req.Data
	}
	h.rec.Status, h.rec.Steps, h.rec.LastError = req.Status, req.Steps, req.LastError
	h.r.figures.count(func(s *Stats) { s.Commits++ })
	h.r.tellLog(h.ctx, &h.rec, req, h.now())
	if req.Status.Ended() {
		h.r.tellParent(h.ctx, &h.rec)
	}
}

// storeCtx returns the ctx of one call of the store. It outlives that of the attempts,
// and has a timeout, since a database may not answer.
func (h *hold) storeCtx() (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(h.ctx), h.r.cfg.LeaseTTL/2)
}

// pause waits before the next call of a store that has failed since then, for longer the longer it
// fails. In the first LeaseTTL, which may be all the time that is left, the pause is at most
// LeaseTTL/20, and later at most 20 LeaseTTL, unless the saga is lost.
func (h *hold) pause(since time.Time) {
	term := h.r.cfg.LeaseTTL
	soon := pauseFor(since, time.Millisecond, term/20)
	t := time.NewTimer(h.r.chance(pauseFor(since.Add(term), soon, 20*term)) + 1)
	defer t.Stop()
	select {
	case <-t.C:
	case <-h.ctx.Done():
		time.Sleep(h.r.chance(soon) + 1) // the hold may last for a while
	}
}

// launch starts the attempts that may begin.
func (h *hold) launch(now time.Time) {
	if h.isLost() || h.r.isDraining() {
		return
	}
	for i := h.m.next(0, now); i >= 0; i = h.m.next(i+1, now) {
		st, op := &h.m.Steps[i], h.m.op(i)
		_, doTx := h.p.steps[i].calls(op)
		tx := doTx != nil
		if tx && h.tx >= 0 {
			continue // one at a time
		}
		if tx {
			h.tx = i
		}
		res := result{step: i, op: op, s: h.s, signals: h.m.signals, children: st.Children, refusals: st.Refusals}
		// A step that has children waits for them, unless it has failed since.
		res.retried = st.Children > 0 && st.WaitingSince.IsZero()
		if !h.p.chain {
			res.s, res.err = h.p.decode(h.data)
			res.base = h.data
		}
		res.attempt = h.m.begin(i)
		ctx, cancel := context.WithCancelCause(h.ctx)
		h.running[i] = cancel
		h.r.figures.count(func(s *Stats) { s.InFlight++ })
		go h.attempt(ctx, res, tx)
	}
}

// attempt calls a Do or an Undo, on a goroutine of its own, and sends the result. Its ctx
// is independent of that of the Start.
func (h *hold) attempt(ctx context.Context, res result, tx bool) {
	timeout := cmp.Or(h.p.steps[res.step].timeout, defaultTimeout)
	if tx && h.r.tx.Exclusive() {
		// No heartbeat is written meanwhile. A saga is held since its claim began, which may have waited for
		// one such transaction, and its first heartbeat may wait for another.
		timeout = min(timeout, h.r.cfg.LeaseTTL/3)
	}
	ctx, res.end = context.WithTimeout(ctx, timeout)
	ctx = withAttempt(ctx, &attempted{saga: &h.id, step: res.step, attempt: res.attempt, op: res.op, signals: res.signals})
	res.ctx = ctx
	defer func() {
		if v := recover(); v != nil {
			stack := debug.Stack()
			res.err = panics.New(fmt.Sprintf("saga: panic: %v", v), v, stack)
			log.Printf("saga: step %s of %s panicked: %v\n%s", h.p.steps[res.step].name, h.p.name, v, stack)
		}
		if res.err != nil && res.tx != nil {
			if endedItself(ctx, res.tx.Rollback()) {
				res.err = Abort(fmt.Errorf("%w: %w", errTxEnded, res.err))
			}
			res.tx = nil
		}
		res.cut = isCut(ctx)
		if res.tx == nil {
			res.end()
		}
		h.results <- res
	}()
	if res.err != nil {
		return // its copy of the state could not be made
	}
	res.err = errExited
	began := time.Now()
	defer func() { res.took = time.Since(began) }()
	res.err = h.perform(ctx, &res, tx)
}

// isCut reports whether the ctx of an attempt has ended because the runner stopped or lost the saga.
func isCut(ctx context.Context) bool {
	cause := context.Cause(ctx)
	return errors.Is(cause, errDraining) || errors.Is(cause, errLost)
}

// perform does the work of an attempt.
func (h *hold) perform(ctx context.Context, res *result, tx bool) (err error) {
	st := &h.p.steps[res.step]
	do, doTx := st.calls(res.op)
	switch {
	case st.child != nil:
		return h.attend(ctx, res)
	case !tx:
		return do(ctx, res.s)
	}
	begin := ctx
	if res.attempt+res.refusals > 1 {
		begin = sqltx.Anew(ctx) // else each attempt may meet a server that takes no writes any more
	}
	if res.tx, err = h.r.tx.Begin(begin); err != nil {
		return &notBegun{err}
	}
	return doTx(ctx, res.tx, res.s)
}

// A notBegun is the error of an attempt without a transaction, or without the definition of a child. It is a refusal,
// as nothing was called: else a database that restarts would use up the Attempts, and turn its sagas back.
type notBegun struct{ error }

func (e *notBegun) Unwrap() error { return e.error }
func (*notBegun) Refused() bool   { return true }

// wait waits until there is something to do, and takes in all that has come by then, so that
// parallel steps that end together are recorded together.
func (h *hold) wait(now time.Time) {
	var alarm <-chan time.Time
	at, ok := h.m.wake(now, true)
	if h.tx >= 0 || h.r.isDraining() {
		at, ok = h.m.deadline(now) // no attempt begins now
	}
	if ok {
		t := time.NewTimer(at.Sub(now))
		defer t.Stop()
		alarm = t.C
	}
	select {
	case res := <-h.results:
		h.collect(res)
	case <-alarm:
	case <-h.signal:
	}
	for { // whatever it was, the rest has come too
		select {
		case res := <-h.results:
			h.collect(res)
		case <-h.signal:
		default:
			return
		}
	}
}

// collect takes in the result of an attempt.
func (h *hold) collect(res result) {
	cancel := h.running[res.step]
	h.running[res.step] = nil
	h.r.figures.count(func(s *Stats) { s.InFlight-- })
	if res.tx != nil {
		end := res.end
		res.end = func() { end(); cancel(nil) } // later: canceling ctx rolls tx back
		h.open = &res
		return
	}
	cancel(nil)
	pending, waits := res.err.(*errPending)
	if waits {
		res.err = nil
	}
	if res.step == h.tx {
		h.tx = -1
		h.restore()
	} else {
		res.err = h.keep(&res)
	}
	if waits && res.err == nil { // else begin has changed the state, which it must not
		now := h.now()
		h.m.wait(res.step, pending.children, now, now.Add(h.r.cfg.Poll))
		return
	}
	h.did(&res)
}

// did passes the end of an attempt on to the machine, and tells of it.
func (h *hold) did(res *result) {
	e := endOf(res.err, h.p.steps[res.step].failsClean)
	h.attempted(res, outcomeOf(e, res.op, res.cut))
	if e.err != nil && res.cut {
		h.m.interrupted(res.step, e)
		return
	}
	h.m.did(res.step, res.op, e, h.now())
	if n := h.m.failing(res.step); n >= 8 && n&(n-1) == 0 {
		h.r.figures.count(func(s *Stats) { s.Stalled++ })
		h.r.tellOf(h.ctx, &h.rec, Event{
			Kind: EventStalled, Step: h.p.steps[res.step].name, Op: res.op, Attempt: n, Err: e.err, At: h.now(),
		})
	}
}

// attempted counts an attempt that has ended, and tells of it.
func (h *hold) attempted(res *result, outcome string) {
	h.r.figures.saga(h.p.name, "outcome="+outcome)
	h.r.tellOf(h.ctx, &h.rec, Event{
		Kind: EventAttempted, Step: h.p.steps[res.step].name, Op: res.op, Attempt: res.attempt,
		Outcome: outcome, Took: res.took, Err: res.err, At: h.now(),
	})
}

// keep merges an attempt's changes into the state, and returns the attempt's error. If
// they conflict with those of another attempt, the attempt has failed and may run again,
// on the state that the other has left. If the state can no longer be encoded, the
// attempt has failed for good.
func (h *hold) keep(res *result) error {
	data, err := h.merged(res)
	if err == nil {
		h.data = data
		return res.err
	}
	h.restore()
	if res.err != nil {
		return fmt.Errorf("%w; %w", res.err, err)
	}
	return err
}

// merged returns the state with an attempt's changes, encoded.
func (h *hold) merged(res *result) ([]byte, error) {
	if res.s == nil {
		return h.data, nil // its copy could not be made
	}
	data, err := h.p.encode(res.s)
	if err != nil {
		return nil, Abort(err)
	}
	if h.p.chain || bytes.Equal(res.base, h.data) {
		return data, nil // nothing has changed in the meantime
	}
	// All are decoded, since a value may not come back as it was: a time loses its monotonic
	// clock, which is no change of a step.
	var states [3]any
	for i, data := range [][]byte{h.data, res.base, data} {
		if states[i], err = h.p.decode(data); err != nil {
			return nil, err // the attempt is in doubt
		}
	}
	if err := mergeState(states[0], states[1], states[2]); err != nil {
		return nil, err
	}
	data, err = h.p.encode(states[0])
	return data, Abort(err)
}

// restore returns the state to what it was when it was last kept.
func (h *hold) restore() {
	if !h.p.chain {
		return
	}
	s, err := h.p.decode(h.data)
	if err != nil {
		h.m.stick("", err)
		return
	}
	h.s = s
}

// commitOpen commits the transaction of a DoTx or UndoTx that has succeeded, together
// with everything else that is to be recorded. The fenced statement comes last. If the
// transaction does not commit, the attempt has failed without effect.
func (h *hold) commitOpen() {
	res := h.open
	h.takeCancel() // a cancellation that came while the attempt ran
	h.open, h.tx = nil, -1
	defer res.end()
	before, data := h.m.clone(), h.data
	if res.err = h.keep(res); res.err != nil {
		_ = res.tx.Rollback()
		h.did(res)
		return
	}
	if h.isLost() {
		_ = res.tx.Rollback()
		h.attempted(res, outcomeInterrupted)
		return
	}
	now := h.now()
	h.m.did(res.step, res.op, end{}, now)
	h.m.advance(now)
	req, _ := h.next(now)

	ctx, cancel := h.storeCtx()
	receipt, err := h.r.tx.CommitTx(ctx, res.tx, req)
	cancel()
	if err == nil {
		err = res.tx.Commit()
	} else {
		if endedItself(res.ctx, err) {
			err = Abort(errTxEnded)
		}
		_ = res.tx.Rollback()
	}
	if !isCut(res.ctx) { // else that has rolled it back
		h.commitFailed(err)
	}
	if h.happened(req, receipt, err) {
		h.attempted(res, outcomeDone)
		h.written(req)
		return
	}
	h.m, h.data = before, data
	h.restore()
	res.err, res.cut = err, isCut(res.ctx) && !errors.Is(err, errTxEnded) // else that has rolled it back
	h.did(res)
}

// leave ends the attempts of a saga that is no longer held, and waits for them.
func (h *hold) leave() {
	h.stop(errLost)
	for i := range h.running {
		if h.running[i] == nil {
			continue
		}
		res := <-h.results
		h.r.figures.count(func(s *Stats) { s.InFlight-- })
		if res.tx != nil {
			_ = res.tx.Rollback()
			res.end()
		}
		h.attempted(&res, outcomeInterrupted)
	}
}
