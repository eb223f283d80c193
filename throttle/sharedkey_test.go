package throttle_test

import (
	"context"
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
	require.NoError(t, s.SetLimit(throttle.Limit{Rate: 1, Burst: 40, Quotas: []throttle.Quota{hour}}))
	require.Equal(t, []throttle.Quota{hour}, s.Config().Quotas)
	require.EqualValues(t, 40_000_000, most("any"))
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
		for i := range 300 { // more limits than a program has
			key := string(rune('A' + i))
			require.NoError(t, s.Update(func(c *throttle.SharedConfig) { c.OnOutage = throttle.LimitLocally }))
			require.NoError(t, s.Set(key, throttle.Limit{Rate: float64(1 + i), Burst: 4}))
			require.True(t, s.Allow(t.Context(), key))
		}
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

// A batch takes its tokens from the quotas, too, and tells which of them refuses.
func TestSharedBatchOfAQuota(t *testing.T) {
	used := int64(0)
	f := &fakeRedis{answer: func(_ context.Context, args []any) (any, error) {
		for i := 9; i < len(args); i += 3 {
			if n := int64(args[i].(int)); used+n <= 10 {
				used += n
				return []any{n, int64(0), int64(0), used, int64(5_000_000), int64(60_000_000)}, nil
			}
		}
		return []any{int64(0), int64(0), int64(0), used, int64(5_000_000), int64(60_000_000)}, nil
	}}
	quota := throttle.Quota{N: 10, Every: time.Minute}
	s := throttle.NewShared(throttle.SharedConfig{Timeout: time.Minute, Name: "api", Eval: f.eval, Rate: 1000, Batch: 4, Instances: 1, Quotas: []throttle.Quota{quota}})
	for range 10 {
		require.NoError(t, s.Wait(t.Context(), ""))
	}
	require.Equal(t, 0, s.Peek(t.Context(), "").Remaining)
	err := s.Wait(t.Context(), "")
	require.EqualError(t, err, "throttle: api: limited (over the quota of 10 per 1m0s), retry after 5s")
	require.Panics(t, func() {
		throttle.NewShared(throttle.SharedConfig{Timeout: time.Minute, Name: "api", Eval: f.eval, Rate: 1000, Batch: 11, Instances: 1, Quotas: []throttle.Quota{quota}})
	})
}
