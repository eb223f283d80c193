package adaptive_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/bulkhead/adaptive"
)

var writeStories = flag.Bool("stories", false, "write testdata/controller.txt anew")

// A server answers calls for as long as a story goes on: n calls that come at once, in each
// round. It returns how long they take.
type server func(at time.Duration, n int) []time.Duration

// alike takes the same for all calls.
func alike(latency time.Duration) server {
	return func(_ time.Duration, n int) []time.Duration { return slices.Repeat([]time.Duration{latency}, n) }
}

// crew is a number of workers who do one call after the other, which take the latencies in turn;
// wait is that of the calls of others before them.
func crew(workers int, wait time.Duration, latencies ...time.Duration) server {
	return func(_ time.Duration, n int) []time.Duration {
		busy, took := make([]time.Duration, workers), make([]time.Duration, n)
		for i := range took {
			first := 0
			for w := range busy {
				if busy[w] < busy[first] {
					first = w
				}
			}
			busy[first] += latencies[i%len(latencies)]
			took[i] = wait + busy[first]
		}
		return took
	}
}

// from changes to another server at a time.
func from(at time.Duration, before, after server) server {
	return func(now time.Duration, n int) []time.Duration {
		if now < at {
			return before(now, n)
		}
		return after(now, n)
	}
}

// TestStoriesOfTheController holds what the controller makes of each cohort of calls, in
// numbers. A change of the controller is seen in testdata/controller.txt, which -stories
// writes.
func TestStoriesOfTheController(t *testing.T) {
	if raceDetector {
		t.Skip("one goroutine")
	}
	const ms = time.Millisecond
	broken := errors.New("broken")
	mixed := []time.Duration{5 * ms, 10 * ms, 5 * ms, 40 * ms, 7 * ms, 8 * ms, 20 * ms}
	var b strings.Builder
	for _, s := range []struct {
		name    string
		cfg     adaptive.Config
		part    float64 // of the limit is used in each round
		server  server
		err     func(i int) error
		between func(d *driver, round int)
		until   time.Duration
	}{
		{name: "a server with room for all", part: 1, server: alike(10 * ms), until: 12 * time.Second},
		{name: "little use", cfg: adaptive.Config{Initial: 50, Min: 5}, part: 0.2, server: alike(20 * ms),
			until: 11 * time.Second},
		{name: "hardly any use of a limit that has grown", cfg: adaptive.Config{Initial: 10}, part: 1,
			server: alike(10 * ms), until: 14 * time.Second,
			between: func(d *driver, round int) {
				if d.now > 12*time.Second {
					d.round(3, 10*ms, nil)
				}
			}},
		{name: "thirty workers", part: 1, server: crew(30, 0, 10*ms), until: 25 * time.Second},
		{name: "thirty workers, mixed work", part: 1, server: crew(30, 0, mixed...), until: 35 * time.Second},
		{name: "work that becomes three times slower", part: 1, until: 40 * time.Second,
			server: from(15*time.Second, crew(40, 0, mixed...), crew(40, 0, 15*ms, 30*ms, 15*ms, 120*ms, 21*ms, 24*ms, 60*ms))},
		{name: "work that becomes faster", part: 1, until: 25 * time.Second,
			server: from(15*time.Second, crew(20, 0, 20*ms, 45*ms), crew(20, 0, 5*ms, 11*ms))},
		{name: "the queue of others", part: 1, until: 35 * time.Second,
			server: from(15*time.Second, crew(20, 0, mixed...), crew(20, 40*ms, mixed...))},
		{name: "the queue of others while the base is new", cfg: adaptive.Config{Min: 20}, part: 1, until: 11 * time.Second,
			server: from(9500*ms, crew(1000, 0, mixed...), crew(1000, 40*ms, mixed...))},
		{name: "work that takes all alike, and longer", part: 1, until: 35 * time.Second,
			server: from(15*time.Second, crew(20, 0, mixed...), alike(60*ms))},
		{name: "a wait that is added to all work", part: 1, until: 45 * time.Second,
			server: from(15*time.Second, crew(1000, 0, mixed...),
				from(35*time.Second, crew(1000, 40*ms, mixed...), crew(1000, 0, mixed...)))},
		{name: "fewer workers", part: 1, until: 20 * time.Second,
			server: from(15*time.Second, crew(60, 0, 10*ms), crew(12, 0, 10*ms))},
		{name: "half used, and slower", part: 0.5, until: 18 * time.Second,
			server: from(12*time.Second, alike(20*ms), alike(60*ms))},
		{name: "half used, and a little slower", part: 0.5, until: 13 * time.Second,
			server: from(12*time.Second, alike(20*ms), alike(21*ms))},
		{name: "most of it used, and slower", part: 0.8, until: 14 * time.Second,
			server: from(12*time.Second, alike(20*ms), alike(60*ms))},
		{name: "half used, and faster", part: 0.5, until: 25 * time.Second,
			server: from(12*time.Second, alike(20*ms), alike(5*ms))},
		{name: "calls that take no time", part: 1, until: 9200 * ms, server: alike(0),
			between: func(d *driver, round int) { d.now += ms }},
		{name: "one in three runs out of time", part: 1, server: alike(10 * ms), until: 14 * time.Second,
			err: func(i int) error {
				return map[bool]error{true: context.DeadlineExceeded}[i%3 == 0]
			}},
		{name: "out of time from the start, then well", part: 1, until: 16 * time.Second, server: alike(30 * ms),
			err: func(i int) error { return context.DeadlineExceeded }},
		{name: "errors that say nothing", part: 1, server: alike(10 * ms), until: 12 * time.Second,
			err: func(i int) error { return map[bool]error{true: broken}[i%2 == 0] }},
		{name: "slow calls", cfg: adaptive.Config{Tolerance: 1}, part: 1, server: crew(30, 0, 900*ms, 1100*ms),
			until: 300 * time.Second},
		{name: "calls that hang", cfg: adaptive.Config{Initial: 60, Max: 60}, part: 1, server: alike(10 * ms),
			until: 16 * time.Second,
			between: func(d *driver, round int) {
				if d.now > 13*time.Second {
					d.begin(20)
					d.now += 30 * ms
				}
			}},
		{name: "settings that change", part: 1, server: crew(30, 0, mixed...), until: 24 * time.Second,
			between: func(d *driver, round int) {
				switch {
				case round == 60:
					d.Update(d.now, adaptive.Config{Tolerance: 0.5, Max: 50})
				case round == 150:
					d.Update(d.now, adaptive.Config{Tolerance: 0.5, Max: 9})
				case round == 160:
					d.Update(d.now, adaptive.Config{Tolerance: 0.5, Max: 50})
				case round > 200 && d.Probing():
					d.Update(d.now, adaptive.Config{Tolerance: 0.25, Max: 40 + round%2})
				}
			}},
	} {
		fmt.Fprintf(&b, "# %s\n", s.name)
		d := drive(s.cfg)
		tell := func() {
			if line, ok := d.Told(d.now); ok {
				fmt.Fprintln(&b, line)
			}
		}
		for round := 0; d.now < s.until; round++ {
			calls := d.begin(max(1, int(s.part*float64(d.Limit()))))
			took := s.server(d.now, len(calls))
			order := make([]int, len(calls))
			for i := range order {
				order[i] = i
			}
			slices.SortStableFunc(order, func(i, j int) int { return int(took[i] - took[j]) })
			begun := d.now
			for _, i := range order {
				d.now = begun + took[i]
				var err error
				if s.err != nil {
					err = s.err(i)
				}
				d.end(calls[i:i+1], err)
				tell()
			}
			if s.between != nil {
				s.between(d, round)
				tell()
			}
		}
	}
	const file = "testdata/controller.txt"
	if *writeStories {
		require.NoError(t, os.WriteFile(file, []byte(b.String()), 0o644))
	}
	want, err := os.ReadFile(file)
	require.NoError(t, err)
	wants, gots := strings.Split(string(want), "\n"), strings.Split(b.String(), "\n")
	for i := range min(len(wants), len(gots)) {
		require.Equal(t, wants[i], gots[i], "line %d", i+1)
	}
	require.Len(t, gots, len(wants))
}
