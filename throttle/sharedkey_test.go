package throttle_test

import (
	"context"
	"errors"
	"math"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/throttle"
)

// A key has the limit of Set, or else of LimitFor, or else of the configuration.
func TestSharedLimitsByKey(t *testing.T) {
	f := &fakeRedis{answer: func(_ context.Context, args []any) (any, error) {
		answer := []any{int64(1), int64(0), int64(0)}
		for range args[5].(int) {
			answer = append(answer, int64(1), int64(1_000_000), int64(60_000_000))
		}
		return answer, nil
	}}
	hour := throttle.Quota{N: 5, Every: time.Hour}
	s := throttle.NewShared(throttle.SharedConfig{
		Timeout: time.Minute,
		Name:    "api", Eval: f.eval, Rate: 1, Burst: 10, Instances: 2,
		LimitFor: func(key string) throttle.Limit {
			require.NotEmpty(t, key)
			switch key {
			case "plan":
				return throttle.Limit{Rate: 1, Burst: 20, Quotas: []throttle.Quota{hour}}
			case "bad":
				return throttle.Limit{Rate: -1}
			}
			return throttle.Limit{}
		},
	})
	most := func(key string) any {
		t.Helper()
		require.True(t, s.Allow(t.Context(), key))
		return f.made()[len(f.made())-1].args[0]
	}
	require.NoError(t, s.Set("nobody", throttle.Limit{}), "it has none")
	require.EqualValues(t, 10_000_000, most(""))
	require.EqualValues(t, 10_000_000, most("any"))
	require.EqualValues(t, 20_000_000, most("plan"))
	require.Equal(t, hour, s.Take(t.Context(), "plan", 1).Quota)
	require.Equal(t, throttle.TooCostly, reasonOfTake(s.Take(t.Context(), "plan", 6)), "more than the quota")
	require.NoError(t, s.Set("plan", throttle.Limit{Rate: 1, Burst: 30}))
	require.NoError(t, s.Set("own", throttle.Limit{Rate: 1}))
	require.EqualValues(t, 30_000_000, most("plan"))
	require.EqualValues(t, 1_000_000, most("own"))
	require.NoError(t, s.Set("plan", throttle.Limit{}))
	require.NoError(t, s.Set("plan", throttle.Limit{}))
	require.EqualValues(t, 20_000_000, most("plan"))
	require.EqualValues(t, 1_000_000, most("own"))
	require.PanicsWithError(t, "throttle.Limit.Rate is -1: must be above 0 and at most 1e9 tokens a second", func() { s.Allow(t.Context(), "bad") })
	require.EqualError(t, s.Set("x", throttle.Limit{Rate: 1e10}), "throttle.Limit.Rate is 1e+10: must be above 0 and at most 1e9 tokens a second")
	require.Error(t, s.Set("", throttle.Limit{Rate: 1}))
	require.Error(t, s.Set("x", throttle.Limit{Burst: 3}), "no Rate")
	require.EqualError(t, s.Set("x", throttle.Limit{Rate: -1, Quotas: []throttle.Quota{hour}}),
		"throttle.Limit.Rate is -1: must be above 0 and at most 1e9 tokens a second")
	require.NoError(t, setSharedLimit(s, throttle.Limit{Rate: 1, Burst: 40, Quotas: []throttle.Quota{hour}}))
	require.Equal(t, []throttle.Quota{hour}, s.Config().Quotas)
	require.EqualValues(t, 40_000_000, most("any"))
	require.NoError(t, s.By(nil)(ok)(t.Context()))
	require.Equal(t, []string{"throttle:api"}, f.made()[len(f.made())-1].keys)
}

func reasonOfTake(d throttle.Decision) throttle.Reason {
	if !d.OK && d.RetryAfter == 1<<63-1 {
		return throttle.TooCostly
	}
	return ""
}

// In an outage each key has its part of its own limit, quotas included.
func TestSharedQuotasAloneInAnOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeRedis{answer: down}
		s := throttle.NewShared(throttle.SharedConfig{
			Name: "api", Eval: f.eval, Rate: 100, Instances: 4, RetryEvery: time.Hour, Quotas: []throttle.Quota{{N: 40, Per: throttle.Day}},
			LimitFor: func(key string) throttle.Limit {
				if key == "small" {
					return throttle.Limit{Quotas: []throttle.Quota{{N: 8, Every: time.Hour}}}
				}
				return throttle.Limit{}
			},
		})
		count := func(key string) (n int) {
			for s.Allow(t.Context(), key) {
				n++
			}
			return n
		}
		require.Equal(t, 10, count("a"))
		require.Equal(t, 2, count("small"))
		err := s.Wait(t.Context(), "small")
		require.Equal(t, throttle.OverQuota, reason(err))
		require.ErrorContains(t, err, "the quota of 8 per 1h0m0s")
		require.Equal(t, 8, s.Peek(t.Context(), "small").Limit)
		require.False(t, s.Peek(t.Context(), "small").OK)
		require.True(t, s.Peek(t.Context(), "b").OK)
		require.ErrorIs(t, s.Refund(t.Context(), "a", 1), throttle.ErrOutage)
		require.ErrorIs(t, s.Reset(t.Context(), "a"), errDown)
		for policy, ok := range map[throttle.OutagePolicy]bool{throttle.AdmitAll: true, throttle.RefuseAll: false} {
			require.NoError(t, s.Update(func(c *throttle.SharedConfig) { c.OnOutage = policy }))
			require.Equal(t, ok, s.Peek(t.Context(), "a").OK)
		}
		require.NoError(t, s.Update(func(c *throttle.SharedConfig) { c.OnOutage = throttle.LimitLocally }))
		own := 0
		for i := range 300 { // more limits than a program has
			key := string(rune('A' + i))
			require.NoError(t, s.Set(key, throttle.Limit{Rate: float64(1 + i), Burst: 4}))
			require.True(t, s.Allow(t.Context(), key))
			if !s.Allow(t.Context(), key) {
				own++
			}
		}
		require.Equal(t, 100, own, "the others have a part of the limit of the configuration")
	})
}

// If the clock of this instance is off, the script answers with the time, and gets the
// periods of that time: once, as the instance remembers.
func TestSharedCalendarGoesByTheClockOfRedis(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ahead := 500 * 24 * time.Hour
		var trips atomic.Int64
		f := &fakeRedis{answer: func(_ context.Context, args []any) (any, error) {
			trips.Add(1)
			begin, end, ok := periodOf(time.Now().Add(ahead).UnixMicro(), args[8].(string))
			if !ok {
				return []any{int64(-1), time.Now().Add(ahead).UnixMicro()}, nil
			}
			return []any{int64(1), int64(0), int64(0), int64(1), end - time.Now().Add(ahead).UnixMicro(), end - begin}, nil
		}}
		s := throttle.NewShared(throttle.SharedConfig{Name: "api", Eval: f.eval, Instances: 1, Quotas: []throttle.Quota{{N: 5, Per: throttle.Month}}})
		time.Sleep(36 * time.Hour)
		d := s.Take(t.Context(), "", 1)
		require.True(t, d.OK)
		require.Equal(t, 31*24*time.Hour, d.Window, "May 2001")
		require.EqualValues(t, 2, trips.Load())
		require.True(t, s.Allow(t.Context(), ""))
		require.EqualValues(t, 3, trips.Load())
		ahead = -500 * 24 * time.Hour
		require.True(t, s.Allow(t.Context(), ""))
		require.EqualValues(t, 5, trips.Load())
		require.Zero(t, s.Stats().Failed)
		f.answer = func(context.Context, []any) (any, error) { return []any{int64(-1), int64(1)}, nil }
		require.NoError(t, s.Update(func(c *throttle.SharedConfig) { c.OnOutage = throttle.RefuseAll }))
		require.ErrorContains(t, s.Wait(t.Context(), ""), "the clock of Redis jumps")
	})
}

func periodOf(now int64, times string) (begin, end int64, ok bool) {
	for text := range strings.FieldsSeq(times) {
		at, _ := strconv.ParseInt(text, 10, 64)
		if at > now {
			return begin, at, begin != 0
		}
		begin = at
	}
	return 0, 0, false
}

// What a Decision is about, by the answers of the script: of what was taken the window with
// the fewest tokens left, of a refusal the quota that is over last, or the rate.
func TestSharedTellsWhatBinds(t *testing.T) {
	hourly, daily := throttle.Quota{N: 5, Every: time.Hour}, throttle.Quota{N: 10, Every: 24 * time.Hour}
	const s, m, h = int64(1_000_000), int64(60_000_000), int64(3_600_000_000)
	// rate and quota return a Decision about one of them.
	rate := func(d throttle.Decision) throttle.Decision {
		d.Limit, d.Window = 8, 8*time.Second
		return d
	}
	quota := func(q throttle.Quota, d throttle.Decision) throttle.Decision {
		d.Quota, d.Limit, d.Window = q, q.N, q.Every
		return d
	}
	for name, c := range map[string]struct {
		n      int
		answer []any // taken, wait, debt, and of each quota what is used, left and its length
		want   throttle.Decision
		why    throttle.Reason
	}{
		"the rate has the fewest left": {1, []any{1, 0, 7 * s, 3, 50 * m, h, 3, 9 * h, 24 * h},
			rate(throttle.Decision{OK: true, Remaining: 1, ResetAfter: 7 * time.Second}), ""},
		"a quota has as many left": {1, []any{1, 0, 6 * s, 3, 50 * m, h, 8, 9 * h, 24 * h},
			rate(throttle.Decision{OK: true, Remaining: 2, ResetAfter: 6 * time.Second}), ""},
		"a quota has the fewest left": {1, []any{1, 0, s, 3, 50 * m, h, 7, 9 * h, 24 * h},
			quota(hourly, throttle.Decision{OK: true, Remaining: 2, ResetAfter: 50 * time.Minute}), ""},
		"the other quota has": {1, []any{1, 0, s, 1, 50 * m, h, 10, 9 * h, 24 * h},
			quota(daily, throttle.Decision{OK: true, Remaining: 0, ResetAfter: 9 * time.Hour}), ""},
		"more is used than there is now": {1, []any{1, 0, s, 1, 50 * m, h, 90, 9 * h, 24 * h},
			quota(daily, throttle.Decision{OK: true, Remaining: 0, ResetAfter: 9 * time.Hour}), ""},
		"of an unused window nothing resets": {1, []any{1, 0, 0, 0, h, h, 0, 24 * h, 24 * h},
			quota(hourly, throttle.Decision{OK: true, Remaining: 5}), ""},
		"refused by the rate": {4, []any{0, 2 * s, 6 * s, 1, 50 * m, h, 0, 9 * h, 24 * h},
			rate(throttle.Decision{Remaining: 2, ResetAfter: 6 * time.Second, RetryAfter: 2 * time.Second}), throttle.OverLimit},
		"refused by a quota": {4, []any{0, 0, s, 2, 50 * m, h, 0, 9 * h, 24 * h},
			quota(hourly, throttle.Decision{Remaining: 3, ResetAfter: 50 * time.Minute, RetryAfter: 50 * time.Minute}), throttle.OverQuota},
		"refused by both quotas": {4, []any{0, 0, s, 2, 50 * m, h, 7, 9 * h, 24 * h},
			quota(daily, throttle.Decision{Remaining: 3, ResetAfter: 9 * time.Hour, RetryAfter: 9 * time.Hour}), throttle.OverQuota},
		"refused by both quotas, the first over last": {4, []any{0, 0, s, 2, 50 * m, h, 7, 9 * m, 24 * h},
			quota(hourly, throttle.Decision{Remaining: 3, ResetAfter: 50 * time.Minute, RetryAfter: 50 * time.Minute}), throttle.OverQuota},
		"the rate takes longer than the quota": {4, []any{0, 7 * s, 11 * s, 2, 5 * s, h, 0, 9 * h, 24 * h},
			quota(hourly, throttle.Decision{Remaining: 3, ResetAfter: 5 * time.Second, RetryAfter: 7 * time.Second}), throttle.OverQuota},
	} {
		t.Run(name, func(t *testing.T) {
			taken := c.answer[0].(int) * c.n
			f := &fakeRedis{answer: answers(append([]any{taken}, c.answer[1:]...)...)}
			limit := throttle.NewShared(throttle.SharedConfig{
				Timeout: time.Minute, Name: "api", Eval: f.eval, Rate: 1, Burst: 8, Quotas: []throttle.Quota{hourly, daily}, Instances: 1,
				Cost: func(context.Context) int { return c.n },
			})
			d, err := limit.Admit(t.Context(), "")
			require.Equal(t, c.want, d)
			require.Equal(t, c.why, reason(err))
			if c.why == throttle.OverLimit {
				limited, _ := errors.AsType[*throttle.LimitedError](err)
				require.Zero(t, limited.Quota)
			}
		})
	}
}

// A call may be too costly for one of several quotas.
func TestSharedTellsForWhichQuotaACallIsTooCostly(t *testing.T) {
	small, large := throttle.Quota{N: 5, Every: time.Hour}, throttle.Quota{N: 6, Every: 24 * time.Hour}
	for _, quotas := range [][]throttle.Quota{{small, large}, {large, small}} {
		cfg := throttle.Config{Rate: 1, Burst: 100, Quotas: quotas, Cost: func(context.Context) int { return 6 }}
		f := &fakeRedis{}
		s := throttle.NewShared(throttle.SharedConfig{Name: "api", Eval: f.eval, Rate: 1, Burst: 100, Quotas: quotas, Instances: 1, Cost: cfg.Cost})
		for _, err := range []error{s.Wait(t.Context(), ""), throttle.New(cfg).Wait(t.Context())} {
			limited, _ := errors.AsType[*throttle.LimitedError](err)
			require.Equal(t, throttle.TooCostly, limited.Reason)
			require.Equal(t, small, limited.Quota)
			require.Equal(t, small.N, limited.Limit)
		}
	}
}

// In an outage a Decision is about the whole of the window that binds here. If all calls are
// refused, it says when the next one tries.
func TestSharedTellsInAnOutageWhatBinds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hourly, daily := throttle.Quota{N: 8, Every: time.Hour}, throttle.Quota{N: 40, Every: 24 * time.Hour}
		f := &fakeRedis{answer: down}
		s := throttle.NewShared(throttle.SharedConfig{Name: "api", Eval: f.eval, Rate: 1, Burst: 4, Quotas: []throttle.Quota{hourly, daily},
			Instances: 2, RetryEvery: time.Minute})
		d := s.Take(t.Context(), "a", 2)
		require.Equal(t, throttle.Decision{OK: true, Limit: 4, Window: 4 * time.Second, ResetAfter: 4 * time.Second}, d)
		time.Sleep(4 * time.Second)
		d = s.Take(t.Context(), "a", 2)
		require.Equal(t, throttle.Quota{}, d.Quota)
		time.Sleep(4 * time.Second)
		d = s.Take(t.Context(), "a", 1)
		require.Equal(t, hourly, d.Quota)
		require.Equal(t, 8, d.Limit)
		require.False(t, d.OK)
		for range 4 {
			time.Sleep(time.Hour)
			require.True(t, s.Take(t.Context(), "a", 2).OK)
			time.Sleep(4 * time.Second)
			require.True(t, s.Take(t.Context(), "a", 2).OK)
		}
		time.Sleep(time.Hour)
		require.Equal(t, daily, s.Take(t.Context(), "a", 2).Quota)
		require.Equal(t, daily, s.Peek(t.Context(), "a").Quota)
		require.NoError(t, s.Update(func(c *throttle.SharedConfig) { c.OnOutage = throttle.RefuseAll }))
		require.False(t, s.Allow(t.Context(), "a"))
		time.Sleep(20 * time.Second)
		require.Equal(t, 40*time.Second, s.Peek(t.Context(), "a").RetryAfter)
		require.Equal(t, 40*time.Second, s.Take(t.Context(), "a", 1).RetryAfter)
	})
}

// What an instance may admit alone follows an Update, for keys with a limit of their own, too.
func TestSharedUpdateReachesThePartsOfOwnLimits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeRedis{answer: down}
		s := throttle.NewShared(throttle.SharedConfig{Name: "api", Eval: f.eval, Rate: 1, Burst: 8, Instances: 4, RetryEvery: time.Hour})
		require.NoError(t, s.Set("own", throttle.Limit{Rate: 1, Burst: 16}))
		require.Equal(t, 3, s.Take(t.Context(), "own", 1).Remaining)
		require.NoError(t, s.Update(func(c *throttle.SharedConfig) { c.Instances = 2 }))
		require.Equal(t, 7, s.Take(t.Context(), "own", 1).Remaining)
		require.NoError(t, s.Set("own", throttle.Limit{}))
		require.Equal(t, 4, s.Peek(t.Context(), "own").Remaining)
	})
}

// A call under way during an Update, which began under the parts of before, leaves none of them.
func TestSharedUpdateReachesThePartsOfOwnLimitsDespiteCallsUnderWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var away atomic.Bool
		f := &fakeRedis{answer: func(context.Context, []any) (any, error) {
			time.Sleep(time.Millisecond)
			if away.Load() {
				return nil, errDown
			}
			return []any{int64(1), int64(0), int64(0)}, nil
		}}
		s := throttle.NewShared(throttle.SharedConfig{Name: "api", Eval: f.eval, Rate: 1, Burst: 8, Instances: 2})
		require.NoError(t, s.Set("own", throttle.Limit{Rate: 1, Burst: 16}))
		go s.Allow(t.Context(), "own")
		synctest.Wait()
		require.NoError(t, s.Update(func(c *throttle.SharedConfig) { c.Instances = 8 }))
		time.Sleep(time.Minute)
		away.Store(true)
		require.Equal(t, 1, s.Take(t.Context(), "own", 1).Remaining, "of an eighth of 16")
	})
}

// A limit shares no memory with what it is made from and what it returns.
func TestSharedConfigSharesNoMemory(t *testing.T) {
	cfg := throttle.SharedConfig{Name: "api", Eval: (&fakeRedis{answer: down}).eval, Rate: 1, Instances: 1,
		Quotas: []throttle.Quota{{N: 5, Per: throttle.Day}}, Levels: 2, Priority: func(context.Context) int { return 0 }, Reserve: []float64{0.5}}
	s := throttle.NewShared(cfg)
	for range 2 {
		require.NoError(t, setSharedLimit(s, throttle.Limit{Rate: 2, Quotas: cfg.Quotas}))
		cfg.Quotas[0].N, cfg.Reserve[0] = 6, 0.1
		require.NoError(t, s.Update(func(c *throttle.SharedConfig) { c.Rate = 3 }))
		require.Equal(t, 5, s.Config().Quotas[0].N)
		require.Equal(t, 0.5, s.Config().Reserve[0])
		cfg = s.Config()
	}
}

// Peek tells whether one token is there, of the rate and of each quota, and when.
func TestSharedPeekTellsWhatATakeWould(t *testing.T) {
	hourly, daily := throttle.Quota{N: 5, Every: time.Hour}, throttle.Quota{N: 10, Every: 24 * time.Hour}
	const h = int64(3_600_000_000)
	for name, c := range map[string]struct {
		debt, hourly, daily int64
		ok                  bool
		after               time.Duration
	}{
		"all there":                {0, 0, 0, true, 0},
		"the last of each":         {666_667, 4, 9, true, 0},
		"none of the rate":         {1_000_000, 0, 0, false, 333_334 * time.Microsecond}, // a third of a second, rounded up
		"none of the first":        {0, 5, 9, false, time.Hour},
		"none of the second":       {0, 4, 10, false, 24 * time.Hour},
		"none of any":              {1_000_000, 5, 10, false, 24 * time.Hour},
		"two microseconds are due": {666_668, 0, 0, false, 2 * time.Microsecond},
	} {
		f := &fakeRedis{answer: answers(0, 0, c.debt, c.hourly, h, h, c.daily, 24*h, 24*h)}
		s := throttle.NewShared(throttle.SharedConfig{
			Timeout: time.Minute, Name: "api", Eval: f.eval, Rate: 3, Burst: 3, Quotas: []throttle.Quota{hourly, daily}, Instances: 1,
		})
		d := s.Peek(t.Context(), "")
		require.Equal(t, c.ok, d.OK, name)
		require.Equal(t, c.after, d.RetryAfter, name)
	}
	f := &fakeRedis{answer: answers(0, 0, 600_000)}
	s := throttle.NewShared(throttle.SharedConfig{Timeout: time.Minute, Name: "api", Eval: f.eval, Rate: 10, Burst: 5, Instances: 1})
	require.Equal(t, 200*time.Millisecond, s.Peek(t.Context(), "").RetryAfter)
	for used := range int64(6) {
		f = &fakeRedis{answer: answers(0, 0, 0, used, h, h)}
		s = throttle.NewShared(throttle.SharedConfig{Timeout: time.Minute, Name: "api", Eval: f.eval, Quotas: []throttle.Quota{hourly}, Instances: 1})
		require.Equal(t, used < 5, s.Peek(t.Context(), "").OK, "without a rate")
	}
}

// Each token that is there is told of, although the script rounds the debt up to a microsecond.
func TestSharedTellsOfTheLastToken(t *testing.T) {
	for _, rate := range []float64{3, 7, 10, 1.5, 1.0 / 7, 1e6 / 3, 1e6} {
		const burst = 9
		f := &fakeRedis{}
		s := throttle.NewShared(throttle.SharedConfig{
			Timeout: time.Minute, Name: "api", Eval: f.eval, Rate: rate, Burst: burst, Instances: 1, Levels: 2, Priority: levelOf, Reserve: []float64{0.25},
		})
		for taken := range burst + 1 {
			f.answer = answers(0, 0, int64(math.Ceil(float64(taken)/rate*1e6-1e-6)))
			for level, kept := range []int{0, 2} {
				there := max(0, burst-kept-taken)
				require.Equal(t, there, s.Take(at(t.Context(), level), "", 1).Remaining, "%d taken, at %v a second", taken, rate)
				d := s.Peek(at(t.Context(), level), "")
				require.Equal(t, there, d.Remaining)
				require.Equal(t, there > 0, d.OK)
				require.Equal(t, d.OK, d.RetryAfter == 0)
			}
		}
	}
}

// In an outage, too, Peek is about the level of its call.
func TestSharedPeekInAnOutageTellsWhatATakeWould(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeRedis{answer: down}
		s := throttle.NewShared(throttle.SharedConfig{
			Name: "api", Eval: f.eval, Rate: 1, Burst: 4, Instances: 1, RetryEvery: time.Hour,
			Levels: 2, Priority: levelOf, Reserve: []float64{0.5},
		})
		require.Equal(t, 2, s.Take(at(t.Context(), 0), "a", 2).Remaining)
		for level, there := range []int{2, 0} {
			d := s.Peek(at(t.Context(), level), "a")
			require.Equal(t, there, d.Remaining)
			require.Equal(t, there > 0, d.OK)
			require.Equal(t, d.OK, s.Allow(at(t.Context(), level), "a"))
		}
	})
}

// With quotas, too, what the script cannot have returned is an outage.
func TestSharedBadAnswersAboutQuotas(t *testing.T) {
	for _, answer := range [][]any{
		{1, 0, 0},                // nothing about the quota
		{1, 0, 0, 1, 1, 1, 1},    // about more than one
		{1, 1},                   // neither an answer nor the time
		{-2, 1},                  // nor this
		{-1, -1},                 // a time before 1970
		{1, 0, 0, -1, 1, 1},      // fewer than none are used
		{-1, 0, 0, 1, 1, 1},      // fewer than none are taken
		{-1, 1, 1},               // the time, and more
		{-1, 0, 0, 0, 1, 1},      // the time, and as much as an answer has
		{1, 0, 0, 1, "later", 1}, // not a number
	} {
		f := &fakeRedis{answer: answers(answer...)}
		s := throttle.NewShared(throttle.SharedConfig{
			Timeout: time.Minute, Name: "api", Eval: f.eval, OnOutage: throttle.RefuseAll, Quotas: []throttle.Quota{{N: 5, Per: throttle.Day}},
		})
		require.ErrorIs(t, s.Wait(t.Context(), ""), throttle.ErrOutage, "%v", answer)
		require.Len(t, f.made(), 1, "%v", answer)
	}
	f := &fakeRedis{answer: answers(-1, 1)}
	s := throttle.NewShared(throttle.SharedConfig{Timeout: time.Minute, Name: "api", Eval: f.eval, Rate: 1, OnOutage: throttle.RefuseAll})
	require.ErrorContains(t, s.Wait(t.Context(), ""), "must be 3 integers", "the time was not asked for")
	require.Len(t, f.made(), 1)
}
