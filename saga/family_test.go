package saga_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	store "github.com/go-resilience/resilience/internal/sagastore"
	"github.com/go-resilience/resilience/saga"
)

// TestRandomFamilies mixes waits, signals, children and the actions of operators, in
// random sagas with random trouble. Whatever happens: each saga ends, a step has taken
// effect if and only if its saga is completed, unless an operator has settled it, a saga
// ends after its children, no Undo begins before its Do has ended, and the
// steps of a sequence do not run at the same time.
func TestRandomFamilies(t *testing.T) {
	defer slog.SetDefault(slog.Default())
	slog.SetDefault(slog.New(slog.DiscardHandler))
	seen := make(map[string]int)
	for seed := range min(seeds, 300) {
		synctest.Test(t, func(t *testing.T) {
			f := &family{
				t: t, seed: seed, rng: rand.New(rand.NewPCG(uint64(seed), 2)), store: saga.NewMemory(), seen: seen,
				effect: make(map[string]bool), undone: make(map[string]bool), excused: make(map[string]bool), voided: make(map[string]bool),
				doing: make(map[string]*clan),
			}
			f.invent()
			f.run()
		})
		if t.Failed() {
			break
		}
	}
	t.Log(seen)
	for _, what := range []string{"completed", "compensated", "abandoned", "stuck", "reverted", "cancel", "retry", "skip", "compensate", "abandon", "signal"} {
		require.NotZero(t, seen[what], what)
	}
}

// A family is a saga with its children, their participants, and the processes that run
// them.
type family struct {
	t        *testing.T
	seed     int
	store    store.Store
	parent   saga.Saga[trip]
	children map[string]*saga.Saga[trip]
	kinds    map[string]string // the definition of the children of a step

	mu      sync.Mutex
	rng     *rand.Rand
	healed  bool
	effect  map[string]bool // by the id of the saga and the step, as are the others
	undone  map[string]bool
	voided  map[string]bool  // refused for good
	excused map[string]bool  // an operator has settled it, or with "" its whole saga
	doing   map[string]*clan // the process whose Do is running
	seen    map[string]int
}

// A clan is one process.
type clan struct {
	store.Store
	f      *family
	runner *saga.Runner
	sg     *saga.Saga[trip]
	stop   context.CancelFunc
	dead   bool
}

func (f *family) errorf(format string, args ...any) {
	f.t.Errorf("seed %d: "+format, append([]any{f.seed}, args...)...)
}

func (f *family) n(n int) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.rng.IntN(n)
}

func (f *family) p(percent int) bool { return f.rng.IntN(100) < percent }

func (f *family) seconds(n int) time.Duration {
	return time.Duration(f.rng.IntN(n*1000)) * time.Millisecond
}

func (f *family) step(name string) saga.Step[trip] {
	nothing := func(context.Context, *trip) error { return nil }
	pause := f.seconds(20)
	st := saga.Step[trip]{Name: name, Do: nothing, Undo: nothing, Attempts: 1 + f.rng.IntN(3), UndoAttempts: 3,
		Backoff: func(int) time.Duration { return pause }}
	if f.p(15) {
		st.Delay = f.seconds(60)
	}
	if f.p(20) {
		st.Await = name
		if f.p(60) {
			st.AwaitFor = 1 + f.seconds(60)
		}
	}
	return st
}

func (f *family) invent() {
	leaf := &saga.Saga[trip]{Name: "leaf", Steps: []saga.Step[trip]{f.step("a"), f.step("b")}}
	sealed := &saga.Saga[trip]{Name: "sealed", Steps: []saga.Step[trip]{f.step("a"), f.step("b"), f.step("c")}}
	sealed.Steps[1].Pivot, sealed.Steps[1].Undo, sealed.Steps[2].Undo = true, nil, nil
	f.children, f.kinds = map[string]*saga.Saga[trip]{"leaf": leaf, "sealed": sealed}, make(map[string]string)
	f.parent.Name = "parent"
	if f.p(15) {
		f.parent.Timeout = 1 + f.seconds(90)
	}
	n, pivot, graph := 2+f.rng.IntN(4), f.rng.IntN(8), f.p(30)
	beyond := make([]bool, n)
	for i := range n {
		st := f.step(fmt.Sprint("s", i))
		st.Pivot = i == pivot
		if graph && i > 0 && f.p(60) && i != pivot && i-1 != pivot && st.Await+f.parent.Steps[i-1].Await == "" {
			st.Parallel = true
		}
		beyond[i] = i > pivot
		if (st.Pivot || beyond[i]) && f.p(60) {
			st.Undo = nil
		}
		switch k := f.rng.IntN(10); {
		case k < 4:
			f.kinds[st.Name], st.Do, st.Undo = "leaf", nil, nil
			if (st.Pivot || beyond[i]) && f.p(50) {
				f.kinds[st.Name] = "sealed"
			}
		case k < 5:
			st.ReadOnly, st.Undo = true, nil
		case k < 6 && st.Delay+st.AwaitFor > 0:
			st.Do, st.Undo = nil, nil
		}
		f.parent.Steps = append(f.parent.Steps, st)
	}
}

// bind returns a copy of a definition for one process.
func (c *clan) bind(sg *saga.Saga[trip], kids map[string]*saga.Saga[trip], many int) *saga.Saga[trip] {
	chain := true
	for _, st := range sg.Steps {
		chain = chain && !st.Parallel
	}
	bound := &saga.Saga[trip]{Name: sg.Name, Timeout: sg.Timeout}
	for _, st := range sg.Steps {
		c.bindStep(&st, chain)
		if kid := kids[c.f.kinds[st.Name]]; kid != nil && sg.Name == "parent" {
			st.Saga = saga.ChildrenOf(kid, func(*trip) ([]trip, error) { return make([]trip, many), nil }, nil)
		}
		bound.Steps = append(bound.Steps, st)
	}
	return bound
}

func (c *clan) bindStep(st *saga.Step[trip], chain bool) {
	name, readOnly := st.Name, st.ReadOnly
	if st.Do != nil {
		st.Do = func(ctx context.Context, _ *trip) error { return c.do(ctx, name, readOnly, chain) }
	}
	if st.Undo != nil {
		st.Undo = func(ctx context.Context, _ *trip) error { return c.undo(ctx, name) }
	}
}

// key returns the id of a saga and the name of its step.
func key(ctx context.Context, step string) (id, k string) {
	id = saga.CommandFrom(ctx).ID
	for range 2 {
		id = id[:strings.LastIndexByte(id, '/')]
	}
	return id, id + " " + step
}

func (c *clan) do(ctx context.Context, name string, readOnly, chain bool) (err error) {
	f := c.f
	id, k := key(ctx, name)
	f.mu.Lock()
	defer f.mu.Unlock()
	if c.dead {
		return errDown
	}
	for other, by := range f.doing {
		if chain && !by.dead && strings.HasPrefix(other, id+" ") {
			f.errorf("%s begins during %s", k, other)
		}
	}
	f.doing[k] = c
	defer delete(f.doing, k)
	if !f.healed && f.p(25) {
		d := f.seconds(40)
		f.mu.Unlock()
		select {
		case <-time.After(d):
		case <-ctx.Done():
		}
		f.mu.Lock()
		if c.dead || ctx.Err() != nil {
			return errDown
		}
	}
	trouble := 100
	if !f.healed {
		trouble = f.rng.IntN(100)
	}
	switch {
	case f.undone[k] || f.voided[k]:
		return saga.Void(errors.New("undone"))
	case trouble < 12:
		return errDown
	case trouble < 22 && !f.effect[k]:
		f.voided[k] = true
		return saga.Void(errDeclined)
	case trouble < 26:
		return saga.Abort(errDeclined)
	}
	f.effect[k] = !readOnly
	if trouble < 34 {
		return errors.New("reply lost")
	}
	return nil
}

func (c *clan) undo(ctx context.Context, name string) error {
	f := c.f
	_, k := key(ctx, name)
	f.mu.Lock()
	defer f.mu.Unlock()
	if c.dead {
		return errDown
	}
	if by := f.doing[k]; by != nil && !by.dead {
		f.errorf("the Undo of %s begins during its Do", k)
	}
	if !f.healed && f.p(30) {
		return errDown
	}
	f.effect[k], f.undone[k] = false, true
	return nil
}

func (f *family) host(ctx context.Context, wg *sync.WaitGroup) *clan {
	c := &clan{Store: f.store, f: f}
	c.runner = saga.NewRunner(c, saga.RunnerConfig{
		LeaseTTL: lease, Poll: 4 * time.Second, MaxTakeovers: 50, Concurrency: 1 + f.n(5),
		OnEvent: func(_ context.Context, e saga.Event) { f.heard(e) },
	})
	kids := make(map[string]*saga.Saga[trip])
	for name, sg := range f.children {
		kids[name] = c.bind(sg, nil, 0)
		saga.Register(c.runner, kids[name])
	}
	c.sg = c.bind(&f.parent, kids, 1+f.seed%3)
	saga.Register(c.runner, c.sg)
	ctx, c.stop = context.WithCancel(ctx)
	wg.Go(func() { _ = c.runner.Run(ctx) })
	return c
}

func (f *family) saw(what string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.seen[what]++
}

// heard checks that a saga ends after its children.
func (f *family) heard(e saga.Event) {
	if e.Kind == saga.EventStuck {
		f.saw("stuck")
	}
	if e.ID != "order" || e.Kind != saga.EventCompleted && e.Kind != saga.EventCompensated {
		return
	}
	for step := range f.kinds {
		list, _ := f.store.Children(context.Background(), store.ChildrenRequest{Parent: e.ID, Step: step})
		f.mu.Lock()
		for _, c := range list {
			if !c.Status.Ended() && !f.excused["order "+step] {
				f.errorf("the saga is %s, and %s is %s", e.Kind, c.ID, c.Status)
			}
		}
		f.mu.Unlock()
	}
}

func (c *clan) disturb(write func() error) error {
	c.f.mu.Lock()
	trouble, dead := 100, c.dead
	if !c.f.healed {
		trouble = c.f.rng.IntN(100)
	}
	c.f.mu.Unlock()
	if dead || trouble < 3 {
		return errDown
	}
	if err := write(); err != nil || trouble >= 6 {
		return err
	}
	return errDown
}

func (c *clan) Start(ctx context.Context, req store.StartRequest) (rec store.Record, created bool, err error) {
	err = c.disturb(func() (err error) { rec, created, err = c.Store.Start(ctx, req); return err })
	return rec, created, err
}

func (c *clan) Claim(ctx context.Context, req store.ClaimRequest) (recs []store.Record, err error) {
	err = c.disturb(func() (err error) { recs, err = c.Store.Claim(ctx, req); return err })
	return recs, err
}

func (c *clan) Heartbeat(ctx context.Context, req store.HeartbeatRequest) (held []store.Renewed, err error) {
	err = c.disturb(func() (err error) { held, err = c.Store.Heartbeat(ctx, req); return err })
	return held, err
}

func (c *clan) Commit(ctx context.Context, req store.CommitRequest) (r store.Receipt, err error) {
	err = c.disturb(func() (err error) { r, err = c.Store.Commit(ctx, req); return err })
	return r, err
}

func (c *clan) Load(ctx context.Context, id string) (rec store.Record, err error) {
	err = c.disturb(func() (err error) { rec, err = c.Store.Load(ctx, id); return err })
	return rec, err
}

func (c *clan) Children(ctx context.Context, req store.ChildrenRequest) (list []store.ChildRecord, err error) {
	err = c.disturb(func() (err error) { list, err = c.Store.Children(ctx, req); return err })
	return list, err
}

func (c *clan) Signals(ctx context.Context, id string) (list []store.Signal, err error) {
	err = c.disturb(func() (err error) { list, err = c.Store.Signals(ctx, id); return err })
	return list, err
}

func (c *clan) Hasten(ctx context.Context, id string) error {
	return c.disturb(func() error { return c.Store.Hasten(ctx, id) })
}

func (f *family) run() {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	hosts := []*clan{f.host(ctx, &wg), f.host(ctx, &wg)}
	operator := &clan{Store: f.store, f: f}
	operator.runner = saga.NewRunner(f.store, saga.RunnerConfig{OnEvent: func(_ context.Context, e saga.Event) { f.heard(e) }})
	kids := make(map[string]*saga.Saga[trip])
	for name, sg := range f.children {
		kids[name] = operator.bind(sg, nil, 0)
	}
	operator.sg = operator.bind(&f.parent, kids, 1)
	saga.Register(operator.runner, operator.sg)
	saga.Register(operator.runner, kids["leaf"], kids["sealed"])
	for {
		if _, err := saga.Start(ctx, hosts[0].runner, hosts[0].sg, "order", trip{}); err == nil {
			break
		}
	}
	for range 20 {
		time.Sleep(time.Duration(f.n(12000)) * time.Millisecond)
		if f.n(12) == 0 {
			f.mu.Lock()
			hosts[0].dead = true
			f.mu.Unlock()
			hosts[0].stop()
			hosts = append(hosts[1:], f.host(ctx, &wg))
		}
		f.operate(ctx, operator.runner)
	}
	f.mu.Lock()
	f.healed = true
	f.mu.Unlock()
	for round := range 20 {
		time.Sleep(3 * time.Minute)
		if !f.mend(ctx, operator.runner, round) {
			f.check(ctx, operator.runner)
			return
		}
	}
	f.errorf("it does not end")
	page, _, _ := operator.runner.List(ctx, saga.Filter{})
	for _, in := range page {
		f.t.Logf("%s is %s: %s %+v", in.ID, in.Status, in.LastError, in.Steps)
	}
}

// operate does something random to a random saga.
func (f *family) operate(ctx context.Context, r *saga.Runner) {
	page, _, err := r.List(ctx, saga.Filter{})
	if err != nil || len(page) == 0 {
		return
	}
	in := page[f.n(len(page))]
	step := in.Steps[f.n(len(in.Steps))].Name
	op := saga.Operation{Note: "by hand"}
	switch k := f.n(100); {
	case k < 35:
		if r.Signal(ctx, in.ID, step, nil) == nil {
			f.saw("signal")
		}
		return
	case k < 40:
		op.Action = saga.ActionCancel
	case k < 78:
		op.Action = saga.ActionRetry
	case k < 88:
		op.Action, op.Step = saga.ActionSkip, step
	case k < 95:
		op.Action = saga.ActionCompensate
	case in.Parent != "":
		op.Action = saga.ActionAbandon
	default:
		return
	}
	f.apply(ctx, r, in, op)
}

// apply applies an operation, and excuses what it settles.
func (f *family) apply(ctx context.Context, r *saga.Runner, in *saga.Instance, op saga.Operation) {
	f.mu.Lock()
	was := make(map[string]bool)
	excuse := func(step string) {
		k := strings.TrimSpace(in.ID + " " + step)
		was[k] = f.excused[k]
		f.excused[k] = true
	}
	switch op.Action {
	case saga.ActionSkip:
		excuse(op.Step)
	case saga.ActionAbandon:
		excuse("")
	case saga.ActionCompensate: // the operator knows about a pivot without Undo
		for _, st := range in.Steps {
			if st.Pivot {
				excuse(st.Name)
			}
		}
	}
	f.mu.Unlock()
	err := r.Operate(ctx, in.ID, op)
	if err == nil {
		f.saw(string(op.Action))
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for k, is := range was {
		f.excused[k] = is
	}
	if !errors.Is(err, saga.ErrNotAllowed) {
		f.errorf("%s of %s: %v", op.Action, in.ID, err)
	}
}

// mend signals and mends all sagas, and reports whether some have not ended.
func (f *family) mend(ctx context.Context, r *saga.Runner, round int) bool {
	page, _, err := r.List(ctx, saga.Filter{})
	if err != nil {
		f.errorf("list: %v", err)
	}
	left := false
	for _, in := range page {
		left = left || !in.Status.Ended()
		for _, st := range in.Steps {
			if in.Status == saga.Running || in.Status == saga.Stuck {
				_ = r.Signal(ctx, in.ID, st.Name, nil)
			}
		}
		if in.Status != saga.Stuck {
			continue
		}
		op := saga.Operation{Action: saga.ActionRetry}
		if round > 2 { // children that were turned back are not started again
			op = saga.Operation{Action: saga.ActionSkip, Step: in.Step}
		}
		f.apply(ctx, r, in, op)
	}
	return left
}

func (f *family) check(ctx context.Context, r *saga.Runner) {
	page, _, _ := r.List(ctx, saga.Filter{})
	parent := saga.Status("")
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, in := range page {
		if in.Parent == "" {
			parent = in.Status
		}
	}
	for _, in := range page {
		f.seen[string(in.Status)]++
		sg := &f.parent
		if in.Parent != "" {
			sg = f.children[in.Saga]
			step := strings.Split(in.ID, "/")[1]
			if in.Status == saga.Completed && parent == saga.Compensated && !f.excused["order "+step] {
				f.errorf("the saga is compensated, and %s is completed", in.ID)
			}
			if in.Status == saga.Compensated {
				log, _ := f.store.History(ctx, in.ID, 0, 0)
				for _, e := range log {
					if e.Kind == saga.EventCompleted {
						f.seen["reverted"]++
					}
				}
			}
		}
		if in.Status == saga.Abandoned {
			continue
		}
		for _, st := range sg.Steps {
			k := in.ID + " " + st.Name
			want := in.Status == saga.Completed && st.Do != nil && !st.ReadOnly
			if !f.excused[k] && f.effect[k] != want {
				f.errorf("%s is %s, and its step %s is in effect: %v: %+v", in.ID, in.Status, st.Name, f.effect[k], in.Steps)
			}
		}
	}
}
