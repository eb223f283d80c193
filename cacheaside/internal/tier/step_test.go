package tier_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/cacheaside/internal/entry"
	"github.com/go-resilience/resilience/cacheaside/internal/tier"
)

func TestNextStepAfterAnAnswer(t *testing.T) {
	for name, tc := range map[string]struct {
		state        tier.State
		value        entry.Standing
		absent, none bool
		want         tier.Step
	}{
		"hit":                                    {state: tier.Hit, value: entry.Fresh, want: tier.Use},
		"hit that says there is no such key":     {state: tier.Hit, value: entry.Fresh, absent: true, want: tier.Use},
		"hit that became old on the way":         {state: tier.Hit, value: entry.Stale, want: tier.Use},
		"hit that cannot be read":                {state: tier.Hit, none: true, want: tier.AskAgain},
		"leased":                                 {state: tier.Leased, none: true, want: tier.Load},
		"leased, with an old value":              {state: tier.Leased, value: entry.Stale, want: tier.Load},
		"fenced":                                 {state: tier.Fenced, none: true, want: tier.LoadAlone},
		"in the pause, fresh":                    {state: tier.Missed, value: entry.Fresh, want: tier.Use},
		"in the pause, kept":                     {state: tier.Missed, value: entry.Kept, want: tier.UseOld},
		"in the pause, nothing":                  {state: tier.Missed, none: true, want: tier.Unpause},
		"in the pause, absent is not served old": {state: tier.Missed, value: entry.Stale, absent: true, want: tier.Unpause},
		"busy":                                   {state: tier.Busy, none: true, want: tier.Rest},
		"busy, stale":                            {state: tier.Busy, value: entry.Stale, want: tier.UseOld},
		"busy, kept for errors":                  {state: tier.Busy, value: entry.Kept, want: tier.Rest},
		"busy, fresh: of an early refresh":       {state: tier.Busy, value: entry.Fresh, want: tier.Rest},
		"a State that does not exist":            {state: "?", want: tier.Refuse},
	} {
		t.Run(name, func(t *testing.T) {
			require.Equal(t, tc.want, tier.Next(tc.state, tc.value, tc.absent, tc.none))
		})
	}
}
