// Quickstart is a program that shows the effect of policies over real HTTP. For ten seconds, a backend on loopback
// returns errors, is overloaded, hangs and is down. Two clients send the same requests, each to its own copy of the
// backend. One is a plain http.Client. The transport of the other client has a retrier, a breaker, a throttle, a
// bulkhead, a timeout and a cached fallback.
//
//	go run ./examples/quickstart [-seed n] [-json]
//	go run ./examples/quickstart -serve 127.0.0.1:8080
//
// With -serve, the program repeats this until it is interrupted. It serves a web page that shows both clients live, and
// the console of the policies.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/signal"
)

func main() {
	seed := flag.Uint64("seed", 1, "seed for the calls and the backend's errors")
	asJSON := flag.Bool("json", false, "print one JSON object; answered counts fresh and stale answers")
	address := flag.String("serve", "", "repeat, and serve a live page at this address, such as 127.0.0.1:8080")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	var err error
	if *address != "" {
		err = serve(ctx, *address, *seed)
	} else {
		err = show(ctx, *seed, *asJSON, os.Stdout)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "quickstart:", err)
		os.Exit(1)
	}
}

// A report is the output of -json.
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

func show(ctx context.Context, seed uint64, asJSON bool, out *os.File) error {
	s := newScenario(seed)
	defer s.close()
	if !asJSON {
		p := newPicture(out, s)
		if err := s.run(ctx, seed, p.update); err != nil {
			return err
		}
		p.finish()
		return nil
	}
	if err := s.run(ctx, seed, func(int) {}); err != nil {
		return err
	}
	e := json.NewEncoder(out)
	e.SetIndent("", "  ")
	return e.Encode(s.report())
}

// report returns the results of the current run so far.
func (s *scenario) report() report {
	r := report{Plain: summarize(s.plain.tallies...), Resilient: summarize(s.resilient.tallies...)}
	for i, p := range badHalfMinute {
		plain, resilient := summarize(s.plain.tallies[i]), summarize(s.resilient.tallies[i])
		r.Phases = append(r.Phases, phaseReport{p.Name, plain, resilient})
	}
	return r
}
