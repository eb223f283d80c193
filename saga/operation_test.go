package saga_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga"
)

// TestOperateAll mends all stuck sagas, page after page, and leaves alone what does not
// allow it.
func TestOperateAll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mended atomic.Bool
		sg := broken(&mended)
		r, _ := begin(t, saga.NewMemory(), saga.RunnerConfig{OnStuck: func(context.Context, saga.StuckSaga) {}}, sg)
		const sagas = 7
		for i := range sagas {
			_, err := saga.Start(t.Context(), r, sg, fmt.Sprint("trip-", i), trip{})
			require.NoError(t, err)
		}
		settled := func(n int) {
			t.Helper()
			synctest.Wait()
			time.Sleep(time.Minute)
			counts, err := r.Counts(t.Context())
			require.NoError(t, err)
			require.Equal(t, []saga.Count{{Saga: "trip", Stuck: sagas - n, Compensated: n}}, counts.Sagas)
			require.Equal(t, counts.Sagas, r.Stats().Stored.Sagas, "the runner has looked meanwhile")
		}
		settled(0)
		stuck := saga.Filter{Status: []saga.Status{saga.Stuck}, Limit: 2}
		operate := func(f saga.Filter, op saga.Operation, want saga.Operated) {
			t.Helper()
			got, err := r.OperateAll(t.Context(), f, op)
			require.NoError(t, err)
			require.Equal(t, want, got)
		}
		operate(stuck, saga.Operation{Action: saga.ActionCancel}, saga.Operated{NotAllowed: sagas})
		operate(stuck, saga.Operation{Action: saga.ActionCompensate}, saga.Operated{NotAllowed: sagas})
		operate(stuck, saga.Operation{Action: saga.ActionSkip, Step: "boat"}, saga.Operated{NotAllowed: sagas})
		operate(stuck, saga.Operation{Action: saga.ActionRetry, Note: "is it open?"}, saga.Operated{Done: sagas})
		settled(0)
		operate(saga.Filter{Text: "trip-3"}, saga.Operation{Action: saga.ActionSkip, Note: "by telephone"}, saga.Operated{Done: 1})
		settled(1)
		mended.Store(true)
		operate(stuck, saga.Operation{Action: saga.ActionRetry, Note: "it is open"}, saga.Operated{Done: sagas - 1})
		settled(sagas)
		operate(saga.Filter{}, saga.Operation{Action: saga.ActionAbandon}, saga.Operated{NotAllowed: sagas})
		log, err := r.HistoryPage(t.Context(), "trip-3", 7, 2)
		require.NoError(t, err)
		require.Equal(t, []saga.EventKind{saga.EventRetried, saga.EventUndoFailed}, []saga.EventKind{log[0].Kind, log[1].Kind})
		require.EqualValues(t, 8, log[0].Seq)

		_, err = r.OperateAll(t.Context(), saga.Filter{}, saga.Operation{Action: "explode"})
		require.EqualError(t, err, `saga: Operation.Action is "explode": must be cancel, retry, skip, compensate or abandon`)
		require.ErrorIs(t, r.Operate(t.Context(), "none", saga.Operation{Action: saga.ActionSkip}), saga.ErrNotFound)
	})
}

// TestOperateAllEndsWhereSagasKeepStarting: it takes those that were there when it began.
func TestOperateAllEndsWhereSagasKeepStarting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sg := sequence(step("flight"))
		store := &startingStore{Memory: saga.NewMemory()}
		r := saga.NewRunner(store, saga.RunnerConfig{})
		saga.Register(r, sg)
		store.start = func(n int) {
			_, err := saga.Start(t.Context(), r, sg, fmt.Sprintf("trip-%06d", n), trip{})
			require.NoError(t, err)
		}
		store.start(0)
		done, err := r.OperateAll(t.Context(), saga.Filter{Limit: 1}, saga.Operation{Action: saga.ActionCancel})
		require.NoError(t, err)
		require.Equal(t, saga.Operated{Done: 1}, done)
	})
}

// A startingStore has another saga at each look.
type startingStore struct {
	*saga.Memory
	start func(n int)
	n     int
}

func (s *startingStore) List(ctx context.Context, f saga.Filter) ([]saga.Record, string, error) {
	recs, next, err := s.Memory.List(ctx, f)
	if s.n++; s.n > 100 {
		return nil, "", errors.New("it does not end")
	}
	time.Sleep(time.Second)
	s.start(s.n)
	if next == "" && len(recs) > 0 {
		next = recs[len(recs)-1].ID
	}
	return recs, next, err
}

// TestOperateSkipsTheStepThatIsInTheWay, and not a BestEffort step that failed before it.
func TestOperateSkipsTheStepThatIsInTheWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pivot, mail, ship := step("charge"), failing("mail", saga.Abort(errors.New("bounced"))), failing("ship", saga.Abort(errors.New("no such address")))
		pivot.Pivot, mail.BestEffort = true, true
		sg := sequence(pivot, mail, ship)
		r, _ := begin(t, saga.NewMemory(), saga.RunnerConfig{OnStuck: func(context.Context, saga.StuckSaga) {}}, sg)
		mustStart(t, r, sg)
		_, err := result[trip](t.Context(), r, "trip-1")
		require.ErrorIs(t, err, saga.ErrStuck)
		require.NoError(t, r.Operate(t.Context(), "trip-1", saga.Operation{Action: saga.ActionSkip, Note: "by hand"}))
		_, err = result[trip](t.Context(), r, "trip-1")
		require.NoError(t, err)
		require.Equal(t, saga.StepSkipped, state(t, r, "trip-1", "ship").Status)
	})
}
