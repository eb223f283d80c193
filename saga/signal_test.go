package saga_test

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga"
	store "github.com/go-resilience/resilience/saga/sagastore"
)

// awaits returns a step that waits for a signal and writes the payload to the state.
func awaits(signal string) saga.Step[trip] {
	st := step(signal)
	st.Await = signal
	st.Do = func(ctx context.Context, s *trip) error {
		payload, ok := saga.SignalFrom(ctx, signal)
		s.Calls = append(s.Calls, fmt.Sprintf("%s %s %v", signal, payload, ok))
		return nil
	}
	return st
}

func state(t *testing.T, r *saga.Runner, id, step string) saga.StepState {
	t.Helper()
	for _, st := range instance(t, r, id).Steps {
		if st.Name == step {
			return st
		}
	}
	require.Fail(t, "no step "+step)
	return saga.StepState{}
}

// TestAwait signals a waiting saga: from the runner that held it, from another process, in a transaction, and before
// the saga reaches the step.
func TestAwait(t *testing.T) {
	for name, signal := range map[string]func(t *testing.T, store *txMemory, r *saga.Runner){
		"here": func(t *testing.T, _ *txMemory, r *saga.Runner) {
			require.NoError(t, r.Signal(t.Context(), "trip-1", "paid", []byte("cash")))
		},
		"again and again": func(t *testing.T, _ *txMemory, r *saga.Runner) {
			for _, payload := range []string{"cash", "card", "cash"} {
				require.NoError(t, r.Signal(t.Context(), "trip-1", "paid", []byte(payload)))
			}
		},
		"from another process": func(t *testing.T, store *txMemory, _ *saga.Runner) {
			r := saga.NewRunner(store, saga.RunnerConfig{}) // without definitions
			require.NoError(t, r.Signal(t.Context(), "trip-1", "paid", []byte("cash")))
		},
		"in a transaction": func(t *testing.T, store *txMemory, r *saga.Runner) {
			tx, err := store.Begin(t.Context())
			require.NoError(t, err)
			require.NoError(t, r.SignalTx(t.Context(), tx, "trip-1", "paid", []byte("cash")))
			require.NoError(t, tx.Commit())
			r.Wake()
		},
	} {
		for _, early := range []bool{false, true} {
			t.Run(fmt.Sprint(name, " early ", early), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					store := newTxMemory(t)
					first := step("flight")
					first.Timeout = time.Hour
					first.Do = func(context.Context, *trip) error { time.Sleep(20 * time.Minute); return nil }
					later := step("tickets")
					later.Do = func(ctx context.Context, s *trip) error {
						payload, _ := saga.SignalFrom(ctx, "paid")
						s.Calls = append(s.Calls, "later "+string(payload))
						_, ok := saga.SignalFrom(ctx, "packed")
						require.False(t, ok)
						payload, _ = saga.SignalFrom(saga.WithCommand(ctx, saga.Command{ID: "other"}), "paid")
						require.Equal(t, "cash", string(payload), "a command within an attempt")
						return nil
					}
					sg := sequence(first, awaits("paid"), later)
					r, _ := begin[trip](t, store, saga.RunnerConfig{}, sg)
					begun := time.Now()
					mustStart(t, r, sg)
					if early {
						time.Sleep(time.Minute)
						signal(t, store, r)
					} else {
						time.Sleep(long(7 * time.Hour))
						require.Zero(t, r.Stats().Held, "a waiting saga holds no place")
						st := state(t, r, "trip-1", "paid")
						require.Equal(t, saga.StepWaiting, st.Status)
						require.False(t, st.MaybeApplied)
						require.Equal(t, 20*time.Minute, st.WaitingSince.Sub(begun))
						signal(t, store, r)
					}
					begun = time.Now()
					s, err := result[trip](t.Context(), r, "trip-1")
					require.NoError(t, err)
					require.Equal(t, []string{"paid cash true", "later cash"}, s.Calls)
					if !early {
						require.LessOrEqual(t, time.Since(begun), time.Second, "the next poll")
					}
					require.NoError(t, r.Signal(t.Context(), "trip-1", "paid", []byte("late repetition")))
				})
			})
		}
	}
}

func last(list []string, n int) []string { return list[len(list)-n:] }

// TestOperatorActionSeesEarlierSignals: a saga that an operator lets continue does not wait for a signal that is
// stored.
func TestOperatorActionSeesEarlierSignals(t *testing.T) {
	t.Run("skip of the step before", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			paid := awaits("paid")
			paid.AwaitFor = long(24 * time.Hour)
			sg := sequence(awaits("approved"), paid)
			r, _ := begin(t, saga.NewMemory(), saga.RunnerConfig{}, sg)
			mustStart(t, r, sg)
			require.NoError(t, r.Signal(t.Context(), "trip-1", "paid", []byte("cash")))
			time.Sleep(time.Minute)
			begun := time.Now()
			operate(t, r, "trip-1", saga.Operation{Action: saga.ActionSkip, Step: "approved", Note: "by phone"})
			s, err := result[trip](t.Context(), r, "trip-1")
			require.NoError(t, err)
			require.Equal(t, []string{"paid cash true"}, s.Calls)
			require.LessOrEqual(t, time.Since(begun), time.Second)
		})
	})
}

// TestLastMomentSignalIsInTime: another process sends the signal after the last poll and before the time expires.
func TestLastMomentSignalIsInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := saga.NewMemory()
		st := awaits("paid")
		st.AwaitFor = 1900 * time.Millisecond
		sg := sequence(st)
		r, _ := begin(t, store, saga.RunnerConfig{}, sg)
		mustStart(t, r, sg)
		time.Sleep(1500 * time.Millisecond)
		require.Zero(t, r.Stats().Held, "a waiting saga holds no place, however short its wait is")
		require.NoError(t, saga.NewRunner(store, saga.RunnerConfig{}).Signal(t.Context(), "trip-1", "paid", []byte("cash")))
		s, err := result[trip](t.Context(), r, "trip-1")
		require.NoError(t, err)
		require.Equal(t, []string{"paid cash true"}, s.Calls)
	})
}

func TestSignalErrors(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sg := sequence(awaits("paid"))
		r, _ := begin(t, saga.NewMemory(), saga.RunnerConfig{}, sg)
		mustStart(t, r, sg)
		ctx := t.Context()
		require.ErrorIs(t, r.Signal(ctx, "trip-2", "paid", nil), saga.ErrNotFound)
		require.ErrorIs(t, r.Signal(ctx, "trip-1", "payed", nil), saga.ErrNotAllowed)
		require.ErrorContains(t, r.Signal(ctx, "trip-1", "", nil), "name of the signal is")
		require.ErrorContains(t, r.Signal(ctx, "trip-1", "paid", make([]byte, 64<<10+1)), "must be at most 65536")
		require.ErrorIs(t, r.Signal(ctx, "trip-2", "paid", make([]byte, 64<<10)), saga.ErrNotFound)
		require.ErrorContains(t, r.SignalTx(ctx, nil, "trip-1", "paid", nil), "saga: no transactions")
		require.NoError(t, r.Operate(ctx, "trip-1", saga.Operation{Action: saga.ActionCancel, Note: "no"}))
		_, err := result[trip](ctx, r, "trip-1")
		require.ErrorIs(t, err, saga.ErrCanceled)
		err = r.Signal(ctx, "trip-1", "paid", nil)
		require.ErrorIs(t, err, saga.ErrNotAllowed)
		require.ErrorContains(t, err, "it is compensated")
		require.ErrorContains(t, saga.Run(ctx, sg, &trip{}), "it needs a Runner")
	})
}

// TestDelay delays a first step, a step in a sequence, and a step that does nothing else, under a Runner that stops
// during the delay, and under Run.
func TestDelay(t *testing.T) {
	first, last := step("flight"), step("hotel")
	first.Delay, last.Delay = 10*time.Minute, long(24*time.Hour)
	sg := sequence(first, saga.Step[trip]{Name: "rest", Delay: time.Hour}, last, step("car"))
	all := 10*time.Minute + time.Hour + last.Delay
	synctest.Test(t, func(t *testing.T) {
		var s trip
		begun := time.Now()
		require.NoError(t, saga.Run(t.Context(), sg, &s))
		require.Equal(t, []string{"do flight", "do hotel", "do car"}, s.Calls)
		require.Equal(t, all, time.Since(begun))
	})
	synctest.Test(t, func(t *testing.T) {
		store := saga.NewMemory()
		r, stop := begin(t, store, saga.RunnerConfig{}, sg)
		begun := time.Now()
		mustStart(t, r, sg)
		time.Sleep(all - last.Delay/2)
		require.Zero(t, r.Stats().Held)
		require.Zero(t, r.Stats().Stalled)
		st := state(t, r, "trip-1", "hotel")
		require.Equal(t, saga.StepWaiting, st.Status)
		require.Equal(t, st.WaitingSince.Add(last.Delay), st.NotBefore)
		stop()
		time.Sleep(last.Delay / 24)
		r, _ = begin(t, store, saga.RunnerConfig{}, sg)
		s, err := result[trip](t.Context(), r, "trip-1")
		require.NoError(t, err)
		require.Equal(t, []string{"do flight", "do hotel", "do car"}, s.Calls)
		require.InDelta(t, all.Seconds(), time.Since(begun).Seconds(), 4)
		require.Less(t, len(events(t, r, "trip-1")), 20, "it is not looked at while it waits")
	})
}

// TestSignalJustBeforeParking: the signal arrives after the owner has read the signals and before it parks the saga,
// when a signal makes no saga due.
func TestSignalJustBeforeParking(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := &parking{Store: saga.NewMemory()}
		sg := sequence(awaits("paid"))
		r, _ := begin[trip](t, st, saga.RunnerConfig{LeaseTTL: time.Hour}, sg)
		st.before = func() {
			_, err := st.Post(t.Context(), store.PostRequest{ID: "trip-1", Name: "paid"})
			require.NoError(t, err)
		}
		begun := time.Now()
		mustStart(t, r, sg)
		requireEnd(t, r, "trip-1", nil)
		require.LessOrEqual(t, time.Since(begun), time.Second)
	})
}

// TestPayloadIsNotShared: a step that writes into the payload does not change it for other steps.
func TestPayloadIsNotShared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		reads := func(name string) saga.Step[trip] {
			st := step(name)
			st.Do = func(ctx context.Context, s *trip) error {
				payload, _ := saga.SignalFrom(ctx, "paid")
				s.Calls = append(s.Calls, string(payload))
				copy(payload, "gone")
				return nil
			}
			return st
		}
		sg := sequence(awaits("paid"), reads("a"), reads("b"))
		r, _ := begin(t, saga.NewMemory(), saga.RunnerConfig{}, sg)
		mustStart(t, r, sg)
		require.NoError(t, r.Signal(t.Context(), "trip-1", "paid", []byte("cash")))
		s, err := result[trip](t.Context(), r, "trip-1")
		require.NoError(t, err)
		require.Equal(t, []string{"cash", "cash"}, s.Calls[len(s.Calls)-2:])
	})
}

// TestSignalIsSeenByUndoOrRefused sends a signal just before or just after the commit that turns the saga back.
func TestSignalIsSeenByUndoOrRefused(t *testing.T) {
	for _, after := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			store := &turning{Store: saga.NewMemory()}
			invoice := step("invoice")
			invoice.Undo = func(ctx context.Context, s *trip) error {
				payload, ok := saga.SignalFrom(ctx, "paid")
				s.Calls = append(s.Calls, fmt.Sprintf("undo invoice %s %v", payload, ok))
				return nil
			}
			sg := sequence(invoice, awaits("paid"))
			r, _ := begin[trip](t, store, saga.RunnerConfig{}, sg)
			elsewhere := saga.NewRunner(store.Store, saga.RunnerConfig{})
			signal := func() { store.err = elsewhere.Signal(t.Context(), "trip-1", "paid", []byte("cash")) }
			if after {
				store.after = signal
			} else {
				store.before = signal
			}
			mustStart(t, r, sg)
			time.Sleep(time.Hour)
			operate(t, r, "trip-1", saga.Operation{Action: saga.ActionCancel, Note: "ill"})
			s, err := result[trip](t.Context(), r, "trip-1")
			require.ErrorIs(t, err, saga.ErrCanceled)
			if after {
				require.ErrorIs(t, store.err, saga.ErrNotAllowed)
				require.Equal(t, []string{"do invoice", "undo invoice  false"}, s.Calls)
			} else {
				require.NoError(t, store.err)
				require.Equal(t, []string{"do invoice", "undo invoice cash true"}, s.Calls)
			}
		})
	}
}

// TestCancelWhileSagaGetsStuck: a cancellation just before the commit of the status has no effect.
func TestCancelWhileSagaGetsStuck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := &parking{Store: saga.NewMemory()}
		sg := cursed()
		r, _ := observed[trip](t, st, saga.RunnerConfig{}, silent, sg)
		st.before = func() {
			operate(t, r, "trip-1", saga.Operation{Action: saga.ActionCancel, Note: "ill"})
		}
		mustStart(t, r, sg)
		time.Sleep(time.Minute)
		require.Equal(t, []string{"stuck charge"}, last(events(t, r, "trip-1"), 1))
	})
}

// cursed returns a saga that is stuck at its pivot, and again at an Undo after an operator turns it back.
func cursed() *saga.Saga[trip] {
	flight, charge := step("flight"), failing("charge", saga.Permanent(errDeclined))
	flight.Undo, flight.UndoAttempts = note("undo flight", errDeclined), 1
	charge.Pivot, charge.Undo, charge.Attempts = true, nil, 1
	return sequence(flight, charge, awaits("paid"), awaits("packed"), awaits("sent"))
}

// TestStuckSagaAcceptsSignalsUntilItTurnsBack also reads the signals that were sent before.
func TestStuckSagaAcceptsSignalsUntilItTurnsBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newTxMemory(t)
		sg := cursed()
		r, _ := begin[trip](t, store, saga.RunnerConfig{}, sg)
		mustStart(t, r, sg)
		signal := func(name string) error { return r.Signal(t.Context(), "trip-1", name, nil) }
		signalTx := func(name string) error {
			tx, err := store.Begin(t.Context())
			require.NoError(t, err)
			err = r.SignalTx(t.Context(), tx, "trip-1", name, nil)
			require.NoError(t, tx.Commit())
			return err
		}
		_, err := result[trip](t.Context(), r, "trip-1")
		require.ErrorIs(t, err, saga.ErrStuck)
		require.NoError(t, signal("paid"))
		require.NoError(t, signalTx("packed"))

		operate(t, r, "trip-1", saga.Operation{Action: saga.ActionCompensate, Note: "not on the statement"})
		requireEnd(t, r, "trip-1", saga.ErrStuck)
		for _, again := range []string{"paid", "packed"} {
			require.NoError(t, signal(again))
			require.NoError(t, signalTx(again))
		}
		require.ErrorIs(t, signal("sent"), saga.ErrNotAllowed)
		require.ErrorContains(t, signal("sent"), "it is stuck on its way back")
		require.ErrorIs(t, signalTx("sent"), saga.ErrNotAllowed)
		require.ErrorContains(t, signalTx("send"), "no step of trip version 1 awaits it")
		list, err := store.Messages(t.Context(), "trip-1")
		require.NoError(t, err)
		require.Len(t, list, 2)
	})
}

// TestSignalIsRefusedWhileSagaTurnsBack: the saga is stuck while it goes forward when Signal is called, and stuck
// while it compensates when the store stores the signal.
func TestSignalIsRefusedWhileSagaTurnsBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &asked{Store: saga.NewMemory()}
		sg := cursed()
		r, _ := begin[trip](t, store, saga.RunnerConfig{}, sg)
		mustStart(t, r, sg)
		requireEnd(t, r, "trip-1", saga.ErrStuck)
		store.before = func() {
			operate(t, r, "trip-1", saga.Operation{Action: saga.ActionCompensate, Note: "not on the statement"})
			requireEnd(t, r, "trip-1", saga.ErrStuck)
		}
		require.ErrorIs(t, r.Signal(t.Context(), "trip-1", "paid", nil), saga.ErrNotAllowed)
		list, err := store.Messages(t.Context(), "trip-1")
		require.NoError(t, err)
		require.Empty(t, list)
		require.True(t, instance(t, r, "trip-1").TurnedBack)
	})
}

// An asked store calls before when it stores a signal.
type asked struct {
	store.Store
	before func()
}

func (a *asked) Post(ctx context.Context, req store.PostRequest) (store.Record, error) {
	a.before()
	return a.Store.Post(ctx, req)
}

// A turning store calls before and after around the commit that turns the saga back.
type turning struct {
	store.Store
	before, after func()
	err           error
}

func (s *turning) Commit(ctx context.Context, req store.CommitRequest) (store.Receipt, error) {
	turns := func(f *func()) {
		if call := *f; call != nil && req.Status == saga.Compensating {
			*f = nil
			call()
		}
	}
	turns(&s.before)
	receipt, err := s.Store.Commit(ctx, req)
	turns(&s.after)
	return receipt, err
}

// A parking store calls before once, before it parks a saga.
type parking struct {
	store.Store
	before func()
}

func (p *parking) Commit(ctx context.Context, req store.CommitRequest) (store.Receipt, error) {
	if before := p.before; req.Release && before != nil {
		p.before = nil
		before()
	}
	return p.Store.Commit(ctx, req)
}

func TestSignalWakesTheRunner(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sg := sequence(awaits("paid"))
		r, _ := begin(t, saga.NewMemory(), saga.RunnerConfig{Poll: 5 * time.Hour}, sg)
		mustStart(t, r, sg)
		time.Sleep(time.Minute)
		require.NoError(t, r.Signal(t.Context(), "trip-1", "paid", nil))
		synctest.Wait()
		require.Equal(t, saga.StepDone, state(t, r, "trip-1", "paid").Status)
	})
}
