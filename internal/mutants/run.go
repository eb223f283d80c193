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

// switches is added to the package: mutantAt reports whether a mutant is on, and where
// MUTANT_REACHED names a file, notes in it which mutants the tests reach.
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

// A program is the test binary of a package with all of its mutants in it.
type program struct {
	dir     string // of the package
	temp    string
	locks   bool     // there is a binary with the race detector
	mutants []mutant // by number, less 1
	tests   []test
	failing []string // tests that fail without a mutant, and alone: they say nothing
}

type test struct {
	name    string
	took    time.Duration
	reached []byte
}

func build(pkg, temp string, locks bool) (*program, error) {
	out, err := exec.Command("go", "list", "-json=Dir,Name,GoFiles", pkg).Output()
	if err != nil {
		return nil, fmt.Errorf("go list %s: %w", pkg, err)
	}
	var listed struct {
		Dir, Name string
		GoFiles   []string
	}
	if err := json.Unmarshal(out, &listed); err != nil {
		return nil, err
	}
	p := &program{dir: listed.Dir, temp: temp, locks: locks}
	skip := map[string]bool{} // lines that do not compile with their mutants
	for {
		p.mutants = nil
		overlay := map[string]string{}
		write := func(name string, src []byte) error {
			overlay[filepath.Join(p.dir, name)] = filepath.Join(temp, name)
			return os.WriteFile(filepath.Join(temp, name), src, 0o644)
		}
		for _, name := range listed.GoFiles {
			src, err := os.ReadFile(filepath.Join(p.dir, name))
			if err != nil {
				return nil, err
			}
			src, found, err := mutate(name, src, len(p.mutants)+1, skip)
			if err != nil {
				return nil, err
			}
			p.mutants = append(p.mutants, found...)
			if err := write(name, src); err != nil {
				return nil, err
			}
		}
		if err := write("mutants_switches.go", fmt.Appendf(nil, switches, listed.Name, len(p.mutants)+1)); err != nil {
			return nil, err
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
		fmt.Printf("without the mutants of %d lines that do not compile: %s\n", len(skip), strings.Join(slices.Sorted(maps.Keys(skip)), " "))
	}
	return p, nil
}

func (p *program) path(name string) string { return filepath.Join(p.temp, name) }

var compileError = regexp.MustCompile(`(?m)([\w]+\.go:\d+):\d+: `)

// compile returns the lines that did not compile.
func (p *program) compile() ([]string, error) {
	binaries := [][]string{{"-o", p.path("plain.test")}}
	if p.locks {
		binaries = append(binaries, []string{"-race", "-o", p.path("race.test")})
	}
	for _, flags := range binaries {
		cmd := exec.Command("go", append(append([]string{"test", "-c", "-vet=off", "-gcflags=-e", "-overlay", p.path("overlay.json")}, flags...), ".")...)
		cmd.Dir = p.dir
		if out, err := cmd.CombinedOutput(); err != nil {
			var lines []string
			for _, found := range compileError.FindAllSubmatch(out, -1) {
				lines = append(lines, string(found[1]))
			}
			return lines, fmt.Errorf("go test -c: %w\n%s", err, out)
		}
	}
	return nil, nil
}

// measure runs each test alone and notes how long it takes and which mutants it reaches.
func (p *program) measure(ctx context.Context, jobs int) error {
	list := exec.Command(p.path("plain.test"), "-test.list", ".")
	list.Dir = p.dir
	out, err := list.Output()
	if err != nil {
		return fmt.Errorf("the list of tests: %w", err)
	}
	var mu sync.Mutex
	var all errgroup.Group
	all.SetLimit(jobs)
	for name := range strings.Lines(string(out)) {
		name = strings.TrimSpace(name)
		if strings.HasPrefix(name, "Benchmark") || name == "" {
			continue
		}
		all.Go(func() error {
			file := p.path("reached-" + name)
			if err := os.WriteFile(file, make([]byte, len(p.mutants)+1), 0o644); err != nil {
				return err
			}
			began := time.Now()
			err := p.run(ctx, "plain.test", []string{name}, 5*time.Minute, "MUTANT_REACHED="+file)
			t := test{name: name, took: time.Since(began)}
			reached, errRead := os.ReadFile(file)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				p.failing = append(p.failing, name)
				return ctx.Err()
			}
			t.reached = reached
			p.tests = append(p.tests, t)
			return errRead
		})
	}
	err = all.Wait()
	slices.SortFunc(p.tests, func(a, b test) int { return cmp.Or(cmp.Compare(a.took, b.took), cmp.Compare(a.name, b.name)) })
	return err
}

// run runs tests in one process and returns why they failed.
func (p *program) run(ctx context.Context, binary string, tests []string, limit time.Duration, env ...string) error {
	ctx, cancel := context.WithTimeout(ctx, limit+5*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, p.path(binary), "-test.failfast", "-test.short", "-test.timeout", limit.String(),
		"-test.run", "^("+strings.Join(tests, "|")+")$")
	cmd.Dir = p.dir
	cmd.WaitDelay = time.Second
	cmd.Env = append(os.Environ(), env...)
	return cmd.Run()
}

// A verdict says what the tests made of a mutant.
type verdict int

const (
	caught verdict = iota
	survived
	unreached // by any test
	untried   // for want of time
)

func (v verdict) String() string {
	return [...]string{"caught", "survived", "unreached", "untried"}[v]
}

// reaching returns the tests that reach a mutant, the quick ones first.
func (p *program) reaching(m mutant) (tests []test) {
	for _, t := range p.tests {
		if t.reached[m.Number] != 0 {
			tests = append(tests, t)
		}
	}
	return tests
}

// try runs the tests that reach a mutant, the quick ones first, until one fails, or until
// their time without the mutant adds up to most. It leaves out the first ones, and returns how
// many it has not run.
func (p *program) try(ctx context.Context, m mutant, first int, most time.Duration) (v verdict, left int) {
	reaching := p.reaching(m)
	if len(reaching) == 0 {
		return unreached, 0
	}
	reaching = reaching[first:]
	binary, env, slower := "plain.test", []string{"MUTANT=" + strconv.Itoa(m.Number)}, time.Duration(1)
	if m.Locks {
		binary, env, slower = "race.test", append(env, "MUTANT_RACE=1"), 10
	}
	var spent time.Duration
	for part := 200 * time.Millisecond; len(reaching) > 0 && spent < most; part *= 5 {
		var names []string
		var takes time.Duration
		for len(reaching) > 0 && (takes < part || len(names) == 0) && (spent+takes+reaching[0].took < most || spent+takes == 0) {
			takes += reaching[0].took
			names = append(names, reaching[0].name)
			reaching = reaching[1:]
		}
		if len(names) == 0 {
			break
		}
		spent += takes
		if err := p.run(ctx, binary, names, slower*5*takes+5*time.Second, env...); err != nil { // a mutant may hang
			if ctx.Err() != nil {
				return untried, len(reaching)
			}
			return caught, len(reaching)
		}
	}
	return survived, len(reaching)
}

// known reads the survivors that have a reason: "fault — reason" a line.
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
