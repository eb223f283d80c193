// Prove runs all tests that search for bugs at random, for a given time: histories of real servers,
// simulations with new seeds, fuzz targets, and mutants.
//
//	go run ./internal/tools/prove -for 10m
//
// When a part has ended, Prove prints its results. At the end, it prints a table of all results. If any part
// has found a bug, its exit status is 1.
package main

import (
	"bufio"
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// A part is one program that searches for bugs.
type part struct {
	name  string
	dir   string
	share int           // share of the total time, relative to the other parts' shares
	args  []string      // arguments of the go command
	keep  string        // regular expression of the output that reports results
	spare time.Duration // extra time to build and to end
	// stops means that the part may be stopped when its time is over. It runs a fixed number of inputs, for
	// which a slow machine may need more time.
	stops bool
}

var (
	forTime  = flag.Duration("for", 10*time.Minute, "how long it takes, apart from builds")
	controls = flag.Bool("controls", false, "also known mistakes, which must be found: some 20 minutes more")
	seed     = flag.Uint64("seed", 1_000_000+rand.Uint64N(1_000_000_000), "the first seed of each simulation")
	only     = flag.String("only", "", "only parts whose name has this text")
)

// simulations lists the packages that have a simulation, with the name of its test.
var simulations = [][2]string{
	{"saga", "TestSagaSimulation"}, {"cacheaside", "TestCacheSimulation"},
	{"breaker", "TestBreakerSimulation"}, {"bulkhead/adaptive", "TestFleetSimulation"},
}

// histories lists the tests that record histories of operations on real servers and check them. Each is a
// separate part, so only one of them runs at a time.
var histories = []string{"TestCacheaside", "TestLease", "TestSaga"}

// mutated lists the packages that can be mutated. Each run of Prove chooses one of them.
var mutated = []string{
	"breaker", "retry", "bulkhead", "bulkhead/adaptive", "throttle", "cacheaside", "saga", "lease", "registry",
	"resiliencehttp",
}

func main() {
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	began := time.Now()
	parts, err := plan()
	if err == nil && len(parts) == 0 {
		err = fmt.Errorf("-only %s: no part has this text in its name", *only)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	sum := 0
	for _, p := range parts {
		sum += p.share
	}
	fmt.Printf("for %v: %d parts, simulations from seed %d\n", *forTime, len(parts), *seed)
	table := [][2]string{}
	found := 0
	for i, p := range parts {
		d := *forTime * time.Duration(p.share) / time.Duration(max(1, sum))
		fmt.Printf("%s  %d of %d: %s, for %v\n",
			time.Since(began).Round(time.Second), i+1, len(parts), p.name, d.Round(time.Second))
		did, err := p.run(ctx, d)
		if ctx.Err() != nil {
			fmt.Println("interrupted")
			os.Exit(2)
		}
		for _, line := range did {
			table = append(table, [2]string{p.name, line})
		}
		if err != nil {
			found++
			table = append(table, [2]string{p.name, "FOUND SOMETHING: " + err.Error()})
		}
	}
	fmt.Printf("\nwhat was run, in %v:\n", time.Since(began).Round(time.Second))
	for _, row := range table {
		fmt.Printf("%-24s %s\n", row[0], row[1])
	}
	if found > 0 {
		fmt.Printf("%d of %d parts found something\n", found, len(parts))
		os.Exit(1)
	}
	fmt.Println("nothing was found")
}

func plan() (parts []part, err error) {
	add := func(p part) {
		if strings.Contains(p.name, *only) {
			parts = append(parts, p)
		}
	}
	for _, s := range simulations {
		add(part{name: "simulation " + s[0], share: 9, keep: `simulation \w+: .*`, spare: 5 * time.Minute, args: []string{
			"test", "-count=1", "-timeout", "0", "-v", "-run", "^" + s[1] + "$", "./" + s[0],
			"-sim.search", "-sim.from", fmt.Sprint(*seed), "-sim.for", "{}"}})
	}
	for _, test := range histories {
		add(part{name: "histories " + test, share: 8, dir: "internal/integration",
			keep: `\w+: from seed .*`, spare: 5 * time.Minute,
			args: []string{
				"test", "-count=1", "-timeout", "0", "-v", "-run", "^" + test + "$", "./history", "-history.for", "{}"}})
	}
	pkg := mutated[rand.IntN(len(mutated))]
	add(part{name: "mutants of " + pkg, share: 20, keep: `.*\b(caught|survive).*`, spare: 5 * time.Minute,
		args: []string{
			"run", "./internal/tools/mutants", "-seed", fmt.Sprint(*seed), "-for", "{}", "./" + pkg}})
	fuzz, err := targets()
	if err != nil {
		return nil, err
	}
	for _, target := range fuzz {
		// -fuzztime is a number of inputs and not a time, because a fuzz test may fail when its time ends:
		// go.dev/issue/75804.
		add(part{name: "fuzz " + target[1], share: 1, keep: `fuzz: elapsed.*`, spare: 5 * time.Minute, stops: true,
			args: []string{
				"test", "-run", "^$", "-fuzz", "^" + target[1] + "$", "-fuzztime", "{n}x",
				"-fuzzminimizetime", "100x", target[0]}})
	}
	if *controls {
		add(part{name: "controls of simulations", keep: `--- (PASS|FAIL): TestMutants/.*`, spare: 30 * time.Minute,
			args: []string{
				"test", "-count=1", "-timeout", "0", "-v", "-run", "^TestMutants$", "./internal/sim", "-sim.mutants"}})
		add(part{name: "controls of histories", dir: "internal/integration",
			keep: `--- (PASS|FAIL): TestMutants/.*`, spare: 30 * time.Minute,
			args: []string{
				"test", "-count=1", "-timeout", "0", "-v", "-run", "^TestMutants$", "./history", "-history.mutants"}})
	}
	return parts, nil
}

var fuzzFunc = regexp.MustCompile(`(?m)^func (Fuzz\w+)\(`)

// targets returns the fuzz targets of the root module, with their packages.
func targets() (all [][2]string, err error) {
	err = filepath.WalkDir(".", func(path string, d os.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && path != ".":
			if _, err := os.Stat(filepath.Join(path, "go.mod")); err == nil || strings.HasPrefix(d.Name(), ".") {
				return filepath.SkipDir
			}
		case strings.HasSuffix(path, "_test.go"):
			text, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			for _, m := range fuzzFunc.FindAllSubmatch(text, -1) {
				all = append(all, [2]string{"./" + filepath.Dir(path), string(m[1])})
			}
		}
		return nil
	})
	return all, err
}

// run runs p for d. It prints the output that matches p.keep, and returns it as did. Of the progress lines of
// a fuzz target, did holds only the last one. If p fails, run prints all of its output.
func (p part) run(ctx context.Context, d time.Duration) (did []string, err error) {
	ctx, cancel := context.WithTimeout(ctx, d+p.spare)
	defer cancel()
	args := slices.Clone(p.args)
	for i := range args {
		args[i] = strings.ReplaceAll(args[i], "{}", d.Round(time.Second).String())
		args[i] = strings.ReplaceAll(args[i], "{n}", strconv.Itoa(max(100, int(d.Seconds()*500))))
	}
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir = p.dir
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 10 * time.Second
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	cmd.Stderr = cmd.Stdout
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	keep := regexp.MustCompile(p.keep)
	var all strings.Builder
	lines := bufio.NewScanner(out)
	lines.Buffer(nil, 1<<24)
	for lines.Scan() {
		all.WriteString(lines.Text() + "\n")
		if said := keep.FindString(lines.Text()); said != "" {
			fmt.Println("    " + said)
			if strings.HasPrefix(said, "fuzz:") { // a later progress line replaces the earlier ones
				did = nil
			}
			did = append(did, said)
		}
	}
	err = cmd.Wait()
	if p.stops && ctx.Err() == context.DeadlineExceeded && !strings.Contains(all.String(), "--- FAIL") {
		return append(did, "stopped"), nil
	}
	if err != nil {
		fmt.Println(all.String())
		return did, fmt.Errorf("%w: go %s", err, strings.Join(args, " "))
	}
	return did, nil
}
