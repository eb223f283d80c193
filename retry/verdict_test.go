package retry_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/retry"
)

func TestWhatFollowsFromAFailure(t *testing.T) {
	failed, refused := behavior.End{Kind: behavior.Failed}, behavior.End{Kind: behavior.Refused}
	answered, later := behavior.End{Kind: behavior.Answered}, behavior.End{Kind: behavior.Answered, Retryable: true}
	for name, tc := range map[string]struct {
		end                                                behavior.End
		permanent, ended, itself, made, waits, worth, last bool
		want                                               string
	}{
		"a failure":                              {end: failed, made: true, worth: true, want: "again"},
		"the last one":                           {end: failed, made: true, worth: true, last: true, want: "exhausted"},
		"not worth another":                      {end: failed, made: true, last: true, want: "final"},
		"marked permanent":                       {end: failed, permanent: true, ended: true, made: true, worth: true, want: "final"},
		"an answer":                              {end: answered, ended: true, made: true, want: "final"},
		"an answer that says come again":         {end: later, made: true, want: "again"},
		"ctx has ended":                          {end: failed, ended: true, made: true, worth: true, want: "cut"},
		"ctx has ended, as the first says":       {end: failed, ended: true, itself: true, made: true, want: "stopped"},
		"ctx has ended, and it was the last one": {end: failed, ended: true, made: true, last: true, want: "cut"},
		"a refusal that is waited for":           {end: refused, waits: true, want: "again"},
		"a refusal of the first attempt":         {end: refused, want: "final"},
		"a refusal after attempts":               {end: refused, made: true, want: "turned off"},
		"a refusal that is waited for, the last": {end: refused, waits: true, last: true, want: "exhausted"},
	} {
		t.Run(name, func(t *testing.T) {
			require.Equal(t, tc.want, retry.VerdictOn(tc.end, tc.permanent, tc.ended, tc.itself, tc.made, tc.waits, tc.worth, tc.last))
		})
	}
}
