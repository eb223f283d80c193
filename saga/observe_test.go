package saga_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga"
)

// An audience records the events of a runner.
type audience struct {
	mu   sync.Mutex
	list []saga.Event
}

func (a *audience) hear(_ context.Context, e saga.Event) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.list = append(a.list, e)
}

// heard returns the recorded events of some kinds, or of all.
func (a *audience) heard(kinds ...saga.EventKind) []saga.Event {
	synctest.Wait()
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(a.list), func(e saga.Event) bool {
		return len(kinds) > 0 && !slices.Contains(kinds, e.Kind)
	})
}

// lines formats events as short lines.
func lines(list []saga.Event) []string {
	var out []string
	for _, e := range list {
		line := fmt.Sprint(e.Kind, " ", e.Step, " ", e.Op, " ", e.Outcome)
		if e.Took > 0 {
			line += fmt.Sprint(" ", e.Took)
		}
		if e.Err != nil {
			line += fmt.Sprint(" ", e.Err)
		}
		out = append(out, strings.Join(strings.Fields(line), " "))
	}
	return out
}

// taking makes each call of a step take the duration d.
func taking(d time.Duration, st saga.Step[trip]) saga.Step[trip] {
	do := st.Do
	st.Do = func(ctx context.Context, s *trip) error { time.Sleep(d); return do(ctx, s) }
	return st
}

func TestObserveReportsEventsInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		full := errors.New("full")
		flight := taking(time.Second, step("flight"))
		flight.Middleware = refusing(1, time.Second)
		car := step("car")
		calls := 0
		car.Do = func(context.Context, *trip) error {
			if calls++; calls == 1 {
				return errDeclined
			}
			return nil
		}
		sg := sequence(flight, car, taking(2*time.Second, failing("hotel", saga.Declined(full))))
		r, _ := begin(t, saga.NewMemory(), saga.RunnerConfig{Name: "worker"}, sg)
		var a, late audience
		stop := r.Observe(a.hear)
		begun := time.Now()
		mustStart(t, r, sg)
		_, err := saga.Register(r, sg).Result(t.Context(), "trip-1")
		require.ErrorIs(t, err, saga.ErrCompensated)
		life := time.Since(begun)
		heard := a.heard()
		require.Equal(t, []string{
			"created",
			"attempted flight do refused users: refused",
			"attempted flight do done 1s",
			"step_refused flight do users: refused",
			"step_done flight do",
			"attempted car do maybe_applied declined",
			"attempted car do done",
			"step_done car do",
			"attempted hotel do declined 2s full",
			"step_no_effect hotel do full",
			"turned_back hotel full",
			"attempted car undo done",
			"step_undone car undo",
			"attempted flight undo done",
			"step_undone flight undo",
			fmt.Sprint("compensated ", life),
		}, lines(heard))
		seq := int64(0)
		for i, e := range heard {
			require.Equal(t, "trip", e.Saga)
			require.Equal(t, 1, e.Version)
			require.Equal(t, "trip-1", e.ID)
			require.False(t, e.At.IsZero())
			if e.Seq > 0 {
				seq++
				require.Equal(t, seq, e.Seq, "event %d", i)
			}
		}
		require.Len(t, events(t, r, "trip-1"), int(seq), "each entry of the log")
		require.Equal(t, saga.Compensated, heard[len(heard)-1].Status)
		require.ErrorIs(t, heard[8].Err, full, "the error itself")
		attempts := a.heard(saga.EventAttempted)
		require.Equal(t, []int{1, 1, 1, 2, 1, 1, 1}, []int{
			attempts[0].Attempt, attempts[1].Attempt, attempts[2].Attempt, attempts[3].Attempt,
			attempts[4].Attempt, attempts[5].Attempt, attempts[6].Attempt,
		})

		t.Log("any number, at any time, until stopped")
		stop()
		stop()
		r.Observe(late.hear)
		_, err = saga.Register(r, sg).Start(t.Context(), "trip-2", trip{})
		require.NoError(t, err)
		requireEnd(t, r, "trip-2", saga.ErrCompensated)
		require.Len(t, a.heard(), len(heard))
		require.Len(t, late.heard(saga.EventCompensated), 1)
	})
}

func TestStatsCountByDefinition(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		charge := taking(time.Second, step("charge"))
		charge.Pivot, charge.Undo = true, nil
		sg := sequence(taking(time.Second, step("flight")), charge)
		looked := step("flight")
		looked.ReadOnly, looked.Undo = true, nil
		newer := sequence(looked, taking(3*time.Second, step("insurance")), failing("hotel", saga.Declined(errDeclined)))
		newer.Version = 2
		broken := sequence(failing("send", saga.Permanent(errDeclined)))
		broken.Name = "mail"
		broken.Steps[0].Undo = note("undo send", saga.Permanent(errDeclined))
		r, _ := observed(t, saga.NewMemory(), saga.RunnerConfig{}, silent, sg, newer, broken)
		require.Contains(t, metricsOf(r), "saga.sagas{saga=mail,status=abandoned}", "all series are there from the start")
		for i, sg := range []*saga.Saga[trip]{sg, sg, newer, broken} {
			_, err := saga.Register(r, sg).Start(t.Context(), fmt.Sprint("trip-", i), trip{})
			require.NoError(t, err)
			_, _ = saga.Register(r, sg).Result(t.Context(), fmt.Sprint("trip-", i))
		}
		time.Sleep(time.Minute)
		operate(t, r, "trip-3", saga.Operation{Action: saga.ActionAbandon})
		counted := make(map[string]float64)
		for name, n := range metricsOf(r) {
			if n > 0 && (strings.HasPrefix(name, "saga.sagas") || strings.HasPrefix(name, "saga.step")) {
				counted[name] = n
			}
		}
		require.Equal(t, map[string]float64{
			"saga.sagas{saga=mail,status=started}":   1,
			"saga.sagas{saga=mail,status=stuck}":     1,
			"saga.sagas{saga=mail,status=abandoned}": 1,
			"saga.sagas{saga=trip,status=started}":   3, "saga.sagas{saga=trip,status=completed}": 2,
			"saga.sagas{saga=trip,status=compensated}":            1,
			"saga.step.attempts{saga=mail,outcome=maybe_applied}": 1,
			"saga.step.attempts{saga=mail,outcome=failed}":        1,
			"saga.step.attempts{saga=trip,outcome=done}":          7,
			"saga.step.attempts{saga=trip,outcome=declined}":      1,
		}, counted)
	})
}

// TestStatsCountEachAttemptOnce counts and reports each attempt once, including attempts that a stop cuts short, and
// whose transaction does not commit. TestAttemptOfLostSagaIsInterrupted counts those that a lost lease cuts short.
func TestStatsCountEachAttemptOnce(t *testing.T) {
	outcomes := func(r *saga.Runner, a *audience) map[string]int {
		told := make(map[string]int)
		for _, e := range a.heard(saga.EventAttempted) {
			told[string(e.Outcome)]++
		}
		counted := make(map[string]int)
		for _, outcome := range []string{"done", "declined", "maybe_applied", "failed", "refused", "interrupted"} {
			if n := total(r, "outcome="+strings.ReplaceAll(outcome, " ", "_")); n > 0 {
				counted[outcome] = n
			}
		}
		require.Equal(t, counted, told)
		require.Zero(t, r.Stats().InFlight)
		return counted
	}
	t.Run("stopped", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			sg := slow(time.Hour)
			r, stop := begin(t, saga.NewMemory(), saga.RunnerConfig{Drain: saga.None}, sg)
			var a audience
			r.Observe(a.hear)
			mustStart(t, r, sg)
			time.Sleep(time.Second)
			require.Equal(t, 1.0, metricsOf(r)["saga.in_flight"])
			stop()
			require.Equal(t, map[string]int{"interrupted": 1}, outcomes(r, &a))
		})
	})
	t.Run("a DoTx that commits at the second try", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			store := newTxMemory(t)
			store.l.refuse = 1
			sg := sequence(inTx("flight"))
			r, _ := observed[trip](t, store, saga.RunnerConfig{}, silent, sg)
			var a audience
			r.Observe(a.hear)
			mustStart(t, r, sg)
			requireEnd(t, r, "trip-1", nil)
			require.Equal(t, map[string]int{"failed": 1, "done": 1}, outcomes(r, &a))
		})
	})
}
