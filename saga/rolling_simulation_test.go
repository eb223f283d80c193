package saga_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"log/slog"
	"os"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-resilience/resilience/internal/sim"
	"github.com/go-resilience/resilience/saga"
	store "github.com/go-resilience/resilience/saga/sagastore"
)

// TestRollingSimulation runs sagas in processes of three builds of a program at once, which crash and are replaced by
// another build. The second and the third build have more fields in the state. The third has another version of the
// steps, and in some runs the second has one step more without a new version. No commit loses a field, every saga ends,
// and all steps of one that completed are done.
func TestRollingSimulation(t *testing.T) {
	defer slog.SetDefault(slog.Default())
	slog.SetDefault(slog.New(slog.DiscardHandler))
	log.SetOutput(io.Discard)
	defer log.SetOutput(os.Stderr)
	sim.Simulation{Name: "rolling", Seeds: 300, Run: simulateRolling}.Test(t)
}

// The states of the builds. Each step notes itself in Steps, and in a line of its own.
type (
	state1 struct {
		A     string
		Steps map[string]string
		Lines map[string]*line1
		Log   []line1
	}
	line1  struct{ Name string }
	state2 struct {
		A, B  string
		Steps map[string]string
		Lines map[string]*line2
		Log   []line2
		Inner struct{ X string } `json:",omitzero"`
	}
	line2  struct{ Name, Color string }
	state3 struct {
		A, B, C string
		Steps   map[string]string
		Lines   map[string]*line3
		Log     []line3
		Inner   struct{ X, Y string } `json:",omitzero"`
	}
	line3 struct{ Name, Color, Size string }
)

// ofBuild are the fields that came with a build.
var ofBuild = map[string]int{"B": 2, "Color": 2, "Inner": 2, "X": 2, "C": 3, "Size": 3, "Y": 3}

type fleet struct {
	*sim.World
	store store.Store
	steps []saga.Step[state1] // of version 1, without their functions
	extra bool                // build 2 has one more

	mu    sync.Mutex
	named int
	nodes []*process
	alive sync.WaitGroup
}

// A process runs one of the builds.
type process struct {
	hooked
	f      *fleet
	build  int
	name   string
	runner *saga.Runner
	begin  func(ctx context.Context, id string) error
	stop   context.CancelFunc
	dead   bool
}

func simulateRolling(w *sim.World) {
	f := &fleet{World: w, store: saga.NewMemory()}
	w.Step, w.Trouble, w.Hold, w.Meddle, w.Most = time.Second, 4*w.Choose(6), 1+w.Choose(20), 4, 600
	for i := range 2 + w.Choose(3) {
		st := saga.Step[state1]{Name: fmt.Sprint("s", i), Parallel: i > 0 && w.Chance(35)}
		if w.Chance(30) {
			st.Delay = time.Duration(1+w.Choose(30)) * time.Second
		}
		f.steps = append(f.steps, st)
	}
	f.extra = w.Chance(20)
	ctx, cancel := context.WithCancel(context.Background())
	defer f.alive.Wait()
	defer w.End()
	defer cancel()
	for build := range 3 {
		f.process(ctx, build+1)
	}
	w.Drive(w.Step, func() bool { return true }) // they are running
	start := func(id string) {
		at := w.Choose(3)
		f.alive.Go(func() {
			for ; ctx.Err() == nil; at++ {
				if err := f.some(at).begin(ctx, id); err == nil {
					return
				}
				time.Sleep(time.Second)
			}
		})
	}
	start("r0")
	replace := func() *process {
		p := f.some(w.Choose(3))
		f.process(ctx, 1+w.Choose(3))
		f.mu.Lock()
		f.nodes = slices.DeleteFunc(f.nodes, func(o *process) bool { return o == p })
		f.mu.Unlock()
		return p
	}
	w.Acts = []sim.Act{
		{Name: "crash", Do: func() {
			p := replace()
			f.mu.Lock()
			p.dead = true
			f.mu.Unlock()
			p.stop()
		}},
		{Name: "deploy", Do: func() { replace().stop() }},
		{Name: "start", Do: func() { start("r1") }},
		{Name: "start", Do: func() { start("r2") }},
	}
	w.Drive(90*time.Second, nil)
	w.Heal()
	for build := range 3 {
		f.process(ctx, build+1)
	}
	if !w.Drive(12*time.Hour, f.ended) && !w.Failed() {
		w.Fail("liveness", "12 hours after the troubles: %s", f.states())
	}
	f.check()
}

func (f *fleet) some(n int) *process {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.nodes[n%len(f.nodes)]
}

func (f *fleet) process(ctx context.Context, build int) {
	f.mu.Lock()
	f.named++
	p := &process{f: f, build: build, name: fmt.Sprintf("p%d of build %d", f.named, build)}
	p.Store, p.hook = f.store, p.meddle
	f.mu.Unlock()
	p.runner = saga.NewRunner(p, saga.RunnerConfig{
		Name: p.name, Poll: 4 * time.Second, MaxTakeovers: 50, Concurrency: 3, Drain: 9300 * time.Millisecond,
	})
	asked := f.named * 31
	p.runner.SetChance(func(below time.Duration) time.Duration {
		f.mu.Lock()
		defer f.mu.Unlock()
		asked++
		return below * time.Duration(asked*389%997) / 997
	})
	switch build {
	case 1:
		p.begin = deploy(p, state1{A: "a", Log: []line1{{"first"}}}, func(s *state1, step string) {
			note1(&s.Steps, step, p.name)
			note1(&s.Lines, step, &line1{step})
		})
	case 2:
		first := state2{A: "a", B: "b", Log: []line2{{"first", "red"}}, Inner: struct{ X string }{"x"}}
		p.begin = deploy(p, first, func(s *state2, step string) {
			note1(&s.Steps, step, p.name)
			note1(&s.Lines, step, &line2{step, "blue"})
		})
	default:
		first := state3{
			A: "a", B: "b", C: "c", Log: []line3{{"first", "red", "XL"}}, Inner: struct{ X, Y string }{"x", "y"},
		}
		p.begin = deploy(p, first, func(s *state3, step string) {
			note1(&s.Steps, step, p.name)
			note1(&s.Lines, step, &line3{step, "blue", "S"})
		})
	}
	ctx, p.stop = context.WithCancel(ctx)
	f.mu.Lock()
	f.nodes = append(f.nodes, p)
	f.mu.Unlock()
	f.alive.Go(func() { _ = p.runner.Run(ctx) })
}

func note1[V any](m *map[string]V, key string, v V) {
	if *m == nil {
		*m = make(map[string]V)
	}
	(*m)[key] = v
}

// deploy registers the definitions of a build, and returns what starts one of its sagas.
func deploy[S any](p *process, first S, do func(s *S, step string)) func(context.Context, string) error {
	define := func(version int, names ...string) *saga.Saga[S] {
		sg := &saga.Saga[S]{Name: "rolling", Version: version}
		for _, st := range p.f.steps {
			sg.Steps = append(sg.Steps, saga.Step[S]{Name: st.Name, Parallel: st.Parallel, Delay: st.Delay})
		}
		for _, name := range names {
			sg.Steps = append(sg.Steps, saga.Step[S]{Name: name})
		}
		for i := range sg.Steps {
			name := sg.Steps[i].Name
			sg.Steps[i].Backoff = func(int) time.Duration { return 3 * time.Second }
			sg.Steps[i].Attempts = 5
			sg.Steps[i].Do = func(ctx context.Context, s *S) error {
				id, _ := key(ctx, name)
				fault, err := p.f.Call(ctx, fmt.Sprintf("%s does %s of %s", p.name, name, id), "fails", "lost", "declined")
				switch {
				case err != nil || fault == "fails" || fault == "over" || p.isDead():
					return errDown
				case fault == "declined":
					return saga.Permanent(errDeclined)
				}
				do(s, name)
				if fault == "lost" {
					return errDown
				}
				return nil
			}
			sg.Steps[i].Undo = func(ctx context.Context, s *S) error {
				id, _ := key(ctx, name)
				fault, err := p.f.Call(ctx, fmt.Sprintf("%s undoes %s of %s", p.name, name, id), "fails")
				if err != nil || fault != "" || p.isDead() {
					return errDown
				}
				do(s, "undo "+name)
				return nil
			}
		}
		return sg
	}
	var h *saga.Handle[S]
	switch {
	case p.build == 3:
		h = saga.Register(p.runner, define(2, "new"), define(1))
	case p.build == 2 && p.f.extra:
		h = saga.Register(p.runner, define(1, "extra"))
	default:
		h = saga.Register(p.runner, define(1))
	}
	return func(ctx context.Context, id string) error {
		_, err := h.Start(ctx, id, first)
		return err
	}
}

func (p *process) isDead() bool {
	p.f.mu.Lock()
	defer p.f.mu.Unlock()
	return p.dead
}

// call is a call of the store, which may fail before or after it has happened.
func (p *process) call(ctx context.Context, what, id string, do func() error) error {
	if p.isDead() {
		return errDown
	}
	fault, err := p.f.Call(ctx, strings.TrimSpace(fmt.Sprintf("%s %s %s", p.name, what, id)), "fails", "lost")
	if err != nil || fault == "fails" || fault == "over" || p.isDead() {
		return errDown
	}
	if err = do(); err == nil && fault == "lost" {
		return errDown
	}
	return err
}

func (p *process) meddle(ctx context.Context, method, id string, call func(context.Context) error) error {
	return p.call(ctx, verbs[method], id, func() error { return call(context.Background()) })
}

func (p *process) Commit(ctx context.Context, req store.CommitRequest) (receipt store.Receipt, err error) {
	err = p.call(ctx, "commits", req.ID, func() (err error) {
		before, _ := p.Store.Load(context.Background(), req.ID)
		if receipt, err = p.Store.Commit(context.Background(), req); err != nil || req.State == nil {
			return err
		}
		var was, now any
		_ = json.Unmarshal(before.State, &was)
		_ = json.Unmarshal(req.State, &now)
		if field := p.loses(was, now, "s"); field != "" {
			p.f.Fail("field", "%s loses %s: %s, then %s", p.name, field, before.State, req.State)
		}
		return nil
	})
	return receipt, err
}

// loses returns a field of was that now lacks, or has with another value although the build does not know the field.
func (p *process) loses(was, now any, path string) string {
	switch was := was.(type) {
	case map[string]any:
		is, _ := now.(map[string]any)
		for name, v := range was {
			switch kept, has := is[name]; {
			case !has, ofBuild[name] > p.build && !reflect.DeepEqual(v, kept):
				return path + "." + name
			default:
				if field := p.loses(v, kept, path+"."+name); field != "" {
					return field
				}
			}
		}
	case []any:
		is, _ := now.([]any)
		for i, v := range was {
			if i >= len(is) {
				return fmt.Sprintf("%s[%d]", path, i)
			}
			if field := p.loses(v, is[i], fmt.Sprintf("%s[%d]", path, i)); field != "" {
				return field
			}
		}
	}
	return ""
}

func (f *fleet) all() []store.Record {
	recs, _, _ := f.store.List(context.Background(), store.Filter{})
	return recs
}

func (f *fleet) ended() bool {
	recs := f.all()
	return len(recs) > 0 && !slices.ContainsFunc(recs, func(rec store.Record) bool { return !rec.Status.Ended() })
}

func (f *fleet) states() (s string) {
	for _, rec := range f.all() {
		s += fmt.Sprintf("\n%s is %s, owned by %q: %s %s", rec.ID, rec.Status, rec.Owner, rec.LastError, rec.Progress)
	}
	return s
}

// check finds steps that were skipped.
func (f *fleet) check() {
	for _, rec := range f.all() {
		if rec.Status != saga.Completed {
			continue
		}
		steps := decodeSteps(rec)
		if len(steps) < len(f.steps)+rec.Version-1 {
			f.Fail("steps", "%s of version %d has the steps %v", rec.ID, rec.Version, steps)
		}
		var s state3
		_ = json.Unmarshal(rec.State, &s)
		for name, st := range steps {
			if st.Status != saga.StepDone || s.Steps[name] == "" || s.Lines[name] == nil {
				f.Fail("skipped", "step %s of %s is %s: %s", name, rec.ID, st.Status, rec.State)
			}
		}
	}
}
