package bulkhead_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/bulkhead"
)

func TestWhetherACallMayWait(t *testing.T) {
	for name, tc := range map[string]struct {
		arrival bulkhead.Arrival
		want    bulkhead.Reason
	}{
		"room":                                  {bulkhead.Arrival{Cost: 1, Most: 1, Own: true}, ""},
		"as many wait as may":                   {bulkhead.Arrival{Full: true, Cost: 2, Most: 1, Late: true}, bulkhead.QueueFull},
		"more than there can be":                {bulkhead.Arrival{Cost: 2, Most: 1, Late: true}, bulkhead.TooCostly},
		"the queue is too slow for its MaxWait": {bulkhead.Arrival{Cost: 1, Most: 1, Late: true, Own: true}, bulkhead.WaitTooLong},
		"the queue is too slow for its ctx":     {bulkhead.Arrival{Cost: 1, Most: 1, Late: true}, bulkhead.DeadlineTooClose},
	} {
		t.Run(name, func(t *testing.T) { require.Equal(t, tc.want, tc.arrival.Refusal()) })
	}
}

// A pace is known after two batches of eight slots, and is that of the faster.
func TestPace(t *testing.T) {
	const ms = time.Millisecond
	var p bulkhead.Pace
	p.Restart(10 * ms)
	for _, c := range []struct {
		n    int
		at   time.Duration // when they are handed on
		want time.Duration // for 16 slots: 8 times that of one
	}{
		{7, 17 * ms, 0},
		{1, 18 * ms, 0},      // 1 ms each
		{4, 30 * ms, 0},      // no batch yet
		{4, 34 * ms, 8 * ms}, // 2 ms each
		{16, 82 * ms, 16 * ms},
		{7, 100 * ms, 16 * ms},
		{1, 162 * ms, 24 * ms}, // a pause
	} {
		p.Handed(c.n, c.at)
		require.Equal(t, c.want, p.Least(16), c.at)
	}
	for n, want := range map[int]time.Duration{-1: 0, 0: 0, 4: 0, 9: 9 * ms, 25: 45 * ms} {
		require.Equal(t, want, p.Least(n), n)
	}
	p.Restart(200 * ms)
	require.Zero(t, p.Least(100), "nothing is known of the next queue")
}
