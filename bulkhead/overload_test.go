package bulkhead_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/internal/linger"
)

func TestDeadlineIsTooClose(t *testing.T) {
	for _, test := range []struct {
		left, typical time.Duration
		want          bool
	}{
		{99 * ms, 100 * ms, true},
		{100 * ms, 100 * ms, false},
		{time.Hour, 100 * ms, false},
		{-1, 100 * ms, true},
		{1, 0, false}, // the typical time is not known
		{-1, 0, false},
	} {
		require.Equal(t, test.want, bulkhead.TooClose(test.left, test.typical), "%+v", test)
	}
}

func TestTypicalTimeIsTheMedian(t *testing.T) {
	for _, test := range []struct {
		name  string
		times []time.Duration
		want  time.Duration
	}{
		{"none", nil, 0},
		{"too few", repeat(7, 5), 0},
		{"enough", repeat(8, 5), 5},
		{"even number", []time.Duration{8, 1, 7, 2, 6, 3, 5, 4}, 5},
		{"a long call", append(repeat(16, 5), 1000), 5},
		{"equal halves", append(repeat(15, 5), repeat(16, 9)...), 9},
		{"only the last 31", append(repeat(100, 5), append(repeat(16, 9), repeat(15, 1)...)...), 9},
		{"the last 31 differ", append(repeat(100, 5), repeat(31, 2)...), 2},
	} {
		t.Run(test.name, func(t *testing.T) { require.Equal(t, test.want, bulkhead.Typical(test.times)) })
	}
}

// repeat returns n times d.
func repeat(n int, d time.Duration) (all []time.Duration) {
	for range n {
		all = append(all, d)
	}
	return all
}

// accustomed returns a bulkhead of one slot that knows how long calls take.
func accustomed(t *testing.T, cfg bulkhead.Config, takes time.Duration) *bulkhead.Bulkhead {
	cfg.Limit = 1
	b := bulkhead.New(cfg)
	for range 31 {
		require.NoError(t, b.Do(t.Context(), func(context.Context) error { time.Sleep(takes); return nil }))
	}
	return b
}

// within calls b with a deadline and returns the reason of the refusal, or "", and how long the call took.
func within(t *testing.T, b *bulkhead.Bulkhead, d time.Duration) (bulkhead.Reason, time.Duration) {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	defer cancel()
	start := time.Now()
	err := b.Do(ctx, nothing)
	took := time.Since(start)
	full, _ := errors.AsType[*bulkhead.FullError](err)
	if full == nil {
		require.NoError(t, err)
		return "", took
	}
	return full.Reason, took
}

func TestHopelessCallsAreRefusedImmediately(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := accustomed(t, bulkhead.Config{Name: "x", MaxWait: time.Minute}, 100*ms)
		release := hold(t, b)
		for left, want := range map[time.Duration]time.Duration{50 * ms: 0, 99 * ms: 0, 101 * ms: ms, 300 * ms: 200 * ms} {
			reason, took := within(t, b, left)
			require.Equal(t, bulkhead.DeadlineTooClose, reason)
			require.InDelta(t, want, took, 10, "with %v left", left)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 50*ms)
		defer cancel()
		err := b.Do(ctx, nothing)
		require.EqualError(t, err, "bulkhead: x: full (deadline_too_close): 1 of 1 in flight, 0 waiting")
		require.ErrorIs(t, err, bulkhead.ErrFull)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.NoError(t, ctx.Err(), "its deadline has not passed")
		release()
		reason, _ := within(t, b, ms)
		require.Empty(t, reason, "a call that finds a free slot is never refused")
		requireIdle(t, b)
	})
}

func TestNothingIsHopelessWithoutKnownTimes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := bulkhead.New(bulkhead.Config{Limit: 1, MaxWait: time.Minute})
		for range 7 {
			require.NoError(t, b.Do(t.Context(), func(context.Context) error { time.Sleep(100 * ms); return nil }))
		}
		release := hold(t, b)
		reason, took := within(t, b, 50*ms)
		require.Equal(t, bulkhead.ContextEnded, reason)
		require.Equal(t, 50*ms, took)
		release()
	})
}

// If calls become faster while a call waits, the call waits longer. If they become slower, its end does not change.
func TestWaitFollowsTheTypicalTime(t *testing.T) {
	for takes, left := range map[time.Duration]time.Duration{10 * ms: 10 * ms, 400 * ms: 100 * ms} {
		t.Run(takes.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := accustomed(t, bulkhead.Config{MaxWait: time.Minute, Levels: 2, Priority: levelOf}, 100*ms)
				ctx, cancel := context.WithTimeout(atLevel(t.Context(), 1), 20*time.Second)
				defer cancel()
				var important sync.WaitGroup
				for range 2 { // they hold the slot all the time
					important.Go(func() {
						for ctx.Err() == nil {
							_ = b.Do(t.Context(), func(context.Context) error { time.Sleep(takes); return nil })
						}
					})
				}
				synctest.Wait()
				err := b.Do(ctx, nothing)
				deadline, _ := ctx.Deadline()
				require.InDelta(t, left, time.Until(deadline), 10, "left when the call was refused")
				full, _ := errors.AsType[*bulkhead.FullError](err)
				require.NotNil(t, full)
				require.Equal(t, bulkhead.DeadlineTooClose, full.Reason)
				important.Wait()
			})
		})
	}
}

// What a caller cuts short does not say how long calls take.
func TestCutCallsAreNotTimed(t *testing.T) {
	for _, end := range []struct {
		name string
		err  func(context.Context) error
		cut  bool
	}{
		{"returns the error of ctx", context.Context.Err, true},
		{"returns another error", func(context.Context) error { return errors.New("aborted") }, true},
		{"returns nil", func(context.Context) error { return nil }, false},
	} {
		t.Run(end.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := accustomed(t, bulkhead.Config{MaxWait: time.Minute}, 100*ms)
				for range 31 * 256 {
					ctx, cancel := context.WithTimeout(t.Context(), 10*ms)
					_ = b.Do(ctx, func(ctx context.Context) error { <-ctx.Done(); return end.err(ctx) })
					cancel()
				}
				release := hold(t, b)
				reason, _ := within(t, b, 50*ms)
				want := bulkhead.DeadlineTooClose
				_, took := within(t, b, 50*ms)
				require.Equal(t, want, reason)
				require.Equal(t, end.cut, took == 0)
				release()
			})
		})
	}
}

// After a slow period, calls that find free slots correct the typical time soon, although calls that wait are refused.
func TestSlowPeriodIsForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := accustomed(t, bulkhead.Config{MaxWait: time.Minute}, time.Second)
		for range 1000 {
			require.NoError(t, b.Do(t.Context(), func(context.Context) error { time.Sleep(time.Second); return nil }))
		}
		release := hold(t, b)
		_, took := within(t, b, 500*ms)
		require.Zero(t, took)
		release()
		for range 17 {
			require.NoError(t, b.Do(t.Context(), func(context.Context) error { time.Sleep(100 * ms); return nil }))
		}
		release = hold(t, b)
		_, took = within(t, b, 500*ms)
		require.InDelta(t, 400*ms, took, 10)
		release()
	})
}

func TestZeroCostIsNotTimed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := accustomed(t, bulkhead.Config{MaxWait: time.Minute, Cost: costOf}, 100*ms)
		for range 31 * 256 {
			require.NoError(t, b.Do(costing(t.Context(), 0), nothing))
		}
		release := hold(t, b)
		reason, _ := within(t, b, 50*ms)
		require.Equal(t, bulkhead.DeadlineTooClose, reason)
		release()
	})
}

// An unnoticed ctx is past its deadline but not canceled yet, as a connection with the same deadline often sees it.
type unnoticed struct{ context.Context }

func (u unnoticed) Deadline() (time.Time, bool) { return time.Now(), true }

func TestEndingOfCalls(t *testing.T) {
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	failed := errors.New("failed")
	for _, test := range []struct {
		name      string
		ctx       context.Context
		err       error
		cut, gone bool
	}{
		{"succeeded", t.Context(), nil, false, false},
		{"failed", t.Context(), failed, false, false},
		{"canceled", canceled, failed, true, true},
		{"succeeded although canceled", canceled, nil, false, true},
		{"answered although canceled", canceled, answered{}, false, true},
		{"deadline not noticed yet", unnoticed{t.Context()}, failed, true, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			cut, gone := bulkhead.Ending(test.ctx, test.err)
			require.Equal(t, test.cut, cut, "cut")
			require.Equal(t, test.gone, gone, "gone")
		})
	}
}

// A broken error panics when it is read.
type broken struct{ error }

func (broken) Answered() bool { panic("broken") }

func TestBrokenErrorReleasesSlots(t *testing.T) {
	for _, lingers := range []bool{false, true} {
		b := bulkhead.New(bulkhead.Config{Limit: 1})
		ctx := t.Context()
		if lingers {
			ctx, _ = linger.Begin(ctx)
		}
		require.Panics(t, func() { _ = b.Do(ctx, func(context.Context) error { return broken{} }) })
		done, err := b.Begin(ctx)
		require.NoError(t, err)
		require.Panics(t, func() { done(broken{}) })
		requireIdle(t, b)
	}
}

type answered struct{}

func (answered) Error() string  { return "no such user" }
func (answered) Answered() bool { return true }

// abandon makes n calls wait, and cancels them.
func abandon(ctx context.Context, c *callers, n int) {
	ctx, cancel := context.WithCancel(ctx)
	for i := range n {
		c.start(ctx, fmt.Sprint("abandoned ", i))
	}
	cancel()
	synctest.Wait()
}

func TestImpatientCallersAreServedNewestFirst(t *testing.T) {
	for cancellations, want := range map[int][]string{
		0: {"held", "1", "2", "3"},
		5: {"held", "1", "2", "3"},
		6: {"held", "3", "1", "2"}, // one served call later, the pressure is too low again
		7: {"held", "3", "2", "1"},
	} {
		t.Run(fmt.Sprint(cancellations), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := newCallers(t, bulkhead.New(bulkhead.Config{Limit: 1, MaxWait: time.Second}))
				c.start(t.Context(), "held")
				c.start(t.Context(), "1")
				abandon(t.Context(), c, cancellations)
				c.start(t.Context(), "2")
				c.start(t.Context(), "3")
				c.finishAll()
				require.Equal(t, want, c.ran)
			})
		})
	}
}

// Cancellations count only while other calls wait at the level.
func TestEmptyQueueForgetsCancellations(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCallers(t, bulkhead.New(bulkhead.Config{Limit: 1, MaxWait: time.Second}))
		c.start(t.Context(), "held")
		abandon(t.Context(), c, 8)
		c.start(t.Context(), "1")
		c.start(t.Context(), "2")
		c.finishAll()
		require.Equal(t, []string{"held", "1", "2"}, c.ran)
	})
}

// Callers that cancel a call in its slot count if the call had to wait.
func TestCallersGiveUpInTheirSlot(t *testing.T) {
	for name, test := range map[string]struct {
		lingers, begin, free bool
		err                  error
		newest               bool
	}{
		"cut call":              {err: context.Canceled, newest: true},
		"call that continued":   {newest: true},
		"call without a wait":   {free: true, err: context.Canceled},
		"begun call":            {begin: true, newest: true},
		"response read":         {lingers: true},
		"response cut":          {lingers: true, err: context.Canceled, newest: true},
		"response truncated":    {lingers: true, err: errors.New("reset")},
		"begun response read":   {lingers: true, begin: true},
		"begun response cut":    {lingers: true, begin: true, err: context.Canceled, newest: true},
		"response past its end": {lingers: true, err: answered{}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := bulkhead.New(bulkhead.Config{Limit: 1, MaxWait: time.Second})
				release := hold(t, b)
				if test.free {
					release()
				}
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				work := &linger.Work{}
				if test.lingers {
					ctx, work = linger.Begin(ctx)
				}
				end := make(chan struct{})
				go func() {
					if test.begin {
						done, err := b.Begin(ctx)
						<-end
						require.NoError(t, err)
						done(test.err)
						return
					}
					_ = b.Do(ctx, func(context.Context) error {
						if work.Continue(); test.lingers {
							return nil
						}
						<-end
						return test.err
					})
				}()
				synctest.Wait()
				release()
				synctest.Wait()
				c := newCallers(t, b)
				c.start(t.Context(), "old")
				c.start(t.Context(), "new")
				abandon(t.Context(), c, 5)
				cancel()
				close(end)
				work.End(test.err)
				synctest.Wait()
				want := "old"
				if test.newest {
					want = "new"
				}
				require.Equal(t, []string{want}, c.ran)
				c.finishAll()
			})
		})
	}
}

// Levels and shares come before the order of their calls. A level whose callers are patient is served oldest first.
func TestLevelsAndSharesComeBeforeOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCallers(t, bulkhead.New(bulkhead.Config{
			Limit: 1, MaxWait: time.Second, Levels: 2, Priority: levelOf, Share: shareOf,
		}))
		low := func(share string) context.Context { return atLevel(ofShare(t.Context(), share), 1) }
		c.start(t.Context(), "held")
		for _, name := range []string{"a1", "b1", "a2", "b2"} {
			c.start(low(name[:1]), name)
		}
		abandon(low("a"), c, 8)
		c.start(t.Context(), "high 1")
		c.start(t.Context(), "high 2")
		c.finishAll()
		require.Equal(t, []string{"held", "high 1", "high 2"}, c.ran[:3])
		require.ElementsMatch(t, []string{"a2", "b2"}, c.ran[3:5], "each share's newest")
		require.ElementsMatch(t, []string{"a1", "b1"}, c.ran[5:])
	})
}

// Each of many tenants has one call. They are served newest first where callers give up.
func TestGoodputOfManyShares(t *testing.T) {
	if raceDetector {
		t.Skip("a simulation")
	}
	o := overload{2, 4, "constant", 50 * ms, 300 * ms, false}
	calls, span := o.calls(2000)
	tenants := 0
	tenant := func(context.Context) string { tenants++; return fmt.Sprint(tenants) }
	ran := o.runWith(t, calls, bulkhead.Config{Share: tenant})
	require.Greater(t, float64(count(ran, served))/(o.capacity()*span.Seconds()), 0.8)
}

// The share that holds the fewest slots comes before the newest call of another share.
func TestFairnessComesBeforeOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCallers(t, bulkhead.New(bulkhead.Config{Limit: 2, MaxWait: time.Second, Share: shareOf}))
		c.start(ofShare(t.Context(), "a"), "a held")
		c.start(ofShare(t.Context(), "c"), "c held")
		c.start(ofShare(t.Context(), "b"), "b")
		abandon(ofShare(t.Context(), "b"), c, 8)
		c.start(ofShare(t.Context(), "a"), "a")
		c.finish("c held")
		require.Equal(t, []string{"a held", "c held", "b"}, c.ran)
		c.finishAll()
	})
}

// Work that fails after its call's deadline was cut off by the deadline, so its time does not count.
func TestWorkCutOffIsNotTimed(t *testing.T) {
	for name, test := range map[string]struct {
		err    error
		after  time.Duration
		waited bool // whether a call with less time than usual may wait
	}{
		"failed at the deadline":     {errors.New("aborted"), 10 * ms, false},
		"failed before the deadline": {errors.New("aborted"), 9 * ms, true},
		"canceled":                   {context.Canceled, 9 * ms, false},
		"succeeded":                  {nil, 10 * ms, true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := accustomed(t, bulkhead.Config{MaxWait: time.Minute}, 100*ms)
				for range 31 * 256 {
					ctx, cancel := context.WithTimeout(t.Context(), 10*ms)
					ctx, work := linger.Begin(ctx)
					require.NoError(t, b.Do(ctx, func(context.Context) error { work.Continue(); return nil }))
					time.Sleep(test.after)
					work.End(test.err)
					cancel()
				}
				release := hold(t, b)
				_, took := within(t, b, 50*ms)
				require.Equal(t, test.waited, took > 0)
				release()
			})
		})
	}
}
