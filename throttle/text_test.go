package throttle_test

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/throttle"
)

func TestPoliciesAreWords(t *testing.T) {
	type settings struct {
		Overflow throttle.Overflow
		OnOutage throttle.OutagePolicy
	}
	for want, s := range map[string]settings{
		`{"Overflow":"share one","OnOutage":"limit locally"}`: {},
		`{"Overflow":"refuse new","OnOutage":"refuse all"}`:   {throttle.RefuseNew, throttle.RefuseAll},
		`{"Overflow":"share one","OnOutage":"admit all"}`:     {throttle.ShareOne, throttle.AdmitAll},
	} {
		text, err := json.Marshal(s)
		require.NoError(t, err)
		require.Equal(t, want, string(text))
		var back settings
		require.NoError(t, json.Unmarshal(text, &back))
		require.Equal(t, s, back)
	}
	require.Equal(t, "refuse new", throttle.RefuseNew.String())
	require.Equal(t, "admit all", throttle.AdmitAll.String())
	require.Equal(t, "throttle.Overflow(7)", throttle.Overflow(7).String())
	require.Equal(t, "throttle.OutagePolicy(-1)", throttle.OutagePolicy(-1).String())
	_, err := throttle.Overflow(7).MarshalText()
	require.EqualError(t, err, `throttle.Overflow is 7: must be "share one" or "refuse new"`)
	_, err = throttle.OutagePolicy(-1).MarshalText()
	require.Error(t, err)
	p := throttle.AdmitAll
	require.EqualError(t, p.UnmarshalText([]byte("allow")),
		`throttle.OutagePolicy is "allow": must be "limit locally", "refuse all" or "admit all"`)
	require.Equal(t, throttle.AdmitAll, p)
	var o throttle.Overflow
	require.Error(t, o.UnmarshalText(nil))
}
