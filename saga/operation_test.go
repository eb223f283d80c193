package saga_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/saga/store"
)

// TestOperateAll mends all stuck sagas, page after page, and leaves alone what does not
// allow it.
func TestOperateAll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mended atomic.Bool
		sg := broken(&mended)
		r, _ := begin(t, saga.NewMemory(), saga.RunnerConfig{OnEvent: silent}, sg)
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
			require.Equal(t, []store.Count{{Saga: "trip", Stuck: sagas - n, Compensated: n}}, counts.Sagas)
			r.Stats() // looks
			synctest.Wait()
			require.Equal(t, counts.Sagas, r.Stats().Stored.Sagas)
		}
		settled(0)
		stuck := saga.Filter{Status: []saga.Status{saga.Stuck}, Limit: 2}
		operate := func(f saga.Filter, op saga.Operation, want saga.Operated) {
			t.Helper()
			var got saga.Operated
			for sofar, err := range r.OperateAll(t.Context(), f, op) {
				require.NoError(t, err)
				require.LessOrEqual(t, sofar.Done+sofar.NotAllowed-got.Done-got.NotAllowed, max(f.Limit, 1), "it tells of each page")
				got = sofar
			}
			require.Equal(t, want, got)
		}
		operate(stuck, saga.Operation{Action: saga.ActionCancel}, saga.Operated{NotAllowed: sagas})
		twice, n := r.OperateAll(t.Context(), stuck, saga.Operation{Action: saga.ActionCancel}), 0
		for range twice {
			break
		}
		for sofar := range twice {
			n = sofar.NotAllowed
		}
		require.Equal(t, sagas, n, "it begins anew")
		operate(stuck, saga.Operation{Action: saga.ActionCompensate}, saga.Operated{NotAllowed: sagas})
		operate(stuck, saga.Operation{Action: saga.ActionSkip, Step: "boat"}, saga.Operated{NotAllowed: sagas})
		operate(stuck, saga.Operation{Action: saga.ActionRetry, Note: "is it open?"}, saga.Operated{Done: sagas})
		settled(0)
		operate(saga.Filter{Text: "trip-3"}, saga.Operation{Action: saga.ActionSkip, Note: "by telephone"}, saga.Operated{Done: 1})
		settled(1)
		mended.Store(true)
		operate(stuck, saga.Operation{Action: saga.ActionRetry, Note: "it is open"}, saga.Operated{Done: sagas - 1})
		settled(sagas)
		operate(saga.Filter{Limit: sagas}, saga.Operation{Action: saga.ActionAbandon}, saga.Operated{NotAllowed: sagas})
		log, err := r.HistoryPage(t.Context(), "trip-3", 7, 2)
		require.NoError(t, err)
		require.Equal(t, []saga.EventKind{saga.EventRetried, saga.EventUndoFailed}, []saga.EventKind{log[0].Kind, log[1].Kind})
		require.EqualValues(t, 8, log[0].Seq)

		for done, err := range r.OperateAll(t.Context(), saga.Filter{}, saga.Operation{Action: "explode"}) {
			require.Zero(t, done)
			require.EqualError(t, err, `saga: Operation.Action is "explode": must be cancel, retry, skip, compensate or abandon`)
		}
		require.ErrorIs(t, r.Operate(t.Context(), "none", saga.Operation{Action: saga.ActionSkip}), saga.ErrNotFound)
	})
}

// TestOperateAllEndsWhereSagasKeepStarting: it takes those that were there when it began.
func TestOperateAllEndsWhereSagasKeepStarting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sg := sequence(step("flight"))
		store := &startingStore{Store: saga.NewMemory()}
		r := saga.NewRunner(store, saga.RunnerConfig{})
		saga.Register(r, sg)
		store.start = func(n int) {
			_, err := saga.Start(t.Context(), r, sg, fmt.Sprintf("trip-%06d", n), trip{})
			require.NoError(t, err)
		}
		store.start(0)
		for done, err := range r.OperateAll(t.Context(), saga.Filter{Limit: 1}, saga.Operation{Action: saga.ActionCancel}) {
			require.NoError(t, err)
			require.Equal(t, saga.Operated{Done: 1}, done)
		}
	})
}

// A startingStore has another saga at each look.
type startingStore struct {
	store.Store
	start func(n int)
	n     int
}

func (s *startingStore) List(ctx context.Context, f saga.Filter) ([]store.Record, string, error) {
	recs, next, err := s.Store.List(ctx, f)
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
		r, _ := begin(t, saga.NewMemory(), saga.RunnerConfig{OnEvent: silent}, sg)
		mustStart(t, r, sg)
		_, err := result[trip](t.Context(), r, "trip-1")
		require.ErrorIs(t, err, saga.ErrStuck)
		require.NoError(t, r.Operate(t.Context(), "trip-1", saga.Operation{Action: saga.ActionSkip, Note: "by hand"}))
		_, err = result[trip](t.Context(), r, "trip-1")
		require.NoError(t, err)
		require.Equal(t, saga.StepSkipped, state(t, r, "trip-1", "ship").Status)
	})
}

// TestOperateAsTheOperatorHasSeenIt: the second of two equal operations is refused.
func TestOperateAsTheOperatorHasSeenIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pivot, ship := step("charge"), failing("ship", saga.Abort(errors.New("no such address")))
		pivot.Pivot = true
		sg := sequence(pivot, ship)
		r, _ := begin(t, saga.NewMemory(), saga.RunnerConfig{OnEvent: silent}, sg)
		mustStart(t, r, sg)
		_, err := result[trip](t.Context(), r, "trip-1")
		require.ErrorIs(t, err, saga.ErrStuck)
		in, err := r.Get(t.Context(), "trip-1")
		require.NoError(t, err)
		for _, op := range []saga.Action{saga.ActionRetry, saga.ActionSkip, saga.ActionCompensate, saga.ActionAbandon} {
			err := r.Operate(t.Context(), "trip-1", saga.Operation{Action: op, Seq: in.Seq - 1})
			require.ErrorIs(t, err, saga.ErrNotAllowed, op)
			require.ErrorContains(t, err, fmt.Sprintf("its log has grown from %d entries to %d", in.Seq-1, in.Seq))
		}
		retry := saga.Operation{Action: saga.ActionRetry, Seq: in.Seq}
		require.NoError(t, r.Operate(t.Context(), "trip-1", retry))
		synctest.Wait()
		require.ErrorIs(t, r.Operate(t.Context(), "trip-1", retry), saga.ErrNotAllowed)
	})
}

// counted is a Store that counts the calls of Counts, which fail or panic with err.
type counted struct {
	store.Store
	calls atomic.Int64
	err   atomic.Value
}

func (c *counted) Counts(ctx context.Context) (store.Counts, error) {
	c.calls.Add(1)
	switch v := c.err.Load().(type) {
	case error:
		return store.Counts{}, v
	case string:
		panic(v)
	}
	return c.Store.Counts(ctx)
}

// Stats are read by many, often. The store is asked every five seconds at most, whoever
// reads, and a store that fails costs nobody the last answer.
func TestStatsLookAtTheStoreNowAndThen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &counted{Store: saga.NewMemory()}
		var failed atomic.Int64
		r := saga.NewRunner(store, saga.RunnerConfig{OnEvent: on(saga.EventStoreFailed, func(saga.Event) { failed.Add(1) })})
		now := func() time.Time {
			s := r.Stats()
			synctest.Wait()
			return s.Stored.Now
		}
		require.Zero(t, now())
		require.NotZero(t, now())
		for range 60 {
			now()
			time.Sleep(time.Second)
		}
		require.EqualValues(t, 12, store.calls.Load())

		last := now()
		store.err.Store(any(io.ErrUnexpectedEOF))
		for range 10 {
			time.Sleep(time.Minute)
			require.WithinDuration(t, last, now(), 5*time.Second)
		}
		require.EqualValues(t, 10, failed.Load())

		time.Sleep(5*time.Minute + time.Second)
		require.Zero(t, now(), "nobody has looked for so long that it would mislead")
	})
}

func TestAStoreThatPanicsForStatsIsAnError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &counted{Store: saga.NewMemory()}
		var told atomic.Value
		r := saga.NewRunner(store, saga.RunnerConfig{OnEvent: on(saga.EventStoreFailed, func(e saga.Event) { told.Store(e.Err) })})
		store.err.Store("oh")
		r.Stats()
		synctest.Wait()
		require.EqualError(t, told.Load().(error), "saga: counts: the store panicked: oh")
	})
}
