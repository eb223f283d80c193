package cacheaside

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestNextStep has each state of a response, with each value that may come with it.
func TestNextStep(t *testing.T) {
	const now = time.Minute
	values := map[string]*entry[int]{
		"none":            nil,
		"fresh":           {fresh: now + 1, stale: now + 1, keep: now + 1},
		"stale":           {fresh: now, stale: now + 1, keep: now + 1},
		"usable on error": {fresh: now, stale: now, keep: now + 1},
		"dead":            {fresh: now, stale: now, keep: now},
		"absent":          {fresh: now + 1, stale: now + 1, keep: now + 1, absent: true},
	}
	for _, test := range []struct {
		state         State
		value         string
		waited, other step // the steps of a flight that has waited for another process, and of a flight that has not
	}{
		{"", "none", stepLoad, stepLoad},
		{Leased, "none", stepLoad, stepLoad},
		{Leased, "stale", stepLoad, stepLoad},
		{Fenced, "none", stepLoad, stepLoad},
		{Hit, "fresh", stepServe, stepServe},
		{Hit, "absent", stepServe, stepServe},
		{Hit, "none", stepTake, stepTake}, // the value cannot be read
		{Hit, "stale", stepTake, stepTake},
		{Busy, "stale", stepServe, stepServe},
		{Busy, "usable on error", stepPoll, stepPoll},
		{Busy, "none", stepPoll, stepPoll},
		{Busy, "fresh", stepPoll, stepPoll}, // it is being refreshed
		{Failed, "stale", stepServe, stepServe},
		{Failed, "usable on error", stepServe, stepServe},
		{Failed, "absent", stepFail, stepTake},
		{Failed, "dead", stepFail, stepTake},
		{Failed, "none", stepFail, stepTake},
		{"odd", "fresh", stepFail, stepFail},
	} {
		e := values[test.value]
		require.Equal(t, test.waited, nextStep(test.state, e, true, now), "%s, %s, waited", test.state, test.value)
		require.Equal(t, test.other, nextStep(test.state, e, false, now), "%s, %s", test.state, test.value)
	}
}
