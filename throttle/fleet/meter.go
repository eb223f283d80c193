package fleet

import (
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

// A Cost is how many tokens a call takes of a meter: 0 or more. [Estimate] makes one that
// Settle corrects.
type Cost int64

// Estimate returns the cost of a call that will use about n tokens.
func Estimate(n int64) Cost { return Cost(-1 - max(0, n)) }

// A Meter is one limit of a call. [Rate], [Quota] and [Slots] make one.
//
// Its key names it in all processes. What stands before its first slash names the node of a
// Redis Cluster that keeps it: that part is the same for all meters of a call.
type Meter struct {
	key       string
	tag, name string // the parts of key before and after its first slash
	kind      byte   // 'r', 'q' or 's'
	limit     int64  // the burst, N, or the number of slots
	perSecond float64
	window    throttle.Quota
	cost      int64
	estimate  bool
}

func newMeter(key string, kind byte, limit int64, cost Cost) Meter {
	m := Meter{key: key, kind: kind, limit: limit, cost: int64(cost)}
	m.tag, m.name, _ = strings.Cut(key, "/")
	if cost < 0 {
		m.cost, m.estimate = -1-m.cost, true
	}
	return m
}

// Rate allows perSecond tokens a second, and a second's worth of them at once: see
// [Meter.Burst]. It is above 0 and at most 1e9.
func Rate(key string, perSecond float64, cost Cost) Meter {
	m := newMeter(key, 'r', int64(math.Ceil(perSecond)), cost)
	m.perSecond = perSecond
	return m
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
	m := newMeter(key, 'q', n, cost)
	m.window, m.window.N = window, 0
	return m
}

// Slots allows n calls at once: reservations that have not been settled. Each has a lease,
// which the process renews, so that a process that was killed gives its slots back.
func Slots(key string, n int64) Meter { return newMeter(key, 's', n, 0) }

// kinds has what the limits of each kind are called, and may be.
var kinds = map[byte]struct {
	name, must string
	most       int64
}{'r': {"Burst", "1 to 4e9", 4e9}, 'q': {"n", "1 to 1e15", 1e15}, 's': {"n", "1 to 1e6", 1e6}}

// check returns what is wrong with the meters of a call. It makes texts only if something is, since
// each call is checked.
func check(meters []Meter) error {
	f := invalid.Fields{Type: "fleet.Config"}
	if len(meters) == 0 || len(meters) > 16 {
		f.Need(false, "Meters", len(meters), "1 to 16")
	}
	for i := range meters {
		m, first, at := &meters[i], meters[0].tag, "Meters["+strconv.Itoa(i)+"]."
		named := m.tag != "" && !strings.ContainsAny(m.tag, "{}")
		alone := !slices.ContainsFunc(meters[:i], func(other Meter) bool { return other.key == m.key })
		rated := m.kind != 'r' || m.perSecond > 0 && m.perSecond <= 1e9
		limited := m.limit >= 1 && m.limit <= kinds[m.kind].most
		if !named || m.tag != first || !alone || !rated || !limited {
			key := strconv.Quote(m.key)
			f.Need(named, at+"key", key, "one that begins with a text without braces")
			f.Need(m.tag == first, at+"key", key,
				fmt.Sprintf("one that begins with %q, as the first: a call's meters are on one node", first))
			f.Need(alone, at+"key", key, "another than those before it")
			f.Need(rated, at+"perSecond", m.perSecond, "above 0 and at most 1e9")
			f.Need(limited, at+kinds[m.kind].name, m.limit, kinds[m.kind].must)
		}
		if m.kind == 'q' {
			m.calendar().Check(&f, at)
		}
	}
	return f.Err()
}

func (m *Meter) calendar() calendar.Window {
	return calendar.Window{Every: m.window.Every, Per: string(m.window.Per), In: m.window.In, From: m.window.From}.Filled()
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
	c := m.calendar()
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
	slots  bool     // there are some among the meters
	keys   []string // of the script's take
	states []int    // the place of each meter's state in keys
}

// planOf returns the plan of a call, or what is wrong with its meters.
func (c *Config) planOf(meters []Meter) (*plan, error) {
	if err := check(meters); err != nil {
		return nil, err
	}
	p := &plan{meters: meters, keys: make([]string, 0, 2*len(meters)), states: make([]int, 0, len(meters))}
	for i := range meters {
		m := &meters[i]
		p.states = append(p.states, len(p.keys))
		p.keys = append(p.keys, c.key(m.tag, string(m.kind), m.name), c.key(m.tag, "c", m.name))
		if m.kind == 's' {
			p.slots = true
			p.keys = append(p.keys, c.key(m.tag, "w", m.name), c.key(m.tag, "p", m.name))
		}
	}
	return p, nil
}

// key returns the key of what is kept of a meter, or of a reservation.
func (c *Config) key(tag, kind, name string) string {
	return c.Name + ":{" + tag + "}:" + kind + ":" + name
}
