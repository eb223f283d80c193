package breaker_test

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/policy"
)

// events collects events.
type events []breaker.Event

func (e *events) observe(_ context.Context, event breaker.Event) { *e = append(*e, event) }

func TestObserve(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(breaker.Config{Name: "users", ConsecutiveFailures: 1, OpenFor: time.Second})
		var seen events
		stop := b.Observe(seen.observe)
		require.NoError(t, do(b, ok))
		open(t, b)
		opened := time.Now()
		refusal := do(b, ok)
		time.Sleep(time.Second)
		require.NoError(t, do(b, ok))
		stop()
		stop()
		b.Trip(nil, time.Second)
		require.Equal(t, events{
			{Kind: breaker.EventChanged, Name: "users", From: breaker.Closed, To: breaker.Open, At: opened, Err: errDown,
				OpenFor: time.Second},
			{Kind: breaker.EventRefused, Name: "users", At: opened, Err: refusal},
			{Kind: breaker.EventChanged, Name: "users", From: breaker.Open, To: breaker.HalfOpen, At: time.Now()},
			{Kind: breaker.EventChanged, Name: "users", From: breaker.HalfOpen, To: breaker.Closed, At: time.Now()},
		}, seen)
	})
}

// onRefuse calls f with each refusal.
func onRefuse(b interface {
	Observe(func(context.Context, breaker.Event)) (stop func())
}, f func(context.Context, *breaker.OpenError)) {
	b.Observe(func(ctx context.Context, e breaker.Event) {
		if e.Kind == breaker.EventRefused {
			f(ctx, e.Err.(*breaker.OpenError))
		}
	})
}

// Observers are notified of the half-open state before the probe is called.
func TestHalfOpenNotifiedBeforeProbe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var seen changes
		b := watched(&seen, breaker.Config{ConsecutiveFailures: 1, OpenFor: time.Second})
		open(t, b)
		time.Sleep(time.Second)
		require.NoError(t, do(b, func(context.Context) error {
			require.Equal(t, breaker.HalfOpen, seen.all[len(seen.all)-1].To)
			return nil
		}))
		seen.requireChain(t, breaker.Closed)
	})
}

// A probe that was not called because an observer panicked gives its permit back.
func TestObserverPanicReleasesProbe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(breaker.Config{ConsecutiveFailures: 1, OpenFor: time.Second})
		onChange(b, func(_ context.Context, c breaker.Event) {
			if c.To == breaker.HalfOpen {
				panic("observer")
			}
		})
		open(t, b)
		time.Sleep(time.Second)
		require.PanicsWithValue(t, "observer", func() { _ = do(b, ok) })
		require.NoError(t, do(b, ok))
		require.Equal(t, breaker.Closed, b.State())
	})
}

// A refused call is not counted again as ignored because an observer panicked.
func TestObserverPanicCountsRefusalOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(breaker.Config{ConsecutiveFailures: 1, OpenFor: time.Second})
		open(t, b)
		time.Sleep(time.Second)
		done, err := b.Begin(t.Context())
		require.NoError(t, err)
		defer done(errDown)
		onChange(b, func(context.Context, breaker.Event) { panic("observer") })
		time.Sleep(time.Second) // the probe hangs
		require.PanicsWithValue(t, "observer", func() { _ = do(b, ok) })
		s := b.Stats()
		require.Equal(t, []int64{1, 0}, []int64{s.Refused, s.Ignored})
	})
}

func TestEventsDescribed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(breaker.Config{Name: "users", ConsecutiveFailures: 1, OpenFor: time.Second})
		var seen []string
		stop := b.Describe().Observe(func(_ context.Context, e policy.Event) {
			seen = append(seen, fmt.Sprint(e.Kind, " ", e.Name, " ", e.What, " ", e.Level, " ", e.Attrs, " ", e.Err))
		})
		defer stop()
		do(b, down)
		do(b, ok)
		time.Sleep(time.Second)
		do(b, ok)
		b.ForceOpen(nil)
		b.Enable()
		require.Equal(t, []string{
			"breaker users changed WARN [from=closed to=open for=1s] down",
			"breaker users refused WARN [reason=open] breaker: users: circuit open",
			"breaker users changed DEBUG [from=open to=half_open] <nil>",
			"breaker users changed INFO [from=half_open to=closed] <nil>",
			"breaker users changed WARN [from=closed to=forced_open] <nil>",
			"breaker users changed INFO [from=forced_open to=closed] <nil>",
		}, seen)
	})
}
