package saga_test

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/policy"
	"github.com/go-resilience/resilience/saga"
)

// A stuckCall is a Do that ignores its ctx the first time that it is called.
type stuckCall struct {
	mu    sync.Mutex
	calls int
	back  chan struct{} // closed when the first call is to return
}

func (c *stuckCall) do(_ context.Context, s *trip) error {
	c.mu.Lock()
	c.calls++
	first := c.calls == 1
	c.mu.Unlock()
	if first {
		<-c.back
		s.Calls = append(s.Calls, "too late")
		return nil
	}
	s.Calls = append(s.Calls, "again")
	return nil
}

func TestHungStepIsReportedAndTakenOver(t *testing.T) {
	for name, c := range map[string]struct {
		cancel, elsewhere bool
		want              []string
	}{
		"by this runner": {want: []string{"again"}},
		"by another one": {elsewhere: true, want: []string{"again"}},
		"to turn back":   {cancel: true, want: []string{"undo flight"}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				call := &stuckCall{back: make(chan struct{})}
				flight := step("flight")
				flight.Do, flight.Timeout = call.do, 10*time.Second
				sg, st := sequence(flight), saga.NewMemory()
				var mu sync.Mutex
				var reported []saga.Event
				r, stop := observed(t, st, saga.RunnerConfig{LeaseTTL: 15 * time.Second}, func(_ context.Context, e saga.Event) {
					mu.Lock()
					defer mu.Unlock()
					if e.Kind == saga.EventStalled {
						reported = append(reported, e)
					}
				}, sg)
				mustStart(t, r, sg)
				op := saga.Operation{Action: saga.ActionRetry, Note: "it hangs"}
				time.Sleep(24 * time.Second)
				require.Empty(t, reported)
				require.ErrorIs(t, r.Operate(t.Context(), "trip-1", op), saga.ErrNotAllowed)
				require.Equal(t, policy.Health{}, r.Describe().Health(t.Context()))

				time.Sleep(2 * time.Second)
				synctest.Wait()
				const text = "saga: do of step flight has not returned a lease after its timeout of 10s"
				mu.Lock()
				require.Len(t, reported, 1)
				require.Equal(t, "flight", reported[0].Step)
				require.Equal(t, "trip-1", reported[0].ID)
				require.EqualError(t, reported[0].Err, text)
				mu.Unlock()
				require.EqualValues(t, 1, r.Stats().Stalled)
				require.Equal(t, policy.Health{
					Status: policy.Fail, State: "stalled", Detail: `step flight of trip "trip-1" does not return`,
				}, r.Describe().Health(t.Context()))
				in := instance(t, r, "trip-1")
				require.True(t, in.Steps[0].MaybeApplied)
				require.Equal(t, text, in.LastError)
				require.Equal(t, []saga.Action{saga.ActionCancel, saga.ActionRetry, saga.ActionAbandon}, in.Actions)

				other := r
				if c.elsewhere {
					other, _ = begin(t, st, saga.RunnerConfig{}, sg)
				}
				if c.cancel {
					cancel := saga.Operation{Action: saga.ActionCancel, Note: "give up"}
					require.NoError(t, other.Operate(t.Context(), "trip-1", cancel))
					time.Sleep(10 * time.Second)
				}
				require.NoError(t, other.Operate(t.Context(), "trip-1", op))
				s, err := result[trip](t.Context(), other, "trip-1")
				if c.cancel {
					require.ErrorIs(t, err, saga.ErrCompensated)
				} else {
					require.NoError(t, err)
				}
				require.Equal(t, c.want, s.Calls)
				time.Sleep(20 * time.Second)
				require.Equal(t, policy.Health{}, r.Describe().Health(t.Context()))

				close(call.back)
				synctest.Wait()
				s, _ = result[trip](t.Context(), other, "trip-1")
				require.Equal(t, c.want, s.Calls, "the late result is dropped")
				require.Contains(t, events(t, r, "trip-1"), "stalled flight")
				stop()
			})
		})
	}
}

// TestHungStepThatReturns is no longer one that an operator may take over.
func TestHungStepThatReturns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		call := &stuckCall{back: make(chan struct{})}
		flight, hotel := step("flight"), step("hotel")
		flight.Do, flight.Timeout = call.do, 10*time.Second
		hotel.Do = func(context.Context, *trip) error { time.Sleep(time.Minute); return nil }
		hotel.Timeout = time.Hour
		sg := sequence(flight, hotel)
		r, _ := observed(t, saga.NewMemory(), saga.RunnerConfig{}, silent, sg)
		mustStart(t, r, sg)
		time.Sleep(30 * time.Second)
		require.Contains(t, instance(t, r, "trip-1").Actions, saga.ActionRetry)
		close(call.back)
		synctest.Wait()
		require.NotContains(t, instance(t, r, "trip-1").Actions, saga.ActionRetry)
		require.ErrorIs(t, r.Operate(t.Context(), "trip-1", saga.Operation{Action: saga.ActionRetry}), saga.ErrNotAllowed)
		s, err := result[trip](t.Context(), r, "trip-1")
		require.NoError(t, err)
		require.Equal(t, []string{"too late"}, s.Calls)
		require.Equal(t, policy.Health{}, r.Describe().Health(t.Context()))
	})
}

// TestHungStepIsTakenOverWithOthers that are in progress: they may have taken effect, too.
func TestHungStepIsTakenOverWithOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		call := &stuckCall{back: make(chan struct{})}
		flight, hotel := step("flight"), step("hotel")
		flight.Do, flight.Timeout = call.do, 10*time.Second
		hotel.Parallel, hotel.Timeout = true, time.Hour
		hotel.Do = func(ctx context.Context, _ *trip) error { <-ctx.Done(); return ctx.Err() }
		car := step("car")
		car.Parallel, car.Timeout = true, 10*time.Second
		car.Do = func(context.Context, *trip) error { <-call.back; return nil }
		stuck := failing("mail", saga.Permanent(errDeclined))
		stuck.Pivot, stuck.Undo = true, nil
		sg, bad, st := sequence(flight, hotel, car), sequence(stuck), saga.NewMemory()
		bad.Name = "bad"
		r, _ := observed(t, st, saga.RunnerConfig{}, silent, sg, bad)
		mustStart(t, r, sg)
		_, err := saga.Register(r, bad).Start(t.Context(), "bad-1", trip{})
		require.NoError(t, err)
		time.Sleep(30 * time.Second)
		require.False(t, state(t, r, "trip-1", "hotel").MaybeApplied)
		require.Equal(t, policy.Health{
			Status: policy.Fail, State: "stuck", Detail: `step car of trip "trip-1" and 1 more do not return; 1 saga`,
		}, r.Describe().Health(t.Context()))
		retry := saga.Operation{Action: saga.ActionRetry, Note: "it hangs"}
		require.NoError(t, idle(st, sg).Operate(t.Context(), "trip-1", retry))
		require.True(t, state(t, r, "trip-1", "hotel").MaybeApplied)
		require.Empty(t, instance(t, r, "trip-1").Owner)
		close(call.back)
	})
}
