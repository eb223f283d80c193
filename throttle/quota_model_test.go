package throttle_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
	"time"
	_ "time/tzdata" // for machines without time zones

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/throttle"
)

// A quotaModel is the model of one quota.
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
		q.end = now.Add(q.Every)
		y, m, d := now.In(orUTC(q.In)).Date()
		switch q.Per { // midnight is there once a day in the zones of this model
		case throttle.Day:
			q.end = time.Date(y, m, d+1, 0, 0, 0, 0, orUTC(q.In))
		case throttle.Month:
			q.end = time.Date(y, m+1, 1, 0, 0, 0, 0, orUTC(q.In))
		}
	}
	q.used += n
}

func orUTC(in *time.Location) *time.Location {
	if in == nil {
		return time.UTC
	}
	return in
}

// room returns how many tokens of a limit the last of two levels may spend.
func room(limit int, reserve float64) int {
	return limit - min(int(float64(limit)*reserve+1e-9), limit-1)
}

// A limitModel is the model of a limit with quotas.
type limitModel struct {
	bucket
	quotas  []quotaModel
	reserve float64
	spent   int
}

// set makes quotas the present ones. Those with the window of one before keep its tokens.
func (m *limitModel) set(quotas []throttle.Quota) {
	last := m.quotas
	m.quotas = nil
	for _, q := range quotas {
		next := quotaModel{Quota: q}
		for _, old := range last {
			if old.Every == q.Every && old.Per == q.Per && old.In == q.In {
				next.used, next.end = old.used, old.end
			}
		}
		m.quotas = append(m.quotas, next)
	}
}

// decide takes n tokens, or returns how long that is impossible and why.
func (m *limitModel) decide(n int, take bool) (wait time.Duration, why throttle.Reason) {
	m.now = time.Now()
	b := room(m.burst, m.reserve)
	if m.full.Before(m.now) {
		m.full = m.now
	}
	costly := n > b
	if left := m.full.Sub(m.now) + time.Duration(n-b)*m.token; n > 0 && left > 0 {
		wait, why = left, throttle.OverLimit
	}
	for i := range m.quotas {
		q := &m.quotas[i]
		q.advance(m.now)
		costly = costly || n > room(q.N, m.reserve)
		if n > 0 && q.used+n > room(q.N, m.reserve) {
			wait, why = max(wait, q.end.Sub(m.now)), throttle.OverQuota
		}
	}
	if costly {
		return math.MaxInt64, throttle.TooCostly
	}
	if why == "" && take {
		m.bucket.take(n)
		for i := range m.quotas {
			m.quotas[i].take(n, m.now)
		}
		m.spent += n
	}
	return wait, why
}

func (m *limitModel) refund(n int) {
	m.now = time.Now()
	n = min(n, m.spent)
	m.spent -= n
	m.bucket.refund(n)
	for i := range m.quotas {
		q := &m.quotas[i]
		q.advance(m.now)
		q.used -= min(n, q.used)
	}
}

// remaining returns the tokens that are left of what binds, off later.
func (m *limitModel) remaining(off time.Duration) int {
	left := int((time.Duration(room(m.burst, m.reserve))*m.token - max(0, time.Until(m.full)-off)) / m.token)
	for i := range m.quotas {
		left = min(left, room(m.quotas[i].N, m.reserve)-m.quotas[i].used)
	}
	return max(left, 0)
}

// playQuotas compares the decisions of a Limiter and of a Group, which evicts keys, with
// the model. They round the debt of the rate to nanoseconds.
func playQuotas(t *testing.T, choose interface{ IntN(n int) int }, events int) {
	berlin, err := time.LoadLocation("Europe/Berlin")
	require.NoError(t, err)
	token := []time.Duration{time.Millisecond, 100 * time.Millisecond, time.Second, time.Hour}[choose.IntN(4)]
	all := []throttle.Quota{
		{Every: time.Second}, {Every: time.Hour}, {Per: throttle.Day}, {Per: throttle.Day, In: berlin}, {Per: throttle.Month, In: berlin},
	}
	pick := func() (quotas []throttle.Quota) {
		for _, q := range all {
			if choose.IntN(3) == 0 {
				q.N = 1 + choose.IntN(12)
				quotas = append(quotas, q)
			}
		}
		return quotas
	}
	cfg := throttle.Config{Rate: every(token), Burst: 1 + choose.IntN(8), Quotas: pick()}
	var reserve float64
	if choose.IntN(2) == 0 {
		reserve = 0.3
		cfg.Levels, cfg.Reserve, cfg.Priority = 2, []float64{reserve}, func(context.Context) int { return 1 }
	}
	const off = 50 // ns
	const keys = 8 // one more than there is room for among those that are not idle
	l := throttle.New(cfg)
	g := throttle.NewGroup(throttle.GroupConfig[int]{Config: cfg, MaxKeys: keys, IdleAfter: 1})
	models := make([]*limitModel, 1+keys) // the first is of l
	own := make([]bool, 1+keys)
	for i := range models {
		models[i] = &limitModel{bucket: bucket{token: token, burst: cfg.Burst, full: time.Now()}, reserve: reserve}
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
		case 4:
			wait, _ := m.decide(1, false)
			d := l.Peek()
			if i > 0 {
				d = g.Peek(i)
			}
			require.InDelta(t, wait, d.RetryAfter, off, "event %d", event)
		case 5:
			if i > 0 {
				if !m.full.After(time.Now()) {
					continue // the key may have been evicted, and then nothing is refunded
				}
				g.Refund(i, n)
			} else {
				l.Refund(n)
			}
			if i == 0 || slices.ContainsFunc(top(g, 100), func(u usage[int]) bool { return u.key == i }) {
				m.refund(n)
			}
		case 6:
			if choose.IntN(4) > 0 {
				continue
			}
			limit := throttle.Limit{Rate: cfg.Rate, Burst: cfg.Burst, Quotas: pick()}
			m.decide(0, false)
			if i == 0 {
				m.set(limit.Quotas)
				require.NoError(t, setLimit(l, limit))
			} else if own[i] = !own[i]; own[i] {
				m.set(limit.Quotas)
				require.NoError(t, g.Set(i, limit))
			} else {
				m.set(cfg.Quotas)
				require.NoError(t, g.Set(i, throttle.Limit{}))
			}
		case 7:
			if choose.IntN(8) > 0 {
				var snapshot bytes.Buffer
				require.NoError(t, g.Snapshot(&snapshot))
				g = throttle.NewGroup(throttle.GroupConfig[int]{Config: cfg, MaxKeys: keys, IdleAfter: 1})
				time.Sleep(token * time.Duration(choose.IntN(2)))
				require.NoError(t, g.Restore(&snapshot))
				for _, m := range models[1:] {
					m.spent = 0 // a call of the last process is not refunded
				}
				continue
			}
			cfg.Quotas = pick()
			require.NoError(t, setGroupLimit(g, throttle.Limit{Rate: cfg.Rate, Burst: cfg.Burst, Quotas: cfg.Quotas}))
			for j, m := range models[1:] {
				if m.decide(0, false); !own[1+j] {
					m.set(cfg.Quotas)
				}
			}
		default:
			wait, why := m.decide(n, true)
			var d throttle.Decision
			if i == 0 {
				d = l.Take(n)
			} else {
				d = g.Take(i, n)
			}
			require.InDelta(t, wait, d.RetryAfter, off, "event %d: %v", event, d)
			if (why == "") != d.OK {
				return // a matter of nanoseconds, which ends the comparison
			}
			if d.OK {
				require.Contains(t, []int{m.remaining(-off), m.remaining(off)}, d.Remaining, "event %d: %v", event, d)
			}
			if why == throttle.OverQuota {
				require.NotZero(t, d.Quota, "event %d", event)
				require.Equal(t, d.Quota.N, d.Limit)
			}
		}
	}
}

func TestQuotasAreWindowsBesideABucket(t *testing.T) {
	for seed := range uint64(60) {
		synctest.Test(t, func(t *testing.T) { playQuotas(t, rand.New(rand.NewPCG(seed, 5)), 1500) })
	}
}

// FuzzQuotas plays a script: two bytes for each choice of playQuotas.
func FuzzQuotas(f *testing.F) {
	for seed := range uint64(4) {
		random := rand.New(rand.NewPCG(seed, 6))
		var b []byte
		for range 300 {
			b = binary.LittleEndian.AppendUint16(b, uint16(random.Uint32()))
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		synctest.Test(t, func(t *testing.T) { playQuotas(t, (*script)(&b), min(len(b)/2, 600)) })
	})
}
