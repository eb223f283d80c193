package saga_test

import (
	"context"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga"
)

// TestStalledIsReportedAtEachDoubling: a step that fails or is refused is reported at the eighth attempt and
// whenever the number has doubled, both forward and while compensating. A step that is not retried is not reported.
func TestStalledIsReportedAtEachDoubling(t *testing.T) {
	charge := step("charge")
	charge.Pivot, charge.Undo = true, nil
	slow := func(st saga.Step[trip]) saga.Step[trip] {
		st.Backoff = func(int) time.Duration { return time.Second }
		return st
	}
	refused := slow(step("flight"))
	refused.Middleware = undoing(refusing(always, time.Second))
	spent := slow(failing("hotel", errDown))
	spent.Attempts, spent.Pivot, spent.Undo = 8, false, step("hotel").Undo
	for name, c := range map[string]struct {
		sg          *saga.Saga[trip]
		step, error string
		op          saga.Op
		told        []int
	}{
		"past the pivot": {sequence(charge, slow(failing("tickets", errDeclined))), "tickets", "declined",
			saga.OpDo, []int{8, 16, 32}},
		"an Undo that is refused": {sequence(refused, failing("hotel", saga.Declined(errDeclined))), "flight",
			"users: refused", saga.OpUndo, []int{8, 16, 32}},
		"the last attempt": {sequence(spent), "", "", "", nil},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var mu sync.Mutex
				var told []saga.Event
				r, _ := observed(t, saga.NewMemory(), saga.RunnerConfig{}, func(_ context.Context, e saga.Event) {
					mu.Lock()
					defer mu.Unlock()
					if e.Kind == saga.EventStalled {
						told = append(told, e)
					}
				}, c.sg)
				mustStart(t, r, c.sg)
				time.Sleep(50 * time.Second)
				synctest.Wait()
				mu.Lock()
				defer mu.Unlock()
				var attempts []int
				for _, e := range told {
					require.Equal(t, c.step, e.Step)
					require.Equal(t, c.op, e.Op)
					require.Equal(t, "trip-1", e.ID)
					require.ErrorContains(t, e.Err, c.error)
					attempts = append(attempts, e.Attempt)
				}
				require.Equal(t, c.told, slices.Clone(attempts))
				require.EqualValues(t, len(c.told), r.Stats().Stalled)
				require.EqualValues(t, len(c.told), metricsOf(r)["saga.stalls"])
				require.EqualValues(t, r.Stats().Held, metricsOf(r)["saga.held"])
			})
		})
	}
}
