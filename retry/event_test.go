package retry_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/retry"
)

// An eventLog keeps the events that it is told of.
type eventLog struct {
	mu     sync.Mutex
	events []retry.Event
}

func (l *eventLog) note(_ context.Context, e retry.Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.events = append(l.events, e)
}

func (l *eventLog) take() []retry.Event {
	l.mu.Lock()
	defer l.mu.Unlock()
	events := l.events
	l.events = nil
	return events
}

func TestEventsOfARetrier(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log eventLog
		r := retry.New(retry.Config{Name: "users", Backoff: retry.Constant(time.Second)})
		stop := r.Observe(log.note)
		do := func(failures int, err error) error {
			fn, _ := failing(failures, err)
			return r.Do(t.Context(), fn)
		}
		_ = do(0, nil)
		require.Empty(t, log.take(), "success at once")
		_ = do(1, retry.Permanent(errDown))
		require.Empty(t, log.take(), "an error that is returned at once")

		_ = do(2, errDown)
		require.Equal(t, []retry.Event{
			{Kind: retry.EventRetried, Name: "users", Attempt: 1, Err: errDown, Delay: time.Second},
			{Kind: retry.EventRetried, Name: "users", Attempt: 2, Err: errDown, Delay: time.Second, RetryingFor: time.Second},
			{Kind: retry.EventEnded, Name: "users", Attempts: 3, RetryingFor: 2 * time.Second, Outcome: retry.OutcomeRecovered},
		}, log.take())

		err := do(forever, errDown)
		events := log.take()
		require.Len(t, events, 3)
		require.Equal(t, retry.Event{
			Kind: retry.EventEnded, Name: "users", Attempts: 3, Err: err, RetryingFor: 2 * time.Second, Outcome: retry.OutcomeExhausted,
		}, events[2])

		n := 0
		_ = r.Do(t.Context(), func(context.Context) error {
			if n++; n == 2 {
				return retry.Permanent(errDown)
			}
			return errDown
		})
		require.Equal(t, retry.Event{
			Kind: retry.EventEnded, Name: "users", Attempts: 2, Err: errDown, RetryingFor: time.Second, Outcome: retry.OutcomePermanent,
		}, log.take()[1])

		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		err = r.Do(ctx, fail)
		require.Equal(t, []retry.Event{
			{Kind: retry.EventEnded, Name: "users", Attempts: 1, Err: err, Outcome: retry.OutcomeDeadline},
		}, log.take(), "no attempt followed, and yet it gave up")

		stop()
		_ = do(2, errDown)
		require.Empty(t, log.take())
	})
}

func TestObserversAreToldAfterTheHooksAndMayCallBack(t *testing.T) {
	type key struct{}
	ctx := context.WithValue(t.Context(), key{}, "caller")
	var told []string
	note := func(who string) func(context.Context) {
		return func(ctx context.Context) { told = append(told, fmt.Sprint(who, " ", ctx.Value(key{}))) }
	}
	r := retry.New(retry.Config{
		Attempts: 2, Backoff: retry.Constant(0),
		OnRetry: func(ctx context.Context, _ retry.Attempt) { note("OnRetry")(ctx) },
	})
	r.Observe(func(ctx context.Context, e retry.Event) {
		note(string(e.Kind))(ctx)
		require.NoError(t, r.Update(func(c *retry.Config) { c.MaxElapsed++ }))
		_, _, _ = r.Name(), r.Config(), r.Stats()
	})
	r.Observe(func(ctx context.Context, e retry.Event) { note("second " + string(e.Kind))(ctx) })
	_ = r.Do(ctx, fail)
	require.Equal(t, []string{
		"OnRetry caller", "retried caller", "second retried caller",
		"ended caller", "second ended caller",
	}, told)
}

func TestEventsOfABudget(t *testing.T) {
	var log eventLog
	b := retry.NewBudget(retry.BudgetConfig{Name: "users", Ratio: -1, PerSecond: -1})
	stop := b.Observe(func(ctx context.Context, e retry.Event) {
		require.NoError(t, b.Update(func(c *retry.BudgetConfig) { c.Ratio = -1 }), "no lock is held")
		log.note(ctx, e)
	})
	r := retry.New(retry.Config{Name: "list", Budget: b})
	r.Observe(log.note)
	err := r.Do(t.Context(), fail)
	require.Equal(t, []retry.Event{
		{Kind: retry.EventOverBudget, Name: "users"},
		{Kind: retry.EventEnded, Name: "list", Attempts: 1, Err: err, Outcome: retry.OutcomeOverBudget},
	}, cleared(log.take()))
	stop()
	_ = r.Do(t.Context(), fail)
	require.Len(t, log.take(), 1)
}

// cleared returns events without the times that depend on the machine.
func cleared(events []retry.Event) []retry.Event {
	for i := range events {
		events[i].RetryingFor = 0
	}
	return events
}

func TestEventsOfAHedger(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log eventLog
		b := retry.NewBudget(retry.BudgetConfig{Name: "budget", Ratio: -1, PerSecond: 1})
		h := retry.NewHedger[string](retry.HedgeConfig{Name: "users", Delay: 50 * ms, Max: 3, Budget: b})
		stop := h.Observe(func(ctx context.Context, e retry.Event) {
			_, _ = h.Stats(), h.Update(func(c *retry.HedgeConfig) { c.Delay = 50 * ms }) // no lock is held
			log.note(ctx, e)
		})
		b.Observe(log.note)
		do := func(all ...reply) {
			fn, _ := replies(all...)
			_, _ = h.Do(t.Context(), fn)
		}
		event := func(kind retry.EventKind, n int, o retry.Outcome, err error) retry.Event {
			e := retry.Event{Kind: kind, Name: "users", Outcome: o, Err: err}
			if kind == retry.EventEnded {
				e.Attempts = n
			} else {
				e.Attempt = n
			}
			return e
		}
		do(reply{takes: 10 * ms})
		do(reply{takes: 10 * ms, err: errDown})
		require.Empty(t, log.take(), "not hedged")

		do(reply{takes: time.Second}, reply{takes: 10 * ms})
		require.Equal(t, []retry.Event{event(retry.EventHedged, 2, "", nil), event(retry.EventEnded, 2, retry.OutcomeHedgeWon, nil)}, log.take())

		do(reply{takes: 120 * ms}, reply{takes: time.Second}, reply{takes: time.Second})
		require.Equal(t, []retry.Event{
			event(retry.EventHedged, 2, "", nil), event(retry.EventHedged, 3, "", nil), event(retry.EventEnded, 3, retry.OutcomeFirstWon, nil),
		}, log.take())

		do(reply{takes: 60 * ms, err: errDown}, reply{takes: ms, err: errDown}, reply{})
		require.Equal(t, retry.OutcomeFailed, log.take()[1].Outcome)

		for range 6 {
			do(reply{takes: 60 * ms}, reply{takes: time.Second})
		}
		log.take()
		do(reply{takes: 60 * ms}, reply{takes: time.Second})
		require.Equal(t, []retry.Event{{Kind: retry.EventOverBudget, Name: "budget"}, event(retry.EventOverBudget, 0, "", nil)}, log.take())
		stop()
	})
}

func TestPanicOfAnObserverOfAHedgerPassesOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		discarded := 0
		h := retry.NewHedger[string](retry.HedgeConfig{Delay: 50 * ms, Discard: func(any) { discarded++ }})
		kind := retry.EventHedged
		h.Observe(func(_ context.Context, e retry.Event) {
			if e.Kind == kind {
				panic("observer")
			}
		})
		for range 2 {
			fn, _ := replies(reply{takes: time.Second}, reply{takes: ms})
			require.Panics(t, func() { _, _ = h.Do(t.Context(), fn) })
			kind = retry.EventEnded
		}
		require.Equal(t, 1, discarded, "the value that the caller did not get")
	})
}
