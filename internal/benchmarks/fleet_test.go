package benchmarks

import (
	stdheap "container/heap"
	"context"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/failsafe-go/failsafe-go/adaptivelimiter"

	"github.com/go-resilience/resilience/bulkhead/adaptive"
)

var fleets = flag.Bool("fleets", false, "simulate fleets of adaptive limits")

// An adaptiveLimit admits a call or not, and is told when the call has ended.
type adaptiveLimit func() (done func(), ok bool)

var adaptiveLimits = []struct {
	name string
	make func() adaptiveLimit
}{
	{"resilience", func() adaptiveLimit {
		b := adaptive.New(adaptive.Config{})
		return func() (func(), bool) {
			done, err := b.Begin(context.Background())
			return func() { done(nil) }, err == nil
		}
	}},
	{"failsafe-go", func() adaptiveLimit {
		l := adaptivelimiter.NewWithDefaults[any]()
		return func() (func(), bool) {
			permit, ok := l.TryAcquirePermit()
			return func() { permit.Record() }, ok
		}
	}},
}

// TestFleets prints a table of docs/decisions/adaptive-limit.md: goodput of clients of one server
// of 40 workers (20 ms, log-normal), in virtual time.
func TestFleets(t *testing.T) {
	if !*fleets {
		t.Skip("a table, with -fleets")
	}
	table := "worst of the seeds\n| clients | load | resilience | failsafe-go |\n|---|---|---|---|"
	for _, clients := range []int{1, 2, 4, 10, 50} {
		for _, loads := range [][]float64{{0.6}, {1.5}, {2}, {0.5, 2}} {
			table += fmt.Sprintf("\n| %d | %v |", clients, loads)
			for _, impl := range adaptiveLimits {
				worst := math.Inf(1)
				for seed := range uint64(4) {
					synctest.Test(t, func(*testing.T) { worst = min(worst, fleetGoodput(seed, clients, loads, impl.make)) })
				}
				table += fmt.Sprintf(" %.3f |", worst)
			}
		}
	}
	t.Log(table)
}

// fleetGoodput returns the answers within 100 ms, as a part of what the server can do,
// from 10 s after the last of the loads has begun, for 40 s. The loads before take 20 s.
func fleetGoodput(seed uint64, clients int, loads []float64, newLimit func() adaptiveLimit) float64 {
	const workers, service = 40, 0.02
	rng := rand.New(rand.NewPCG(seed, 5))
	limits := make([]adaptiveLimit, clients)
	for i := range limits {
		limits[i] = newLimit()
	}
	var queue, running fleetCalls
	good := 0
	time.Sleep(time.Duration(seed) * 1370 * time.Millisecond)
	for i, load := range loads {
		start := time.Now()
		length := 20 * time.Second
		if i == len(loads)-1 {
			length = 50 * time.Second
		}
		pause := func() time.Duration { return time.Duration(rng.ExpFloat64() * service / workers / load * 1e9) }
		for arrival := start.Add(pause()); time.Since(start) < length; {
			if len(running) > 0 && running[0].ends.Before(arrival) {
				c := stdheap.Pop(&running).(fleetCall)
				time.Sleep(time.Until(c.ends))
				c.done()
				if length == 50*time.Second && time.Since(start) >= 10*time.Second && time.Since(c.start) <= 100*time.Millisecond {
					good++
				}
			} else {
				time.Sleep(time.Until(arrival))
				arrival = arrival.Add(pause())
				if done, ok := limits[rng.IntN(clients)](); ok {
					queue = append(queue, fleetCall{start: time.Now(), done: done})
				}
			}
			for len(queue) > 0 && len(running) < workers {
				c := queue[0]
				queue = queue[1:]
				sigma := math.Sqrt(math.Log(1.25))
				c.ends = time.Now().Add(time.Duration(service * 1e9 * math.Exp(sigma*rng.NormFloat64()-sigma*sigma/2)))
				stdheap.Push(&running, c)
			}
		}
	}
	return float64(good) / (40 * workers / service * min(1, loads[len(loads)-1]))
}

type fleetCall struct {
	start, ends time.Time
	done        func()
}

type fleetCalls []fleetCall

func (f fleetCalls) Len() int           { return len(f) }
func (f fleetCalls) Less(i, j int) bool { return f[i].ends.Before(f[j].ends) }
func (f fleetCalls) Swap(i, j int)      { f[i], f[j] = f[j], f[i] }
func (f *fleetCalls) Push(c any)        { *f = append(*f, c.(fleetCall)) }
func (f *fleetCalls) Pop() any {
	last := len(*f) - 1
	c := (*f)[last]
	*f = (*f)[:last]
	return c
}
