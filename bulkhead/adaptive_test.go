package bulkhead_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/internal/linger"
)

func taking(d time.Duration, err error) func(context.Context) error {
	return func(context.Context) error {
		time.Sleep(d)
		return err
	}
}

// callers of an adaptive bulkhead, each of which calls again and again for d.
func keepCalling(b *bulkhead.Bulkhead, goroutines int, d time.Duration, fn func(context.Context) error) {
	var wg sync.WaitGroup
	for start, i := time.Now(), 0; i < goroutines; i++ {
		wg.Go(func() {
			for time.Since(start) < d {
				if b.Do(context.Background(), fn) != nil {
					time.Sleep(time.Millisecond)
				}
			}
		})
	}
	wg.Wait()
}

func TestAnAdaptiveBulkheadFindsItsLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		workers := make(chan struct{}, 30)
		serve := func(context.Context) error {
			workers <- struct{}{}
			defer func() { <-workers }()
			time.Sleep(20 * time.Millisecond)
			return nil
		}
		var changes []bulkhead.Event
		b := bulkhead.New(bulkhead.Config{
			Name: "x", Adaptive: &bulkhead.AdaptiveLimit{Initial: 5, Max: 200}, MaxWait: -1, Queue: 1000,
		})
		onLimit(b, func(_ context.Context, c bulkhead.Event) { changes = append(changes, c) })
		keepCalling(b, 150, 20*time.Second, serve)
		limit, probes := 0, 0
		for i, c := range changes {
			require.Equal(t, "x", c.Name)
			require.Positive(t, c.Latency)
			require.InDelta(t, 20*time.Millisecond, c.Base, float64(4*time.Millisecond))
			if i > 0 {
				require.Equal(t, changes[i-1].To, c.From)
			}
			if c.Probe {
				probes++
				require.Less(t, c.To, c.From)
			} else {
				limit = c.To
			}
		}
		require.Positive(t, probes)
		require.GreaterOrEqual(t, limit, 30)
		require.LessOrEqual(t, limit, 50)
		requireIdle(t, b)
	})
}

func TestAdaptiveGrowsFromOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := bulkhead.New(bulkhead.Config{Adaptive: &bulkhead.AdaptiveLimit{Initial: 1, Max: 40}})
		keepCalling(b, 100, 9*time.Second, taking(10*time.Millisecond, nil))
		require.Equal(t, 40, b.Stats().Limit)
	})
}

// A slot that comes with the growth is at work before anything else happens.
func TestAdaptiveGrowthWakesWaitingCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var b *bulkhead.Bulkhead
		var running atomic.Int64
		b = bulkhead.New(bulkhead.Config{
			Adaptive: &bulkhead.AdaptiveLimit{Initial: 1, Max: 8}, MaxWait: -1, Queue: 20,
		})
		onLimit(b, func(context.Context, bulkhead.Event) {
			synctest.Wait()
			require.EqualValues(t, b.Stats().InFlight, running.Load())
		})
		keepCalling(b, 20, 5*time.Second, func(context.Context) error {
			running.Add(1)
			defer running.Add(-1)
			time.Sleep(10 * time.Millisecond)
			return nil
		})
		require.Equal(t, 8, b.Stats().Limit)
		requireIdle(t, b)
	})
}

func TestAnUnusedLimitShrinksToInitial(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := bulkhead.New(bulkhead.Config{Adaptive: &bulkhead.AdaptiveLimit{Initial: 10}})
		require.NoError(t, b.SetLimit(50))
		keepCalling(b, 1, 2*time.Minute, taking(time.Millisecond, nil))
		require.Equal(t, 10, b.Stats().Limit)
	})
}

// An end is an error that says something by methods.
type end struct {
	answered, refused, throttled bool
	after                        time.Duration
}

func (end) Error() string               { return "end" }
func (e end) Answered() bool            { return e.answered }
func (e end) Refused() bool             { return e.refused }
func (e end) Throttled() bool           { return e.throttled }
func (e end) RetryAfter() time.Duration { return e.after }

// Through Do and through Begin, an error says nothing about load (the limit stays), that
// the call was served (its latency is a sample), or that there is too much load.
func TestTheLimitReadsAnErrorByTheProtocol(t *testing.T) {
	inner := bulkhead.New(bulkhead.Config{Limit: 1, MaxWait: -1, Queue: 1})
	defer hold(t, inner)()
	waiting, stop := context.WithCancel(t.Context())
	go func() {
		for inner.Stats().Queued[0] == 0 {
			runtime.Gosched()
		}
		stop()
	}()
	overrun := inner.Do(waiting, nothing)
	require.ErrorIs(t, overrun, context.Canceled)

	const nothing, served, overload = "nothing", "served", "overload"
	for _, tc := range []struct {
		name string
		err  error
		want string
	}{
		{"success", nil, served},
		{"answered", end{answered: true}, served},
		{"answered beside a refusal", errors.Join(end{answered: true}, &bulkhead.FullError{}), served},
		{"failed", errors.New("broken"), nothing},
		{"refused", &bulkhead.FullError{}, nothing},
		{"refused by another", end{refused: true, after: time.Second}, nothing},
		{"refused after a wait", overrun, nothing},
		{"deadline exceeded", fmt.Errorf("call: %w", context.DeadlineExceeded), overload},
		{"deadline exceeded beside a refusal", errors.Join(&bulkhead.FullError{}, context.DeadlineExceeded), overload},
		{"timed out", os.ErrDeadlineExceeded, overload},
		{"throttled", end{throttled: true}, overload},
		{"come back later", end{after: time.Second}, overload},
	} {
		for how, call := range map[string]func(*bulkhead.Bulkhead, time.Duration) error{
			"Do": func(b *bulkhead.Bulkhead, d time.Duration) error { return b.Do(t.Context(), taking(d, tc.err)) },
			"Begin": func(b *bulkhead.Bulkhead, d time.Duration) error {
				done, err := b.Begin(context.Background())
				if err != nil {
					return err
				}
				time.Sleep(d)
				done(tc.err)
				return nil
			},
		} {
			t.Run(tc.name+" "+how, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					b := bulkhead.New(bulkhead.Config{Adaptive: &bulkhead.AdaptiveLimit{Initial: 20, Max: 30}})
					keepCalling(b, 40, 5*time.Second, taking(10*time.Millisecond, nil))
					require.NoError(t, b.SetLimit(20))
					limit := b.Stats().Limit
					var wg sync.WaitGroup
					for range 30 {
						wg.Go(func() {
							for range 100 {
								_ = call(b, 10*time.Millisecond)
								time.Sleep(time.Millisecond)
							}
						})
					}
					wg.Wait()
					switch now := b.Stats().Limit; tc.want {
					case nothing:
						require.Equal(t, limit, now)
					case served:
						require.Greater(t, now, limit)
					case overload:
						require.Less(t, now, limit)
					}
					requireIdle(t, b)
				})
			})
		}
	}
}

// The end of the caller's own ctx: a cancel says nothing, a deadline that there was too
// little time.
func TestTheLimitReadsTheEndOfTheCallersContext(t *testing.T) {
	broken := errors.New("connection closed")
	for name, tc := range map[string]struct {
		deadline bool
		shrinks  bool
	}{
		"canceled": {false, false},
		"deadline": {true, true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := bulkhead.New(bulkhead.Config{Adaptive: &bulkhead.AdaptiveLimit{Initial: 20, Max: 20}})
				keepCalling(b, 30, 2*time.Second, taking(10*time.Millisecond, nil))
				require.NoError(t, b.SetLimit(20))
				var wg sync.WaitGroup
				for range 30 {
					wg.Go(func() {
						for range 100 {
							ctx, cancel := context.WithCancel(t.Context())
							if tc.deadline {
								ctx, cancel = context.WithTimeout(ctx, 10*time.Millisecond)
							} else {
								time.AfterFunc(10*time.Millisecond, cancel)
							}
							_ = b.Do(ctx, func(ctx context.Context) error {
								<-ctx.Done()
								return broken
							})
							cancel()
							time.Sleep(time.Millisecond)
						}
					})
				}
				wg.Wait()
				if tc.shrinks {
					require.Less(t, b.Stats().Limit, 15)
				} else {
					require.Equal(t, 20, b.Stats().Limit)
				}
				requireIdle(t, b)
			})
		})
	}
}

// probing drives b until its limit is lowered for a probe, with calls that last until
// the function that it returns.
func probing(t *testing.T, b *bulkhead.Bulkhead, lowered *atomic.Bool) (before int, end func()) {
	for !lowered.Load() {
		before = b.Stats().Limit
		var wg sync.WaitGroup
		for range 2 * before {
			wg.Go(func() { _ = b.Do(t.Context(), taking(10*time.Millisecond, nil)) })
		}
		wg.Wait()
	}
	return before, func() { keepCalling(b, 2*before, time.Second, taking(10*time.Millisecond, nil)) }
}

// A probe lowers the limit for a moment. A call that fits otherwise is neither refused
// for that nor kept waiting.
func TestACostlyCallEndsAProbe(t *testing.T) {
	for name, queue := range map[string]int{"no queue": 0, "queue": 10} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var lowered atomic.Bool
				probes := 0
				b := bulkhead.New(bulkhead.Config{
					Adaptive: &bulkhead.AdaptiveLimit{Initial: 20, Max: 20}, Cost: costOf, MaxWait: -1, Queue: queue,
				})
				onLimit(b, func(_ context.Context, c bulkhead.Event) {
					lowered.Store(c.Probe)
					if c.Probe {
						probes++
					}
				})
				_, end := probing(t, b, &lowered)
				low := b.Stats().Limit
				require.Less(t, low, 20)
				require.ErrorIs(t, b.Do(costing(t.Context(), 21), nothing), bulkhead.ErrFull)
				require.Equal(t, low, b.Stats().Limit, "it would not fit after the probe")
				costly := costing(t.Context(), 20)
				require.NoError(t, b.Do(costly, nothing))
				require.Equal(t, 20, b.Stats().Limit)
				require.False(t, lowered.Load())
				end()
				require.Equal(t, 1, probes, "the next one is not due yet")

				err := b.Do(costing(t.Context(), 21), nothing)
				var full *bulkhead.FullError
				require.ErrorAs(t, err, &full)
				require.Equal(t, bulkhead.TooCostly, full.Reason)
				require.False(t, full.Retryable(), "the limit will not grow to that")

				require.NoError(t, b.SetLimit(10))
				require.ErrorIs(t, b.Do(costly, nothing), bulkhead.ErrFull)
				require.Equal(t, 10, b.Stats().Limit, "no probe is under way")
			})
		})
	}
}

// The limit is not lowered below the cost of a waiting call: with no cheaper call to be
// a sample, that call would wait forever.
func TestNoProbeWhileACostlyCallWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := bulkhead.New(bulkhead.Config{
			Adaptive: &bulkhead.AdaptiveLimit{Initial: 20, Max: 20}, Cost: costOf, MaxWait: -1, Queue: 100,
		})
		onLimit(b, func(_ context.Context, c bulkhead.Event) { require.False(t, c.Probe) })
		ctx := costing(t.Context(), 18)
		var wg sync.WaitGroup
		for range 20 {
			wg.Go(func() {
				for range 200 {
					require.NoError(t, b.Do(ctx, taking(10*time.Millisecond, nil)))
				}
			})
		}
		wg.Wait()
		requireIdle(t, b)
	})
}

// Responses that are read for hours may hold more slots than a limit that has shrunk has, for
// a probe or by a slow server. Other calls go on, whatever their level, even if all of them wait.
func TestStreamsDoNotKeepALimitDown(t *testing.T) {
	for i := range 4 {
		level, maxWait := i%2, -time.Duration(i/2)
		t.Run(fmt.Sprint(level, maxWait), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := bulkhead.New(bulkhead.Config{
					Adaptive: &bulkhead.AdaptiveLimit{Initial: 30, Max: 30}, MaxWait: maxWait,
					Levels: 2, Priority: func(context.Context) int { return level }, Reserve: []float64{0.2},
				})
				lowest := 30
				onLimit(b, func(_ context.Context, c bulkhead.Event) { lowest = min(lowest, c.To) })
				for range 16 {
					ctx, work := linger.Begin(t.Context())
					require.NoError(t, b.Do(ctx, func(context.Context) error {
						time.Sleep(10 * time.Millisecond)
						work.GoOn()
						return nil
					}))
					defer work.End(nil)
				}
				for second := range 80 {
					latency := 10 * time.Millisecond
					if second > 40 {
						latency *= 5
					}
					before, start := b.Stats().Admitted, time.Now()
					keepCalling(b, 20, time.Second, taking(latency, nil))
					require.Less(t, time.Since(start), 4*time.Second)
					require.Greater(t, b.Stats().Admitted, before+5)
				}
				require.Less(t, lowest, 16)
			})
		})
	}
}

// Nor do those that have come while it was low. A server that hangs does not get ever more calls.
func TestStreamsDoNotKeepALowLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := bulkhead.New(bulkhead.Config{Adaptive: &bulkhead.AdaptiveLimit{}})
		keepCalling(b, 30, 5*time.Second, taking(10*time.Millisecond, nil))
		keepCalling(b, 30, 3*time.Second, taking(10*time.Millisecond, context.DeadlineExceeded))
		require.Less(t, b.Stats().Limit, 5)
		streams := 0
		for range 100 {
			ctx, work := linger.Begin(t.Context())
			if b.Do(ctx, func(context.Context) error { work.GoOn(); return nil }) == nil {
				defer work.End(nil)
				streams++
			}
			time.Sleep(10 * time.Millisecond)
		}
		require.Greater(t, streams, 1)
		before := b.Stats().Admitted
		keepCalling(b, 30, 10*time.Second, taking(10*time.Millisecond, nil))
		require.Greater(t, b.Stats().Admitted, before+10_000)

		for range 1000 {
			ctx, work := linger.Begin(t.Context())
			require.NoError(t, b.Do(ctx, func(context.Context) error { work.GoOn(); return nil }))
			work.End(nil)
		}
		limit := b.Stats().Limit
		ended := make(chan struct{})
		var calls sync.WaitGroup
		for range 500 {
			calls.Go(func() {
				for start := time.Now(); time.Since(start) < time.Minute; time.Sleep(50 * time.Millisecond) {
					_ = b.Do(t.Context(), func(context.Context) error { <-ended; return nil })
				}
			})
		}
		time.Sleep(time.Minute)
		require.Less(t, b.Stats().InFlight, 2*limit+streams)
		close(ended)
		calls.Wait()
	})
}

// Nor where an Update lets the calls that wait use a smaller part of it.
func TestStreamsDoNotKeepALimitDownAfterAnUpdate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := bulkhead.New(bulkhead.Config{
			Adaptive: &bulkhead.AdaptiveLimit{Initial: 30, Max: 30}, MaxWait: -1,
			Levels: 2, Priority: func(context.Context) int { return 1 }, Reserve: []float64{0},
		})
		const callers = 20
		var calls sync.WaitGroup
		defer calls.Wait()
		for range 16 {
			done, err := b.Begin(t.Context())
			require.NoError(t, err)
			defer done(nil)
		}
		calls.Go(func() { keepCalling(b, callers, 10*time.Second, taking(10*time.Millisecond, nil)) })
		for b.Stats().Limit > 16 || b.Stats().Queued[1] < callers {
			time.Sleep(time.Millisecond)
		}
		require.NoError(t, b.Update(func(c *bulkhead.Config) { c.Reserve = []float64{0.2} }))
		before := b.Stats().Admitted
		time.Sleep(5 * time.Second)
		require.Greater(t, b.Stats().Admitted, before+callers)
	})
}

// A call that fits does not make a limit grow, whatever is kept of the higher one.
func TestALimitThatSufficesDoesNotGrow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var lowered atomic.Bool
		b := bulkhead.New(bulkhead.Config{
			Adaptive: &bulkhead.AdaptiveLimit{Initial: 40, Max: 40},
			Levels:   2, Priority: func(context.Context) int { return 1 }, Reserve: []float64{0.2},
		})
		onLimit(b, func(_ context.Context, c bulkhead.Event) { lowered.Store(c.Probe) })
		probing(t, b, &lowered)
		low := b.Stats().Limit
		require.Equal(t, 10, low)
		for range 8 {
			time.Sleep(time.Second)
			defer hold(t, b)()
			require.Equal(t, low, b.Stats().Limit)
		}
		time.Sleep(time.Second)
		defer hold(t, b)()
		require.Equal(t, 8+1+8, b.Stats().Limit)
	})
}

func TestACallIsTooCostlyForNowWhereTheLimitMayGrow(t *testing.T) {
	b := bulkhead.New(bulkhead.Config{Adaptive: &bulkhead.AdaptiveLimit{Initial: 4, Max: 8}, Cost: costOf})
	for cost, retryable := range map[int]bool{5: true, 8: true, 9: false} {
		err := b.Do(costing(t.Context(), cost), nothing)
		var full *bulkhead.FullError
		require.ErrorAs(t, err, &full)
		require.Equal(t, bulkhead.TooCostly, full.Reason)
		require.Equal(t, retryable, full.Retryable())
	}
	require.NoError(t, b.Update(func(c *bulkhead.Config) { c.Adaptive = &bulkhead.AdaptiveLimit{Initial: 4, Max: 9} }))
	var full *bulkhead.FullError
	require.ErrorAs(t, b.Do(costing(t.Context(), 9), nothing), &full)
	require.True(t, full.Retryable())
}

// Observers run wherever the limit changes: also before the function of a call that has
// its slot, which is given back if one panics.
func TestAPanicInAnObserverOfTheLimitGivesTheSlotBack(t *testing.T) {
	for how, call := range map[string]func(*bulkhead.Bulkhead){
		"Do": func(b *bulkhead.Bulkhead) { _ = b.Do(context.Background(), taking(10*time.Millisecond, nil)) },
		"Begin": func(b *bulkhead.Bulkhead) {
			if done, err := b.Begin(context.Background()); err == nil {
				time.Sleep(10 * time.Millisecond)
				done(nil)
			}
		},
	} {
		t.Run(how, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var raised atomic.Int64 // changes with which a probe ended
				var wasProbe bool
				b := bulkhead.New(bulkhead.Config{
					Adaptive: &bulkhead.AdaptiveLimit{Initial: 20, Max: 20},
				})
				onLimit(b, func(_ context.Context, c bulkhead.Event) {
					if wasProbe {
						raised.Add(1)
					}
					wasProbe = c.Probe
					panic("boom")
				})
				var wg sync.WaitGroup
				for range 30 {
					wg.Go(func() {
						for start := time.Now(); time.Since(start) < time.Minute; {
							func() {
								defer func() { _ = recover() }()
								call(b)
							}()
							time.Sleep(time.Millisecond)
						}
					})
				}
				wg.Wait()
				require.Positive(t, raised.Load())
				require.Zero(t, b.Stats().InFlight)
			})
		})
	}
}

// Nor is a slot lost if the limit changes as a call begins, which is then not made.
func TestAPanicInAnObserverBeforeACallGivesTheSlotBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := bulkhead.New(bulkhead.Config{Adaptive: &bulkhead.AdaptiveLimit{Initial: 20, Max: 20}})
		keepCalling(b, 30, 3*time.Second, taking(10*time.Millisecond, nil))
		onLimit(b, func(context.Context, bulkhead.Event) { panic("boom") })
		time.Sleep(10 * time.Second)
		calls := 0
		call := func(context.Context) error { calls++; return nil }
		require.PanicsWithValue(t, "boom", func() {
			for range 2 { // the second begins a probe, at the latest
				_ = b.Do(t.Context(), call)
			}
		})
		require.Less(t, calls, 2)
		requireIdle(t, b)
	})
}

func TestAnAdaptiveCallThatPanicsGivesItsSlotBack(t *testing.T) {
	b := bulkhead.New(bulkhead.Config{Adaptive: &bulkhead.AdaptiveLimit{Initial: 1}})
	require.PanicsWithValue(t, "boom", func() {
		_ = b.Do(t.Context(), func(context.Context) error { panic("boom") })
	})
	var wg sync.WaitGroup
	wg.Go(func() {
		_ = b.Do(t.Context(), func(context.Context) error {
			runtime.Goexit()
			return nil
		})
	})
	wg.Wait()
	requireIdle(t, b)
	done, err := b.Begin(t.Context())
	require.NoError(t, err)
	require.ErrorIs(t, b.Do(t.Context(), nothing), bulkhead.ErrFull)
	done(nil)
	done(nil)
	require.Zero(t, b.Stats().InFlight)
}

// The limit moves while callers wait, give up and go on.
func TestAnAdaptiveBulkheadUnderStress(t *testing.T) {
	b := bulkhead.New(bulkhead.Config{
		Adaptive: &bulkhead.AdaptiveLimit{Initial: 4, Max: 16}, Queue: 20, MaxWait: time.Millisecond,
	})
	onLimit(b, func(context.Context, bulkhead.Event) {})
	c := &counted{b: b}
	var wg sync.WaitGroup
	for i := range 30 {
		wg.Go(func() {
			rng := newRand(uint64(i))
			for range 3000 {
				err := b.Do(context.Background(), func(context.Context) error {
					c.in(1)
					defer c.out(1)
					if rng.IntN(8) == 0 {
						time.Sleep(time.Duration(rng.IntN(300)) * time.Microsecond)
					}
					return nil
				})
				if err != nil && !errors.Is(err, bulkhead.ErrFull) {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	require.LessOrEqual(t, c.most.Load(), int64(16))
	require.Equal(t, c.ran.Load(), b.Stats().Admitted)
	requireIdle(t, b)
}
