package registry

import (
	"database/sql"
	"iter"

	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/cacheaside"
	"github.com/go-resilience/resilience/lease"
	"github.com/go-resilience/resilience/retry"
	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/saga/store"
	"github.com/go-resilience/resilience/throttle"
)

// Figures returns the figures that policies of this module have, each name once, with a
// Value of zero. It is for tools that must announce a figure before there is a policy that
// has it. Policies of other origin may have figures of their own.
func Figures() iter.Seq[Figure] {
	return func(yield func(Figure) bool) {
		var all []Figure
		seen := map[string]bool{}
		describe(func(f Figure) {
			if !seen[f.Name] {
				seen[f.Name] = true
				f.Value = 0
				all = append(all, f)
			}
		})
		for _, f := range all {
			if !yield(f) {
				return
			}
		}
	}
}

// describe emits at least one figure of every name. The lists in Stats must not be empty.
func describe(to emit) {
	retryFigures(retry.Stats{}, to)
	budgetFigures(retry.BudgetStats{}, to)
	budgetGroupFigures(retry.BudgetGroupStats{}, to)
	hedgeFigures(retry.HedgeStats{}, to)
	breakerFigures(breaker.Stats{}, to)
	breakerGroupFigures(breaker.GroupStats{}, to)
	bulkheadFigures(bulkhead.Stats{Queued: []int{0}}, to)
	bulkheadGroupFigures(bulkhead.GroupStats{}, to)
	throttleFigures(throttle.Stats{}, to)
	throttleGroupFigures(throttle.GroupStats{}, to)
	throttleSharedFigures(throttle.SharedStats{}, to)
	throttleAdaptiveFigures(throttle.AdaptiveStats{}, to)
	cacheFigures(cacheaside.Stats{}, to)
	leaseFigures(lease.Stats{}, to)
	poolFigures(sql.DBStats{}, to)
	sagaFigures(saga.Stats{
		Sagas: []saga.SagaStats{{}}, Steps: []saga.StepStats{{}}, Stored: store.Counts{Sagas: []store.Count{{}}},
	}, to)
}
