package saga

import (
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestMetricsUnderStress counts, reads and registers concurrently. The race detector finds an access without a lock.
func TestMetricsUnderStress(t *testing.T) {
	r := NewRunner(NewMemory(), RunnerConfig{})
	c := &r.counters
	c.register("trip")
	var calls sync.WaitGroup
	for _, call := range []func(){
		func() { c.register("trip") },
		func() { c.register("mail") },
		func() { c.count(func(s *Stats) { s.Claimed++ }) },
		func() { c.countSaga("trip", "status=completed") },
		func() { c.countSaga("unknown", "status=completed") },
		func() { c.warn() },
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
	require.Equal(t, Stats{Claimed: 100}, c.total)
	require.Equal(t, map[string]map[string]int64{"trip": {"status=completed": 100}, "mail": {}}, c.sagas)
}
