package sagacrash

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-resilience/resilience/saga"
	store "github.com/go-resilience/resilience/saga/sagastore"
)

// Crashes tests sagas with children on a store and, if the store has transactions, sagas with steps in transactions.
// It repeats each saga once for each write: the process stops before or after this write, and another process finishes
// the saga. Crashes checks that each saga ends as it does without a crash, that each step has taken effect once or not
// at all, that no Do starts after the saga has turned back, and that the log has no gap.
//
// newStore is called once. The cases run concurrently, each with its own definition. In a bubble of testing/synctest,
// the waits take no real time.
func Crashes(t *testing.T, newStore func(t *testing.T) store.Store) {
	t.Helper()
	st := newStore(t)
	cases := 0
	for _, sc := range scenarios(st) {
		clean := newTrial(t, st, sc, sc.name+" without a crash", 0, false)
		clean.run()
		var wg sync.WaitGroup
		slots := make(chan struct{}, 16)
		for at := 1; at <= clean.writes(); at++ {
			for _, after := range []bool{false, true} {
				cases++
				when := map[bool]string{false: "before", true: "after"}[after]
				tr := newTrial(t, st, sc, fmt.Sprintf("%s, crash %s write %d", sc.name, when, at), at, after)
				slots <- struct{}{}
				wg.Go(func() {
					defer func() { <-slots }()
					tr.run()
				})
			}
		}
		wg.Wait()
	}
	t.Logf("%d crashes", cases)
}

// A scenario is a saga and its expected result.
type scenario struct {
	name  string
	end   store.Status
	steps func(*side) []saga.Step[notes]
	done  []string // the steps that are in effect at the end
}

// notes is the state of the sagas. Each step writes its command ID to it.
type notes struct{ By map[string]string }

func scenarios(st store.Store) []scenario {
	list := []scenario{
		{"children", store.Completed, func(p *side) []saga.Step[notes] {
			return []saga.Step[notes]{p.step("a"), p.child(p.step("x"), p.step("y")), p.step("z")}
		}, []string{"a", "x", "y", "z"}},
		{"children turned back", store.Compensated, func(p *side) []saga.Step[notes] {
			return []saga.Step[notes]{p.child(p.step("x")), p.failing("z", saga.Declined(errDeclined))}
		}, nil},
		{"children declined", store.Compensated, func(p *side) []saga.Step[notes] {
			return []saga.Step[notes]{p.step("a"), p.child(p.step("x"), p.failing("y", saga.Declined(errDeclined)))}
		}, nil},
	}
	if _, ok := st.(store.TxStore); ok {
		list = append(list, scenario{"transactions", store.Completed, func(p *side) []saga.Step[notes] {
			return []saga.Step[notes]{p.step("a"), p.inTx("b"), p.step("c"), p.inTx("d")}
		}, []string{"a", "c"}}, scenario{"transactions declined", store.Compensated, func(p *side) []saga.Step[notes] {
			return []saga.Step[notes]{p.inTx("a"), p.step("b"), p.inTx("c"), p.failing("d", saga.Declined(errDeclined))}
		}, nil})
	}
	return list
}

var (
	errDeclined = errors.New("declined")
	errCrashed  = errors.New("the process has crashed")
)

// A trial is one run of a saga with one crash.
type trial struct {
	t     *testing.T
	name  string
	id    string
	sc    scenario
	store store.Store
	at    int // the number of the write at which the process crashes; zero means no crash
	after bool
	died  chan struct{}

	mu     sync.Mutex
	n      int             // the number of writes of the first process
	dead   bool            // whether the first process has crashed
	turned bool            // whether the status "compensating" was recorded
	effect map[string]bool // the steps that are in effect now
	undone map[string]bool // the steps that were undone, whose later Do is declined
}

var trials atomic.Int64

func newTrial(t *testing.T, st store.Store, sc scenario, name string, at int, after bool) *trial {
	return &trial{
		t: t, name: name, id: fmt.Sprintf("crash-%d", trials.Add(1)), sc: sc, store: st,
		at: at, after: after, died: make(chan struct{}),
		effect: make(map[string]bool), undone: make(map[string]bool),
	}
}

func (tr *trial) errorf(format string, args ...any) {
	tr.t.Errorf(tr.name+": "+format, args...)
}

func (tr *trial) writes() int {
	tr.mu.Lock()
	defer tr.mu.Unlock()
	return tr.n
}

func (tr *trial) run() {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	first, second := tr.newSide(true), tr.newSide(false)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	wg.Go(func() { _ = first.runner.Run(ctx) })

	ended := make(chan error, 1)
	_, err := saga.Register(first.runner, first.saga).Start(ctx, tr.id, notes{})
	if err == nil {
		go func() { ended <- tr.end(ctx, second) }()
		select {
		case err := <-ended:
			tr.check(ctx, second, err)
			return
		case <-tr.died:
		}
	}
	wg.Go(func() { _ = second.runner.Run(ctx) })
	if err != nil {
		// A caller that does not know whether the saga exists repeats Start.
		if _, err := saga.Register(second.runner, second.saga).Start(ctx, tr.id, notes{}); err != nil {
			tr.errorf("start again: %v", err)
			return
		}
		go func() { ended <- tr.end(ctx, second) }()
	}
	tr.check(ctx, second, <-ended)
}

func (tr *trial) end(ctx context.Context, s *side) error {
	state, err := saga.Register(s.runner, s.saga).Result(ctx, tr.id)
	if err == nil {
		for _, step := range tr.sc.done {
			if state.By[step] == "" {
				err = fmt.Errorf("what step %s wrote is lost", step)
			}
		}
	}
	return err
}

// check checks a saga that has ended or is stuck.
func (tr *trial) check(ctx context.Context, s *side, err error) {
	in, gerr := s.runner.Get(ctx, tr.id)
	log, lerr := s.runner.History(ctx, tr.id, 0, 0)
	if gerr != nil || lerr != nil {
		tr.errorf("%v, %v after %v", gerr, lerr, err)
		return
	}
	if in.Status != tr.sc.end {
		tr.errorf("ended %s, not %s: %v", in.Status, tr.sc.end, err)
	}
	if in.Status == store.Completed && err != nil {
		tr.errorf("completed with %v", err)
	}
	child, cerr := s.runner.Get(ctx, saga.ChildID(tr.id, "child", 0))
	if cerr == nil && child.Status != in.Status {
		tr.errorf("ended %s, but its child is %s", in.Status, child.Status)
	}
	if in.Owner != "" {
		tr.errorf("still owned by %s", in.Owner)
	}
	tr.mu.Lock()
	defer tr.mu.Unlock()
	var effects []string
	for step, is := range tr.effect {
		if is {
			effects = append(effects, step)
		}
	}
	slices.Sort(effects)
	if !slices.Equal(effects, tr.sc.done) {
		tr.errorf("in effect are %v, not %v", effects, tr.sc.done)
	}
	for i, e := range log {
		if e.Seq != int64(i+1) {
			tr.errorf("log gap: entry %d has seq %d", i+1, e.Seq)
		}
		if i > 0 && e.Epoch < log[i-1].Epoch {
			tr.errorf("log: entry %d of epoch %d follows epoch %d", i+1, e.Epoch, log[i-1].Epoch)
		}
	}
	if int64(len(log)) != in.Seq {
		tr.errorf("log of %d entries, seq %d", len(log), in.Seq)
	}
	s.checkTx(ctx, in)
}

// A side is one of the two processes. After the first process has crashed, its calls have no more effects.
type side struct {
	tr     *trial
	first  bool
	runner *saga.Runner
	saga   *saga.Saga[notes]
}

func (tr *trial) newSide(first bool) *side {
	s := &side{tr: tr, first: first}
	var st store.Store = &process{tr.store, s}
	if tx, ok := tr.store.(store.TxStore); ok {
		st = &txProcess{process{tr.store, s}, tx}
	}
	s.runner = saga.NewRunner(st, saga.RunnerConfig{
		LeaseTTL: time.Second, Poll: 20 * time.Millisecond, Drain: saga.None,
		MaxTakeovers: saga.Unlimited, // on a slow machine, a lease may expire without a crash
	})
	s.runner.Observe(func(context.Context, saga.Event) {}) // an observer, so the runner does not log the intended failures
	s.saga = &saga.Saga[notes]{Name: tr.id, Steps: tr.sc.steps(s)}
	saga.Register(s.runner, s.saga)
	return s
}

// enter locks the trial for the effect of a step. It returns errCrashed if the side has crashed.
func (s *side) enter() (leave func(), err error) {
	s.tr.mu.Lock()
	if s.first && s.tr.dead {
		s.tr.mu.Unlock()
		return nil, errCrashed
	}
	return s.tr.mu.Unlock, nil
}

func (s *side) step(name string) saga.Step[notes] {
	return saga.Step[notes]{
		Name:    name,
		Backoff: func(int) time.Duration { return time.Millisecond },
		// On a slow machine, a lease may expire repeatedly, and each time costs an attempt.
		Attempts: saga.Unlimited, UndoAttempts: saga.Unlimited,
		Do: func(ctx context.Context, n *notes) error {
			leave, err := s.enter()
			if err != nil {
				return err
			}
			defer leave()
			if s.tr.turned {
				s.tr.errorf("Do of step %s begins after the saga has turned back", name)
			}
			if s.tr.undone[name] {
				return saga.Declined(errors.New("undone"))
			}
			s.tr.effect[name] = true
			if n.By == nil {
				n.By = make(map[string]string)
			}
			n.By[name] = saga.CommandFrom(ctx).ID
			return nil
		},
		Undo: func(context.Context, *notes) error {
			leave, err := s.enter()
			if err != nil {
				return err
			}
			defer leave()
			s.tr.effect[name], s.tr.undone[name] = false, true
			return nil
		},
	}
}

// failing returns a step that fails without effect.
func (s *side) failing(name string, err error) saga.Step[notes] {
	st := s.step(name)
	st.Do = func(context.Context, *notes) error {
		leave, crashed := s.enter()
		if crashed != nil {
			return crashed
		}
		defer leave()
		return err
	}
	return st
}

// child returns a step with a child saga that has these steps. The state is passed to the child, and the child's state
// is merged into it.
func (s *side) child(steps ...saga.Step[notes]) saga.Step[notes] {
	child := &saga.Saga[notes]{Name: s.tr.id + " child", Steps: steps}
	return saga.Step[notes]{Name: "child", Child: saga.ChildOf(child,
		func(n *notes) (notes, error) { return notes{maps.Clone(n.By)}, nil },
		func(n *notes, c notes) error {
			if n.By == nil {
				n.By = make(map[string]string)
			}
			maps.Copy(n.By, c.By)
			return nil
		})}
}

// inTx returns a step with DoTx and UndoTx. As its effect in the store's database, it inserts another saga, which has
// already ended.
func (s *side) inTx(name string) saga.Step[notes] {
	mark := func(ctx context.Context, tx *sql.Tx) error {
		leave, err := s.enter()
		if err != nil {
			return err
		}
		leave()
		req := store.StartRequest{
			ID: "effect of " + saga.CommandFrom(ctx).ID, Version: 1, State: []byte(`{}`), Progress: []byte(`{"steps":[]}`),
			Log: []store.Entry{{Kind: saga.EventCreated}},
		}
		req.Saga, req.Status = s.tr.id+" effects", store.Completed
		_, created, err := s.tr.store.(store.TxStore).StartTx(ctx, tx, req)
		if err == nil && !created {
			s.tr.errorf("%s has happened twice", req.ID)
		}
		return err
	}
	return saga.Step[notes]{
		Name:    name,
		Backoff: func(int) time.Duration { return time.Millisecond },
		// On a slow machine, a lease may expire repeatedly, and each time costs an attempt.
		Attempts: saga.Unlimited, UndoAttempts: saga.Unlimited,
		DoTx: func(ctx context.Context, tx *sql.Tx, n *notes) error {
			if n.By == nil {
				n.By = make(map[string]string)
			}
			n.By[name] = saga.CommandFrom(ctx).ID
			return mark(ctx, tx)
		},
		UndoTx: func(ctx context.Context, tx *sql.Tx, _ *notes) error { return mark(ctx, tx) },
	}
}

// checkTx checks the effects of the steps that inTx has returned.
func (s *side) checkTx(ctx context.Context, in *saga.Instance) {
	for i, st := range s.saga.Steps {
		if st.DoTx == nil {
			continue
		}
		for _, op := range []store.Op{saga.OpDo, saga.OpUndo} {
			want := op == saga.OpDo && in.Steps[i].Status != saga.StepNoEffect || in.Steps[i].Status == saga.StepUndone
			_, err := s.tr.store.Load(ctx, "effect of "+in.ID+"/"+st.Name+"/"+string(op))
			if got := err == nil; got != want {
				s.tr.errorf("step %s is %s, but its %s has happened: %v", st.Name, in.Steps[i].Status, op, got)
			}
		}
	}
}

// A process is the store as one side sees it. It simulates the crash of the first process.
type process struct {
	store.Store
	s *side
}

// write makes one write, at which the first process may crash. If other writes are in progress at the time of the
// crash, they may succeed, but the process does not get their results.
func (p *process) write(kind string, fn func() error) error {
	tr := p.s.tr
	if !p.s.first {
		return fn()
	}
	tr.mu.Lock()
	tr.n++
	here, dead := tr.n == tr.at, tr.dead
	tr.mu.Unlock()
	if dead {
		return errCrashed
	}
	if here && !tr.after {
		p.die()
		return errCrashed
	}
	err := fn()
	if here {
		p.die()
		// The write of a CommitTx is the commit of its transaction, which follows, so CommitTx must succeed.
		if kind != "CommitTx" {
			return errCrashed
		}
	}
	return err
}

func (p *process) die() {
	p.s.tr.mu.Lock()
	p.s.tr.dead = true
	p.s.tr.mu.Unlock()
	close(p.s.tr.died)
}

func (p *process) read() error {
	p.s.tr.mu.Lock()
	defer p.s.tr.mu.Unlock()
	if p.s.first && p.s.tr.dead {
		return errCrashed
	}
	return nil
}

func (p *process) Start(ctx context.Context, req store.StartRequest) (rec store.Record, created bool, err error) {
	err = p.write("Start", func() error {
		var err error
		rec, created, err = p.Store.Start(ctx, req)
		return err
	})
	return rec, created, err
}

func (p *process) Claim(ctx context.Context, req store.ClaimRequest) (recs []store.Record, err error) {
	// A claim that finds no saga writes nothing, so the process does not crash at it.
	if err := p.read(); err != nil {
		return nil, err
	}
	recs, err = p.Store.Claim(ctx, req)
	if len(recs) > 0 {
		if werr := p.write("Claim", func() error { return err }); werr != nil {
			return nil, werr
		}
	}
	return recs, err
}

func (p *process) Heartbeat(ctx context.Context, req store.HeartbeatRequest) ([]store.Renewed, error) {
	if err := p.read(); err != nil {
		return nil, err
	}
	return p.Store.Heartbeat(ctx, req)
}

func (p *process) Commit(ctx context.Context, req store.CommitRequest) (receipt store.Receipt, err error) {
	err = p.write("Commit", func() error {
		var err error
		receipt, err = p.Store.Commit(ctx, req)
		p.committed(req, err)
		return err
	})
	return receipt, err
}

func (p *process) committed(req store.CommitRequest, err error) {
	if err == nil && req.Status == store.Compensating {
		p.s.tr.mu.Lock()
		p.s.tr.turned = true
		p.s.tr.mu.Unlock()
	}
}

func (p *process) Load(ctx context.Context, id string) (store.Record, error) {
	if err := p.read(); err != nil {
		return store.Record{}, err
	}
	return p.Store.Load(ctx, id)
}

func (p *process) Children(ctx context.Context, req store.ChildrenRequest) ([]store.ChildRecord, error) {
	if err := p.read(); err != nil {
		return nil, err
	}
	return p.Store.Children(ctx, req)
}

func (p *process) Post(ctx context.Context, req store.PostRequest) (rec store.Record, err error) {
	name := "Signal"
	if req.Name == "" {
		name = "Hasten"
	}
	err = p.write(name, func() error {
		var err error
		rec, err = p.Store.Post(ctx, req)
		return err
	})
	return rec, err
}

func (p *process) Messages(ctx context.Context, id string) ([]store.Message, error) {
	if err := p.read(); err != nil {
		return nil, err
	}
	return p.Store.Messages(ctx, id)
}

// A txProcess is a process whose store is a TxStore.
type txProcess struct {
	process
	tx store.TxStore
}

func (p *txProcess) Begin(ctx context.Context) (*sql.Tx, error) {
	if err := p.read(); err != nil {
		return nil, err
	}
	return p.tx.Begin(ctx)
}

func (p *txProcess) Exclusive() bool { return p.tx.Exclusive() }

func (p *txProcess) StartTx(ctx context.Context, tx *sql.Tx, req store.StartRequest) (store.Record, bool, error) {
	return p.tx.StartTx(ctx, tx, req)
}

func (p *txProcess) PostTx(ctx context.Context, tx *sql.Tx, req store.PostRequest) (store.Record, error) {
	return p.tx.PostTx(ctx, tx, req)
}

func (p *txProcess) CommitTx(
	ctx context.Context, tx *sql.Tx, req store.CommitRequest,
) (receipt store.Receipt, err error) {
	err = p.write("CommitTx", func() error {
		var err error
		receipt, err = p.tx.CommitTx(ctx, tx, req)
		return err
	})
	return receipt, err
}
