package whole_test

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead/adaptive"
	"github.com/go-resilience/resilience/retry"
	shedding "github.com/go-resilience/resilience/throttle/adaptive"
)

// A hostile error does something when a policy asks what it says.
type hostile func()

func (hostile) Error() string                   { return "hostile" }
func (h hostile) Refused() bool                 { h(); return false }
func (h hostile) Answered() bool                { h(); return false }
func (h hostile) Retryable() bool               { h(); return true }
func (h hostile) RetryAfter() (d time.Duration) { h(); return 0 }
func (h hostile) Throttled() bool               { h(); return false }
func (h hostile) Timeout() bool                 { h(); return false }

func nothing(context.Context) error { return nil }

// readers are the policies that read errors. well uses the policy as if nothing had happened.
func readers() map[string]struct {
	wrap resilience.Middleware
	well func(*testing.T)
} {
	retries := retry.New(retry.Config{Attempts: 2, Budget: retry.NewBudget(retry.BudgetConfig{})})
	circuit := breaker.New(breaker.Config{ConsecutiveFailures: 1, OpenFor: time.Second})
	limit := adaptive.New(adaptive.Config{Initial: 1, Max: 1})
	sheds := shedding.New(shedding.Config{})
	passes := func(p resilience.Policy) func(*testing.T) {
		return func(t *testing.T) { require.NoError(t, p.Do(t.Context(), nothing)) }
	}
	return map[string]struct {
		wrap resilience.Middleware
		well func(*testing.T)
	}{
		"retry": {retries.Wrap, passes(retries)},
		"breaker": {circuit.Wrap, func(t *testing.T) {
			time.Sleep(time.Minute) // it is open, and then its one probe must be there
			passes(circuit)(t)
			require.Equal(t, breaker.Closed, circuit.State())
		}},
		"bulkhead": {limit.Wrap, func(t *testing.T) {
			passes(limit)(t)
			require.Zero(t, limit.Stats().InFlight)
		}},
		"throttle": {sheds.Wrap, passes(sheds)},
	}
}

func TestErrorWhoseMethodsPanicLosesNothing(t *testing.T) {
	for name := range readers() {
		synctest.Test(t, func(t *testing.T) {
			policy := readers()[name]
			fn := policy.wrap(func(context.Context) error { return hostile(func() { panic("hostile") }) })
			for range 3 { // for a breaker, a probe too
				require.PanicsWithValue(t, "hostile", func() { _ = fn(t.Context()) }, name)
				time.Sleep(2 * time.Second)
			}
			policy.well(t)
		})
	}
}

func TestErrorWhoseMethodsBlockHoldsUpNobodyElse(t *testing.T) {
	for name := range readers() {
		synctest.Test(t, func(t *testing.T) {
			policy := readers()[name]
			asked, goOn := make(chan struct{}), make(chan struct{})
			ended := make(chan error)
			var once sync.Once
			go func() {
				ended <- policy.wrap(func(context.Context) error {
					return hostile(func() {
						once.Do(func() { close(asked); <-goOn })
					})
				})(t.Context())
			}()
			<-asked
			if name != "bulkhead" { // its one slot is still held
				require.NoError(t, policy.wrap(nothing)(t.Context()), name)
			}
			close(goOn)
			require.Error(t, <-ended, name)
			policy.well(t)
		})
	}
}
