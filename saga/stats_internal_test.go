package saga

import (
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// Figures are counted, read and begun at once. The race detector sees what takes no lock.
func TestFiguresUnderStress(t *testing.T) {
	f := figures{sagas: map[string]*SagaStats{}, stored: map[string]Count{}}
	f.register("trip")
	var calls sync.WaitGroup
	for _, call := range []func(){
		func() { f.register("trip") },
		func() { f.count(func(s *Stats) { s.Claimed++ }) },
		func() { f.saga("trip", func(s *SagaStats) { s.entry(EventCompleted) }) },
		func() { f.saga("unknown", func(s *SagaStats) { s.entry(EventCompleted) }) },
		func() { f.saga("trip", func(s *SagaStats) { s.Attempts[OutcomeDone]++ }) },
		func() { f.stats() },
		func() { f.warn() },
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
		Sagas:   []SagaStats{{Saga: "trip", Completed: 100, Attempts: map[Outcome]int64{OutcomeDone: 100}}},
	}, f.stats())
}
