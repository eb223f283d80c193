package throttle

import (
	"time"

	"github.com/go-resilience/resilience/throttle/internal/bucket"
)

// terms are a limit of which only the tokens that are spent change.
type terms struct {
	rate   bucket.Rate
	burst  int
	cfg    *Config       // with its defaults filled in; never written to
	least  int           // the least important level
	room   []bucket.Time // of the tokens that a level may spend of the burst at once, by level
	most   []int         // tokens that a call may take, by level: of the burst and of each quota
	quotas []quotaTerms
}

func newTerms(cfg *Config) *terms {
	limit := cfg.limit()
	t := &terms{cfg: cfg, least: cfg.Levels - 1, quotas: newQuotaTerms(cfg.Quotas, cfg.Levels, cfg.Reserve)}
	t.rate, t.burst = limit.rate()
	for level := range cfg.Levels {
		most := roomOf(t.burst, cfg.Reserve, level)
		t.room = append(t.room, t.rate.Of(most))
		for i := range t.quotas {
			most = min(most, t.quotas[i].room[level])
		}
		t.most = append(t.most, most)
	}
	return t
}

// A measure is a limit at a moment: what decides on a call. It has four words, as the
// compiler keeps no larger struct in registers.
type measure struct {
	*terms
	now int64 // in nanoseconds, on the clock of the Limiter or Group
	tat bucket.Time
}

// cannot reports whether n tokens are more than a level can ever spend at once.
func (m measure) cannot(n, level int) bool {
	return n > m.most[level]
}

// fits reports whether n tokens are there for a level. They are never more than it can
// spend at once.
func (m measure) fits(n, level int) bool {
	return !m.rate.Due(m.tat, m.rate.Of(n), m.room[level]).After(m.now)
}

// pay returns a tat after n tokens have been taken.
func (m measure) pay(tat bucket.Time, n int) bucket.Time {
	return m.rate.Pay(tat, m.now, m.rate.Of(n))
}

// back returns a tat after n tokens have been given back.
func (m measure) back(tat bucket.Time, n int) bucket.Time {
	return m.rate.Back(tat, m.now, m.rate.Of(n))
}

// until returns the time until t.
func (m measure) until(t bucket.Time) time.Duration { return time.Duration(max(t.Up()-m.now, 0)) }

// refusal returns why n tokens could not be taken.
func (m measure) refusal(b *bound, n, level int) Reason {
	if b != nil {
		return b.why
	}
	if m.cannot(n, level) {
		return TooCostly
	}
	return OverLimit
}

// wait returns the time until n tokens could be taken.
func (m measure) wait(n, level int) time.Duration {
	switch {
	case n <= 0:
		return 0
	case m.cannot(n, level):
		return never
	}
	return m.until(m.rate.Due(m.tat, m.rate.Of(n), m.room[level]))
}

// size returns the Limit of what is not about one quota: the burst, if there is a rate.
func (t *terms) size() int {
	if t.rate.IsUnlimited() {
		return t.quotas[0].N
	}
	return t.burst
}

// ahead returns the time of the tokens that are missing in the burst.
func (m measure) ahead() bucket.Time {
	now := bucket.Time{NS: m.now}
	return m.rate.Sub(bucket.Later(m.tat, now), now)
}

// remaining returns how many tokens a level could take from the burst.
func (m measure) remaining(level int) int {
	return m.rate.Tokens(m.rate.Sub(m.room[level], m.ahead()))
}

func (m measure) decision(b *bound, ok bool, n, level int) Decision {
	if b != nil {
		return b.Decision
	}
	d := m.about(-1, nil, moment{}, level)
	d.OK = ok
	if !ok {
		d.RetryAfter = m.wait(n, level)
	}
	return d
}
