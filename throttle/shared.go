package throttle

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"math/bits"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/invalid"
	"github.com/go-resilience/resilience/internal/keyed"
	"github.com/go-resilience/resilience/internal/settings"
)

// An OutagePolicy says what a [Shared] does while it cannot reach Redis.
// The zero value means LimitLocally.
type OutagePolicy string

const (
	// LimitLocally admits calls at this instance's part of the limit.
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
	// github.com/redis/go-redis/v9, whose Run sends only the hash of a script that the server
	// knows:
	//
	//	rdb := redis.NewClient(&redis.Options{Addr: addr, ContextTimeoutEnabled: true, MaxRetries: -1})
	//	Eval: func(ctx context.Context, script string, keys []string, args ...any) (any, error) {
	//		return redis.NewScript(script).Run(ctx, rdb, keys, args...).Result()
	//	},
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

	// OnRefuse, if not nil, is called with the call's ctx for each call that Do or
	// Wait refuses.
	OnRefuse func(context.Context, *LimitedError)

	// OnStoreError, if not nil, is called with the error each time Redis has failed to
	// answer. The first call that is decided without that answer calls it, with its
	// ctx.
	OnStoreError func(context.Context, error)
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

// local returns this instance's part of a limit, for c with its defaults filled in.
func (c SharedConfig) local(l Limit) GroupConfig[string] {
	cfg := Config{Name: c.Name, Levels: c.Levels, Priority: c.Priority, Reserve: c.Reserve}
	cfg.setLimit(l.part(c.Instances))
	return GroupConfig[string]{Config: cfg}
}

// A Shared admits the calls of many instances at one limit, which is kept in Redis and
// measured with the clock of Redis. The clocks of the instances do not matter. Like a
// [Group] it has a limit for each key: each tenant, user or address. Where all calls share
// one limit, their key is the empty text. It is safe for concurrent use. [NewShared] makes
// one.
//
// Each decision takes one round trip. Over any interval all instances together admit at most
// Burst + Rate x interval tokens, and in each window of a quota at most its N. The rate is
// exact to one part in 4e15/Rate; it is never too high. If Redis loses its data, as in a
// restart without persistence, the burst is full again, and so are the quotas.
//
// A call that gets no answer within Timeout follows OnOutage. When that has happened twice
// with no answer in time between, or Redis refuses to answer, an outage begins: calls follow
// OnOutage without waiting, until Redis answers in time again.
//
// What an instance admits without Redis is owed, less what its part of the Rate has refilled
// since. Once Redis answers in time, the next call of the instance for the key takes it, from
// the burst and, if that is empty, from up to as many tokens of the time to come; and from
// the quotas. So an outage with LimitLocally costs at most the Burst, and
// each quota an N, once, on top of the limit: the part of each instance, less what that has
// spent of it lately. It costs that only where an instance does not call again, or the keys
// that owe are more than 100 000. An instance that is cut off while Redis answers others costs
// its part of the Rate as well, for as long as that lasts. With AdmitAll there is no bound.
//
// A call whose ctx ends while it waits for Redis may have taken its tokens.
//
// An outage concerns one hash slot of the 16384 slots of a Redis Cluster: if one master is
// down, or one key holds a value of another program, the keys of other slots are not
// affected. It is over when Redis has answered for a key of the slot, or for another key
// when no call has tried the slot for a RetryEvery.
//
// A Shared does not wait for tokens. A retry around it that respects
// [LimitedError.RetryAfter] does.
type Shared struct {
	setting   settings.Setting[SharedConfig]
	terms     atomic.Pointer[sharedTerms]
	observers observers
	own       sync.Map // of Set: a Limit for each key
	sets      atomic.Int64
	alone     alone
	ahead     atomic.Int64 // how far the clock of Redis is ahead, as last seen
	outages   outages

	refused                                                       tally
	admitted, spent, refunded, asked, askTime, failed, outOfReach atomic.Int64
}

// sharedTerms are a limit in the units of the script.
type sharedTerms struct {
	cfg    *SharedConfig // with its defaults filled in; never written to
	limit  Limit         // with its defaults filled in
	window time.Duration
	token  micros
	room   []micros // by level
	quotas []quotaTerms
	base   bool // whether it is the limit of cfg
}

// micros is a time in microseconds and 2^-32ths of one.
type micros struct{ whole, part uint64 }

func (m micros) times(n int) micros {
	hi, lo := bits.Mul64(m.part, uint64(n))
	return micros{m.whole*uint64(n) + hi<<32 + lo>>32, lo & math.MaxUint32}
}

func newSharedTerms(c *SharedConfig, l Limit) *sharedTerms {
	t := &sharedTerms{
		cfg: c, limit: l, window: windowOf(l.Rate, l.Burst),
		quotas: newQuotaTerms(l.Quotas, max(c.Levels, 1), c.Reserve),
	}
	if l.Rate != 0 {
		whole, part := math.Modf(1e6 / l.Rate)
		t.token = micros{uint64(whole), uint64(math.Ceil(part * (1 << 32)))}
	}
	for level := range max(c.Levels, 1) {
		room := t.token.times(roomOf(l.Burst, c.Reserve, level))
		if l.Rate == 0 { // only quotas limit; what other instances hold as the debt stays
			room = micros{whole: 1e15}
		}
		t.room = append(t.room, room)
	}
	return t
}

// most returns how many tokens a level may spend at once.
func (t *sharedTerms) most(level int) int {
	most := math.MaxInt
	if t.limit.Rate != 0 {
		most = roomOf(t.limit.Burst, t.cfg.Reserve, level)
	}
	for i := range t.quotas {
		most = min(most, t.quotas[i].room[level])
	}
	return most
}

// NewShared returns a Shared. It does not call Eval yet. It panics with the error of
// cfg.Validate, if there is one.
func NewShared(cfg SharedConfig) *Shared {
	s := &Shared{}
	s.outages.observers = &s.observers
	s.setting.Adopt(settings.New(cfg, SharedConfig.withDefaults, "Prefix", "Levels"), s.setTerms)
	s.alone.base = NewGroup(s.setting.Load().localOf())
	return s
}

func (s *Shared) setTerms(cfg *SharedConfig) {
	t := newSharedTerms(cfg, cfg.limit())
	t.base = true
	s.terms.Store(t)
}

// Do takes the tokens of a call from the limit of key, runs fn and returns its error.
// Without tokens it returns a [*LimitedError] and does not run fn. If ctx has already
// ended, Do returns why.
func (s *Shared) Do(ctx context.Context, key string, fn func(context.Context) error) error {
	if err := s.Wait(ctx, key); err != nil {
		return err
	}
	return fn(ctx)
}

// Wrap returns a function that runs next for key as [Shared.Do] does.
func (s *Shared) Wrap(key string, next func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error { return s.Do(ctx, key, next) }
}

// By returns middleware that runs a function as [Shared.Do] does, for the key of its ctx.
// A nil key means the empty key for all calls.
func (s *Shared) By(key func(context.Context) string) func(next func(context.Context) error) func(context.Context) error {
	if key == nil {
		key = func(context.Context) string { return "" }
	}
	return func(next func(context.Context) error) func(context.Context) error {
		return func(ctx context.Context) error { return s.Do(ctx, key(ctx), next) }
	}
}

// Wait takes the tokens of a call from the limit of key as [Shared.Do] does, for work
// that is not one function. It waits for the answer of Redis, not for tokens.
func (s *Shared) Wait(ctx context.Context, key string) error {
	_, err := s.Admit(ctx, key)
	return err
}

// Admit takes the tokens of a call as [Shared.Wait] does, and returns what is left, as
// [Shared.Take] does.
func (s *Shared) Admit(ctx context.Context, key string) (Decision, error) {
	t := s.termsOf(key)
	if ctx.Err() != nil {
		return t.unknown(), ended.Error(ctx)
	}
	c := t.callOf(ctx, key)
	if t.cfg.Cost != nil {
		c.n = max(t.cfg.Cost(ctx), 0)
	}
	d, why, cause := s.decide(ctx, t, c)
	if d.OK {
		return d, nil
	}
	err := &LimitedError{
		Name: t.cfg.Name, Key: keyed.Text(c.key), Reason: why, Limit: d.Limit,
		Level: c.level, Cost: c.n, After: d.RetryAfter, Err: cause,
	}
	if why == OverQuota || why == TooCostly {
		err.Quota = d.Quota
	}
	report(ctx, t.cfg.OnRefuse, &s.observers, err)
	return d, err
}

// Allow takes a token of key if there is one, and reports whether it did. Like
// [Shared.Take] it calls Priority, but not Cost or OnRefuse, and admits nothing once ctx
// has ended.
func (s *Shared) Allow(ctx context.Context, key string) bool { return s.Take(ctx, key, 1).OK }

// Take takes n tokens of key, if all of them are there. It calls Priority, but not Cost
// or OnRefuse. If n is 0 or less, Take takes none and admits. It admits nothing once ctx
// has ended.
//
// Remaining and ResetAfter are known from an answer of Redis. Without one, both are 0 or,
// with LimitLocally, those of this instance's part of the limit.
func (s *Shared) Take(ctx context.Context, key string, n int) Decision {
	t := s.termsOf(key)
	if ctx.Err() != nil {
		return t.unknown()
	}
	c := t.callOf(ctx, key)
	c.n = max(n, 0)
	d, _, _ := s.decide(ctx, t, c)
	return d
}

// A sharedCall is a call to be decided.
type sharedCall struct {
	key      string
	full     string // the key in Redis
	n, level int
	refund   int
	do       string // what the script is to do: take or reset
}

// callOf returns the call of ctx for key, for one token.
func (t *sharedTerms) callOf(ctx context.Context, key string) sharedCall {
	c := sharedCall{key: key, n: 1, do: "take", full: t.cfg.Prefix + t.cfg.Name}
	if key != "" {
		c.full += "/" + key
	}
	if t.cfg.Priority != nil {
		c.level = min(max(t.cfg.Priority(ctx), 0), t.cfg.Levels-1)
	}
	return c
}

// decide takes the tokens of a call, or returns why it cannot.
func (s *Shared) decide(ctx context.Context, t *sharedTerms, c sharedCall) (d Decision, why Reason, cause error) {
	switch {
	case c.n == 0:
		d = t.unknown()
		d.OK = true
	case c.n > t.most(c.level):
		d, why = t.unknown(), TooCostly
		d.RetryAfter = never
		if i := slices.IndexFunc(t.quotas, func(q quotaTerms) bool { return c.n > q.room[c.level] }); i >= 0 {
			d.Quota, d.Limit, d.Window = t.quotas[i].Quota, t.quotas[i].N, 0
		}
	default:
		d, why, cause = s.ask(ctx, t, c)
	}
	if d.OK {
		s.admitted.Add(1)
		s.spent.Add(int64(c.n))
	} else {
		s.refused.add(why)
	}
	return d, why, cause
}

// ask lets Redis decide on a call or, in an outage, OnOutage.
func (s *Shared) ask(ctx context.Context, t *sharedTerms, c sharedCall) (Decision, Reason, error) {
	o := s.outages.of(c.full, t.cfg.RetryEvery)
	if o == nil {
		trip := s.depart(ctx, t, c)
		if !trip.wait(ctx) {
			return t.unknown(), ContextEnded, ended.Error(ctx)
		}
		if o = trip.outage; o == nil {
			if trip.answer.taken > 0 && t.cfg.OnOutage == LimitLocally {
				// The part of this instance has as much less for an outage.
				_, _ = s.alone.group(t).decide(ctx, c.key, c.n, 0)
			}
			d, why := t.decision(trip.answer.taken > 0, c.n, c.level, trip.answer)
			return d, why, nil
		}
	}
	d, why, err := s.decideAlone(ctx, t, c, o)
	if d.OK {
		s.alone.owe(c.full, debt{tokens: c.n})
	}
	return d, why, err
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
func (t *sharedTerms) decision(ok bool, n, level int, a answer) (d Decision, why Reason) {
	least, binding, last := math.MaxInt, -1, time.Duration(0)
	if t.limit.Rate != 0 {
		least = t.remaining(level, a.debt)
	}
	if !ok {
		why = OverLimit
	}
	for i, w := range a.windows {
		left := int(max(0, int64(t.quotas[i].room[level])-w.used))
		switch {
		case ok && left < least:
			least, binding = left, i
		case !ok && n > left:
			if why = OverQuota; w.left > last {
				last, binding = w.left, i
			}
		}
	}
	if binding < 0 {
		d = Decision{OK: ok, Limit: t.limit.Burst, Window: t.window, Remaining: t.remaining(level, a.debt), ResetAfter: a.debt}
	} else {
		q, w := &t.quotas[binding], a.windows[binding]
		d = Decision{OK: ok, Quota: q.Quota, Limit: q.N, Window: w.length, Remaining: int(max(0, int64(q.room[level])-w.used))}
		if w.used > 0 {
			d.ResetAfter = w.left
		}
	}
	if !ok {
		d.RetryAfter = max(a.wait, last)
	}
	return d, why
}

// remaining returns how many tokens a level could take on top of a debt.
func (t *sharedTerms) remaining(level int, debt time.Duration) int {
	left := float64(t.room[level].whole) + float64(t.room[level].part)/(1<<32) - float64(debt)/1e3
	token := float64(t.token.whole) + float64(t.token.part)/(1<<32)
	return int(max(0, math.Floor(left/token+1e-9)))
}

// decideAlone decides on a call without Redis.
func (s *Shared) decideAlone(ctx context.Context, t *sharedTerms, c sharedCall, o *outage) (Decision, Reason, error) {
	if t.cfg.OnStoreError != nil && o.told.CompareAndSwap(false, true) {
		t.cfg.OnStoreError(ctx, o.cause)
	}
	s.outOfReach.Add(1)
	d := t.unknown()
	switch t.cfg.OnOutage {
	case AdmitAll:
		d.OK = true
		return d, "", nil
	case LimitLocally:
		part, why := s.alone.group(t).decide(ctx, c.key, c.n, c.level)
		if why == "" || why == OverLimit || why == OverQuota {
			return t.whole(part), why, nil
		}
	}
	d.RetryAfter = max(0, time.Until(o.until))
	return d, Outage, s.outageError(o)
}

func (s *Shared) outageError(o *outage) error { return fmt.Errorf("%w: %w", ErrOutage, o.cause) }

func (c SharedConfig) localOf() GroupConfig[string] { return c.local(c.limit()) }
