// Quickstart shows over real HTTP what the policies of this module change. A
// backend on loopback lives through a bad half minute, compressed into ten
// seconds; the same calls are made twice, side by side: through a plain
// http.Client and through one whose transport carries retry, breaker, throttle,
// bulkhead, timeout and a cached fallback.
//
//	go run ./examples/quickstart [-seed n] [-json]
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
)

func main() {
	seed := flag.Uint64("seed", 1, "chooses the calls and the backend's errors; the same seed repeats them")
	asJSON := flag.Bool("json", false, "print one JSON object instead of the picture; answered counts fresh and stale answers")
	flag.Parse()
	if err := show(*seed, *asJSON, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "quickstart:", err)
		os.Exit(1)
	}
}

// A report is what -json prints.
type report struct {
	Plain     summary       `json:"plain"`
	Resilient summary       `json:"resilient"`
	Phases    []phaseReport `json:"phases"`
}

type phaseReport struct {
	Name      string  `json:"name"`
	Plain     summary `json:"plain"`
	Resilient summary `json:"resilient"`
}

func show(seed uint64, asJSON bool, out *os.File) error {
	var sides []*side
	for _, name := range []string{"plain", "resilient"} {
		s, err := newSide(name, seed)
		if err != nil {
			return err
		}
		defer s.close()
		sides = append(sides, s)
	}
	if !asJSON {
		p := newPicture(out, sides)
		run(sides, seed, p.update)
		p.finish()
		return nil
	}
	run(sides, seed, func(int) {})
	r := report{Plain: summarize(sides[0].tallies...), Resilient: summarize(sides[1].tallies...)}
	for i, p := range badHalfMinute {
		r.Phases = append(r.Phases, phaseReport{p.Name, summarize(sides[0].tallies[i]), summarize(sides[1].tallies[i])})
	}
	e := json.NewEncoder(out)
	e.SetIndent("", "  ")
	return e.Encode(r)
}
