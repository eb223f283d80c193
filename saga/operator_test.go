package saga_test

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga"
	store "github.com/go-resilience/resilience/saga/sagastore"
)

// broken returns a saga whose hotel cannot be canceled until it is fixed, and whose car is declined.
func broken(mended *atomic.Bool) *saga.Saga[trip] {
	hotel := step("hotel")
	hotel.UndoAttempts = 2
	hotel.Undo = func(ctx context.Context, s *trip) error {
		if !mended.Load() {
			return errors.New("closed for the season")
		}
		return note("undo hotel", nil)(ctx, s)
	}
	return sequence(step("flight"), hotel, failing("car", saga.Declined(errDeclined)))
}

func stuckSaga(t *testing.T, mended *atomic.Bool) (*saga.Runner, *saga.Saga[trip], saga.Event) {
	t.Helper()
	alerts := make(chan saga.Event, 10)
	sg := broken(mended)
	r, _ := observed(t, saga.NewMemory(), saga.RunnerConfig{Name: "worker"}, on(saga.EventStuck, func(e saga.Event) {
		alerts <- e
	}), sg)
	mustStart(t, r, sg)
	requireEnd(t, r, "trip-1", saga.ErrStuck)
	return r, sg, <-alerts
}

func TestStuckSagaIsReportedWithDetails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, _, alert := stuckSaga(t, new(atomic.Bool))
		require.Equal(t, []any{"trip-1", "trip", 1, saga.Stuck}, []any{alert.ID, alert.Saga, alert.Version, alert.Status})
		require.EqualError(t, alert.Err, "closed for the season")

		in := instance(t, r, "trip-1")
		require.True(t, in.TurnedBack)
		require.Equal(t, "car", in.Step)
		require.Equal(t, "declined", in.Cause)
		require.Equal(t, "closed for the season", in.LastError)
		require.JSONEq(t, `{"Calls":["do flight","do hotel","do car"]}`, string(in.State))
		require.Equal(t, []saga.StepState{
			{Name: "flight", Status: saga.StepDone, Attempts: 1},
			{Name: "hotel", Status: saga.StepUndoFailed, Attempts: 1, Undos: 2, Error: "closed for the season"},
			{Name: "car", Status: saga.StepNoEffect, Attempts: 1, Error: "declined"},
		}, in.Steps)
		require.Equal(t, []saga.Action{"retry", "skip", "abandon"}, in.Actions)

		list, _, err := r.List(t.Context(), saga.Filter{Status: []saga.Status{saga.Stuck}})
		require.NoError(t, err)
		require.Len(t, list, 1)
		time.Sleep(time.Hour)
		list, _, err = r.List(t.Context(), saga.Filter{Status: []saga.Status{saga.Stuck}})
		require.NoError(t, err)
		require.Equal(t, time.Hour, list[0].IdleFor())
		synctest.Wait()
		require.EqualValues(t, 1, total(r, "status=stuck"))
	})
}

func TestRefusedOperations(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, _, _ := stuckSaga(t, new(atomic.Bool))
		for _, name := range []string{"boat", "flight"} { // one that does not exist, and one that is done
			err := r.Operate(t.Context(), "trip-1", saga.Operation{Action: saga.ActionSkip, Step: name})
			require.ErrorIs(t, err, saga.ErrNotAllowed)
		}
		require.ErrorContains(t, r.Operate(t.Context(), "trip-1", saga.Operation{Action: "burn"}),
			"Operation.Action must be cancel, retry")
		rest, err := r.History(t.Context(), "trip-1", 100, 0)
		require.NoError(t, err, "it has no more")
		require.Empty(t, rest)
	})
}

func TestHistoryErrors(t *testing.T) {
	r := saga.NewRunner(saga.NewMemory(), saga.RunnerConfig{})
	_, err := r.History(t.Context(), "none", 0, 0)
	require.ErrorIs(t, err, saga.ErrNotFound)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = r.History(ended, "none", 0, 0)
	require.ErrorIs(t, err, context.Canceled)
	require.NotErrorIs(t, err, saga.ErrNotFound, "nobody knows")
}

func TestAbandonWithoutNoteHasNoReason(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, _, _ := stuckSaga(t, new(atomic.Bool))
		operate(t, r, "trip-1", saga.Operation{Action: saga.ActionAbandon})
		_, err := result[trip](t.Context(), r, "trip-1")
		failure, ok := errors.AsType[*saga.Error](err)
		require.True(t, ok)
		require.NoError(t, failure.Err)
		require.EqualError(t, err, `saga: trip "trip-1": abandoned: step car; undo of step hotel: closed for the season`)
	})
}

func TestCancelTurnsTheSagaBack(t *testing.T) {
	hang := step("hotel")
	hang.Do = func(ctx context.Context, _ *trip) error { <-ctx.Done(); return context.Cause(ctx) }
	wait := failing("hotel", errDeclined)
	wait.Backoff = func(int) time.Duration { return time.Hour }
	soon := wait
	soon.Backoff = constant(4 * time.Second)
	for name, st := range map[string]saga.Step[trip]{"running": hang, "parked": wait, "between two attempts": soon} {
		for _, here := range []bool{true, false} {
			synctest.Test(t, func(t *testing.T) {
				store := saga.NewMemory()
				sg := sequence(step("flight"), st, step("car"))
				r, _ := begin(t, store, saga.RunnerConfig{}, sg)
				mustStart(t, r, sg)
				time.Sleep(time.Second)
				operator := r
				if !here {
					operator = saga.NewRunner(store, saga.RunnerConfig{}) // without definitions
				}
				begun := time.Now()
				require.NoError(t, operator.Operate(t.Context(), "trip-1", saga.Operation{Action: saga.ActionCancel, Note: "ill"}),
					name)
				s, err := result[trip](canceledAfter(t, time.Minute), r, "trip-1")
				require.ErrorIs(t, err, saga.ErrCanceled)
				require.ErrorIs(t, err, saga.ErrCompensated)
				if here {
					require.Zero(t, time.Since(begun))
				} else {
					require.LessOrEqual(t, time.Since(begun), 5*time.Second, "the next heartbeat or poll")
				}
				require.Equal(t, []string{"undo hotel", "undo flight"}, s.Calls[len(s.Calls)-2:])
				require.Equal(t, []string{"ill"}, cancelNotes(t, r))
			})
		}
	}
}

// A slowCodec delays the next Encode.
type slowCodec struct{ takes atomic.Int64 }

func (c *slowCodec) Encode(s *trip) ([]byte, error) {
	time.Sleep(time.Duration(c.takes.Swap(0)))
	return json.Marshal(s)
}

func (*slowCodec) Decode(data []byte, s *trip) error { return json.Unmarshal(data, s) }

// TestPivotDoesNotStartTooLate: a cancellation arrives, or the deadline passes, while the start of the pivot is
// recorded.
func TestPivotDoesNotStartTooLate(t *testing.T) {
	for why, meanwhile := range map[error]func(*testing.T, *saga.Runner){
		saga.ErrCanceled: func(t *testing.T, other *saga.Runner) {
			operate(t, other, "trip-1", saga.Operation{Action: saga.ActionCancel, Note: "ill"})
		},
		saga.ErrDeadline: func(*testing.T, *saga.Runner) { time.Sleep(4 * time.Second) },
	} {
		t.Run(why.Error(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				charge := step("charge")
				charge.Pivot, charge.Undo = true, nil
				sg, g, first := sequence(step("flight"), charge), &gate{Store: saga.NewMemory()}, true
				sg.Timeout = 3 * time.Second
				g.commit = func(ctx context.Context, req store.CommitRequest) (store.Receipt, error) {
					if first {
						first = false
						meanwhile(t, idle(g.Store, sg))
					}
					return g.Store.Commit(ctx, req)
				}
				r, _ := begin(t, store.Store(g), saga.RunnerConfig{}, sg)
				mustStart(t, r, sg)
				s, err := result[trip](t.Context(), r, "trip-1")
				require.ErrorIs(t, err, saga.ErrCompensated)
				require.ErrorIs(t, err, why)
				require.Equal(t, []string{"do flight", "undo flight"}, s.Calls)
			})
		})
	}
}

// TestCancelDuringLastTransaction cancels a saga whose last DoTx has ended and is not recorded yet.
func TestCancelDuringLastTransaction(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newTxMemory(t)
		flight, hotel := step("flight"), inTx("hotel")
		hotel.Parallel = true
		var codec slowCodec
		flight.Do, flight.Undo = func(context.Context,
			*trip) error {
			codec.takes.Store(int64(3 * time.Second))
			return nil
		}, note("undo flight", nil)
		do := hotel.DoTx
		hotel.DoTx = func(ctx context.Context, tx *sql.Tx, s *trip) error {
			time.Sleep(time.Second)
			return do(ctx, tx, s)
		}
		sg := sequence(flight, hotel)
		sg.Codec = &codec // the result of hotel waits until the state of flight is encoded
		r, _ := begin[trip](t, store, saga.RunnerConfig{}, sg)
		mustStart(t, r, sg)
		time.Sleep(2 * time.Second)
		operate(t, r, "trip-1", saga.Operation{Action: saga.ActionCancel, Note: "ill"})
		requireEnd(t, r, "trip-1", saga.ErrCanceled)
		require.Equal(t, []string{"do hotel", "undo hotel"}, store.l.did())
	})
}

func cancelNotes(t *testing.T, r *saga.Runner) (notes []string) {
	log, err := r.History(t.Context(), "trip-1", 0, 0)
	require.NoError(t, err)
	for _, e := range log {
		if e.Kind == "canceled" {
			notes = append(notes, e.Error)
		}
	}
	return notes
}

// TestCancelAfterPivotOfUnknownDefinition: the record states that the pivot is done.
func TestCancelAfterPivotOfUnknownDefinition(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		charge, tickets := step("charge"), step("tickets")
		charge.Pivot, tickets.Delay = true, time.Hour
		sg := sequence(step("flight"), charge, tickets)
		store := saga.NewMemory()
		r, _ := begin(t, store, saga.RunnerConfig{}, sg)
		mustStart(t, r, sg)
		synctest.Wait()
		other := saga.NewRunner(store, saga.RunnerConfig{})
		require.ErrorIs(t, other.Operate(t.Context(), "trip-1", saga.Operation{Action: saga.ActionCancel, Note: "late"}),
			saga.ErrNotAllowed)
		in := instance(t, other, "trip-1")
		require.Equal(t, saga.StepDone, in.Steps[1].Status)
		require.False(t, in.CancelRequested)
		require.Equal(t, []saga.Action{saga.ActionRetry, saga.ActionSkip, saga.ActionAbandon}, in.Actions)
	})
}

func TestConcurrentOperators(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mended atomic.Bool
		st := &gate{Store: saga.NewMemory()}
		sg := broken(&mended)
		r, stop := begin(t, st, saga.RunnerConfig{}, sg)
		mustStart(t, r, sg)
		requireEnd(t, r, "trip-1", saga.ErrStuck)
		stop()
		// Another operator is faster, once.
		var calls atomic.Int64
		st.commit = func(ctx context.Context, req store.CommitRequest) (store.Receipt, error) {
			if calls.Add(1) == 1 {
				require.NoError(t, saga.NewRunner(st.Store, saga.RunnerConfig{}).Operate(ctx, "trip-1",
					saga.Operation{Action: saga.ActionAbandon, Note: "first"}))
			}
			return st.Store.Commit(ctx, req)
		}
		require.ErrorIs(t, r.Operate(t.Context(), "trip-1", saga.Operation{Action: saga.ActionRetry, Note: "second"}),
			saga.ErrNotAllowed)
		log, err := r.History(t.Context(), "trip-1", 0, 0)
		require.NoError(t, err)
		require.Equal(t, "first", log[len(log)-1].Error)
	})
}

// TestOperatorKeepsWait: a saga that can continue only later is not due immediately.
func TestOperatorKeepsWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hotel := step("hotel")
		hotel.Delay = time.Hour
		sg := sequence(awaits("approved"), hotel)
		r, stop := begin(t, saga.NewMemory(), saga.RunnerConfig{}, sg)
		mustStart(t, r, sg)
		time.Sleep(time.Minute)
		stop()
		operate(t, r, "trip-1", saga.Operation{Action: saga.ActionSkip, Step: "approved"})
		require.Equal(t, time.Hour, time.Until(instance(t, r, "trip-1").WakeAt))
	})
}
