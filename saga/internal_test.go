// The tests in this file need unexported names.

package saga

import (
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// Figures are counted, read and begun at once. The race detector sees what takes no lock.
func TestFiguresUnderStress(t *testing.T) {
	var f figures
	f.of("trip")
	var calls sync.WaitGroup
	for _, call := range []func(){
		func() { f.of("trip") },
		func() { f.count(func(s *Stats) { s.Claimed++ }) },
		func() { f.entry("trip", EventCompleted, 1) },
		func() { f.attempt("trip", OutcomeDone, 1) },
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
		Sagas:   []SagaStats{{Saga: "trip", Completed: 100, Took: 100, Attempts: AttemptStats{Done: 100, Took: 100}}},
	}, f.stats())
}
