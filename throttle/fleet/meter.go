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

// A Meter is one of the limits that a call uses, with the call's cost. The key of a meter identifies the limit in all
// processes. With the limit [throttle.None], a meter refuses every call that takes its tokens or a slot. With the
// limit [throttle.Unlimited], a meter refuses calls only during a cooldown; see [Limits.Cooldown]. A limit of 0 is
// invalid. If a 0 from another source means "nothing", convert the 0 to None.
type Meter struct {
	*kind
	key       string
	tag, name string // the parts of key before and after its first slash
	limit     int64  // the burst, N of a quota, or the number of slots; throttle.None or throttle.Unlimited
	perSecond float64
	window    throttle.Window
	cost      int64
	estimate  bool
	noRate    bool // Burst was called, but the meter is not a Rate
}

// A kind is a kind of meter. It contains the kind's code in the script, the name and the range of the limit, and the
// number of script units in one token.
type kind struct {
	code, limitName, rangeText string
	most, unit                 int64
}

var (
	rates  = &kind{"r", "Burst", "1 to 4e9, throttle.None or throttle.Unlimited", 4e9, 1_000_000}
	quotas = &kind{"q", "n", "1 to 1e15, throttle.None or throttle.Unlimited", 1e15, 1}
	slots  = &kind{"s", "n", "1 to 1e6, throttle.None or throttle.Unlimited", 1e6, 1}
)

// newMeter returns a meter of the kind k.
func newMeter(k *kind, key string, limit int64, cost int) Meter {
	m := Meter{kind: k, key: key, limit: limit, cost: int64(cost)}
	m.tag, m.name, _ = strings.Cut(key, "/")
	return m
}

// Rate returns a meter that allows perSecond tokens a second, above 0 and at most 1e9. The meter's burst is the number
// of tokens of one second, rounded up; see [Meter.Burst]. The call takes cost tokens from the meter; cost may be 0.
func Rate(key string, perSecond float64, cost int) Meter {
	m := newMeter(rates, key, int64(math.Ceil(perSecond)), cost)
	m.perSecond = perSecond
	return m
}

// Quota returns a meter that allows n tokens, at most 1e15, in each window. The call takes cost tokens from the meter;
// cost may be 0.
// If you change the window, also change the key. If the key stays the same, the tokens that were taken in the old
// window count in the new window.
func Quota(key string, n int, window throttle.Window, cost int) Meter {
	m := newMeter(quotas, key, int64(n), cost)
	m.window = window
	return m
}

// Slots returns a meter that allows n concurrent reservations, at most 1e6. A reservation holds its slot until the
// reservation is settled or loses the slot; see [ErrLost]. If a process is killed, its slots become free when their
// leases end; see [Config.Lease].
func Slots(key string, n int) Meter { return newMeter(slots, key, int64(n), 0) }

// Burst returns a copy of m with a burst of n tokens, at most 4e9. n may also be [throttle.None] or
// [throttle.Unlimited]. The meter m must be a Rate. If its rate is None or Unlimited, Burst has no effect.
func (m Meter) Burst(n int) Meter {
	m.noRate = m.kind != rates
	if m.limit != throttle.None && m.limit != throttle.Unlimited {
		m.limit = int64(n)
	}
	return m
}

// Estimated returns a copy of m whose cost is an estimate. [Reservation.Settle] corrects the estimate.
func (m Meter) Estimated() Meter {
	m.estimate = true
	return m
}

// check returns an error that names the invalid meters of a call, or nil if all meters are valid. check builds texts
// only if a meter is invalid, because every call is checked.
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

// invalidField returns the name and the value of an invalid field of m, and the values that the field may have.
// before are the meters that precede m in the same call.
func (m *Meter) invalidField(before []Meter) (field string, value any, must string) {
	named := m.limit == throttle.None || m.limit == throttle.Unlimited
	switch {
	case m.kind == nil:
		return "", "Meter{}", "one that Rate, Quota or Slots returned"
	case len(before) > 0 && m.tag != before[0].tag:
		return ".key", strconv.Quote(m.key),
			fmt.Sprintf("one that begins with %q, as the first: a call's meters are on one node", before[0].tag)
	case slices.ContainsFunc(before, func(other Meter) bool { return other.name == m.name }): // "a" equals "a/"
		return ".key", strconv.Quote(m.key), "different from the keys of earlier meters"
	case m.kind == rates && m.perSecond != throttle.None && m.perSecond != throttle.Unlimited &&
		!(m.perSecond > 0 && m.perSecond <= 1e9):
		return ".perSecond", m.perSecond, "above 0 and at most 1e9, throttle.None or throttle.Unlimited"
	case m.noRate:
		return ".Burst", m.limit, "set only for a Rate"
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

// takes reports whether a call takes tokens or a slot of m.
func (m *Meter) takes() bool { return m.kind == slots || m.cost > 0 }

// refused returns the reason why m can never admit the call, or "" if m can admit the call.
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

// scriptLimit returns the limit that the script enforces. If the limit of m is None, only calls that take no tokens
// and no slot of m reach the script, so any limit is correct.
func (m *Meter) scriptLimit() int64 {
	switch {
	case m.limit == throttle.None:
		return 1
	case m.limit == throttle.Unlimited && m.kind == slots:
		return quotas.most // more slots than there can ever be
	case m.limit == throttle.Unlimited:
		return m.most
	}
	return m.limit
}

// scriptCost returns the cost that the script takes. If m has no limit, the script takes no tokens.
func (m *Meter) scriptCost() int64 {
	if m.limit == throttle.Unlimited {
		return 0
	}
	return m.cost
}

// arg returns the value that the script needs in addition to the limit and the cost:
//
//   - For a rate, the rate.
//   - For slots, the lease in microseconds.
//   - For a quota, the length of the window in microseconds or, for a calendar period, the times of the periods
//     around Redis's current time.
func (m *Meter) arg(r *Reservation) any {
	switch {
	case m.kind == rates:
		return max(m.perSecond, 1e-9) // the script divides by the rate, which may be None or Unlimited
	case m.kind == slots:
		return r.cfg.Lease.Microseconds()
	case m.window.Per == "":
		return m.window.Every.Microseconds()
	}
	s := m.calendar().Find(r.l.redisNow())
	return fmt.Sprintf("%d %d %d %d", s.Before/1000, s.Begin/1000, s.End/1000, s.After/1000)
}

// local returns the limit of this process's part of m. The part of slots is a quota whose window does not end: a slot
// is a token of this window, and the settlement refunds the token.
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

// endless is the length of a window that lasts longer than a process.
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

// key returns the Redis key of a meter's state, or of a reservation. Redis Cluster keeps all keys with the same text
// in braces on one node. Therefore the tag is in braces. The name and the tag must not contain other braces, and the
// text in braces must not be empty.
func (c *Config) key(tag, kind, name string) string {
	return encoder.Replace(c.Name) + ":{" + cmp.Or(encoder.Replace(tag), "%") + "}:" + kind + ":" + name
}

// encoder encodes braces as they are encoded in a URL. An encoded text never contains a single %, so a single % can
// represent an empty tag.
var encoder = strings.NewReplacer("%", "%25", "{", "%7B", "}", "%7D")
