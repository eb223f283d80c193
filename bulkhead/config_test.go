package bulkhead_test

import (
	"context"
	"math"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/bulkhead"
)

func zero(context.Context) int { return 0 }

func TestValidateNamesInvalidFields(t *testing.T) {
	type config = bulkhead.Config
	for name, tc := range map[string]struct {
		cfg  config
		want string
	}{
		"no limit":            {config{}, "bulkhead.Config.Limit is 0: must be 1 to 1073741823"},
		"negative limit":      {config{Limit: -1}, "Limit is -1"},
		"huge limit":          {config{Limit: 1 << 30}, "Limit is 1073741824"},
		"negative wait":       {config{Limit: 1, MaxWait: -2}, "MaxWait is -2ns: must be 0 (for no wait) or more, or"},
		"negative queue":      {config{Limit: 1, MaxWait: -1, Queue: -1}, "Queue is -1: must be 0 (for 1000) to"},
		"share without wait":  {config{Limit: 1, Share: shareOf}, "Share is set: must be nil where MaxWait is 0"},
		"queue without wait":  {config{Limit: 1, Queue: 5}, "Queue is 5: must be 0 where MaxWait is 0: no call waits"},
		"many levels":         {config{Limit: 1, Levels: 1001, Priority: zero}, "Levels is 1001: must be 0 (for 1) to 1000"},
		"one level, priority": {config{Limit: 1, Levels: 1, Priority: zero}, "Levels is 1: must be 2 or more where Priority"},
		"negative levels":     {config{Limit: 1, Levels: -1}, "Levels is -1"},
		"levels, no priority": {config{Limit: 1, Levels: 2}, "Levels is 2: must be 0 or 1 where Priority is nil"},
		"priority, no levels": {config{Limit: 1, Priority: zero}, "Levels is 0: must be 2 or more where Priority is set"},
	} {
		t.Run(name, func(t *testing.T) {
			err := tc.cfg.Validate()
			require.ErrorContains(t, err, tc.want)
			require.PanicsWithError(t, err.Error(), func() { bulkhead.New(tc.cfg) })
		})
	}
}

func TestValidateLimitsQueue(t *testing.T) {
	if strconv.IntSize == 32 {
		t.Skip("an int cannot exceed the maximum")
	}
	tooMany := math.MaxInt32
	tooMany++
	err := bulkhead.Config{Limit: 1, MaxWait: -1, Queue: tooMany}.Validate()
	require.ErrorContains(t, err, "Queue is 2147483648")
}

func TestValidateAcceptsValidFields(t *testing.T) {
	for _, cfg := range []bulkhead.Config{
		{Limit: 1},
		{Limit: 1<<30 - 1},
		{Limit: 1, Levels: 1},
		{Limit: 1, MaxWait: -1, Queue: math.MaxInt32},
		{Limit: 1, Levels: 1000, Priority: zero},
	} {
		require.NoError(t, cfg.Validate())
		require.NoError(t, bulkhead.New(cfg).Do(t.Context(), nothing))
	}
}
