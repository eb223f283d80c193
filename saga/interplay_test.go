package saga_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	store "github.com/go-resilience/resilience/internal/sagastore"
	"github.com/go-resilience/resilience/saga"
)

// TestACancellationDoesNotWaitForADelay that an operator's Retry or SkipStep comes upon
// after it, before a runner has claimed the saga, or while it is under way.
func TestACancellationDoesNotWaitForADelay(t *testing.T) {
	for _, during := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			rest := saga.Step[trip]{Name: "rest", Delay: 72 * time.Hour}
			sg := sequence(step("flight"), rest)
			store := &beforeCommit{Store: saga.NewMemory()}
			r, stop := begin[trip](t, store, saga.RunnerConfig{}, sg)
			mustStart(t, r, sg)
			time.Sleep(time.Hour)
			stop()
			cancel := func() { require.NoError(t, r.Cancel(t.Context(), "trip-1", "ill")) }
			if during {
				store.do = cancel
			} else {
				cancel()
			}
			require.NoError(t, r.Operate(t.Context(), "trip-1", saga.Operation{Action: saga.ActionRetry}))
			begin(t, store.Store, saga.RunnerConfig{}, sg)
			time.Sleep(time.Minute)
			in, err := r.Get(t.Context(), "trip-1")
			require.NoError(t, err)
			require.Equal(t, saga.Compensated, in.Status)
		})
	}
}

// A beforeCommit calls do before the next Commit.
type beforeCommit struct {
	store.Store
	do func()
}

func (s *beforeCommit) Commit(ctx context.Context, req store.CommitRequest) (store.Receipt, error) {
	if do := s.do; do != nil {
		s.do = nil
		do()
	}
	return s.Store.Commit(ctx, req)
}
