package benchmarks

import (
	"flag"
	"fmt"
	"maps"
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

// TestFigures measures every comparison and writes the tables of docs/BENCHMARKS.md, one
// for each pattern: a row a case, a column an implementation. In one process it
// alternates the implementations of a case, in a new order each round, so that what
// else the machine does falls on all of them alike. It reports medians and, in
// brackets, the ratio of our median to theirs.
func TestFigures(t *testing.T) {
	if *figures == "" {
		t.Skip("measures only with -figures; run make bench")
	}
	wanted, err := regexp.Compile(*only)
	if err != nil {
		t.Fatal(err)
	}
	var tables strings.Builder
	for _, p := range patterns {
		head := headOf(p)
		for _, c := range p.cases {
			name := p.name + "/" + c.name
			if !wanted.MatchString(name) {
				continue
			}
			row := rowOf(c, p.by, columnsOf(p), measure(c, p.times))
			fmt.Fprintln(os.Stderr, name, row) // a long run shows how far it is
			fmt.Fprintf(&tables, "%s%s\n", head, row)
			head = ""
		}
	}
	if *figures == "-" {
		fmt.Print(tables.String())
		return
	}
	if err := os.WriteFile(*figures, []byte(tables.String()), 0o644); err != nil {
		t.Fatal(err)
	}
}

// columnsOf returns the implementations that a pattern's cases are measured with, ours
// first.
func columnsOf(p pattern) []string {
	var names []string
	for _, c := range p.cases {
		for _, i := range c.impls {
			if !slices.Contains(names, i.name) {
				names = append(names, i.name)
			}
		}
	}
	return names
}

func headOf(p pattern) string {
	names := columnsOf(p)
	return fmt.Sprintf("\n### %s\n\n| case | %s |\n|---|%s\n", p.name, strings.Join(names, " | "),
		strings.Repeat("---|", len(names)))
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

func rowOf(c comparison, by string, columns []string, results map[string][]testing.BenchmarkResult) string {
	ours, ok := medianOf(results[c.impls[0].name], by)
	if !ok {
		return fmt.Sprintf("| `%s` | not measured |", c.name)
	}
	row := fmt.Sprintf("| `%s` | **%s** |", c.name, figureOf(ours, by, results[c.impls[0].name]))
	for _, name := range columns[1:] {
		theirs, ok := medianOf(results[name], by)
		if !ok {
			row += " |"
			continue
		}
		row += fmt.Sprintf(" %s (%.2f) |", figureOf(theirs, by, results[name]), ours/theirs)
	}
	for strings.HasSuffix(row, " | |") { // Markdown adds the missing cells
		row = strings.TrimSuffix(row, " |")
	}
	return row
}

// figureOf returns the measurements of one implementation: the value that is compared, and the others that it
// reported. A time is followed by a slash and the number of allocations.
func figureOf(compared float64, by string, rs []testing.BenchmarkResult) string {
	words := []string{fmt.Sprintf("%.4g %s", compared, by)}
	if by == "" {
		words[0] = duration(compared)
		if compared < 1e6 { // the allocations of thousands of calls are of no use
			words[0] += fmt.Sprintf("/%d", rs[0].AllocsPerOp())
		}
	}
	for _, unit := range slices.Sorted(maps.Keys(rs[0].Extra)) {
		if value, _ := medianOf(rs, unit); unit != by {
			words = append(words, fmt.Sprintf("%.4g %s", value, unit))
		}
	}
	return strings.Join(words, ", ")
}

// medianOf returns that of a figure, or of the time of an op in nanoseconds if by is "".
func medianOf(rs []testing.BenchmarkResult, by string) (value float64, ok bool) {
	values := make([]float64, len(rs))
	for i, r := range rs {
		if values[i] = r.Extra[by]; by == "" {
			values[i] = float64(r.T.Nanoseconds()) / float64(r.N)
		}
	}
	return median(values), len(rs) > 0
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
		return fmt.Sprintf("%.1fns", ns)
	case ns < 1e4:
		return fmt.Sprintf("%.0fns", ns)
	case ns < 1e6:
		return fmt.Sprintf("%.1fus", ns/1e3)
	default:
		return fmt.Sprintf("%.1fms", ns/1e6)
	}
}
