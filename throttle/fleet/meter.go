package fleet

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/go-resilience/resilience/internal/invalid"
	"github.com/go-resilience/resilience/throttle"
	"github.com/go-resilience/resilience/throttle/internal/calendar"
)

// A Cost is how many tokens a call takes of a meter: 0 or more.
type Cost int64

// Estimate returns a cost of about n tokens, which [Reservation.Settle] corrects.
func Estimate(n int64) Cost { return Cost(-1 - max(0, n)) }

// A Meter is one limit of a call. Its key names it in all processes.
type Meter struct {
	*kind
	key       string
	tag, name string // the parts of key before and after its first slash
	limit     int64  // the burst, N, or the number of slots
	perSecond float64
	window    throttle.Quota
	cost      int64
	estimate  bool
}

// A kind of meters. Its code is that of the script, which counts units of a token; its limits have
// a name, and are at most so many.
type kind struct {
	code, limitName, must string
	most, unit            int64
}

var (
	rates  = &kind{"r", "Burst", "1 to 4e9", 4e9, 1_000_000}
	quotas = &kind{"q", "n", "1 to 1e15", 1e15, 1}
	slots  = &kind{"s", "n", "1 to 1e6", 1e6, 1}
)

func newMeter(k *kind, key string, limit int64, cost Cost) Meter {
	m := Meter{kind: k, key: key, limit: limit, cost: int64(cost)}
	m.tag, m.name, _ = strings.Cut(key, "/")
	if cost < 0 {
		m.cost, m.estimate = -1-m.cost, true
	}
	return m
}

// Rate allows perSecond tokens a second, above 0 and at most 1e9, and a second's worth at once.
func Rate(key string, perSecond float64, cost Cost) Meter {
	m := newMeter(rates, key, int64(math.Ceil(perSecond)), cost)
	m.perSecond = perSecond
	return m
}

// Burst returns the meter of a Rate that allows n tokens at once, at most 4e9.
func (m Meter) Burst(n int64) Meter {
	m.limit = n
	return m
}

// Quota allows n tokens, at most 1e15, in each window, whose own N is not used. Another window needs
// another key, or what was taken of the old one counts in it.
func Quota(key string, n int64, window throttle.Quota, cost Cost) Meter {
	m := newMeter(quotas, key, n, cost)
	m.window, m.window.N = window, int(n)
	return m
}

// Slots allows n reservations at once that have not been settled, at most 1e6. Those of a process
// that was killed end with their Lease.
func Slots(key string, n int64) Meter { return newMeter(slots, key, n, 0) }

// check returns what is wrong with the meters of a call. It makes texts only if something is, because
// each call is checked.
func check(meters []Meter) error {
	f := invalid.Fields{Type: "fleet.Config"}
	if len(meters) == 0 || len(meters) > 16 {
		f.Need(false, "Meters", len(meters), "1 to 16")
	}
	for i := range meters {
		m := &meters[i]
		if field, value, must := m.wrong(meters[:i]); must != "" {
			f.Need(false, fmt.Sprintf("Meters[%d]%s", i, field), value, must)
		} else if m.kind == quotas {
			m.calendar().Check(&f, "Meters["+strconv.Itoa(i)+"].")
		}
	}
	return f.Err()
}

// wrong returns which field of m is wrong, if one is, and what it must be. before are the meters of the
// same call that come before it.
func (m *Meter) wrong(before []Meter) (field string, value any, must string) {
	switch {
	case m.kind == nil:
		return "", "Meter{}", "one that Rate, Quota or Slots has made"
	case m.tag == "" || strings.ContainsAny(m.tag, "{}"):
		return ".key", strconv.Quote(m.key), "one that begins with a text without braces"
	case len(before) > 0 && m.tag != before[0].tag:
		return ".key", strconv.Quote(m.key),
			fmt.Sprintf("one that begins with %q, as the first: a call's meters are on one node", before[0].tag)
	case slices.ContainsFunc(before, func(other Meter) bool { return other.name == m.name }): // also "a" and "a/"
		return ".key", strconv.Quote(m.key), "another than those before it"
	case m.kind == rates && !(m.perSecond > 0 && m.perSecond <= 1e9):
		return ".perSecond", m.perSecond, "above 0 and at most 1e9"
	case m.limit < 1 || m.limit > m.most:
		return "." + m.limitName, m.limit, m.must
	}
	return "", nil, ""
}

func (m *Meter) calendar() calendar.Window {
	return calendar.Window{Every: m.window.Every, Per: string(m.window.Per), In: m.window.In, From: m.window.From}.Filled()
}

// arg returns what the script needs of the meter besides its limit: the rate, the lease in
// microseconds, or the window at a time of Redis.
func (m *Meter) arg(r *Reservation) any {
	switch {
	case m.kind == rates:
		return m.perSecond
	case m.kind == slots:
		return r.cfg.Lease.Microseconds()
	case m.window.Per == "":
		return m.window.Every.Microseconds()
	}
	s := m.calendar().Find(r.l.redisNow())
	return fmt.Sprintf("%d %d %d %d", s.Before/1000, s.Begin/1000, s.End/1000, s.After/1000)
}

// local returns the limit of this process's part of a meter. A slot is a token of a window that does
// not end, and is given back.
func (m *Meter) local(instances int) throttle.Config {
	part := int(max(1, m.limit/int64(instances)))
	if m.kind == rates { // a Burst must refill within 36 years
		return throttle.Config{Rate: max(m.perSecond/float64(instances), float64(part)/1e9), Burst: part}
	}
	q := m.window
	q.N = part
	if m.kind == slots {
		q.Every = calendar.MaxTime
	}
	return throttle.Config{Quotas: []throttle.Quota{q}}
}

// key returns the key of what is kept of a meter, or of a reservation.
func (c *Config) key(tag, kind, name string) string {
	return c.Name + ":{" + tag + "}:" + kind + ":" + name
}
