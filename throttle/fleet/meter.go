package fleet

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/go-resilience/resilience/internal/invalid"
	"github.com/go-resilience/resilience/throttle"
	"github.com/go-resilience/resilience/throttle/internal/calendar"
)

// A Meter is one limit of a call. Its key identifies it in all processes. The limit of a meter may be
// [throttle.None], which refuses every call that takes something of it, or [throttle.Unlimited]; a 0 from elsewhere
// that means "nothing" must become None.
type Meter struct {
	*kind
	key       string
	tag, name string // the parts of key before and after its first slash
	limit     int64  // the burst, N, or the number of slots; throttle.None or throttle.Unlimited
	perSecond float64
	window    throttle.Window
	cost      int64
	estimate  bool
}

// A kind of meters has the code of the script, how many units of the script are a token, and the name and the range
// of its limit.
type kind struct {
	code, limitName, rangeText string
	most, unit                 int64
}

var (
	rates  = &kind{"r", "Burst", "1 to 4e9, throttle.None or throttle.Unlimited", 4e9, 1_000_000}
	quotas = &kind{"q", "n", "1 to 1e15, throttle.None or throttle.Unlimited", 1e15, 1}
	slots  = &kind{"s", "n", "1 to 1e6, throttle.None or throttle.Unlimited", 1e6, 1}
)

// newMeter returns a meter of a kind.
func newMeter(k *kind, key string, limit int64, cost int) Meter {
	m := Meter{kind: k, key: key, limit: limit, cost: int64(cost)}
	m.tag, m.name, _ = strings.Cut(key, "/")
	return m
}

// Rate returns a meter that allows perSecond tokens a second, at most 1e9, and a second's worth at once. The
// call takes cost of them, which may be 0.
func Rate(key string, perSecond float64, cost int) Meter {
	m := newMeter(rates, key, int64(math.Ceil(perSecond)), cost)
	m.perSecond = perSecond
	return m
}

// Quota returns a meter that allows n tokens, at most 1e15, in each window. A different window needs a different key,
// or the tokens that were taken of the old window count in the new one.
func Quota(key string, n int, window throttle.Window, cost int) Meter {
	m := newMeter(quotas, key, int64(n), cost)
	m.window = window
	return m
}

// Slots returns a meter that allows n unsettled reservations at once, at most 1e6. The slots of a process that was
// killed are free after their Lease.
func Slots(key string, n int) Meter { return newMeter(slots, key, int64(n), 0) }

// Burst returns a copy of a Rate that allows n tokens at once, at most 4e9.
func (m Meter) Burst(n int) Meter {
	if m.limit != throttle.None && m.limit != throttle.Unlimited {
		m.limit = int64(n)
	}
	return m
}

// Estimated returns a copy of m whose cost is an estimate that [Reservation.Settle] corrects.
func (m Meter) Estimated() Meter {
	m.estimate = true
	return m
}

// check returns an error that names the invalid meters of a call, or nil. It builds texts only if a meter is invalid,
// because every call is checked.
func check(meters []Meter) error {
	f := invalid.Fields{Type: "fleet.Config"}
	if len(meters) == 0 || len(meters) > 16 {
		f.Need(false, "Meters", len(meters), "1 to 16")
	}
	for i := range meters {
		m := &meters[i]
		if field, value, must := m.invalidField(meters[:i]); must != "" {
			f.Need(false, fmt.Sprintf("Meters[%d]%s", i, field), value, must)
		} else if m.kind == quotas {
			m.calendar().Check(&f, "Meters["+strconv.Itoa(i)+"].")
		}
	}
	return f.Err()
}

// invalidField returns an invalid field of m and the values that it may have. before are the meters of the same call
// that come before m.
func (m *Meter) invalidField(before []Meter) (field string, value any, must string) {
	named := m.limit == throttle.None || m.limit == throttle.Unlimited
	switch {
	case m.kind == nil:
		return "", "Meter{}", "one that Rate, Quota or Slots returned"
	case len(before) > 0 && m.tag != before[0].tag:
		return ".key", strconv.Quote(m.key),
			fmt.Sprintf("one that begins with %q, as the first: a call's meters are on one node", before[0].tag)
	case slices.ContainsFunc(before, func(other Meter) bool { return other.name == m.name }): // also "a" and "a/"
		return ".key", strconv.Quote(m.key), "another than those before it"
	case m.kind == rates && m.perSecond != throttle.None && m.perSecond != throttle.Unlimited &&
		!(m.perSecond > 0 && m.perSecond <= 1e9):
		return ".perSecond", m.perSecond, "above 0 and at most 1e9, throttle.None or throttle.Unlimited"
	case !named && (m.limit < 1 || m.limit > m.most):
		return "." + m.limitName, m.limit, m.rangeText
	case m.cost < 0:
		return ".cost", m.cost, "0 or more"
	}
	return "", nil, ""
}

// calendar returns the window of a quota with its defaults filled in.
func (m *Meter) calendar() calendar.Window {
	w := m.window
	return calendar.Window{Every: w.Every, Per: string(w.Per), In: w.In, From: w.From, At: w.At}.Filled()
}

// takes reports whether a call takes something of m.
func (m *Meter) takes() bool { return m.kind == slots || m.cost > 0 }

// refused returns the reason for which no call can ever be admitted by m, or "".
func (m *Meter) refused() throttle.Reason {
	switch {
	case !m.takes() || m.limit == throttle.Unlimited:
		return ""
	case m.limit == throttle.None && m.kind == quotas:
		return throttle.OverQuota
	case m.limit == throttle.None:
		return throttle.OverLimit
	case m.cost > m.limit:
		return throttle.TooCostly
	}
	return ""
}

// scriptLimit returns the limit that the script enforces. A meter of None gets here only with calls that take
// nothing.
func (m *Meter) scriptLimit() int64 {
	switch {
	case m.limit == throttle.None:
		return 1
	case m.limit == throttle.Unlimited && m.kind == slots:
		return quotas.most // more than there can ever be
	case m.limit == throttle.Unlimited:
		return m.most
	}
	return m.limit
}

// scriptCost returns the cost that the script takes. Of a meter without a limit it takes nothing.
func (m *Meter) scriptCost() int64 {
	if m.limit == throttle.Unlimited {
		return 0
	}
	return m.cost
}

// arg returns the value that the script needs besides the limit: the rate, the lease in microseconds, or the window
// at a time of Redis.
func (m *Meter) arg(r *Reservation) any {
	switch {
	case m.kind == rates:
		return max(m.perSecond, 1e-9) // also of None and Unlimited
	case m.kind == slots:
		return r.cfg.Lease.Microseconds()
	case m.window.Per == "":
		return m.window.Every.Microseconds()
	}
	s := m.calendar().Find(r.l.redisNow())
	return fmt.Sprintf("%d %d %d %d", s.Before/1000, s.Begin/1000, s.End/1000, s.After/1000)
}

// local returns this process's part of the limit. A slot is a token of a window that does not end; it is given back.
func (m *Meter) local(instances int) throttle.Config {
	part := int(m.limit)
	if part > 0 {
		part = max(1, part/instances)
	}
	if m.kind == rates {
		if m.perSecond < 0 || m.limit < 0 {
			return throttle.Config{Rate: cmp.Or(min(m.perSecond, 0), float64(m.limit))}
		}
		// A burst must refill within 36 years.
		return throttle.Config{Rate: max(m.perSecond/float64(instances), float64(part)/1e9), Burst: part}
	}
	q := throttle.Quota{N: part, Window: m.window}
	if m.kind == slots {
		q.Window = throttle.Window{Every: endless}
	}
	return throttle.Config{Quotas: []throttle.Quota{q}}
}

// endless is a window that outlives a process.
const endless time.Duration = calendar.MaxTime

// refusal returns the error of a call that m refuses.
func (m *Meter) refusal(cfg *Config, reason throttle.Reason) *throttle.LimitedError {
	e := &throttle.LimitedError{
		Name: cfg.Name, Key: m.key, Reason: reason, Limit: int(max(0, m.limit)), Cost: int(m.cost),
	}
	if m.kind == quotas {
		e.Quota = throttle.Quota{N: int(m.limit), Window: m.window}
	}
	if m.limit == throttle.None || reason == throttle.TooCostly {
		e.After = math.MaxInt64
	}
	return e
}

// key returns the Redis key of a meter's state, or of a reservation. The braces make Redis Cluster keep all keys of a
// tag on one node, so there must be no others before the end of the tag, and the tag must not be empty there.
func (c *Config) key(tag, kind, name string) string {
	return encoder.Replace(c.Name) + ":{" + cmp.Or(encoder.Replace(tag), "%") + "}:" + kind + ":" + name
}

// encoder encodes braces as in a URL. An encoded text never contains a single %, which stands for an empty tag.
var encoder = strings.NewReplacer("%", "%25", "{", "%7B", "}", "%7D")
