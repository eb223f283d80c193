package adaptive_test

import (
	"fmt"
	"math"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/bulkhead/adaptive"
)

// The server of the simulations, unless they say otherwise.
const (
	workers  = 100
	service  = 20 * time.Millisecond
	capacity = float64(workers) / 0.02 // calls a second
)

// forSeeds runs a simulation with a third of the seeds, or with all of them by -fleets, side by
// side. With -short it runs none: TestStoriesOfTheController holds what it depends on. The race
// detector has nothing to find: a simulation is one goroutine.
func forSeeds(t *testing.T, seeds uint64, test func(t *testing.T, seed uint64)) {
	if raceDetector || testing.Short() {
		t.Skip("a long simulation of one goroutine")
	}
	if !*allFleets {
		seeds = max(1, seeds/3)
	}
	for seed := range seeds {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			t.Parallel()
			test(t, seed)
		})
	}
}

// unloadedP99 is that of calls that find an idle worker.
func unloadedP99(seed uint64) time.Duration {
	s := simulate(seed, adaptive.Config{}, 1_000_000, capacity/10, lognormal(service))
	s.run(time.Minute)
	return s.p99()
}

// A figure is what a simulation shows in one row of the acceptance table.
type figure struct {
	row, what string
	value     float64
	least     float64 // bounds; NaN means none
	most      float64
}

func atLeast(row, what string, value, least float64) figure {
	return figure{row, what, value, least, math.NaN()}
}

func atMost(row, what string, value, most float64) figure {
	return figure{row, what, value, math.NaN(), most}
}

func (f figure) holds() bool { return !(f.value < f.least) && !(f.value > f.most) }

func (f figure) String() string {
	if math.IsNaN(f.most) {
		return fmt.Sprintf("| %s | %s | >= %.4g | %.4g |", f.row, f.what, f.least, f.value)
	}
	return fmt.Sprintf("| %s | %s | <= %.4g | %.4g |", f.row, f.what, f.most, f.value)
}

// worse reports whether f is closer to its bound than g, or further beyond it.
func (f figure) worse(g figure) bool {
	if math.IsNaN(f.most) {
		return f.value < g.value
	}
	return f.value > g.value
}

var acceptance = []struct {
	seeds uint64
	run   func(seed uint64) []figure
}{
	{5, func(seed uint64) []figure {
		s := simulate(seed, adaptive.Config{}, workers, 0.5*capacity, lognormal(service))
		s.run(10 * time.Second)
		s.run(time.Minute)
		return []figure{atMost("load 0.5", "refused", s.refusedShare(), 0.005)}
	}},
	{5, func(seed uint64) []figure { // the limit that is right under overload moves with the capacity
		idle := float64(unloadedP99(seed))
		goodput := func(s *simulation) float64 {
			return float64(s.within(3*service)) / (30 * capacity * float64(s.workers) / workers)
		}
		s := simulate(seed, adaptive.Config{}, workers, 1.5*capacity, lognormal(service))
		s.run(3 * time.Second)
		s.run(30 * time.Second)
		row := "load 1.5, after 3 s"
		figures := []figure{
			atLeast(row, "limit, 1st percentile", float64(s.limitAt(0.01)), workers),
			atMost(row, "limit, 99th percentile", float64(s.limitAt(0.99)), workers*8/5),
			atLeast(row, "goodput", goodput(s), 0.97),
			atMost(row, "p99, of the unloaded", float64(s.p99())/idle, 1.25),
		}
		s.workers = 0.4 * workers
		s.run(5 * time.Second)
		s.run(30 * time.Second)
		row = "capacity falls to 0.4, after 5 s"
		figures = append(figures,
			atLeast(row, "goodput", goodput(s), 0.95),
			atMost(row, "p99, of the unloaded", float64(s.p99())/idle, 1.3))
		s.workers = workers
		s.run(5 * time.Second)
		s.run(30 * time.Second)
		return append(figures, atLeast("capacity back, after 5 s", "goodput", goodput(s), 0.97))
	}},
	{5, func(seed uint64) []figure {
		s := simulate(seed, adaptive.Config{}, workers, 0.4*capacity, lognormal(service))
		s.run(10 * time.Second)
		s.service = lognormal(2 * service)
		s.run(time.Minute)
		return []figure{atMost("load 0.4, service time doubles", "refused", s.refusedShare(), 0.0035)}
	}},
	{3, func(seed uint64) []figure {
		s := simulate(seed, adaptive.Config{Max: 100_000}, workers, 2*capacity, lognormal(service))
		return steady(s, "load 2 for 10 min")
	}},
	{3, func(seed uint64) []figure {
		cfg := adaptive.Config{Tolerance: 10, Max: 100_000}
		s := simulate(seed, cfg, workers, 2*capacity, lognormal(service))
		return steady(s, "load 2 for 10 min, Tolerance 10")
	}},
	{5, fewCallsOfTwoKinds("half are long", 0.5, 50*time.Millisecond, 350*time.Millisecond)},
	{5, fewCallsOfTwoKinds("a fifth is long", 0.8, 50*time.Millisecond, 450*time.Millisecond)},
	{5, fewCallsOfTwoKinds("a tenth is very long", 0.9, 20*time.Millisecond, time.Second)},
}

func steady(s *simulation, row string) []figure {
	s.run(50 * time.Second)
	s.run(10 * time.Second)
	early := float64(s.medianLimit())
	s.run(530 * time.Second)
	s.run(10 * time.Second)
	return []figure{atMost(row, "drift of the limit since minute 1", math.Abs(float64(s.medianLimit())/early-1), 0.25)}
}

func fewCallsOfTwoKinds(row string, short float64, shortTime, longTime time.Duration) func(seed uint64) []figure {
	return func(seed uint64) []figure {
		s := simulate(seed, adaptive.Config{}, 8, 32, bimodal(short, shortTime, longTime))
		s.run(10 * time.Second)
		s.run(5 * time.Minute)
		return []figure{atLeast("8 workers, 32 calls a second, "+row, "goodput",
			float64(s.within(3*longTime))/float64(s.arrived), 0.97)}
	}
}

// TestAdaptiveLimitMeetsItsAcceptanceTable prints the table of docs/decisions with the
// worst figure of all seeds; with -fleets, of all that the table is made from.
func TestAdaptiveLimitMeetsItsAcceptanceTable(t *testing.T) {
	var mu sync.Mutex
	worst := make([][]figure, len(acceptance))
	t.Run("rows", func(t *testing.T) {
		for i, row := range acceptance {
			forSeeds(t, row.seeds, func(t *testing.T, seed uint64) {
				figures := row.run(seed)
				mu.Lock()
				defer mu.Unlock()
				if worst[i] == nil {
					worst[i] = figures
				}
				for j, f := range figures {
					require.True(t, f.holds(), f.String())
					if f.worse(worst[i][j]) {
						worst[i][j] = f
					}
				}
			})
		}
	})
	var table strings.Builder
	for _, figures := range worst {
		for _, f := range figures {
			fmt.Fprintf(&table, "\n%v", f)
		}
	}
	t.Logf("worst of the seeds\n| load | figure | must be | is |\n|---|---|---|---|%s", table.String())
}

// The moment at which the capacity falls must not matter: it may be in a cohort or in
// a probe.
func TestAdaptiveFollowsCapacityAtAnyMoment(t *testing.T) {
	forSeeds(t, 30, func(t *testing.T, seed uint64) {
		s := simulate(1000+seed, adaptive.Config{}, workers, 1.5*capacity, lognormal(service))
		s.run(9*time.Second + time.Duration(seed)*93*time.Millisecond)
		s.workers = workers / 4
		s.run(5 * time.Second)
		s.run(10 * time.Second)
		require.GreaterOrEqual(t, float64(s.within(3*service)), 0.94*10*capacity/4)
	})
}

// Overload and slower work at once: the limit comes back to what the workers need.
func TestAdaptiveLearnsSlowerWorkUnderOverload(t *testing.T) {
	forSeeds(t, 5, func(t *testing.T, seed uint64) {
		s := simulate(seed, adaptive.Config{}, workers, 1.5*capacity, lognormal(service))
		s.run(13 * time.Second)
		s.service = lognormal(2 * service)
		s.run(3 * time.Second)
		s.run(4 * time.Second)
		require.GreaterOrEqual(t, s.medianLimit(), workers*9/10)
	})
}

// Calls become slower, and all take alike, as those of a server that hits a timeout of its
// own: that is no queue, and the limit stays what the workers need.
func TestAdaptiveLearnsUniformlySlowerWork(t *testing.T) {
	for _, load := range []float64{0.5, 1.5} {
		for _, slow := range []time.Duration{3, 5} {
			t.Run(fmt.Sprintf("load %v, %d times", load, slow), func(t *testing.T) {
				forSeeds(t, 3, func(t *testing.T, seed uint64) {
					s := simulate(seed, adaptive.Config{}, workers, load*capacity, lognormal(service))
					s.run(20 * time.Second)
					s.service = bimodal(1, slow*service, 0)
					s.run(10 * time.Second)
					s.run(10 * time.Second)
					require.GreaterOrEqual(t, float64(s.within(3*slow*service)), 0.95*10*capacity/float64(slow))
				})
			})
		}
	}
}

// Faster work: what is learned downward is confirmed by the next probe at once.
func TestAdaptiveLearnsFasterWorkUnderOverload(t *testing.T) {
	forSeeds(t, 5, func(t *testing.T, seed uint64) {
		s := simulate(seed, adaptive.Config{}, workers, 1.5*capacity, lognormal(service))
		s.run(20 * time.Second)
		s.service, s.rate = lognormal(service/20), 20*s.rate
		s.run(15 * time.Second)
		s.run(time.Second)
		require.LessOrEqual(t, s.medianLimit(), 2*workers)
		require.GreaterOrEqual(t, s.medianLimit(), workers*9/10)
	})
}

// The work becomes three times as slow, a little each second.
func TestAdaptiveFollowsDriftingServiceTime(t *testing.T) {
	for _, load := range []float64{0.6, 1.5} {
		t.Run(fmt.Sprint("load ", load), func(t *testing.T) {
			forSeeds(t, 3, func(t *testing.T, seed uint64) {
				s := simulate(seed, adaptive.Config{}, workers, load*capacity, lognormal(service))
				s.run(20 * time.Second)
				good, can := 0, 0.0
				for second := range 600 {
					now := time.Duration(float64(service) * math.Pow(3, float64(second)/600))
					s.service = lognormal(now)
					s.rate = load * workers / now.Seconds()
					s.run(time.Second)
					good += s.within(3 * now)
					can += min(load, 1) * workers / now.Seconds()
				}
				require.GreaterOrEqual(t, float64(good), 0.96*can)
			})
		})
	}
}

// A limit that is far too high at the start is found all the same: what is learned
// while calls wait at the server is unlearned.
func TestAdaptiveShrinksHighInitialLimit(t *testing.T) {
	forSeeds(t, 3, func(t *testing.T, seed uint64) {
		s := simulate(seed, adaptive.Config{Initial: 1000}, 20, 0.4*capacity, lognormal(service))
		s.run(time.Minute)
		s.run(20 * time.Second)
		require.LessOrEqual(t, s.medianLimit(), 40)
		require.GreaterOrEqual(t, s.medianLimit(), 20)
	})
}

// A mixture of latencies: a share of short ones, and long ones that take ratio times
// as long.
type mixture struct {
	ratio, share float64
	mean         time.Duration
}

func (m mixture) short() time.Duration {
	return time.Duration(float64(m.mean) / (m.share + (1-m.share)*m.ratio))
}

func (m mixture) long() time.Duration { return time.Duration(m.ratio * float64(m.short())) }

// goodput simulates calls of m at load for some minutes, and returns the share of those
// that could be answered within three times the long latency that were, and the median
// limit.
func (m mixture) goodput(seed uint64, workers int, load float64, d time.Duration) (share float64, limit int) {
	rate := load * float64(workers) / m.mean.Seconds()
	s := simulate(seed, adaptive.Config{}, workers, rate, bimodal(m.share, m.short(), m.long()))
	s.run(20 * time.Second)
	s.run(d)
	return float64(s.within(3*m.long())) / (float64(s.arrived) / max(1, load)), s.medianLimit()
}

func TestAdaptiveServesMixturesOfTwoLatencies(t *testing.T) {
	ratios := []float64{5, 10, 20, 50, 100, 200}
	shares := []float64{0.1, 0.3, 0.5, 0.7, 0.9}
	if !*allFleets {
		ratios, shares = []float64{5, 20, 200}, []float64{0.1, 0.5, 0.9}
	}
	for _, tc := range []struct {
		workers int
		mean    time.Duration
		load    float64
		seeds   uint64
		time    time.Duration
		least   float64 // goodput
		most    int     // median limit
	}{
		{workers: 100, mean: service, load: 0.6, seeds: 2, time: 20 * time.Second, least: 0.99, most: 1000},
		{workers: 100, mean: service, load: 1.5, seeds: 2, time: 20 * time.Second, least: 0.95, most: 160},
		{workers: 10, mean: service, load: 0.6, seeds: 3, time: 3 * time.Minute, least: 0.984, most: 1000},
		{workers: 100, mean: 5 * service, load: 0.6, seeds: 6, time: time.Minute, least: 0.99, most: 1000},
		{workers: 10, mean: service, load: 1.5, seeds: 3, time: 3 * time.Minute, least: 0.88, most: 50},
	} {
		t.Run(fmt.Sprintf("%d workers, mean %v, load %v", tc.workers, tc.mean, tc.load), func(t *testing.T) {
			forSeeds(t, tc.seeds, func(t *testing.T, seed uint64) {
				var table strings.Builder
				fmt.Fprint(&table, "share of short calls:")
				for _, share := range shares {
					fmt.Fprintf(&table, "%14.0f %%", 100*share)
				}
				for _, ratio := range ratios {
					fmt.Fprintf(&table, "\n1:%-19v", ratio)
					for _, share := range shares {
						goodput, limit := mixture{ratio, share, tc.mean}.goodput(seed, tc.workers, tc.load, tc.time)
						fmt.Fprintf(&table, "  %6.2f %% (%4d)", 100*goodput, limit)
						if goodput < tc.least || limit > tc.most {
							t.Errorf("1:%v, %v short: goodput %.4f, limit %d", ratio, share, goodput, limit)
						}
					}
				}
				t.Logf("goodput (median limit)\n%s", table.String())
			})
		})
	}
}

func TestAdaptiveServesEquallyLongCalls(t *testing.T) {
	forSeeds(t, 3, func(t *testing.T, seed uint64) {
		s := simulate(seed, adaptive.Config{}, workers, 1.5*capacity, bimodal(1, service, 0))
		s.run(10 * time.Second)
		s.run(time.Minute)
		require.GreaterOrEqual(t, float64(s.within(2*service)), 0.995*60*capacity)
	})
}

// One call in a hundred takes about a hundred times as long as most.
func TestAdaptiveServesCostlyTails(t *testing.T) {
	for _, tc := range []struct{ load, least float64 }{{0.6, 0.99}, {1.5, 0.93}} {
		t.Run(fmt.Sprint("load ", tc.load), func(t *testing.T) {
			forSeeds(t, 5, func(t *testing.T, seed uint64) {
				s := simulate(seed, adaptive.Config{}, workers, tc.load*capacity, varied(service, 5))
				s.run(20 * time.Second)
				s.run(time.Minute)
				require.GreaterOrEqual(t, float64(len(s.latencies)), tc.least*float64(s.arrived)/max(1, tc.load))
				require.LessOrEqual(t, s.medianLimit(), 2*workers)
			})
		})
	}
}

// The comment of AdaptiveLimit tells of servers that work on few calls at once.
func TestAdaptiveOfAServerWithOneWorker(t *testing.T) {
	for _, rate := range []float64{2, 20} {
		for _, load := range []float64{0.6, 1.5} {
			t.Run(fmt.Sprintf("%v a second, load %v", rate, load), func(t *testing.T) {
				forSeeds(t, 5, func(t *testing.T, seed uint64) {
					mean := time.Duration(load / rate * float64(time.Second))
					s := simulate(seed, adaptive.Config{}, 1, rate, lognormal(mean))
					s.run(2 * time.Minute)
					s.run(20 * time.Minute)
					busy := float64(len(s.latencies)) * mean.Seconds() / (20 * 60)
					t.Logf("busy %.3f, refused %.3f, limits %d, %d, %d", busy, s.refusedShare(), s.limitAt(0.05),
						s.medianLimit(), s.limitAt(0.95))
					if load < 1 {
						require.Less(t, s.refusedShare(), 0.03)
						return
					}
					require.GreaterOrEqual(t, busy, 0.8)
					require.GreaterOrEqual(t, s.medianLimit(), 2)
					require.LessOrEqual(t, s.medianLimit(), 20)
				})
			})
		}
	}
}
