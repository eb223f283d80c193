package saga

import (
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestMetricsUnderStress counts, reads and registers concurrently. The race detector finds an access without a lock.
func TestMetricsUnderStress(t *testing.T) {
	r := NewRunner(NewMemory(), RunnerConfig{})
	f := &r.figures
	f.register("trip")
	var calls sync.WaitGroup
	for _, call := range []func(){
		func() { f.register("trip") },
		func() { f.register("mail") },
		func() { f.count(func(s *Stats) { s.Claimed++ }) },
		func() { f.saga("trip", "status=completed") },
		func() { f.saga("unknown", "status=completed") },
		func() { f.warn() },
		func() { r.Describe().Metrics() },
		func() { r.stored() },
	} {
		calls.Go(func() {
			for range 100 {
				call()
			}
		})
	}
	calls.Wait()
	require.Equal(t, Stats{Claimed: 100}, f.total)
	require.Equal(t, map[string]map[string]int64{"trip": {"status=completed": 100}, "mail": {}}, f.sagas)
}
