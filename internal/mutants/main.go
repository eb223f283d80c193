// Mutants puts small faults into a package, one at a time, and runs its tests: a fault
// that no test notices is a rule that no test holds.
//
//	go run ./internal/mutants -for 10m ./breaker
//
// A fault is a condition negated, a part of a condition left out, a comparison shifted by
// one, a statement left out, a lock left out (run under the race detector), or a deferred
// call made at once. All of them are compiled into one test binary, each behind a switch,
// and a fault is tried with the tests that reach it, the quick ones first.
//
// A survivor gets a test, or a line with its reason in survivors/<package>.txt.
package main

import (
	"context"
	"flag"
	"fmt"
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
	budget := flag.Duration("for", 10*time.Minute, "how long to try mutants; what is left then is untried")
	most := flag.Duration("most", 20*time.Second, "the time of the tests, without a mutant, that one mutant is tried with")
	only := flag.String("only", "", "only mutants whose name has this text")
	locks := flag.Bool("locks", true, "locks left out, too: they need the race detector")
	seed := flag.Uint64("seed", 1, "the order in which mutants are tried")
	jobs := flag.Int("jobs", runtime.GOMAXPROCS(0), "mutants at a time")
	verbose := flag.Bool("v", false, "a line for each mutant")
	flag.Parse()
	ok := flag.NArg() > 0
	for _, pkg := range flag.Args() {
		good, err := examine(pkg, options{*budget, *most, *only, *locks, *seed, *jobs, *verbose})
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
}

// examine prints what survives in a package, and reports whether all of it has a reason.
func examine(pkg string, o options) (bool, error) {
	temp, err := os.MkdirTemp("", "mutants")
	if err != nil {
		return false, err
	}
	defer os.RemoveAll(temp)
	began := time.Now()
	p, err := build(pkg, temp)
	if err != nil {
		return false, err
	}
	reasons, err := known(filepath.Join("internal/mutants/survivors", strings.ReplaceAll(strings.TrimPrefix(pkg, "./"), "/", "-")+".txt"))
	if err != nil {
		return false, err
	}
	if err := p.measure(context.Background()); err != nil {
		return false, err
	}
	var tests time.Duration
	for _, t := range p.tests {
		tests += t.took
	}
	fmt.Printf("%s: %d mutants, %d tests of %.1f s, built and measured in %.0f s\n", pkg, len(p.mutants), len(p.tests), tests.Seconds(), time.Since(began).Seconds())
	for _, name := range p.failing {
		fmt.Println("  fails alone and without a mutant:", name)
	}

	var chosen []mutant
	gone := maps.Clone(reasons)
	for _, m := range p.mutants {
		delete(gone, m.Name)
		if strings.Contains(m.Name, o.only) && (o.locks || !m.Locks) && reasons[m.Name] == "" {
			chosen = append(chosen, m)
		}
	}
	rand.New(rand.NewPCG(o.seed, 0)).Shuffle(len(chosen), func(i, j int) { chosen[i], chosen[j] = chosen[j], chosen[i] })
	for name := range gone {
		fmt.Println("  has a reason and is gone:", name)
	}
	verdicts := p.tryAll(chosen, o)

	count := map[verdict]int{}
	for _, m := range p.mutants { // in the order of the source
		v, ok := verdicts[m.Number]
		if !ok {
			continue
		}
		count[v]++
		switch v {
		case survived:
			fmt.Printf("  survived   %s: %s\n", m.Pos, m.Name)
		case unreached:
			fmt.Printf("  unreached  %s: %s\n", m.Pos, m.Name)
		}
	}
	tried := count[caught] + count[survived] + count[unreached]
	fmt.Printf("%s: tried %d of %d: %d caught (%.1f %%), %d survived, %d unreached; %d with a reason; %.0f s\n", pkg,
		tried, len(chosen), count[caught], 100*float64(count[caught])/max(1, float64(tried)), count[survived], count[unreached], len(reasons), time.Since(began).Seconds())
	return count[survived]+count[unreached]+len(p.failing)+len(gone) == 0, nil
}

// tryAll tries mutants until they or the time are used up.
func (p *program) tryAll(chosen []mutant, o options) map[int]verdict {
	ctx, cancel := context.WithTimeout(context.Background(), o.budget)
	defer cancel()
	var mu sync.Mutex
	verdicts := map[int]verdict{}
	next := make(chan mutant)
	var workers sync.WaitGroup
	for range o.jobs {
		workers.Go(func() {
			for m := range next {
				began := time.Now()
				v := p.try(ctx, m, o.most)
				mu.Lock()
				verdicts[m.Number] = v
				done := len(verdicts)
				mu.Unlock()
				if o.verbose {
					fmt.Printf("  %v %.1f s %s: %s\n", []string{"caught", "SURVIVED", "UNREACHED", "untried"}[v], time.Since(began).Seconds(), m.Pos, m.Name)
				} else if done%200 == 0 {
					fmt.Printf("  ... %d of %d\n", done, len(chosen))
				}
			}
		})
	}
	for _, m := range chosen {
		select {
		case next <- m:
		case <-ctx.Done():
			mu.Lock()
			verdicts[m.Number] = untried
			mu.Unlock()
		}
	}
	close(next)
	workers.Wait()
	return verdicts
}
