package resilience_test

import (
	"context"
	"errors"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/bulkhead/adaptive"
)

func TestResultOf(t *testing.T) {
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	overran, cancel := context.WithDeadline(t.Context(), time.Unix(0, 0))
	defer cancel()
	refusal, answer, failure := &breaker.OpenError{}, resilience.Answer(errors.New("no")), errors.New("down")
	for name, c := range map[string]struct {
		ctx  context.Context
		err  error
		want resilience.Result
		text string
	}{
		"nil":                      {t.Context(), nil, resilience.ResultSuccess, "success"},
		"an error":                 {t.Context(), failure, resilience.ResultFailure, "failure"},
		"an answer":                {t.Context(), answer, resilience.ResultAnswer, "answer"},
		"a refusal":                {t.Context(), refusal, resilience.ResultRefusal, "refusal"},
		"after a cancel":           {canceled, failure, resilience.ResultIgnored, "ignored"},
		"after a deadline":         {overran, failure, resilience.ResultIgnored, "ignored"},
		"an answer after a cancel": {canceled, answer, resilience.ResultAnswer, "answer"},
		"nil after a cancel":       {canceled, nil, resilience.ResultSuccess, "success"},
		"a timeout of its own":     {t.Context(), context.DeadlineExceeded, resilience.ResultFailure, "failure"},
	} {
		t.Run(name, func(t *testing.T) {
			require.Equal(t, c.want, resilience.ResultOf(c.ctx, c.err))
			require.Equal(t, c.text, c.want.String())
		})
	}
	require.True(t, resilience.IsTimeout(context.DeadlineExceeded))
	require.False(t, resilience.IsTimeout(failure))
}

func TestContextErrHasTheCause(t *testing.T) {
	cause := errors.New("shutting down")
	ctx, cancel := context.WithCancelCause(t.Context())
	require.NoError(t, resilience.ContextErr(ctx))
	cancel(cause)
	require.ErrorIs(t, resilience.ContextErr(ctx), cause)
	require.ErrorIs(t, resilience.ContextErr(ctx), context.Canceled)
}

func TestResultStringOfAnyValue(t *testing.T) {
	for r, want := range map[resilience.Result]string{
		5: "Result(5)", -1: "Result(-1)", math.MaxInt: "Result(9223372036854775807)",
		math.MinInt: "Result(-9223372036854775808)",
	} {
		require.Equal(t, want, r.String())
	}
}

func TestWorkContinuesAfterItsFunction(t *testing.T) {
	broke := errors.New("broke off")
	for name, c := range map[string]struct {
		continues bool
		err       error // the function's
		holds     bool
	}{
		"continues":           {true, nil, true},
		"ends with it":        {false, nil, false},
		"continues and fails": {true, broke, false},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, work := resilience.BeginWork(t.Context())
			var ends []error
			policy := func(ctx context.Context) error {
				return resilience.AtEnd(ctx, func(ctx context.Context) error {
					require.Same(t, work, resilience.WorkOf(ctx))
					if c.continues {
						work.Continue()
					}
					return c.err
				}, func(err error) { ends = append(ends, err) })
			}
			require.Equal(t, c.err, policy(ctx))
			if !c.holds {
				require.Equal(t, []error{c.err}, ends)
				return
			}
			require.Empty(t, ends)
			require.Nil(t, resilience.WorkOf(ctx), "a call that starts now is a separate one")
			observed := 0
			require.True(t, work.OnEnd(func(err error) { observed++; require.Equal(t, broke, err) }))
			work.End(broke)
			work.End(nil)
			require.Equal(t, []error{broke}, ends)
			require.Equal(t, 1, observed)
			require.True(t, work.OnEnd(func(err error) { observed++; require.Equal(t, broke, err) }))
			require.Equal(t, 2, observed, "the work has already ended")
		})
	}
	require.Nil(t, resilience.WorkOf(t.Context()))
	require.False(t, resilience.WorkOf(t.Context()).OnEnd(func(error) {}))
}

func TestWorkWithoutContinueEndsWithItsFunction(t *testing.T) {
	ctx, work := resilience.BeginWork(t.Context())
	var ends []error
	require.NoError(t, resilience.AtEnd(ctx, doNothing, func(err error) { ends = append(ends, err) }))
	require.Equal(t, []error{nil}, ends)
	require.False(t, work.OnEnd(func(error) { t.Error("called") }))
	work.End(errors.New("broke off"))
	require.Equal(t, []error{nil}, ends)
}

// Middleware that makes another call under each policy, before the function or after it, neither frees what
// the work holds nor makes that policy take the end of the work for its own.
func TestOtherCallsDoNotJoinTheWork(t *testing.T) {
	nothing := func(context.Context) error { return nil }
	before := func(p resilience.Policy) resilience.Middleware {
		return func(next resilience.Func) resilience.Func {
			return func(ctx context.Context) error {
				return errors.Join(p.Do(ctx, nothing), next(ctx))
			}
		}
	}
	after := func(p resilience.Policy) resilience.Middleware {
		return func(next resilience.Func) resilience.Func {
			return func(ctx context.Context) error {
				return errors.Join(next(ctx), p.Do(ctx, nothing))
			}
		}
	}
	for name, side := range map[string]func(resilience.Policy) resilience.Middleware{"before": before, "after": after} {
		t.Run(name, func(t *testing.T) {
			tokens := breaker.New(breaker.Config{Name: "tokens"})
			tokenSlots := bulkhead.New(bulkhead.Config{Name: "tokens", Limit: 1})
			tokenLimit := adaptive.New(adaptive.Config{})
			slots := bulkhead.New(bulkhead.Config{Name: "slots", Limit: 1})
			circuit := breaker.New(breaker.Config{Name: "slots"})
			ctx, work := resilience.BeginWork(t.Context())
			err := resilience.Chain(
				side(tokens), side(tokenSlots), side(tokenLimit), circuit.Wrap, slots.Wrap, side(tokens),
			)(func(context.Context) error {
				work.Continue()
				return nil
			})(ctx)
			require.NoError(t, err)
			require.Equal(t, 1, slots.Stats().InFlight)
			require.Zero(t, tokenSlots.Stats().InFlight)
			require.Zero(t, tokenLimit.Stats().InFlight)
			work.End(errors.New("the stream broke off"))
			require.Zero(t, slots.Stats().InFlight)
			require.Zero(t, tokens.Stats().Failed)
			require.EqualValues(t, 1, circuit.Stats().Failed)
		})
	}
}

// A connection may break before the policies have returned.
func TestWorkEndsBeforePoliciesReturn(t *testing.T) {
	broke := errors.New("broke off")
	for _, end := range []error{nil, broke} {
		circuit := breaker.New(breaker.Config{ConsecutiveFailures: 1})
		slots := bulkhead.New(bulkhead.Config{Limit: 1})
		limit := adaptive.New(adaptive.Config{})
		var ends []error
		ctx, work := resilience.BeginWork(t.Context())
		err := resilience.Chain(circuit.Wrap, slots.Wrap, limit.Wrap, resilience.Timeout(time.Minute),
			func(next resilience.Func) resilience.Func {
				return func(ctx context.Context) error {
					return resilience.AtEnd(ctx, next, func(err error) { ends = append(ends, err) })
				}
			})(func(context.Context) error {
			work.Continue()
			work.End(end)
			return nil
		})(ctx)
		require.NoError(t, err)
		require.Equal(t, []error{end}, ends)
		require.Zero(t, slots.Stats().InFlight)
		require.Zero(t, limit.Stats().InFlight)
		require.Equal(t, end != nil, circuit.Stats().Failed == 1)
		require.Equal(t, end != nil, circuit.State() == breaker.Open)
	}
}
