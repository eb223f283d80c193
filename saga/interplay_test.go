package saga_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/saga/store"
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

// TestRetryLeavesABestEffortStepThatWasGivenUp: the saga has gone on without it. Two steps
// of a sequence never run at the same time.
func TestRetryLeavesABestEffortStepThatWasGivenUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mails atomic.Int64
		pivot, mail, ship := step("charge"), step("mail"), step("ship")
		pivot.Pivot, mail.BestEffort = true, true
		mail.Do = func(context.Context, *trip) error { mails.Add(1); return saga.Abort(errors.New("bounced")) }
		var mended atomic.Bool
		ship.Do = func(context.Context, *trip) error {
			if mended.Load() {
				return nil
			}
			return saga.Abort(errors.New("no such address"))
		}
		sg := sequence(pivot, mail, ship)
		r, _ := begin(t, saga.NewMemory(), saga.RunnerConfig{OnEvent: silent}, sg)
		mustStart(t, r, sg)
		_, err := result[trip](t.Context(), r, "trip-1")
		require.ErrorIs(t, err, saga.ErrStuck)
		mended.Store(true)
		require.NoError(t, r.Operate(t.Context(), "trip-1", saga.Operation{Action: saga.ActionRetry}))
		_, err = result[trip](t.Context(), r, "trip-1")
		require.NoError(t, err)
		require.EqualValues(t, 1, mails.Load())
	})
}

// TestSkipOfAnAlternativeThatWasLeft while another one is under way: the step would be
// done, and its alternative not undone.
func TestSkipOfAnAlternativeThatWasLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hotel, hostel := failing("hotel", saga.NoEffect(errors.New("full"))), failing("hostel", errDeclined)
		hostel.Backoff = func(int) time.Duration { return time.Hour }
		hotel.Or = []saga.Step[trip]{hostel}
		sg := sequence(hotel, step("car"))
		r, _ := begin(t, saga.NewMemory(), saga.RunnerConfig{}, sg)
		mustStart(t, r, sg)
		time.Sleep(time.Minute)
		require.ErrorIs(t, r.Operate(t.Context(), "trip-1", saga.Operation{Action: saga.ActionSkip, Step: "hotel"}), saga.ErrNotAllowed)
		require.NoError(t, r.Operate(t.Context(), "trip-1", saga.Operation{Action: saga.ActionSkip, Step: "hostel"}))
		_, err := result[trip](t.Context(), r, "trip-1")
		require.NoError(t, err)
	})
}

// TestOperateSkipsNoStepThatIsNotInTheWay: the saga is on its way back, and will undo the
// step at which it turned.
func TestOperateSkipsNoStepThatIsNotInTheWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		car := failing("car", saga.Abort(errDeclined))
		var undone atomic.Bool
		car.Settle = time.Hour
		car.Undo = func(context.Context, *trip) error { undone.Store(true); return nil }
		sg := sequence(step("flight"), car)
		r, _ := begin(t, saga.NewMemory(), saga.RunnerConfig{}, sg)
		mustStart(t, r, sg)
		time.Sleep(time.Minute)
		require.ErrorIs(t, r.Operate(t.Context(), "trip-1", saga.Operation{Action: saga.ActionSkip}), saga.ErrNotAllowed)
		_, err := result[trip](t.Context(), r, "trip-1")
		require.ErrorIs(t, err, saga.ErrCompensated)
		require.True(t, undone.Load())
	})
}

// TestRetryDoesNotCutSettleShort, of a step that failed, and of one that is done after an
// attempt that is in doubt.
func TestRetryDoesNotCutSettleShort(t *testing.T) {
	for _, done := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			car, hotel := step("car"), failing("hotel", saga.NoEffect(errDeclined))
			var calls, undone atomic.Int64
			car.Settle, car.Backoff = 10*time.Hour, func(int) time.Duration { return 0 }
			car.Do = func(context.Context, *trip) error {
				switch {
				case !done:
					return saga.Abort(errDeclined)
				case calls.Add(1) == 1:
					return errDeclined
				}
				return nil
			}
			car.Undo = func(context.Context, *trip) error { undone.Add(1); return nil }
			hotel.Delay = time.Hour
			sg := sequence(car, hotel)
			r, _ := begin(t, saga.NewMemory(), saga.RunnerConfig{}, sg)
			begun := time.Now()
			mustStart(t, r, sg)
			for range 4 {
				time.Sleep(30 * time.Minute)
				require.NoError(t, r.Operate(t.Context(), "trip-1", saga.Operation{Action: saga.ActionRetry}))
			}
			require.Zero(t, undone.Load())
			_, err := result[trip](t.Context(), r, "trip-1")
			require.ErrorIs(t, err, saga.ErrCompensated)
			require.GreaterOrEqual(t, time.Since(begun), 10*time.Hour)
			require.Less(t, time.Since(begun), 11*time.Hour)
		})
	}
}

// TestASagaThatWaitsForItsPivotWaitsInPeace although the children of a step beside the
// pivot have ended: it was canceled, and does not look at them before it knows what has
// become of the pivot.
func TestASagaThatWaitsForItsPivotWaitsInPeace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		child := &saga.Saga[parcel]{Name: "parcel", Steps: []saga.Step[parcel]{{
			Name: "pack", Delay: time.Hour,
			Do: func(context.Context, *parcel) error { return nil }, Undo: func(context.Context, *parcel) error { return nil },
		}}}
		parcels := saga.Step[trip]{
			Name: "parcels", After: []string{},
			Saga: saga.ChildOf(child, func(*trip) (parcel, error) { return parcel{}, nil }, nil),
		}
		charge := step("charge")
		charge.Pivot, charge.After, charge.Undo = true, []string{}, nil
		var known atomic.Bool
		charge.Do = func(context.Context, *trip) error {
			if known.Load() {
				return nil // it had taken effect: too late to turn back
			}
			known.Store(true)
			return comeBack(9 * time.Hour)
		}
		sg := &saga.Saga[trip]{Name: "trip", Steps: []saga.Step[trip]{parcels, charge}}
		store := &hastened{Store: saga.NewMemory()}
		r, _ := begin[trip](t, store, saga.RunnerConfig{}, sg)
		mustStart(t, r, sg)
		time.Sleep(time.Minute)
		require.NoError(t, r.Cancel(t.Context(), "trip-1", "ill"))
		time.Sleep(10 * time.Hour)
		in, err := r.Get(t.Context(), "trip-1")
		require.NoError(t, err)
		require.Equal(t, saga.Completed, in.Status)
		require.Less(t, store.times.Load(), int64(10))
	})
}

// comeBack is an error that leaves a Do in doubt, and asks for a wait.
type comeBack time.Duration

func (comeBack) Error() string               { return "come back" }
func (c comeBack) RetryAfter() time.Duration { return time.Duration(c) }

// A hastened store counts the calls of Hasten, and lets none through if there are too many.
type hastened struct {
	store.Store
	times atomic.Int64
}

func (s *hastened) Hasten(ctx context.Context, id string) error {
	if s.times.Add(1) > 100 {
		return errors.New("too often")
	}
	return s.Store.Hasten(ctx, id)
}
