package history_test

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/go-sql-driver/mysql"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/go-resilience/resilience/internal/integration/faultproxy"
	"github.com/go-resilience/resilience/internal/integration/services/etcd"
)

var (
	forTime = flag.Duration("history.for", 6*time.Second, "how long histories of each target are made")
	theSeed = flag.Uint64("history.seed", 0,
		"the seed of the first history; the next has the next number; 0 for a new one")
	outDir = flag.String("history.out", os.TempDir(), "where the page of a violation goes")
)

// A target is what histories are made of.
type target struct {
	name   string
	length time.Duration                        // of one history
	worker func(ctx context.Context, w *worker) // the life of a process
	begin  func(r *run)                         // starts servers and processes, and names the troubles
	check  func(r *run) *finding                // nil: nothing is violated
}

var targets = []*target{&cacheTarget, &failoverTarget, &leaseTarget, &sagaTarget}

func TestMain(m *testing.M) {
	etcd.Main()
	redis.SetLogger(quiet{})
	_ = mysql.SetLogger(quiet{})
	if text := os.Getenv("HISTORY_WORKER"); text != "" {
		work(text)
		return
	}
	flag.Parse()
	os.Exit(m.Run())
}

type quiet struct{}

func (quiet) Printf(context.Context, string, ...any) {}

func (quiet) Print(...any) {}

// search makes histories of tg, and fails if one violates a promise.
func search(t *testing.T, tg *target) {
	t.Parallel()
	seed := cmp.Or(*theSeed, rand.Uint64N(1_000_000))
	begun := time.Now()
	found, did := explore(t, tg, os.Args[0], seed, *forTime)
	t.Logf("%s: from seed %d in %s: %s", tg.name, seed, time.Since(begun).Round(time.Second), list(did))
	switch {
	case found != nil:
		t.Error(found)
	case did["operations"] == 0 && did["histories"] > 0:
		t.Error("nothing was done")
	}
}

// lanes is how many histories of a target are made at a time.
const lanes = 3

// explore makes histories of tg with processes that run bin, for a time or until one
// violates a promise. It returns what it found, and what was done.
func explore(t *testing.T, tg *target, bin string, seed uint64, d time.Duration) (found *finding, did map[string]int) {
	did = make(map[string]int)
	deadline := time.Now().Add(d)
	var mu sync.Mutex
	var all sync.WaitGroup
	for range lanes {
		all.Go(func() {
			for {
				mu.Lock()
				mine, enough := seed, found != nil || did["histories"] > 0 && time.Now().After(deadline)
				if found == nil && did["operations"] == 0 { // on a slow machine, the faults may leave no time for one
					enough = time.Now().After(deadline.Add(10 * time.Minute))
				}
				seed++
				mu.Unlock()
				if enough {
					return
				}
				ok := t.Run(fmt.Sprintf("seed=%d", mine), func(t *testing.T) {
					r := history(t, tg, bin, mine)
					mu.Lock()
					defer mu.Unlock()
					for what, times := range r.did {
						did[what] += times
					}
					did["histories"]++
					if found == nil && r.found != nil {
						found = r.found
						found.write(r)
					}
				})
				mu.Lock()
				skipped := did["histories"] == 0
				mu.Unlock()
				if !ok || skipped {
					return
				}
			}
		})
	}
	all.Wait()
	return found, did
}

func list(did map[string]int) string {
	var b strings.Builder
	for i, what := range slices.Sorted(maps.Keys(did)) {
		if i > 0 {
			b.WriteString(", ")
		}
		fmt.Fprintf(&b, "%s %d", what, did[what])
	}
	return b.String()
}

// A run is one history under way.
type run struct {
	*testing.T
	tg       *target
	seed     uint64
	rng      *rand.Rand // of begin
	bin      string     // the program of the processes
	dir      string     // where they write
	plan     any        // what they are told
	db       *database  // nil if the target has none
	workers  []*process
	started  int
	troubles [][]trouble   // those of a group come one after another
	calm     time.Duration // between them, at most
	found    *finding

	mu     sync.Mutex
	gaps   []gap // of the Redis that a cache uses
	did    map[string]int
	faults []porcupine.Annotation
}

// A trouble is one thing that goes wrong, and ends before do returns.
type trouble struct {
	name string
	do   func(rng *rand.Rand)
}

var checking sync.Mutex

// history makes one history, with processes that run bin, and checks it.
func history(t *testing.T, tg *target, bin string, seed uint64) *run {
	r := &run{T: t, tg: tg, seed: seed, rng: rand.New(rand.NewPCG(seed, 0)), bin: bin, dir: t.TempDir(),
		did: make(map[string]int)}
	tg.begin(r)
	ctx, cancel := context.WithTimeout(t.Context(), tg.length)
	defer cancel()
	var all sync.WaitGroup
	for i, group := range r.troubles {
		rng := rand.New(rand.NewPCG(seed, uint64(i+1)))
		all.Go(func() {
			for pause(ctx, between(rng, r.calm/10, r.calm)) {
				one := group[rng.IntN(len(group))]
				begun := now()
				one.do(rng)
				r.count("fault: "+one.name, 1)
				r.mu.Lock()
				r.faults = append(r.faults, porcupine.Annotation{Tag: fmt.Sprintf("faults %d", i), Start: begun, End: now(),
					Description: one.name})
				r.mu.Unlock()
			}
		})
	}
	all.Wait()
	for _, p := range r.workers {
		if err := p.end(syscall.Signal(0)); err != nil && !strings.Contains(err.Error(), "signal: killed") {
			r.Error(err)
		}
	}
	checking.Lock() // so that checks leave time to the networks of others
	defer checking.Unlock()
	r.found = tg.check(r)
	return r
}

func (r *run) count(what string, n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.did[what] += n
}

func between(rng *rand.Rand, least, most time.Duration) time.Duration {
	return least + time.Duration(rng.Int64N(int64(most-least)+1))
}

// pause reports false if ctx has ended.
func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// now is the clock that all processes of a machine share, in nanoseconds.
func now() int64 {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		panic(err)
	}
	return ts.Nano()
}

// A process is a worker, seen from the test. When it is killed, by the test or by itself,
// another takes its place.
type process struct {
	told   worker
	mu     sync.Mutex
	cmd    *exec.Cmd
	stdin  io.Closer
	last   bool // is not followed by another
	result chan error
}

// A worker is what a process is told.
type worker struct {
	Target string
	Place  int // one of the places of a history; a killed process is followed by another
	Number int // of the process
	Seed   uint64
	Dir    string
	Addr   string // of the server, or of a proxy to it
	Plan   json.RawMessage
}

// start starts a process in a new place.
func (r *run) start(addr string) {
	plan, err := json.Marshal(r.plan)
	require.NoError(r, err)
	p := &process{told: worker{Target: r.tg.name, Place: len(r.workers), Seed: r.seed, Dir: r.dir, Addr: addr,
		Plan: plan}, result: make(chan error, 1)}
	r.workers = append(r.workers, p)
	r.Cleanup(func() { p.end(syscall.SIGKILL) })
	go func() {
		for {
			err := p.run(r)
			p.mu.Lock()
			last := p.last
			p.mu.Unlock()
			if exit, ok := errors.AsType[*exec.ExitError](err); last || !ok || exit.ExitCode() >= 0 {
				p.result <- err
				close(p.result)
				return
			}
			r.count("killed", 1)
		}
	}()
}

// run is the life of one process. Its error has what it wrote last.
func (p *process) run(r *run) error {
	var stderr bytes.Buffer
	p.mu.Lock()
	if p.last { // it has been ended since the one before it died
		p.mu.Unlock()
		return nil
	}
	r.mu.Lock()
	p.told.Number = r.started
	r.started++
	r.mu.Unlock()
	text, err := json.Marshal(p.told)
	if err == nil {
		p.cmd = exec.Command(r.bin)
		p.cmd.Env = append(os.Environ(), "HISTORY_WORKER="+string(text))
		p.cmd.Stderr = &stderr
		p.stdin, err = p.cmd.StdinPipe()
	}
	if err == nil {
		err = p.cmd.Start()
	}
	p.mu.Unlock()
	if err != nil {
		return err
	}
	r.count("processes", 1)
	if err = p.cmd.Wait(); err != nil {
		return fmt.Errorf("process %d: %w\n%s", p.told.Number, err, stderr.String())
	}
	return nil
}

func (p *process) signal(sig syscall.Signal) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cmd != nil && p.cmd.Process != nil {
		_ = p.cmd.Process.Signal(sig)
	}
}

// end ends the process, for good, and returns what it did wrong.
func (p *process) end(sig syscall.Signal) error {
	p.mu.Lock()
	p.last = true
	if p.stdin != nil {
		_ = p.stdin.Close()
	}
	p.mu.Unlock()
	p.signal(sig)
	giveUp := time.AfterFunc(time.Minute, func() { p.signal(syscall.SIGQUIT) })
	defer giveUp.Stop()
	return <-p.result
}

// disturb has processes be stopped and killed.
func (r *run) disturb(stopped time.Duration) []trouble {
	some := func(rng *rand.Rand) *process { return r.workers[rng.IntN(len(r.workers))] }
	stop := trouble{"stopped", func(rng *rand.Rand) {
		p := some(rng)
		p.signal(syscall.SIGSTOP)
		time.Sleep(between(rng, time.Millisecond, stopped))
		p.signal(syscall.SIGCONT)
	}}
	return []trouble{stop, stop, stop, {"kill", func(rng *rand.Rand) { some(rng).signal(syscall.SIGKILL) }}}
}

// network has a proxy fail in every way.
func network(proxies []*faultproxy.Proxy, patience, longest time.Duration) (all []trouble) {
	for _, fault := range faultproxy.Every(patience) {
		all = append(all, trouble{fault.Name, func(rng *rand.Rand) {
			p := proxies[rng.IntN(len(proxies))]
			fault.Begin(p)
			time.Sleep(between(rng, time.Millisecond, longest))
			p.Heal()
			if fault.Brief {
				p.Reset()
			}
		}})
	}
	return all
}

// work is the life of a process, which ends with its standard input.
func work(text string) {
	var w worker
	if err := json.Unmarshal([]byte(text), &w); err != nil {
		panic(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	for _, tg := range targets {
		if tg.name == w.Target {
			tg.worker(ctx, &w)
			return
		}
	}
	panic("no target " + w.Target)
}

// rand returns a source of its own for a part of the worker.
func (w *worker) rand(part int) *rand.Rand {
	return rand.New(rand.NewPCG(w.Seed, uint64(w.Number+1)<<32+uint64(part)))
}

// unknown is the Return of an operation that may take effect at any time, or never.
const unknown = math.MaxInt64

// An entry is an operation in a history. Its Return is 0 if the process ended first.
type entry[T any] struct {
	Process, Client, ID int
	Call, Return        int64
	Op                  T
}

// A journal is where a process writes its operations. What has been written stays when
// the process is killed.
type journal[T any] struct {
	file    *os.File
	process int
	last    atomic.Int64
}

func newJournal[T any](w *worker) *journal[T] {
	f, err := os.OpenFile(filepath.Join(w.Dir, fmt.Sprintf("%d.ops", w.Number)), os.O_CREATE|os.O_WRONLY|os.O_APPEND,
		0o600)
	if err != nil {
		panic(err)
	}
	return &journal[T]{file: f, process: w.Number}
}

// do records what fn does, and that it was begun. fn fills in how op ended, and may
// write what is known by then.
func (j *journal[T]) do(client int, op T, fn func(op *T, write func())) {
	e := entry[T]{Process: j.process, Client: client, ID: int(j.last.Add(1)), Op: op, Call: now()}
	j.write(&e)
	fn(&e.Op, func() { j.write(&e) })
	e.Return = now()
	j.write(&e)
}

// look records what fn does once it has ended: something that changes nothing.
func (j *journal[T]) look(client int, op T, fn func(op *T)) {
	e := entry[T]{Process: j.process, Client: client, ID: int(j.last.Add(1)), Op: op, Call: now()}
	fn(&e.Op)
	e.Return = now()
	j.write(&e)
}

func (j *journal[T]) write(e *entry[T]) {
	line, err := json.Marshal(e)
	if err != nil {
		panic(err)
	}
	if _, err := j.file.Write(append(line, '\n')); err != nil {
		panic(err)
	}
}

// read returns the operations of all processes, in the order of their calls.
func read[T any](r *run) []entry[T] {
	type id struct{ process, id int }
	all := make(map[id]entry[T])
	files, err := filepath.Glob(filepath.Join(r.dir, "*.ops"))
	require.NoError(r, err)
	for _, name := range files {
		f, err := os.Open(name)
		require.NoError(r, err)
		lines := bufio.NewScanner(f)
		lines.Buffer(nil, 1<<20)
		for lines.Scan() {
			var e entry[T]
			if json.Unmarshal(lines.Bytes(), &e) == nil { // the last line of a killed process may be cut
				all[id{e.Process, e.ID}] = e
			}
		}
		require.NoError(r, lines.Err())
		_ = f.Close()
	}
	r.count("operations", len(all))
	return slices.SortedFunc(maps.Values(all), func(a, b entry[T]) int {
		return cmp.Or(cmp.Compare(a.Call, b.Call), cmp.Compare(a.Process, b.Process), cmp.Compare(a.ID, b.ID))
	})
}

// A finding is a violation of a promise, in as few operations as show it.
type finding struct {
	what  string
	model porcupine.Model
	ops   []porcupine.Operation
	all   []porcupine.Operation // that are written to a file, if there are more
	shown string
}

func (f *finding) String() string { return f.what + "\n" + f.shown }

const patience = 5 * time.Second // for the check of one part of a history

// judge looks for a part of a history that the model forbids. possible reports whether
// operations could be those of a history at all; nil: any could.
func (r *run) judge(
	what string, model porcupine.Model, ops []porcupine.Operation, possible func([]porcupine.Operation) bool,
) *finding {
	illegal := func(ops []porcupine.Operation) bool {
		return (possible == nil || possible(ops)) &&
			porcupine.CheckOperationsTimeout(model, ops, patience) == porcupine.Illegal
	}
	switch porcupine.CheckOperationsTimeout(model, ops, patience) {
	case porcupine.Ok:
		return nil
	case porcupine.Unknown:
		r.count("parts not decided", 1)
		return nil
	}
	return &finding{what: what, model: model, ops: shorten(ops, illegal)}
}

// shorten removes operations as long as the rest is illegal.
func shorten(ops []porcupine.Operation, illegal func([]porcupine.Operation) bool) []porcupine.Operation {
	for size := max(1, len(ops)/2); ; {
		smaller := false
		for at := 0; at < len(ops); {
			rest := slices.Concat(ops[:at], ops[min(at+size, len(ops)):])
			if illegal(rest) {
				ops, smaller = rest, true
			} else {
				at += size
			}
		}
		if size == 1 && !smaller {
			return ops
		}
		size = max(1, size/2)
	}
}

// write shows the finding as a text and as a page.
func (f *finding) write(r *run) {
	var b strings.Builder
	first, last := int64(math.MaxInt64), int64(0)
	for _, op := range f.ops {
		first, last = min(first, op.Call), max(last, op.Call)
		if op.Return != unknown {
			last = max(last, op.Return)
		}
	}
	for i := range f.ops {
		f.ops[i].Return = min(f.ops[i].Return, last+int64(time.Millisecond)) // of those without one
	}
	ms := func(at int64) float64 { return float64(at-first) / 1e6 }
	fmt.Fprintf(&b, "%s, seed %d, settings %+v\n", r.tg.name, r.seed, r.plan)
	line := func(w io.Writer, op porcupine.Operation) {
		fmt.Fprintf(w, "%10.3f to %10.3f ms  client %3d  %s\n", ms(op.Call), ms(op.Return), op.ClientId,
			f.model.DescribeOperation(op.Input, op.Output))
	}
	for _, op := range f.ops {
		line(&b, op)
	}
	if f.all != nil {
		var whole bytes.Buffer
		for _, op := range f.all {
			line(&whole, op)
		}
		name := filepath.Join(*outDir, fmt.Sprintf("history-%s-%d.txt", r.tg.name, r.seed))
		require.NoError(r, os.WriteFile(name, whole.Bytes(), 0o600))
		fmt.Fprintf(&b, "all %d operations in %s\n", len(f.all), name)
	}
	var near []porcupine.Annotation
	for _, fault := range r.faults {
		if fault.End >= first-int64(time.Second) && fault.Start <= last {
			near = append(near, fault)
			fmt.Fprintf(&b, "%10.3f to %10.3f ms  %s: %s\n", ms(fault.Start), ms(fault.End), fault.Tag, fault.Description)
		}
	}
	_, info := porcupine.CheckOperationsVerbose(f.model, f.ops, patience)
	info.AddAnnotations(near)
	page := filepath.Join(*outDir, fmt.Sprintf("history-%s-%d.html", r.tg.name, r.seed))
	if err := porcupine.VisualizePath(f.model, info, page); err != nil {
		fmt.Fprintf(&b, "no page: %v\n", err)
	} else {
		fmt.Fprintf(&b, "drawn in %s\n", page)
	}
	f.shown = b.String()
}
