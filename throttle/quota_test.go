package throttle_test

import (
	"context"
	"errors"
	"math"
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
		hourly := throttle.Quota{N: 5, Window: throttle.Window{Every: time.Hour}}
		daily := throttle.Quota{N: 12, Window: throttle.Window{Per: throttle.Day, In: time.UTC}}
		cfg := throttle.Config{Name: "api", Rate: 1, Burst: 2, Quotas: []throttle.Quota{hourly, daily}, Cost: cost}
		l := throttle.New(cfg)
		g := throttle.NewGroup(throttle.GroupConfig[string]{Config: cfg})
		both := func(n int) throttle.Decision {
			t.Helper()
			d := take(l, n)
			require.Equal(t, d, takeOf(g, "a", n))
			return d
		}
		time.Sleep(10 * time.Hour)
		require.Equal(t, throttle.Decision{Admitted: true, Limit: 2, Window: 2 * time.Second, Remaining: 0,
			ResetAfter: 2 * time.Second}, both(2))
		for range 5 {
			require.Equal(t, throttle.Decision{Limit: 2, Window: 2 * time.Second, RetryAfter: 2 * time.Second,
				ResetAfter: 2 * time.Second}, both(2))
		}
		time.Sleep(2 * time.Second)
		require.Equal(t, throttle.Decision{
			Admitted: true, Limit: 2, Window: 2 * time.Second, Remaining: 0, ResetAfter: 2 * time.Second,
		}, both(2))
		time.Sleep(time.Minute)
		require.Equal(t, throttle.Decision{
			Quota: hourly, Limit: 5, Window: time.Hour, Remaining: 1,
			RetryAfter: time.Hour - 62*time.Second, ResetAfter: time.Hour - 62*time.Second,
		}, both(2), "1 is left of 5")
		require.Equal(t, throttle.Decision{
			Admitted: true, Quota: hourly, Limit: 5, Window: time.Hour, Remaining: 0, ResetAfter: time.Hour - 62*time.Second,
		}, both(1))
		require.EqualError(t, l.Wait(t.Context()), "throttle: api: limited (over_quota of 5 per 1h0m0s), retry after 58m58s")
		err := g.Wait(t.Context(), "a")
		require.EqualError(t, err, "throttle: api[a]: limited (over_quota of 5 per 1h0m0s), retry after 58m58s")
		limited, _ := errors.AsType[*throttle.LimitedError](err)
		require.Equal(t, 5, limited.Limit)
		require.False(t, l.Allow())
		require.Zero(t, take(l, 0).Remaining)
		time.Sleep(time.Hour)
		require.True(t, both(2).Admitted)
		time.Sleep(2 * time.Second)
		require.True(t, both(2).Admitted)
		time.Sleep(time.Hour)
		require.True(t, both(2).Admitted)
		d := both(2)
		require.Equal(t, daily, d.Quota, "11 of 12 are spent; the rate has nothing either")
		require.Equal(t, 24*time.Hour, d.Window)
		require.Equal(t, time.Date(2000, 1, 2, 0, 0, 0, 0, time.UTC), time.Now().UTC().Add(d.RetryAfter))
		require.EqualValues(t, 11, l.Stats().Spent)
		require.EqualValues(t, 1<<63-1, both(3).RetryAfter, "more than a burst")
		require.EqualValues(t, 1, g.Stats().Refusals[throttle.TooCostly])
		require.EqualValues(t, 5, g.Stats().Refusals[throttle.OverLimit])
		require.EqualValues(t, 3, g.Stats().Refusals[throttle.OverQuota])
	})
}

// Only quotas: what is left of them may be spent at any speed.
func TestQuotaWithoutARate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := throttle.New(throttle.Config{MaxWait: -1,
			Quotas: []throttle.Quota{{N: 1e15, Window: throttle.Window{Every: time.Second}},
				{N: 1e15, Window: throttle.Window{Per: throttle.Month}}}, Cost: cost})
		require.Zero(t, l.Config().Burst)
		require.NoError(t, l.Config().Validate())
		require.True(t, take(l, 1e15).Admitted)
		require.Equal(t, throttle.OverQuota, reason(l.Wait(t.Context())), "no call waits for a quota")
		require.Equal(t, 31*24*time.Hour, take(l, 1).Window, "the one that is over last")
		require.NoError(t, l.Update(func(c *throttle.Config) {
			c.Quotas = []throttle.Quota{{N: 5, Window: throttle.Window{Every: time.Second}}}
		}))
		require.False(t, l.Allow(), "tokens spent stay spent")
		time.Sleep(time.Second)
		require.True(t, take(l, 5).Admitted)
		time.Sleep(time.Second)
		require.True(t, take(l, 5).Admitted)
		d := take(l, 6)
		require.False(t, d.Admitted)
		require.EqualValues(t, 1<<63-1, d.RetryAfter)
		require.EqualError(t, l.Wait(of(6)),
			"throttle: limited (too_costly): 6 tokens are more than the quota of 5 per 1s can give")
		require.NoError(t, l.Update(func(c *throttle.Config) { c.Rate, c.Burst, c.Quotas = 1, 10, nil }))
		require.Equal(t, throttle.Quota{}, take(l, 6).Quota)
	})
}

// A window of which nothing is spent has nothing to reset.
func TestUnspentQuotaIsFull(t *testing.T) {
	l := throttle.New(throttle.Config{Quotas: []throttle.Quota{{N: 5, Window: throttle.Window{Per: throttle.Day}}},
		Cost: cost})
	want := throttle.Decision{Admitted: true, Limit: 5, Remaining: 5, Window: 24 * time.Hour, Quota: l.Config().Quotas[0]}
	require.Equal(t, want, take(l, 0))
	r, err := l.Reserve(t.Context(), 5)
	require.NoError(t, err)
	require.Positive(t, take(l, 0).ResetAfter)
	r.Settle(0)
	require.Equal(t, want, take(l, 0))
}

// The zone that a quota gets by default is written into no slice of the caller.
func TestConfigSharesNoQuotas(t *testing.T) {
	quotas := []throttle.Quota{{N: 5, Window: throttle.Window{Per: throttle.Day}}}
	l := throttle.New(throttle.Config{Quotas: quotas})
	require.Nil(t, quotas[0].Window.In)
	g := throttle.NewGroup(throttle.GroupConfig[int]{Config: throttle.Config{Quotas: quotas}})
	quotas[0].N = 6
	want := []throttle.Quota{{N: 5, Window: throttle.Window{Per: throttle.Day, In: time.UTC}}}
	l.Config().Quotas[0].N, g.Config().Config.Quotas[0].N = 7, 7
	require.Equal(t, want, l.Config().Quotas)
	require.Equal(t, want, g.Config().Config.Quotas)
}

// A key whose windows are over makes room for another, and no sooner.
func TestGroupEvictsKeysAfterTheirWindows(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := throttle.NewGroup(throttle.GroupConfig[int]{Config: throttle.Config{Quotas: []throttle.Quota{{N: 5,
			Window: throttle.Window{Every: time.Hour}}}},
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

// A billing month begins with a day, in the zone of its date; a short month has its last day
// for it.
func TestBillingMonth(t *testing.T) {
	berlin, err := time.LoadLocation("Europe/Berlin")
	require.NoError(t, err)
	synctest.Test(t, func(t *testing.T) {
		window := throttle.BillingMonth(time.Date(2020, 1, 31, 12, 0, 0, 0, berlin))
		time.Sleep(time.Until(time.Date(2026, 2, 28, 0, 0, 0, 0, berlin)))
		d := take(throttle.New(throttle.Config{Quotas: []throttle.Quota{{N: 5, Window: window}}}), 1)
		require.Equal(t, 31*24*time.Hour-time.Hour, d.Window, "to March 31st, in summer time")
		require.Equal(t, d.Window, d.ResetAfter)
	})
	require.Equal(t, "7 per month from 31 in Europe/Berlin",
		throttle.Quota{N: 7, Window: throttle.Window{Per: throttle.Month, From: 31, In: berlin}}.String())
	require.Equal(t, "7 per month",
		throttle.Quota{N: 7, Window: throttle.Window{Per: throttle.Month, From: 1, In: time.UTC}}.String())
	require.Equal(t, "7 per 1h0m0s", throttle.Quota{N: 7, Window: throttle.Window{Every: time.Hour}}.String())
	at := throttle.Window{Per: throttle.Week, At: 54 * time.Hour, In: berlin}
	require.Equal(t, "none per week at 54h0m0s in Europe/Berlin", throttle.Quota{N: throttle.None, Window: at}.String())
	require.Equal(t, "unlimited per day",
		throttle.Quota{N: throttle.Unlimited, Window: throttle.Window{Per: throttle.Day}}.String())
}

func TestQuotaValidate(t *testing.T) {
	for want, q := range map[string]throttle.Quota{
		`N is 0: must be 1 to 1e15, throttle.None to admit nothing, or throttle.Unlimited`: {
			Window: throttle.Window{Per: throttle.Day}},
		`N is -2: must be 1 to 1e15, throttle.None to admit nothing, or throttle.Unlimited`: {N: -2,
			Window: throttle.Window{Per: throttle.Day}},
		`N is 1000000000000001: must be 1 to 1e15, throttle.None to admit nothing, or throttle.Unlimited`: {N: 1e15 + 1,
			Window: throttle.Window{Per: throttle.Day}},
		`Window.Every is 1µs: must be a millisecond to 36 years`: {N: 1,
			Window: throttle.Window{Every: time.Microsecond}},
		`Window.Every is 315360h0m0.001s: must be a millisecond to 36 years`: {N: 1,
			Window: throttle.Window{Every: 36*365*24*time.Hour + time.Millisecond}},
		`Window.Per is "year": must be "day", "week" or "month"`: {N: 1,
			Window: throttle.Window{Per: "year"}},
		`Window.At is 24h0m0s: must be 0, or less than a day, a week or 28 days, as Per is Day, Week or Month`: {N: 1,
			Window: throttle.Window{Per: throttle.Day, At: 24 * time.Hour}},
		`Window.At is 168h0m0s: must be 0, or less than a day, a week or 28 days, as Per is Day, Week or Month`: {N: 1,
			Window: throttle.Window{Per: throttle.Week, At: 7 * 24 * time.Hour}},
		`Window.At is 672h0m0s: must be 0, or less than a day, a week or 28 days, as Per is Day, Week or Month`: {N: 1,
			Window: throttle.Window{Per: throttle.Month, At: 28 * 24 * time.Hour}},
		`Window.At is -1ns: must be 0, or less than a day, a week or 28 days, as Per is Day, Week or Month`: {N: 1,
			Window: throttle.Window{Per: throttle.Day, At: -1}},
		`Window.At is 1h0m0s: must be 0, or less than a day, a week or 28 days, as Per is Day, Week or Month`: {N: 1,
			Window: throttle.Window{Every: time.Hour, At: time.Hour}},
		`Window.Per is "": must be set where Every is not, and the other way round`: {N: 1},
		`Window.Per is "day": must be set where Every is not, and the other way round`: {N: 1,
			Window: throttle.Window{Every: time.Hour, Per: throttle.Day}},
		`Window.In is UTC: must be nil where Per is not set`: {N: 1,
			Window: throttle.Window{Every: time.Hour, In: time.UTC}},
		`Window.From is 32: must be 0, or 1 to 31 where Per is Month`: {N: 1,
			Window: throttle.Window{Per: throttle.Month, From: 32}},
		`Window.From is -1: must be 0, or 1 to 31 where Per is Month`: {N: 1,
			Window: throttle.Window{Per: throttle.Month, From: -1}},
		`Window.From is 3: must be 0, or 1 to 31 where Per is Month`: {N: 1,
			Window: throttle.Window{Per: throttle.Day, From: 3}},
	} {
		require.EqualError(t, throttle.Config{Quotas: []throttle.Quota{q}}.Validate(), "throttle.Config.Quotas[0]."+want)
	}
	twice := []throttle.Quota{{N: 1, Window: throttle.Window{Per: throttle.Month}},
		{N: 2, Window: throttle.Window{Per: throttle.Month, From: 1, In: time.UTC}}}
	require.EqualError(t, throttle.Config{Quotas: twice}.Validate(),
		"throttle.Config.Quotas[1] is 2 per month: must be for a window that no earlier quota has")
	var nine []throttle.Quota
	for i := range 9 {
		nine = append(nine, throttle.Quota{N: 1, Window: throttle.Window{Every: time.Duration(1+i) * time.Second}})
	}
	require.ErrorContains(t, throttle.Config{Quotas: nine}.Validate(),
		"throttle.Config.Quotas is 9 long: must be at most 8 long")
	nine[1].Window.Every = 36 * 365 * 24 * time.Hour
	require.NoError(t, throttle.Config{Quotas: nine[1:]}.Validate())
	early := []throttle.Quota{{N: 1, Window: throttle.Window{Per: throttle.Day, At: 24*time.Hour - 1}}}
	require.NoError(t, throttle.Config{Quotas: early}.Validate())
}

// A waiting call has its tokens of the quotas. It gives them back if it gives up, to the
// window from which it took them, also if the quotas change meanwhile.
func TestWaitingCallsHoldQuotaTokens(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		quotas := []throttle.Quota{{N: 1000, Window: throttle.Window{Per: throttle.Month}},
			{N: 4, Window: throttle.Window{Every: time.Minute}}}
		l := throttle.New(throttle.Config{Rate: every(time.Hour), Burst: 1, MaxWait: -1, Quotas: quotas, Cost: cost})
		require.True(t, l.Allow())
		var calls sync.WaitGroup
		wait := func() (leave func()) {
			ctx, cancel := context.WithCancel(t.Context())
			calls.Go(func() { require.Equal(t, throttle.ContextEnded, reason(l.Wait(ctx))) })
			synctest.Wait()
			return func() { cancel(); synctest.Wait() }
		}
		last, leave := context.WithCancel(t.Context())
		first := wait()
		time.Sleep(2 * time.Minute)
		second := wait()
		calls.Go(func() { require.Equal(t, throttle.ContextEnded, reason(l.Wait(last))) })
		synctest.Wait()
		first() // gives nothing to the minute of second and last
		fill, fill4 := wait(), wait()
		require.Equal(t, throttle.OverQuota, reason(l.Wait(t.Context())), "4 wait")
		fill()
		fill4()
		require.NoError(t, l.Update(func(c *throttle.Config) { c.Quotas = []throttle.Quota{quotas[1], quotas[0]} }))
		second()
		require.NoError(t, l.Update(func(c *throttle.Config) {
			c.Rate, c.Burst = 0, 0
			leave() // before the Update admits it, or it might have returned
		}))
		calls.Wait()
		require.Equal(t, 4, take(l, 0).Remaining)
	})
}

// Whatever calls do, no window sees more than its quota, and none of its tokens is lost.
func TestQuotasUnderStress(t *testing.T) {
	const most = 3000
	cfg := throttle.Config{
		Rate: 1e6, Burst: 50, MaxWait: time.Millisecond, Quotas: []throttle.Quota{{N: most,
			Window: throttle.Window{Every: 1000 * time.Hour}}, {N: 1e9, Window: throttle.Window{Per: throttle.Month}}},
	}
	l := throttle.New(cfg)
	g := throttle.NewGroup(throttle.GroupConfig[int]{Config: cfg, IdleAfter: 1})
	var alone, keyed atomic.Int64
	var calls sync.WaitGroup
	for i := range 16 {
		calls.Go(func() {
			random := rand.New(rand.NewPCG(uint64(i), 3))
			for range 1000 {
				ctx, cancel := context.WithTimeout(t.Context(), time.Duration(random.IntN(2e6)))
				if r, err := l.Reserve(ctx, 1); err == nil {
					used := random.IntN(2)
					r.Settle(used)
					alone.Add(int64(used))
				}
				if l.Allow() {
					alone.Add(1)
				}
				if g.Wait(ctx, 1) == nil {
					keyed.Add(1)
				}
				cancel()
			}
		})
	}
	calls.Wait()
	left := func(d throttle.Decision) int { return d.Remaining }
	require.NoError(t, l.Update(func(c *throttle.Config) { c.Rate, c.Burst, c.Cost = 0, 0, cost }))
	require.NoError(t, g.Update(func(c *throttle.GroupConfig[int]) {
		c.Config.Rate, c.Config.Burst,
			c.Config.Cost = 0, 0, cost
	}))
	require.EqualValues(t, most-alone.Load(), left(take(l, 0)))
	require.EqualValues(t, most-keyed.Load(), left(takeOf(g, 1, 0)))
}

// A bucket is the model of a rate.
type bucket struct {
	token time.Duration
	burst int
	full  time.Time
}

// A quotaModel is the model of a quota.
type quotaModel struct {
	throttle.Quota
	used int
	end  time.Time // of the present window; zero: none has begun
}

func (q *quotaModel) advance(now time.Time) {
	if !q.end.After(now) {
		q.used, q.end = 0, time.Time{}
	}
}

func (q *quotaModel) take(n int, now time.Time) {
	if q.used == 0 && n > 0 {
		q.end = now.Add(q.Window.Every)
		in := q.Window.In
		if in == nil {
			in = time.UTC
		}
		y, m, d := now.In(in).Date()
		switch { // midnight is there once a day in the zones of this model
		case q.Window.Per == throttle.Day:
			q.end = time.Date(y, m, d+1, 0, 0, 0, 0, in)
		case q.Window.Per == throttle.Month && d < q.Window.From:
			q.end = time.Date(y, m, q.Window.From, 0, 0, 0, 0, in)
		case q.Window.Per == throttle.Month:
			q.end = time.Date(y, m+1, max(q.Window.From, 1), 0, 0, 0, 0, in)
		}
	}
	q.used += n
}

// A limitModel is the model of a limit with quotas.
type limitModel struct {
	bucket
	quotas []quotaModel
	loans  []loan
}

// A loan is a reservation that is to be settled.
type loan struct {
	*throttle.Reservation
	n    int
	ends []time.Time
}

// set makes quotas the present ones. Those with the window of one before keep its tokens.
func (m *limitModel) set(quotas []throttle.Quota) {
	last := m.quotas
	m.quotas, m.loans = nil, nil // their windows are others
	for _, q := range quotas {
		next := quotaModel{Quota: q}
		for _, old := range last {
			if old.Window == q.Window {
				next.used, next.end = old.used, old.end
			}
		}
		m.quotas = append(m.quotas, next)
	}
}

// decide takes n tokens, or returns how long that is impossible and why.
func (m *limitModel) decide(n int) (wait time.Duration, why throttle.Reason) {
	now := time.Now()
	if m.full.Before(now) {
		m.full = now
	}
	costly := n > m.burst
	if left := m.full.Sub(now) + time.Duration(n-m.burst)*m.token; n > 0 && left > 0 {
		wait, why = left, throttle.OverLimit
	}
	for i := range m.quotas {
		q := &m.quotas[i]
		q.advance(now)
		costly = costly || n > q.N
		if n > 0 && q.used+n > q.N {
			wait, why = max(wait, q.end.Sub(now)), throttle.OverQuota
		}
	}
	if costly {
		return math.MaxInt64, throttle.TooCostly
	}
	if why == "" {
		m.full = m.full.Add(time.Duration(n) * m.token)
		for i := range m.quotas {
			m.quotas[i].take(n, now)
		}
	}
	return wait, why
}

// settle corrects a loan to used tokens.
func (m *limitModel) settle(l loan, used int) {
	m.decide(0)
	now := time.Now()
	more := used - l.n
	if more > 0 {
		// an Update may have made the burst smaller
		more = min(more, max(0, int((time.Duration(2*m.burst)*m.token-m.full.Sub(now))/m.token)))
	}
	if m.full = m.full.Add(time.Duration(more) * m.token); m.full.Before(now) {
		m.full = now
	}
	for i := range m.quotas {
		q := &m.quotas[i]
		switch more := min(used-l.n, max(0, 2*q.N-q.used)); {
		case l.n == 0:
			q.take(more, now)
		case q.end.Equal(l.ends[i]):
			q.used = max(0, q.used+more)
		}
	}
}

// remaining returns the tokens that are left of what binds.
func (m *limitModel) remaining() int {
	left := int((time.Duration(m.burst)*m.token - max(0, time.Until(m.full))) / m.token)
	for i := range m.quotas {
		left = min(left, m.quotas[i].N-m.quotas[i].used)
	}
	return max(left, 0)
}

// playQuotas compares the decisions of a Limiter and of a Group, which evicts keys, with
// the model.
func playQuotas(t *testing.T, choose interface{ IntN(n int) int }, events int) {
	berlin, err := time.LoadLocation("Europe/Berlin")
	require.NoError(t, err)
	token := []time.Duration{time.Millisecond, 100 * time.Millisecond, time.Second, time.Hour}[choose.IntN(4)]
	all := []throttle.Window{
		{Every: time.Second}, {Every: time.Hour}, {Per: throttle.Day}, {Per: throttle.Day,
			In: berlin}, {Per: throttle.Month, In: berlin},
		{Per: throttle.Month, From: 17},
	}
	pick := func() (quotas []throttle.Quota) {
		for _, w := range all {
			if choose.IntN(3) == 0 {
				quotas = append(quotas, throttle.Quota{N: 1 + choose.IntN(12), Window: w})
			}
		}
		return quotas
	}
	cfg := throttle.Config{Rate: every(token), Burst: 1 + choose.IntN(8), Quotas: pick(), Cost: cost}
	const keys = 8
	l := throttle.New(cfg)
	g := throttle.NewGroup(throttle.GroupConfig[int]{Config: cfg, MaxKeys: keys, IdleAfter: 1})
	models := make([]*limitModel, 1+keys) // the first is of l
	for i := range models {
		models[i] = &limitModel{bucket: bucket{token: token, burst: cfg.Burst, full: time.Now()}}
		models[i].set(cfg.Quotas)
	}
	for event := range events {
		i := choose.IntN(1 + keys)
		m := models[i]
		n := choose.IntN(5)
		switch choose.IntN(12) {
		case 0, 1, 2:
			time.Sleep(token * time.Duration(choose.IntN(4)))
		case 3:
			time.Sleep(time.Millisecond << choose.IntN(33)) // up to 50 days
		case 4, 5:
			if len(m.loans) > 0 {
				j := choose.IntN(len(m.loans))
				used := choose.IntN(20)
				m.loans[j].Settle(used)
				m.settle(m.loans[j], used)
				m.loans = append(m.loans[:j:j], m.loans[j+1:]...)
			}
		case 6:
			if choose.IntN(16) > 0 {
				continue
			}
			cfg.Quotas = pick()
			cfg.Burst = 1 + choose.IntN(8)
			require.NoError(t, l.Update(func(c *throttle.Config) { *c = cfg }))
			require.NoError(t, g.Update(func(c *throttle.GroupConfig[int]) { c.Config = cfg }))
			for _, m := range models {
				m.decide(0)
				m.burst = cfg.Burst
				m.set(cfg.Quotas)
			}
		default:
			wait, why := m.decide(n)
			var d throttle.Decision
			switch {
			case why == "" && choose.IntN(2) == 0: // by a reservation
				var r *throttle.Reservation
				var err error
				if i == 0 {
					r, err = l.Reserve(t.Context(), n)
				} else {
					r, err = g.Reserve(t.Context(), i, n)
				}
				require.NoError(t, err, "event %d", event)
				taken := loan{Reservation: r, n: n}
				for _, q := range m.quotas {
					taken.ends = append(taken.ends, q.end)
				}
				m.loans = append(m.loans, taken)
				continue
			case i == 0:
				d = take(l, n)
			default:
				d = takeOf(g, i, n)
			}
			require.Equal(t, wait, d.RetryAfter, "event %d: %v", event, d)
			require.Equal(t, why == "", d.Admitted, "event %d: %v", event, d)
			if d.Admitted {
				require.Equal(t, m.remaining(), d.Remaining, "event %d: %v", event, d)
			}
			if why == throttle.OverQuota {
				require.NotZero(t, d.Quota, "event %d", event)
				require.Equal(t, d.Quota.N, d.Limit)
			}
		}
	}
	require.Zero(t, g.Stats().Overflow)
}

func TestQuotasMatchTheModel(t *testing.T) {
	play(t, 200, 5, func(t *testing.T, choose interface{ IntN(n int) int }) { playQuotas(t, choose, 600) })
}

// FuzzQuotas plays a script: two bytes for each choice of playQuotas.
func FuzzQuotas(f *testing.F) {
	scripts(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		synctest.Test(t, func(t *testing.T) { playQuotas(t, (*script)(&b), min(len(b)/2, 600)) })
	})
}

// The bounds of a calendar's windows, where the clocks change, and where they once changed in
// a way that package calendar's test of each zone's last changes does not meet.
func TestCalendarWindows(t *testing.T) {
	const layout = "2006-01-02 15:04"
	for _, c := range []struct {
		zone          string
		per           throttle.Period
		now           string // UTC
		length, until time.Duration
	}{
		{"Europe/Berlin", throttle.Day, "2026-03-28 23:00", 23 * time.Hour, 23 * time.Hour}, // the clocks are set forward
		{"Europe/Berlin", throttle.Day, "2026-10-24 22:00", 25 * time.Hour, 25 * time.Hour}, // and back
		{"Europe/Berlin", throttle.Month, "2026-03-31 21:59", 31*24*time.Hour - time.Hour, time.Minute},
		{"", throttle.Month, "2028-02-28 12:00", 29 * 24 * time.Hour, 36 * time.Hour},
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
				l := throttle.New(throttle.Config{Quotas: []throttle.Quota{{N: 1, Window: throttle.Window{Per: c.per, In: in}}}})
				require.True(t, l.Allow(), "a window long before")
				time.Sleep(time.Until(now))
				d := take(l, 1)
				require.True(t, d.Admitted)
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
