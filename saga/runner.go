package saga

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	mathrand "math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience/internal/notify"
	store "github.com/go-resilience/resilience/internal/sagastore"
	"github.com/go-resilience/resilience/saga/internal/memory"
)

// A Runner claims due sagas, runs their steps, and takes over the sagas of crashed
// processes. Each process has its own; there is no leader. A Runner is safe for
// concurrent use.
type Runner struct {
	store store.Store
	tx    store.TxStore // nil if the store has no transactions
	owner string
	wake  chan struct{} // claim now

	chance func(below time.Duration) time.Duration

	cfg       RunnerConfig // with its defaults; it does not change
	observers notify.Observers[Event]

	mu       sync.Mutex
	programs map[store.Definition]program
	held     map[string]*lease
	reserved int             // places kept for a Start or claim under way
	base     context.Context // of every attempt; nil while Run is not under way
	draining bool
	waiters  map[string][]chan store.Record // by id, for Result
	backlog  bool                           // the last claim returned as many as it asked for
	work     sync.WaitGroup

	looked  time.Time // when the latest look began at the numbers in the store
	looking bool
	latest  Counts           // at the last look that was answered
	seen    map[string]Count // of all definitions, by name: see stored

	figures figures
	warned  atomic.Int64 // when a failure of the store was last logged
}

// NewMemory returns a store that keeps sagas in the process. It is for tests, and for sagas
// that need not survive the process. Sagas that have ended stay in it, unless
// [RunnerConfig] Keep says otherwise.
func NewMemory() Store { return memory.New() }

// A Store keeps sagas and their logs: that of [NewMemory], or of package sqlstore. Its methods are
// for a Runner alone.
type Store = store.Store

// NewRunner returns a runner on st. The runner runs no saga before Run is called. NewRunner
// panics with the error of [RunnerConfig.Validate], and if st is nil.
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
		wake:     make(chan struct{}, 1),
		programs: make(map[store.Definition]program), seen: make(map[string]Count),
		held: make(map[string]*lease), waiters: make(map[string][]chan store.Record),
	}
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
			r.programs[d] = t
			r.figures.of(sg.Name)
		}
		r.mu.Unlock()
		if known != nil && known != program(t) {
			panic(fmt.Errorf("saga: %s version %d is registered already", sg.Name, sg.Version))
		}
		for _, st := range t.steps {
			if known == nil && st.Saga != nil {
				st.Saga.register(r)
			}
		}
	}
}

func (r *Runner) program(saga string, version int) (program, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if p := r.programs[store.Definition{Saga: saga, Version: version}]; p != nil {
		return p, nil
	}
	return nil, fmt.Errorf("%w: %s version %d", ErrNotRegistered, saga, version)
}

func (r *Runner) isDraining() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.draining
}

// Name returns the Name of the RunnerConfig.
func (r *Runner) Name() string { return r.cfg.Name }

// Config returns the configuration, with its defaults.
func (r *Runner) Config() RunnerConfig { return r.cfg }

func (r *Runner) config() *RunnerConfig { return &r.cfg }

// Wake makes the runner ask for due sagas immediately, without waiting for
// RunnerConfig.Poll: after the commit of the transaction of a [StartTx] or a SignalTx.
func (r *Runner) Wake() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// keepPlace keeps a place free for a saga that is about to be held, until freePlace. It
// reports whether there is one.
func (r *Runner) keepPlace() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.reserve(1) > 0
}

func (r *Runner) freePlace() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.unreserve(1)
	r.claimRest()
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
	if r.held[rec.ID] == l {
		delete(r.held, rec.ID)
	}
	r.claimRest()
	r.wakeResults(rec)
}

// claimRest makes the runner claim what its last claim has left for want of places, when it has
// enough of them. The caller holds r.mu.
func (r *Runner) claimRest() {
	if r.backlog && len(r.held)+r.reserved <= r.cfg.Concurrency*3/4 {
		r.backlog = false
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
