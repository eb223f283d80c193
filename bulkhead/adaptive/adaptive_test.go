package adaptive_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/bulkhead/adaptive"
	"github.com/go-resilience/resilience/internal/linger"
)

func taking(d time.Duration, err error) func(context.Context) error {
	return func(context.Context) error {
		time.Sleep(d)
		return err
	}
}

func nothing(context.Context) error { return nil }

// hold takes a slot and returns the function that gives it back.
func hold(t *testing.T, b *adaptive.Bulkhead) (release func()) {
	t.Helper()
	done, err := b.Begin(t.Context())
	require.NoError(t, err)
	return func() { done(nil) }
}

// requireIdle checks that every slot is free.
func requireIdle(t *testing.T, b *adaptive.Bulkhead) {
	t.Helper()
	require.False(t, b.Describe().InUse())
	taken, reading, needed := adaptive.Slots(b)
	require.Zero(t, taken)
	require.Zero(t, reading)
	require.Zero(t, needed)
}

// A change of the limit.
type change struct {
	From, To      int
	Latency, Base time.Duration
	Probe         bool
}

// onLimit calls f with each change of the limit, up to a millisecond late, until the test ends.
func onLimit(t *testing.T, b *adaptive.Bulkhead, f func(change)) {
	from := b.Stats().Limit
	var over atomic.Bool
	var watcher sync.WaitGroup
	t.Cleanup(func() { over.Store(true); watcher.Wait() })
	watcher.Go(func() {
		for !over.Load() {
			if s := b.Stats(); s.Limit != from {
				f(change{from, s.Limit, s.Latency, s.Base, s.Probing})
				from = s.Limit
			}
			time.Sleep(time.Millisecond)
		}
	})
}

// setLimit makes the limit n, from where it goes on.
func setLimit(t *testing.T, b *adaptive.Bulkhead, n int) {
	t.Helper()
	var before adaptive.Config
	require.NoError(t, b.Update(func(c *adaptive.Config) { before = *c; c.Initial, c.Min, c.Max = n, n, n }))
	require.NoError(t, b.Update(func(c *adaptive.Config) { *c = before }))
	require.Equal(t, n, b.Stats().Limit)
}

// callers of an adaptive bulkhead, each of which calls again and again for d.
func keepCalling(b *adaptive.Bulkhead, goroutines int, d time.Duration, fn func(context.Context) error) {
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

// A slot that comes with the growth is at work before anything else happens.
func TestAdaptiveGrowthWakesWaitingCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var b *adaptive.Bulkhead
		var running atomic.Int64
		b = adaptive.New(adaptive.Config{
			Bulkhead: bulkhead.Config{MaxWait: -1, Queue: 20}, Initial: 1, Max: 8,
		})
		onLimit(t, b, func(change) {
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

func TestUnusedLimitShrinksToInitial(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := adaptive.New(adaptive.Config{Initial: 10})
		setLimit(t, b, 50)
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

// What Do makes of errors is in the table of docs/protocol.md; Begin reads them alike.
func TestLoadResultOfCalls(t *testing.T) {
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	late, cancel := context.WithDeadline(t.Context(), time.Now().Add(-time.Second))
	defer cancel()
	broken := errors.New("broken")
	for _, tc := range []struct {
		name string
		ctx  context.Context
		err  error
		want string
	}{
		{"success", t.Context(), nil, "answered"},
		{"success although the caller left", canceled, nil, "answered"},
		{"answered", t.Context(), end{answered: true}, "answered"},
		{"answered beside a refusal", t.Context(), errors.Join(end{answered: true}, &bulkhead.FullError{}), "answered"},
		{"failed", t.Context(), broken, "silent"},
		{"the caller left", canceled, broken, "silent"},
		{"the caller's deadline passed", late, broken, "overran"},
		{"refused", t.Context(), &bulkhead.FullError{}, "silent"},
		{"refused, come back later", t.Context(), end{refused: true, after: time.Second}, "silent"},
		{"deadline exceeded", t.Context(), fmt.Errorf("call: %w", context.DeadlineExceeded), "overran"},
		{"timed out", t.Context(), os.ErrDeadlineExceeded, "overran"},
		{"throttled", t.Context(), end{throttled: true}, "overran"},
		{"come back later", t.Context(), end{after: time.Second}, "overran"},
	} {
		require.Equal(t, tc.want, adaptive.ResultOf(tc.ctx, tc.err), tc.name)
	}
}

func TestBeginRecordsSample(t *testing.T) {
	for err, grows := range map[error]int{nil: 1, errors.New("broken"): 0, context.DeadlineExceeded: -1} {
		synctest.Test(t, func(t *testing.T) {
			b := adaptive.New(adaptive.Config{Initial: 20, Max: 30})
			keepCalling(b, 40, 5*time.Second, taking(10*time.Millisecond, nil))
			setLimit(t, b, 20)
			var wg sync.WaitGroup
			for range 30 {
				wg.Go(func() {
					for range 100 {
						if done, _ := b.Begin(t.Context()); done != nil {
							time.Sleep(10 * time.Millisecond)
							done(err)
							done(err) // does nothing
						}
						time.Sleep(time.Millisecond)
					}
				})
			}
			wg.Wait()
			require.Equal(t, grows, cmp.Compare(b.Stats().Limit, 20))
			requireIdle(t, b)
		})
	}
}

// probing drives b until its limit is lowered for a probe, with calls that last until
// the function that it returns.
func probing(t *testing.T, b *adaptive.Bulkhead) (before int, end func()) {
	for !b.Stats().Probing {
		before = b.Stats().Limit
		var wg sync.WaitGroup
		for range 2 * before {
			wg.Go(func() { _ = b.Do(t.Context(), taking(10*time.Millisecond, nil)) })
		}
		wg.Wait()
	}
	return before, func() { keepCalling(b, 2*before, time.Second, taking(10*time.Millisecond, nil)) }
}

// Responses that are read for hours may hold more slots than a limit that has shrunk has, for
// a probe or by a slow server. Other calls go on, whatever their level, even if all of them wait.
func TestStreamsDoNotKeepLimitDown(t *testing.T) {
	for i := range 4 {
		if testing.Short() && i != 3 {
			continue
		}
		level, maxWait := i%2, -time.Duration(i/2)
		t.Run(fmt.Sprint(level, maxWait), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := adaptive.New(adaptive.Config{
					Initial: 30, Max: 30,
					Bulkhead: bulkhead.Config{MaxWait: maxWait, Levels: 2, Priority: func(context.Context) int { return level }},
				})
				lowest := 30
				onLimit(t, b, func(c change) { lowest = min(lowest, c.To) })
				for range 16 {
					ctx, work := linger.Begin(t.Context())
					require.NoError(t, b.Do(ctx, func(context.Context) error {
						time.Sleep(10 * time.Millisecond)
						work.Continue()
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
func TestStreamsDoNotKeepLowLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := adaptive.New(adaptive.Config{})
		keepCalling(b, 30, 5*time.Second, taking(10*time.Millisecond, nil))
		keepCalling(b, 30, 3*time.Second, taking(10*time.Millisecond, context.DeadlineExceeded))
		require.Less(t, b.Stats().Limit, 5)
		streams := 0
		for range 100 {
			ctx, work := linger.Begin(t.Context())
			if b.Do(ctx, func(context.Context) error { work.Continue(); return nil }) == nil {
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
			require.NoError(t, b.Do(ctx, func(context.Context) error { work.Continue(); return nil }))
			work.End(nil)
		}
		limit := b.Stats().Limit
		ended := make(chan struct{})
		var calls sync.WaitGroup
		callers := 500
		if testing.Short() {
			callers = 100
		}
		for range callers {
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

// Two calls arrive at the same time for the last slot. No other call arrives, starts or ends.
func TestLimitGrowsForACallThatArrivesWithAnother(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		both := make(chan struct{})
		b := adaptive.New(adaptive.Config{Initial: 1, Bulkhead: bulkhead.Config{
			MaxWait: bulkhead.Unlimited, Levels: 2, Priority: func(context.Context) int { <-both; return 0 },
		}})
		var admitted atomic.Int64
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		for range 2 {
			go func() {
				ctx, work := linger.Begin(ctx)
				_ = b.Do(ctx, func(context.Context) error { admitted.Add(1); work.Continue(); return nil })
				<-ctx.Done()
				work.End(nil)
			}()
		}
		synctest.Wait()
		close(both)
		time.Sleep(5 * time.Second)
		require.EqualValues(t, 2, admitted.Load())
	})
}

// Nor does a call that costs nothing count for the limit that streams hold.
func TestZeroCostMakesNoRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := adaptive.New(adaptive.Config{Initial: 20, Max: 20, Bulkhead: bulkhead.Config{Cost: costOf}})
		for range 10 {
			defer hold(t, b)()
		}
		probing(t, b)
		low := b.Stats().Limit
		require.Less(t, low, 10)
		time.Sleep(time.Second)
		require.NoError(t, b.Do(costing(t.Context(), 0), nothing))
		require.Equal(t, low, b.Stats().Limit)
		require.NoError(t, b.Do(t.Context(), nothing))
		require.Equal(t, 11, b.Stats().Limit)
	})
}

// A probe begins with a call: the limit is lowered before another one comes.
func TestFirstCallOfProbeLowersLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := adaptive.New(adaptive.Config{Initial: 20, Max: 20})
		keepCalling(b, 30, 3*time.Second, taking(10*time.Millisecond, nil))
		time.Sleep(10 * time.Second)
		require.False(t, b.Stats().Probing)
		defer hold(t, b)()
		require.True(t, b.Stats().Probing)
		require.Less(t, b.Stats().Limit, 20)
	})
}

// A call that fits does not make a limit grow.
func TestSufficientLimitDoesNotGrow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := adaptive.New(adaptive.Config{
			Initial: 20, Max: 20,
		})
		probing(t, b)
		low := b.Stats().Limit
		require.Equal(t, 5, low)
		for range low - 1 {
			time.Sleep(time.Second)
			defer hold(t, b)()
			require.Equal(t, low, b.Stats().Limit)
		}
		time.Sleep(time.Second)
		defer hold(t, b)()
		require.Equal(t, low, b.Stats().Limit)
		time.Sleep(time.Second)
		defer hold(t, b)()
		require.Equal(t, low+1, b.Stats().Limit)
	})
}

// The limit moves while callers wait, give up and go on.
func TestAdaptiveUnderStress(t *testing.T) {
	b := adaptive.New(adaptive.Config{
		Bulkhead: bulkhead.Config{Queue: 20, MaxWait: time.Millisecond}, Initial: 4, Max: 16,
	})
	var running, most, ran atomic.Int64
	var wg sync.WaitGroup
	for i := range 30 {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(i), 7))
			for range 3000 {
				err := b.Do(context.Background(), func(context.Context) error {
					now := running.Add(1)
					defer running.Add(-1)
					for m := most.Load(); now > m && !most.CompareAndSwap(m, now); m = most.Load() {
					}
					ran.Add(1)
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
	require.LessOrEqual(t, most.Load(), int64(16))
	require.Equal(t, ran.Load(), b.Stats().Admitted)
	requireIdle(t, b)
}

// What moves the limit besides calls does not race with them.
func TestUpdatesAndFailuresDuringCalls(t *testing.T) {
	b := adaptive.New(adaptive.Config{Max: 64})
	var wg sync.WaitGroup
	for _, act := range []func(i int){
		func(int) { _ = b.Do(t.Context(), func(context.Context) error { return nil }) },
		func(int) {
			ctx, work := linger.Begin(t.Context())
			if b.Do(ctx, func(context.Context) error { work.Continue(); return nil }) == nil {
				work.End(context.DeadlineExceeded)
			}
		},
		func(i int) {
			if err := b.Update(func(c *adaptive.Config) { c.Max = 64 + i%2 }); err != nil {
				t.Error(err)
			}
		},
	} {
		wg.Go(func() {
			for i := range 300 {
				act(i)
			}
		})
	}
	wg.Wait()
	requireIdle(t, b)
}

// A slow reader says nothing about the server, though it holds its slot.
func TestAdaptiveMeasuresUntilFunctionReturns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const latency = 50 * time.Millisecond
		var changes []change
		b := adaptive.New(adaptive.Config{
			Initial: 10,
		})
		onLimit(t, b, func(c change) { changes = append(changes, c) })
		// call makes ten calls at once, again and again, that are read for a time.
		call := func(times int, read time.Duration) {
			for range times {
				var wg sync.WaitGroup
				for range 10 {
					wg.Go(func() {
						ctx, work := linger.Begin(t.Context())
						_ = b.Do(ctx, func(context.Context) error {
							time.Sleep(latency)
							work.Continue()
							return nil
						})
						time.Sleep(read)
						work.End(nil)
					})
				}
				wg.Wait()
			}
		}
		call(100, 0)
		require.NotEmpty(t, changes)
		before := b.Stats().Limit
		call(100, 20*latency)
		require.GreaterOrEqual(t, b.Stats().Limit, before)
		for _, c := range changes {
			require.InDelta(t, latency, c.Latency, float64(latency)/10)
		}
	})
}

func TestUpdateKeepsLearnedLatency(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var last change
		b := adaptive.New(adaptive.Config{
			Initial: 5, Max: 40,
		})
		onLimit(t, b, func(c change) { last = c })
		keepCalling(b, 60, 3*time.Second, taking(10*time.Millisecond, nil))
		require.Equal(t, 40, b.Stats().Limit)
		require.NoError(t, b.Update(func(c *adaptive.Config) { c.Max = 30 }))
		require.Equal(t, 30, b.Stats().Limit)
		require.NoError(t, b.Update(func(c *adaptive.Config) { c.Max = 60 }))
		require.Equal(t, 30, b.Stats().Limit)
		keepCalling(b, 80, time.Second, taking(10*time.Millisecond, nil))
		require.InDelta(t, 10*time.Millisecond, last.Base, float64(time.Millisecond))
		require.Greater(t, b.Stats().Limit, 30)
		require.LessOrEqual(t, b.Stats().Limit, 60)
	})
}

func TestUpdateEndsProbe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := adaptive.New(adaptive.Config{
			Initial: 20, Max: 20,
		})
		_, end := probing(t, b)
		require.Less(t, b.Stats().Limit, 20)
		require.NoError(t, b.Update(func(c *adaptive.Config) { c.Tolerance = 1 }))
		require.Equal(t, 20, b.Stats().Limit)
		require.False(t, b.Stats().Probing)
		end()
		requireIdle(t, b)
	})
}

func TestUpdateScalesAllowedRise(t *testing.T) {
	grown := func(tolerance float64) int {
		d := drive(adaptive.Config{Initial: 100})
		for range 20 {
			d.round(20, service, nil)
		}
		d.Update(d.now, adaptive.Config{Min: 100, Max: 100})
		d.Update(d.now, adaptive.Config{Initial: 100, Tolerance: tolerance})
		for range 10 {
			d.round(d.Limit(), 2*service, nil)
		}
		return d.Limit()
	}
	require.Less(t, grown(0.25), 100, "twice the latency is too long")
	require.Greater(t, grown(3), 100)
}
