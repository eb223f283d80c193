package breaker_test

import (
	"context"
	"fmt"
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
			{Kind: breaker.EventChanged, Name: "users", From: breaker.Closed, To: breaker.Open, At: opened, Err: errDown, OpenFor: time.Second},
			{Kind: breaker.EventRefused, Name: "users", At: opened, Err: refusal, Reason: breaker.CircuitOpen},
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

func TestObserversAreToldAfterTheHooks(t *testing.T) {
	var told []string
	b := breaker.New(breaker.Config{
		OnChange: func(context.Context, breaker.Event) { told = append(told, "change") },
	})
	stop := b.Observe(func(_ context.Context, e breaker.Event) {
		b.Stats() // no lock is held
		told = append(told, "observed "+string(e.Kind))
	})
	b.Trip(nil, time.Hour)
	requireRefused(t, do(b, ok), breaker.CircuitOpen)
	stop()
	b.Reset()
	require.Equal(t, []string{"change", "observed changed", "observed refused", "change"}, told)
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
	var got []string
	for _, e := range all {
		require.Equal(t, "store", e.Name)
		got = append(got, fmt.Sprint(e.Kind, " ", e.Key, " ", e.To, e.Reason))
	}
	require.Equal(t, []string{
		"changed 1 open", "refused 1 circuit open", "changed 2 open", "refused 2 circuit open",
		"changed (other keys) open", "refused (other keys) circuit open",
	}, got)
	require.Equal(t, all[:2], first)

	stop()
	_ = g.Do(ctx, 1, ok)
	require.Len(t, all, 6)
	require.Len(t, first, 3)
}

func TestObserveStress(t *testing.T) {
	b := breaker.New(breaker.Config{Failures: 1, OpenFor: time.Microsecond})
	var seen changes // a race if two are told at once
	b.Observe(func(_ context.Context, e breaker.Event) {
		if e.Kind == breaker.EventChanged {
			seen.all = append(seen.all, breaker.Event{From: e.From, To: e.To})
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

// The probe is made in the state that the hook has been told of.
func TestHalfOpenIsToldBeforeTheProbe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var seen changes
		b := breaker.New(steady(breaker.Config{Failures: 1, OpenFor: time.Second, OnChange: seen.hook}))
		open(t, b)
		time.Sleep(time.Second)
		require.NoError(t, do(b, func(context.Context) error {
			require.Equal(t, breaker.HalfOpen, seen.all[len(seen.all)-1].To)
			return nil
		}))
		seen.requireChain(t, breaker.Closed)
	})
}
