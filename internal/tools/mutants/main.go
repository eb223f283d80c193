// Mutants puts small faults into a package, one at a time, and runs the package's tests. If no test fails
// because of a fault, the tests do not check the code in which the fault is.
//
//	go run ./internal/tools/mutants -for 10m ./breaker
//
// A version of the package with a fault is called a mutant. The faults are:
//
//   - a condition that is negated,
//   - a part of a condition that is removed,
//   - a comparison that is shifted by one,
//   - a statement that is removed,
//   - a lock that is removed (these mutants run under the race detector),
//   - a deferred call that is made immediately.
//
// All faults are compiled into one test binary, each behind a switch. A mutant is tried with the tests that
// reach its fault, the fastest tests first.
//
// Mutants prints each surviving mutant immediately, and also writes it to a file. If the time is too short to
// try all mutants of a package, it tries a random sample of them. The sample depends on a seed, which it
// prints.
//
// For each survivor, either write a test that notices it, or add a line with the reason why it survives to
// survivors/<package>.txt.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"log"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"time"
)

func main() {
	log.SetFlags(0)
	budget := flag.Duration("for", 10*time.Minute, "how long a package may take, with its build")
	most := flag.Duration("most", 10*time.Second, "the time of the tests, without a mutant, that one is tried with")
	only := flag.String("only", "", "only mutants whose name has this text")
	locks := flag.Bool("locks", true, "locks left out, too: they need a second build, with the race detector")
	seed := flag.Uint64("seed", 1, "the order in which mutants are tried")
	jobs := flag.Int("jobs", runtime.GOMAXPROCS(0), "mutants at a time")
	verbose := flag.Bool("v", false, "a line for each mutant")
	out := flag.String("out", os.TempDir(), "where mutants-<package>.txt is written: what survived")
	flag.Parse()
	ok := flag.NArg() > 0
	for _, pkg := range flag.Args() {
		good, err := examine(pkg, options{*budget, *most, *only, *locks, *seed, *jobs, *verbose, *out})
		if err != nil {
			log.Fatal(err)
		}
		ok = ok && good
	}
	if !ok {
		os.Exit(1)
	}
}

type options struct {
	budget, most time.Duration
	only         string
	locks        bool
	seed         uint64
	jobs         int
	verbose      bool
	out          string
}

// examine prints the mutants of a package that survive. It reports whether there are none except those with a
// listed reason.
func examine(pkg string, o options) (bool, error) {
	temp, err := os.MkdirTemp("", "mutants")
	if err != nil {
		return false, err
	}
	defer os.RemoveAll(temp)
	began := time.Now()
	p, err := build(pkg, temp, o.locks)
	if err != nil {
		return false, err
	}
	name := strings.ReplaceAll(strings.TrimPrefix(pkg, "./"), "/", "-") + ".txt"
	reasons, err := known(filepath.Join("internal/tools/mutants/survivors", name))
	if err != nil {
		return false, err
	}
	file, err := os.Create(filepath.Join(o.out, "mutants-"+name))
	if err != nil {
		return false, err
	}
	defer file.Close()
	found := io.MultiWriter(os.Stdout, file)
	if err := p.measure(context.Background(), o.jobs); err != nil {
		return false, err
	}
	var tests time.Duration
	for _, t := range p.tests {
		tests += t.took
	}
	fmt.Printf("%s: %d mutants, %d tests of %.1f s, built and measured in %.0f s; seed %d; survivors go to %s\n",
		pkg, len(p.mutants), len(p.tests), tests.Seconds(), time.Since(began).Seconds(), o.seed, file.Name())
	for _, t := range p.tests {
		if t.took > o.most/2 {
			fmt.Printf("  takes %.1f s: %s\n", t.took.Seconds(), t.name)
		}
	}
	for _, name := range p.failing {
		fmt.Fprintln(found, "  fails alone and without a mutant:", name)
	}

	var chosen []mutant
	unused := maps.Clone(reasons)
	for _, m := range p.mutants {
		delete(unused, m.Name)
		if strings.Contains(m.Name, o.only) && (o.locks || !m.Locks) && reasons[m.Name] == "" {
			chosen = append(chosen, m)
		}
	}
	rand.New(rand.NewPCG(o.seed, 0)).Shuffle(len(chosen), func(i, j int) {
		chosen[i], chosen[j] = chosen[j], chosen[i]
	})
	for name := range unused {
		fmt.Fprintln(found, "  has a reason and is gone:", name)
	}
	o.budget -= time.Since(began)
	count := p.tryAll(chosen, o, found)

	tried := len(chosen) - count[untried]
	fmt.Fprintf(found, "%s: %d mutants, seed %d: tried %d, untried %d; "+
		"%d caught (%.1f %%), %d survived, %d unreached; %d more with a reason; %.0f s\n",
		pkg, len(p.mutants), o.seed, tried, count[untried],
		count[caught], 100*float64(count[caught])/max(1, float64(tried)), count[survived], count[unreached],
		len(reasons), time.Since(began).Seconds())
	return count[survived]+count[unreached]+len(p.failing)+len(unused) == 0, nil
}

// tryAll tries mutants until all are tried or the time is over, and writes the survivors to found. At first,
// it tries each mutant with only some of the tests that reach it. At the end, it tries the survivors with the
// remaining tests. tryAll returns the number of mutants by verdict.
func (p *program) tryAll(chosen []mutant, o options, found io.Writer) map[verdict]int {
	ctx, cancel := context.WithTimeout(context.Background(), o.budget)
	defer cancel()
	var mu sync.Mutex
	count, began, reported := map[verdict]int{}, time.Now(), time.Now()
	type later struct {
		mutant
		left int
	}
	var again []later
	forEach(chosen, o.jobs, func(m mutant) {
		begun := time.Now()
		v, left := untried, 0
		if ctx.Err() == nil {
			v, left = p.try(ctx, m, 0, o.most)
		}
		mu.Lock()
		defer mu.Unlock()
		count[v]++
		line := fmt.Sprintf("  %v %s: %s (%.1f s)", v, m.Pos, m.Name, time.Since(begun).Seconds())
		switch {
		case v == survived && left > 0:
			again = append(again, later{m, left})
			fmt.Printf("%s, %d tests left\n", line, left)
		case v == survived || v == unreached:
			fmt.Fprintln(found, line)
		case o.verbose:
			fmt.Println(line)
		}
		if time.Since(reported) > 15*time.Second {
			reported = time.Now()
			tried := count[caught] + count[survived] + count[unreached]
			fmt.Printf("  ... %.0f s: %d of %d, %d caught\n",
				time.Since(began).Seconds(), tried, len(chosen), count[caught])
		}
	})
	forEach(again, o.jobs, func(m later) {
		v := untried
		if ctx.Err() == nil {
			v, _ = p.try(ctx, m.mutant, len(p.reaching(m.mutant))-m.left, time.Hour)
		}
		mu.Lock()
		defer mu.Unlock()
		switch v {
		case caught:
			count[survived]--
			count[caught]++
			fmt.Printf("  caught after all %s: %s\n", m.Pos, m.Name)
		case untried:
			count[survived]--
			count[untried]++
			fmt.Fprintf(found, "  untried with %d more tests %s: %s\n", m.left, m.Pos, m.Name)
		default:
			fmt.Fprintf(found, "  survived %s: %s\n", m.Pos, m.Name)
		}
	})
	return count
}

// forEach calls f with each element of all. It runs up to jobs calls at the same time.
func forEach[T any](all []T, jobs int, f func(T)) {
	next := make(chan T)
	var workers sync.WaitGroup
	for range jobs {
		workers.Go(func() {
			for x := range next {
				f(x)
			}
		})
	}
	for _, x := range all {
		next <- x
	}
	close(next)
	workers.Wait()
}
