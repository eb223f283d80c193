package registry

import (
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/cacheaside"
	"github.com/go-resilience/resilience/lease"
	"github.com/go-resilience/resilience/retry"
	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/throttle"
)

// entry returns the entry of a policy; false if it is none that a registry can hold.
func entry(p Policy) (Entry, bool) {
	switch p := p.(type) {
	case observed[retry.Stats, retry.Event]:
		return of("retry", p, retryFigures, retryEvent)
	case observed[retry.BudgetStats, retry.Event]:
		return of("budget", p, budgetFigures, retryEvent)
	case observed[retry.BudgetGroupStats, retry.Event]:
		return group("budget", p, budgetGroupFigures, retryEvent)
	case observed[retry.HedgeStats, retry.Event]:
		return of("hedge", p, hedgeFigures, retryEvent)
	case observed[breaker.Stats, breaker.Event]:
		return of("breaker", p, breakerFigures, breakerEvent)
	case observed[breaker.GroupStats, breaker.Event]:
		return group("breaker", p, breakerGroupFigures, breakerEvent)
	case observed[bulkhead.Stats, bulkhead.Event]:
		return of("bulkhead", p, bulkheadFigures, bulkheadEvent)
	case observed[bulkhead.GroupStats, bulkhead.Event]:
		return group("bulkhead", p, bulkheadGroupFigures, bulkheadEvent)
	case observed[throttle.Stats, throttle.Event]:
		return of("throttle", p, throttleFigures, throttleEvent)
	case observed[throttle.GroupStats, throttle.Event]:
		return group("throttle", p, throttleGroupFigures, throttleEvent)
	case observed[throttle.SharedStats, throttle.Event]:
		return of("throttle", p, throttleSharedFigures, throttleEvent)
	case observed[throttle.AdaptiveStats, throttle.Event]:
		return of("throttle", p, throttleAdaptiveFigures, throttleEvent)
	case observed[cacheaside.Stats, cacheaside.Event]:
		return of("cache", p, cacheFigures, cacheEvent)
	case observed[lease.Stats, lease.Event]:
		return of("lease", p, leaseFigures, leaseEvent)
	case observed[saga.Stats, saga.Event]:
		return of("saga", p, sagaFigures, sagaEvent)
	case pooled:
		return poolEntry(p)
	}
	return other(p)
}
