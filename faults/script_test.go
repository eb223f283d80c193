package faults_test

import (
	"context"
	"errors"
	"math"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/faults"
)

func script(plans ...faults.Plan) *faults.Script {
	return faults.New(faults.Config{Name: "backend", Enabled: true, Plans: plans})
}

var errFull = errors.New("disk full")

func ok(context.Context) error { return nil }

func TestScriptIsOffUntilEnabled(t *testing.T) {
	s := faults.New(faults.Config{Plans: []faults.Plan{{Kind: faults.Fail}}})
	fn := faults.Func(s, ok)
	require.NoError(t, fn(t.Context()))
	require.NoError(t, s.Update(func(c *faults.Config) { c.Enabled = true }))
	require.ErrorIs(t, fn(t.Context()), faults.ErrInjected)
	require.NoError(t, s.Update(func(c *faults.Config) { c.Enabled = false }))
	require.NoError(t, fn(t.Context()))
	require.Equal(t, faults.Stats{Calls: 3, Injected: map[faults.Kind]int64{faults.Fail: 1}}, s.Stats())
}

func TestDescribeHasAMetricForEachKind(t *testing.T) {
	s := script(faults.Plan{Kind: faults.SlowBody})
	d := s.Describe()
	require.Equal(t, []string{"faults", "backend"}, []string{d.Kind, d.Name})
	before := d.Metrics()
	require.NoError(t, faults.Func(s, ok)(t.Context()))
	after := d.Metrics()
	require.Len(t, after, 8)
	require.Len(t, before, len(after))
	for i := range after {
		require.Equal(t, before[i].Name, after[i].Name)
		require.True(t, after[i].Counter)
		slow := after[i].Name == "faults.injected{kind=slow_body}"
		require.Equal(t, slow || after[i].Name == "faults.calls", after[i].Value == 1, after[i].Name)
	}
}

func TestDescribeUpdatesTheConfigAsGiven(t *testing.T) {
	s := script(faults.Plan{Kind: faults.Fail})
	d := s.Describe()
	enable := func(cfg any) error { cfg.(*faults.Config).Enabled = false; return nil }
	require.NoError(t, d.Update(true, enable))
	require.True(t, s.Config().Enabled, "a dry run")
	require.NoError(t, d.Update(false, enable))
	require.Equal(t, s.Config(), d.Config())
	require.False(t, s.Config().Enabled)
	require.Error(t, d.Update(true, func(cfg any) error { cfg.(*faults.Config).Name = "other"; return nil }))
}

func TestFuncFollowsThePlan(t *testing.T) {
	for _, c := range []struct {
		plan faults.Plan
		made bool
		took time.Duration
		err  error
	}{
		{faults.Plan{Kind: faults.Latency, Delay: time.Second}, true, time.Second, nil},
		{faults.Plan{Kind: faults.Fail}, false, 0, faults.ErrInjected},
		{faults.Plan{Kind: faults.Fail, Err: errFull}, false, 0, errFull},
		{faults.Plan{Kind: faults.Refuse}, false, 0, syscall.ECONNREFUSED},
		{faults.Plan{Kind: faults.Reset}, true, 0, syscall.ECONNRESET},
		{faults.Plan{Kind: faults.Hang}, false, time.Minute, context.DeadlineExceeded},
		{faults.Plan{Kind: faults.SlowBody, Delay: 2 * time.Second}, true, 2 * time.Second, nil},
		{faults.Plan{Kind: faults.Latency, Delay: time.Hour}, false, time.Minute, context.DeadlineExceeded},
	} {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			made, start := false, time.Now()
			err := faults.Func(script(c.plan), func(context.Context) error { made = true; return nil })(ctx)
			require.ErrorIs(t, err, c.err)
			require.Equal(t, c.made, made, "%+v", c.plan)
			require.Equal(t, c.took, time.Since(start), "%+v", c.plan)
		})
	}
}

func TestFuncStatusHasRetryAfter(t *testing.T) {
	err := faults.Func(script(faults.Plan{Kind: faults.Status, Status: 429, RetryAfter: time.Second}), ok)(t.Context())
	var later interface{ RetryAfter() time.Duration }
	require.ErrorAs(t, err, &later)
	require.Equal(t, time.Second, later.RetryAfter())
	require.EqualError(t, err, "faults: injected status 429")
}

func TestPlanHasATimeAndACount(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fn := faults.Func(script(
			faults.Plan{Kind: faults.Fail, At: 2 * time.Second, For: time.Second},
			faults.Plan{Kind: faults.Fail, Err: errFull, At: 5 * time.Second, Count: 2},
		), ok)
		var got []error
		for range 8 {
			got = append(got, fn(t.Context()))
			time.Sleep(time.Second)
		}
		require.Equal(t, []error{nil, nil, faults.ErrInjected, nil, nil, errFull, errFull, nil}, got)
	})
}

func TestLatenciesAddUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fn := faults.Func(script(
			faults.Plan{Kind: faults.Latency, Delay: 10 * time.Millisecond},
			faults.Plan{Kind: faults.Latency, Delay: time.Second, Count: 1},
			faults.Plan{Kind: faults.Fail, At: time.Hour},
		), ok)
		for _, want := range []time.Duration{1010, 10, 10} {
			start := time.Now()
			require.NoError(t, fn(t.Context()))
			require.Equal(t, want*time.Millisecond, time.Since(start))
		}
	})
}

func TestSpreadStaysWithinItsBounds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fn := faults.Func(script(faults.Plan{Kind: faults.Latency, Delay: 100, Spread: 50}), ok)
		seen := map[time.Duration]bool{}
		for range 2000 {
			start := time.Now()
			require.NoError(t, fn(t.Context()))
			seen[time.Since(start)] = true
		}
		require.Len(t, seen, 51)
		require.Contains(t, seen, time.Duration(100))
		require.Contains(t, seen, time.Duration(150))
	})
}

func TestSameSeedSameFaults(t *testing.T) {
	run := func(seed uint64) (pattern string) {
		s := faults.New(faults.Config{Enabled: true, Seed: seed, Plans: []faults.Plan{{Kind: faults.Fail, Share: 0.3}}})
		fn := faults.Func(s, ok)
		for range 1000 {
			if fn(t.Context()) != nil {
				pattern += "x"
			} else {
				pattern += "."
			}
		}
		return pattern
	}
	require.Equal(t, run(7), run(7))
	require.NotEqual(t, run(7), run(8))
	require.InDelta(t, 300, strings.Count(run(7), "x"), 60)
}

func TestCountIsExactUnderConcurrency(t *testing.T) {
	s := script(faults.Plan{Kind: faults.Fail, Count: 500})
	fn := faults.Func(s, ok)
	var failed atomic.Int64
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 1000 {
				if fn(t.Context()) != nil {
					failed.Add(1)
				}
			}
		})
	}
	wg.Wait()
	require.EqualValues(t, 500, failed.Load())
	require.EqualValues(t, 8000, s.Stats().Calls)
}

func TestUpdateRestartsTheScript(t *testing.T) {
	s := script(faults.Plan{Kind: faults.Fail, Count: 1})
	fn := faults.Func(s, ok)
	require.Error(t, fn(t.Context()))
	require.NoError(t, fn(t.Context()))
	require.NoError(t, s.Update(func(c *faults.Config) { c.Plans[0].Count = 2 }))
	require.Error(t, fn(t.Context()))
	require.Error(t, fn(t.Context()))
	require.NoError(t, fn(t.Context()))

	require.EqualError(t, s.Update(func(c *faults.Config) { c.Plans[0].Share = 2 }),
		"faults.Config.Plans[0].Share is 2: must be 0 (for 1) or in (0, 1]")
	require.ErrorContains(t, s.Update(func(c *faults.Config) { c.Plans[0].Kind = "typo" }), `"typo"`)
	require.EqualError(t, s.Update(func(c *faults.Config) { c.Name = "other" }),
		`faults.Config.Name is "other": must be "backend" as before: it cannot change`)
	s.Config().Plans[0].Count = 3
	require.Equal(t, 2, s.Config().Plans[0].Count)
	require.Zero(t, s.Config().Plans[0].Share, "of an Update that failed")
	require.Panics(t, func() { faults.New(faults.Config{Plans: []faults.Plan{{}}}) })
}

func TestDisabledScriptChangesNothing(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	s := faults.New(faults.Config{Plans: []faults.Plan{{Kind: faults.Fail}}})
	made := false
	require.NoError(t, faults.Func(s, func(context.Context) error { made = true; return nil })(ctx))
	require.True(t, made, "the function decides what an ended ctx means")
}

func TestDurationsNearTheLargestDoNotOverflow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fn := faults.Func(script(faults.Plan{Kind: faults.Fail, At: time.Second, For: math.MaxInt64}), ok)
		time.Sleep(time.Second)
		require.Error(t, fn(t.Context()), "lasts forever")

		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		fn = faults.Func(script(
			faults.Plan{Kind: faults.Latency, Delay: time.Hour, Spread: math.MaxInt64},
			faults.Plan{Kind: faults.Latency, Delay: math.MaxInt64},
		), ok)
		for range 3 {
			require.ErrorIs(t, fn(ctx), context.DeadlineExceeded)
		}
	})
}

func TestLatencyEqualToTheDeadlineFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fn := faults.Func(script(faults.Plan{Kind: faults.Latency, Delay: time.Second}), ok)
		left := errors.New("the caller has left")
		for range 200 {
			ctx, cancel := context.WithTimeoutCause(t.Context(), time.Second, left)
			err := fn(ctx)
			require.ErrorIs(t, err, context.DeadlineExceeded)
			require.ErrorIs(t, err, left)
			cancel()
		}
	})
}

// A ctx may say that its deadline has passed, and live on.
type overdue struct{ context.Context }

func (overdue) Deadline() (time.Time, bool) { return time.Now().Add(-time.Second), true }

func TestCtxCanceledAfterItsDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fn := faults.Func(script(faults.Plan{Kind: faults.Latency, Delay: time.Second}), ok)
		require.NoError(t, fn(overdue{t.Context()}))
	})
}

func TestFirstPlanEndsTheCallAfterLatencies(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := script(
			faults.Plan{Kind: faults.Fail, Err: errFull, Count: 1},
			faults.Plan{Kind: faults.Refuse},
			faults.Plan{Kind: faults.Latency, Delay: time.Second},
		)
		fn, start := faults.Func(s, ok), time.Now()
		require.ErrorIs(t, fn(t.Context()), errFull)
		require.Equal(t, time.Second, time.Since(start))
		require.ErrorIs(t, fn(t.Context()), syscall.ECONNREFUSED)
		require.Equal(t, map[faults.Kind]int64{faults.Fail: 1, faults.Refuse: 1, faults.Latency: 2}, s.Stats().Injected)
	})
}

func TestDecisionsOfAPlanDoNotDependOnOtherPlans(t *testing.T) {
	run := func(plans ...faults.Plan) (pattern string) {
		fn := faults.Func(script(plans...), ok)
		for range 200 {
			if fn(t.Context()) != nil {
				pattern += "x"
			} else {
				pattern += "."
			}
		}
		return pattern
	}
	fail := faults.Plan{Kind: faults.Fail, Share: 0.3}
	require.Equal(t, run(fail), run(fail, faults.Plan{Kind: faults.Latency, Delay: 1, Share: 0.5}))
}

func TestUpdateReplacesErrBySameText(t *testing.T) {
	s := script(faults.Plan{Kind: faults.Fail, Err: errFull})
	other := errors.New(errFull.Error())
	require.NoError(t, s.Update(func(c *faults.Config) { c.Plans[0].Err = other }))
	require.Same(t, other, faults.Func(s, ok)(t.Context()))
}

func TestUpdateUnderLoadLosesNoCall(t *testing.T) {
	type round struct{ error }
	s := script()
	var (
		updated  atomic.Int64 // the last round whose Update has returned
		failed   atomic.Int64
		passed   atomic.Int64
		outdated atomic.Int64
		stopped  atomic.Bool
		wg       sync.WaitGroup
	)
	rounds := map[error]int64{}
	errs := make([]error, 300)
	for i := range errs {
		errs[i] = round{errors.New("round")}
		rounds[errs[i]] = int64(i)
	}
	fn := faults.Func(s, ok)
	for range 8 {
		wg.Go(func() {
			for !stopped.Load() {
				least := updated.Load()
				err := fn(t.Context())
				if err == nil {
					passed.Add(1)
					continue
				}
				failed.Add(1)
				if rounds[err] < least {
					outdated.Add(1)
				}
			}
		})
	}
	for i, err := range errs {
		require.NoError(t, s.Update(func(c *faults.Config) {
			c.Plans = []faults.Plan{{Kind: faults.Fail, Err: err, Share: 0.5}, {Kind: faults.Latency, Delay: 1}}
		}))
		updated.Store(int64(i))
		_, _ = s.Stats(), s.Config()
	}
	stopped.Store(true)
	wg.Wait()
	require.Zero(t, outdated.Load(), "calls that met a plan of an earlier Config")
	require.Equal(t, failed.Load(), s.Stats().Injected[faults.Fail])
	require.Equal(t, failed.Load()+passed.Load(), s.Stats().Calls)
}

func BenchmarkFuncDisabled(b *testing.B) {
	fn := faults.Func(faults.New(faults.Config{}), ok)
	for b.Loop() {
		_ = fn(b.Context())
	}
}
