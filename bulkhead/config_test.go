package bulkhead_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/bulkhead"
)

func zero(context.Context) int { return 0 }

func TestValidateNamesWhatCannotMeanAnything(t *testing.T) {
	for name, tc := range map[string]struct {
		cfg  bulkhead.Config
		want string
	}{
		"no limit":            {bulkhead.Config{}, "bulkhead.Config.Limit is 0: must be 1 to 1073741823, or Adaptive must be set"},
		"negative limit":      {bulkhead.Config{Limit: -1}, "Limit is -1"},
		"huge limit":          {bulkhead.Config{Limit: 1 << 30}, "Limit is 1073741824"},
		"limit twice":         {bulkhead.Config{Limit: 1, Adaptive: &bulkhead.Adaptive{}}, "Limit is 1: must be 0 where Adaptive is set"},
		"negative queue":      {bulkhead.Config{Limit: 1, Queue: -1}, "Queue is -1: must be 0 (nobody waits)"},
		"negative wait":       {bulkhead.Config{Limit: 1, Queue: 1, MaxWait: -time.Second}, "MaxWait is -1s: must be 0 (until ctx ends) or more"},
		"wait without queue":  {bulkhead.Config{Limit: 1, MaxWait: time.Second}, "MaxWait is 1s: must be 0 where Queue is 0"},
		"no such order":       {bulkhead.Config{Limit: 1, Order: 3}, "Order is 3: must be FIFO, LIFO or CoDel"},
		"negative levels":     {bulkhead.Config{Limit: 1, Levels: -1}, "Levels is -1"},
		"levels, no priority": {bulkhead.Config{Limit: 1, Levels: 2}, "Levels is 2: must be 0 or 1 where Priority is nil"},
		"priority, no levels": {bulkhead.Config{Limit: 1, Priority: zero}, "Levels is 0: must be 2 or more where Priority is set"},
		"reserve, no levels":  {bulkhead.Config{Limit: 5, Reserve: []int{1}}, "Reserve[0] is 1: must be 0: there is no level below"},
		"more reserves":       {bulkhead.Config{Limit: 5, Levels: 2, Priority: zero, Reserve: []int{1, 0, 0}}, "Reserve is [1 0 0]: must be of 2 levels at most"},
		"negative reserve":    {bulkhead.Config{Limit: 5, Levels: 2, Priority: zero, Reserve: []int{-1}}, "Reserve[0] is -1"},
		"reserve of the last": {bulkhead.Config{Limit: 5, Levels: 2, Priority: zero, Reserve: []int{1, 1}}, "Reserve[1] is 1: must be 0"},
		"reserve of all":      {bulkhead.Config{Limit: 5, Levels: 3, Priority: zero, Reserve: []int{2, 3}}, "Reserve is [2 3]: must be less, together, than the limit of at least 5"},
		"reserve above Min":   {bulkhead.Config{Adaptive: &bulkhead.Adaptive{Min: 3}, Levels: 2, Priority: zero, Reserve: []int{3}}, "the limit of at least 3"},
		"negative Min":        {bulkhead.Config{Adaptive: &bulkhead.Adaptive{Min: -1}}, "Adaptive.Min is -1"},
		"negative Max":        {bulkhead.Config{Adaptive: &bulkhead.Adaptive{Max: -1}}, "Adaptive.Max is -1"},
		"Min above Max":       {bulkhead.Config{Adaptive: &bulkhead.Adaptive{Min: 5, Max: 4}}, "Adaptive.Min is 5: must be no more than Max"},
		"Initial outside":     {bulkhead.Config{Adaptive: &bulkhead.Adaptive{Initial: 9, Max: 8}}, "Adaptive.Initial is 9"},
		"negative Tolerance":  {bulkhead.Config{Adaptive: &bulkhead.Adaptive{Tolerance: -0.1}}, "Adaptive.Tolerance is -0.1"},
		"senseless Tolerance": {bulkhead.Config{Adaptive: &bulkhead.Adaptive{Tolerance: 25}}, "Adaptive.Tolerance is 25"},
	} {
		t.Run(name, func(t *testing.T) {
			err := tc.cfg.Validate()
			require.ErrorContains(t, err, tc.want)
			require.PanicsWithError(t, err.Error(), func() { bulkhead.New(tc.cfg) })
		})
	}
}

func TestValidateAcceptsWhatMeansSomething(t *testing.T) {
	for _, cfg := range []bulkhead.Config{
		{Limit: 1},
		{Limit: 1<<30 - 1},
		{Limit: 1, Levels: 1},
		{Limit: 1, Queue: 1, Order: bulkhead.CoDel},
		{Limit: 6, Levels: 3, Priority: zero, Reserve: []int{2, 3, 0}},
		{Limit: 1, Levels: 3, Priority: zero, Reserve: []int{}},
		{Adaptive: &bulkhead.Adaptive{}},
		{Adaptive: &bulkhead.Adaptive{Min: 2000}},
		{Adaptive: &bulkhead.Adaptive{Max: 5}},
	} {
		require.NoError(t, cfg.Validate())
		require.NoError(t, bulkhead.New(cfg).Do(t.Context(), nothing))
	}
}

func TestReasonsHaveNames(t *testing.T) {
	seen := map[string]bool{}
	for r := bulkhead.NoSlot; r <= bulkhead.TooHeavy; r++ {
		require.NotContains(t, r.String(), "Reason")
		require.False(t, seen[r.String()])
		seen[r.String()] = true
	}
	require.Equal(t, "bulkhead.Reason(-1)", bulkhead.Reason(-1).String())
	require.Equal(t, "bulkhead.Reason(99)", bulkhead.Reason(99).String())
}
