package breaker_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/breaker"
)

// events collects what an observer is told.
type events []breaker.Event

func (e *events) observe(_ context.Context, event breaker.Event) { *e = append(*e, event) }

func TestObserve(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(steady(breaker.Config{Name: "users", Failures: 1, OpenFor: time.Second}))
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
			{Kind: breaker.Changed, Name: "users", To: breaker.Open, At: opened, Err: errDown, OpenFor: time.Second},
			{Kind: breaker.Refused, Name: "users", From: breaker.Open, To: breaker.Open, At: opened, Err: refusal},
			{Kind: breaker.Changed, Name: "users", From: breaker.Open, To: breaker.HalfOpen, At: time.Now()},
			{Kind: breaker.Changed, Name: "users", From: breaker.HalfOpen, To: breaker.Closed, At: time.Now()},
		}, seen)
	})
}

func TestObserversAreToldAfterTheHooks(t *testing.T) {
	var told []string
	b := breaker.New(breaker.Config{
		OnChange: func(context.Context, breaker.Change) { told = append(told, "change") },
		OnReject: func(context.Context, *breaker.OpenError) { told = append(told, "refused") },
	})
	stop := b.Observe(func(_ context.Context, e breaker.Event) {
		b.Stats() // no lock is held
		told = append(told, "observed "+string(e.Kind))
	})
	b.Trip(nil, time.Hour)
	requireRefused(t, do(b, ok), breaker.Open)
	stop()
	b.Reset()
	require.Equal(t, []string{"change", "observed changed", "refused", "observed refused", "change"}, told)
}

func TestObserverOfAGroupSeesItsMembers(t *testing.T) {
	g := breaker.NewGroup(breaker.GroupConfig[int]{MaxKeys: 2, Config: breaker.Config{Name: "store", Failures: 1}})
	ctx := t.Context()
	require.NoError(t, g.Do(ctx, 1, ok))
	var all, first events
	stop := g.Observe(all.observe)
	g.With(1, func(b *breaker.Breaker) { b.Observe(first.observe) })
	for key := 1; key <= 3; key++ { // the third has the shared breaker
		_ = g.Do(ctx, key, down)
		_ = g.Do(ctx, key, ok)
	}
	require.NoError(t, g.Update(func(c *breaker.GroupConfig[int]) { c.Overflow = breaker.RefuseNew }))
	require.ErrorIs(t, g.Do(ctx, 4, ok), breaker.ErrTooManyKeys)
	var got []string
	for _, e := range all {
		require.Equal(t, "store", e.Name)
		got = append(got, string(e.Kind)+" "+e.Key+" "+e.To.String())
	}
	require.Equal(t, []string{
		"changed 1 open", "refused 1 open", "changed 2 open", "refused 2 open",
		"changed (other keys) open", "refused (other keys) open", "refused 4 forced open",
	}, got)
	require.Equal(t, all[:2], first)

	stop()
	_ = g.Do(ctx, 1, ok)
	require.Len(t, all, 7)
	require.Len(t, first, 3)
}

func TestObserveStress(t *testing.T) {
	b := breaker.New(breaker.Config{Failures: 1, OpenFor: time.Microsecond})
	var seen changes // a race if two are told at once
	b.Observe(func(_ context.Context, e breaker.Event) {
		if e.Kind == breaker.Changed {
			seen.all = append(seen.all, breaker.Change{From: e.From, To: e.To})
		}
	})
	done := make(chan struct{})
	for range 4 {
		go func() {
			defer func() { done <- struct{}{} }()
			for i := range 2000 {
				stop := b.Observe(func(context.Context, breaker.Event) {})
				_ = do(b, []func(context.Context) error{ok, down}[i%2])
				stop()
			}
		}()
	}
	for range 4 {
		<-done
	}
	seen.requireChain(t, b.State())
	s := b.Stats()
	require.EqualValues(t, len(seen.all), s.Opened+s.HalfOpened+s.Closed)
	require.EqualValues(t, 8000, s.Succeeded+s.Failed+s.Refused)
}
