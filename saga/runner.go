package saga

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	mathrand "math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/invalid"
)

// RunnerConfig configures a [Runner]. The zero RunnerConfig is usable. The hooks
// are called by the goroutines that run sagas, several at a time. A panic in a hook
// is logged by slog's default logger.
type RunnerConfig struct {
	Name string // in the names of owners, in events and errors

	// Lease is how long a saga stays this runner's without a heartbeat, which
	// comes three times as often; what a crashed process held is taken over when
	// it is over. 0: 15 s; at least 10 ms.
	Lease time.Duration
	// Poll is how often the store is asked for sagas that are due. 0: 1 s.
	Poll time.Duration
	// Concurrency is how many sagas the runner holds at most. 0: 64.
	Concurrency int
	// Park is the longest wait for a step's next attempt that a saga is held
	// for. Before a longer one it is written back, due again then. 0: 5 s.
	Park time.Duration
	// Drain is how long the attempts that are running may go on when the ctx of
	// Run ends; then their ctx ends too, and no lease is extended any more. 0:
	// 10 s; negative: none at all.
	Drain time.Duration
	// MaxTakeovers is how often a saga may be taken over from crashed owners
	// without a result in between, before it is stuck: the process that it
	// kills next would be this one. 0: 10; negative: no limit.
	MaxTakeovers int

	// OnEvent is called after each entry in the log of a saga, by the runner that
	// wrote it, and after each attempt that fails and will be repeated.
	OnEvent func(context.Context, Event)
	// FailingAfter is how long a saga may make no progress, while its attempts fail,
	// are refused or do not end, before OnFailing is called. It is called again each
	// time that this has lasted twice as long. 0: 10 minutes; negative: never.
	FailingAfter time.Duration

	// OnFailing is called for a saga that makes no progress: a step past the pivot
	// that never works, an Undo that is refused, an attempt that heeds no ctx. nil:
	// slog's default logger at Warn.
	OnFailing func(context.Context, FailingSaga)
	// OnStuck is called when a saga has become stuck and needs a person. If the
	// process ends before OnStuck has returned, another calls it, a few leases
	// later: it is called at least once. nil: slog's default logger warns.
	OnStuck func(context.Context, StuckSaga)
	// OnUnregistered is called, every few leases, for sagas that are due and
	// that this runner does not know. nil: slog's default logger warns.
	OnUnregistered func(context.Context, Unregistered)
	// OnStoreError is called when the store has failed; the runner tries again.
	// nil: slog's default logger warns, once a second at most.
	OnStoreError func(context.Context, error)
}

// Validate reports all that is wrong with the configuration, or nil.
func (c RunnerConfig) Validate() error {
	f := invalid.Fields{Type: "saga.RunnerConfig"}
	f.Need(c.Lease == 0 || c.Lease >= 10*time.Millisecond, "Lease", c.Lease, "0 (for 15s), or 10ms or more")
	f.Need(c.Poll >= 0, "Poll", c.Poll, "0 (for 1s) or more")
	f.Need(c.Concurrency >= 0, "Concurrency", c.Concurrency, "0 (for 64) or more")
	f.Need(c.Park >= 0, "Park", c.Park, "0 (for 5s) or more")
	return f.Err()
}

func (c RunnerConfig) withDefaults() RunnerConfig {
	defaultTo := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	defaultTo(&c.Lease, 15*time.Second)
	defaultTo(&c.Poll, time.Second)
	defaultTo(&c.Park, 5*time.Second)
	defaultTo(&c.Drain, 10*time.Second)
	defaultTo(&c.FailingAfter, 10*time.Minute)
	if c.Concurrency == 0 {
		c.Concurrency = 64
	}
	if c.MaxTakeovers == 0 {
		c.MaxTakeovers = 10
	}
	return c
}

// An Event is something that happened to a saga.
type Event struct {
	Name    string // of the runner
	Saga    string
	Version int
	ID      string
	Entry   // Seq is 0 for EventRetry, which is in no log
}

// EventRetry is the event of an attempt that failed and will be repeated.
const EventRetry = "retry"

// A StuckSaga is a saga that has become stuck, with all that is needed to mend
// it by hand.
type StuckSaga struct {
	Name     string // of the runner
	Instance        // its Actions are those that are open to a person
}

// A FailingSaga is a saga that makes no progress. The Error of its Steps says why,
// Since for how long.
type FailingSaga struct {
	Name string // of the runner
	Instance
}

// A Runner is the scheduler, the agents and the supervisor of one process: it
// claims sagas that are due, runs their steps, and takes over those that
// crashed processes have left. Every process has its own; there is no leader.
// A Runner is safe for concurrent use.
type Runner struct {
	cfg   RunnerConfig
	store Store
	tx    TxStore // nil: the store has no transactions
	owner string
	wake  chan struct{}

	mu       sync.Mutex
	programs map[Definition]program
	held     map[string]*execution
	reserved int             // places kept for a Start under way
	base     context.Context // of every attempt; nil: not running
	draining bool
	waiters  map[string][]chan struct{}
	backlog  bool // the last claim got as many as it asked for
	work     sync.WaitGroup

	count  counters
	warned atomic.Int64 // when a failure of the store was last logged
}

// NewRunner returns a runner on store, which does nothing until Run is called,
// except for the calls made on it. It panics with the error of
// [RunnerConfig.Validate].
func NewRunner(store Store, cfg RunnerConfig) *Runner {
	err := cfg.Validate()
	if store == nil {
		err = errors.Join(errors.New("saga.NewRunner needs a Store, not nil"), err)
	}
	if err != nil {
		panic(err)
	}
	r := &Runner{
		cfg: cfg.withDefaults(), store: store, owner: rand.Text()[:12],
		wake: make(chan struct{}, 1), programs: make(map[Definition]program),
		held: make(map[string]*execution), waiters: make(map[string][]chan struct{}),
	}
	r.tx, _ = store.(TxStore)
	if cfg.Name != "" {
		r.owner = cfg.Name + "-" + r.owner
	}
	return r
}

// Register makes definitions known to a runner, several versions of one side by
// side. It panics with the error of [Saga.Validate], with [ErrNoTx] if a step
// needs a transaction that the store has not, if the name and version are those of
// another definition, and if S has fields that the default Codec does not keep.
func Register[S any](r *Runner, sagas ...*Saga[S]) {
	for _, sg := range sagas {
		t, err := sg.program()
		if err == nil && t.plan.needsTx && r.tx == nil {
			err = fmt.Errorf("%w: %s has a DoTx or UndoTx", ErrNoTx, sg.Name)
		}
		if err == nil {
			err = t.checkState()
		}
		if err != nil {
			panic(err)
		}
		d := Definition{sg.Name, sg.Version}
		r.mu.Lock()
		known := r.programs[d]
		if known == nil {
			r.programs[d] = t
		}
		r.mu.Unlock()
		if known != nil && known != program(t) {
			panic(fmt.Errorf("saga: %s version %d is registered already", sg.Name, sg.Version))
		}
	}
}

func (r *Runner) program(d Definition) (program, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if p := r.programs[d]; p != nil {
		return p, nil
	}
	return nil, fmt.Errorf("%w: %s version %d", ErrNotRegistered, d.Saga, d.Version)
}

func (r *Runner) definitions() []Definition {
	r.mu.Lock()
	defer r.mu.Unlock()
	list := make([]Definition, 0, len(r.programs))
	for d := range r.programs {
		list = append(list, d)
	}
	return list
}

// Run runs sagas until ctx ends. Then it claims nothing more, lets the attempts
// that are running end within RunnerConfig.Drain, writes back what it holds for
// others to go on with, and returns nil. After Drain it sends no heartbeat any
// more: what it has not written back by the end of the lease others take over.
// So Run returns within about Drain and Lease, unless a step does not heed the
// end of its ctx. Only one Run may be under way. Run returns an error at once if
// the store is a [Checker] and was not set up.
func (r *Runner) Run(ctx context.Context) error {
	if ctx.Err() != nil {
		return ended.Error(ctx)
	}
	if err := r.check(ctx); err != nil {
		return err
	}
	base, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	defer cancel(ErrDraining)
	r.mu.Lock()
	if r.base != nil {
		r.mu.Unlock()
		return errors.New("saga: the runner is running already")
	}
	r.base, r.draining = base, false
	r.mu.Unlock()

	var g errgroup.Group
	g.Go(func() error { r.claimLoop(ctx); return nil })
	g.Go(func() error { r.listenLoop(ctx); return nil })
	g.Go(func() error { r.reportLoop(ctx); return nil })
	g.Go(func() error { r.heartbeatLoop(base); return nil })
	<-ctx.Done()
	r.drain(cancel)
	_ = g.Wait()
	r.mu.Lock()
	r.base = nil
	r.mu.Unlock()
	return nil
}

// check returns the error of a store that was not set up. A store that does not
// answer is no reason not to run.
func (r *Runner) check(ctx context.Context) error {
	c, ok := r.store.(Checker)
	if !ok {
		return nil
	}
	call, cancel := context.WithTimeout(ctx, r.cfg.Lease/3)
	defer cancel()
	err := c.Check(call)
	if errors.Is(err, ErrNotMigrated) {
		return fmt.Errorf("saga: run: %w", err)
	}
	if err != nil && ctx.Err() == nil {
		r.storeFailed(ctx, fmt.Errorf("saga: run: %w", err))
	}
	return nil
}

// drain waits until nothing is held any more, and ends base when Drain is over
// or, before, when it has nothing to wait for.
func (r *Runner) drain(cancel context.CancelCauseFunc) {
	r.mu.Lock()
	r.draining = true
	for _, e := range r.held {
		e.nudge()
	}
	r.mu.Unlock()
	hard := time.AfterFunc(max(r.cfg.Drain, 0), func() { cancel(ErrDraining) })
	defer hard.Stop()
	r.work.Wait()
	cancel(ErrDraining)
}

// Wake makes the runner ask for sagas that are due now, without waiting for
// Poll to pass: after the transaction of a [StartTx] has been committed.
func (r *Runner) Wake() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

func (r *Runner) claimLoop(ctx context.Context) {
	t := time.NewTimer(0)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		case <-r.wake:
		}
		r.claim(ctx)
		// Spread, so that many processes do not ask in step.
		t.Reset(r.cfg.Poll - mathrand.N(r.cfg.Poll/8+1))
	}
}

// gatherFor is how long notifications are gathered for one claim.
const gatherFor = 2 * time.Millisecond

// listenLoop has the store wake the runner.
func (r *Runner) listenLoop(ctx context.Context) {
	n, ok := r.store.(Notifier)
	if !ok {
		return
	}
	var told atomic.Bool
	notify := func() {
		if told.CompareAndSwap(false, true) {
			time.AfterFunc(gatherFor, func() { told.Store(false); r.Wake() })
		}
	}
	for {
		err := n.Listen(ctx, notify)
		if ctx.Err() != nil {
			return
		}
		r.storeFailed(ctx, fmt.Errorf("saga: listen: %w", err))
		select {
		case <-ctx.Done():
			return
		case <-time.After(r.cfg.Poll):
		}
	}
}

// claim takes as many sagas as there are places for.
func (r *Runner) claim(ctx context.Context) {
	known := r.definitions()
	if len(known) == 0 {
		return
	}
	n := r.reserve(r.cfg.Concurrency)
	if n == 0 {
		r.mu.Lock()
		r.backlog = true
		r.mu.Unlock()
		return
	}
	since := time.Now()
	// To its answer, even if ctx ends: what is claimed must be given back.
	call, cancel := context.WithTimeout(context.WithoutCancel(ctx), r.cfg.Lease/3)
	recs, err := r.store.Claim(call, ClaimRequest{
		Owner: r.owner, Lease: r.cfg.Lease, Limit: n, Definitions: known,
	})
	cancel()
	if err != nil {
		recs = nil
		r.storeFailed(ctx, fmt.Errorf("saga: claim: %w", err))
	}
	for _, rec := range recs {
		r.count.claimed.Add(1)
		if rec.Previous != "" {
			r.count.takenOver.Add(1)
		}
		r.hold(rec, since)
	}
	r.mu.Lock()
	r.backlog = len(recs) == n
	r.mu.Unlock()
	r.unreserve(n)
}

// reserve keeps up to n places free for sagas that are about to be held. While
// some are, the runner does not stop.
func (r *Runner) reserve(n int) int {
	r.mu.Lock()
	defer r.mu.Unlock()
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

func (r *Runner) unreserve(n int) {
	if n == 0 {
		return
	}
	r.mu.Lock()
	r.reserved -= n
	r.mu.Unlock()
	r.work.Done()
}

// hold runs a saga that is this runner's since then, by the local clock.
func (r *Runner) hold(rec Record, since time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	p := r.programs[Definition{rec.Saga, rec.Version}]
	if p == nil || r.base == nil {
		return // its lease runs out
	}
	if e := r.held[rec.ID]; e != nil {
		if e.id.epoch >= rec.Epoch {
			return
		}
		e.lose()
	}
	e := newExecution(r, p, rec, since)
	r.held[rec.ID] = e
	r.work.Go(e.run)
}

// drop forgets a saga that is no longer held.
func (r *Runner) drop(e *execution) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.held[e.rec.ID] == e {
		delete(r.held, e.rec.ID)
	}
	if len(r.held)+r.reserved <= r.cfg.Concurrency*3/4 && r.backlog {
		r.backlog = false
		r.Wake()
	}
	r.tell(e.rec.ID)
}

// tell wakes those who wait for a saga. r.mu is held.
func (r *Runner) tell(id string) {
	for _, w := range r.waiters[id] {
		close(w)
	}
	delete(r.waiters, id)
}

// heartbeatLoop keeps the leases of what is held, with one statement for all.
// It ends with the ctx of the attempts: a store that takes heartbeats and fails
// every commit, or a step that hangs, would else keep a saga for ever.
func (r *Runner) heartbeatLoop(ctx context.Context) {
	t := time.NewTicker(r.cfg.Lease / 3)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
			r.heartbeat(ctx)
		}
	}
}

func (r *Runner) heartbeat(ctx context.Context) {
	r.mu.Lock()
	held := make(map[Held]*execution, len(r.held))
	req := HeartbeatRequest{Owner: r.owner, Lease: r.cfg.Lease}
	for id, e := range r.held {
		if e.lost() {
			continue // perhaps it only waits for a step that heeds no ctx
		}
		h := Held{id, e.id.epoch}
		held[h] = e
		req.Held = append(req.Held, h)
	}
	r.mu.Unlock()
	if len(held) == 0 {
		return
	}
	renewed, since, err := r.renew(ctx, req)
	if err != nil {
		return // the leases may still hold; their own timers tell
	}
	for _, n := range renewed {
		h := Held{n.ID, n.Epoch}
		if e := held[h]; e != nil {
			if !n.Locked {
				e.renew(since)
			}
			if n.CancelRequested {
				e.cancel(n.CancelNote)
			}
			delete(held, h)
		}
	}
	for _, e := range held {
		e.lose()
	}
}

// renew sends one heartbeat and returns when it was sent. A connection that is
// half open must not cost the leases: the first try has little time, the second
// more, in case it is the store that is slow. A store that one writer keeps to
// itself is local, and only ever slow.
func (r *Runner) renew(ctx context.Context, req HeartbeatRequest) (renewed []Renewed, since time.Time, err error) {
	tries := []time.Duration{r.cfg.Lease / 8, r.cfg.Lease / 3}
	if r.tx != nil && r.tx.Exclusive() {
		tries = tries[1:]
	}
	for _, timeout := range tries {
		since = time.Now()
		call, cancel := context.WithTimeout(context.WithoutCancel(ctx), timeout)
		renewed, err = r.store.Heartbeat(call, req)
		cancel()
		if err == nil {
			break
		}
		r.storeFailed(ctx, fmt.Errorf("saga: heartbeat: %w", err))
	}
	return renewed, since, err
}

// reportLoop looks for sagas that are due and that nobody here knows, and for
// stuck ones that nobody was told of.
func (r *Runner) reportLoop(ctx context.Context) {
	t := time.NewTimer(r.cfg.Poll)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		r.reportUnregistered(ctx)
		r.reportStuck(ctx)
		t.Reset(3 * r.cfg.Lease)
	}
}

func (r *Runner) reportUnregistered(ctx context.Context) {
	call, cancel := context.WithTimeout(ctx, r.cfg.Lease)
	defer cancel()
	found, err := r.store.Unregistered(call, r.definitions())
	if ctx.Err() != nil {
		return // it was cut short
	}
	if err != nil {
		r.storeFailed(ctx, fmt.Errorf("saga: unregistered: %w", err))
		return
	}
	var n int64
	for _, u := range found {
		n += int64(u.Count)
		if r.cfg.OnUnregistered != nil {
			hook(ctx, "OnUnregistered", r.cfg.OnUnregistered, u)
		} else {
			slog.WarnContext(ctx, "saga: due, and not registered here", "runner", r.cfg.Name, "saga", u.Saga, "version", u.Version, "count", u.Count, "since", u.Now.Sub(u.Oldest))
		}
	}
	r.count.unregistered.Store(n)
}

// reportStuck tells of sagas whose owner did not, for it has had a lease to.
func (r *Runner) reportStuck(ctx context.Context) {
	call, cancel := context.WithTimeout(ctx, r.cfg.Lease)
	defer cancel()
	recs, err := r.store.List(call, Filter{Status: []Status{Stuck}, Unreported: true})
	if err != nil && ctx.Err() == nil {
		r.storeFailed(ctx, fmt.Errorf("saga: stuck sagas: %w", err))
	}
	for _, rec := range recs {
		if ctx.Err() != nil {
			return
		}
		if rec.Now.Sub(rec.UpdatedAt) >= r.cfg.Lease {
			r.isStuck(ctx, r.instance(rec))
		}
	}
}

// isStuck tells of a stuck saga, and then records that it did.
func (r *Runner) isStuck(ctx context.Context, in *Instance) {
	if r.cfg.OnStuck != nil {
		hook(ctx, "OnStuck", r.cfg.OnStuck, StuckSaga{r.cfg.Name, *in})
	} else {
		slog.WarnContext(ctx, "saga: stuck", "runner", r.cfg.Name, "saga", in.Saga, "version", in.Version, "id", in.ID, "step", in.Step, "cause", in.Cause, "actions", in.Actions)
	}
	call, cancel := context.WithTimeout(context.WithoutCancel(ctx), r.cfg.Lease/2)
	defer cancel()
	if err := r.store.Reported(call, in.ID, in.Seq); err != nil {
		r.storeFailed(ctx, fmt.Errorf("saga: report of %q: %w", in.ID, err)) // it is told again
	}
}

func (r *Runner) isDraining() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.draining
}

func (r *Runner) storeFailed(ctx context.Context, err error) {
	r.count.storeErrors.Add(1)
	if r.cfg.OnStoreError != nil {
		hook(ctx, "OnStoreError", r.cfg.OnStoreError, err)
		return
	}
	now := time.Now().UnixNano()
	if last := r.warned.Load(); (last == 0 || now-last >= int64(time.Second)) && r.warned.CompareAndSwap(last, now) {
		slog.WarnContext(ctx, "saga: the store has failed", "runner", r.cfg.Name, "err", err)
	}
}
