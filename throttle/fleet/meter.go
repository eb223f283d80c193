package fleet

import (
	"cmp"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/go-resilience/resilience/internal/invalid"
	"github.com/go-resilience/resilience/throttle"
	"github.com/go-resilience/resilience/throttle/internal/calendar"
)

// A Cost is how many tokens a call takes of a meter: 0 or more. [Estimate] makes one that
// Settle corrects.
type Cost int64

// Estimate returns the cost of a call that will use about n tokens.
func Estimate(n int64) Cost { return Cost(-1 - max(0, n)) }

func (c Cost) tokens() (n int64, estimate bool) {
	if c < 0 {
		return int64(-1 - c), true
	}
	return int64(c), false
}

// A Meter is one limit of a call. [Rate], [Quota] and [Slots] make one.
//
// Its key names it in all processes. What stands before its first slash names the node of a
// Redis Cluster that keeps it: that part is the same for all meters of a call.
type Meter struct {
	key       string
	kind      byte // 'r', 'q' or 's'
	perSecond float64
	limit     int64 // the burst, N, or the number of slots
	window    throttle.Quota
	cost      Cost
}

// Rate allows perSecond tokens a second, and a second's worth of them at once: see
// [Meter.Burst]. It is above 0 and at most 1e9.
func Rate(key string, perSecond float64, cost Cost) Meter {
	return Meter{key: key, kind: 'r', perSecond: perSecond, limit: int64(math.Ceil(perSecond)), cost: cost}
}

// Burst returns the meter of a Rate with n tokens that may be taken at once after a pause: at
// most 4e9.
func (m Meter) Burst(n int64) Meter {
	m.limit = n
	return m
}

// Quota allows n tokens, at most 1e15, in each window: throttle.Quota{Per: throttle.Day},
// throttle.Quota{Every: time.Hour} or throttle.Month.From(date). The N of window is not used.
func Quota(key string, n int64, window throttle.Quota, cost Cost) Meter {
	window.N = 0
	return Meter{key: key, kind: 'q', limit: n, window: window, cost: cost}
}

// Slots allows n calls at once: reservations that have not been settled. Each has a lease,
// which the process renews, so that a process that was killed gives its slots back.
func Slots(key string, n int64) Meter { return Meter{key: key, kind: 's', limit: n} }

// split returns the parts of a key before and after its first slash.
func split(key string) (tag, name string) {
	tag, name, _ = strings.Cut(key, "/")
	return tag, name
}

// check returns what is wrong with the meters of a call.
func check(meters []Meter) error {
	f := invalid.Fields{Type: "fleet.Config"}
	f.Need(len(meters) > 0 && len(meters) <= 16, "Meters", len(meters), "1 to 16")
	seen := map[string]bool{}
	for i, m := range meters {
		at := fmt.Sprintf("Meters[%d].", i)
		tag, _ := split(m.key)
		first, _ := split(meters[0].key)
		f.Need(tag != "" && !strings.ContainsAny(tag, "{}"), at+"key", fmt.Sprintf("%q", m.key), "one that begins with a text without braces")
		f.Need(tag == first, at+"key", fmt.Sprintf("%q", m.key), fmt.Sprintf("one that begins with %q, as the first: a call's meters are on one node", first))
		f.Need(!seen[m.key], at+"key", fmt.Sprintf("%q", m.key), "another than those before it")
		seen[m.key] = true
		switch m.kind {
		case 'r':
			f.Need(m.perSecond > 0 && m.perSecond <= 1e9, at+"perSecond", m.perSecond, "above 0 and at most 1e9")
			f.Need(m.limit >= 1 && m.limit <= 4e9, at+"Burst", m.limit, "1 to 4e9")
		case 'q':
			f.Need(m.limit >= 1 && m.limit <= 1e15, at+"n", m.limit, "1 to 1e15")
			m.window.CheckWindow(&f, at)
		default:
			f.Need(m.limit >= 1 && m.limit <= 1e6, at+"n", m.limit, "1 to 1e6")
		}
	}
	return f.Err()
}

// unit is by what the script counts the tokens of the meter.
func (m *Meter) unit() int64 {
	if m.kind == 'r' {
		return 1_000_000
	}
	return 1
}

// arg returns what the script needs of the meter besides its limit: the rate, the lease in
// microseconds, or the window at a time of Redis.
func (m *Meter) arg(lease time.Duration, now time.Time) any {
	switch {
	case m.kind == 'r':
		return m.perSecond
	case m.kind == 's':
		return lease.Microseconds()
	case m.window.Per == "":
		return m.window.Every.Microseconds()
	}
	c := calendar.Calendar{Months: m.window.Per == throttle.Month, Day: cmp.Or(m.window.From, 1), In: m.window.In}
	if c.In == nil {
		c.In = time.UTC
	}
	this := c.Find(now)
	last, next := c.Find(time.Unix(0, this.Begin-1)), c.Find(time.Unix(0, this.End))
	return fmt.Sprintf("%d %d %d %d", last.Begin/1000, this.Begin/1000, this.End/1000, next.End/1000)
}

// local returns the configuration of this process's part of a Rate or a Quota.
func (m *Meter) local(instances int) throttle.Config {
	part := int(max(1, m.limit/int64(instances)))
	if m.kind == 'r' {
		return throttle.Config{Rate: m.perSecond / float64(instances), Burst: part}
	}
	q := m.window
	q.N = part
	return throttle.Config{Quotas: []throttle.Quota{q}}
}

// A plan is what a call is to take.
type plan struct {
	meters []Meter
	tag    string
	keys   []string // of the script's take
	states []int    // the place of each meter's state in keys
}

// planOf returns the plan of a call, or what is wrong with its meters.
func (c *Config) planOf(meters []Meter) (*plan, error) {
	if err := check(meters); err != nil {
		return nil, err
	}
	tag, _ := split(meters[0].key)
	p := &plan{meters: meters, tag: tag}
	for _, m := range meters {
		_, name := split(m.key)
		key := func(kind string) string { return c.key(tag, kind) + name }
		p.states = append(p.states, len(p.keys))
		p.keys = append(p.keys, key(string(m.kind)), key("c"))
		if m.kind == 's' {
			p.keys = append(p.keys, key("w"), key("p"))
		}
	}
	return p, nil
}

// key returns the beginning of the keys of a kind and a tag.
func (c *Config) key(tag, kind string) string { return c.Name + ":{" + tag + "}:" + kind + ":" }
