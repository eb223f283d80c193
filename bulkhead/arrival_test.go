package bulkhead_test

import (
	"testing"

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
