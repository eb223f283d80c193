//go:build !race

// Each simulation is one goroutine: the race detector finds nothing in it, and
// makes it slow.

package bulkhead_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/bulkhead"
)

// The server of the simulations, unless they say otherwise.
const (
	workers  = 100
	service  = 20 * time.Millisecond
	capacity = float64(workers) / 0.02 // calls a second
)

func forSeeds(t *testing.T, seeds uint64, test func(t *testing.T, seed uint64)) {
	for seed := range seeds {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			t.Parallel()
			test(t, seed)
		})
	}
}

// unloadedP99 is that of calls that find an idle worker.
func unloadedP99(seed uint64) time.Duration {
	s := simulate(seed, bulkhead.Adaptive{}, 1_000_000, capacity/10, lognormal(service))
	s.run(time.Minute)
	return s.p99()
}

func TestAdaptiveRefusesNobodyAtHalfLoad(t *testing.T) {
	forSeeds(t, 5, func(t *testing.T, seed uint64) {
		s := simulate(seed, bulkhead.Adaptive{}, workers, 0.5*capacity, lognormal(service))
		s.run(10 * time.Second)
		s.run(time.Minute)
		require.Less(t, s.refusedShare(), 0.005)
	})
}

// The limit that is right under overload moves with the capacity.
func TestAdaptiveFollowsTheCapacity(t *testing.T) {
	forSeeds(t, 5, func(t *testing.T, seed uint64) {
		idle := float64(unloadedP99(seed))
		s := simulate(seed, bulkhead.Adaptive{}, workers, 1.5*capacity, lognormal(service))
		s.run(3 * time.Second)
		s.run(30 * time.Second)
		slices.Sort(s.limits)
		require.GreaterOrEqual(t, s.limits[len(s.limits)/100], workers)
		require.LessOrEqual(t, s.limits[len(s.limits)*99/100], workers*8/5)
		require.GreaterOrEqual(t, float64(s.within(3*service)), 0.95*30*capacity)
		require.LessOrEqual(t, float64(s.p99()), 1.25*idle)

		s.workers = 0.4 * workers
		s.run(5 * time.Second)
		s.run(30 * time.Second)
		require.GreaterOrEqual(t, float64(s.within(3*service)), 0.93*30*0.4*capacity)
		require.LessOrEqual(t, float64(s.p99()), 1.3*idle)

		s.workers = workers
		s.run(5 * time.Second)
		s.run(30 * time.Second)
		require.GreaterOrEqual(t, float64(s.within(3*service)), 0.95*30*capacity)
	})
}

// The moment at which the capacity falls must not matter: it may be in a window or
// in a probe.
func TestAdaptiveFollowsTheCapacityAtAnyMoment(t *testing.T) {
	for i := range 30 {
		after := 9*time.Second + time.Duration(i)*93*time.Millisecond
		t.Run(after.String(), func(t *testing.T) {
			t.Parallel()
			s := simulate(1000+uint64(i), bulkhead.Adaptive{}, workers, 1.5*capacity, lognormal(service))
			s.run(after)
			s.workers = workers / 4
			s.run(5 * time.Second)
			s.run(10 * time.Second)
			require.GreaterOrEqual(t, float64(s.within(3*service)), 0.93*10*capacity/4)
		})
	}
}

func TestAdaptiveLetsSlowerWorkPass(t *testing.T) {
	forSeeds(t, 5, func(t *testing.T, seed uint64) {
		s := simulate(seed, bulkhead.Adaptive{}, workers, 0.4*capacity, lognormal(service))
		s.run(10 * time.Second)
		s.service = lognormal(2 * service)
		s.run(time.Minute)
		require.Less(t, s.refusedShare(), 0.01)
	})
}

// Overload and slower work at once: the limit comes back to what the workers need.
func TestAdaptiveLearnsSlowerWorkUnderOverload(t *testing.T) {
	forSeeds(t, 5, func(t *testing.T, seed uint64) {
		s := simulate(seed, bulkhead.Adaptive{}, workers, 1.5*capacity, lognormal(service))
		s.run(13 * time.Second)
		s.service = lognormal(2 * service)
		s.run(3 * time.Second)
		s.run(4 * time.Second)
		require.GreaterOrEqual(t, s.medianLimit(), workers*9/10)
	})
}

func TestAdaptiveDoesNotDriftUnderSteadyOverload(t *testing.T) {
	forSeeds(t, 3, func(t *testing.T, seed uint64) {
		s := simulate(seed, bulkhead.Adaptive{}, workers, 2*capacity, lognormal(service))
		s.run(50 * time.Second)
		s.run(10 * time.Second)
		early := float64(s.medianLimit())
		s.run(530 * time.Second)
		s.run(10 * time.Second)
		require.InEpsilon(t, early, float64(s.medianLimit()), 0.25)
	})
}

// Calls that run out of time in a probe ended early, and say nothing about an idle
// server.
func TestAProbeDoesNotLearnFromCallsThatRanOutOfTime(t *testing.T) {
	c := bulkhead.NewController(bulkhead.Adaptive{})
	var now time.Duration
	round := func(latency time.Duration, err error) {
		calls := make([]bulkhead.Call, c.Limit())
		for i := range calls {
			calls[i] = c.Begin(now, i+1)
		}
		now += latency
		for _, call := range calls {
			c.End(call, now, err)
		}
	}
	for !c.Probing() {
		round(service, nil)
	}
	require.InEpsilon(t, service, c.Base(), 0.001)
	for c.Probing() {
		round(service/4, context.DeadlineExceeded)
	}
	round(service, nil) // the last samples have ended
	require.InEpsilon(t, service, c.Base(), 0.001)
}

func TestAdaptiveServesFewCallsOfTwoKinds(t *testing.T) {
	for _, tc := range []struct {
		name        string
		probability float64 // of the short ones
		short, long time.Duration
	}{
		{"half and half", 0.5, 50 * time.Millisecond, 350 * time.Millisecond},
		{"a fifth is long", 0.8, 50 * time.Millisecond, 450 * time.Millisecond},
		{"a tenth is very long", 0.9, 20 * time.Millisecond, time.Second},
	} {
		t.Run(tc.name, func(t *testing.T) {
			forSeeds(t, 5, func(t *testing.T, seed uint64) {
				s := simulate(seed, bulkhead.Adaptive{}, 8, 32, bimodal(tc.probability, tc.short, tc.long))
				s.run(10 * time.Second)
				s.run(5 * time.Minute)
				require.GreaterOrEqual(t, float64(s.within(3*tc.long)), 0.9*float64(s.arrived))
			})
		})
	}
}
