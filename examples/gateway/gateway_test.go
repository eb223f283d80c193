package main

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/breaker"
)

// TestGatewayChargesTokensThatArrived checks only results that do not depend on the machine's speed.
func TestGatewayChargesTokensThatArrived(t *testing.T) {
	t.Parallel()
	phases, bills := run(t.Context(), 7, 500*time.Millisecond)
	require.Len(t, phases, 7)
	limited := int64(0)
	for _, p := range phases {
		seen := p.answered.Load() + p.cut.Load() + p.limited.Load() + p.failed.Load()
		require.Equal(t, p.requests.Load(), seen, p.name)
		require.Positive(t, p.answered.Load(), p.name)
		limited += p.limited.Load()
		switch p.fault {
		case truncating:
			require.Positive(t, p.cut.Load())
		case busy, failing, down:
			require.Positive(t, p.fallbacks.Load(), p.name)
		}
	}
	require.Positive(t, limited, "the flood")
	require.Len(t, bills, len(tenants))
	for _, b := range bills {
		require.Positive(t, b.arrived, b.tenant)
		require.Equal(t, b.arrived, b.charged, b.tenant)
		require.Less(t, b.charged, b.reserved, b.tenant)
	}
	var out strings.Builder
	report(&out, phases, bills)
	require.Contains(t, out.String(), "Each tenant pays exactly for the tokens that arrived.")
}

// A busy error is a response with a Retry-After.
type busyError time.Duration

func (busyError) Error() string               { return "busy" }
func (e busyError) RetryAfter() time.Duration { return time.Duration(e) }

func TestCooldownIsNotShortened(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		circuit := breaker.New(breaker.Config{})
		call := func(takes, after time.Duration) {
			_ = cooldown(circuit)(circuit.Wrap(func(context.Context) error {
				time.Sleep(takes)
				return busyError(after)
			}))(t.Context())
		}
		go call(2*time.Second, time.Second)
		call(time.Second, time.Minute)
		time.Sleep(30 * time.Second)
		require.Equal(t, breaker.Open, circuit.State())
	})
}
