package resilience_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
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

func TestEndOfHasTheCause(t *testing.T) {
	cause := errors.New("shutting down")
	ctx, cancel := context.WithCancelCause(t.Context())
	require.NoError(t, resilience.EndOf(ctx))
	cancel(cause)
	require.ErrorIs(t, resilience.EndOf(ctx), cause)
	require.ErrorIs(t, resilience.EndOf(ctx), context.Canceled)
}

func TestWorkGoesOnAfterItsFunction(t *testing.T) {
	broke := errors.New("broke off")
	for name, c := range map[string]struct {
		goOn  bool
		err   error // of the function
		holds bool
	}{
		"goes on":            {true, nil, true},
		"ends with it":       {false, nil, false},
		"fails, and goes on": {true, broke, false},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, work := resilience.BeginWork(t.Context())
			var told []error
			policy := func(ctx context.Context) error {
				return resilience.AtEnd(ctx, func(ctx context.Context) error {
					require.Same(t, work, resilience.WorkOf(ctx))
					if c.goOn {
						work.GoOn()
					}
					return c.err
				}, func(err error) { told = append(told, err) })
			}
			require.Equal(t, c.err, policy(ctx))
			if !c.holds {
				require.Equal(t, []error{c.err}, told)
				return
			}
			require.Empty(t, told)
			require.Nil(t, resilience.WorkOf(ctx), "what runs now is a call of its own")
			observed := 0
			require.True(t, work.OnEnd(func(err error) { observed++; require.Equal(t, broke, err) }))
			work.End(broke)
			work.End(nil)
			require.Equal(t, []error{broke}, told)
			require.Equal(t, 1, observed)
			require.False(t, work.OnEnd(func(error) { t.Error("it is over") }))
		})
	}
	ctx, work := resilience.BeginWork(t.Context())
	var told []error
	require.NoError(t, resilience.AtEnd(ctx, func(context.Context) error { return nil }, func(err error) { told = append(told, err) }))
	require.Equal(t, []error{nil}, told, "without GoOn nothing is held")
	require.True(t, work.OnEnd(func(err error) { told = append(told, err) }), "but the end is heard")
	work.End(broke)
	require.Equal(t, []error{nil, broke}, told)

	require.Nil(t, resilience.WorkOf(t.Context()))
	require.False(t, resilience.WorkOf(t.Context()).OnEnd(func(error) {}))
}
