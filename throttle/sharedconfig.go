package throttle

import (
	"cmp"
	"context"
	"math"
	"slices"
	"strconv"
	"time"

	"github.com/go-resilience/resilience/internal/invalid"
	"github.com/go-resilience/resilience/throttle/internal/shared"
)

// An OutagePolicy says what a [Shared] does while it cannot reach Redis.
// The zero value means LimitLocally.
type OutagePolicy string

const (
	// LimitLocally admits calls at this instance's part of the limit. It keeps up to 100
	// limits of LimitFor and Set apart; keys with any other have the part of Rate, Burst and
	// Quotas.
	LimitLocally OutagePolicy = "limit locally"
	// RefuseAll refuses every call.
	RefuseAll OutagePolicy = "refuse all"
	// AdmitAll admits every call.
	AdmitAll OutagePolicy = "admit all"
)

const (
	maxSharedRate = 1e9
	defaultPrefix = "throttle:"
)

// SharedConfig says how a [Shared] works.
type SharedConfig struct {
	// Name is the name of the limit: all instances with the same Prefix and Name share
	// one. It appears in errors, events and figures. It is required. Avoid a slash: the
	// Name "a" with the key "b/c" and the Name "a/b" with the key "c" share one key in
	// Redis.
	Name string

	// Prefix begins each key in Redis. The Name follows and, for a call with a key, a
	// slash and the key. Empty means "throttle:".
	Prefix string

	// Eval runs a Lua script on Redis 5 or later and returns its result: a list of
	// integers. It always gets the same script. It runs on a goroutine of its own, with
	// the values of the call's ctx, and has a RetryEvery more than Timeout: the tokens of a
	// late answer pay for what was admitted without it. It is required. With
	// github.com/redis/go-redis/v9 it is resilienceredis.Eval(client).
	Eval func(ctx context.Context, script string, keys []string, args ...any) (any, error)

	// Rate, Burst and Quotas are those of each key, as in [Config], for all instances
	// together. Rate is at most 1e9. The periods of a calendar are those of the clock of
	// Redis, in the time zones that this instance knows.
	Rate   float64
	Burst  int
	Quotas []Quota

	// LimitFor, if not nil, returns the limit of a key, such as that of its plan. The zero
	// Limit means Rate, Burst and Quotas. All instances must return the same. The limit
	// must be valid: a call for the key panics otherwise. LimitFor is called for each call,
	// except those of the empty key and of a key that [Shared.Set] decides about, by
	// several goroutines.
	LimitFor func(key string) Limit

	// Levels, Priority, Reserve and Cost are as in [Config].
	Levels   int
	Priority func(context.Context) int
	Reserve  []float64
	Cost     func(context.Context) int

	// Timeout is how long a call waits for the answer of Redis. Zero means 50 ms.
	Timeout time.Duration

	// OnOutage says what to do with a call that gets no answer of Redis in time, or
	// something else than the script returns. Zero means LimitLocally.
	OnOutage OutagePolicy

	// Instances is the number of instances that share the limit, or an upper bound of
	// it. LimitLocally requires it: in an outage each instance admits Rate / Instances,
	// and of the burst and of each quota a part / Instances, rounded down, but at least 1.
	Instances int

	// RetryEvery is how often one call tries Redis during an outage. The other calls do
	// not wait for it. Zero means a second.
	RetryEvery time.Duration
}

// Validate returns an error that names each invalid field, or nil.
func (c SharedConfig) Validate() error {
	f := invalid.Fields{Type: "throttle.SharedConfig"}
	c.validate(&f)
	return f.Err()
}

func (c SharedConfig) validate(f *invalid.Fields) {
	f.Need(c.Name != "", "Name", `""`, "set: it names the limit that is shared")
	f.Need(c.Eval != nil, "Eval", "nil", "set")
	checkShared(f, c.limit())
	checkLevels(f, c.Levels, c.Priority)
	checkReserve(f, c.Levels, c.Reserve)
	f.Need(c.Timeout >= 0, "Timeout", c.Timeout, "0 (for 50 ms) or more")
	policies := []OutagePolicy{"", LimitLocally, RefuseAll, AdmitAll}
	f.Need(slices.Contains(policies, c.OnOutage), "OnOutage", strconv.Quote(string(c.OnOutage)), `"limit locally", "refuse all" or "admit all"`)
	f.Need(c.Instances >= 0, "Instances", c.Instances, "0 or more")
	f.Need(c.Instances != 0 || cmp.Or(c.OnOutage, LimitLocally) != LimitLocally, "Instances", c.Instances, "1 or more where OnOutage is LimitLocally: each instance admits its part")
	f.Need(c.RetryEvery >= 0, "RetryEvery", c.RetryEvery, "0 (for a second) or more")
	if f.Err() == nil {
		f.Need(c.withDefaults().localOf().Validate() == nil, "Instances", c.Instances, "fewer: the part of an instance is too small a rate")
	}
}

// withDefaults returns a valid c with its zero fields filled in. It shares no memory
// with c.
func (c SharedConfig) withDefaults() SharedConfig {
	c.Prefix = cmp.Or(c.Prefix, defaultPrefix)
	c.setLimit(c.limit().withDefaults())
	c.Levels = cmp.Or(c.Levels, 1)
	c.Reserve = reserveOf(c.Levels, c.Reserve)
	c.Timeout = cmp.Or(c.Timeout, 50*time.Millisecond)
	c.OnOutage = cmp.Or(c.OnOutage, LimitLocally)
	c.Instances = cmp.Or(c.Instances, 1)
	c.RetryEvery = cmp.Or(c.RetryEvery, time.Second)
	return c
}

func (c *SharedConfig) limit() Limit { return Limit{c.Rate, c.Burst, c.Quotas} }

func (c *SharedConfig) setLimit(l Limit) { c.Rate, c.Burst, c.Quotas = l.Rate, l.Burst, l.Quotas }

// checkShared records what is wrong with the limit of a Shared.
func checkShared(f *invalid.Fields, l Limit) {
	if l.Rate > maxSharedRate || !(l.Rate > 0) && (l.Rate != 0 || len(l.Quotas) == 0) {
		f.Need(false, "Rate", l.Rate, "above 0 and at most 1e9 tokens a second")
		return
	}
	l.validate(f)
}

// of returns the Config of a limit, for c with its defaults filled in.
func (c SharedConfig) of(l Limit) *Config {
	cfg := &Config{Name: c.Name, Levels: c.Levels, Priority: c.Priority, Reserve: c.Reserve}
	cfg.setLimit(l)
	return cfg
}

// local returns this instance's part of a limit, for c with its defaults filled in.
func (c SharedConfig) local(l Limit) GroupConfig[string] {
	return GroupConfig[string]{Config: *c.of(l.part(c.Instances))}
}

func (c SharedConfig) localOf() GroupConfig[string] { return c.local(c.limit()) }

// sharedTerms are a limit in the units of the script, too.
type sharedTerms struct {
	*terms
	shared.Terms
	cfg    *SharedConfig // with its defaults filled in; never written to
	limit  Limit         // with its defaults filled in
	window time.Duration
	base   bool // whether it is the limit of cfg
}

func newSharedTerms(c *SharedConfig, l Limit) *sharedTerms {
	t := &sharedTerms{terms: newTerms(c.of(l)), cfg: c, limit: l, window: windowOf(l.Rate, l.Burst)}
	t.Terms = shared.Terms{Name: c.Name, Timeout: c.Timeout, RetryEvery: c.RetryEvery, Instances: c.Instances, Eval: c.Eval}
	for i := range t.quotas {
		q := &t.quotas[i]
		t.Quotas = append(t.Quotas, shared.Quota{Window: q.window(), Room: q.room, Times: q.times})
	}
	if l.Rate != 0 {
		whole, part := math.Modf(1e6 / l.Rate)
		t.Token = shared.Micros{Whole: uint64(whole), Part: uint64(math.Ceil(part * (1 << 32)))}
	}
	for level := range c.Levels {
		room := t.Token.Times(roomOf(l.Burst, c.Reserve, level))
		if l.Rate == 0 { // only quotas limit; what other instances hold as the debt stays
			room = shared.Micros{Whole: 1e15}
		}
		t.Room = append(t.Room, room)
	}
	return t
}

// callOf returns the call of ctx for key, for one token.
func (t *sharedTerms) callOf(ctx context.Context, key string) shared.Call {
	c := shared.Call{Key: key, N: 1, Do: "take", Full: t.cfg.Prefix + t.cfg.Name}
	if key != "" {
		c.Full += "/" + key
	}
	if t.cfg.Priority != nil {
		c.Level = min(max(t.cfg.Priority(ctx), 0), t.cfg.Levels-1)
	}
	return c
}

// unknown returns a Decision without an answer of Redis.
func (t *sharedTerms) unknown() Decision {
	if t.limit.Rate == 0 {
		return Decision{Quota: t.limit.Quotas[0], Limit: t.limit.Quotas[0].N}
	}
	return Decision{Limit: t.limit.Burst, Window: t.window}
}

// decision returns the Decision by an answer, about the window that binds, and why it is
// a refusal.
func (t *sharedTerms) decision(ok bool, n, level int, a shared.Answer) (d Decision, why Reason) {
	least, binding, last := math.MaxInt, -1, time.Duration(0)
	if t.limit.Rate != 0 {
		least = t.remaining(level, a.Debt)
	}
	if !ok {
		why = OverLimit
	}
	for i, w := range a.Windows {
		left := int(max(0, int64(t.quotas[i].room[level])-w.Used))
		switch {
		case ok && left < least:
			least, binding = left, i
		case !ok && n > left:
			if why = OverQuota; w.Left > last {
				last, binding = w.Left, i
			}
		}
	}
	if binding < 0 {
		d = Decision{OK: ok, Limit: t.limit.Burst, Window: t.window, Remaining: t.remaining(level, a.Debt), ResetAfter: a.Debt}
	} else {
		q, w := &t.quotas[binding], a.Windows[binding]
		d = Decision{OK: ok, Quota: q.Quota, Limit: q.N, Window: w.Length, Remaining: int(max(0, int64(q.room[level])-w.Used))}
		if w.Used > 0 {
			d.ResetAfter = w.Left
		}
	}
	if !ok {
		d.RetryAfter = max(a.Wait, last)
	}
	return d, why
}

// remaining returns how many tokens a level could take on top of a debt, which the script has
// rounded up to a microsecond.
func (t *sharedTerms) remaining(level int, debt time.Duration) int {
	us := debt.Microseconds()
	missing := int(math.Ceil(float64(us) / (float64(t.Token.Whole) + float64(t.Token.Part)/(1<<32))))
	if missing > 0 && t.Token.Times(missing-1).Up() >= us {
		missing--
	}
	return max(0, roomOf(t.burst, t.cfg.Reserve, level)-missing)
}

// peek returns the Decision on one token by an answer.
func (t *sharedTerms) peek(level int, a shared.Answer) Decision {
	there := t.limit.Rate == 0 || t.remaining(level, a.Debt) > 0
	if !there {
		a.Wait = t.wait(level, a.Debt)
	}
	for i, w := range a.Windows {
		there = there && w.Used < int64(t.quotas[i].room[level])
	}
	d, _ := t.decision(there, 1, level, a)
	return d
}

// wait returns the time until a level could take a token of the rate on top of a debt.
func (t *sharedTerms) wait(level int, debt time.Duration) time.Duration {
	us := debt.Microseconds() + int64(t.Token.Whole) - int64(t.Room[level].Whole)
	if t.Token.Part > t.Room[level].Part {
		us++
	}
	return time.Duration(max(us, 0)) * time.Microsecond
}
