package breaker_test

import (
	"context"
	"math"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/breaker"
)

func TestConfigValidate(t *testing.T) {
	for want, cfg := range map[string]breaker.Config{
		"ConsecutiveFailures is -1: must be 0 (for the default) or more": {
			ConsecutiveFailures: -1,
		},
		"FailureRate is 1.5: must be 0 (for none) or in (0, 1]":  {FailureRate: 1.5},
		"FailureRate is -0.1: must be 0 (for none) or in (0, 1]": {FailureRate: -0.1},
		"FailureRate is NaN: must be 0 (for none) or in (0, 1]": {
			FailureRate: math.NaN(),
		},
		"MinCalls is -1: must be 0 (for 20) or more": {
			FailureRate: 1, MinCalls: -1,
		},
		"MinCalls is 7: must be at most WindowCalls, or no rate ever counts": {
			FailureRate: 1, MinCalls: 7, WindowCalls: 6,
		},
		"FailuresInWindow is -1: must be 0 (for none) or more": {FailuresInWindow: -1},
		"FailuresInWindow is 7: must be at most WindowCalls, or it is never reached": {
			FailuresInWindow: 7, WindowCalls: 6,
		},
		"SlowAfter is -1ns: must be 0 (for never) or more":   {SlowAfter: -1},
		"MinCalls is 7: must be 0 without FailureRate":       {MinCalls: 7},
		"Window is -1ns: must be 0 (for 1m) or at least 1ms": {Window: -1},
		"Window is 999µs: must be 0 (for 1m) or at least 1ms": {
			Window: 999 * time.Microsecond,
		},
		"WindowCalls is -1: must be 0 (for none) to 1<<20": {WindowCalls: -1},
		"WindowCalls is 1048577: must be 0 (for none) to 1<<20": {
			WindowCalls: 1<<20 + 1,
		},
		"Patience is -2ns: must be 0 (for nine tenths of SlowAfter, or of 1s) or more, or Unlimited": {Patience: -2},
		"ProbeTimeout is -1ns: must be 0 (for OpenFor) or more":                                      {ProbeTimeout: -1},
		"OpenFor is -1ns: must be 0 (for 30s) or more":                                               {OpenFor: -1},
		"MaxRetryAfter is -1ns: must be 0 (for the larger of OpenFor and MaxOpenFor) or more":        {MaxRetryAfter: -1},
		"MaxOpenFor is -1ns: must be 0 (for OpenFor) or at least OpenFor":                            {MaxOpenFor: -1},
		"MaxOpenFor is 29s: must be 0 (for OpenFor) or at least OpenFor": {
			MaxOpenFor: 29 * time.Second,
		},
		"MaxOpenFor is 1s: must be 0 (for OpenFor) or at least OpenFor": {
			MaxOpenFor: time.Second, OpenFor: 2 * time.Second,
		},
		"Probes is -1: must be 0 (for 1) to 1<<31 - 1":         {Probes: -1},
		"Probes is 2147483648: must be 0 (for 1) to 1<<31 - 1": {Probes: 1 << 31},
	} {
		want = "breaker.Config." + want
		err := cfg.Validate()
		require.EqualError(t, err, want)
		require.PanicsWithError(t, want, func() { breaker.New(cfg) })
	}
	for _, cfg := range []breaker.Config{
		{},
		{FailureRate: 1, SlowAfter: 1, MinCalls: 1, ConsecutiveFailures: 1},
		{FailureRate: math.SmallestNonzeroFloat64, Window: time.Millisecond},
		{WindowCalls: 1, Patience: breaker.Unlimited},
		{WindowCalls: 1 << 20, Window: time.Second, Probes: math.MaxInt32},
		{OpenFor: math.MaxInt64, Window: math.MaxInt64, ProbeTimeout: math.MaxInt64},
		{MaxOpenFor: 30 * time.Second},
		{SlowAfter: time.Second},
		{FailuresInWindow: 7, WindowCalls: 7},
	} {
		require.NoError(t, cfg.Validate(), "%+v", cfg)
	}
}

func TestLongestTimes(t *testing.T) {
	b := breaker.New(breaker.Config{ConsecutiveFailures: 1, OpenFor: math.MaxInt64, Window: math.MaxInt64})
	require.NoError(t, do(b, ok))
	open(t, b)
	requireRefused(t, do(b, ok), breaker.Open)
	require.Greater(t, b.Stats().OpenLeft, 50*365*24*time.Hour)
	b.Trip(nil, 1)
	for b.State() != breaker.HalfOpen {
	}
	require.NoError(t, do(b, ok))
	require.Equal(t, breaker.Closed, b.State())
	require.Zero(t, b.Stats().Window)
	require.NoError(t, do(b, ok))
	require.Equal(t, breaker.Counts{Succeeded: 1}, b.Stats().Window)
}

// The text has nothing of another call and does not change with time.
func TestOpenErrorText(t *testing.T) {
	require.EqualError(t, breaker.ErrOpen, "breaker: circuit open")
	for want, e := range map[string]*breaker.OpenError{
		"breaker: circuit forced_open":      {State: breaker.ForcedOpen, LastErr: errDown},
		"breaker: users: circuit half_open": {Name: "users", State: breaker.HalfOpen, LastErr: errDown},
		"breaker: circuit open":             {State: breaker.Open, Until: time.Now().Add(time.Hour), LastErr: errDown},
	} {
		require.EqualError(t, e, want)
		require.ErrorIs(t, e, breaker.ErrOpen)
		require.NotErrorIs(t, e, errDown, "it is the error of another call")
		require.True(t, e.Refused())
	}
}

// RetryAfter and Retryable depend on the state.
func TestOpenErrorRetryAfter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(breaker.Config{ConsecutiveFailures: 1, OpenFor: time.Minute})
		open(t, b)
		refusal := requireRefused(t, do(b, ok), breaker.Open)
		require.False(t, refusal.Retryable())
		require.Equal(t, time.Minute, refusal.RetryAfter())
		time.Sleep(time.Minute - time.Millisecond)
		require.Equal(t, time.Millisecond, refusal.RetryAfter())
		time.Sleep(time.Hour)
		require.Equal(t, time.Millisecond, refusal.RetryAfter(), "the time has passed")

		_, err := b.Begin(t.Context()) // probes, and hangs
		require.NoError(t, err)
		refusal = requireRefused(t, do(b, ok), breaker.HalfOpen)
		require.True(t, refusal.Retryable())
		began := time.Now()
		for range 100 {
			wait := refusal.RetryAfter()
			require.Equal(t, min(max(10*time.Millisecond, time.Since(began)), time.Second), wait)
			time.Sleep(wait / 2)
		}

		b.ForceOpen(errDown)
		refusal = requireRefused(t, do(b, ok), breaker.ForcedOpen)
		require.False(t, refusal.Retryable())
		require.Equal(t, 30*time.Second, refusal.RetryAfter())
		time.Sleep(time.Hour)
		require.Equal(t, 30*time.Second, refusal.RetryAfter())
	})
}

var _ interface {
	Do(context.Context, func(context.Context) error) error
	Wrap(func(context.Context) error) func(context.Context) error
} = (*breaker.Breaker)(nil)
