package ended_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/internal/ended"
)

func TestErrorIsNilBeforeTheEnd(t *testing.T) {
	require.NoError(t, ended.Error(t.Context()))
}

func TestErrorIsBothTheEndAndItsCause(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	cause := errors.New("the user went away")
	cancel(cause)
	err := ended.Error(ctx)
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorIs(t, err, cause)
	require.EqualError(t, err, "context canceled: the user went away")
}

func TestErrorIsAMatchingCause(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.Equal(t, context.Canceled, ended.Error(ctx))
}

// An unnoticed ctx has a deadline, and is not canceled when that passes: not yet.
type unnoticed struct {
	context.Context
	deadline time.Time
}

func (c unnoticed) Deadline() (time.Time, bool) { return c.deadline, true }

func TestByTellsWhichTimePassed(t *testing.T) {
	cause, past, future := errors.New("too late"), time.Now(), time.Now().Add(time.Hour)
	overran, cancel := context.WithDeadlineCause(t.Context(), past, cause)
	defer cancel()
	within, cancel := context.WithDeadlineCause(overran, past.Add(time.Second), errors.New("later"))
	defer cancel()
	canceled, cancel := context.WithDeadlineCause(t.Context(), future, cause)
	cancel()
	for name, test := range map[string]struct {
		ctx  context.Context
		at   time.Time
		want bool
	}{
		"passed":                          {overran, past, true},
		"of the ctx around it":            {within, past, true},
		"not passed":                      {unnoticed{t.Context(), future}, future, false},
		"canceled before":                 {canceled, future, false},
		"no deadline":                     {t.Context(), past, false},
		"unnoticed":                       {unnoticed{t.Context(), past}, past, true},
		"unnoticed, of the ctx around it": {unnoticed{t.Context(), past.Add(-1)}, past, false},
	} {
		t.Run(name, func(t *testing.T) {
			require.Equal(t, test.want, ended.By(test.ctx, test.at, cause))
		})
	}
}
