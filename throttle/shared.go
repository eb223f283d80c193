package throttle

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"math/bits"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/invalid"
	"github.com/go-resilience/resilience/internal/keyed"
)

// An OutagePolicy says what a [Shared] does while it cannot reach Redis.
type OutagePolicy int

const (
	// LimitLocally admits calls at this instance's part of the limit.
	LimitLocally OutagePolicy = iota
	// RefuseAll refuses every call.
	RefuseAll
	// AdmitAll admits every call.
	AdmitAll
)

const (
	maxSharedRate = 1e9
	defaultPrefix = "throttle:"
)

// SharedConfig says how a [Shared] works.
type SharedConfig struct {
	// Name is the name of the limit: all instances with the same Prefix and Name share
	// one. It appears in errors, events and figures. It is required.
	Name string

	// Prefix begins each key in Redis. The Name follows and, if there is a Key, a slash
	// and the result of Key. Empty means "throttle:".
	Prefix string

	// Eval runs a Lua script on Redis 5 or later and returns its result: three
	// integers. It always gets the same script. It should return soon after its ctx has
	// ended, as the call does not return before. It is required. With
	// github.com/redis/go-redis/v9, whose Run sends only the hash of a script that the
	// server knows:
	//
	//	rdb := redis.NewClient(&redis.Options{Addr: addr, ContextTimeoutEnabled: true, MaxRetries: -1})
	//	Eval: func(ctx context.Context, script string, keys []string, args ...any) (any, error) {
	//		return redis.NewScript(script).Run(ctx, rdb, keys, args...).Result()
	//	},
	Eval func(ctx context.Context, script string, keys []string, args ...any) (any, error)

	// Key returns the key of a call, such as its tenant: each key has a limit of Rate
	// and Burst. Nil means one limit for all calls.
	Key func(context.Context) string

	// Rate and Burst are as in [Config], for all instances together. Rate is at
	// most 1e9.
	Rate  float64
	Burst int

	// Levels, Priority, Reserve and Cost are as in [Config].
	Levels   int
	Priority func(context.Context) int
	Reserve  []float64
	Cost     func(context.Context) int

	// Batch is how many tokens are taken from Redis at once, to be spent by later calls:
	// for rates at which a round trip for each call is too slow. Over any interval each
	// instance may then admit up to Batch-1 tokens on top of the limit, which it took
	// before. Calls that find no tokens left share one round trip at a time. Zero means
	// 1. A larger Batch, of at most Burst, needs a nil Key and no Levels.
	Batch int

	// Timeout is how long Redis may take for one answer. A call waits for at most one
	// answer; with a Batch, for at most two. Zero means 50 ms.
	Timeout time.Duration

	// OnOutage says what to do while Redis does not answer, or too late, or with
	// something else than the script returns. Zero means LimitLocally.
	OnOutage OutagePolicy

	// Instances is the number of instances that share the limit, or an upper bound of
	// it. LimitLocally requires it: in an outage each instance admits Rate / Instances
	// and a burst of Burst / Instances, rounded down, but at least 1.
	Instances int

	// RetryEvery is how often one call tries Redis during an outage. The other calls do
	// not wait for it. Zero means a second.
	RetryEvery time.Duration

	// OnReject, if not nil, is called with the call's ctx for each call that Do or
	// Wait refuses.
	OnReject func(context.Context, *LimitedError)

	// OnError, if not nil, is called with the error each time Redis has failed to
	// answer. The first call that is decided without that answer calls it, with its
	// ctx.
	OnError func(context.Context, error)
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
	c.checkRate(f)
	checkLevels(f, c.Levels, c.Priority)
	checkReserve(f, c.Levels, c.Reserve)
	f.Need(c.Batch >= 0, "Batch", c.Batch, "0 (for 1) or more")
	f.Need(c.Batch <= 1 || c.Key == nil && c.Levels < 2, "Batch", c.Batch, "0 or 1 where there is a Key or more Levels than one")
	f.Need(c.Timeout >= 0, "Timeout", c.Timeout, "0 (for 50 ms) or more")
	f.Need(c.OnOutage >= LimitLocally && c.OnOutage <= AdmitAll, "OnOutage", int(c.OnOutage), "LimitLocally, RefuseAll or AdmitAll")
	f.Need(c.Instances >= 0, "Instances", c.Instances, "0 or more")
	f.Need(c.Instances != 0 || c.OnOutage != LimitLocally, "Instances", c.Instances, "1 or more where OnOutage is LimitLocally: each instance admits its part")
	f.Need(c.RetryEvery >= 0, "RetryEvery", c.RetryEvery, "0 (for a second) or more")
	if f.Err() == nil {
		f.Need(c.withDefaults().local().Validate() == nil, "Instances", c.Instances, "fewer: the part of an instance is too small a rate")
	}
}

// withDefaults returns a valid c with its zero fields filled in. It shares no memory
// with c.
func (c SharedConfig) withDefaults() SharedConfig {
	c.Prefix = cmp.Or(c.Prefix, defaultPrefix)
	c.Burst = burstOf(c.Rate, c.Burst)
	c.Levels = cmp.Or(c.Levels, 1)
	c.Reserve = reserveOf(c.Levels, c.Reserve)
	c.Batch = cmp.Or(c.Batch, 1)
	c.Timeout = cmp.Or(c.Timeout, 50*time.Millisecond)
	c.Instances = cmp.Or(c.Instances, 1)
	c.RetryEvery = cmp.Or(c.RetryEvery, time.Second)
	return c
}

func (c SharedConfig) checkRate(f *invalid.Fields) {
	if !(c.Rate > 0 && c.Rate <= maxSharedRate) {
		f.Need(false, "Rate", c.Rate, "above 0 and at most 1e9 tokens a second")
		return
	}
	checkRate(f, c.Rate, c.Burst)
	if c.Burst >= 0 {
		b := burstOf(c.Rate, c.Burst)
		f.Need(c.Batch <= b, "Batch", c.Batch, fmt.Sprintf("at most the Burst of %d", b))
	}
}

// local returns the part of this instance, for c with its defaults filled in.
func (c SharedConfig) local() GroupConfig[string] {
	return GroupConfig[string]{Config: Config{
		Name: c.Name, Rate: c.Rate / float64(c.Instances), Burst: max(1, c.Burst/c.Instances),
		Levels: c.Levels, Priority: c.Priority, Reserve: c.Reserve,
	}}
}

// A Shared admits the calls of many instances at one limit, which is kept in Redis and
// measured with the clock of Redis. The clocks of the instances do not matter. It is
// safe for concurrent use. [NewShared] makes one.
//
// Each decision takes one round trip, or 1/Batch of one. Over any interval all instances
// together admit at most Burst + Rate x interval tokens, plus the tokens that Batch
// allows. The rate is exact to one part in 4e15/Rate; it is never too high. If Redis
// loses its data, as in a restart without persistence, the burst is full again.
//
// When Redis fails, calls follow OnOutage, after one Timeout, until Redis answers again.
// If a call gives up before the Timeout, the Shared makes another round trip, which
// takes no tokens, to find out whether Redis answers. An outage concerns one hash slot
// of the 16384 slots of a Redis Cluster: if one master is down, or one key holds a value
// of another program, the keys of other slots are not affected.
//
// A Shared does not wait for tokens. A retry around it that respects
// [LimitedError.RetryAfter] does.
type Shared struct {
	terms     atomic.Pointer[sharedTerms]
	observers observers
	local     *Group[string]
	batch     batch
	outages   outages

	refused                                        tally
	admitted, spent, asked, askTime, failed, alone atomic.Int64

	updates sync.Mutex   // held by Update
	given   SharedConfig // without defaults; under updates
}

// sharedTerms are a limit in the units of the script.
type sharedTerms struct {
	cfg    *SharedConfig // with its defaults filled in; never written to
	burst  int
	window time.Duration
	token  micros
	room   []micros // by level
}

// micros is a time in microseconds and 2^-32ths of one.
type micros struct{ whole, part uint64 }

func (m micros) times(n int) micros {
	hi, lo := bits.Mul64(m.part, uint64(n))
	return micros{m.whole*uint64(n) + hi<<32 + lo>>32, lo & math.MaxUint32}
}

func newSharedTerms(c *SharedConfig) *sharedTerms {
	whole, part := math.Modf(1e6 / c.Rate)
	t := &sharedTerms{
		cfg: c, burst: c.Burst, window: windowOf(c.Rate, c.Burst),
		token: micros{uint64(whole), uint64(math.Ceil(part * (1 << 32)))},
	}
	for level := range c.Levels {
		t.room = append(t.room, t.token.times(roomOf(t.burst, c.Reserve, level)))
	}
	return t
}

// NewShared returns a Shared. It does not call Eval yet. It panics with the error of
// cfg.Validate, if there is one.
func NewShared(cfg SharedConfig) *Shared {
	if err := cfg.Validate(); err != nil {
		panic(err)
	}
	s := &Shared{given: cfg.clone()}
	cfg = cfg.withDefaults()
	s.outages.observers = &s.observers
	s.terms.Store(newSharedTerms(&cfg))
	s.local = NewGroup(cfg.local())
	return s
}

// Do takes the tokens of a call, runs fn and returns its error. Without tokens it
// returns a [*LimitedError] and does not run fn. If ctx has already ended, Do returns
// why.
func (s *Shared) Do(ctx context.Context, fn func(context.Context) error) error {
	if err := s.Wait(ctx); err != nil {
		return err
	}
	return fn(ctx)
}

// Wrap returns a function that runs next as [Shared.Do] does.
func (s *Shared) Wrap(next func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error { return s.Do(ctx, next) }
}

// Wait takes the tokens of a call as [Shared.Do] does, for work that is not one
// function. It waits for the answer of Redis, not for tokens.
func (s *Shared) Wait(ctx context.Context) error {
	if ctx.Err() != nil {
		return ended.Error(ctx)
	}
	t := s.terms.Load()
	c := t.callOf(ctx)
	if t.cfg.Cost != nil {
		c.n = max(t.cfg.Cost(ctx), 0)
	}
	d, why, cause := s.decide(ctx, t, c)
	if d.OK {
		return nil
	}
	err := &LimitedError{
		Name: t.cfg.Name, Key: keyed.Text(c.key), Reason: why, Limit: d.Limit,
		Level: c.level, Cost: c.n, After: d.RetryAfter, Err: cause,
	}
	report(ctx, t.cfg.OnReject, &s.observers, err, 0)
	return err
}

// Allow takes a token if there is one, and reports whether it did. Like [Shared.Take]
// it calls Key and Priority, but not Cost or OnReject, and admits nothing once ctx has
// ended.
func (s *Shared) Allow(ctx context.Context) bool { return s.Take(ctx, 1).OK }

// Take takes n tokens of the limit of ctx, if all of them are there. It calls Key and
// Priority, but not Cost or OnReject. If n is 0 or less, Take takes none and admits. It
// admits nothing once ctx has ended.
//
// Remaining and ResetAfter are known from an answer of Redis. Without one, ResetAfter is
// 0, and Remaining is at most the number of tokens that a Batch still holds. During an
// outage with LimitLocally, both are those of this instance's part of the limit.
func (s *Shared) Take(ctx context.Context, n int) Decision {
	t := s.terms.Load()
	if ctx.Err() != nil {
		return Decision{Limit: t.burst, Window: t.window}
	}
	c := t.callOf(ctx)
	c.n = max(n, 0)
	d, _, _ := s.decide(ctx, t, c)
	return d
}

// A sharedCall is a call to be decided.
type sharedCall struct {
	key      string // the result of Key
	full     string // the key in Redis
	n, level int
}

// callOf returns the call of ctx, for one token.
func (t *sharedTerms) callOf(ctx context.Context) sharedCall {
	c := sharedCall{n: 1, full: t.cfg.Prefix + t.cfg.Name}
	if t.cfg.Key != nil {
		c.key = t.cfg.Key(ctx)
		c.full += "/" + c.key
	}
	if t.cfg.Priority != nil {
		c.level = min(max(t.cfg.Priority(ctx), 0), t.cfg.Levels-1)
	}
	return c
}

// decide takes the tokens of a call, or returns why it cannot.
func (s *Shared) decide(ctx context.Context, t *sharedTerms, c sharedCall) (d Decision, why Reason, cause error) {
	switch {
	case s.batch.spend(c.n): // always for n == 0
		d = Decision{OK: true, Remaining: int(s.batch.held.Load())}
	case c.n > roomOf(t.burst, t.cfg.Reserve, c.level):
		d, why = Decision{RetryAfter: never}, TooCostly
	default:
		d, why, cause = s.ask(ctx, t, c)
	}
	d.Limit, d.Window = t.burst, t.window
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
	if o := s.outages.of(c.full, t.cfg.RetryEvery); o != nil {
		return s.decideAlone(ctx, t, c, o)
	}
	if t.cfg.Batch > 1 {
		return s.askBatch(ctx, t, c)
	}
	a, outage, inTime := s.askOnce(ctx, t, c)
	switch {
	case !inTime:
		return Decision{}, ContextEnded, ended.Error(ctx)
	case outage != nil:
		return s.decideAlone(ctx, t, c, outage)
	}
	d := Decision{
		OK: a.taken > 0, Remaining: t.remaining(c.level, a.debt),
		RetryAfter: a.wait, ResetAfter: a.debt,
	}
	if !d.OK {
		return d, OverLimit, nil
	}
	return d, "", nil
}

// remaining returns how many tokens a level could take on top of a debt.
func (t *sharedTerms) remaining(level int, debt time.Duration) int {
	left := float64(t.room[level].whole) + float64(t.room[level].part)/(1<<32) - float64(debt)/1e3
	token := float64(t.token.whole) + float64(t.token.part)/(1<<32)
	return int(max(0, math.Floor(left/token+1e-9)))
}

// decideAlone decides on a call without Redis.
func (s *Shared) decideAlone(ctx context.Context, t *sharedTerms, c sharedCall, o *outage) (Decision, Reason, error) {
	if t.cfg.OnError != nil && o.told.CompareAndSwap(false, true) {
		t.cfg.OnError(ctx, o.cause)
	}
	s.alone.Add(1)
	switch t.cfg.OnOutage {
	case AdmitAll:
		return Decision{OK: true}, "", nil
	case LimitLocally:
		d, why := s.local.decide(ctx, c.key, c.n, c.level)
		if why == "" || why == OverLimit {
			return d, why, nil
		}
	}
	return Decision{RetryAfter: max(0, time.Until(o.until))}, Outage, fmt.Errorf("%w: %w", ErrOutage, o.cause)
}
