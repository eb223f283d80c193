package bulkhead_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/bulkhead"
)

var allOverloads = flag.Bool("goodput.all", false, "simulate all overloads for longer and print the goodput of each")

// An overload sends calls at random, a Poisson process, to a service that has as many workers as the bulkhead has
// slots.
// Each caller gives up after its patience, which ends a call that runs.
type overload struct {
	load     float64 // of the capacity of the slots
	slots    int
	service  string // the distribution of the service times
	mean     time.Duration
	patience time.Duration
	deadline bool // in the ctx, otherwise the caller cancels it
}

func (o overload) String() string {
	how := "cancel"
	if o.deadline {
		how = "deadline"
	}
	return fmt.Sprintf("load %.1f, %3d slots, %-11s %5v, %-8s after %5v",
		o.load, o.slots, o.service, o.mean, how, o.patience)
}

// services are distributions with a mean of 1.
var services = map[string]func(*rand.Rand) float64{
	"constant":    func(*rand.Rand) float64 { return 1 },
	"uniform":     func(r *rand.Rand) float64 { return 0.5 + r.Float64() },
	"exponential": func(r *rand.Rand) float64 { return r.ExpFloat64() },
	"bimodal": func(r *rand.Rand) float64 {
		if r.IntN(20) == 0 {
			return 10.5
		}
		return 0.5
	},
}

// A simulatedCall is one call of an overload.
type simulatedCall struct {
	arrival, service time.Duration
	fate             fate
}

type fate int

const (
	gaveUp  fate = iota // while it waited or ran
	served              // in time
	refused             // by the bulkhead
)

func (o overload) capacity() float64 { return float64(o.slots) / o.mean.Seconds() }

// calls returns about n calls of the overload, of at least 5 s.
func (o overload) calls(n int) (calls []simulatedCall, span time.Duration) {
	rng := rand.New(rand.NewPCG(3, 9))
	span = max(5*time.Second, time.Duration(float64(n)/(o.capacity()*o.load)*1e9))
	for at := time.Duration(0); at < span; {
		calls = append(calls, simulatedCall{arrival: at, service: time.Duration(services[o.service](rng) * float64(o.mean))})
		at += time.Duration(rng.ExpFloat64() / (o.capacity() * o.load) * 1e9)
	}
	return calls, span
}

const maxWait = time.Second // of each bulkhead

// run sends calls to a bulkhead, and returns what became of them.
func (o overload) run(t *testing.T, calls []simulatedCall) []simulatedCall {
	return o.runWith(t, calls, bulkhead.Config{})
}

func (o overload) runWith(t *testing.T, calls []simulatedCall, cfg bulkhead.Config) []simulatedCall {
	calls = slices.Clone(calls)
	cfg.Limit, cfg.MaxWait = o.slots, maxWait
	synctest.Test(t, func(t *testing.T) {
		b := bulkhead.New(cfg)
		var running sync.WaitGroup
		start := time.Now()
		for i := range calls {
			c := &calls[i]
			time.Sleep(c.arrival - time.Since(start))
			running.Go(func() { c.fate = o.call(b, c.service) })
		}
		running.Wait()
		requireIdle(t, b)
	})
	return calls
}

// call makes a call that takes a time, and returns what becomes of it.
func (o overload) call(b *bulkhead.Bulkhead, takes time.Duration) fate {
	ctx, cancel := context.WithCancel(context.Background())
	if o.deadline {
		ctx, cancel = context.WithTimeout(context.Background(), o.patience)
	} else {
		defer time.AfterFunc(o.patience, cancel).Stop()
	}
	defer cancel()
	err := b.Do(ctx, func(ctx context.Context) error {
		done := time.NewTimer(takes)
		defer done.Stop()
		select {
		case <-done.C:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	})
	switch {
	case err == nil:
		return served
	case ctx.Err() != nil || !errors.Is(err, bulkhead.ErrFull):
		return gaveUp
	}
	return refused
}

// oracle serves calls as a queue does that knows how long each takes: oldest first, without those that cannot be
// served in time.
func (o overload) oracle(calls []simulatedCall) []simulatedCall {
	calls = slices.Clone(calls)
	free := make([]time.Duration, o.slots) // when each slot becomes free
	for i := range calls {                 // callers are equally patient, so the oldest has the earliest deadline
		c := &calls[i]
		slot := slices.Index(free, slices.Min(free))
		start := max(free[slot], c.arrival)
		if start <= c.arrival+maxWait && start+c.service <= c.arrival+o.patience {
			c.fate, free[slot] = served, start+c.service
		}
	}
	return calls
}

// plain serves calls as a queue does that is served oldest first and refuses only after MaxWait.
func (o overload) plain(calls []simulatedCall) []simulatedCall {
	calls = slices.Clone(calls)
	free := make([]time.Duration, o.slots) // when each slot becomes free
	for i := range calls {
		c := &calls[i]
		slot := slices.Index(free, slices.Min(free))
		start := max(free[slot], c.arrival)
		end := min(start+c.service, c.arrival+o.patience)
		switch {
		case start >= c.arrival+min(maxWait, o.patience): // it leaves the queue
			continue
		case end == start+c.service:
			c.fate = served
		}
		free[slot] = end
	}
	return calls
}

func count(calls []simulatedCall, f fate) (n int) {
	for _, c := range calls {
		if c.fate == f {
			n++
		}
	}
	return n
}

// A goodput compares a bulkhead with an oracle and with a plain queue.
type goodput struct {
	got, oracle, plain float64 // calls served, as shares of the capacity
	lost               float64 // calls that only the oracle served, minus those that only the bulkhead served, of all
	worse              float64 // calls that only the plain queue served, minus those that only the bulkhead served
	wronged            float64 // calls that the bulkhead refused and the oracle served, of all calls
}

func (o overload) goodput(t *testing.T, n int) (g goodput) {
	calls, span := o.calls(n)
	is, best := o.run(t, calls), o.oracle(calls)
	all, capacity := float64(len(calls)), o.capacity()*span.Seconds()
	for i := range calls {
		if is[i].fate == refused && best[i].fate == served {
			g.wronged += 1 / all
		}
	}
	got, oracle, plain := float64(count(is, served)), float64(count(best, served)), float64(count(o.plain(calls), served))
	g.got, g.oracle, g.plain = got/capacity, oracle/capacity, plain/capacity
	g.lost, g.worse = (oracle-got)/all, (plain-got)/all
	return g
}

// requireGoodput checks what the package promises. Service times of more than a third of the patience, and one slot
// alone, are beyond it. Without overload, no bulkhead serves fewer calls than a plain queue would. Its margin is for
// calls that are refused by the median of service times that vary as much as the patience.
func (o overload) requireGoodput(t *testing.T, g goodput) {
	t.Helper()
	within := o.slots >= 4 && 3*o.mean <= o.patience
	if within && o.load > 1 {
		require.GreaterOrEqual(t, g.got, 0.8, "%v", o)
	}
	if within && o.load < 1 && o.slots >= 16 {
		require.LessOrEqual(t, g.lost, 0.015, "%v", o)
	}
	if o.load < 1 {
		require.LessOrEqual(t, g.worse, map[bool]float64{true: 0.01, false: 0.025}[o.slots >= 4], "%v", o)
	}
	if o.load < 1 && o.service == "constant" && o.deadline {
		require.LessOrEqual(t, g.wronged, 0.0, "%v", o)
	}
}

func overloads(services []string, slots []int, times [][2]time.Duration) (all []overload) {
	for _, load := range []float64{0.9, 1.2, 2, 5} {
		for _, slots := range slots {
			for _, service := range services {
				for _, t := range times {
					for _, deadline := range []bool{true, false} {
						all = append(all, overload{load, slots, service, t[0] * ms, t[1] * ms, deadline})
					}
				}
			}
		}
	}
	return all
}

const ms = time.Millisecond

func TestGoodputUnderOverload(t *testing.T) {
	if raceDetector {
		t.Skip("a simulation")
	}
	n, some := 2000, overloads([]string{"constant", "exponential", "bimodal"}, []int{1, 4, 100},
		[][2]time.Duration{{50, 300}, {100, 300}, {250, 1000}})
	some = slices.DeleteFunc(some, func(o overload) bool { // nothing more is promised
		return o.load > 1 && (o.slots == 1 || o.service == "bimodal")
	})
	if *allOverloads {
		var times [][2]time.Duration
		for _, mean := range []time.Duration{10, 50, 100, 250} {
			for _, patience := range []time.Duration{300, 1000, 10_000} {
				times = append(times, [2]time.Duration{mean, patience})
			}
		}
		n = 20_000
		some = overloads([]string{"constant", "uniform", "exponential", "bimodal"}, []int{1, 4, 16, 100}, times)
	}
	for _, o := range some {
		g := o.goodput(t, n)
		o.requireGoodput(t, g)
		if *allOverloads {
			fmt.Printf("%v: %4.0f%%, oracle %4.0f%%, plain %4.0f%%, lost %.2f%%, worse %.2f%%, wronged %.2f%%\n",
				o, 100*g.got, 100*g.oracle, 100*g.plain, 100*g.lost, 100*g.worse, 100*g.wronged)
		}
	}
}
