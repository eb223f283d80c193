package saga_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-resilience/resilience/internal/sim"
	"github.com/go-resilience/resilience/saga"
	store "github.com/go-resilience/resilience/saga/sagastore"
)

// TestSagaSimulation runs sagas with children, waits and signals in one to three processes that crash and stop. The
// store and the participants fail, panic, hang, are late, and lose and delay replies; policies refuse; operators
// act. At each step it checks that no attempt starts that is not recorded or whose predecessors are not done, that
// no Undo starts during its Do, that a saga ends after its children, and that no epoch has two owners. When the
// faults are over, every saga ends within a bounded time, number of store calls and length of its log. Each step has
// then taken effect once or not at all, and its changes to the state are present.
func TestSagaSimulation(t *testing.T) {
	defer slog.SetDefault(slog.Default())
	slog.SetDefault(slog.New(slog.DiscardHandler))
	log.SetOutput(io.Discard)
	defer log.SetOutput(os.Stderr)
	sim.Simulation{Name: "saga", Seeds: 600, Run: simulateSaga}.Test(t)
}

// A book is the state. Each step writes its own entry.
type book struct{ Entries map[string]string }

var errDown = errors.New("connection lost")

// A village is the store, the participants and the processes of a simulation.
type village struct {
	*sim.World
	store  store.Store
	parent saga.Saga[book]
	leaf   saga.Saga[book]
	sealed saga.Saga[book]   // a leaf with a pivot
	kids   map[string]string // the definition of the children of a step of parent
	chain  bool              // the steps of parent
	deaf   bool              // a Do ignores its ctx and may be late
	nodes  []*node
	living sync.WaitGroup

	mu      sync.Mutex
	named   int
	asked   int // number of operations
	effect  map[string]bool
	undone  map[string]bool
	voids   map[string]int  // the Declined errors of a Do, which include attempts in flight
	excused map[string]bool // an operator has settled it, or its saga
	excuses map[string]int  // number of times
	doing   map[string]*node
	owners  map[string]string // by saga and epoch
	calls   map[string]int    // calls to the store, by saga
}

// A node is a process or an operator.
type node struct {
	hooked
	v      *village
	name   string
	runner *saga.Runner
	sg     *saga.Saga[book]
	stop   context.CancelFunc
	dead   bool
}

func simulateSaga(w *sim.World) {
	v := &village{
		World: w, store: saga.NewMemory(), effect: make(map[string]bool), undone: make(map[string]bool),
		voids: make(map[string]int), excused: make(map[string]bool), excuses: make(map[string]int),
		doing: make(map[string]*node), owners: make(map[string]string), calls: make(map[string]int),
		kids: make(map[string]string),
	}
	w.Step, w.Trouble, w.Hold, w.Meddle = time.Second, 5*w.Choose(7), 1+w.Choose(20), 2
	w.Most = 600 // two families end at the same time
	v.invent()
	ctx, cancel := context.WithCancel(context.Background())
	defer v.living.Wait()
	defer w.End()
	defer cancel()
	for range 1 + w.Choose(3) {
		v.node(ctx)
	}
	start := func(id string) {
		v.living.Go(func() {
			for ctx.Err() == nil {
				n := v.node0()
				if _, err := saga.Register(n.runner, n.sg).Start(ctx, id, book{}); err == nil {
					return
				}
				time.Sleep(time.Second)
			}
		})
	}
	w.Drive(w.Step, func() bool { return true }) // wait until they run
	start("p0")
	some := func() *node { return v.nodes[w.Choose(len(v.nodes))] }
	replace := func(n *node) {
		v.node(ctx)
		v.mu.Lock()
		v.nodes = slices.DeleteFunc(v.nodes, func(o *node) bool { return o == n })
		v.mu.Unlock()
		n.stop()
	}
	signal := func() {
		n, id := v.operator(), v.some()
		_ = n.runner.Signal(ctx, id, fmt.Sprint("s", w.Choose(4)), nil)
	}
	w.Acts = []sim.Act{
		{Name: "signal", Do: signal},
		{Name: "signal", Do: signal},
		{Name: "crash", Do: func() {
			n := some()
			v.mu.Lock()
			n.dead = true
			v.mu.Unlock()
			replace(n)
		}},
		{Name: "stop", Do: func() { replace(some()) }},
		{Name: "start", Do: func() { start("p1") }},
		{Name: "cancel", Do: func() { v.operate(ctx, saga.ActionCancel) }},
		{Name: "retry", Do: func() { v.operate(ctx, saga.ActionRetry) }},
		{Name: "retry", Do: func() { v.operate(ctx, saga.ActionRetry) }},
		{Name: "compensate", Do: func() { v.operate(ctx, saga.ActionCompensate) }},
		{Name: "abandon", Do: func() { v.operate(ctx, saga.ActionAbandon) }},
		{Name: "skip", Do: func() { v.operate(ctx, saga.ActionSkip) }},
	}
	w.Drive(2*time.Minute, nil)

	w.Heal()
	v.mu.Lock()
	clear(v.calls)
	v.mu.Unlock()
	before := v.lengths()
	ended := false
	for range 200 {
		v.living.Go(func() { v.mend(ctx) })
		w.Drive(6*time.Second, func() bool { ended = v.ended(); return ended })
		if ended || w.Failed() {
			break
		}
	}
	if w.Failed() {
		return
	}
	if !ended {
		w.Fail("liveness", "20 minutes after the troubles: %s", v.states())
	}
	v.mu.Lock()
	for id, n := range v.calls {
		if n > 400 {
			w.Fail("work", "%d store calls for %q after the faults", n, id)
		}
	}
	v.mu.Unlock()
	for id, n := range v.lengths() {
		if n-before[id] > 120 {
			w.Fail("log", "%d entries of %q after the troubles", n-before[id], id)
		}
	}
	v.check()
}

func (v *village) step(name string) saga.Step[book] {
	nothing := func(context.Context, *book) error { return nil }
	pause := sim.Pick(v.World, time.Second, 3*time.Second, 20*time.Second)
	st := saga.Step[book]{
		Name: name, Do: nothing, Undo: nothing, Attempts: 1 + v.Choose(3), UndoAttempts: 3,
		Timeout: sim.Pick(v.World, 0, 5*time.Second), Backoff: func(int) time.Duration { return pause },
	}
	if v.Chance(20) {
		st.Delay = time.Duration(1+v.Choose(40)) * time.Second
	}
	if v.Chance(25) {
		st.Await, st.AwaitFor = name, sim.Pick(v.World, 0, 10*time.Second, time.Minute)
	}
	return st
}

// invent generates the definitions: a leaf of two steps, and a parent of up to four steps. Some of these are one or
// two leaves, which may have a pivot from the parent's pivot on.
func (v *village) invent() {
	v.leaf = saga.Saga[book]{Name: "leaf", Steps: []saga.Step[book]{v.step("s0"), v.step("s1")}}
	v.deaf = v.leaf.Steps[1].Attempts == 3
	v.sealed = saga.Saga[book]{Name: "sealed", Steps: slices.Clone(v.leaf.Steps)}
	v.sealed.Steps[0].Pivot, v.sealed.Steps[0].Undo, v.sealed.Steps[1].Undo = true, nil, nil
	v.parent = saga.Saga[book]{Name: "parent"}
	n, pivot := 1+v.Choose(4), v.Choose(9)-1
	v.chain = !v.Chance(50)
	beyond := make([]bool, n)
	for i := range n {
		st := v.step(fmt.Sprint("s", i))
		beyond[i] = pivot >= 0 && i > pivot
		st.Pivot = i == pivot
		if !v.chain && i > 0 && i != pivot && i-1 != pivot && st.Await+v.parent.Steps[i-1].Await == "" {
			st.Parallel = v.Chance(70)
		}
		if v.Chance(35) {
			st.Do, st.Undo, v.kids[st.Name] = nil, nil, "leaf"
			if (st.Pivot || beyond[i]) && i%2 == 1 {
				v.kids[st.Name] = "sealed"
			}
		} else if (st.Pivot || beyond[i]) && v.Chance(50) {
			st.Undo = nil
		}
		v.parent.Steps = append(v.parent.Steps, st)
	}
	if v.Chance(15) {
		v.parent.Timeout = time.Duration(1+v.Choose(120)) * time.Second
	}
}

func (v *village) newNode(name string) *node {
	n := &node{v: v, name: name}
	n.Store, n.hook = v.store, n.meddle
	return n
}

func (v *village) node(ctx context.Context) {
	v.mu.Lock()
	v.named++
	n := v.newNode(fmt.Sprintf("%c%d", 'a'+v.named%26, v.named))
	v.mu.Unlock()
	n.runner = saga.NewRunner(n, saga.RunnerConfig{Name: n.name, Poll: 4 * time.Second, MaxTakeovers: 50, Concurrency: 3,
		Drain: 9300 * time.Millisecond}) // no two timers end at the same time
	asked := 0
	n.runner.SetChance(func(below time.Duration) time.Duration { // no two are equal
		v.mu.Lock()
		defer v.mu.Unlock()
		asked++
		return below * time.Duration(asked*389%997) / 997
	})
	n.register()
	ctx, n.stop = context.WithCancel(ctx)
	v.mu.Lock()
	v.nodes = append(v.nodes, n)
	v.mu.Unlock()
	v.living.Go(func() { _ = n.runner.Run(ctx) })
}

func (v *village) node0() *node {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.nodes[0]
}

func (v *village) operator() *node {
	v.mu.Lock()
	v.asked++
	n := v.newNode(fmt.Sprint("operator ", v.asked))
	v.mu.Unlock()
	n.runner = saga.NewRunner(n, saga.RunnerConfig{})
	n.register()
	return n
}

func (n *node) register() {
	leaf, sealed := n.bind(&n.v.leaf, nil), n.bind(&n.v.sealed, nil)
	n.sg = n.bind(&n.v.parent, map[string]*saga.Saga[book]{"leaf": leaf, "sealed": sealed})
	for _, sg := range []*saga.Saga[book]{leaf, sealed, n.sg} {
		saga.Register(n.runner, sg)
	}
}

// bind returns a copy of a definition for one process. A step without a Do has children.
func (n *node) bind(sg *saga.Saga[book], kids map[string]*saga.Saga[book]) *saga.Saga[book] {
	bound := &saga.Saga[book]{Name: sg.Name, Timeout: sg.Timeout, Steps: slices.Clone(sg.Steps)}
	for i := range bound.Steps {
		st := &bound.Steps[i]
		name := st.Name
		if st.Do == nil {
			list := make([]book, 1+(len(sg.Steps)-1)/3)
			st.Child = saga.ChildrenOf(kids[n.v.kids[name]], func(*book) ([]book, error) { return list, nil }, nil)
			continue
		}
		st.Do = func(ctx context.Context, b *book) error { return n.do(ctx, name, b) }
		if st.Undo != nil {
			st.Undo = func(ctx context.Context, _ *book) error { return n.undo(ctx, name) }
		}
	}
	return bound
}

// begins checks against the record that an attempt may start.
func (n *node) begins(ctx context.Context, name string, op saga.Op) (k string) {
	v := n.v
	id, k := key(ctx, name)
	cmd := saga.CommandFrom(ctx)
	rec, err := v.store.Load(context.Background(), id)
	states := decodeSteps(rec)
	v.mu.Lock()
	defer v.mu.Unlock()
	if n.dead || v.excused[id] {
		return k
	}
	want := map[saga.Op]saga.StepStatus{saga.OpDo: saga.StepStarted, saga.OpUndo: saga.StepUndoing}[op]
	switch {
	case err != nil:
		v.Fail("begin", "%s of %s: %v", op, k, err)
	case rec.Epoch != cmd.Epoch:
		v.Fail("epoch", "%s of %s starts in epoch %d, but the record has epoch %d", op, k, cmd.Epoch, rec.Epoch)
	case op == saga.OpDo && rec.Status != saga.Running:
		v.Fail("status", "Do of %s starts, but the saga is %s", k, rec.Status)
	case states[name].Status != want:
		v.Fail("record", "%s of %s starts, but its recorded status is %s", op, k, states[name].Status)
	case op == saga.OpUndo && v.doing[k] != nil && !v.doing[k].dead && !v.deaf:
		v.Fail("overlap", "the Undo of %s starts during its Do", k)
	}
	steps := v.stepsOf(rec)
	for _, st := range steps {
		own, other, s := groupOf(steps, name), groupOf(steps, st.Name), states[st.Name].Status
		if op == saga.OpDo && other < own && s != saga.StepDone && s != saga.StepSkipped {
			v.Fail("order", "Do of %s starts, but %s is %s", k, st.Name, s)
		}
		if op == saga.OpUndo && rec.Status == saga.Compensating && other > own && s != saga.StepIdle &&
			s != saga.StepNoEffect && s != saga.StepUndone && s != saga.StepSkipped {
			v.Fail("order", "Undo of %s starts, but %s is %s", k, st.Name, s)
		}
	}
	return k
}

func decodeSteps(rec store.Record) map[string]saga.StepState {
	var pr struct {
		Steps []struct {
			N string
			S saga.StepStatus
			D bool
		}
	}
	_ = json.Unmarshal(rec.Progress, &pr)
	states := make(map[string]saga.StepState)
	for _, u := range pr.Steps {
		states[u.N] = saga.StepState{Name: u.N, Status: u.S, MaybeApplied: u.D}
	}
	return states
}

func groupOf(steps []saga.Step[book], name string) (group int) {
	for i, st := range steps {
		if i > 0 && !st.Parallel {
			group++
		}
		if st.Name == name {
			break
		}
	}
	return group
}

// key returns the ID of a saga and the name of its step.
func key(ctx context.Context, step string) (id, k string) {
	id = saga.CommandFrom(ctx).ID
	for range 2 {
		id = id[:strings.LastIndexByte(id, '/')]
	}
	return id, id + " " + step
}

func (n *node) do(ctx context.Context, name string, b *book) error {
	v, k := n.v, n.begins(ctx, name, saga.OpDo)
	v.mu.Lock()
	v.doing[k] = n
	voids := v.voids[k]
	v.mu.Unlock()
	if v.deaf {
		ctx = context.WithoutCancel(ctx)
	}
	fault, err := v.Call(ctx, fmt.Sprintf("%s does %s", n.name, k), "fails", "lost", "declined", "aborted", "refused",
		"panics")
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.doing[k] == n {
		delete(v.doing, k)
	}
	switch {
	case n.dead || err != nil || fault == "fails" || fault == "over":
		return errDown
	case fault == "refused":
		return refusal{}
	case fault == "panics":
		panic("out of range")
	case v.undone[k], v.voids[k] != voids:
		return saga.Declined(errDeclined)
	case fault == "declined" && !v.effect[k]: // otherwise an earlier attempt was applied and its reply lost
		v.voids[k]++
		return saga.Declined(errDeclined)
	case fault == "aborted", fault == "declined":
		return saga.Permanent(errDeclined)
	}
	v.effect[k] = true
	if b.Entries == nil {
		b.Entries = make(map[string]string)
	}
	b.Entries[name] = "done"
	if fault == "lost" {
		return errDown
	}
	return nil
}

func (n *node) undo(ctx context.Context, name string) error {
	v, k := n.v, n.begins(ctx, name, saga.OpUndo)
	fault, err := v.Call(ctx, fmt.Sprintf("%s undoes %s", n.name, k), "fails", "lost", "refused")
	v.mu.Lock()
	defer v.mu.Unlock()
	switch {
	case n.dead || err != nil || fault == "fails" || fault == "over":
		return errDown
	case fault == "refused":
		return refusal{}
	}
	v.effect[k], v.undone[k] = false, true
	if fault == "lost" {
		return errDown
	}
	return nil
}

// call calls the store. The call may fail before or after it takes effect, or be slow.
func (n *node) call(ctx context.Context, what, id string, do func() error) error {
	v := n.v
	v.mu.Lock()
	dead := n.dead
	v.calls[id[strings.LastIndexByte(id, ' ')+1:]]++
	v.mu.Unlock()
	if dead {
		return errDown
	}
	fault, err := v.Call(ctx, fmt.Sprintf("%s %s %s", n.name, what, id), "fails", "lost")
	if v.isDead(n) || fault == "fails" || fault == "over" || err != nil {
		return errors.Join(errDown, err)
	}
	if err = do(); err == nil && fault == "lost" {
		return errDown
	}
	if fault, late := v.Call(ctx, fmt.Sprintf("%s %s %s: reply", n.name, what, id)); fault == "over" || late != nil ||
		v.isDead(n) {
		return errors.Join(errDown, late)
	}
	return err
}

// verbs name the calls to a store in a simulation.
var verbs = map[string]string{
	"Start": "starts", "Claim": "claims", "Heartbeat": "extends", "Load": "loads", "Signal": "signals",
	"Cancel": "cancels", "Wake": "wakes", "Messages": "hears", "Children": "looks at",
}

func (n *node) meddle(ctx context.Context, method, id string, call func(context.Context) error) error {
	return n.call(ctx, verbs[method], id, func() error { return call(context.Background()) })
}

func (v *village) isDead(n *node) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return n.dead
}

func (n *node) Commit(ctx context.Context, req store.CommitRequest) (receipt store.Receipt, err error) {
	err = n.call(ctx, "commits", req.ID, func() (err error) {
		v := n.v
		rec, _ := v.store.Load(context.Background(), req.ID)
		if receipt, err = n.Store.Commit(context.Background(), req); err != nil || rec.Owner == "" ||
			strings.HasPrefix(n.name, "operator") {
			return err // without an owner, operators and parents also write
		}
		v.mu.Lock()
		defer v.mu.Unlock()
		v.endsAfterItsChildren(req)
		at := fmt.Sprint(req.ID, " ", req.Epoch)
		if by := v.owners[at]; by != "" && by != n.name && req.Epoch > 0 {
			v.Fail("owners", "%s and %s commit %s", by, n.name, at)
		}
		v.owners[at] = n.name
		return nil
	})
	return receipt, err
}

// endsAfterItsChildren checks a commit. The caller holds v.mu.
func (v *village) endsAfterItsChildren(req store.CommitRequest) {
	if req.Status != saga.Completed && req.Status != saga.Compensated {
		return
	}
	for step := range v.kids {
		list, _ := v.store.Children(context.Background(), store.ChildrenRequest{Parent: req.ID, Step: step})
		for _, c := range list {
			if !c.Status.Ended() && !v.excused[req.ID+" "+step] {
				v.Fail("children", "%s is %s, and %s is %s", req.ID, req.Status, c.ID, c.Status)
			}
		}
	}
}

// all returns the sagas without a call that the scheduler delays.
func (v *village) all() []store.Record {
	recs, _, _ := v.store.List(context.Background(), store.Filter{})
	return recs
}

func (v *village) some() string {
	recs := v.all()
	if len(recs) == 0 {
		return "p0"
	}
	return recs[v.Choose(len(recs))].ID
}

func (v *village) lengths() map[string]int64 {
	n := make(map[string]int64)
	for _, rec := range v.all() {
		n[rec.ID] = rec.Seq
	}
	return n
}

func (v *village) ended() bool {
	recs := v.all()
	return len(recs) > 0 &&
		!slices.ContainsFunc(recs, func(rec store.Record) bool { return !rec.Status.Ended() || rec.Owner != "" })
}

func (v *village) states() (s string) {
	for _, rec := range v.all() {
		s += fmt.Sprintf("\n%s is %s, owned by %q, epoch %d, wakes at %v: %s %s", rec.ID, rec.Status, rec.Owner, rec.Epoch,
			rec.WakeAt.Sub(rec.CreatedAt), rec.LastError, rec.Progress)
	}
	return s
}

// operate applies an operator's action to some saga. It excuses the steps that the action may settle.
func (v *village) operate(ctx context.Context, action saga.Action) {
	n, id := v.operator(), v.some()
	rec, err := v.store.Load(ctx, id)
	if err != nil {
		return // the saga has not started
	}
	steps, op := v.stepsOf(rec), saga.Operation{Action: action, Note: "by hand"}
	var settles []string
	switch action {
	case saga.ActionAbandon:
		settles = []string{id}
	case saga.ActionSkip:
		op.Step = steps[v.Choose(len(steps))].Name
		settles = []string{id + " " + op.Step}
	case saga.ActionCompensate: // the operator knows about a pivot without Undo
		for _, st := range steps {
			if st.Pivot {
				settles = append(settles, id+" "+st.Name)
			}
		}
	}
	v.excuse(settles, 1)
	if err = n.runner.Operate(ctx, id, op); errors.Is(err, saga.ErrNotAllowed) {
		v.excuse(settles, -1)
	}
	v.Note("%s, %s of %s: %v", n.name, action, id, err == nil)
}

func (v *village) excuse(settled []string, n int) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, k := range settled {
		v.excuses[k] += n
		v.excused[k] = v.excuses[k] > 0
	}
}

// mend sends every awaited signal and retries stuck sagas. Stuck sagas also receive their signals: otherwise one of
// two waits might fail before each retry.
func (v *village) mend(ctx context.Context) {
	for _, rec := range v.all() {
		kept, _ := v.store.Messages(ctx, rec.ID)
		for _, st := range v.stepsOf(rec) {
			known := slices.ContainsFunc(kept, func(s store.Message) bool { return s.Name == st.Await })
			if st.Await != "" && !known && (rec.Status == saga.Running || rec.Status == saga.Stuck) {
				_ = v.operator().runner.Signal(ctx, rec.ID, st.Await, nil)
			}
		}
		if rec.Status == saga.Stuck {
			_ = v.operator().runner.Operate(ctx, rec.ID, saga.Operation{Action: saga.ActionRetry, Note: "mended"})
		}
	}
}

func (v *village) stepsOf(rec store.Record) []saga.Step[book] {
	switch rec.Saga {
	case "leaf":
		return v.leaf.Steps
	case "sealed":
		return v.sealed.Steps
	}
	return v.parent.Steps
}

func (v *village) check() {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, rec := range v.all() {
		log, _ := v.store.History(context.Background(), rec.ID, 0, 0)
		if int64(len(log)) != rec.Seq {
			v.Fail("history", "%s has %d entries, and its seq is %d", rec.ID, len(log), rec.Seq)
		}
		if rec.Status == saga.Abandoned || v.excused[rec.ID] {
			continue
		}
		if parent, err := v.store.Load(context.Background(), rec.Parent); err == nil &&
			parent.Status == saga.Compensated && rec.Status == saga.Completed && !v.excused[rec.Parent+" "+rec.ParentStep] {
			v.Fail("children", "%s is compensated, and %s is completed", rec.Parent, rec.ID)
		}
		var b book
		_ = json.Unmarshal(rec.State, &b)
		for _, st := range v.stepsOf(rec) {
			k := rec.ID + " " + st.Name
			if rec.Status == saga.Completed && st.Do != nil && !v.excused[k] && b.Entries[st.Name] == "" {
				v.Fail("state", "what %s wrote is lost: %s", k, rec.State)
			}
			if st.Do != nil && !v.excused[k] && v.effect[k] != (rec.Status == saga.Completed) {
				v.Fail("effect", "%s is %s, and its step %s is in effect: %v\n%s", rec.ID, rec.Status, st.Name, v.effect[k],
					v.states())
			}
		}
	}
}
