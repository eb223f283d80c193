package throttle_test

import (
	"context"
	"encoding/json"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/throttle"
)

// A refusal by the rate spends nothing of a quota, and the other way round. A Decision
// tells what binds.
func TestQuotaAndRateAreOneDecision(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hourly := throttle.Quota{N: 5, Every: time.Hour}
		daily := throttle.Quota{N: 12, Per: throttle.Day, In: time.UTC}
		cfg := throttle.Config{Name: "api", Rate: 1, Burst: 2, Quotas: []throttle.Quota{hourly, daily}}
		l := throttle.New(cfg)
		g := throttle.NewGroup(throttle.GroupConfig[string]{Config: cfg})
		take := func(n int) throttle.Decision {
			t.Helper()
			d := l.Take(n)
			require.Equal(t, d, g.Take("a", n))
			return d
		}
		time.Sleep(10 * time.Hour)
		require.Equal(t, throttle.Decision{OK: true, Limit: 2, Window: 2 * time.Second, Remaining: 0, ResetAfter: 2 * time.Second}, take(2))
		for range 5 {
			require.Equal(t, throttle.Decision{Limit: 2, Window: 2 * time.Second, RetryAfter: 2 * time.Second, ResetAfter: 2 * time.Second}, take(2))
		}
		time.Sleep(2 * time.Second)
		require.Equal(t, throttle.Decision{
			OK: true, Limit: 2, Window: 2 * time.Second, Remaining: 0, ResetAfter: 2 * time.Second,
		}, take(2))
		time.Sleep(time.Minute)
		require.Equal(t, throttle.Decision{
			Quota: hourly, Limit: 5, Window: time.Hour, Remaining: 1, RetryAfter: time.Hour - 62*time.Second, ResetAfter: time.Hour - 62*time.Second,
		}, take(2), "1 is left of 5")
		require.Equal(t, throttle.Decision{
			OK: true, Quota: hourly, Limit: 5, Window: time.Hour, Remaining: 0, ResetAfter: time.Hour - 62*time.Second,
		}, take(1))
		require.EqualError(t, l.Wait(t.Context()), "throttle: api: limited (over the quota of 5 per 1h0m0s), retry after 58m58s")
		require.EqualError(t, g.Wait(t.Context(), "a"), "throttle: api[a]: limited (over the quota of 5 per 1h0m0s), retry after 58m58s")
		require.False(t, l.Allow())
		require.Equal(t, 0, l.Peek().Remaining)
		time.Sleep(time.Hour)
		require.True(t, take(2).OK)
		time.Sleep(2 * time.Second)
		require.True(t, take(2).OK)
		time.Sleep(time.Hour)
		require.True(t, take(2).OK)
		d := take(2)
		require.Equal(t, daily, d.Quota, "11 of 12 are spent; the rate has nothing either")
		require.Equal(t, 24*time.Hour, d.Window)
		require.Equal(t, time.Date(2000, 1, 2, 0, 0, 0, 0, time.UTC), time.Now().UTC().Add(d.RetryAfter))
		require.EqualValues(t, 11, l.Stats().Spent)
		require.EqualValues(t, 1<<63-1, take(3).RetryAfter, "more than a burst")
		require.EqualValues(t, 1, g.Stats().Refusals[throttle.TooCostly])
		require.EqualValues(t, 5, g.Stats().Refusals[throttle.OverLimit])
		require.EqualValues(t, 3, g.Stats().Refusals[throttle.OverQuota])
	})
}

// Only quotas: what is left of them may be spent at any speed.
func TestQuotaWithoutARate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := throttle.New(throttle.Config{MaxWait: -1, Quotas: []throttle.Quota{{N: 1e15, Every: time.Second}, {N: 1e15, Per: throttle.Week}}})
		require.Zero(t, l.Config().Burst)
		require.NoError(t, l.Config().Validate())
		require.True(t, l.Take(1e15).OK)
		require.Equal(t, throttle.OverQuota, reason(l.Wait(t.Context())), "no call waits for a quota")
		require.Equal(t, 7*24*time.Hour, l.Take(1).Window, "the one that is over last")
		require.NoError(t, l.Update(func(c *throttle.Config) { c.Quotas = []throttle.Quota{{N: 5, Every: time.Second}} }))
		require.False(t, l.Allow(), "tokens spent stay spent")
		time.Sleep(time.Second)
		require.True(t, l.Take(5).OK)
		time.Sleep(time.Second)
		require.True(t, l.Take(5).OK)
		d := l.Take(6)
		require.False(t, d.OK)
		require.EqualValues(t, 1<<63-1, d.RetryAfter)
		require.NoError(t, setLimit(l, throttle.Limit{Rate: 1, Burst: 10}))
		require.Equal(t, throttle.Quota{}, l.Take(6).Quota)
	})
}

// Of windows alone the one with the fewest tokens left binds, wherever it stands.
func TestQuotaWithTheFewestLeftBinds(t *testing.T) {
	small, large := throttle.Quota{N: 5, Every: time.Hour}, throttle.Quota{N: 6, Every: 24 * time.Hour}
	for _, quotas := range [][]throttle.Quota{{small, large}, {large, small}, {{N: 7, Every: time.Minute}, small, large}} {
		for _, rate := range []float64{0, 1e6} {
			d := throttle.New(throttle.Config{Rate: rate, Quotas: quotas}).Take(1)
			require.Equal(t, small, d.Quota)
			require.Equal(t, 4, d.Remaining)
		}
	}
}

// A window of which nothing is spent has nothing to reset.
func TestUnspentQuotaIsFull(t *testing.T) {
	l := throttle.New(throttle.Config{Quotas: []throttle.Quota{{N: 5, Per: throttle.Day}}})
	want := throttle.Decision{OK: true, Limit: 5, Remaining: 5, Window: 24 * time.Hour, Quota: l.Config().Quotas[0]}
	require.Equal(t, want, l.Peek())
	require.True(t, l.Take(5).OK)
	require.Positive(t, l.Peek().ResetAfter)
	l.Refund(5)
	require.Equal(t, want, l.Peek())
}

// The zone that a quota gets by default is written into no slice of the caller.
func TestConfigSharesNoQuotas(t *testing.T) {
	quotas := []throttle.Quota{{N: 5, Per: throttle.Day}}
	l := throttle.New(throttle.Config{Quotas: quotas})
	s := throttle.NewShared(throttle.SharedConfig{Name: "api", Rate: 1, Instances: 1, Eval: (&fakeRedis{answer: down}).eval})
	require.NoError(t, s.Set("key", throttle.Limit{Quotas: quotas}))
	require.Nil(t, quotas[0].In)
	quotas[0].N = 6
	require.Equal(t, []throttle.Quota{{N: 5, Per: throttle.Day, In: time.UTC}}, l.Config().Quotas)
	require.Equal(t, throttle.Never, s.Take(t.Context(), "key", 6).RetryAfter)
}

// A key whose windows are over makes room for another, and no sooner.
func TestGroupEvictsKeysWhoseWindowsAreOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := throttle.NewGroup(throttle.GroupConfig[int]{Config: throttle.Config{Quotas: []throttle.Quota{{N: 5, Every: time.Hour}}},
			MaxKeys: 1, IdleAfter: -1})
		require.True(t, g.Allow(1))
		time.Sleep(time.Hour - 1)
		require.True(t, g.Allow(2))
		require.EqualValues(t, 1, g.Stats().Overflow)
		time.Sleep(time.Nanosecond)
		require.True(t, g.Allow(2))
		require.EqualValues(t, 1, g.Stats().Evicted)
	})
}

// The bounds of a calendar's windows, where the clocks change, at the ends of months, and
// where a day has no midnight or two.
func TestCalendarWindows(t *testing.T) {
	const layout = "2006-01-02 15:04"
	for _, c := range []struct {
		zone          string
		per           throttle.Period
		now           string // UTC
		length, until time.Duration
	}{
		{"", throttle.Day, "2026-11-22 14:00", 24 * time.Hour, 10 * time.Hour},
		{"Europe/Berlin", throttle.Day, "2026-03-28 23:00", 23 * time.Hour, 23 * time.Hour}, // the clocks are set forward
		{"Europe/Berlin", throttle.Day, "2026-03-29 21:59", 23 * time.Hour, time.Minute},
		{"Europe/Berlin", throttle.Day, "2026-03-29 22:00", 24 * time.Hour, 24 * time.Hour},
		{"Europe/Berlin", throttle.Day, "2026-10-24 22:00", 25 * time.Hour, 25 * time.Hour}, // and back
		{"Europe/Berlin", throttle.Day, "2026-10-25 22:59", 25 * time.Hour, time.Minute},
		{"Europe/Berlin", throttle.Month, "2026-03-31 21:59", 31*24*time.Hour - time.Hour, time.Minute},
		{"Europe/Berlin", throttle.Month, "2026-10-31 22:30", 31*24*time.Hour + time.Hour, 30 * time.Minute},
		{"Europe/Berlin", throttle.Week, "2026-03-29 21:59", 7*24*time.Hour - time.Hour, time.Minute}, // Sunday
		{"Europe/Berlin", throttle.Week, "2026-03-29 22:00", 7 * 24 * time.Hour, 7 * 24 * time.Hour},
		{"Europe/Berlin", throttle.Year, "2026-12-31 22:59", 365 * 24 * time.Hour, time.Minute},
		{"", throttle.Week, "2026-11-22 23:59", 7 * 24 * time.Hour, time.Minute},
		{"", throttle.Month, "2028-02-28 12:00", 29 * 24 * time.Hour, 36 * time.Hour},
		{"", throttle.Month, "2026-02-28 12:00", 28 * 24 * time.Hour, 12 * time.Hour},
		{"", throttle.Month, "2026-12-31 23:59", 31 * 24 * time.Hour, time.Minute},
		{"", throttle.Year, "2028-12-31 23:59", 366 * 24 * time.Hour, time.Minute},
		{"Asia/Kathmandu", throttle.Day, "2026-11-22 18:14", 24 * time.Hour, time.Minute},
		{"Pacific/Kiritimati", throttle.Day, "2026-11-22 09:59", 24 * time.Hour, time.Minute}, // 14 h ahead
		// The day begins at 01:00: there is no midnight.
		{"America/Sao_Paulo", throttle.Day, "2018-11-04 02:59", 24 * time.Hour, time.Minute},
		{"America/Sao_Paulo", throttle.Day, "2018-11-04 03:00", 23 * time.Hour, 23 * time.Hour},
		// At midnight it is 23:00 again.
		{"America/Sao_Paulo", throttle.Day, "2018-02-18 01:59", 25 * time.Hour, time.Hour + time.Minute},
		{"America/Sao_Paulo", throttle.Day, "2018-02-18 03:00", 24 * time.Hour, 24 * time.Hour},
		// At 01:00 it is midnight again.
		{"America/Havana", throttle.Day, "2026-11-01 03:59", 24 * time.Hour, time.Minute},
		{"America/Havana", throttle.Day, "2026-11-01 05:00", 25 * time.Hour, 24 * time.Hour},
		// At 00:01 it is 23:01 again, of the day before. The new day has begun.
		{"America/St_Johns", throttle.Day, "2010-11-07 02:30", 25 * time.Hour, 25 * time.Hour},
		{"America/St_Johns", throttle.Day, "2010-11-07 03:00", 25 * time.Hour, 24*time.Hour + 30*time.Minute},
		// There was no 30th of December.
		{"Pacific/Apia", throttle.Day, "2011-12-30 09:59", 24 * time.Hour, time.Minute},
		{"Pacific/Apia", throttle.Day, "2011-12-30 10:00", 24 * time.Hour, 24 * time.Hour},
		{"Pacific/Apia", throttle.Month, "2011-12-31 09:59", 30 * 24 * time.Hour, time.Minute},
	} {
		t.Run(c.zone+" "+string(c.per)+" "+c.now, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				in, err := time.LoadLocation(c.zone)
				require.NoError(t, err)
				now, err := time.Parse(layout, c.now)
				require.NoError(t, err)
				l := throttle.New(throttle.Config{Quotas: []throttle.Quota{{N: 1, Per: c.per, In: in}}})
				require.True(t, l.Allow(), "a window long before")
				time.Sleep(time.Until(now))
				d := l.Take(1)
				require.True(t, d.OK)
				require.Equal(t, c.length, d.Window)
				require.Equal(t, c.until, d.ResetAfter)
				time.Sleep(c.until - 1)
				require.False(t, l.Allow())
				time.Sleep(time.Nanosecond)
				require.True(t, l.Allow(), "the next window")
				require.False(t, l.Allow())
			})
		})
	}
}

// In all zones, at random times: windows follow each other without a gap, and a date is
// in one window.
func TestCalendarWindowsFollowEachOther(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 9))
	for _, zone := range []string{"Europe/Berlin", "America/Sao_Paulo", "America/St_Johns", "Australia/Lord_Howe", "Africa/Casablanca", "Asia/Beirut"} {
		in, err := time.LoadLocation(zone)
		require.NoError(t, err)
		synctest.Test(t, func(t *testing.T) {
			l := throttle.New(throttle.Config{Quotas: []throttle.Quota{{N: 1, Per: throttle.Day, In: in}}})
			time.Sleep(time.Duration(random.IntN(20*365*24)) * time.Hour)
			l.Allow()
			time.Sleep(l.Peek().ResetAfter) // to the beginning of a window
			for range 400 {
				begin := time.Now().In(in)
				d := l.Take(1)
				require.True(t, d.OK, begin)
				require.Equal(t, d.Window, d.ResetAfter, "no gap")
				require.InDelta(t, 24, d.Window.Hours(), 1)
				require.NotEqual(t, begin.Day(), begin.Add(-time.Nanosecond).Day(), "a new date")
				require.Contains(t, []int{0, 1}, begin.Hour())
				time.Sleep(d.ResetAfter)
			}
		})
	}
}

// A waiting call has its tokens of the quotas. It gives them back if it gives up or is
// displaced.
func TestWaitingCallsHoldTheirPartOfAQuota(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := throttle.Config{
			Rate: 1, Burst: 1, MaxWait: -1, Queue: 2, Quotas: []throttle.Quota{{N: 4, Every: time.Minute}},
			Levels: 2, Priority: levelOf, Reserve: []float64{},
		}
		l := throttle.New(cfg)
		g := throttle.NewGroup(throttle.GroupConfig[string]{Config: cfg})
		var calls sync.WaitGroup
		call := func(ctx context.Context, want throttle.Reason) {
			check := func(err error) {
				require.Equal(t, want == "", err == nil, "%v", err)
				require.True(t, err == nil || reason(err) == want, "%v", err)
			}
			calls.Go(func() { check(l.Wait(ctx)) })
			calls.Go(func() { check(g.Wait(ctx, "a")) })
			synctest.Wait()
		}
		low, high := at(t.Context(), 1), at(t.Context(), 0)
		call(low, "")
		call(low, "")
		leaves, cancel := context.WithCancel(low)
		call(leaves, throttle.ContextEnded)
		call(low, throttle.QueueFull)
		cancel()
		synctest.Wait()
		call(low, throttle.Displaced)
		call(high, "")
		calls.Wait()
		time.Sleep(time.Second)
		call(low, "")
		time.Sleep(time.Second)
		call(low, throttle.OverQuota)
		calls.Wait()
		require.EqualValues(t, 4, g.Stats().Spent)
	})
}

// A waiting call gives nothing back to a later window than that of its tokens, also if
// the quotas change meanwhile.
func TestWaitingCallGivesBackToItsWindow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		quotas := []throttle.Quota{{N: 1000, Per: throttle.Year}, {N: 4, Every: time.Minute}}
		l := throttle.New(throttle.Config{Rate: every(time.Hour), Burst: 1, MaxWait: -1, Quotas: quotas})
		require.True(t, l.Allow())
		var calls sync.WaitGroup
		wait := func() (leave func()) {
			ctx, cancel := context.WithCancel(t.Context())
			calls.Go(func() { require.Equal(t, throttle.ContextEnded, reason(l.Wait(ctx))) })
			synctest.Wait()
			return func() { cancel(); synctest.Wait() }
		}
		first := wait()
		time.Sleep(2 * time.Minute)
		second, third := wait(), wait()
		first() // gives nothing to the minute of second and third
		fill := wait()
		fill4 := wait()
		require.Equal(t, throttle.OverQuota, reason(l.Wait(t.Context())), "4 wait")
		fill()
		fill4()
		require.NoError(t, l.Update(func(c *throttle.Config) { c.Quotas = quotas[1:] }))
		second()
		left := func(want int) {
			t.Helper()
			require.NoError(t, setLimit(l, throttle.Limit{Rate: 1e9, Burst: 10, Quotas: quotas}))
			require.Equal(t, want, l.Peek().Remaining)
			require.NoError(t, setLimit(l, throttle.Limit{Rate: every(time.Hour), Burst: 1, Quotas: quotas}))
		}
		require.NoError(t, setLimit(l, throttle.Limit{Rate: every(time.Hour), Burst: 1, Quotas: quotas}))
		fourth, fifth := wait(), wait()
		third()
		fourth()
		fifth()
		time.Sleep(time.Nanosecond)
		left(4)
	})
}

// Whatever calls do, no window sees more than its quota, and none of its tokens is lost.
func TestQuotasUnderStress(t *testing.T) {
	const most = 3000
	cfg := throttle.Config{
		Rate: 1e6, Burst: 50, MaxWait: time.Millisecond, Quotas: []throttle.Quota{{N: most, Every: 1000 * time.Hour}, {N: 1e9, Per: throttle.Year}},
	}
	l := throttle.New(cfg)
	g := throttle.NewGroup(throttle.GroupConfig[int]{Config: cfg, IdleAfter: 1})
	var alone, keyed, refunded atomic.Int64
	var calls sync.WaitGroup
	for i := range 16 {
		calls.Go(func() {
			random := rand.New(rand.NewPCG(uint64(i), 4))
			for range 500 {
				ctx, cancel := context.WithTimeout(t.Context(), time.Duration(random.IntN(1000))*time.Microsecond)
				switch random.IntN(8) {
				case 0:
					if l.Allow() {
						alone.Add(1)
					}
					if g.Allow(7) {
						keyed.Add(1)
					}
				case 1:
					if l.Take(3).OK {
						l.Refund(1)
						alone.Add(3)
						refunded.Add(1)
					}
				case 2:
					g.Allow(random.IntN(1e6))
					l.Peek()
					g.Peek(7)
				case 3:
					_ = g.Update(func(c *throttle.GroupConfig[int]) { c.Config.Burst = 40 + random.IntN(20) })
					_ = l.Update(func(c *throttle.Config) { c.Burst = 40 + random.IntN(20) })
				default:
					if l.Wait(ctx) == nil {
						alone.Add(1)
					}
					if g.Wait(ctx, 7) == nil {
						keyed.Add(1)
					}
				}
				cancel()
			}
		})
	}
	calls.Wait()
	s := l.Stats()
	require.LessOrEqual(t, alone.Load()-refunded.Load(), int64(most))
	require.LessOrEqual(t, keyed.Load(), int64(most))
	for l.Peek().Quota.N != most || l.Peek().Remaining > 0 {
		l.Allow()
	}
	s = l.Stats()
	require.EqualValues(t, most, s.Spent-s.Refunded, "all that there is")
	for g.Peek(7).Quota.N != most || g.Peek(7).Remaining > 0 {
		g.Allow(7)
	}
	for _, u := range top(g, 1) {
		require.EqualValues(t, most, u.Spent)
	}
}

func TestQuotaIsKeptForTheLevelsAbove(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := throttle.New(throttle.Config{
			Rate: 1000, Levels: 2, Priority: levelOf, Reserve: []float64{0.5}, Quotas: []throttle.Quota{{N: 10, Per: throttle.Day}},
		})
		for i := range 12 {
			err := l.Wait(at(t.Context(), 1))
			require.Equal(t, i < 5, err == nil)
		}
		for i := range 6 {
			require.Equal(t, i < 5, l.Wait(at(t.Context(), 0)) == nil)
		}
		time.Sleep(24 * time.Hour)
	})
}

func TestQuotaText(t *testing.T) {
	berlin, err := time.LoadLocation("Europe/Berlin")
	require.NoError(t, err)
	for text, q := range map[string]throttle.Quota{
		"1000 per day in Europe/Berlin": {N: 1000, Per: throttle.Day, In: berlin},
		"5 per month":                   {N: 5, Per: throttle.Month, In: time.UTC},
		"50 per 1h30m0s":                {N: 50, Every: 90 * time.Minute},
	} {
		require.Equal(t, text, q.String())
		data, err := json.Marshal(throttle.Limit{Rate: 2, Quotas: []throttle.Quota{q}})
		require.NoError(t, err)
		require.JSONEq(t, `{"Rate":2,"Burst":0,"Quotas":["`+text+`"]}`, string(data))
		var back throttle.Limit
		require.NoError(t, json.Unmarshal(data, &back))
		require.Equal(t, throttle.Limit{Rate: 2, Quotas: []throttle.Quota{q}}, back)
	}
	for _, name := range []string{"", "Narnia"} { // UnmarshalText would not find it
		_, err := throttle.Quota{N: 1, Per: throttle.Day, In: time.FixedZone(name, 3600)}.MarshalText()
		require.ErrorContains(t, err, "has no text")
	}
	for text, why := range map[string]string{
		"":                    "no number per time",
		"10":                  "no number per time",
		"x per day":           "no whole number",
		"1.5 per day":         "no whole number",
		"0 per day":           "Quotas[0].N is 0: must be 1 to 1e15",
		"1 per fortnight":     `Quotas[0].Per is "fortnight": must be "day", "week", "month" or "year"`,
		"1 per 1us":           "Quotas[0].Every is 1\u00b5s: must be a millisecond to 36 years",
		"1 per day in Narnia": "unknown time zone Narnia",
	} {
		q := throttle.Quota{N: 3, Every: time.Hour}
		require.ErrorContains(t, q.UnmarshalText([]byte(text)), why)
		require.Equal(t, throttle.Quota{N: 3, Every: time.Hour}, q)
	}
}

func TestLimitValidate(t *testing.T) {
	day, hour := throttle.Quota{N: 1, Per: throttle.Day}, throttle.Quota{N: 1, Every: time.Hour}
	for want, l := range map[string]throttle.Limit{
		"throttle.Limit.Rate is 0: must be above 0 and at most 1e12 tokens a second": {},
		"throttle.Limit.Burst is 3: must be 0 where there is no Rate":                {Burst: 3, Quotas: []throttle.Quota{day}},
		"throttle.Limit.Quotas[1] is 7 per day: must be of another window than those before it": {
			Quotas: []throttle.Quota{day, {N: 7, Per: throttle.Day, In: time.UTC}}},
		`throttle.Limit.Quotas[0].Per is "": must be set where Every is not, and the other way round`: {Quotas: []throttle.Quota{{N: 1}}},
		`throttle.Limit.Quotas[1].Per is "day": must be set where Every is not, and the other way round`: {
			Quotas: []throttle.Quota{hour, {N: 1, Every: time.Minute, Per: throttle.Day}}},
		"throttle.Limit.Quotas[0].In is UTC: must be nil where Per is not set": {Quotas: []throttle.Quota{{N: 1, Every: time.Hour, In: time.UTC}}},
	} {
		require.EqualError(t, l.Validate(), want)
	}
	require.EqualError(t, throttle.Config{Rate: 1, Quotas: []throttle.Quota{{N: -1, Per: throttle.Day}}}.Validate(),
		"throttle.Config.Quotas[0].N is -1: must be 1 to 1e15")
	many := make([]throttle.Quota, 9)
	for i := range many {
		many[i] = throttle.Quota{N: 1, Every: time.Duration(1+i) * time.Hour}
	}
	require.NoError(t, throttle.Limit{Quotas: many[:8]}.Validate())
	require.NoError(t, throttle.Limit{Quotas: []throttle.Quota{day, hour}}.Validate())
	for q, ok := range map[throttle.Quota]bool{
		{N: 1, Every: time.Millisecond}:             true,
		{N: 1, Every: time.Millisecond - 1}:         false,
		{N: 1, Every: 36 * 365 * 24 * time.Hour}:    true,
		{N: 1, Every: 36*365*24*time.Hour + 1}:      false,
		{N: 1e15, Every: time.Hour}:                 true,
		{N: 1e15 + 1, Every: time.Hour}:             false,
		{N: 0, Every: time.Hour}:                    false,
		{N: 1, Every: -time.Hour}:                   false,
		{N: 1, Per: throttle.Year, In: time.UTC}:    true,
		{N: 1, Per: "Day", In: time.UTC}:            false,
		{N: 1, Every: time.Hour, Per: throttle.Day}: false,
	} {
		require.Equal(t, ok, throttle.Limit{Quotas: []throttle.Quota{q}}.Validate() == nil, "%v", q)
	}
	require.ErrorContains(t, throttle.Limit{Quotas: many}.Validate(), "throttle.Limit.Quotas is 9 long: must be at most 8 long")
	l := throttle.New(throttle.Config{Rate: 1, Quotas: many[:2]})
	many[0].N = 99
	require.Equal(t, 1, l.Config().Quotas[0].N, "a Config shares no memory")
}

// An error tells which quota a call is too costly for, and a Limit that somebody has set.
func TestErrorsOfQuotas(t *testing.T) {
	cfg := throttle.Config{
		Name: "api", MaxWait: -1, Cost: func(context.Context) int { return 7 }, Quotas: []throttle.Quota{{N: 9, Per: throttle.Day}, {N: 6, Every: time.Hour}},
	}
	l := throttle.New(cfg)
	g := throttle.NewGroup(throttle.GroupConfig[int]{Config: cfg})
	s := throttle.NewShared(throttle.SharedConfig{
		Timeout: time.Minute,
		Name:    "api", Cost: cfg.Cost, Quotas: cfg.Quotas, OnOutage: throttle.RefuseAll, Eval: (&fakeRedis{answer: down}).eval,
	})
	for _, err := range []error{l.Wait(t.Context()), g.Wait(t.Context(), 1), s.Wait(t.Context(), "")} {
		limited, _ := errors.AsType[*throttle.LimitedError](err)
		require.Equal(t, 6, limited.Limit)
		require.ErrorContains(t, err, "limited (too costly): 7 tokens at level 0 are more than the quota of 6 per 1h0m0s can give")
		require.False(t, limited.Retryable())
	}
	cfg.Cost = nil
	require.NoError(t, s.Update(func(c *throttle.SharedConfig) { c.Cost = nil }))
	limited, _ := errors.AsType[*throttle.LimitedError](s.Wait(t.Context(), ""))
	require.Equal(t, throttle.Outage, limited.Reason)
	require.Zero(t, limited.Quota)
}
