package saga_test

import (
	"context"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga"
)

// A report collects the events of sagas that make no progress.
type report struct {
	mu   sync.Mutex
	list []saga.Event
}

func (r *report) config() saga.RunnerConfig {
	return saga.RunnerConfig{
		Name: "worker", StalledAfter: time.Hour,
		OnEvent: on(saga.EventStalled, func(e saga.Event) {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.list = append(r.list, e)
		}),
	}
}

// told returns the events so far.
func (r *report) told() []saga.Event {
	synctest.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.list)
}

func TestRunnerReportsASagaThatMakesNoProgress(t *testing.T) {
	charge := step("charge")
	charge.Pivot, charge.Undo = true, nil
	slow := func(st saga.Step[trip]) saga.Step[trip] {
		st.Backoff = saga.Exponential(100*time.Millisecond, time.Minute)
		return st
	}
	tickets := slow(failing("tickets", errDeclined))
	refused := slow(step("flight"))
	refused.Middleware = undoing(refusing(always, time.Second))
	for name, c := range map[string]struct {
		sg          *saga.Saga[trip]
		step, error string
	}{
		"past the pivot":          {sequence(charge, tickets), "tickets", "declined"},
		"an Undo that is refused": {sequence(refused, failing("hotel", saga.NoEffect(errDeclined))), "flight", "users: refused"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var failing report
				r, _ := begin(t, saga.NewMemory(), failing.config(), c.sg)
				mustStart(t, r, c.sg)
				time.Sleep(24 * time.Hour)
				told := failing.told()
				require.Len(t, told, 5, "after 1, 2, 4, 8 and 16 hours, whatever was written in between")
				for i, f := range told {
					require.Equal(t, "trip-1", f.ID)
					require.Equal(t, c.step, f.Step)
					require.EqualError(t, f.Err, c.error)
					require.GreaterOrEqual(t, f.Took, time.Hour<<i)
					require.LessOrEqual(t, f.Took, (time.Hour+2*time.Minute)<<i)
				}
				require.EqualValues(t, 5, r.Stats().Stalled)
				in, err := r.Get(t.Context(), "trip-1")
				require.NoError(t, err)
				require.Equal(t, 24*time.Hour, in.Since().Round(time.Second), "since the last progress, not the last write")
			})
		})
	}
}

func TestRunnerReportsAnAttemptThatDoesNotEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var failing report
		end := make(chan struct{})
		hang := step("hotel")
		hang.Timeout = 90 * time.Minute
		hang.Do = func(context.Context, *trip) error { <-end; return nil }
		sg := sequence(step("flight"), hang)
		r, _ := begin(t, saga.NewMemory(), failing.config(), sg)
		mustStart(t, r, sg)
		time.Sleep(89 * time.Minute)
		require.Empty(t, failing.told(), "it may take its time")
		time.Sleep(2 * time.Minute)
		told := failing.told()
		require.Len(t, told, 1)
		require.Equal(t, 90*time.Minute, told[0].Took)
		require.Equal(t, "hotel", told[0].Step)
		require.EqualError(t, told[0].Err, "saga: an attempt runs 0s after the end of its ctx")
		close(end)
		_, err := result[trip](t.Context(), r, "trip-1")
		require.NoError(t, err)
		time.Sleep(48 * time.Hour)
		require.Len(t, failing.told(), 1)
	})
}

func TestRunnerReportsNoSagaThatGoesOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var failing report
		slow := func(name string) saga.Step[trip] {
			st, calls := step(name), 0
			st.Timeout = time.Hour
			st.Backoff = func(int) time.Duration { return 10 * time.Minute }
			st.Do = func(context.Context, *trip) error {
				if calls++; calls == 1 {
					return errDeclined
				}
				time.Sleep(40 * time.Minute)
				return nil
			}
			return st
		}
		sg := sequence(slow("a"), slow("b"), slow("c"))
		r, _ := begin(t, saga.NewMemory(), failing.config(), sg)
		mustStart(t, r, sg)
		_, err := result[trip](t.Context(), r, "trip-1")
		require.NoError(t, err)
		require.Empty(t, failing.told())
	})
}
