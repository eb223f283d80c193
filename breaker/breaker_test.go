package breaker_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/breaker"
)

var (
	errDown = errors.New("down")
	errHang = fmt.Errorf("attempt: %w", os.ErrDeadlineExceeded) // a timeout
)

func ok(context.Context) error   { return nil }
func down(context.Context) error { return errDown }

// taking returns a call that takes d and returns err.
func taking(d time.Duration, err error) func(context.Context) error {
	return func(context.Context) error {
		time.Sleep(d)
		return err
	}
}

// watched returns a breaker whose transitions seen collects.
func watched(seen *changes, cfg breaker.Config) *breaker.Breaker {
	b := breaker.New(cfg)
	onChange(b, seen.hook)
	return b
}

// onChange calls f with each transition.
func onChange(b *breaker.Breaker, f func(context.Context, breaker.Event)) {
	b.Observe(func(ctx context.Context, e breaker.Event) {
		if e.Kind == breaker.EventChanged {
			f(ctx, e)
		}
	})
}

// changes collects transitions, as "closed -> open".
type changes struct {
	mu  sync.Mutex
	all []breaker.Event
}

func (c *changes) hook(_ context.Context, change breaker.Event) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.all = append(c.all, change)
}

// requireChain checks that each transition starts in the state in which the one before ended.
func (c *changes) requireChain(t *testing.T, end breaker.State) {
	t.Helper()
	from := breaker.Closed
	for i, change := range c.all {
		require.Equal(t, from, change.From, "change %d: %+v", i, change)
		require.NotEqual(t, change.From, change.To, "change %d", i)
		from = change.To
	}
	require.Equal(t, end, from)
}

func (c *changes) String() string {
	var words []string
	for _, change := range c.all {
		words = append(words, fmt.Sprintf("%v -> %v", change.From, change.To))
	}
	return strings.Join(words, ", ")
}

func do(b *breaker.Breaker, fn func(context.Context) error) error {
	return b.Do(context.Background(), fn)
}

// open opens b, whose ConsecutiveFailures is 1.
func open(t *testing.T, b *breaker.Breaker) {
	t.Helper()
	require.Equal(t, errDown, do(b, down))
	require.Equal(t, breaker.Open, b.State())
}

// untotaled returns the Stats of b without the counters.
func untotaled(b *breaker.Breaker) breaker.Stats {
	s := b.Stats()
	s.Succeeded, s.Failed, s.Ignored, s.Refused, s.Transitions = 0, 0, 0, 0, nil
	return s
}

func requireRefused(t *testing.T, err error, state breaker.State) *breaker.OpenError {
	t.Helper()
	require.ErrorIs(t, err, breaker.ErrOpen)
	var refusal *breaker.OpenError
	require.ErrorAs(t, err, &refusal)
	require.Equal(t, state, refusal.State)
	return refusal
}

// The breaker opens, refuses, probes and closes at exact times.
func TestOpenProbeClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var seen changes
		b := watched(&seen, breaker.Config{
			Name:                "users",
			ConsecutiveFailures: 3,
			OpenFor:             time.Second,
			MaxOpenFor:          5 * time.Second,
		})
		require.Equal(t, breaker.Closed, b.State())
		require.NoError(t, do(b, ok))
		for range 2 {
			require.Equal(t, errDown, do(b, down))
		}
		require.NoError(t, do(b, ok), "a success between failures")
		for range 3 {
			require.Equal(t, breaker.Closed, b.State())
			require.Equal(t, errDown, do(b, down))
		}
		began := time.Now()
		for n, lasts := range []time.Duration{1, 2, 4, 5, 5} {
			lasts *= time.Second
			require.Equal(t, breaker.Open, b.State())
			s := b.Stats()
			require.Equal(t, lasts, s.OpenLeft)
			require.EqualValues(t, n+1, s.ConsecutiveOpens)
			refusal := requireRefused(t, do(b, ok), breaker.Open)
			require.Equal(t, lasts, refusal.RetryAfter())
			require.Equal(t, time.Now().Add(lasts), refusal.Until)

			time.Sleep(lasts - time.Millisecond)
			require.Equal(t, breaker.Open, b.State())
			refusal = requireRefused(t, do(b, ok), breaker.Open)
			require.Equal(t, time.Millisecond, refusal.RetryAfter())
			time.Sleep(time.Millisecond)
			require.Equal(t, errDown, do(b, down), "the probe")
		}
		require.Equal(t, 17*time.Second, time.Since(began))
		time.Sleep(5 * time.Second)
		require.Equal(t, breaker.HalfOpen, b.State())
		require.NoError(t, do(b, ok))
		require.Equal(t, breaker.Closed, b.State())
		require.EqualValues(t, 6, b.Stats().ConsecutiveOpens)

		time.Sleep(time.Minute - 1)
		for range 3 {
			require.Equal(t, errDown, do(b, down))
		}
		require.Equal(t, 5*time.Second, b.Stats().OpenLeft, "it was closed for less than a Window")
		time.Sleep(5 * time.Second)
		require.NoError(t, do(b, ok))
		time.Sleep(time.Minute)
		require.Zero(t, b.Stats().ConsecutiveOpens)
		for range 3 {
			require.Equal(t, errDown, do(b, down))
		}
		require.Equal(t, time.Second, b.Stats().OpenLeft, "the time is the first again")
		seen.requireChain(t, breaker.Open)
		require.Len(t, seen.all, 1+5*2+2+3+1)
		require.Equal(t, breaker.Event{
			Kind: breaker.EventChanged, Name: "users", From: breaker.Closed, To: breaker.Open,
			At: began, Err: errDown, OpenFor: time.Second,
		}, seen.all[0])
	})
}

func TestEndedContextCallsNothing(t *testing.T) {
	cause := errors.New("shutting down")
	ctx, cancel := context.WithCancelCause(context.Background())
	cancel(cause)
	b := breaker.New(breaker.Config{ConsecutiveFailures: 1})
	open(t, b)
	for _, err := range []error{
		b.Do(ctx, func(context.Context) error { panic("called") }),
		func() error { _, err := b.Begin(ctx); return err }(),
	} {
		require.ErrorIs(t, err, cause)
		require.ErrorIs(t, err, context.Canceled)
		require.NotErrorIs(t, err, breaker.ErrOpen)
	}
}

// An operator's open time has no jitter, and MaxRetryAfter bounds the open time with its jitter.
func TestOpenTimesHaveJitter(t *testing.T) {
	defer breaker.SetJitter(func() float64 { return rand.Float64() / 10 })()
	for name, test := range map[string]struct {
		open        func(b *breaker.Breaker)
		least, most time.Duration
	}{
		"OpenFor":              {func(b *breaker.Breaker) { do(b, down) }, 1000 * ms, 1100 * ms},
		"RetryAfter":           {func(b *breaker.Breaker) { do(b, returning(throttled(2000*ms))) }, 2000 * ms, 2200 * ms},
		"almost MaxRetryAfter": {func(b *breaker.Breaker) { do(b, returning(throttled(9500*ms))) }, 9500 * ms, 10000 * ms},
		"MaxRetryAfter":        {func(b *breaker.Breaker) { do(b, returning(throttled(10000*ms))) }, 10000 * ms, 10000 * ms},
		"more":                 {func(b *breaker.Breaker) { do(b, returning(throttled(time.Hour))) }, 10000 * ms, 10000 * ms},
		"the most":             {func(b *breaker.Breaker) { do(b, returning(throttled(1<<63-1))) }, 10000 * ms, 10000 * ms},
		"Trip":                 {func(b *breaker.Breaker) { b.Trip(nil, 2000*ms) }, 2000 * ms, 2000 * ms},
		"Trip by itself":       {func(b *breaker.Breaker) { b.Trip(nil, 0) }, 1000 * ms, 1100 * ms},
		"Trip, negative":       {func(b *breaker.Breaker) { b.Trip(nil, -1) }, 1000 * ms, 1100 * ms},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				shortest, longest := time.Hour, time.Duration(0)
				for range 1000 {
					b := breaker.New(breaker.Config{
						ConsecutiveFailures: 1, OpenFor: time.Second, MaxRetryAfter: 10 * time.Second,
					})
					test.open(b)
					shortest, longest = min(shortest, b.Stats().OpenLeft), max(longest, b.Stats().OpenLeft)
				}
				require.GreaterOrEqual(t, shortest, test.least)
				require.LessOrEqual(t, longest, test.most)
				require.GreaterOrEqual(t, longest-shortest, (test.most-test.least)*8/10, "a fleet would probe at once")
			})
		})
	}
}

// Trip opens for exactly as long as it is told, however short.
func TestTripExactly(t *testing.T) {
	for _, d := range []time.Duration{2, 10, 100, 999, time.Microsecond, ms} {
		synctest.Test(t, func(t *testing.T) {
			b := breaker.New(breaker.Config{})
			b.Trip(errDown, d)
			require.Equal(t, d, b.Stats().OpenLeft)
			time.Sleep(d - 1)
			requireRefused(t, do(b, ok), breaker.Open)
			time.Sleep(time.Nanosecond)
			require.NoError(t, do(b, ok))
			require.Equal(t, breaker.Closed, b.State())
		})
	}
}

func TestPanicIsFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var seen changes
		b := watched(&seen, breaker.Config{ConsecutiveFailures: 1, OpenFor: time.Second, MaxOpenFor: time.Minute})
		boom := func(context.Context) error { panic("boom") }
		for n := 1; n <= 3; n++ { // closed, then as a probe
			require.PanicsWithValue(t, "boom", func() { do(b, boom) })
			require.Equal(t, breaker.Open, b.State())
			require.EqualError(t, b.Stats().LastErr, "boom")
			require.Equal(t, time.Second<<(n-1), b.Stats().OpenLeft)
			require.Len(t, seen.all, 2*n-1, "before the panic continues")
			time.Sleep(b.Stats().OpenLeft)
		}
		require.NoError(t, do(b, ok))
	})
}

func TestCanceledCallsOpenNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(breaker.Config{ConsecutiveFailures: 1, OpenFor: time.Second, Classify: func(error) breaker.Verdict {
			return breaker.Failure
		}})
		canceled := func() {
			for _, end := range []error{context.DeadlineExceeded, context.Canceled} {
				ctx, cancel := context.WithCancel(context.Background())
				if end == context.DeadlineExceeded {
					ctx, cancel = context.WithTimeout(context.Background(), time.Millisecond)
				}
				time.AfterFunc(2*time.Millisecond, cancel)
				require.ErrorIs(t, b.Do(ctx, func(ctx context.Context) error {
					<-ctx.Done()
					return fmt.Errorf("query: %w", ctx.Err())
				}), end)
			}
		}
		canceled()
		require.Equal(t, breaker.Closed, b.State())
		require.Zero(t, b.Stats().Window)
		open(t, b)
		time.Sleep(time.Second)
		for range 3 {
			canceled()
			require.Equal(t, breaker.HalfOpen, b.State(), "neither opened nor closed")
		}
		require.NoError(t, do(b, ok), "the permit is there")
		require.Equal(t, breaker.Closed, b.State())

		// A limit inside the breaker is not the caller's.
		require.ErrorIs(t, do(b, func(ctx context.Context) error {
			ctx, cancel := context.WithTimeout(ctx, time.Millisecond)
			defer cancel()
			<-ctx.Done()
			return ctx.Err()
		}), context.DeadlineExceeded)
		require.Equal(t, breaker.Open, b.State())
	})
}

func TestBreakerAllocations(t *testing.T) {
	ctx := context.Background()
	for name, cfg := range map[string]breaker.Config{
		"default":    {},
		"rate":       {FailureRate: 0.5},
		"slow":       {SlowAfter: time.Hour},
		"last calls": {FailureRate: 0.5, WindowCalls: 50},
	} {
		b := breaker.New(cfg)
		require.Zero(t, testing.AllocsPerRun(1000, func() { b.Do(ctx, ok) }), "closed, %s", name)
		b.Trip(errDown, time.Hour)
		require.Zero(t, testing.AllocsPerRun(1000, func() { b.Do(ctx, ok) }), "open, %s", name)
		b.ForceOpen(errDown)
		require.Zero(t, testing.AllocsPerRun(1000, func() { b.Do(ctx, ok) }), "forced open, %s", name)
	}
}
