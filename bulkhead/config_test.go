package bulkhead_test

import (
	"context"
	"encoding/json"
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/bulkhead"
)

func zero(context.Context) int { return 0 }

func TestValidateNamesFieldsThatCannotMeanAnything(t *testing.T) {
	for name, tc := range map[string]struct {
		cfg  bulkhead.Config
		want string
	}{
		"no limit":            {bulkhead.Config{}, "bulkhead.Config.Limit is 0: must be 1 to 1073741823, or Adaptive must be set"},
		"negative limit":      {bulkhead.Config{Limit: -1}, "Limit is -1"},
		"huge limit":          {bulkhead.Config{Limit: 1 << 30}, "Limit is 1073741824"},
		"limit twice":         {bulkhead.Config{Limit: 1, Adaptive: &bulkhead.AdaptiveLimit{}}, "Limit is 1: must be 0 where Adaptive is set"},
		"negative queue":      {bulkhead.Config{Limit: 1, MaxWait: -1, Queue: -1}, "Queue is -1: must be 0 (for 1000) to"},
		"share without wait":  {bulkhead.Config{Limit: 1, Share: shareOf}, "Share is set: must be nil where MaxWait is 0: no call waits"},
		"queue without wait":  {bulkhead.Config{Limit: 1, Queue: 5}, "Queue is 5: must be 0 where MaxWait is 0: no call waits"},
		"no such order":       {bulkhead.Config{Limit: 1, Order: "newest"}, `Order is "newest": must be "FIFO", "LIFO" or "CoDel"`},
		"huge queue":          {bulkhead.Config{Limit: 1, MaxWait: -1, Queue: math.MaxInt32 + 1}, "Queue is 2147483648"},
		"many levels":         {bulkhead.Config{Limit: 1, Levels: 1001, Priority: zero}, "Levels is 1001: must be 0 (for 1) to 1000"},
		"one level, priority": {bulkhead.Config{Limit: 1, Levels: 1, Priority: zero}, "Levels is 1: must be 2 or more where Priority is set"},
		"huge Min":            {bulkhead.Config{Adaptive: &bulkhead.AdaptiveLimit{Min: 1 << 30}}, "Adaptive.Min is 1073741824"},
		"huge Max":            {bulkhead.Config{Adaptive: &bulkhead.AdaptiveLimit{Max: 1 << 30}}, "Adaptive.Max is 1073741824"},
		"Initial below Min":   {bulkhead.Config{Adaptive: &bulkhead.AdaptiveLimit{Initial: 4, Min: 5}}, "Adaptive.Initial is 4"},
		"negative levels":     {bulkhead.Config{Limit: 1, Levels: -1}, "Levels is -1"},
		"levels, no priority": {bulkhead.Config{Limit: 1, Levels: 2}, "Levels is 2: must be 0 or 1 where Priority is nil"},
		"priority, no levels": {bulkhead.Config{Limit: 1, Priority: zero}, "Levels is 0: must be 2 or more where Priority is set"},
		"reserve, no levels":  {bulkhead.Config{Limit: 5, Reserve: []float64{0.1}}, "Reserve is [0.1]: must be at most 0 long"},
		"more reserves":       {bulkhead.Config{Limit: 5, Levels: 2, Priority: zero, Reserve: []float64{0.1, 0}}, "Reserve is [0.1 0]: must be at most 1 long, one less than Levels"},
		"negative reserve":    {bulkhead.Config{Limit: 5, Levels: 2, Priority: zero, Reserve: []float64{-0.1}}, "Reserve[0] is -0.1: must be at least 0 and less than 1"},
		"all reserved":        {bulkhead.Config{Limit: 5, Levels: 2, Priority: zero, Reserve: []float64{1}}, "Reserve[0] is 1: must be at least 0 and less than 1"},
		"no number":           {bulkhead.Config{Limit: 5, Levels: 2, Priority: zero, Reserve: []float64{math.NaN()}}, "Reserve[0] is NaN"},
		"reserve of all":      {bulkhead.Config{Limit: 5, Levels: 3, Priority: zero, Reserve: []float64{0.5, 0.5}}, "Reserve is [0.5 0.5]: must be shares whose sum is less than 1"},
		"negative Min":        {bulkhead.Config{Adaptive: &bulkhead.AdaptiveLimit{Min: -1}}, "Adaptive.Min is -1"},
		"negative Max":        {bulkhead.Config{Adaptive: &bulkhead.AdaptiveLimit{Max: -1}}, "Adaptive.Max is -1"},
		"Min above Max":       {bulkhead.Config{Adaptive: &bulkhead.AdaptiveLimit{Min: 5, Max: 4}}, "Adaptive.Min is 5: must be no more than Max"},
		"Initial outside":     {bulkhead.Config{Adaptive: &bulkhead.AdaptiveLimit{Initial: 9, Max: 8}}, "Adaptive.Initial is 9"},
		"negative Tolerance":  {bulkhead.Config{Adaptive: &bulkhead.AdaptiveLimit{Tolerance: -0.1}}, "Adaptive.Tolerance is -0.1"},
		"senseless Tolerance": {bulkhead.Config{Adaptive: &bulkhead.AdaptiveLimit{Tolerance: 25}}, "Adaptive.Tolerance is 25"},
	} {
		t.Run(name, func(t *testing.T) {
			err := tc.cfg.Validate()
			require.ErrorContains(t, err, tc.want)
			require.PanicsWithError(t, err.Error(), func() { bulkhead.New(tc.cfg) })
		})
	}
}

func TestValidateAcceptsEveryFieldThatMeansSomething(t *testing.T) {
	for _, cfg := range []bulkhead.Config{
		{Limit: 1},
		{Limit: 1<<30 - 1},
		{Limit: 1, Levels: 1},
		{Limit: 1, MaxWait: -1, Queue: 1, Order: bulkhead.CoDel},
		{Limit: 6, Levels: 3, Priority: zero, Reserve: []float64{0.4, 0.5}},
		{Limit: 1, Levels: 3, Priority: zero, Reserve: []float64{}},
		{Limit: 1, MaxWait: -1, Queue: math.MaxInt32},
		{Limit: 1, Levels: 1000, Priority: zero},
		{Adaptive: &bulkhead.AdaptiveLimit{}},
		{Adaptive: &bulkhead.AdaptiveLimit{Min: 5, Initial: 5, Max: 5, Tolerance: 10}},
		{Adaptive: &bulkhead.AdaptiveLimit{Min: 1<<30 - 1}},
		{Adaptive: &bulkhead.AdaptiveLimit{Max: 1<<30 - 1}},
		{Adaptive: &bulkhead.AdaptiveLimit{Min: 2000}},
		{Adaptive: &bulkhead.AdaptiveLimit{Max: 5}},
	} {
		require.NoError(t, cfg.Validate())
		require.NoError(t, bulkhead.New(cfg).Do(t.Context(), nothing))
	}
}

func TestOrderIsInWords(t *testing.T) {
	var c struct {
		Order bulkhead.Order
	}
	require.NoError(t, json.Unmarshal([]byte(`{"Order": "LIFO"}`), &c))
	require.Equal(t, bulkhead.LIFO, c.Order)
	require.EqualError(t, bulkhead.GroupConfig[int]{Config: bulkhead.Config{Limit: 1, Order: "newest"}}.Validate(),
		`bulkhead.Config.Order is "newest": must be "FIFO", "LIFO" or "CoDel"`)
	filled := bulkhead.NewGroup(bulkhead.GroupConfig[int]{Config: bulkhead.Config{Limit: 1}}).Config()
	require.Equal(t, bulkhead.FIFO, filled.Config.Order)
}
