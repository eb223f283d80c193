package saga_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga"
)

var errLost = errors.New("the reply is lost")

// then returns a step whose Do returns each of errs in turn, and then the last one each time. It counts the calls in
// the state, since a definition runs several times.
func then(name string, errs ...error) saga.Step[trip] {
	st := step(name)
	st.Do = func(_ context.Context, s *trip) error {
		n := 0
		for _, call := range s.Calls {
			if call == "do "+name {
				n++
			}
		}
		s.Calls = append(s.Calls, "do "+name)
		return errs[min(n, len(errs)-1)]
	}
	return st
}

// parts is an error with several parts.
type parts []error

func (parts) Error() string     { return "parts" }
func (p parts) Unwrap() []error { return p }

// TestDeclinedSettlesEarlierAttempts: after a lost reply, a decline means that no attempt takes effect any more. The
// step is not undone, and a pivot without Undo turns back.
func TestDeclinedSettlesEarlierAttempts(t *testing.T) {
	void := saga.Declined(errDeclined)
	for _, c := range []struct {
		name    string
		err     error
		settled bool
	}{
		{"void", void, true},
		{"wrapped", fmt.Errorf("bank: %w", void), true},
		{"in a Permanent", saga.Permanent(void), true},
		{"twice", errors.Join(void, fmt.Errorf("b: %w", void)), true},
		{"in doubt, whatever it wraps", saga.MaybeApplied(void), false},
		{"joined with a timeout", errors.Join(void, context.DeadlineExceeded), false},
		{"joined with a refusal", errors.Join(void, refusal{}), false},
		{"of no parts", saga.Permanent(parts(nil)), false},
		{"of a child", &saga.Error{Status: saga.Compensated, Err: void}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			require.Equal(t, c.settled, saga.IsDeclined(c.err))
			charge := then("charge", errLost, c.err)
			calls := []string{"do flight", "do charge", "do charge", "undo charge", "undo flight"}
			if c.settled {
				calls = []string{"do flight", "do charge", "do charge", "undo flight"}
			}
			bothWays(t, sequence(step("flight"), charge), func(s trip, err error) {
				require.ErrorIs(t, err, saga.ErrCompensated)
				require.Equal(t, calls, s.Calls)
			})
			charge.Pivot, charge.Undo = true, nil
			bothWays(t, sequence(step("flight"), charge), func(s trip, err error) {
				if c.settled {
					require.ErrorIs(t, err, saga.ErrCompensated)
					require.Equal(t, calls, s.Calls)
				} else {
					require.ErrorIs(t, err, saga.ErrStuck)
				}
			})
		})
	}
	require.False(t, saga.IsDeclined(saga.Declined(refusal{})), "the step is retried")
}

// bothWays runs a saga in memory and in a runner, and checks that the results are equal.
func bothWays(t *testing.T, sg *saga.Saga[trip], check func(s trip, err error)) {
	synctest.Test(t, func(t *testing.T) {
		var s trip
		err := saga.Run(t.Context(), sg, &s)
		check(s, err)
		r, _ := begin(t, saga.NewMemory(), saga.RunnerConfig{}, sg)
		mustStart(t, r, sg)
		s, err = result[trip](t.Context(), r, "trip-1")
		check(s, err)
	})
}
