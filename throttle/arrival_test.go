package throttle_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/throttle"
)

func TestWhetherACallMayWait(t *testing.T) {
	const s, year = time.Second, 365 * 24 * time.Hour
	for name, tc := range map[string]struct {
		arrival throttle.Arrival
		want    throttle.Reason
	}{
		"for any time":                   {throttle.Arrival{Wait: year, MaxWait: -1, Left: throttle.Never}, ""},
		"just within its MaxWait":        {throttle.Arrival{Wait: s, MaxWait: s, Left: throttle.Never}, ""},
		"longer than its MaxWait":        {throttle.Arrival{Wait: s + 1, MaxWait: s, Left: throttle.Never}, throttle.WaitTooLong},
		"just within its deadline":       {throttle.Arrival{Wait: s, MaxWait: s, Left: s}, ""},
		"longer than its deadline":       {throttle.Arrival{Wait: s, MaxWait: s, Left: s - 1}, throttle.DeadlineTooClose},
		"longer than both":               {throttle.Arrival{Wait: s, MaxWait: s - 1, Left: s - 1}, throttle.WaitTooLong},
		"more than there can be":         {throttle.Arrival{Wait: throttle.Never, MaxWait: s, Left: s}, throttle.TooCostly},
		"tokens of 19 years are missing": {throttle.Arrival{Wait: s, MaxWait: -1, Left: throttle.Never, Ahead: 19 * year}, throttle.WaitTooLong},
	} {
		t.Run(name, func(t *testing.T) { require.Equal(t, tc.want, tc.arrival.Refusal()) })
	}
}
