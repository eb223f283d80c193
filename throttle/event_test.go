package throttle_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/throttle"
)

// An events collects what an observer is told.
type events struct {
	mu  sync.Mutex
	all []throttle.Event
}

func (e *events) add(_ context.Context, event throttle.Event) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.all = append(e.all, event)
}

func (e *events) take() []throttle.Event {
	e.mu.Lock()
	defer e.mu.Unlock()
	all := e.all
	e.all = nil
	return all
}

// onRefuse calls f with each refusal.
func onRefuse(l interface {
	Observe(func(context.Context, throttle.Event)) (stop func())
}, f func(context.Context, *throttle.LimitedError)) {
	l.Observe(func(ctx context.Context, e throttle.Event) {
		if e.Kind == throttle.EventRefused {
			f(ctx, e.Err.(*throttle.LimitedError))
		}
	})
}

func TestObserversSeeRefusalsAndWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		type id struct{}
		var order []string
		l := throttle.New(throttle.Config{
			Name: "api", Rate: 1, Burst: 1, MaxWait: 1500 * time.Millisecond,
		})
		var seen events
		stopOrder := l.Observe(func(ctx context.Context, e throttle.Event) {
			require.Equal(t, 7, ctx.Value(id{}))
			order = append(order, string(e.Kind))
			require.NoError(t, l.Update(func(*throttle.Config) {}), "no lock is held")
			l.Stats()
		})
		stop := l.Observe(seen.add)
		ctx := context.WithValue(t.Context(), id{}, 7)
		require.NoError(t, l.Wait(ctx))
		require.Empty(t, seen.take(), "a call that does not wait is no event")
		require.NoError(t, l.Wait(ctx))
		require.Equal(t, []throttle.Event{{Kind: throttle.EventWaited, Name: "api", Cost: 1, Waited: time.Second}}, seen.take())
		var calls sync.WaitGroup
		calls.Go(func() { require.NoError(t, l.Wait(ctx)) })
		synctest.Wait()
		err := l.Wait(ctx)
		require.Equal(t, []throttle.Event{{Kind: throttle.EventRefused, Name: "api", Cost: 1, Reason: throttle.WaitTooLong, Err: err}}, seen.take())
		require.False(t, l.Allow())
		require.False(t, l.Take(1).OK)
		require.Empty(t, seen.take())
		calls.Wait()
		require.Len(t, seen.take(), 1)
		gone, cancel := context.WithTimeoutCause(ctx, 2*time.Second, errDown)
		defer cancel()
		calls.Go(func() {
			time.Sleep(500 * time.Millisecond)
			cancel()
		})
		err = l.Wait(gone)
		require.Equal(t, []throttle.Event{
			{Kind: throttle.EventRefused, Name: "api", Cost: 1, Reason: throttle.ContextEnded, Err: err, Waited: 500 * time.Millisecond},
		}, seen.take())
		stop()
		stop()
		stopOrder()
		require.NoError(t, l.Wait(ctx))
		calls.Wait()
		require.Empty(t, seen.take())
		require.Equal(t, []string{"waited", "refused", "waited", "refused"}, order)
	})
}

func TestGroupObserversSeeKeys(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := throttle.NewGroup(throttle.GroupConfig[int]{
			Config: throttle.Config{Name: "api", Rate: 1, Burst: 1, MaxWait: time.Second}, MaxKeys: 1, IdleAfter: -1,
		})
		var seen events
		defer g.Observe(seen.add)()
		require.NoError(t, g.Wait(t.Context(), 7))
		require.NoError(t, g.Wait(t.Context(), 7))
		require.Equal(t, []throttle.Event{{Kind: throttle.EventWaited, Name: "api", Key: "7", Cost: 1, Waited: time.Second}}, seen.take())
		require.NoError(t, g.Wait(t.Context(), 8))
		require.NoError(t, g.Wait(t.Context(), 8))
		require.Equal(t, []throttle.Event{{Kind: throttle.EventWaited, Name: "api", Cost: 1, Key: "(other keys)", Waited: time.Second}}, seen.take())
		require.NoError(t, g.Wait(t.Context(), 9))
		require.Empty(t, seen.take())

		require.NoError(t, g.Update(func(c *throttle.GroupConfig[int]) { c.Config.MaxWait = 0 }))
		err := g.Wait(t.Context(), 9)
		require.Equal(t, []throttle.Event{
			{Kind: throttle.EventRefused, Name: "api", Cost: 1, Key: "9", Reason: throttle.OverLimit, Err: err},
		}, seen.take())
		require.Equal(t, map[throttle.Reason]int64{throttle.OverLimit: 1}, g.Stats().Refusals)
		require.EqualValues(t, 2, g.Stats().Waited)
		require.Equal(t, 2*time.Second, g.Stats().WaitTime)
	})
}

func TestSharedObserversSeeOutages(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, want := range []string{"", "tenant"} {
			f := &fakeRedis{answer: answers(int64(1), int64(0), int64(0))}
			s := throttle.NewShared(throttle.SharedConfig{Name: "api", Eval: f.eval, Rate: 10, OnOutage: throttle.RefuseAll})
			var seen events
			defer s.Observe(seen.add)()
			defer s.Observe(func(context.Context, throttle.Event) { s.Stats() })()
			require.NoError(t, s.Wait(t.Context(), want))
			require.Empty(t, seen.take())
			f.answer = down
			for range 3 {
				_ = s.Allow(t.Context(), want)
				time.Sleep(2 * time.Second) // the next call tries Redis again
			}
			synctest.Wait()
			require.Equal(t, []throttle.Event{{Kind: throttle.EventOutageBegan, Name: "api", Key: want, Err: errDown}}, seen.take(), "one outage, of three trips")
			err := s.Wait(t.Context(), want)
			require.Equal(t, []throttle.Event{{Kind: throttle.EventRefused, Name: "api", Cost: 1, Key: want, Reason: throttle.Outage, Err: err}}, seen.take())
			f.answer = answers(int64(0), int64(1000), int64(1000))
			time.Sleep(2 * time.Second)
			_ = s.Allow(t.Context(), want)
			synctest.Wait()
			require.Equal(t, []throttle.Event{{Kind: throttle.EventRecovered, Name: "api", Key: want}}, seen.take())
			f.answer = hanging
			_ = s.Allow(t.Context(), want)
			require.Empty(t, seen.take(), "one late answer is no outage")
			_ = s.Allow(t.Context(), want)
			synctest.Wait()
			require.Equal(t, throttle.EventOutageBegan, seen.take()[0].Kind)
			require.EqualValues(t, 2, s.Stats().Outages)
			require.Equal(t, 100*time.Millisecond, s.Stats().AskTime)
			time.Sleep(time.Minute)
		}
	})
}

func TestAdaptiveObserversSeeShedCalls(t *testing.T) {
	a := throttle.NewAdaptive(throttle.AdaptiveConfig{Name: "users"})
	a.SetRand(func() float64 { return 0 })
	var seen events
	defer a.Observe(seen.add)()
	_ = a.Do(t.Context(), overloaded)
	require.Empty(t, seen.take())
	err := a.Do(t.Context(), ok)
	require.Equal(t, []throttle.Event{{Kind: throttle.EventRefused, Name: "users", Cost: 1, Reason: throttle.Shed, Err: err}}, seen.take())
}

func TestStatsCountEachReason(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cost := 1
		l := throttle.New(throttle.Config{
			Rate: 1, Burst: 1, MaxWait: 2 * time.Second, Queue: 1, Levels: 2, Reserve: []float64{}, Priority: levelOf,
			Cost: func(context.Context) int { return cost },
		})
		require.NoError(t, l.Wait(at(t.Context(), 1)))
		require.False(t, l.Allow())    // over the limit
		require.False(t, l.Take(5).OK) // too costly
		soon, cancel := context.WithTimeout(at(t.Context(), 1), time.Millisecond)
		defer cancel()
		require.Error(t, l.Wait(soon)) // deadline too close
		var calls sync.WaitGroup
		calls.Go(func() { require.Error(t, l.Wait(at(t.Context(), 1))) }) // displaced
		synctest.Wait()
		calls.Go(func() { require.NoError(t, l.Wait(at(t.Context(), 0))) }) // waits a second
		synctest.Wait()
		require.Error(t, l.Wait(at(t.Context(), 0))) // queue full
		calls.Wait()
		gone, leave := context.WithCancel(at(t.Context(), 0))
		time.AfterFunc(time.Millisecond, leave)
		require.Error(t, l.Wait(gone)) // context ended
		require.NoError(t, l.Update(func(c *throttle.Config) { c.MaxWait = time.Millisecond }))
		require.Error(t, l.Wait(at(t.Context(), 0))) // wait too long
		cost = 2
		require.Error(t, l.Wait(at(t.Context(), 0))) // too costly
		l.Refund(1)
		require.Equal(t, throttle.Stats{Totals: throttle.Totals{Admitted: 2, Refused: 8, Refusals: map[throttle.Reason]int64{
			throttle.OverLimit: 1, throttle.WaitTooLong: 1, throttle.QueueFull: 1, throttle.Displaced: 1, throttle.DeadlineTooClose: 1, throttle.ContextEnded: 1, throttle.TooCostly: 2,
		}, Spent: 2, Refunded: 1, Waited: 1, WaitTime: time.Second}}, l.Stats())
	})
}

func TestEventsTellLevelAndCost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := throttle.New(throttle.Config{
			Rate: 1, Burst: 4, MaxWait: 3 * time.Second, Levels: 2, Priority: levelOf, Reserve: []float64{},
			Cost: func(context.Context) int { return 3 },
		})
		var seen events
		defer l.Observe(seen.add)()
		require.NoError(t, l.Wait(at(t.Context(), 1)))
		require.NoError(t, l.Wait(at(t.Context(), 1)))
		require.Equal(t, []throttle.Event{{Kind: throttle.EventWaited, Level: 1, Cost: 3, Waited: 2 * time.Second}}, seen.take())
		ctx, cancel := context.WithCancel(at(t.Context(), 1))
		time.AfterFunc(time.Second, cancel)
		err := l.Wait(ctx)
		limited, _ := errors.AsType[*throttle.LimitedError](err)
		require.Equal(t, time.Second, limited.Waited)
		require.Equal(t, []throttle.Event{{
			Kind: throttle.EventRefused, Level: 1, Cost: 3, Waited: time.Second, Reason: throttle.ContextEnded, Err: err,
		}}, seen.take())
	})
}

func TestNegativeCostCountsAsZero(t *testing.T) {
	l := throttle.New(throttle.Config{Rate: 1, Burst: 1, Cost: func(context.Context) int { return -5 }})
	g := throttle.NewGroup(throttle.GroupConfig[int]{Config: l.Config()})
	require.True(t, l.Allow())
	for range 3 {
		require.NoError(t, l.Wait(t.Context()))
		require.NoError(t, g.Wait(t.Context(), 1))
		require.True(t, l.Take(-5).OK)
		require.True(t, g.Take(1, -5).OK)
	}
	require.EqualValues(t, 1, l.Stats().Spent)
	require.Zero(t, g.Stats().Spent)
	require.False(t, l.Allow())
}
