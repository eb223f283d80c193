package breaker_test

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/internal/behavior"
)

// pinged is the Config of a breaker that opens after one failure and then calls ping.
func pinged(ping func(context.Context) error, seen *changes) breaker.Config {
	return steady(breaker.Config{
		Failures: 1, OpenFor: time.Second, MaxOpenFor: time.Minute, MaxHalfOpen: 10 * time.Second,
		Ping: ping, OnChange: seen.hook,
	})
}

func TestBreakerPingsInTheBackground(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var seen changes
		var pings atomic.Int64
		began := time.Now()
		var at []time.Duration
		cfg := pinged(func(context.Context) error {
			at = append(at, time.Since(began))
			if pings.Add(1) < 3 {
				return errDown
			}
			time.Sleep(100 * time.Millisecond)
			return nil
		}, &seen)
		cfg.Successes = 2
		b := breaker.New(cfg)
		do(b, down)
		time.Sleep(7 * time.Second)
		synctest.Wait()
		require.Equal(t, breaker.HalfOpen, b.State())
		requireRefused(t, do(b, ok), breaker.CircuitHalfOpen)
		time.Sleep(200*time.Millisecond - 1)
		requireRefused(t, do(b, ok), breaker.CircuitHalfOpen)
		time.Sleep(time.Nanosecond)
		synctest.Wait()
		require.NoError(t, do(b, ok), "without a call since")
		require.Equal(t, []time.Duration{time.Second, 3 * time.Second, 7 * time.Second, 7100 * time.Millisecond}, at)
		require.Equal(t, "closed -> open, open -> half-open, half-open -> open, open -> half-open, half-open -> open, "+
			"open -> half-open, half-open -> closed", seen.String())
		// The bubble ends: no goroutine is left.
	})
}

// A hook that panics where there is no caller does not end the program, nor the pings.
func TestBreakerPingSurvivesHooks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var seen changes
		var told []any
		cfg := pinged(func(context.Context) error { return nil }, &seen)
		cfg.OnChange = func(_ context.Context, e breaker.Event) { panic(e.To) }
		cfg.OnPanic = func(_ context.Context, value any, stack []byte) {
			require.Contains(t, string(stack), "ping_test.go")
			told = append(told, value)
		}
		g := breaker.NewGroup(breaker.GroupConfig[string]{Config: cfg})
		require.PanicsWithValue(t, breaker.Open, func() {
			_ = g.Do(t.Context(), "a", down)
		}, "there is a caller")
		time.Sleep(time.Minute)
		synctest.Wait()
		require.Equal(t, []any{breaker.HalfOpen, breaker.Closed}, told)
		require.EqualValues(t, 2, g.Stats().HookPanics)
	})
}

func TestBreakerRefusesTrafficWhilePinging(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var seen changes
		cfg := pinged(func(context.Context) error {
			time.Sleep(5 * time.Second)
			return nil
		}, &seen)
		cfg.Probes = 2 // the ping leaves one permit free
		b := breaker.New(cfg)
		do(b, down)
		for range 109 {
			time.Sleep(100 * time.Millisecond)
			require.ErrorIs(t, do(b, ok), breaker.ErrOpen)
		}
		time.Sleep(100 * time.Millisecond)
		synctest.Wait()
		require.NoError(t, do(b, ok))
	})
}

func TestBreakerProbesWithCallsWhenAPingHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var seen changes
		hanging := make(chan struct{})
		b := breaker.New(pinged(func(context.Context) error {
			<-hanging // heedless of its ctx
			return errDown
		}, &seen))
		do(b, down)
		time.Sleep(11*time.Second - 1)
		requireRefused(t, do(b, ok), breaker.CircuitHalfOpen)
		time.Sleep(time.Nanosecond)
		require.NoError(t, do(b, ok))
		require.Equal(t, breaker.Closed, b.State())
		close(hanging)
		synctest.Wait()
		require.Equal(t, breaker.Closed, b.State())
	})
}

func TestBreakerPingIsLimited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var seen changes
		b := breaker.New(pinged(func(ctx context.Context) error {
			<-ctx.Done()
			return ctx.Err()
		}, &seen))
		do(b, down)
		time.Sleep(11 * time.Second)
		synctest.Wait()
		require.Equal(t, breaker.Open, b.State(), "the limit is not the caller's: it has failed")
		require.Equal(t, 2*time.Second, b.Stats().OpenLeft)
		require.ErrorIs(t, b.Stats().LastErr, context.DeadlineExceeded)
		require.NoError(t, b.Close())
	})
}

func TestBreakerIgnoredPingHasFailed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var seen changes
		var pings int
		cfg := pinged(func(ctx context.Context) error { pings++; return errDown }, &seen)
		cfg.Classify = func(error) breaker.Outcome { return breaker.Ignore }
		b := breaker.New(cfg)
		b.Trip(nil, time.Second)
		time.Sleep(time.Second)
		synctest.Wait()
		require.Equal(t, 1, pings)
		require.Equal(t, breaker.Open, b.State())
		require.NoError(t, b.Close())
	})
}

func TestBreakerStopsPinging(t *testing.T) {
	for name, stop := range map[string]func(b *breaker.Breaker){
		"reset":   func(b *breaker.Breaker) { b.Reset() },
		"force":   func(b *breaker.Breaker) { b.ForceOpen(errDown) },
		"disable": func(b *breaker.Breaker) { b.Disable() },
		"close":   func(b *breaker.Breaker) { b.Close(); b.Close() },
	} {
		for when, d := range map[string]time.Duration{"open": 0, "half-open": time.Second} {
			t.Run(name+" while "+when, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					var seen changes
					var ended error
					b := breaker.New(pinged(func(ctx context.Context) error {
						<-ctx.Done()
						ended = context.Cause(ctx)
						return errors.Join(errDown, ctx.Err())
					}, &seen))
					do(b, down)
					time.Sleep(d)
					synctest.Wait()
					before := b.State()
					stop(b)
					state := b.State()
					synctest.Wait()
					require.Equal(t, state, b.State(), "the ping that was cut off changes nothing")
					if name == "close" {
						require.Equal(t, before, state)
						time.Sleep(time.Second - d)
						require.NoError(t, do(b, ok), "now calls are the probes")
						require.Equal(t, breaker.Closed, b.State())
						do(b, down)
						time.Sleep(time.Hour)
						synctest.Wait()
						require.Equal(t, breaker.HalfOpen, b.State(), "no ping has opened it again")
					}
					if d > 0 {
						require.ErrorIs(t, ended, context.Canceled)
					}
				})
			})
		}
	}
}

// The goroutine that would ping runs the hook that closes the breaker.
func TestBreakerDoesNotPingAfterClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := pinged(func(context.Context) error { t.Error("pinged"); return nil }, new(changes))
		var b *breaker.Breaker
		cfg.OnChange = func(_ context.Context, c breaker.Event) {
			if c.To == breaker.HalfOpen {
				require.NoError(t, b.Close())
			}
		}
		b = breaker.New(cfg)
		do(b, down)
		time.Sleep(time.Second)
		synctest.Wait()
		require.NoError(t, do(b, ok), "now calls are the probes")
		require.Equal(t, breaker.Closed, b.State())
	})
}

// A Ping of an earlier open phase does not keep probes out.
func TestBreakerProbesAfterPingsThatWereStopped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(pinged(func(context.Context) error { t.Error("pinged"); return nil }, new(changes)))
		do(b, down)
		b.Reset()
		require.NoError(t, b.Close())
		do(b, down)
		time.Sleep(time.Second)
		require.NoError(t, do(b, ok))
		require.Equal(t, breaker.Closed, b.State())
	})
}

func TestBreakerPingsAfterATripForItsTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var seen changes
		b := breaker.New(pinged(ok, &seen))
		do(b, down)
		b.Trip(nil, time.Minute)
		time.Sleep(time.Minute - 1)
		synctest.Wait()
		require.Equal(t, breaker.Open, b.State())
		time.Sleep(time.Nanosecond)
		synctest.Wait()
		require.Equal(t, breaker.Closed, b.State())
	})
}

// A Ping that returns after MaxHalfOpen has failed, whatever it returns. If a call has
// ended the phase by then, the Ping changes nothing.
func TestBreakerPingThatReturnsTooLate(t *testing.T) {
	for _, test := range []struct {
		call func(context.Context) error // at 11.5 s; the Ping was begun at 1 s and returns at 12 s
		want string
	}{
		{nil, "half-open -> open"},
		{ok, "half-open -> closed"},
		{down, "half-open -> open"},
	} {
		synctest.Test(t, func(t *testing.T) {
			var seen changes
			b := breaker.New(pinged(taking(11*time.Second, nil), &seen))
			do(b, down)
			time.Sleep(11500 * time.Millisecond)
			if test.call != nil {
				do(b, test.call)
			}
			time.Sleep(500 * time.Millisecond)
			synctest.Wait()
			require.Equal(t, "closed -> open, open -> half-open, "+test.want, seen.String())
			require.NoError(t, b.Close())
			time.Sleep(time.Hour)
		})
	}
}

// A probe that hangs with the only permit does not delay a Ping.
func TestBreakerPingsThoughAProbeHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var seen changes
		var pings atomic.Int64
		b := breaker.New(pinged(func(ctx context.Context) error {
			if pings.Add(1) == 1 {
				time.Sleep(12 * time.Second) // heedless of its ctx
			}
			return nil
		}, &seen))
		do(b, down)
		time.Sleep(11 * time.Second) // calls probe now
		forgotten, err := b.Begin(t.Context())
		require.NoError(t, err)
		time.Sleep(2 * time.Second) // the Ping returns at 13 s, has failed, and is called again at 15 s
		synctest.Wait()
		require.Equal(t, breaker.Open, b.State())
		time.Sleep(2 * time.Second)
		synctest.Wait()
		require.EqualValues(t, 2, pings.Load())
		require.Equal(t, breaker.Closed, b.State())
		forgotten(errDown)
		require.Equal(t, breaker.Closed, b.State())
	})
}

// A Ping that panics, or ends its goroutine, has failed. The program goes on.
func TestBreakerPingThatDoesNotReturnHasFailed(t *testing.T) {
	for name, test := range map[string]struct {
		ping func()
		want string
	}{
		"panic":           {func() { panic("boom") }, "breaker: Ping panicked: boom"},
		"error":           {func() { panic(errDown) }, "breaker: Ping panicked: down"},
		"answer":          {func() { panic(answered(true)) }, "breaker: Ping panicked: " + answered(true).Error()},
		"refusal":         {func() { panic(refused(true)) }, "breaker: Ping panicked: " + refused(true).Error()},
		"goroutine's end": {runtime.Goexit, "breaker: Ping called runtime.Goexit"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var seen changes
				var healthy atomic.Bool
				b := breaker.New(pinged(func(context.Context) error {
					if !healthy.Load() {
						test.ping()
					}
					return nil
				}, &seen))
				do(b, down)
				time.Sleep(time.Second)
				synctest.Wait()
				require.Equal(t, 2*time.Second, b.Stats().OpenLeft)
				require.EqualError(t, b.Stats().LastErr, test.want)
				if name == "error" {
					require.ErrorIs(t, b.Stats().LastErr, errDown)
				}
				if p, ok := errors.AsType[interface {
					error
					Stack() []byte
				}](b.Stats().LastErr); ok {
					require.Contains(t, string(p.Stack()), "ping_test.go")
					require.Equal(t, behavior.Failed, behavior.Read(p).Kind)
				}
				healthy.Store(true)
				time.Sleep(2 * time.Second)
				synctest.Wait()
				require.Equal(t, breaker.Closed, b.State())
			})
		})
	}
}

func TestBreakerPingThatAnswersHasSucceeded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var seen changes
		b := breaker.New(pinged(returning(answered(true)), &seen))
		do(b, down)
		time.Sleep(time.Second)
		synctest.Wait()
		require.Equal(t, breaker.Closed, b.State())
	})
}

// The next Ping waits for one that does not return, whatever happens meanwhile.
func TestBreakerPingsOneAtATime(t *testing.T) {
	for name, meanwhile := range map[string]func(*breaker.Breaker){
		"calls fail": func(b *breaker.Breaker) { do(b, down) },
		"trip":       func(b *breaker.Breaker) { b.Trip(errDown, 0) },
		"reset":      func(b *breaker.Breaker) { b.Reset(); do(b, down) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var running, most, made atomic.Int64
				cfg := pinged(func(context.Context) error {
					most.Store(max(most.Load(), running.Add(1)))
					defer running.Add(-1)
					made.Add(1)
					time.Sleep(7 * time.Minute) // heedless of its ctx
					return errDown
				}, new(changes))
				cfg.MaxOpenFor = 0
				b := breaker.New(cfg)
				do(b, down)
				for range 3600 / 5 {
					time.Sleep(5 * time.Second)
					meanwhile(b)
				}
				require.EqualValues(t, 1, most.Load())
				require.InDelta(t, 60/7, made.Load(), 1, "each follows the one before")
				require.NoError(t, b.Close())
				time.Sleep(7 * time.Minute)
			})
		})
	}
}

// Pings that cannot count are made at intervals.
func TestBreakerPingsWithPausesBesideAProbe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(steady(breaker.Config{Failures: 1, OpenFor: time.Second}))
		open(t, b)
		time.Sleep(time.Second)
		done, err := b.Begin(t.Context())
		require.NoError(t, err)
		var pings atomic.Int64
		update(t, b, func(c *breaker.Config) { c.Ping = func(context.Context) error { pings.Add(1); return nil } })
		time.Sleep(time.Second - 1)
		require.EqualValues(t, 100, pings.Load())
		done(nil)
		require.Equal(t, breaker.Closed, b.State())
		time.Sleep(time.Second)
	})
}

func TestBreakerDoesNotPingWhileItIsClosed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(breaker.Config{})
		update(t, b, func(c *breaker.Config) { c.Ping = func(context.Context) error { panic("it is closed") } })
		time.Sleep(time.Hour)
		require.Equal(t, breaker.Closed, b.State())
	})
}

func TestBreakerPingsAgainAfterAnUpdateWithoutPing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := breaker.New(steady(breaker.Config{Failures: 1, OpenFor: time.Second, Ping: ok}))
		open(t, b)
		update(t, b, func(c *breaker.Config) { c.Ping = nil })
		update(t, b, func(c *breaker.Config) { c.Ping = ok })
		time.Sleep(time.Second)
		synctest.Wait()
		require.Equal(t, breaker.Closed, b.State())
	})
}

// Each Ping keeps calls out for its own MaxHalfOpen.
func TestBreakerRefusesTrafficDuringTheNextPing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var seen changes
		cfg := pinged(taking(9*time.Second, nil), &seen)
		cfg.Successes = 2
		b := breaker.New(cfg)
		open(t, b)
		time.Sleep(13 * time.Second)
		requireRefused(t, do(b, ok), breaker.CircuitHalfOpen)
		time.Sleep(6 * time.Second)
		synctest.Wait()
		require.Equal(t, breaker.Closed, b.State())
	})
}

func TestCloseStress(t *testing.T) {
	b := breaker.New(breaker.Config{Failures: 1, OpenFor: time.Microsecond, Ping: ok})
	var all sync.WaitGroup
	for range 2 {
		all.Go(func() {
			for range 200 {
				do(b, down)
				require.NoError(t, b.Close())
			}
		})
	}
	all.Wait()
}
