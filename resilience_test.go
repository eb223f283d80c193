package resilience_test

import (
	"context"
	"errors"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	limiting "github.com/go-resilience/resilience/bulkhead/adaptive"
	"github.com/go-resilience/resilience/retry"
	"github.com/go-resilience/resilience/throttle"
	shedding "github.com/go-resilience/resilience/throttle/adaptive"
	"github.com/go-resilience/resilience/throttle/fleet"
)

var errDown = errors.New("down")

// named returns a Middleware that writes its name before and after the call.
func named(name string, trace *[]string) resilience.Middleware {
	return func(next resilience.Func) resilience.Func {
		return func(ctx context.Context) error {
			*trace = append(*trace, name)
			err := next(ctx)
			*trace = append(*trace, "/"+name)
			return err
		}
	}
}

func TestChainRunsTheFirstOutermost(t *testing.T) {
	var trace []string
	fn := resilience.Chain(named("a", &trace), nil, named("b", &trace))(func(context.Context) error {
		trace = append(trace, "fn")
		return errDown
	})
	require.Equal(t, errDown, fn(t.Context()))
	require.Equal(t, []string{"a", "b", "fn", "/b", "/a"}, trace)
}

func TestEmptyChainIsTheFunction(t *testing.T) {
	calls := 0
	fn := resilience.Chain()(func(context.Context) error { calls++; return nil })
	require.NoError(t, fn(t.Context()))
	require.Equal(t, 1, calls)
}

func TestChainWrapsOnceForEachApplication(t *testing.T) {
	wraps := 0
	chain := resilience.Chain(func(next resilience.Func) resilience.Func { wraps++; return next })
	fn := chain(func(context.Context) error { return nil })
	require.NoError(t, fn(t.Context()))
	require.NoError(t, fn(t.Context()))
	require.Equal(t, 1, wraps)
}

func TestChainKeepsAListOfItsOwn(t *testing.T) {
	var trace []string
	common := make([]resilience.Middleware, 0, 2)
	common = append(common, named("common", &trace))
	a := resilience.Chain(append(common, named("a", &trace))...)
	b := resilience.Chain(append(common, named("b", &trace))...) // in the same array
	fn := func(context.Context) error { return nil }
	require.NoError(t, a(fn)(t.Context()))
	require.NoError(t, b(fn)(t.Context()))
	require.Equal(t, []string{"common", "a", "/a", "/common", "common", "b", "/b", "/common"}, trace)
}

func TestDoReturnsTheResult(t *testing.T) {
	var trace []string
	v, err := resilience.Do(t.Context(), named("a", &trace), func(context.Context) (int, error) { return 42, nil })
	require.NoError(t, err)
	require.Equal(t, 42, v)
	require.Equal(t, []string{"a", "/a"}, trace)
}

func TestDoIsZeroOnError(t *testing.T) {
	v, err := resilience.Do(t.Context(), nil, func(context.Context) (int, error) { return 42, errDown })
	require.Equal(t, errDown, err)
	require.Zero(t, v)
}

func TestDoKeepsOnlyTheResultOfSuccess(t *testing.T) {
	// A middleware that calls twice and hides the failure of the second call.
	twice := func(next resilience.Func) resilience.Func {
		return func(ctx context.Context) error {
			err := next(ctx)
			_ = next(ctx)
			return err
		}
	}
	calls := 0
	v, err := resilience.Do(t.Context(), twice, func(context.Context) (int, error) {
		calls++
		if calls == 2 {
			return -1, errDown
		}
		return calls, nil
	})
	require.NoError(t, err)
	require.Equal(t, 1, v)
}

func TestDoLeavesAnEndedContextToFallback(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	called := func(context.Context) (int, error) { t.Error("fn was called"); return 42, nil }
	instead := resilience.Fallback(func(context.Context, error) error { return errDown })
	_, err := resilience.Do(ctx, instead, called)
	require.ErrorIs(t, err, errDown)
	require.ErrorIs(t, err, context.Canceled)

	heedless := func(next resilience.Func) resilience.Func { return next }
	_, err = resilience.Do(ctx, heedless, called)
	require.Equal(t, context.Canceled, err)
}

func TestDoOfAFallbackIsZero(t *testing.T) {
	swallow := resilience.Fallback(func(context.Context, error) error { return nil })
	v, err := resilience.Do(t.Context(), swallow, func(context.Context) (int, error) { return 42, errDown })
	require.NoError(t, err)
	require.Zero(t, v)
}

// policies are the policies of the module and the middlewares of this package, each in a setting in which it
// changes nothing.
var policies = map[string]resilience.Middleware{
	"retry":    retry.New(retry.Config{}).Wrap,
	"breaker":  breaker.New(breaker.Config{ConsecutiveFailures: 1 << 30}).Wrap,
	"bulkhead": bulkhead.New(bulkhead.Config{Limit: 1}).Wrap,
	"throttle": throttle.New(throttle.Config{Rate: 1e9, Burst: 1e6}).Wrap,
	"throttle.Group": throttle.NewGroup(throttle.GroupConfig[string]{
		Config: throttle.Config{Rate: 1e9, Burst: 1e6},
	}).By(func(context.Context) string { return "a" }),
	"throttle.All":      throttle.All(throttle.New(throttle.Config{Rate: 1e9, Burst: 1e6})).Wrap,
	"adaptive.Bulkhead": limiting.New(limiting.Config{}).Wrap,
	"adaptive.Throttle": shedding.New(shedding.Config{K: 1e9}).Wrap,
	"fleet": fleet.New(fleet.Config{
		Name: "fleet", OnOutage: fleet.Admit,
		Eval:   func(context.Context, string, []string, ...any) (any, error) { return nil, errDown },
		Meters: func(context.Context) []fleet.Meter { return []fleet.Meter{fleet.Rate("a/calls", 1, 1)} },
	}).Wrap,
	"Group": resilience.NewGroup(func(string) *bulkhead.Bulkhead {
		return bulkhead.New(bulkhead.Config{Limit: 1})
	}, resilience.GroupConfig{}).By(func(context.Context) string { return "a" }),
	"Timeout":  resilience.Timeout(1 << 40),
	"no limit": resilience.Timeout(0),
	"Fallback": resilience.Fallback(func(_ context.Context, err error) error { return err }),
	"Value": func(next resilience.Func) resilience.Func {
		return func(ctx context.Context) error {
			_, err := resilience.Do(ctx, nil, func(ctx context.Context) (int, error) { return 0, next(ctx) })
			return err
		}
	},
}

func TestEndedContextPreventsTheCall(t *testing.T) {
	cause := errors.New("the user went away")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(cause)
	for name, policy := range policies {
		t.Run(name, func(t *testing.T) {
			err := policy(func(context.Context) error { t.Error("fn was called"); return nil })(ctx)
			require.ErrorIs(t, err, context.Canceled)
			require.ErrorIs(t, err, cause)
		})
	}
}

func TestPanicPassesThrough(t *testing.T) {
	for name, policy := range policies {
		t.Run(name, func(t *testing.T) {
			require.PanicsWithValue(t, "boom", func() {
				_ = policy(func(context.Context) error { panic("boom") })(t.Context())
			})
		})
	}
}

func TestGoexitPassesThrough(t *testing.T) {
	for name, policy := range policies {
		t.Run(name, func(t *testing.T) {
			returned, done := false, make(chan struct{})
			go func() {
				defer close(done)
				_ = policy(func(context.Context) error { runtime.Goexit(); return nil })(t.Context())
				returned = true
			}()
			<-done
			require.False(t, returned)
		})
	}
}
