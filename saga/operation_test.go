package saga_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
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

// TestASkipWhileAnotherCancels turns the saga back now, although what is left of it waits.
func TestASkipWhileAnotherCancels(t *testing.T) {
	for name, c := range map[string]struct {
		cancel   bool
		recall   func(context.Context, *saga.Runner) error // of the commit that makes it due
		failures int64
		want     saga.Status
	}{
		"nobody does":     {want: saga.Running},
		"it is made due":  {cancel: true, want: saga.Compensated},
		"the store fails": {cancel: true, recall: func(context.Context, *saga.Runner) error { return errDown }, failures: 1, want: saga.Running},
		"and a third abandons": {cancel: true, recall: func(ctx context.Context, other *saga.Runner) error {
			return cmp.Or(other.Operate(ctx, "trip-1", saga.Operation{Action: saga.ActionAbandon}), store.ErrFenced)
		}, want: saga.Abandoned},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := &gate{Store: saga.NewMemory()}
				flight, hotel := failing("flight", errDeclined), failing("hotel", errDeclined)
				flight.After, hotel.After = []string{}, []string{}
				flight.Backoff, hotel.Backoff = saga.Exponential(time.Hour, time.Hour), saga.Exponential(2*time.Hour, 2*time.Hour)
				sg := sequence(flight, hotel)
				worker, _ := begin(t, g.Store, saga.RunnerConfig{}, sg)
				mustStart(t, worker, sg)
				time.Sleep(time.Minute)
				commits := 0
				r, other := saga.NewRunner(g, saga.RunnerConfig{OnEvent: silent}), saga.NewRunner(g.Store, saga.RunnerConfig{})
				saga.Register(r, sg)
				g.commit = func(ctx context.Context, req store.CommitRequest) (store.Receipt, error) {
					commits++
					if commits == 1 && c.cancel {
						require.NoError(t, other.Cancel(ctx, "trip-1", "ill"))
					}
					if commits == 2 && c.recall != nil {
						if err := c.recall(ctx, other); err != nil {
							return store.Receipt{}, err
						}
					}
					return g.Store.Commit(ctx, req)
				}
				require.NoError(t, r.Operate(t.Context(), "trip-1", saga.Operation{Action: saga.ActionSkip, Step: "flight"}))
				time.Sleep(2 * time.Second)
				in, err := r.Get(t.Context(), "trip-1")
				require.NoError(t, err)
				require.Equal(t, c.want, in.Status)
				require.Equal(t, c.failures, r.Stats().StoreErrors)
				if !c.cancel {
					require.Equal(t, 1, commits, "it is not made due before hotel is")
				}
			})
		})
	}
}

// TestARetryDoesNotCostTheLeaseOfTheRunnerThatHasClaimedSince: it may be the same.
func TestARetryDoesNotCostTheLeaseOfTheRunnerThatHasClaimedSince(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &gate{Store: saga.NewMemory()}
		var late atomic.Bool
		g.commit = func(ctx context.Context, req store.CommitRequest) (store.Receipt, error) {
			receipt, err := g.Store.Commit(ctx, req)
			if late.Load() {
				time.Sleep(2 * time.Second) // it is claimed meanwhile
			}
			return receipt, err
		}
		calls := 0
		st := step("flight")
		st.Backoff = saga.Exponential(time.Hour, time.Hour)
		st.Do = func(ctx context.Context, _ *trip) error {
			if calls++; calls == 1 {
				return errDeclined
			}
			time.Sleep(3 * time.Second)
			return ctx.Err()
		}
		sg := sequence(st)
		r, _ := begin(t, g, saga.RunnerConfig{}, sg)
		mustStart(t, r, sg)
		time.Sleep(time.Minute)
		late.Store(true)
		require.NoError(t, r.Operate(t.Context(), "trip-1", saga.Operation{Action: saga.ActionRetry}))
		_, err := result[trip](t.Context(), r, "trip-1")
		require.NoError(t, err)
		require.Zero(t, r.Stats().Lost)
		require.Equal(t, 2, calls)
	})
}

// TestAbandonIsKnownAtOnceHere: an attempt under way ends, and Result returns.
func TestAbandonIsKnownAtOnceHere(t *testing.T) {
	hang := step("flight")
	hang.Do = func(ctx context.Context, _ *trip) error { <-ctx.Done(); return ctx.Err() }
	hang.Timeout = time.Hour
	parked := failing("flight", errDeclined)
	parked.Backoff = saga.Exponential(time.Hour, time.Hour)
	for name, st := range map[string]saga.Step[trip]{"running": hang, "parked": parked} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				sg := sequence(st)
				r, _ := begin(t, saga.NewMemory(), saga.RunnerConfig{Poll: 20 * time.Minute}, sg)
				mustStart(t, r, sg)
				time.Sleep(time.Minute + time.Second) // between two heartbeats
				begun := time.Now()
				time.AfterFunc(time.Minute, func() {
					assert.NoError(t, r.Operate(t.Context(), "trip-1", saga.Operation{Action: saga.ActionAbandon}))
				})
				_, err := result[trip](t.Context(), r, "trip-1")
				require.ErrorIs(t, err, saga.ErrAbandoned)
				synctest.Wait()
				require.Zero(t, r.Stats().Held)
				require.Equal(t, time.Minute, time.Since(begun))
			})
		})
	}
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

// counted is a Store that counts the calls of Counts, which fail or panic with err, or take so
// long.
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
	case time.Duration:
		time.Sleep(v)
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
		require.NotZero(t, last)
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

func TestStatsOfASlowStoreLookOnceAtATime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &counted{Store: saga.NewMemory()}
		store.err.Store(10 * time.Second)
		r := saga.NewRunner(store, saga.RunnerConfig{})
		for range 9 {
			r.Stats()
			time.Sleep(time.Second)
		}
		require.EqualValues(t, 1, store.calls.Load())
		time.Sleep(time.Minute)
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
