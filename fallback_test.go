package resilience_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience"
)

func TestFallbackIsNotCalledOnSuccess(t *testing.T) {
	err := resilience.Fallback(func(context.Context, error) error { t.Error("asked"); return nil })(
		func(context.Context) error { return nil })(t.Context())
	require.NoError(t, err)
}

func TestFallbackSeesTheErrorAndTheContext(t *testing.T) {
	type key struct{}
	ctx := context.WithValue(t.Context(), key{}, "value")
	err := resilience.Fallback(func(ctx context.Context, err error) error {
		require.Equal(t, errDown, err)
		require.Equal(t, "value", ctx.Value(key{}))
		return nil
	})(func(context.Context) error { return errDown })(ctx)
	require.NoError(t, err)
}

func TestFallbackNeverLosesTheError(t *testing.T) {
	errStale := errors.New("nothing stale either")
	cases := map[string]struct {
		fallback func(context.Context, error) error
		want     string
	}{
		"the same": {func(_ context.Context, err error) error { return err }, "down"},
		"one that wraps": {func(_ context.Context, err error) error { return errors.Join(errStale, err) },
			"nothing stale either\ndown"},
		"one of its own":  {func(context.Context, error) error { return errStale }, "nothing stale either\ndown"},
		"one not its own": {func(ctx context.Context, err error) error { return &plain{err} }, "plain: down\ndown"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			err := resilience.Fallback(c.fallback)(func(context.Context) error { return errDown })(t.Context())
			require.ErrorIs(t, err, errDown)
			require.EqualError(t, err, c.want)
		})
	}
}

// list is an error of a type that cannot be compared, and boxed of one that can be,
// unless what it holds cannot: to compare two of the latter panics.
type list []string

func (l list) Error() string { return strings.Join(l, ", ") }

type boxed struct{ value any }

func (b boxed) Error() string { return fmt.Sprint(b.value) }

func TestFallbackWithUncomparableErrors(t *testing.T) {
	for name, err := range map[string]error{
		"slice":          list{"name", "age"},
		"slice in a box": boxed{[]string{"name", "age"}},
	} {
		t.Run(name, func(t *testing.T) {
			run := func(fallback func(error) error) error {
				return resilience.Fallback(func(_ context.Context, err error) error { return fallback(err) })(
					func(context.Context) error { return err })(t.Context())
			}
			same := func(err error) error { return err }
			require.Equal(t, err, run(same))
			wraps := func(err error) error { return fmt.Errorf("invalid: %w", errors.Join(errDown, err)) }
			require.Equal(t, wraps(err), run(wraps))
			another := func(error) error { return list{"other"} }
			require.Equal(t, errors.Join(list{"other"}, err), run(another))
		})
	}
}

// plain mentions an error without wrapping it.
type plain struct{ err error }

func (p *plain) Error() string { return "plain: " + p.err.Error() }

func TestFallbackForAnEndedContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	err := resilience.Fallback(func(ctx context.Context, err error) error {
		require.Equal(t, context.Canceled, err)
		require.Error(t, ctx.Err())
		return nil
	})(func(context.Context) error { t.Error("fn was called"); return nil })(ctx)
	require.NoError(t, err)
}

func TestFallbackRefusesNil(t *testing.T) {
	require.PanicsWithError(t, "resilience: Fallback needs a function, not nil", func() { resilience.Fallback(nil) })
}
