package saga_test

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga"
)

// TestEndedSagasAreRetained checks that each status has its own time, in more batches than one.
func TestEndedSagasAreRetained(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		good := sequence(step("flight"))
		bad := sequence(step("flight"), failing("car", saga.Declined(errDeclined)))
		bad.Name = "bad"
		cfg := saga.RunnerConfig{Retention: saga.Retention{Completed: time.Hour, Compensated: 3 * time.Hour}}
		r, _ := begin(t, saga.NewMemory(), cfg, good, bad)
		const sagas = 450
		for i := range sagas {
			_, err := saga.Register(r, good).Start(t.Context(), fmt.Sprint("good-", i), trip{})
			require.NoError(t, err)
		}
		_, err := saga.Register(r, bad).Start(t.Context(), "bad", trip{})
		require.NoError(t, err)
		left := func() (good, bad int) {
			page, _, err := r.List(t.Context(), saga.Filter{Limit: 2 * sagas, WithoutState: true})
			require.NoError(t, err)
			for _, in := range page {
				if in.Status == saga.Completed {
					good++
				} else {
					bad++
				}
			}
			return good, bad
		}
		for _, c := range []struct {
			sleep     time.Duration
			good, bad int
		}{{30 * time.Minute, sagas, 1}, {35 * time.Minute, 0, 1}, {3 * time.Hour, 0, 0}} {
			time.Sleep(c.sleep)
			synctest.Wait()
			good, bad := left()
			require.Equal(t, []int{c.good, c.bad}, []int{good, bad})
		}
		require.EqualValues(t, sagas+1, r.Stats().Deleted)
	})
}
