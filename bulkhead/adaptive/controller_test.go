package adaptive_test

import (
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/bulkhead/adaptive"
)

// A driver makes the calls of a controller, round by round.
type driver struct {
	*adaptive.Controller
	now time.Duration
}

func drive(cfg adaptive.Config) *driver {
	return &driver{Controller: adaptive.NewController(cfg), now: 9 * time.Second} // the first probe is common
}

// begin starts n calls at once.
func (d *driver) begin(n int) []adaptive.Call {
	calls := make([]adaptive.Call, n)
	for i := range calls {
		calls[i] = d.Begin(d.now, i+1)
	}
	return calls
}

func (d *driver) end(calls []adaptive.Call, err error) {
	for _, c := range calls {
		d.End(c, d.now, err)
	}
}

// round makes n calls at once that all take latency.
func (d *driver) round(n int, latency time.Duration, err error) {
	calls := d.begin(n)
	d.now += latency
	d.end(calls, err)
}

// untilProbe uses the whole limit until it is lowered for a probe.
func (d *driver) untilProbe(latency time.Duration) {
	for !d.Probing() {
		d.round(d.Limit(), latency, nil)
	}
}

// throughProbe makes calls, which take latency, until the probe has been concluded.
func (d *driver) throughProbe(latency time.Duration, err error) {
	for d.Probing() {
		d.round(d.Limit(), latency, err)
	}
	d.round(1, latency, err)
	d.now += 10 * time.Second
	d.round(1, latency, err)
}

// While the base is not known, work that is cut off does not change the usual latency, whether calls take more or less
// time than a cohort.
func TestWorkCutOffBeforeBaseIsKnown(t *testing.T) {
	for _, latency := range []time.Duration{10 * time.Millisecond, 2 * time.Second} {
		d := drive(adaptive.Config{})
		d.CutOff() // before the first call ends
		for range 20 {
			require.Zero(t, d.Base())
			calls := d.begin(20)
			d.now += latency
			d.end(calls[:11], nil)
			for range 9 {
				d.CutOff()
			}
			d.end(calls[11:], errors.New("failed"))
			if d.Base() > 0 {
				break
			}
		}
		require.InDelta(t, latency, d.Base(), 100, "%v", latency)
		require.InDelta(t, latency, d.Usual(), 100, "%v", latency)
	}
}

// While no call has ended, work that is cut off has no latency that could count.
func TestWorkCutOffBeforeFirstCallEnds(t *testing.T) {
	d := drive(adaptive.Config{Initial: 60})
	d.CutOff()
	d.round(60, service, nil)
	for d.Usual() == 100*time.Millisecond { // until the first cohort is complete
		d.round(60, service, nil)
	}
	require.Equal(t, service, d.Usual())
}

// Work that is cut off lowers the limit as soon as its latency can be estimated: before the base is known, from the
// calls of its cohort that have ended, and later also from the base.
func TestWorkCutOffLowersLimit(t *testing.T) {
	limitAfter := func(known bool, cutOff int) int {
		d := drive(adaptive.Config{Initial: 60, Min: 10})
		d.round(60, 200*time.Millisecond, nil)
		for known && d.Base() == 0 {
			d.round(60, 200*time.Millisecond, nil)
		}
		calls := d.begin(60)
		d.now += 200 * time.Millisecond
		if !known {
			d.end(calls[:1], nil)
			calls = calls[1:]
		}
		for range cutOff {
			d.CutOff()
		}
		d.end(calls, nil)
		return d.Limit()
	}
	for _, known := range []bool{true, false} {
		require.Less(t, limitAfter(known, 100), limitAfter(known, 0), known)
	}
}

// Calls of a probe that hang count as long as they have run so far.
func TestProbeLearnsFromRunningCalls(t *testing.T) {
	d := drive(adaptive.Config{})
	d.untilProbe(service)
	d.throughProbe(service, nil) // a base that is new does not rise
	d.untilProbe(service)
	for low := d.Limit(); d.Limit() == low; d.now += service {
		d.begin(low) // and never end
	}
	require.False(t, d.Probing(), "the limit is back although the probe's calls still run")
	d.now += 10 * service
	d.round(1, service, nil)
	require.InEpsilon(t, service*3/2, d.Base(), 0.01)
}

func TestProbeDistinguishesQueueFromSlowerWork(t *testing.T) {
	double := math.Log(2)
	for name, tc := range map[string]struct {
		base, rise, spread float64
		queue              bool
	}{
		"twice the work":                        {base: 0.2, rise: double, spread: 0.2},
		"twice the work, by few samples":        {base: 0.2, rise: double, spread: 0.16},
		"a wait as long as the work, all alike": {base: 0.2, rise: double, spread: 0.05, queue: true},
		"a wait that differs":                   {base: 0.2, rise: double, spread: 0.14, queue: true},
		"a long wait":                           {base: 0.2, rise: 3 * double, spread: 0.003, queue: true},
		"work that all takes alike now":         {base: 0.2, rise: double, spread: 0.01},
		"work that always took alike":           {base: 0.005, rise: double, spread: 0.002},
		"faster":                                {base: 0.2, rise: -double, spread: 0.05},
		"a little faster, and more alike":       {base: 0.2, rise: -0.05, spread: 0.14},
	} {
		t.Run(name, func(t *testing.T) {
			require.Equal(t, tc.queue, adaptive.IsQueueing(17, tc.base, 17+tc.rise, tc.spread))
		})
	}
}

// Whatever has made the limit shrink below what streams hold, it may grow again until the next
// call fits: also in a probe, after one, and after Updates.
func TestLimitRecoversNextToStreams(t *testing.T) {
	type running struct {
		adaptive.Call
		until time.Duration
	}
	grown, probes := 0, 0
	for seed := range uint64(200) {
		rng := rand.New(rand.NewPCG(seed, 17))
		cfg := adaptive.Config{Initial: 150, Max: 200}
		d := drive(cfg)
		streams := 1 + rng.IntN(140)
		d.begin(streams)
		latency, late := service, 0.0
		var calls []running
		for step := range 2000 {
			if step%100 == 99 {
				latency, late = service*time.Duration(1+rng.IntN(20)), rng.Float64()
			}
			for rng.IntN(50) == 0 {
				cfg.Tolerance = 0.1 + rng.Float64()
				d.Update(d.now, cfg)
			}
			if len(calls) == 0 && d.Limit() <= streams {
				d.now += time.Minute
				d.MakeRoom(d.now, streams)
				require.Greater(t, d.Limit(), streams, "seed %d, step %d", seed, step)
				if grown++; d.Probing() {
					probes++
				}
			}
			for len(calls) < min(60, d.Limit()-streams) {
				c := d.Begin(d.now, streams+len(calls)+1)
				calls = append(calls, running{c, d.now + latency/2 + time.Duration(rng.Int64N(int64(latency)))})
			}
			d.now += latency / 2
			calls = slices.DeleteFunc(calls, func(c running) bool {
				if d.now < c.until {
					return false
				}
				var err error
				if rng.Float64() < late {
					err = context.DeadlineExceeded
				}
				d.End(c.Call, d.now, err)
				return true
			})
		}
	}
	require.Greater(t, grown, 1000)
	require.Greater(t, probes, 1000)
}

// What the limit was lately is not what it was at first.
func TestRoomIsMadeUpToRecentLimit(t *testing.T) {
	d := drive(adaptive.Config{Initial: 5, Max: 40})
	for range 100 {
		d.round(d.Limit(), service, nil)
	}
	require.Equal(t, 40, d.Limit())
	for range 100 {
		if d.Limit() < 40 {
			break
		}
		d.round(40, 4*service, nil)
	}
	require.Less(t, d.Limit(), 40)
	d.now += time.Minute
	d.MakeRoom(d.now, 35)
	require.Equal(t, 36, d.Limit())
}

// A limit below what streams hold grows for one call, and for the next one only if no call
// has begun or ended for another while.
func TestLimitGrowsPastStreamsCallByCall(t *testing.T) {
	d := drive(adaptive.Config{Initial: 20, Max: 20})
	d.untilProbe(service)
	lowered := d.Limit()
	require.Less(t, lowered, 16)
	wants := func(after time.Duration, n, limit int) {
		d.now += after
		d.MakeRoom(d.now, n-1)
		require.Equal(t, limit, d.Limit())
	}
	const almost = 10*service - 1
	wants(almost, 16, lowered)
	wants(1, 16, 16)
	wants(0, 17, 16)
	wants(almost, 17, 16)
	call := d.begin(1)
	wants(almost, 17, 16)
	d.end(call, nil)
	wants(almost, 17, 16)
	wants(1, 17, 17)
	wants(time.Second, 21, 17)
	wants(0, 20, 20) // what it was lately
}
