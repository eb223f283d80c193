package saga

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	mathrand "math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience/internal/invalid"
	"github.com/go-resilience/resilience/internal/notify"
	"github.com/go-resilience/resilience/internal/settings"
	"github.com/go-resilience/resilience/saga/internal/memory"
	"github.com/go-resilience/resilience/saga/store"
)

// A Runner claims due sagas, runs their steps, and takes over the sagas of crashed
// processes. Each process has its own; there is no leader. A Runner is safe for
// concurrent use.
type Runner struct {
	store store.Store
	tx    store.TxStore // nil if the store has no transactions
	owner string
	wake  chan struct{} // claim now
	beat  chan struct{} // send a heartbeat now

	chance func(below time.Duration) time.Duration

	setting   settings.Setting[RunnerConfig]
	observers notify.Observers[Event]
	panics    notify.Panics // of hooks

	mu       sync.Mutex
	programs map[store.Definition]*registered
	held     map[string]*lease
	reserved int             // places kept for a Start or claim under way
	base     context.Context // of every attempt; nil while Run is not under way
	draining bool
	waiters  map[string][]chan store.Record // by id, for Result
	backlog  bool                           // the last claim returned as many as it asked for
	claims   int64
	work     sync.WaitGroup

	looked  time.Time // when the latest look began at the numbers in the store
	looking bool
	stored  store.Counts // at the last look that was answered

	figures figures
	warned  atomic.Int64 // when a failure of the store was last logged
}

// NewMemory returns a store that keeps sagas in the process. It is for tests, and for sagas
// that need not survive the process. Sagas that have ended stay in it, unless
// [RunnerConfig] Keep says otherwise.
func NewMemory() store.Store { return memory.New() }

// NewRunner returns a runner on st. The runner runs no saga before Run is called. NewRunner
// panics with the error of [RunnerConfig.Validate], and if st is nil.
func NewRunner(st store.Store, cfg RunnerConfig) *Runner {
	err := cfg.Validate()
	if st == nil {
		err = errors.Join(errors.New("saga.NewRunner needs a Store, not nil"), err)
	}
	if err != nil {
		panic(err)
	}
	r := &Runner{
		store: st, owner: rand.Text()[:12], chance: mathrand.N[time.Duration],
		wake: make(chan struct{}, 1), beat: make(chan struct{}, 1),
		programs: make(map[store.Definition]*registered),
		held:     make(map[string]*lease), waiters: make(map[string][]chan store.Record),
	}
	r.setting.Init(cfg, RunnerConfig.withDefaults)
	r.tx, _ = st.(store.TxStore)
	if cfg.Name != "" {
		r.owner = cfg.Name + "-" + r.owner
	}
	return r
}

// Register makes definitions known to a runner, and those of their children. Several
// versions of a definition can be registered side by side.
//
// Register panics with the error of [Saga.Validate], if a step needs transactions and the
// store has none, if another definition has the same name and version, and if S has fields
// that JSON does not keep and there is no Codec.
func Register[S any](r *Runner, sagas ...*Saga[S]) {
	for _, sg := range sagas {
		t, err := sg.program()
		if err == nil && t.plan.NeedsTx && r.tx == nil {
			err = fmt.Errorf("%w: %s has a DoTx or UndoTx", errNoTx, sg.Name)
		}
		if err == nil {
			err = t.checkState()
		}
		if err != nil {
			panic(err)
		}
		d := store.Definition{Saga: sg.Name, Version: sg.Version}
		r.mu.Lock()
		known := r.programs[d]
		if known == nil {
			r.programs[d] = &registered{program: t, steps: r.figures.of(t.plan)}
		}
		r.mu.Unlock()
		if known != nil && known.program != program(t) {
			panic(fmt.Errorf("saga: %s version %d is registered already", sg.Name, sg.Version))
		}
		for _, st := range t.steps {
			if known == nil && st.Saga != nil {
				st.Saga.register(r)
			}
		}
	}
}

func (r *Runner) program(saga string, version int) (*registered, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if p := r.programs[store.Definition{Saga: saga, Version: version}]; p != nil {
		return p, nil
	}
	return nil, fmt.Errorf("%w: %s version %d", ErrNotRegistered, saga, version)
}

// definitions returns what is registered, in the order of their turns to be claimed: that
// of which a saga was claimed last comes last. The caller holds r.mu.
func (r *Runner) definitions() []store.Definition {
	list := slices.Collect(maps.Keys(r.programs))
	slices.SortFunc(list, func(a, b store.Definition) int {
		return cmp.Or(cmp.Compare(r.programs[a].turn, r.programs[b].turn), cmp.Compare(a.Saga, b.Saga), cmp.Compare(a.Version, b.Version))
	})
	return list
}

func (r *Runner) isDraining() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.draining
}

// Name returns the Name of the RunnerConfig.
func (r *Runner) Name() string { return r.config().Name }

// Config returns the present configuration, with its defaults.
func (r *Runner) Config() RunnerConfig { return r.setting.Config() }

func (r *Runner) config() *RunnerConfig { return r.setting.Load() }

// Update changes the configuration of a runner, which may be running. change is called
// with the present configuration as it was given, in which a zero field means its default, and
// must not call the runner. If the result is invalid,
// Update returns the error of [RunnerConfig.Validate] and nothing changes. Concurrent
// Updates are made one after the other.
//
//   - Nothing that the runner does is interrupted. It keeps its sagas, their attempts, its
//     figures and its observers.
//   - LeaseTTL holds for sagas that are claimed from now on, and for each held saga from its
//     next heartbeat, which the runner sends immediately. Until then a saga keeps the lease
//     that it has.
//   - With a higher Concurrency the runner claims more sagas immediately. With a lower one
//     it keeps the sagas that it holds, and claims none while they are too many.
//   - Inject and Extract hold for sagas that are started, and claimed, from now on.
//   - Poll, Park, MaxTakeovers, StalledAfter, DueAfter, Keep and the On hooks hold from now
//     on, for held sagas too. Drain holds for the next stop.
//   - Name cannot change, since it is part of the name by which the runner owns its sagas.
//     The Store is not part of the configuration and cannot change either.
func (r *Runner) Update(change func(*RunnerConfig)) error {
	return r.setting.Update(change, (*RunnerConfig).fixed, r.follow)
}

func (r *Runner) follow(*RunnerConfig) {
	r.beatNow() // with the new LeaseTTL
	r.Wake()    // with the new Concurrency, and then after the new Poll
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, e := range r.held {
		e.nudge() // to look at the new StalledAfter and Park
	}
}

// Change is Update for a program that does not know the type of the configuration: f gets a
// pointer to it, as Update's change does. If f returns an error, or dry is true, nothing
// changes; dry returns the error that the change would have.
func (r *Runner) Change(dry bool, f func(cfg any) error) error {
	return r.setting.Change(dry, f, (*RunnerConfig).fixed, r.follow)
}

// Wake makes the runner ask for due sagas immediately, without waiting for
// RunnerConfig.Poll: after the commit of the transaction of a [StartTx] or a SignalTx.
func (r *Runner) Wake() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// keepPlace keeps a place free for a saga of p that is about to be held, until freePlace. It
// reports whether there is one.
func (r *Runner) keepPlace(p *registered) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if p.free() <= 0 || r.reserve(1) == 0 {
		return false
	}
	p.reserved++
	return true
}

func (r *Runner) freePlace(p *registered) {
	r.mu.Lock()
	defer r.mu.Unlock()
	p.reserved--
	r.unreserve(1)
	r.claimRest(p)
}

// reserve keeps up to n places free for sagas that are about to be held, and returns how
// many. The runner does not stop before unreserve. The caller holds r.mu.
func (r *Runner) reserve(n int) int {
	if r.base == nil || r.draining {
		return 0
	}
	n = max(min(n, r.config().Concurrency-len(r.held)-r.reserved), 0)
	if n > 0 {
		r.reserved += n
		r.work.Add(1)
	}
	return n
}

func (r *Runner) unreserve(n int) {
	r.reserved -= n
	r.work.Done()
}

// drop forgets a saga that is no longer held. rec is how it was last recorded.
func (r *Runner) drop(rec store.Record, l *lease) {
	r.mu.Lock()
	defer r.mu.Unlock()
	p := l.of
	if r.held[rec.ID] == l {
		delete(r.held, rec.ID)
		p.held--
	}
	r.claimRest(p)
	r.wakeResults(rec)
}

// claimRest makes the runner claim what its last claim has left for want of places, when it has
// enough of them. A place of p has become free. The caller holds r.mu.
func (r *Runner) claimRest(p *registered) {
	if r.backlog && len(r.held)+r.reserved <= r.config().Concurrency*3/4 ||
		p.backlog && p.held+p.reserved <= p.planned().Most*3/4 {
		r.backlog, p.backlog = false, false
		r.Wake()
	}
}

// wakeResults wakes the calls of Result that wait for a saga. The caller holds r.mu.
func (r *Runner) wakeResults(rec store.Record) {
	for _, told := range r.waiters[rec.ID] {
		told <- rec
	}
	delete(r.waiters, rec.ID)
}

// beatNow makes the runner send a heartbeat now: some sagas have a lease that is not the
// configured one.
func (r *Runner) beatNow() {
	select {
	case r.beat <- struct{}{}:
	default:
	}
}

// listen returns a channel that has the record when this runner no longer holds the saga. here
// reports that it holds the saga now, and has not given it up: it has not ended.
func (r *Runner) listen(id string) (told chan store.Record, here bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	told = make(chan store.Record, 1)
	r.waiters[id] = append(r.waiters[id], told)
	l := r.held[id]
	return told, l != nil && !l.over.Load() && !l.lost()
}

func (r *Runner) unlisten(id string, w chan store.Record) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.waiters[id] = slices.DeleteFunc(r.waiters[id], func(told chan store.Record) bool { return told == w })
	if len(r.waiters[id]) == 0 {
		delete(r.waiters, id)
	}
}

// tellHeld tells the execution of a saga that this runner holds to look around, and
// reports whether there is one. One that is lost, and only waits for its attempts, is none.
func (r *Runner) tellHeld(id string) bool {
	r.mu.Lock()
	e := r.held[id]
	r.mu.Unlock()
	if e == nil || e.lost() {
		return false
	}
	e.tellNews()
	return true
}

// every calls fn after the first wait, after each that fn returns, and when wake is told, until
// ctx ends.
func every(ctx context.Context, first time.Duration, wake <-chan struct{}, fn func() time.Duration) {
	t := time.NewTimer(first)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
		case <-t.C:
		case <-wake:
		}
		if ctx.Err() != nil {
			return
		}
		t.Reset(fn())
	}
}

// fixed returns an error if Name has changed.
func (c *RunnerConfig) fixed(next *RunnerConfig) error {
	f := invalid.Fields{Type: "saga.RunnerConfig"}
	f.Same("Name", c.Name, next.Name)
	return f.Err()
}
