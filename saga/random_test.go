package saga_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	store "github.com/go-resilience/resilience/internal/sagastore"
	"github.com/go-resilience/resilience/saga"
)

// TestRandomSagas runs random sagas (parallel steps, pivots, deadlines)
// through random trouble: steps that fail, hang, panic and lose their replies,
// a store that loses its answers and is slow, processes that crash or act late,
// cancellations. Whatever happens: each saga ends, every step has taken effect
// once or not at all, nothing begins that the record does not have, nothing
// goes forward after it has turned back, and no epoch has two owners.
func TestRandomSagas(t *testing.T) {
	const shards = 4
	most := seeds
	if testing.Short() {
		most = 1500
	}
	var mu sync.Mutex
	seen := make(map[string]int)
	t.Run("worlds", func(t *testing.T) {
		for shard := range shards {
			t.Run(fmt.Sprint("shard-", shard), func(t *testing.T) {
				t.Parallel()
				for seed := shard; seed < most && !t.Failed(); seed += shards {
					synctest.Test(t, func(t *testing.T) {
						w := newWorld(t, uint64(seed))
						w.run()
						mu.Lock()
						defer mu.Unlock()
						for what, n := range w.seen {
							seen[what] += n
						}
					})
				}
			})
		}
	})
	t.Log(seen)
	for _, what := range []string{
		"completed", "compensated", "stuck", "taken over", "canceled", "parked", "released", "deadline",
		"delayed", "signaled", "not signaled", "slow", "unavailable", "panic", "no effect", "aborted", "late", "reply lost", "refused", "undo refused", "parallel",
	} {
		require.NotZero(t, seen[what], what)
	}
}

const lease = 10 * time.Second

// A world is one random saga with its store, processes and participants.
type world struct {
	t       *testing.T
	seed    uint64
	store   store.Store
	policy  []nodePlan
	awaited []string // the names of the signals
	sg      func(*host) *saga.Saga[book]
	unitOf  func(name string) saga.Step[book]

	mu     sync.Mutex
	rng    *rand.Rand
	healed bool            // nothing fails any more
	quiet  bool            // the store is in order
	called map[string]bool // whose Do was called, and not refused before
	undos  map[string]bool // whose Undo was called
	effect map[string]bool
	undone map[string]bool
	voided map[string]bool  // refused for good
	owners map[int64]string // by epoch
	seen   map[string]int   // counts the kinds of trouble, to know that they happened
}

// book is the state: each step writes a field of its own, which survives.
type book struct{ Entries map[string]string }

type nodePlan struct {
	name  string
	group int
}

func newWorld(t *testing.T, seed uint64) *world {
	w := &world{
		t: t, seed: seed, store: saga.NewMemory(), rng: rand.New(rand.NewPCG(seed, 1)),
		called: make(map[string]bool), undos: make(map[string]bool),
		effect: make(map[string]bool), undone: make(map[string]bool), voided: make(map[string]bool),
		owners: make(map[int64]string), seen: make(map[string]int),
	}
	w.invent()
	return w
}

func (w *world) errorf(format string, args ...any) {
	w.t.Errorf("seed %d: "+format, append([]any{w.seed}, args...)...)
}

// p is true with this probability in percent. w.mu is held, or nothing runs yet.
func (w *world) p(percent int) bool { return w.rng.IntN(100) < percent }

// invent makes a random definition.
func (w *world) invent() {
	n := 1 + w.rng.IntN(6)
	graph := w.p(50)
	pivot := -1
	if w.p(40) {
		pivot = w.rng.IntN(n)
	}
	var shape saga.Saga[book]
	shape.Name, shape.Version = "random", 1
	if w.p(15) {
		shape.Timeout = time.Duration(1+w.rng.IntN(60)) * time.Second
	}
	for i := range n {
		st := w.unit(fmt.Sprint("s", i))
		st.Pivot = i == pivot
		beside := graph && i > 0 && w.p(60)
		if beside && !st.Pivot && st.Await == "" && !shape.Steps[i-1].Pivot && shape.Steps[i-1].Await == "" {
			st.Parallel = true
			w.seen["parallel"]++
		}
		if pivot >= 0 && i >= pivot && w.p(60) {
			st.Undo = nil
		}
		shape.Steps = append(shape.Steps, st)
	}
	group := 0
	for i, st := range shape.Steps {
		if i > 0 && !st.Parallel {
			group++
		}
		w.policy = append(w.policy, nodePlan{name: st.Name, group: group})
	}
	w.unitOf = func(name string) saga.Step[book] {
		return shape.Steps[slices.IndexFunc(shape.Steps, func(st saga.Step[book]) bool { return st.Name == name })]
	}
	w.sg = func(h *host) *saga.Saga[book] {
		sg := shape
		sg.Steps = slices.Clone(shape.Steps)
		for i := range sg.Steps {
			h.bind(&sg.Steps[i])
		}
		return &sg
	}
}

func (w *world) unit(name string) saga.Step[book] {
	nothing := func(context.Context, *book) error { return nil }
	wait := []time.Duration{time.Millisecond, time.Second, 8 * time.Second}[w.rng.IntN(3)]
	st := saga.Step[book]{
		Name: name, Do: nothing, Undo: nothing, Attempts: 1 + w.rng.IntN(4), UndoAttempts: 6,
		Backoff: func(int) time.Duration { return wait },
	}
	if w.p(10) {
		st.Delay = time.Duration(w.rng.IntN(20000)) * time.Millisecond
	}
	if w.p(15) {
		st.Await = "signal " + name
		w.awaited = append(w.awaited, st.Await)
		if w.p(50) {
			st.AwaitFor = time.Duration(1+w.rng.IntN(60)) * time.Second
		}
	}
	if w.p(30) {
		st.Timeout = time.Duration(1+w.rng.IntN(20)) * time.Second
	}
	return st
}

// A host is one process of the world.
type host struct {
	store.Store
	w      *world
	name   string
	runner *saga.Runner
	saga   *saga.Saga[book]
	stop   context.CancelFunc
	dead   bool // crashed: it does nothing any more
	cut    bool // from the store, but not from the participants
}

var errDown = errors.New("connection lost")

func (w *world) host(ctx context.Context, name string, wg *sync.WaitGroup) *host {
	h := &host{Store: w.store, w: w, name: name}
	h.runner = saga.NewRunner(h, saga.RunnerConfig{Name: name, LeaseTTL: lease, Poll: 3 * time.Second, MaxTakeovers: 50})
	h.saga = w.sg(h)
	saga.Register(h.runner, h.saga)
	ctx, h.stop = context.WithCancel(ctx)
	wg.Go(func() { _ = h.runner.Run(ctx) })
	return h
}

// bind gives a step the behavior of a participant that is called by this host.
func (h *host) bind(st *saga.Step[book]) {
	name := st.Name
	st.Do = func(ctx context.Context, b *book) error { return h.call(ctx, name, saga.OpDo, b) }
	st.Middleware = h.policy()
	if st.Undo != nil {
		st.Undo = func(ctx context.Context, b *book) error { return h.call(ctx, name, saga.OpUndo, b) }
	}
}

// policy refuses some of the calls, at once or when their ctx ends while they wait.
func (h *host) policy() func(func(context.Context) error) func(context.Context) error {
	w := h.w
	return func(next func(context.Context) error) func(context.Context) error {
		return func(ctx context.Context) error {
			w.mu.Lock()
			refuses, waits, after := !w.healed && w.p(15), w.p(20), time.Duration(w.rng.IntN(20))*time.Second
			if refuses {
				w.seen[map[bool]string{false: "refused", true: "undo refused"}[isUndo(ctx)]]++
			}
			w.mu.Unlock()
			if !refuses {
				return next(ctx)
			}
			if waits {
				select {
				case <-time.After(after):
				case <-ctx.Done():
				}
			}
			return refusal{after}
		}
	}
}

// call is a command to a participant, which applies each command once and
// refuses a Do that comes after its Undo.
func (h *host) call(ctx context.Context, name string, op saga.Op, b *book) error {
	w := h.w
	w.mu.Lock()
	defer w.mu.Unlock()
	if h.dead {
		return errDown
	}
	w.begins(saga.CommandFrom(ctx), h, name, op)
	w.waited(ctx, name, op)
	w.called[name] = w.called[name] || op == saga.OpDo
	w.undos[name] = w.undos[name] || op == saga.OpUndo
	trouble := 100
	if !w.healed {
		trouble = w.rng.IntN(100)
	}
	if trouble < 6 { // slow, perhaps slower than the lease or the timeout
		w.seen["slow"]++
		heeds := w.p(25)
		d := time.Duration(w.rng.IntN(40)) * time.Second
		if !heeds {
			d *= 5 // others may undo the step meanwhile
		}
		w.mu.Unlock()
		select {
		case <-time.After(d):
		case <-when(heeds, ctx.Done()):
		}
		w.mu.Lock()
		if h.dead {
			return errDown
		}
		if heeds && ctx.Err() != nil {
			return ctx.Err()
		}
		trouble = w.rng.IntN(100)
	}
	switch {
	case trouble < 10:
		w.seen["unavailable"]++
		return errors.New("unavailable")
	case trouble < 13:
		w.seen["panic"]++
		panic("out of range")
	case trouble < 16 && op == saga.OpDo && !w.effect[name]:
		w.seen["no effect"]++
		w.voided[name] = true
		return saga.Void(errors.New("full"))
	case trouble < 18:
		w.seen["aborted"]++
		return saga.Abort(errors.New("no way"))
	}
	if op == saga.OpDo {
		if w.undone[name] || w.voided[name] {
			w.seen["late"]++
			return saga.Void(errors.New("undone"))
		}
		w.effect[name] = true
		if b.Entries == nil {
			b.Entries = make(map[string]string)
		}
		b.Entries[name] = "done"
	} else {
		w.effect[name], w.undone[name] = false, true
	}
	if trouble < 25 {
		w.seen["reply lost"]++
		return errors.New("reply lost")
	}
	return nil
}

func when(is bool, ch <-chan struct{}) <-chan struct{} {
	if is {
		return ch
	}
	return nil
}

// waited checks that a step has its signal, or went on without one.
func (w *world) waited(ctx context.Context, name string, op saga.Op) {
	st := w.unitOf(name)
	if op == saga.OpUndo {
		return
	}
	if st.Delay > 0 {
		w.seen["delayed"]++
	}
	if st.Await == "" {
		return
	}
	payload, ok := saga.SignalFrom(ctx, st.Await)
	switch {
	case ok && string(payload) == st.Await:
		w.seen["signaled"]++
	default:
		w.errorf("%s begins with the signal %q, %v", name, payload, ok)
	}
}

// begins checks that an attempt may begin, against the record.
func (w *world) begins(cmd saga.Command, h *host, name string, op saga.Op) {
	rec, err := w.store.Load(context.Background(), "saga")
	if err != nil {
		w.errorf("%s of %s begins: %v", op, name, err)
		return
	}
	if rec.Epoch != cmd.Epoch {
		w.errorf("%s of %s begins by %s in epoch %d, but the record is of %d", op, name, h.name, cmd.Epoch, rec.Epoch)
	}
	if o := w.owners[cmd.Epoch]; o != "" && o != h.name {
		w.errorf("epoch %d belongs to %s and %s", cmd.Epoch, o, h.name)
	}
	w.owners[cmd.Epoch] = h.name
	if want := "saga/" + name + "/" + string(op); cmd.ID != want {
		w.errorf("the command is %q, not %q", cmd.ID, want)
	}
	if op == saga.OpDo && rec.Status != saga.Running {
		w.errorf("Do of %s begins, but the saga is %s", name, rec.Status)
	}
	states := decodeSteps(rec)
	want := map[saga.Op]saga.StepStatus{saga.OpDo: saga.StepStarted, saga.OpUndo: saga.StepUndoing}[op]
	if states[name].Status != want {
		w.errorf("%s of %s begins, but the record says %s", op, name, states[name].Status)
	}
	if op == saga.OpDo {
		for _, before := range w.policy {
			if before.group < w.groupOf(name) && states[before.name].Status != saga.StepDone {
				w.errorf("Do of %s begins, but %s is not done", name, before.name)
			}
		}
	} else if rec.Status == saga.Compensating {
		for _, before := range w.policy {
			if before.group > w.groupOf(name) && !settled(states[before.name].Status) {
				w.errorf("Undo of %s begins, but %s is not undone", name, before.name)
			}
		}
	}
}

func decodeSteps(rec store.Record) map[string]saga.StepState {
	var pr struct {
		Steps []struct {
			N string
			S saga.StepStatus
			D bool
		}
	}
	_ = json.Unmarshal(rec.Steps, &pr)
	states := make(map[string]saga.StepState)
	for _, u := range pr.Steps {
		states[u.N] = saga.StepState{Name: u.N, Status: u.S, InDoubt: u.D}
	}
	return states
}

func (w *world) groupOf(name string) int {
	return w.policy[slices.IndexFunc(w.policy, func(n nodePlan) bool { return n.name == name })].group
}

func settled(s saga.StepStatus) bool {
	return s == saga.StepIdle || s == saga.StepNoEffect || s == saga.StepUndone
}

// disturb is what can happen to a write: it fails, it happens but its answer is
// lost, or it comes late.
func (h *host) disturb(write func() error) error {
	w := h.w
	w.mu.Lock()
	trouble := 100
	if !w.quiet {
		trouble = w.rng.IntN(100)
	}
	late := time.Duration(w.rng.IntN(2*int(lease/time.Second))) * time.Second
	down := h.dead || h.cut
	w.mu.Unlock()
	switch {
	case down || trouble < 3:
		return errDown
	case trouble < 6:
		_ = write()
		return errDown
	case trouble < 8:
		time.Sleep(late)
	}
	err := write()
	if trouble >= 8 && trouble < 10 {
		time.Sleep(late)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if h.dead || h.cut {
		return errDown
	}
	return err
}

func (h *host) Start(_ context.Context, req store.StartRequest) (rec store.Record, created bool, err error) {
	err = h.disturb(func() (err error) {
		rec, created, err = h.w.store.Start(context.Background(), req)
		return err
	})
	return rec, created, err
}

func (h *host) Claim(_ context.Context, req store.ClaimRequest) (recs []store.Record, err error) {
	err = h.disturb(func() (err error) {
		recs, err = h.w.store.Claim(context.Background(), req)
		return err
	})
	return recs, err
}

func (h *host) Heartbeat(_ context.Context, req store.HeartbeatRequest) (held []store.Renewed, err error) {
	err = h.disturb(func() (err error) {
		held, err = h.w.store.Heartbeat(context.Background(), req)
		return err
	})
	return held, err
}

func (h *host) Commit(_ context.Context, req store.CommitRequest) (receipt store.Receipt, err error) {
	err = h.disturb(func() (err error) {
		receipt, err = h.w.store.Commit(context.Background(), req)
		return err
	})
	return receipt, err
}

func (h *host) Signal(_ context.Context, req store.SignalRequest) (rec store.Record, err error) {
	err = h.disturb(func() (err error) {
		rec, err = h.w.store.Signal(context.Background(), req)
		return err
	})
	return rec, err
}

func (h *host) Signals(_ context.Context, id string) (list []store.Signal, err error) {
	err = h.disturb(func() (err error) {
		list, err = h.w.store.Signals(context.Background(), id)
		return err
	})
	return list, err
}

func (h *host) Hasten(_ context.Context, id string) error {
	return h.disturb(func() error { return h.w.store.Hasten(context.Background(), id) })
}

func (h *host) Load(_ context.Context, id string) (rec store.Record, err error) {
	err = h.disturb(func() (err error) {
		rec, err = h.w.store.Load(context.Background(), id)
		return err
	})
	return rec, err
}

// run runs the world until its saga has ended.
func (w *world) run() {
	ctx, cancel := context.WithTimeout(context.Background(), 24*time.Hour)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	var hosts []*host
	for i := range 1 + w.rng.IntN(3) {
		hosts = append(hosts, w.host(ctx, fmt.Sprint("host-", i), &wg))
	}
	client := saga.NewRunner(w.store, saga.RunnerConfig{})
	clientSaga := w.sg(hosts[0])
	saga.Register(client, clientSaga)
	for {
		_, err := saga.Start(ctx, hosts[0].runner, hosts[0].saga, "saga", book{})
		if err == nil {
			break
		}
		time.Sleep(time.Second)
	}
	wg.Go(func() { w.meddle(ctx, &hosts, &wg, client) })
	troubled, healed := context.WithTimeout(ctx, 2*time.Minute)
	_, _ = result[book](troubled, client, "saga")
	healed()
	time.Sleep(45 * time.Second) // longer than the slowest step, which may be late
	w.mu.Lock()
	w.quiet, w.healed = true, true
	w.mu.Unlock()
	for _, name := range w.awaited {
		w.signal(ctx, client, name)
	}
	in := w.await(ctx, client)
	if in != nil {
		w.check(ctx, client, in)
	}
}

// meddle crashes and replaces processes, stops them in an orderly way, and may
// cancel the saga.
func (w *world) meddle(ctx context.Context, hosts *[]*host, wg *sync.WaitGroup, client *saga.Runner) {
	for i := range 6 {
		time.Sleep(time.Duration(w.int(15000)) * time.Millisecond)
		switch k := w.int(10); {
		case k < 2:
			w.mu.Lock()
			(*hosts)[0].dead = true
			w.mu.Unlock()
			(*hosts)[0].stop()
			*hosts = append((*hosts)[1:], w.host(ctx, fmt.Sprint("new-", i), wg))
		case k < 3:
			(*hosts)[0].stop()
			*hosts = append((*hosts)[1:], w.host(ctx, fmt.Sprint("new-", i), wg))
		case k < 6:
			h := (*hosts)[w.int(len(*hosts))]
			w.mu.Lock()
			h.cut = true
			w.mu.Unlock()
			time.AfterFunc(25*time.Second, func() {
				w.mu.Lock()
				defer w.mu.Unlock()
				h.cut = false
			})
		case k < 8:
			_ = client.Cancel(ctx, "saga", "changed my mind")
		}
		if n := len(w.awaited); n > 0 {
			// From a process of the world, whose store loses answers, or from elsewhere.
			runner := client
			if w.int(2) == 0 {
				runner = (*hosts)[w.int(len(*hosts))].runner
			}
			w.signal(ctx, runner, w.awaited[w.int(n)])
		}
	}
}

// signal sends a signal, if the saga still takes it.
func (w *world) signal(ctx context.Context, runner *saga.Runner, name string) {
	_ = runner.Signal(ctx, "saga", name, []byte(name))
}

func (w *world) int(n int) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.rng.IntN(n)
}

// await waits for the end of the saga, and acts as its operator.
func (w *world) await(ctx context.Context, client *saga.Runner) *saga.Instance {
	for range 10 {
		_, err := result[book](ctx, client, "saga")
		in, gerr := client.Get(ctx, "saga")
		if gerr != nil {
			w.errorf("never ends: %v, %v", err, gerr)
			return nil
		}
		if in.Status != saga.Stuck {
			return in
		}
		if !in.Back { // the participants take what they have refused
			w.mu.Lock()
			clear(w.voided)
			w.mu.Unlock()
		}
		if err := client.Operate(ctx, "saga", saga.Operation{Action: saga.ActionRetry, Note: "it works now"}); err != nil {
			w.errorf("retry: %v", err)
			return nil
		}
	}
	in, _ := client.Get(ctx, "saga")
	w.errorf("stuck however often it is retried: %+v", in)
	return nil
}

func (w *world) check(ctx context.Context, client *saga.Runner, in *saga.Instance) {
	state, _ := result[book](ctx, client, "saga")
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, n := range w.policy {
		if in.Status == saga.Completed && state.Entries[n.name] == "" {
			w.errorf("what %s wrote is lost", n.name)
		}
		if w.effect[n.name] != (in.Status == saga.Completed) {
			w.errorf("%s, but step %s is in effect: %v: %+v", in.Status, n.name, w.effect[n.name], in.Steps)
		}
	}
	if in.Status != saga.Completed && in.Status != saga.Compensated || in.Owner != "" {
		w.errorf("ended %s, owned by %q", in.Status, in.Owner)
	}
	log, err := client.History(ctx, "saga", 0, 0)
	if err != nil || int64(len(log)) != in.Seq {
		w.errorf("a log of %d entries, seq %d: %v", len(log), in.Seq, err)
	}
	if !slices.ContainsFunc(log, func(e saga.Entry) bool { return e.Kind == saga.EventTakenOver }) {
		for name := range w.undos {
			if !w.called[name] {
				w.errorf("%s was undone, though no owner has crashed and its Do was never called", name)
			}
		}
	}
	w.seen[string(in.Status)]++
	if strings.HasPrefix(in.Cause, saga.ErrDeadline.Error()) {
		w.seen["deadline"]++
	}
	for i, e := range log {
		switch e.Kind {
		case saga.EventNoEffect:
			if strings.HasPrefix(e.Error, saga.ErrNoSignal.Error()) {
				w.seen["not signaled"]++
			}
		case saga.EventStuck, saga.EventTakenOver, saga.EventCanceled, saga.EventParked, saga.EventReleased:
			w.seen[string(e.Kind)]++
		}
		if e.Seq != int64(i+1) || i > 0 && e.Epoch < log[i-1].Epoch {
			w.errorf("log: entry %d is %+v", i+1, e)
		}
	}
}
