package benchmarks

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var (
	figures = flag.String("figures", "", "measure side by side and write the table to this file; - for standard output")
	rounds  = flag.Int("rounds", 9, "how many times each implementation is measured")
	only    = flag.String("only", "", "a regular expression: the pattern/case names to measure")
)

// TestFigures measures every comparison and writes the README's table. In one
// process it alternates the implementations of a case, in a new order each
// round, so that what else the machine does falls on all of them alike; it
// reports medians, and the ratio of ours to theirs as the ratio of the medians.
func TestFigures(t *testing.T) {
	if *figures == "" {
		t.Skip("measures only with -figures; run make bench")
	}
	wanted, err := regexp.Compile(*only)
	if err != nil {
		t.Fatal(err)
	}
	var table strings.Builder
	table.WriteString("| case | resilience | beside it (ours / theirs) |\n|---|---|---|\n")
	for _, p := range patterns {
		for _, c := range p.cases {
			name := p.name + "/" + c.name
			if !wanted.MatchString(name) {
				continue
			}
			row := rowOf(name, c, measure(c, p.times))
			fmt.Fprint(os.Stderr, row) // a long run shows how far it is
			table.WriteString(row)
		}
	}
	if *figures == "-" {
		fmt.Print(table.String())
		return
	}
	if err := os.WriteFile(*figures, []byte(table.String()), 0o644); err != nil {
		t.Fatal(err)
	}
}

// measure returns the results of each implementation, by its name.
func measure(c comparison, times int) map[string][]testing.BenchmarkResult {
	results := make(map[string][]testing.BenchmarkResult)
	order := slices.Clone(c.impls)
	for range *rounds * times {
		rand.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
		for _, i := range order {
			r := testing.Benchmark(func(b *testing.B) {
				b.ReportAllocs()
				i.run(b)
			})
			if r.N > 0 { // a skipped or failed benchmark has no iterations
				results[i.name] = append(results[i.name], r)
			}
		}
	}
	return results
}

func rowOf(name string, c comparison, results map[string][]testing.BenchmarkResult) string {
	ours, ok := medianTime(results[c.impls[0].name])
	if !ok {
		return fmt.Sprintf("| `%s` | not measured | |\n", name)
	}
	var beside []string
	for _, i := range c.impls[1:] {
		theirs, ok := medianTime(results[i.name])
		if !ok {
			continue
		}
		beside = append(beside, fmt.Sprintf("%s %s (**%.2f**)", i.name, figureOf(theirs, results[i.name]), ours/theirs))
	}
	return fmt.Sprintf("| `%s` | %s | %s |\n", name, figureOf(ours, results[c.impls[0].name]), strings.Join(beside, ", "))
}

// figureOf words one implementation's figures: time, allocations, and whatever
// else it reported.
func figureOf(ns float64, rs []testing.BenchmarkResult) string {
	words := []string{duration(ns)}
	if allocs := rs[0].AllocsPerOp(); ns < 1e6 { // of an op that is itself thousands of calls they say little
		words = append(words, fmt.Sprintf("%d allocs", allocs))
	}
	units := make([]string, 0, len(rs[0].Extra))
	for unit := range rs[0].Extra {
		units = append(units, unit)
	}
	slices.Sort(units)
	for _, unit := range units {
		values := make([]float64, len(rs))
		for i, r := range rs {
			values[i] = r.Extra[unit]
		}
		words = append(words, fmt.Sprintf("%.4g %s", median(values), unit))
	}
	return strings.Join(words, " ")
}

func medianTime(rs []testing.BenchmarkResult) (ns float64, ok bool) {
	times := make([]float64, len(rs))
	for i, r := range rs {
		times[i] = float64(r.T.Nanoseconds()) / float64(r.N)
	}
	return median(times), len(rs) > 0
}

func median(xs []float64) float64 {
	if len(xs) == 0 {
		return 0
	}
	slices.Sort(xs)
	return (xs[(len(xs)-1)/2] + xs[len(xs)/2]) / 2
}

func duration(ns float64) string {
	switch {
	case ns < 100:
		return fmt.Sprintf("%.1f ns", ns)
	case ns < 1e4:
		return fmt.Sprintf("%.0f ns", ns)
	case ns < 1e6:
		return fmt.Sprintf("%.1f us", ns/1e3)
	default:
		return fmt.Sprintf("%.1f ms", ns/1e6)
	}
}
