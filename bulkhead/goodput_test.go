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

var allOverloads = flag.Bool("overloads", false, "simulate every overload and print its goodput, not only a few")

// An overload sends calls at random, a Poisson process, to a service that has as many workers as the bulkhead has slots.
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
	return fmt.Sprintf("load %.1f, %3d slots, %-11s %5v, %-8s after %5v", o.load, o.slots, o.service, o.mean, how, o.patience)
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

// calls returns the calls of the overload for 10 s or for 20,000 calls, whichever is longer, up to 100 s.
func (o overload) calls() (calls []simulatedCall, span time.Duration) {
	rng := rand.New(rand.NewPCG(3, 9))
	span = min(max(10*time.Second, time.Duration(20_000/(o.capacity()*o.load)*1e9)), 100*time.Second)
	for at := time.Duration(0); at < span; {
		calls = append(calls, simulatedCall{arrival: at, service: time.Duration(services[o.service](rng) * float64(o.mean))})
		at += time.Duration(rng.ExpFloat64() / (o.capacity() * o.load) * 1e9)
	}
	return calls, span
}

// run sends calls to b in a bubble, and returns what became of them.
func (o overload) run(t *testing.T, calls []simulatedCall) []simulatedCall {
	calls = slices.Clone(calls)
	synctest.Test(t, func(t *testing.T) {
		b := bulkhead.New(bulkhead.Config{Limit: o.slots, MaxWait: time.Second})
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

// oracle serves calls as a queue does that knows how long each takes: oldest first, without those that cannot be served
// in time.
func (o overload) oracle(calls []simulatedCall) []simulatedCall {
	calls = slices.Clone(calls)
	free := make([]time.Duration, o.slots) // when each slot becomes free
	for i := range calls {                 // callers are equally patient, so the oldest has the earliest deadline
		c := &calls[i]
		slot := 0
		for s := range free {
			if free[s] < free[slot] {
				slot = s
			}
		}
		end := max(free[slot], c.arrival) + c.service
		if end <= c.arrival+o.patience {
			c.fate, free[slot] = served, end
		}
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

// goodput returns the calls served as a share of the capacity: those of all, and those of an oracle; and the share of
// the calls that were refused although the oracle served them.
func (o overload) goodput(t *testing.T) (got, oracle, wronged float64) {
	calls, span := o.calls()
	is, best := o.run(t, calls), o.oracle(calls)
	for i := range calls {
		if is[i].fate == refused && best[i].fate == served {
			wronged++
		}
	}
	capacity := o.capacity() * span.Seconds()
	return float64(count(is, served)) / capacity, float64(count(best, served)) / capacity, wronged / float64(len(calls))
}

func overloads() (all []overload) {
	for _, load := range []float64{0.9, 1.2, 2, 5} {
		for _, slots := range []int{1, 4, 16, 100} {
			for _, service := range []string{"constant", "uniform", "exponential", "bimodal"} {
				for _, mean := range []time.Duration{10, 50, 100, 250} {
					for _, patience := range []time.Duration{300, 1000, 10_000} {
						for _, deadline := range []bool{true, false} {
							all = append(all, overload{load, slots, service, mean * time.Millisecond, patience * time.Millisecond, deadline})
						}
					}
				}
			}
		}
	}
	return all
}

func TestGoodputTable(t *testing.T) {
	if !*allOverloads {
		t.Skip("with -overloads")
	}
	for _, o := range overloads() {
		t.Run("", func(t *testing.T) {
			got, oracle, wronged := o.goodput(t)
			mark := ""
			if o.load > 1 && o.slots >= 4 && 3*o.mean <= o.patience && got < 0.8 {
				mark = "LOW"
			}
			if o.load < 1 && got < oracle-0.015 {
				mark = "LOST"
			}
			fmt.Printf("%v: %4.0f%%, oracle %4.0f%%, wronged %.2f%% %s\n", o, 100*got, 100*oracle, 100*wronged, mark)
		})
	}
	require.True(t, true)
}
