package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
)

// switches is a source file that is added to the package. Its function mutantAt reports whether a mutant is
// switched on. If the environment variable MUTANT_REACHED names a file, mutantAt also records in the file
// which mutants the tests reach.
const switches = `package %s

import (
	"os"
	"strconv"
	"syscall"
)

var mutantOn, mutantReached = func() (int, []byte) {
	on, _ := strconv.Atoi(os.Getenv("MUTANT"))
	if on > 0 && os.Getenv("MUTANT_RACE") == "" { // a mutant may allocate without end
		_ = syscall.Setrlimit(syscall.RLIMIT_AS, &syscall.Rlimit{Cur: 8 << 30, Max: 8 << 30})
	}
	name := os.Getenv("MUTANT_REACHED")
	if name == "" {
		return on, nil
	}
	f, err := os.OpenFile(name, os.O_RDWR, 0)
	if err != nil {
		panic(err)
	}
	reached, err := syscall.Mmap(int(f.Fd()), 0, %d, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	if err != nil {
		panic(err)
	}
	return on, reached
}()

func mutantAt(n int) bool {
	if mutantReached != nil {
		mutantReached[n] = 1
	}
	return n == mutantOn
}
`

// A program is a package and its internal packages, with all of their mutants and a test binary for each
// package. These packages are called rooms.
type program struct {
	temp    string
	rooms   []room   // the package itself and its internal packages
	locks   bool     // whether there are also test binaries with the race detector
	mutants []mutant // a mutant's index is its Number minus 1
	tests   []test
	failing []string // tests that fail by themselves without a mutant; they are not used
}

type room struct {
	Dir, Name, ImportPath              string
	GoFiles, TestGoFiles, XTestGoFiles []string

	path string // path relative to the package; "." for the package itself
	bin  string // suffix of the names of its test binaries, after plain- or race-; "" if it has no tests
}

type test struct {
	room
	name    string
	took    time.Duration
	reached []byte
}

func build(pkg, temp string, locks bool) (*program, error) {
	p := &program{temp: temp, locks: locks}
	if err := p.list(pkg); err != nil {
		return nil, err
	}
	skip := map[string]bool{} // the lines whose mutants do not compile
	for {
		p.mutants = nil
		overlay := map[string]string{}
		write := func(name string, src []byte) error {
			copied := p.path(fmt.Sprintf("%d.go", len(overlay)))
			overlay[name] = copied
			return os.WriteFile(copied, src, 0o644)
		}
		for _, r := range p.rooms {
			for _, name := range r.GoFiles {
				src, err := os.ReadFile(filepath.Join(r.Dir, name))
				if err != nil {
					return nil, err
				}
				src, found, err := mutate(filepath.Join(r.path, name), src, len(p.mutants)+1, skip)
				if err != nil {
					return nil, err
				}
				p.mutants = append(p.mutants, found...)
				if err := write(filepath.Join(r.Dir, name), src); err != nil {
					return nil, err
				}
			}
		}
		for _, r := range p.rooms {
			text := fmt.Appendf(nil, switches, r.Name, len(p.mutants)+1)
			if err := write(filepath.Join(r.Dir, "mutants_switches.go"), text); err != nil {
				return nil, err
			}
		}
		files, err := json.Marshal(map[string]any{"Replace": overlay})
		if err != nil {
			return nil, err
		}
		if err := os.WriteFile(p.path("overlay.json"), files, 0o644); err != nil {
			return nil, err
		}
		lines, err := p.compile()
		if err == nil {
			break
		}
		known := len(skip)
		for _, line := range lines {
			skip[line] = true
		}
		if len(skip) == known {
			return nil, err
		}
	}
	if len(skip) > 0 {
		fmt.Printf("without the mutants of %d lines that do not compile: %s\n",
			len(skip), strings.Join(slices.Sorted(maps.Keys(skip)), " "))
	}
	return p, nil
}

// list finds the package and those of its internal packages that it imports.
func (p *program) list(pkg string) error {
	out, err := exec.Command(
		"go", "list", "-deps", "-json=Dir,Name,ImportPath,GoFiles,TestGoFiles,XTestGoFiles", pkg).Output()
	if err != nil {
		return fmt.Errorf("go list %s: %w", pkg, err)
	}
	for from := json.NewDecoder(bytes.NewReader(out)); from.More(); {
		var r room
		if err := from.Decode(&r); err != nil {
			return err
		}
		p.rooms = append(p.rooms, r)
	}
	whole := p.rooms[len(p.rooms)-1] // go list prints a package after the packages that it imports
	p.rooms = slices.DeleteFunc(p.rooms, func(r room) bool {
		return r.ImportPath != whole.ImportPath && !strings.HasPrefix(r.ImportPath, whole.ImportPath+"/internal/")
	})
	for i := range p.rooms {
		r := &p.rooms[i]
		if r.path, err = filepath.Rel(whole.Dir, r.Dir); err != nil {
			return err
		}
		if len(r.TestGoFiles)+len(r.XTestGoFiles) > 0 {
			r.bin = fmt.Sprintf("%d.test", i)
		}
	}
	return nil
}

func (p *program) path(name string) string { return filepath.Join(p.temp, name) }

var compileError = regexp.MustCompile(`([\w./-]+\.go:\d+):\d+: `)

// compile builds the test binaries. It returns the lines that did not compile.
func (p *program) compile() ([]string, error) {
	kinds := map[string]string{"plain-": "-race=false"}
	if p.locks {
		kinds["race-"] = "-race"
	}
	whole := p.rooms[len(p.rooms)-1].Dir // the compiler reports positions relative to this directory
	for _, r := range p.rooms {
		if r.bin == "" {
			continue
		}
		for kind, race := range kinds {
			cmd := exec.Command("go", "test", "-c", race, "-vet=off", "-gcflags=-e",
				"-overlay", p.path("overlay.json"), "-o", p.path(kind+r.bin), "./"+r.path)
			cmd.Dir = whole
			if out, err := cmd.CombinedOutput(); err != nil {
				var lines []string
				for _, found := range compileError.FindAllSubmatch(out, -1) {
					lines = append(lines, filepath.Clean(string(found[1])))
				}
				return lines, fmt.Errorf("go test -c: %w\n%s", err, out)
			}
		}
	}
	return nil, nil
}

// measure runs each test by itself. It records the time that the test takes and the mutants that it reaches.
func (p *program) measure(ctx context.Context, jobs int) error {
	var mu sync.Mutex
	var all errgroup.Group
	all.SetLimit(jobs)
	for _, r := range p.rooms {
		if r.bin == "" {
			continue
		}
		list := exec.Command(p.path("plain-"+r.bin), "-test.list", "^(Test|Fuzz|Example)")
		list.Dir = r.Dir
		out, err := list.Output()
		if err != nil {
			return fmt.Errorf("the list of tests: %w", err)
		}
		for name := range strings.Lines(string(out)) {
			t := test{room: r, name: strings.TrimSpace(name)}
			all.Go(func() error {
				file := p.path("reached-" + t.bin + t.name)
				if err := os.WriteFile(file, make([]byte, len(p.mutants)+1), 0o644); err != nil {
					return err
				}
				began := time.Now()
				err := p.run(ctx, "plain-", []test{t}, 5*time.Minute, "MUTANT_REACHED="+file)
				t.took = time.Since(began)
				reached, errRead := os.ReadFile(file)
				mu.Lock()
				defer mu.Unlock()
				if err != nil {
					p.failing = append(p.failing, t.name)
					return ctx.Err()
				}
				t.reached = reached
				p.tests = append(p.tests, t)
				return errRead
			})
		}
	}
	err := all.Wait()
	slices.SortFunc(p.tests, func(a, b test) int {
		return cmp.Or(cmp.Compare(a.took, b.took), cmp.Compare(a.name, b.name))
	})
	return err
}

// run runs tests, in one process for each room. It returns the error of the tests that failed.
func (p *program) run(ctx context.Context, kind string, tests []test, limit time.Duration, env ...string) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for _, r := range p.rooms {
		var names []string
		for _, t := range tests {
			if t.bin == r.bin {
				names = append(names, t.name)
			}
		}
		if len(names) == 0 {
			continue
		}
		cmd := exec.CommandContext(ctx, p.path(kind+r.bin), "-test.failfast", "-test.short", "-test.timeout", "0",
			"-test.run", "^("+strings.Join(names, "|")+")$")
		cmd.Dir = r.Dir
		cmd.WaitDelay = time.Second
		cmd.Env = append(os.Environ(), env...)
		if err := cmd.Run(); err != nil {
			return cmp.Or(ctx.Err(), err)
		}
	}
	return nil
}

// fails reports whether tests fail with env, or take more than five times as long as without env. takes is
// their expected time without env. fails measures that time again before it concludes that a mutant makes the
// tests hang, because the machine may only be slow.
func (p *program) fails(ctx context.Context, kind string, tests []test, takes time.Duration, env ...string) bool {
	for limit := 3*takes + 2*time.Second; ; {
		err := p.run(ctx, kind, tests, limit, env...)
		if !errors.Is(err, context.DeadlineExceeded) || ctx.Err() != nil {
			return err != nil
		}
		began := time.Now()
		_ = p.run(ctx, kind, tests, 5*time.Minute)
		if takes = time.Since(began); 5*takes <= limit || ctx.Err() != nil {
			return true
		}
		limit = 5 * takes
	}
}

// A verdict is the result of trying a mutant.
type verdict int

const (
	caught verdict = iota
	survived
	unreached // no test reaches the mutant
	untried   // there was no time to try the mutant
)

func (v verdict) String() string {
	return [...]string{"caught", "survived", "unreached", "untried"}[v]
}

// reaching returns the tests that reach a mutant, the fastest tests first.
func (p *program) reaching(m mutant) (tests []test) {
	for _, t := range p.tests {
		if t.reached[m.Number] != 0 {
			tests = append(tests, t)
		}
	}
	return tests
}

// try runs the tests that reach a mutant, the fastest tests first, until one fails, or until the sum of their
// times without the mutant exceeds most. It skips the first tests, whose number is first. left is the number
// of tests that it has not run.
func (p *program) try(ctx context.Context, m mutant, first int, most time.Duration) (v verdict, left int) {
	reaching := p.reaching(m)
	if len(reaching) == 0 {
		return unreached, 0
	}
	reaching = reaching[first:]
	kind, slower, env := "plain-", time.Duration(1), []string{"MUTANT=" + strconv.Itoa(m.Number)}
	if m.Locks {
		kind, slower, env = "race-", 10, append(env, "MUTANT_RACE=1")
	}
	var spent time.Duration
	for part := 200 * time.Millisecond; len(reaching) > 0 && spent < most; part *= 5 {
		var tests []test
		var takes time.Duration
		for len(reaching) > 0 && (takes < part || len(tests) == 0) &&
			(spent+takes+reaching[0].took < most || spent+takes == 0) {
			takes += reaching[0].took
			tests = append(tests, reaching[0])
			reaching = reaching[1:]
		}
		if len(tests) == 0 {
			break
		}
		spent += takes
		if p.fails(ctx, kind, tests, slower*takes, env...) {
			if ctx.Err() != nil {
				return untried, len(reaching)
			}
			return caught, len(reaching)
		}
	}
	return survived, len(reaching)
}

// known reads the file of survivors with a reason. Each line has the form "fault — reason".
func known(file string) (map[string]string, error) {
	text, err := os.ReadFile(file)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	reasons := map[string]string{}
	for line := range bytes.Lines(text) {
		line := strings.TrimSpace(string(line))
		if line == "" || strings.HasPrefix(line, "//") {
			continue
		}
		fault, reason, ok := strings.Cut(line, " — ")
		if !ok {
			return nil, fmt.Errorf("%s: a line is a fault, \" — \" and its reason: %q", file, line)
		}
		reasons[fault] = reason
	}
	return reasons, err
}
