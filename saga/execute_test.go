package saga_test

import (
	"context"
	"database/sql"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga"
	store "github.com/go-resilience/resilience/saga/sagastore"
)

// TestMaxTakeovers counts how often a saga may be taken over without a result.
func TestMaxTakeovers(t *testing.T) {
	for name, c := range map[string]struct {
		most, takeovers int
		data            string
		err             string
	}{
		"as often":       {3, 3, `{}`, ""},
		"once more":      {3, 4, `{}`, "saga: taken over 4 times without a result"},
		"without bound":  {-1, 1000, `{}`, ""},
		"and unreadable": {3, 4, `{`, "saga: trip: state does not decode: unexpected end of JSON input"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := &gate{Store: saga.NewMemory()}
				g.claim = func(ctx context.Context, req store.ClaimRequest) ([]store.Record, error) {
					recs, err := g.Store.Claim(ctx, req)
					for i := range recs {
						recs[i].Takeovers, recs[i].State = c.takeovers, []byte(c.data)
					}
					return recs, err
				}
				sg := sequence(step("flight"))
				r, _ := observed(t, store.Store(g), saga.RunnerConfig{MaxTakeovers: c.most}, silent, sg)
				abandoned(t, g.Store, "trip-1", "dead")
				time.Sleep(time.Minute)
				in := instance(t, r, "trip-1")
				require.Equal(t, c.err, in.Cause)
				if c.err == "" {
					require.Equal(t, saga.Completed, in.Status)
				}
			})
		})
	}
}

// TestChildrenCarryParentsContext, even if another process starts the children.
func TestChildrenCarryParentsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		var seen []string
		leaf := sequence(step("room"))
		leaf.Name = "hotel"
		leaf.Steps[0].Do = func(ctx context.Context, _ *trip) error {
			mu.Lock()
			defer mu.Unlock()
			seen = append(seen, trace(ctx))
			return nil
		}
		sg := sequence(saga.Step[trip]{Name: "later", Delay: time.Hour}, saga.Step[trip]{
			Name: "hotel", Child: saga.ChildOf(leaf, func(*trip) (trip, error) { return trip{}, nil }, nil),
		})
		cfg := saga.RunnerConfig{Inject: trace, Extract: withTrace}
		st := saga.NewMemory()
		r, stop := begin(t, st, cfg, leaf, sg)
		_, err := saga.Register(r, sg).Start(withTrace(t.Context(), "trace 1"), "trip-1", trip{})
		require.NoError(t, err)
		stop()
		r, _ = begin(t, st, cfg, leaf, sg)
		requireEnd(t, r, "trip-1", nil)
		require.Equal(t, []string{"trace 1"}, seen)
	})
}

// TestTransactionForOneDirection has a Do without a transaction and its Undo in one, and the reverse.
func TestTransactionForOneDirection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newTxMemory(t)
		there, back := step("there"), inTx("back")
		there.Undo, there.UndoTx = nil, inTx("there").UndoTx
		back.UndoTx, back.Undo = nil, step("back").Undo
		sg := sequence(there, back, failing("hotel", saga.Declined(errDeclined)))
		r, _ := begin[trip](t, store, saga.RunnerConfig{}, sg)
		mustStart(t, r, sg)
		s, err := saga.Register(r, sg).Result(t.Context(), "trip-1")
		require.ErrorIs(t, err, saga.ErrCompensated)
		require.Equal(t, []string{"do back", "undo there"}, store.l.did())
		require.Equal(t, []string{"do there", "do back", "do hotel", "undo back", "undo there"}, s.Calls)
	})
}

// TestAttemptDoesNotStartAfterLeaseExpiry: the answer to a commit arrives after the lease has expired.
func TestAttemptDoesNotStartAfterLeaseExpiry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &gate{Store: saga.NewMemory()}
		var late atomic.Bool
		g.commit = func(ctx context.Context, req store.CommitRequest) (store.Receipt, error) {
			receipt, err := g.Store.Commit(ctx, req)
			if late.CompareAndSwap(false, true) {
				g.set(true) // and no heartbeat arrives
				time.Sleep(20 * time.Second)
				g.set(false)
			}
			return receipt, err
		}
		var epochs []int64
		hotel := step("hotel")
		hotel.Do = func(ctx context.Context, _ *trip) error {
			epochs = append(epochs, saga.CommandFrom(ctx).Epoch)
			return nil
		}
		sg := sequence(step("flight"), hotel)
		r, _ := observed(t, store.Store(g), saga.RunnerConfig{}, silent, sg)
		mustStart(t, r, sg)
		requireCompleted(t, r, "trip-1")
		require.Equal(t, []int64{2}, epochs)
	})
}

// TestDeletedSagaIsLost checks that its runner drops it.
func TestDeletedSagaIsLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &gate{Store: saga.NewMemory()}
		gone := false
		g.commit = func(ctx context.Context, req store.CommitRequest) (store.Receipt, error) {
			gone = true
			return store.Receipt{}, store.ErrFenced
		}
		sg := sequence(step("flight"))
		r, _ := observed(t, store.Store(&vanishing{gate: g, gone: &gone}), saga.RunnerConfig{}, silent, sg)
		mustStart(t, r, sg)
		time.Sleep(time.Second)
		require.EqualValues(t, 1, r.Stats().Lost)
		require.Zero(t, r.Stats().Held)
	})
}

type vanishing struct {
	*gate
	gone *bool
}

func (v *vanishing) Load(ctx context.Context, id string) (store.Record, error) {
	if *v.gone {
		return store.Record{}, saga.ErrNotFound
	}
	return v.gate.Load(ctx, id)
}

// A hard store fails the first reads of signals.
type hard struct {
	store.Store
	fails int
}

func (s *hard) Messages(ctx context.Context, id string) ([]store.Message, error) {
	if s.fails--; s.fails >= 0 {
		return nil, errDown
	}
	return s.Store.Messages(ctx, id)
}

// TestSignalReadsBackOff retries a failed read of signals with growing pauses.
func TestSignalReadsBackOff(t *testing.T) {
	for fails, within := range map[int]time.Duration{1: 10 * time.Millisecond, 50: 90 * time.Minute} {
		synctest.Test(t, func(t *testing.T) {
			st := &hard{Store: saga.NewMemory(), fails: fails}
			sg := sequence(awaits("paid"))
			r, _ := observed(t, store.Store(st), saga.RunnerConfig{}, silent, sg)
			r.SetChance(func(below time.Duration) time.Duration { return below - 1 })
			begun := time.Now()
			mustStart(t, r, sg)
			require.NoError(t, r.Signal(t.Context(), "trip-1", "paid", nil))
			requireCompleted(t, r, "trip-1")
			require.Less(t, time.Since(begun), within)
			require.GreaterOrEqual(t, time.Since(begun), within/30)
			require.EqualValues(t, fails, r.Stats().StoreErrors)
		})
	}
}

// TestHungStoreEndsParallelAttempt: the ctx of a parallel step is canceled when the lease expires.
func TestHungStoreEndsParallelAttempt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &gate{Store: saga.NewMemory()}
		hang := make(chan struct{})
		g.commit = func(context.Context, store.CommitRequest) (store.Receipt, error) {
			g.set(true)
			<-hang
			return store.Receipt{}, errDown
		}
		defer g.set(false)
		quick, slow := step("quick"), step("slow")
		slow.Parallel = true
		begun := time.Now()
		quick.Do = func(context.Context, *trip) error { time.Sleep(time.Second); return nil }
		var ended time.Duration
		slow.Do = func(ctx context.Context, _ *trip) error {
			<-ctx.Done()
			ended = time.Since(begun)
			return ctx.Err()
		}
		sg := sequence(quick, slow)
		r, _ := observed(t, store.Store(g), saga.RunnerConfig{}, silent, sg)
		mustStart(t, r, sg)
		time.Sleep(time.Minute)
		close(hang)
		synctest.Wait()
		require.LessOrEqual(t, ended, 17*time.Second)
		require.Positive(t, ended)
	})
}

// TestDrainRecordsSuccessOfCutShortStep: a step whose ctx is canceled at the end of the drain returns nil.
func TestDrainRecordsSuccessOfCutShortStep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		slow := taking(5*time.Second, step("flight"))
		sg := sequence(slow, step("hotel"))
		st := saga.NewMemory()
		r, stop := begin(t, st, saga.RunnerConfig{Drain: time.Second}, sg)
		mustStart(t, r, sg)
		synctest.Wait()
		stop()
		require.Equal(t, saga.StepDone, state(t, r, "trip-1", "flight").Status)
	})
}

// TestCancelDuringDoTx: the commit reports the cancellation, and its answer may be lost.
func TestCancelDuringDoTx(t *testing.T) {
	for _, lose := range []int{0, 1} {
		synctest.Test(t, func(t *testing.T) {
			st := newTxMemory(t)
			st.l.lose = lose
			flight := inTx("flight")
			do := flight.DoTx
			flight.DoTx = func(ctx context.Context, tx *sql.Tx, s *trip) error {
				require.NoError(t, saga.NewRunner(st.Store, saga.RunnerConfig{}).Operate(ctx, "trip-1",
					saga.Operation{Action: saga.ActionCancel, Note: "ill"}))
				return do(ctx, tx, s)
			}
			sg := sequence(flight, step("hotel"))
			r, _ := observed[trip](t, st, saga.RunnerConfig{}, silent, sg)
			mustStart(t, r, sg)
			s, err := saga.Register(r, sg).Result(t.Context(), "trip-1")
			require.ErrorIs(t, err, saga.ErrCanceled)
			require.Equal(t, []string{"do flight", "undo flight"}, s.Calls)
		})
	}
}

// TestRepeatedStartClaimsWaitingSaga: no runner has claimed the saga yet.
func TestRepeatedStartClaimsWaitingSaga(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := saga.NewMemory()
		sg := sequence(step("flight"))
		r, _ := begin(t, st, saga.RunnerConfig{Poll: time.Hour}, sg)
		idler := saga.NewRunner(st, saga.RunnerConfig{})
		saga.Register(idler, sg)
		mustStart(t, idler, sg)
		began := time.Now()
		mustStart(t, r, sg)
		requireCompleted(t, r, "trip-1")
		require.Zero(t, time.Since(began))
	})
}

// TestCancelWithLostCommitAnswer: the runner learns of the cancellation when it reads whether the commit has
// happened.
func TestCancelWithLostCommitAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &gate{Store: saga.NewMemory()}
		first := true
		g.commit = func(ctx context.Context, req store.CommitRequest) (store.Receipt, error) {
			receipt, err := g.Store.Commit(ctx, req)
			if first {
				first = false
				require.NoError(t, saga.NewRunner(g.Store, saga.RunnerConfig{}).Operate(ctx, "trip-1",
					saga.Operation{Action: saga.ActionCancel, Note: "ill"}))
				return store.Receipt{}, errDown
			}
			return receipt, err
		}
		slow := step("hotel") // started by that commit
		slow.Do = func(ctx context.Context, _ *trip) error { <-ctx.Done(); return ctx.Err() }
		sg := sequence(step("flight"), slow)
		r, _ := observed(t, store.Store(g), saga.RunnerConfig{}, silent, sg)
		begun := time.Now()
		mustStart(t, r, sg)
		requireEnd(t, r, "trip-1", saga.ErrCanceled)
		require.Zero(t, time.Since(begun), "no heartbeat had to report it")
	})
}
