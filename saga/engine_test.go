package saga_test

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/saga/enginetest"
	store "github.com/go-resilience/resilience/saga/sagastore"
)

// A jsonEngine is an engine that keeps nothing but JSON: what it keeps or passes on is encoded and decoded, as if in
// another process.
type jsonEngine struct {
	t       *testing.T
	mistake string // planted in the engine

	mu          sync.Mutex
	definitions map[string]*saga.Definition // by name and version
	kept        map[string][]byte           // of jsonSagas, by id
	changed     chan struct{}               // closed with the next change
	process     *jsonProcess
}

// A jsonProcess is lost at a restart.
type jsonProcess struct {
	ctx     context.Context
	stop    context.CancelFunc
	running map[string]context.CancelFunc // attempts, by id and step
	alarms  map[string]*time.Timer        // by id
}

// A jsonSaga is what a jsonEngine keeps of a saga.
type jsonSaga struct {
	Saga     string
	Version  int
	Snapshot saga.Snapshot
	Calls    map[string]saga.Call // in progress, by step

}

var _ saga.Engine = (*jsonEngine)(nil)

func newJSONEngine(t *testing.T) *jsonEngine {
	e := &jsonEngine{
		t: t, definitions: make(map[string]*saga.Definition), kept: make(map[string][]byte), changed: make(chan struct{}),
	}
	e.begin()
	t.Cleanup(func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		e.process.end()
	})
	return e
}

// begin begins a process. The caller holds mu, or is the only one with e.
func (e *jsonEngine) begin() {
	ctx, stop := context.WithCancel(context.Background())
	e.process = &jsonProcess{
		ctx: ctx, stop: stop, running: make(map[string]context.CancelFunc), alarms: make(map[string]*time.Timer),
	}
}

func (p *jsonProcess) end() {
	p.stop()
	for _, alarm := range p.alarms {
		alarm.Stop()
	}
}

// copied returns v after a round trip through JSON.
func copied[T any](v T) (back T) {
	data, err := json.Marshal(v)
	if err == nil {
		err = json.Unmarshal(data, &back)
	}
	if err != nil {
		panic(err)
	}
	return back
}

func nameOf(name string, version int) string { return fmt.Sprint(name, " ", version) }

// load returns a saga and its definition. The caller holds mu.
func (e *jsonEngine) load(id string) (s jsonSaga, d *saga.Definition, err error) {
	data, ok := e.kept[id]
	if !ok {
		return s, nil, saga.ErrNotFound
	}
	if err := json.Unmarshal(data, &s); err != nil {
		return s, nil, err
	}
	return s, e.definitions[nameOf(s.Saga, s.Version)], nil
}

// decide decides once about a saga, keeps the decision and makes its calls. The caller holds mu.
func (e *jsonEngine) decide(id string, in saga.Input) (d saga.Decision, err error) {
	s, def, err := e.load(id)
	if err != nil {
		return d, err
	}
	in.Now = time.Now()
	was := string(e.kept[id])
	d, err = def.Decide(s.Snapshot, copied(in))
	if err != nil {
		return d, err
	}
	assert.True(e.t, d.WakeAt.IsZero() || d.WakeAt.After(in.Now), "an alarm in the past rings forever")
	again, err := def.Decide(s.Snapshot, copied(in))
	assert.NoError(e.t, err)
	assert.Equal(e.t, copied(d), copied(again), "a decision depends on its arguments alone")
	now, err := json.Marshal(s)
	assert.NoError(e.t, err)
	assert.JSONEq(e.t, was, string(now), "a decision changes no snapshot")

	d = copied(d)
	if e.mistake == "signal" && in.Signals != nil || e.mistake == "cancel" && in.Operation != nil {
		return d, nil
	}
	p := e.process
	for _, a := range in.Answers {
		delete(s.Calls, a.Step)
		if stop := p.running[id+"/"+a.Step]; stop != nil {
			stop()
			delete(p.running, id+"/"+a.Step)
		}
	}
	if s.Calls == nil {
		s.Calls = make(map[string]saga.Call)
	}
	for _, c := range d.Calls {
		s.Calls[c.Step] = c
	}
	s.Snapshot = d.Snapshot
	data, err := json.Marshal(s)
	if err != nil {
		return d, err
	}
	e.kept[id] = data
	close(e.changed)
	e.changed = make(chan struct{})

	for _, c := range d.Calls {
		ctx, stop := context.WithCancel(p.ctx)
		p.running[id+"/"+c.Step] = stop
		go func() {
			a := copied(def.Perform(ctx, c))
			e.mu.Lock()
			defer e.mu.Unlock()
			if e.process == p {
				_, err := e.decide(id, saga.Input{Answers: []saga.Answer{a}})
				assert.NoError(e.t, err)
			}
		}()
	}
	for _, step := range d.Stop {
		p.running[id+"/"+step]()
	}
	if alarm := p.alarms[id]; alarm != nil {
		alarm.Stop()
	}
	if !d.WakeAt.IsZero() {
		p.alarms[id] = time.AfterFunc(time.Until(d.WakeAt), func() {
			e.mu.Lock()
			defer e.mu.Unlock()
			if e.process == p && p.ctx.Err() == nil {
				_, err := e.decide(id, saga.Input{})
				assert.NoError(e.t, err)
			}
		})
	}
	return d, nil
}

// restart loses whatever is not kept.
func (e *jsonEngine) restart() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.process.end()
	e.begin()
	for _, id := range slices.Sorted(maps.Keys(e.kept)) {
		s, _, err := e.load(id)
		require.NoError(e.t, err)
		var in saga.Input
		for _, c := range s.Calls {
			in.Answers = append(in.Answers, c.Interrupted(errors.New("the process died")))
		}
		_, err = e.decide(id, in)
		require.NoError(e.t, err)
	}
}

func (e *jsonEngine) Register(d *saga.Definition) error {
	if tx, children := d.Needs(); tx || children {
		return saga.ErrNoTx
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	k := nameOf(d.Name(), d.Version())
	if was := e.definitions[k]; was != nil && *was != *d {
		return fmt.Errorf("another definition of %s is registered", k)
	}
	e.definitions[k] = d
	return nil
}

func (e *jsonEngine) Start(
	_ context.Context, d *saga.Definition, id string, state []byte,
) (*saga.Instance, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	s, def, err := e.load(id)
	switch {
	case err == nil && s.Saga != d.Name():
		return nil, saga.ErrExists
	case err == nil && e.mistake != "start":
		return def.Instance(s.Snapshot), nil
	}
	snap, err := d.Begin(id, state, time.Now())
	if err != nil {
		return nil, err
	}
	data, err := json.Marshal(jsonSaga{Saga: d.Name(), Version: d.Version(), Snapshot: snap})
	if err != nil {
		return nil, err
	}
	e.kept[id] = data
	begun, err := e.decide(id, saga.Input{})
	return d.Instance(begun.Snapshot), err
}

func (e *jsonEngine) Get(_ context.Context, id string) (*saga.Instance, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	s, d, err := e.load(id)
	if err != nil {
		return nil, err
	}
	return d.Instance(s.Snapshot), nil
}

func (e *jsonEngine) Wait(ctx context.Context, id string) (*saga.Instance, error) {
	for {
		e.mu.Lock()
		changed := e.changed
		e.mu.Unlock()
		in, err := e.Get(ctx, id)
		if err != nil || in.Status != saga.Running && in.Status != saga.Compensating {
			return in, err
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, errors.Join(ctx.Err(), context.Cause(ctx))
		}
	}
}

func (e *jsonEngine) Signal(_ context.Context, id, name string, payload []byte) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	d, err := e.decide(id, saga.Input{Signals: map[string][]byte{name: payload}})
	if why := d.SignalsRefused[name]; why != "" {
		return fmt.Errorf("%w: %s", saga.ErrNotAllowed, why)
	}
	return err
}

func (e *jsonEngine) Operate(_ context.Context, id string, op saga.Operation) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	decision, err := e.decide(id, saga.Input{Operation: &op})
	if decision.NotAllowed != "" {
		return fmt.Errorf("%w: %s", saga.ErrNotAllowed, decision.NotAllowed)
	}
	return err
}

func (e *jsonEngine) List(_ context.Context, f saga.Filter) (sagas []*saga.Instance, next string, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for id := range e.kept {
		s, d, err := e.load(id)
		if err != nil {
			return nil, "", err
		}
		in := d.Instance(s.Snapshot)
		if strings.HasPrefix(id, f.ID) && (f.Saga == "" || f.Saga == in.Saga) &&
			(f.Status == nil || slices.Contains(f.Status, in.Status)) {
			sagas = append(sagas, in)
		}
	}
	slices.SortFunc(sagas, func(a, b *saga.Instance) int { return b.CreatedAt.Compare(a.CreatedAt) })
	if i := slices.IndexFunc(sagas, func(in *saga.Instance) bool { return in.ID == f.After }); i >= 0 {
		sagas = sagas[i+1:]
	}
	if limit := cmp.Or(f.Limit, 100); len(sagas) > limit {
		sagas = sagas[:limit]
		next = sagas[limit-1].ID
	}
	return sagas, next, nil
}

// A workers engine has two runners on a store: an embedded one, which never runs, and that of a worker, which can be
// restarted.
type workers struct {
	*saga.Runner
	t           *testing.T
	stopOld     func(*worker) // at a restart
	store       store.Store
	definitions []*saga.Definition
	worker      *worker
}

// A worker is a process. Once it is dead, none of its calls arrives.
type worker struct {
	hooked
	runner *saga.Runner
	stop   context.CancelFunc
	done   chan struct{}
	dead   atomic.Bool
}

var errDead = errors.New("the process is dead")

func (w *worker) meddle(ctx context.Context, _, _ string, call func(context.Context) error) error {
	if w.dead.Load() {
		return errDead
	}
	return call(ctx)
}

func (w *worker) end() {
	w.stop()
	<-w.done
}

func (w *worker) kill() {
	w.dead.Store(true)
	w.stop()
}

func newWorkers(t *testing.T, end func(*worker)) *workers {
	e := &workers{t: t, store: saga.NewMemory(), stopOld: end}
	e.Runner = e.newRunner(e.store)
	e.begin()
	t.Cleanup(func() { e.worker.end() })
	return e
}

// newRunner returns a runner whose lease a busy machine does not miss. Each test that kills a worker waits for its end.
func (e *workers) newRunner(st store.Store) *saga.Runner {
	r := saga.NewRunner(st, saga.RunnerConfig{Poll: 5 * time.Millisecond, LeaseTTL: 2 * time.Second, Drain: saga.None})
	r.Observe(silent)
	return r
}

func (e *workers) begin() {
	ctx, stop := context.WithCancel(context.Background())
	w := &worker{stop: stop, done: make(chan struct{})}
	w.Store, w.hook = e.store, w.meddle
	w.runner = e.newRunner(w)
	for _, d := range e.definitions {
		require.NoError(e.t, w.runner.Register(d))
	}
	e.worker = w
	go func() {
		defer close(w.done)
		_ = w.runner.Run(ctx)
	}()
}

func (e *workers) restart() {
	e.stopOld(e.worker)
	e.begin()
}

func (e *workers) Register(d *saga.Definition) error {
	if err := e.Runner.Register(d); err != nil {
		return err
	}
	e.definitions = append(e.definitions, d)
	return e.worker.runner.Register(d)
}

// TestRunnerIsAnEngine runs the suite with one process, and with a worker that is stopped or killed at a restart.
func TestRunnerIsAnEngine(t *testing.T) {
	for name, end := range map[string]func(*worker){"stopped": (*worker).end, "killed": (*worker).kill} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			enginetest.Run(t, func(t *testing.T) enginetest.Environment {
				e := newWorkers(t, end)
				return enginetest.Environment{Engine: e, Restart: e.restart}
			})
		})
	}
	t.Run("one process", func(t *testing.T) {
		t.Parallel()
		enginetest.Run(t, func(t *testing.T) enginetest.Environment {
			e := newWorkers(t, (*worker).kill)
			return enginetest.Environment{Engine: e.worker.runner}
		})
	})
}

func TestJSONIsEnoughForAnEngine(t *testing.T) {
	enginetest.Run(t, func(t *testing.T) enginetest.Environment {
		e := newJSONEngine(t)
		e.mistake = os.Getenv(mistakeVar)
		return enginetest.Environment{Engine: e, Restart: e.restart}
	})
}

// mistakeVar is the environment variable with the mistake of the engine in TestJSONIsEnoughForAnEngine.
const mistakeVar = "SAGA_ENGINE_MISTAKE"

// TestBrokenEngineFailsItsSuite plants mistakes in the engine of TestJSONIsEnoughForAnEngine, which must fail then. It
// runs in a process of its own.
func TestBrokenEngineFailsItsSuite(t *testing.T) {
	for _, c := range []struct{ mistake, fails string }{
		{"signal", "SignalBeforeTheWait"}, // signals are lost
		{"start", "StartRepeated"},        // a repeated Start replaces the state
		{"cancel", "CancelDuringTheWait"}, // a cancel is lost
	} {
		t.Run(c.mistake, func(t *testing.T) {
			cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.count=1", "-test.timeout=20s",
				"-test.run=^TestJSONIsEnoughForAnEngine$/^"+c.fails+"$")
			cmd.Env = append(os.Environ(), mistakeVar+"="+c.mistake)
			out, err := cmd.CombinedOutput()
			require.Error(t, err, "%s", out)
			require.Contains(t, string(out), "--- FAIL: TestJSONIsEnoughForAnEngine/"+c.fails)
			require.NotContains(t, string(out), "panic")
		})
	}
}

// TestEngineTakesAnAnswerOnce, even if it comes twice.
func TestEngineTakesAnAnswerOnce(t *testing.T) {
	d, err := saga.Define(sequence(step("flight"), step("hotel")))
	require.NoError(t, err)
	snap, err := d.Begin("trip-1", []byte(`{}`), time.Now())
	require.NoError(t, err)
	first, err := d.Decide(copied(snap), saga.Input{Now: time.Now()})
	require.NoError(t, err)
	require.Len(t, first.Calls, 1)
	in := saga.Input{
		Now: time.Now(), Answers: []saga.Answer{copied(d.Perform(t.Context(), copied(first.Calls[0])))},
	}
	second, err := d.Decide(copied(first.Snapshot), in)
	require.NoError(t, err)
	require.NotEmpty(t, second.Log)
	require.Len(t, second.Calls, 1)
	twice, err := d.Decide(second.Snapshot, in)
	require.NoError(t, err)
	require.Empty(t, twice.Log)
	require.Empty(t, twice.Calls)
}

// TestEngineLosesACall: the attempt may have taken effect, and does not count.
func TestEngineLosesACall(t *testing.T) {
	d, err := saga.Define(sequence(step("flight")))
	require.NoError(t, err)
	snap, err := d.Begin("trip-1", []byte(`{}`), time.Now())
	require.NoError(t, err)
	lost, err := d.Decide(snap, saga.Input{Now: time.Now()})
	require.NoError(t, err)
	require.Equal(t, "trip-1/flight/do", lost.Calls[0].Command.ID)
	answer := copied(lost.Calls[0].Interrupted(errors.New("the process died")))
	next, err := d.Decide(copied(lost.Snapshot), saga.Input{Now: time.Now(), Answers: []saga.Answer{answer}})
	require.NoError(t, err)
	require.Empty(t, next.Calls)
	next, err = d.Decide(copied(next.Snapshot), saga.Input{Now: next.WakeAt})
	require.NoError(t, err)
	require.Equal(t, 1, next.Calls[0].Command.Attempt, "it does not count as an attempt")
	require.True(t, d.Instance(next.Snapshot).Steps[0].MaybeApplied)
}

// TestLateAnswerIsIgnored: while an attempt is in progress, the answer of an earlier one arrives. The earlier one was
// interrupted or has been answered before.
func TestLateAnswerIsIgnored(t *testing.T) {
	flight := failing("flight", errors.New("timeout"))
	flight.Attempts = 2
	d, err := saga.Define(sequence(flight))
	require.NoError(t, err)
	for name, first := range map[string]func(saga.Call) saga.Answer{
		"Interrupted": func(c saga.Call) saga.Answer { return c.Interrupted(errors.New("no reply")) },
		"Repeated":    func(c saga.Call) saga.Answer { return d.Perform(t.Context(), c) },
	} {
		t.Run(name, func(t *testing.T) {
			snap, err := d.Begin("trip-1", []byte(`{}`), time.Now())
			require.NoError(t, err)
			next, err := d.Decide(snap, saga.Input{Now: time.Now()})
			require.NoError(t, err)
			call := copied(next.Calls[0])
			answers := []saga.Answer{copied(first(call))}
			next, err = d.Decide(copied(next.Snapshot), saga.Input{Now: time.Now(), Answers: answers})
			require.NoError(t, err)
			next, err = d.Decide(copied(next.Snapshot), saga.Input{Now: next.WakeAt})
			require.NoError(t, err)
			second := copied(next.Calls[0])
			before := d.Instance(next.Snapshot).Steps
			answers = []saga.Answer{copied(d.Perform(t.Context(), call))}
			next, err = d.Decide(copied(next.Snapshot), saga.Input{Now: time.Now(), Answers: answers})
			require.NoError(t, err)
			require.Empty(t, next.Calls)
			require.Equal(t, before, d.Instance(next.Snapshot).Steps)
			answers = []saga.Answer{copied(d.Perform(t.Context(), second))}
			next, err = d.Decide(copied(next.Snapshot), saga.Input{Now: time.Now(), Answers: answers})
			require.NoError(t, err)
			st := d.Instance(next.Snapshot).Steps[0]
			require.Equal(t, map[string]int{"Interrupted": 1, "Repeated": 2}[name], st.Attempts)
		})
	}
}

// TestEngineRefusesForeignSnapshots of another definition, or of a later version of the package.
func TestEngineRefusesForeignSnapshots(t *testing.T) {
	d, err := saga.Define(sequence(step("flight")))
	require.NoError(t, err)
	other, err := saga.Define(&saga.Saga[trip]{Name: "trip", Version: 1, Steps: []saga.Step[trip]{step("car")}})
	require.NoError(t, err)
	renamed, err := saga.Define(&saga.Saga[trip]{Name: "tour", Version: 1, Steps: []saga.Step[trip]{step("flight")}})
	require.NoError(t, err)
	snap, err := d.Begin("trip-1", []byte(`{}`), time.Now())
	require.NoError(t, err)
	_, err = other.Decide(snap, saga.Input{})
	require.ErrorContains(t, err, "steps of trip version 1 are not those of the record")
	_, err = renamed.Decide(snap, saga.Input{})
	require.ErrorContains(t, err, "Snapshot is one of trip version 1, not of tour version 1")
	_, err = d.Decide(saga.Snapshot{}, saga.Input{})
	require.ErrorContains(t, err, "Snapshot is empty")
	require.ErrorContains(t, json.Unmarshal([]byte(`{"v": 2}`), &snap), "Snapshot has version 2")
	_, err = d.Begin("", nil, time.Now())
	require.Error(t, err)
	_, err = d.Begin("trip-1", []byte("{"), time.Now())
	require.ErrorContains(t, err, "does not decode")
	_, err = saga.Define(&saga.Saga[trip]{})
	require.Error(t, err)
	unknown := other.Perform(t.Context(), saga.Call{Saga: "trip", Version: 1, Step: "flight"})
	require.Equal(t, saga.OutcomeInterrupted, unknown.Outcome)
}

// TestSnapshotOfTheFirstRelease is read by every later version.
func TestSnapshotOfTheFirstRelease(t *testing.T) {
	data, err := os.ReadFile("testdata/snapshot-1.json")
	require.NoError(t, err)
	var snap saga.Snapshot
	require.NoError(t, json.Unmarshal(data, &snap))
	again, err := json.Marshal(snap)
	require.NoError(t, err)
	require.JSONEq(t, string(data), string(again))
	d, err := saga.Define(sequence(step("flight"), step("hotel")))
	require.NoError(t, err)
	next, err := d.Decide(snap, saga.Input{Now: d.Instance(snap).Now})
	require.NoError(t, err)
	require.Equal(t, saga.Running, next.Status)
	require.Empty(t, next.Calls, "the call of hotel is in progress")
}
