// The tests in this file need unexported names.

package saga

import (
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga/internal/plan"
)

// Figures are counted, read and begun at once. The race detector sees what takes no lock.
func TestFiguresUnderStress(t *testing.T) {
	var f figures
	units := []plan.Unit{{Step: plan.Step{Name: "flight"}, HasUndo: true}}
	steps := f.of(&plan.Plan{Name: "trip", Units: units})
	var calls sync.WaitGroup
	for _, call := range []func(){
		func() { f.of(&plan.Plan{Name: "trip", Units: units}) },
		func() { f.count(func(s *Stats) { s.Claimed++ }) },
		func() { f.entry("trip", EventCompleted, 1) },
		func() { f.attempt(steps[0], OpDo, OutcomeDone, 1) },
		func() { f.stats() },
	} {
		calls.Go(func() {
			for range 100 {
				call()
			}
		})
	}
	calls.Wait()
	require.Equal(t, Stats{
		Claimed: 100,
		Sagas:   []SagaStats{{Saga: "trip", Completed: 100, Took: 100}},
		Steps:   []StepStats{{Saga: "trip", Step: "flight", Op: OpDo, Done: 100, Took: 100}, {Saga: "trip", Step: "flight", Op: OpUndo}},
	}, f.stats())
}
