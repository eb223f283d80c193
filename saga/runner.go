package saga

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/notify"
	"github.com/go-resilience/resilience/internal/settings"
)

// A Runner claims due sagas, runs their steps, and takes over the sagas of crashed
// processes. Each process has its own; there is no leader. A Runner is safe for
// concurrent use.
type Runner struct {
	store Store
	tx    TxStore // nil if the store has no transactions
	owner string
	wake  chan struct{} // claim now
	beat  chan struct{} // send a heartbeat now

	setting   settings.Setting[RunnerConfig]
	observers notify.Observers[Event]

	mu       sync.Mutex
	programs map[Definition]*registered
	sagas    map[string]*sagaCounts // by name of the definition
	held     map[string]*execution
	reserved int             // places kept for a Start or claim under way
	base     context.Context // of every attempt; nil while Run is not under way
	draining bool
	waiters  map[string][]chan struct{} // by id, for Result
	backlog  bool                       // the last claim returned as many as it asked for
	claims   int64
	work     sync.WaitGroup

	looked  time.Time // when the latest look began at the numbers in the store
	looking bool

	count  counters
	stored atomic.Pointer[Counts] // at the last look that was answered
	warned atomic.Int64           // when a failure of the store was last logged
}

// NewRunner returns a runner on store. The runner runs no saga before Run is called.
// NewRunner panics with the error of [RunnerConfig.Validate], and if store is nil.
func NewRunner(store Store, cfg RunnerConfig) *Runner {
	err := cfg.Validate()
	if store == nil {
		err = errors.Join(errors.New("saga.NewRunner needs a Store, not nil"), err)
	}
	if err != nil {
		panic(err)
	}
	r := &Runner{
		store: store, owner: rand.Text()[:12],
		wake: make(chan struct{}, 1), beat: make(chan struct{}, 1),
		programs: make(map[Definition]*registered), sagas: make(map[string]*sagaCounts),
		held: make(map[string]*execution), waiters: make(map[string][]chan struct{}),
	}
	r.setting.Adopt(settings.New(cfg, RunnerConfig.withDefaults), nil)
	r.tx, _ = store.(TxStore)
	if cfg.Name != "" {
		r.owner = cfg.Name + "-" + r.owner
	}
	return r
}

// Register makes definitions known to a runner, and those of their children. Several
// versions of a definition can be registered side by side. Register panics with the error
// of [Saga.Validate], with [ErrNoTx] if a step needs transactions and the store has none,
// if another definition has the same name and version, and if S has fields that JSON does
// not keep and there is no Codec.
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
			r.programs[d] = r.register(t)
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

// A registered definition is a program with its figures.
type registered struct {
	program
	counts *sagaCounts
	steps  []*stepCounts // by unit
	turn   int64         // of its latest claim

	// Guarded by Runner.mu.
	held     int
	reserved int  // of Runner.reserved, if it has a bound
	backlog  bool // as Runner.backlog, of its bound
}

// free returns how many more sagas the runner may hold of the definition.
func (p *registered) free() int {
	if most := p.planned().most; most > 0 {
		return most - p.held - p.reserved
	}
	return math.MaxInt
}

func (r *Runner) program(d Definition) (*registered, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if p := r.programs[d]; p != nil {
		return p, nil
	}
	return nil, fmt.Errorf("%w: %s version %d", ErrNotRegistered, d.Saga, d.Version)
}

// definitions returns what is registered, in the order of their turns to be claimed: that
// of which a saga was claimed last comes last. The caller holds r.mu.
func (r *Runner) definitions() []Definition {
	list := slices.Collect(maps.Keys(r.programs))
	slices.SortFunc(list, func(a, b Definition) int { return cmp.Compare(r.programs[a].turn, r.programs[b].turn) })
	return list
}

// Run runs sagas until ctx ends, and returns nil. It returns an error immediately if ctx
// has ended already, another Run is under way, or the store is a [Checker] and was not
// set up.
//
// When ctx ends, Run claims nothing more, waits up to RunnerConfig.Drain for the running
// attempts, and writes back the sagas that it holds for other runners to continue. After
// Drain it sends no more heartbeats: other runners take over sagas that are not written
// back by the end of their leases. So Run returns within about Drain and LeaseTTL, unless a
// step ignores the end of its ctx.
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
	g.Go(func() error { r.sweepLoop(ctx); return nil })
	g.Go(func() error { r.heartbeatLoop(base); return nil })
	<-ctx.Done()
	r.drain(cancel)
	_ = g.Wait()
	r.mu.Lock()
	r.base = nil
	r.mu.Unlock()
	return nil
}

// check returns the error of a store that was not set up. If the store does not answer,
// the runner runs nevertheless.
func (r *Runner) check(ctx context.Context) error {
	c, ok := r.store.(Checker)
	if !ok {
		return nil
	}
	call, cancel := context.WithTimeout(ctx, r.config().LeaseTTL/3)
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

// drain waits until the runner holds nothing any more, and ends base when Drain has
// passed.
func (r *Runner) drain(cancel context.CancelCauseFunc) {
	r.mu.Lock()
	r.draining = true
	for _, e := range r.held {
		e.nudge()
	}
	r.mu.Unlock()
	hard := time.AfterFunc(max(r.config().Drain, 0), func() { cancel(ErrDraining) })
	defer hard.Stop()
	r.work.Wait()
	cancel(ErrDraining)
}

func (r *Runner) isDraining() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.draining
}
