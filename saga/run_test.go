package saga_test

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga"
)

type trip struct{ Calls []string }

func (tr *trip) call(name string, err error) func(context.Context, *trip) error {
	return func(_ context.Context, s *trip) error {
		s.Calls = append(s.Calls, name)
		return err
	}
}

func note(name string, err error) func(context.Context, *trip) error {
	return (*trip)(nil).call(name, err)
}

func step(name string) saga.Step[trip] {
	return saga.Step[trip]{Name: name, Do: note("do "+name, nil), Undo: note("undo "+name, nil)}
}

func TestRunDoesStepsInOrder(t *testing.T) {
	sg := &saga.Saga[trip]{Name: "trip", Steps: []saga.Step[trip]{step("flight"), step("hotel"), step("car")}}
	var s trip
	require.NoError(t, saga.Run(t.Context(), sg, &s))
	require.Equal(t, []string{"do flight", "do hotel", "do car"}, s.Calls)
}

func TestRunUndoesInReverse(t *testing.T) {
	full := errors.New("hotel full")
	hotel := step("hotel")
	hotel.Do = note("do hotel", saga.NoEffect(full))
	sg := &saga.Saga[trip]{Name: "trip", Steps: []saga.Step[trip]{step("flight"), step("car"), hotel}}
	var s trip
	err := saga.Run(t.Context(), sg, &s)
	require.Equal(t, []string{"do flight", "do car", "do hotel", "undo car", "undo flight"}, s.Calls)
	require.ErrorIs(t, err, full)
	require.ErrorIs(t, err, saga.ErrCompensated)
	detail, ok := errors.AsType[*saga.Error](err)
	require.True(t, ok)
	require.Equal(t, "hotel", detail.Step)
	require.Equal(t, []string{"car", "flight"}, detail.Undone)
	require.Empty(t, detail.Failed)
	require.EqualError(t, err, "saga: trip: compensated: step hotel: hotel full")
}
