package saga_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/attempt"
	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/saga"
)

// refusing returns a middleware that refuses the first n calls like a policy.
func refusing(n int, after time.Duration) func(func(context.Context) error) func(context.Context) error {
	return func(next func(context.Context) error) func(context.Context) error {
		return func(ctx context.Context) error {
			if n--; n >= 0 {
				return fmt.Errorf("users: %w", refusal{after})
			}
			return next(ctx)
		}
	}
}

const always = 1 << 30

type middleware = func(func(context.Context) error) func(context.Context) error

// undoing applies the middleware to Undo only, and doing to Do only.
func undoing(mw middleware) middleware {
	return only(true, mw)
}

func only(undo bool, mw middleware) middleware {
	return func(next func(context.Context) error) func(context.Context) error {
		guarded := mw(next)
		return func(ctx context.Context) error {
			if isUndo(ctx) == undo {
				return guarded(ctx)
			}
			return next(ctx)
		}
	}
}

func isUndo(ctx context.Context) bool {
	command := saga.CommandFrom(ctx)
	return command.ID != command.DoID()
}

func TestRunDoesNotCountRefusals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := step("flight")
		st.Attempts, st.Middleware = 2, refusing(10, 0)
		var asked []int
		st.Backoff = func(n int) time.Duration { asked = append(asked, n); return time.Second }
		st.Do = func(ctx context.Context, _ *trip) error {
			require.Equal(t, 1, saga.CommandFrom(ctx).Attempt)
			return nil
		}
		begun := time.Now()
		require.NoError(t, saga.Run(t.Context(), sequence(st), &trip{}))
		require.Equal(t, 10*time.Second, time.Since(begun), "each refusal waits for the backoff")
		require.Equal(t, []int{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}, asked, "which grows")

		t.Log("RetryAfter where that is longer")
		st.Middleware = refusing(3, time.Minute)
		begun = time.Now()
		require.NoError(t, saga.Run(t.Context(), sequence(st), &trip{}))
		require.GreaterOrEqual(t, time.Since(begun), 3*time.Minute)
		require.LessOrEqual(t, time.Since(begun), 200*time.Second)

		t.Log("never in a busy loop")
		st.Middleware, st.Backoff = refusing(100, 0), func(int) time.Duration { return 0 }
		begun = time.Now()
		require.NoError(t, saga.Run(t.Context(), sequence(st), &trip{}))
		require.Equal(t, time.Second, time.Since(begun))
	})
}

func TestRunDoesNotUndoRefusedStep(t *testing.T) {
	for name, c := range map[string]struct {
		err    error
		before error // the error of an attempt before the refusals
		calls  []string
	}{
		"refused":            {err: refusal{}},
		"wrapped":            {err: fmt.Errorf("hotel: %w", refusal{})},
		"joined":             {err: errors.Join(refusal{}, refusal{time.Second})},
		"inside a Permanent": {err: saga.Permanent(refusal{})},
		"inside a NoEffect":  {err: saga.Declined(refusal{})},
		"joined with a timeout": {
			err: errors.Join(refusal{}, context.DeadlineExceeded), calls: []string{"undo hotel"},
		},
		"after a failed attempt":       {err: refusal{}, before: errDeclined, calls: []string{"undo hotel"}},
		"of the second call of a step": {err: saga.MaybeApplied(refusal{}), calls: []string{"undo hotel"}},
		"in a child that ran":          {err: &saga.Error{Status: saga.Stuck, Err: refusal{}}, calls: []string{"undo hotel"}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				st, calls := step("hotel"), 0
				st.Attempts = saga.Unlimited
				st.Do = func(context.Context, *trip) error {
					if calls++; calls == 1 && c.before != nil {
						return c.before
					}
					return c.err
				}
				sg := sequence(step("flight"), st)
				sg.Timeout = time.Minute
				begun := time.Now()
				var s trip
				err := saga.Run(t.Context(), sg, &s)
				require.ErrorIs(t, err, saga.ErrCompensated)
				require.ErrorIs(t, err, saga.ErrDeadline)
				require.ErrorIs(t, err, c.err, "the refusals are reported")
				require.Equal(t, "hotel", detail(t, err).Step)
				require.False(t, behavior.IsRefused(err), "steps were called")
				require.Equal(t, time.Minute, time.Since(begun))
				require.Equal(t, append(append([]string{"do flight"}, c.calls...), "undo flight"), s.Calls)
			})
		})
	}
}

func TestRefusedStepHasNoEffectAfterStop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hotel := step("hotel")
		hotel.Middleware = func(func(context.Context) error) func(context.Context) error {
			return func(ctx context.Context) error { <-ctx.Done(); return refusal{} } // like a queue for a slot
		}
		hotel.Timeout = time.Hour
		sg := sequence(hotel)
		r, stop := begin(t, saga.NewMemory(), saga.RunnerConfig{Drain: time.Second}, sg)
		mustStart(t, r, sg)
		synctest.Wait()
		stop()
		in := instance(t, r, "trip-1")
		require.Empty(t, in.Owner)
		require.False(t, in.Steps[0].MaybeApplied)
		require.Zero(t, in.Steps[0].Attempts)
	})
}

func TestStepIsSeparateOperation(t *testing.T) {
	var marks []int
	keep := func(err error) func(context.Context, *trip) error {
		return func(ctx context.Context, _ *trip) error {
			n, _ := attempt.From(ctx)
			marks = append(marks, n)
			return err
		}
	}
	for _, c := range []struct {
		name           string
		attempts, undo int
		want           []int
	}{
		{"a step that the saga repeats", 3, 2, []int{1, 2, 3, 1, 2}},
		{"also without a limit", -1, -1, []int{1, 2, 3, 4, 1, 2}},
		{"one that it does not", 1, 1, []int{0, 0}},
		{"one of which it repeats the Do", 3, 1, []int{1, 2, 3, 0}},
		{"one of which it repeats the Undo", 1, 2, []int{0, 1, 2}},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, durable := range []bool{false, true} {
				synctest.Test(t, func(t *testing.T) {
					marks = nil
					st, undos := step("flight"), 0
					st.Attempts, st.UndoAttempts = c.attempts, c.undo
					st.Do = func(ctx context.Context, s *trip) error {
						if saga.CommandFrom(ctx).Attempt == 4 {
							return keep(saga.Permanent(errDeclined))(ctx, s)
						}
						return keep(errDeclined)(ctx, s)
					}
					st.Undo = func(ctx context.Context, s *trip) error {
						if undos++; undos == 1 && c.undo != 1 {
							return keep(errDeclined)(ctx, s)
						}
						return keep(nil)(ctx, s)
					}
					sg := sequence(st)
					if !durable {
						ctx := attempt.With(t.Context(), 7) // the caller is an attempt itself
						require.ErrorIs(t, saga.Run(ctx, sg, &trip{}), saga.ErrCompensated)
					} else {
						r, _ := begin(t, saga.NewMemory(), saga.RunnerConfig{}, sg)
						mustStart(t, r, sg)
						requireEnd(t, r, "trip-1", saga.ErrCompensated)
					}
					require.Equal(t, c.want, marks)
				})
			}
		})
	}
}
