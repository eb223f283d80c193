package sim

import (
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

var (
	theSeed = flag.Uint64("sim.seed", 0, "repeat the run of this seed, and print its trace and hash")
	howMany = flag.Int("sim.seeds", 0, "search so many seeds")
	forTime = flag.Duration("sim.for", 0, "search seeds for so long")
	from    = flag.Uint64("sim.from", 0, "the first seed of a search; 0 for a new one")
	twice   = flag.Bool("sim.twice", false, "make each run of a search twice, and compare them")
	noFixed = flag.Bool("sim.search", false, "search alone: neither the corpus nor the fixed seeds")
)

// A Simulation is a test that runs with many seeds.
type Simulation struct {
	Name  string // name in the corpus and in the log
	Seeds int    // number of fixed seeds in each run of the tests; a tenth under the race detector
	Run   func(w *World)
}

// Test repeats the runs of the corpus, the file testdata/sim/<Name>. It runs the fixed seeds, and checks that
// a seed leads to the same run twice. With the flags of this package, it also searches new seeds.
func (s Simulation) Test(t *testing.T) {
	// Goroutines that become ready at the same time usually run in the same order if there is only one
	// processor.
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	if *theSeed != 0 {
		o := s.run(t, &tape{rng: source(*theSeed)}, true)
		t.Logf("%s: seed %d\n%shash %016x %+v", s.Name, *theSeed, o.trace, o.hash, o.count)
		if o.kind != "" {
			s.report(t, o)
		}
		return
	}
	if !*noFixed {
		s.corpus(t)
		for seed := range uint64(repeated) {
			s.repeats(t, seed+1)
		}
		s.search(t, 1, s.Seeds/part, 0)
	}
	base := *from
	if base == 0 {
		base = 1_000_000 + rand.Uint64N(1_000_000_000)
	}
	switch {
	case *forTime > 0:
		s.search(t, base, math.MaxInt, *forTime)
	case *howMany > 0:
		s.search(t, base, *howMany, 0)
	}
}

func source(seed uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, 34)) }

// repeats checks that two runs with the same seed are equal.
func (s Simulation) repeats(t *testing.T, seed uint64) {
	a, b := s.run(t, &tape{rng: source(seed)}, true), s.run(t, &tape{rng: source(seed)}, true)
	if a.hash != b.hash {
		t.Errorf("%s: seed %d made two different runs:\n%s", s.Name, seed, differ(a.trace, b.trace))
	}
}

// differ returns the first line in which two traces differ, with the 12 lines before it.
func differ(a, b string) string {
	la, lb := strings.Split(a, "\n"), strings.Split(b, "\n")
	for i := range min(len(la), len(lb)) {
		if la[i] != lb[i] {
			return strings.Join(la[max(0, i-12):i], "\n") + "\none: " + la[i] + "\nother: " + lb[i]
		}
	}
	return fmt.Sprintf("one has %d lines, the other %d", len(la), len(lb))
}

// An outcome is the result of a run.
type outcome struct {
	kind, why string
	drawn     draws
	count     Count
	hash      uint64
	trace     string
}

func (s Simulation) run(t *testing.T, tp *tape, traced bool) (o outcome) {
	synctest.Test(t, func(*testing.T) {
		w := &World{Step: time.Second, Hold: 10, Most: 2000, tape: tp, began: time.Now()}
		if traced {
			w.trace = new(strings.Builder)
		}
		s.Run(w)
		w.End()
		o = outcome{kind: w.kind, why: w.why, drawn: tp.drawn, count: w.count, hash: w.hash}
		if traced {
			o.trace = w.trace.String()
		}
	})
	return o
}

// search runs n seeds, starting with base. If d is not 0, it stops after d.
func (s Simulation) search(t *testing.T, base uint64, n int, d time.Duration) {
	t.Helper()
	began := time.Now()
	var total Count
	var bad *outcome
	seed, end := base, base+uint64(n)
	for ; seed < end && bad == nil && (d == 0 || time.Since(began) < d); seed++ {
		if *twice {
			s.repeats(t, seed)
		}
		o := s.run(t, &tape{rng: source(seed)}, false)
		total.Calls += o.count.Calls
		total.Faults += o.count.Faults
		total.Acts += o.count.Acts
		total.Steps += o.count.Steps
		if o.kind != "" {
			bad = &o
		}
	}
	t.Logf("simulation %s: from seed %d in %v: seeds %d, operations %d, faults %d, acts %d, steps of the clock %d",
		s.Name, base, time.Since(began).Round(100*time.Millisecond), seed-base,
		total.Calls, total.Faults, total.Acts, total.Steps)
	if bad != nil {
		t.Logf("seed %d: %s: %s", seed-1, bad.kind, bad.why)
		s.report(t, *bad)
	}
}

// report shrinks a failing run, and makes the test fail with the result.
func (s Simulation) report(t *testing.T, o outcome) {
	t.Helper()
	runs := 0
	small := shrink(o.drawn, time.Now().Add(20*time.Second), func(d draws) bool {
		runs++
		return s.run(t, &tape{given: d}, false).kind == o.kind
	})
	last := s.run(t, &tape{given: small}, true)
	t.Fatalf("%s: %s: %s\n%s\n%d calls and %d faults are left of %d and %d, after %d runs; for testdata/sim/%s:\n%s",
		s.Name, last.kind, last.why, last.trace, last.count.Calls, last.count.Faults, o.count.Calls, o.count.Faults,
		runs, s.Name, write(small))
}

// shrink simplifies d until the time until. It sets draws to 0, removes them and lowers them. It keeps each
// change after which fails still returns true.
func shrink(d draws, until time.Time, fails func(draws) bool) draws {
	try := func(kind int, list []int) bool {
		for len(list) > 0 && list[len(list)-1] == 0 {
			list = list[:len(list)-1]
		}
		candidate := d
		candidate[kind] = list
		if time.Now().After(until) || slices.Equal(list, d[kind]) || !fails(candidate) {
			return false
		}
		d = candidate
		return true
	}
	for smaller := true; smaller && time.Now().Before(until); {
		smaller = false
		for _, kind := range []int{ofOrder, ofTrouble, ofActs, ofPlan} {
			for size := len(d[kind]); size > 0; size /= 2 {
				for at := 0; at < len(d[kind]); at += size {
					end := min(at+size, len(d[kind]))
					zeroed := slices.Clone(d[kind])
					clear(zeroed[at:end])
					if try(kind, zeroed) {
						smaller = true
					}
				}
				for at := 0; at < len(d[kind]); {
					if try(kind, slices.Concat(d[kind][:at], d[kind][min(at+size, len(d[kind])):])) {
						smaller = true
					} else {
						at += size
					}
				}
			}
			for at := 0; at < len(d[kind]); at++ {
				for _, by := range []int{d[kind][at] - 1, d[kind][at] / 2, 1} {
					if at < len(d[kind]) && by > 0 && by < d[kind][at] {
						lower := slices.Clone(d[kind])
						lower[at] -= by
						if try(kind, lower) {
							smaller = true
						}
					}
				}
			}
		}
	}
	return d
}

// corpus repeats the runs in the corpus, each of which failed once.
func (s Simulation) corpus(t *testing.T) {
	t.Helper()
	lines, err := os.ReadFile(filepath.Join("testdata", "sim", s.Name))
	if os.IsNotExist(err) {
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(lines)) {
		name, text, ok := strings.Cut(strings.TrimSpace(line), ": ")
		if !ok || strings.HasPrefix(name, "#") {
			continue
		}
		given, err := read(text)
		if err != nil {
			t.Fatalf("%s: %s: %v", s.Name, name, err)
		}
		if o := s.run(t, &tape{given: given}, true); o.kind != "" {
			t.Errorf("%s: %q of the corpus: %s: %s\n%s", s.Name, name, o.kind, o.why, o.trace)
		}
	}
}

// write formats draws as text. Each kind of draws is a list such as "5 0*12 3", in which 0*12 means twelve
// times 0. The lists are separated by slashes.
func write(d draws) string {
	var kinds []string
	for _, list := range d {
		var words []string
		for i := 0; i < len(list); {
			n := 1
			for i+n < len(list) && list[i+n] == list[i] {
				n++
			}
			word := strconv.Itoa(list[i])
			if n > 1 {
				word += fmt.Sprintf("*%d", n)
			}
			words = append(words, word)
			i += n
		}
		kinds = append(kinds, strings.Join(words, " "))
	}
	return strings.Join(kinds, " / ")
}

func read(text string) (d draws, err error) {
	kinds := strings.Split(text, "/")
	if len(kinds) != len(d) {
		return d, fmt.Errorf("%d kinds of draws, not %d", len(kinds), len(d))
	}
	for i, words := range kinds {
		for _, word := range strings.Fields(words) {
			value, times, many := strings.Cut(word, "*")
			v, err := strconv.Atoi(value)
			n := 1
			if err == nil && many {
				n, err = strconv.Atoi(times)
			}
			if err != nil || v < 0 || n < 1 || n > 1_000_000 {
				return d, fmt.Errorf("%q is no draw", word)
			}
			d[i] = append(d[i], slices.Repeat([]int{v}, n)...)
		}
	}
	return d, nil
}
