package breaker_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/breaker"
)

func TestOpensAtExactLimit(t *testing.T) {
	const F, S = true, false
	for name, test := range map[string]struct {
		cfg   breaker.Config
		calls []bool // failed?  The last one opens it, and none before.
	}{
		"half of four":        {breaker.Config{FailureRate: 0.5, MinCalls: 4}, []bool{S, S, F, F}},
		"not before MinCalls": {breaker.Config{FailureRate: 0.5, MinCalls: 4}, []bool{F, F, F, F}},
		"MinCalls is 20": {breaker.Config{FailureRate: 0.1},
			[]bool{S, S, S, S, S, S, S, S, S, S, S, S, S, S, S, S, S, S, F, F}},
		"a third is not 0.34":     {breaker.Config{FailureRate: 0.34, MinCalls: 3}, []bool{S, S, F, F}},
		"all":                     {breaker.Config{FailureRate: 1, MinCalls: 2, WindowCalls: 2}, []bool{F, S, F, F}},
		"never by a success":      {breaker.Config{FailureRate: 0.5, MinCalls: 4}, []bool{F, F, F, S, F}},
		"last three":              {breaker.Config{FailureRate: 0.6, WindowCalls: 3}, []bool{F, S, S, F, S, S, F, F}},
		"MinCalls is WindowCalls": {breaker.Config{FailureRate: 0.01, WindowCalls: 5}, []bool{F, F, F, F, F}},
		"either: failures in a row": {breaker.Config{FailureRate: 0.9, MinCalls: 4, ConsecutiveFailures: 2},
			[]bool{S, F, S, S, F, F}},
		"either: the rate": {breaker.Config{FailureRate: 0.5, MinCalls: 4, ConsecutiveFailures: 3},
			[]bool{F, S, F, F}},
		"five in a row by default":    {breaker.Config{}, []bool{F, F, F, F, S, F, F, F, F, F}},
		"one in a row":                {breaker.Config{ConsecutiveFailures: 1}, []bool{S, S, F}},
		"an old call leaves the ring": {breaker.Config{FailureRate: 1, WindowCalls: 4, MinCalls: 4}, []bool{S, F, F, F, F}},
	} {
		t.Run(name, func(t *testing.T) { requireOpensAtTheLast(t, test.cfg, test.calls) })
	}
}

func requireOpensAtTheLast(t *testing.T, cfg breaker.Config, calls []bool) {
	t.Helper()
	b := breaker.New(cfg)
	for i, failed := range calls {
		require.Equal(t, breaker.Closed, b.State(), "before call %d", i)
		if failed {
			require.Equal(t, errDown, do(b, down))
		} else {
			require.NoError(t, do(b, ok))
		}
	}
	require.Equal(t, breaker.Open, b.State())
}

// A call that takes SlowAfter counts as a failure, but its result is returned unchanged.
func TestSlowCallIsFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const slow, fast = time.Second, time.Second - 1
		b := breaker.New(breaker.Config{FailureRate: 0.5, SlowAfter: time.Second, MinCalls: 4})
		for _, d := range []time.Duration{fast, fast, slow} {
			require.NoError(t, do(b, taking(d, nil)))
		}
		require.Equal(t, breaker.Counts{Succeeded: 2, Failed: 1, ConsecutiveFailures: 1}, b.Stats().Window)
		require.Equal(t, answered(true), do(b, taking(slow, answered(true))))
		require.Equal(t, breaker.Open, b.State())
		require.EqualError(t, b.Stats().LastErr, "breaker: successful call took SlowAfter or longer")

		time.Sleep(30 * time.Second)
		require.NoError(t, do(b, taking(slow, nil)))
		require.Equal(t, breaker.Open, b.State(), "a slow probe")
		time.Sleep(30 * time.Second)
		require.NoError(t, do(b, taking(fast, nil)))
		require.Equal(t, breaker.Closed, b.State())

		require.Equal(t, errDown, do(b, taking(slow, errDown)))
		require.Equal(t, errDown, b.Stats().LastErr, "its own error says more")
		require.Equal(t, refused(true), do(b, taking(slow, refused(true))))
		require.Equal(t, breaker.Counts{Failed: 1, ConsecutiveFailures: 1}, b.Stats().Window, "it was not made")
	})
}
