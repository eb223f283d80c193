package throttle

import (
	"context"
	"fmt"
	"math"
	"math/bits"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/invalid"
)

// An OutagePolicy says what a [Shared] does while it cannot ask for tokens.
type OutagePolicy int

const (
	// LimitLocally admits what this instance's part of the limit allows.
	LimitLocally OutagePolicy = iota
	// RefuseAll refuses every call.
	RefuseAll
	// AdmitAll admits every call.
	AdmitAll
)

const maxSharedRate = 1e9

// SharedConfig says how a [Shared] works.
type SharedConfig struct {
	// Name appears in errors, and is the name of the limit: all instances with the
	// same Prefix and Name share one. It is required.
	Name string

	// Prefix begins each key in Redis, which goes on with the Name and, if there is
	// a Key, with a slash and what that returns. Empty means "throttle:".
	Prefix string

	// Eval runs a Lua script, which is always the same one, on Redis 5 or later
	// and returns its answer: three integers. It is required, and should return soon
	// after its ctx has ended, as the call does not return before it. With
	// github.com/redis/go-redis/v9, whose Run sends the script by its hash where the
	// server knows it:
	//
	//	rdb := redis.NewClient(&redis.Options{Addr: addr, ContextTimeoutEnabled: true, MaxRetries: -1})
	//	Eval: func(ctx context.Context, script string, keys []string, args ...any) (any, error) {
	//		return redis.NewScript(script).Run(ctx, rdb, keys, args...).Result()
	//	},
	Eval func(ctx context.Context, script string, keys []string, args ...any) (any, error)

	// Key returns which limit a call is under, such as the tenant's: each has Rate
	// and Burst. Nil means one limit for all.
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

	// Batch is how many tokens are taken from Redis at once, to be spent here: for
	// rates at which one round trip for each call is too much. All instances
	// together then admit up to Batch-1 tokens each more than the limit over any
	// interval: those that were taken before. Calls that find no tokens left are
	// asked for together, by one round trip at a time, and refused together where
	// the limit has no more. Zero means 1. More, up to Burst, need Key to be nil and
	// no Levels.
	Batch int

	// Timeout is how long Redis may take for one answer. A call waits for one answer
	// at most, with Batch for two. Zero means 50 ms.
	Timeout time.Duration

	// OnOutage says what to do while Redis does not answer, or not in time, or
	// with something else. Zero means LimitLocally.
	OnOutage OutagePolicy

	// Instances is how many instances share the limit, or the most that may. For
	// LimitLocally it is required: in an outage each instance admits Rate / Instances
	// and a Burst / Instances, rounded down, of at least 1.
	Instances int

	// RetryEvery is how often Redis is tried, by one call, during an outage. The
	// others do not wait for it. Zero means a second.
	RetryEvery time.Duration

	// OnReject, if not nil, is called for each call that Do or Wait refuses, with
	// its ctx.
	OnReject func(context.Context, *LimitedError)

	// OnError, if not nil, is called with the error when Redis has not answered as it
	// should, by the first call that is decided without that answer, with its ctx.
	OnError func(context.Context, error)
}

// Validate returns an error that says which fields cannot mean anything, or nil.
func (c SharedConfig) Validate() error {
	f := invalid.Fields{Type: "throttle.SharedConfig"}
	f.Need(c.Name != "", "Name", `""`, "set: it names the limit that is shared")
	f.Need(c.Eval != nil, "Eval", "nil", "set")
	c.checkRate(&f, c.Rate, c.Burst)
	checkLevels(&f, c.Levels, c.Priority, c.Reserve)
	f.Need(c.Batch >= 0, "Batch", c.Batch, "0 (for 1) or more")
	f.Need(c.Batch <= 1 || c.Key == nil && c.Levels < 2, "Batch", c.Batch, "0 or 1 where there is a Key or more Levels than one")
	f.Need(c.Timeout >= 0, "Timeout", c.Timeout, "0 (for 50 ms) or more")
	f.Need(c.OnOutage >= LimitLocally && c.OnOutage <= AdmitAll, "OnOutage", int(c.OnOutage), "LimitLocally, RefuseAll or AdmitAll")
	f.Need(c.Instances >= 0, "Instances", c.Instances, "0 or more")
	f.Need(c.Instances != 0 || c.OnOutage != LimitLocally, "Instances", c.Instances, "1 or more where OnOutage is LimitLocally: each instance admits its part")
	f.Need(c.RetryEvery >= 0, "RetryEvery", c.RetryEvery, "0 (for a second) or more")
	return f.Err()
}

func (c SharedConfig) checkRate(f *invalid.Fields, rate float64, burst int) {
	if !(rate > 0 && rate <= maxSharedRate) {
		f.Need(false, "Rate", rate, "above 0 and at most 1e9 tokens a second")
		return
	}
	checkRate(f, rate, burst)
	if burst >= 0 {
		b := burstOf(rate, burst)
		f.Need(c.Batch <= b, "Batch", c.Batch, fmt.Sprintf("at most the Burst of %d", b))
	}
}

// A Shared admits calls at one limit for many instances, which is kept in Redis
// and measured with the clock of Redis. The clocks of the instances do not matter.
// It is safe for concurrent use, and built by [NewShared].
//
// Each decision takes one round trip, or 1/Batch. Over any interval all instances
// together admit at most Burst + Rate x interval tokens, and what Batch says. The
// rate is exact to one part in 4e15/Rate, to the safe side. If Redis loses what it
// held, as in a restart without persistence, the burst is full again.
//
// When Redis fails, calls follow OnOutage, after one Timeout, until Redis answers
// again. Where a call gives up sooner the Shared finds out by a round trip of its own
// whether Redis answers, without taking tokens. An outage is that of a hash slot, of
// which a Redis Cluster has 16384: one master that is down, or one key that holds
// something else, leaves the other keys alone.
//
// A Shared does not wait for tokens: a retry around it, which heeds
// [LimitedError.RetryAfter], does.
type Shared struct {
	cfg     SharedConfig
	terms   atomic.Pointer[sharedTerms]
	local   *Group[string]
	batch   batch
	outages outages

	admitted, refused, spent, asked, failed, alone atomic.Int64
}

// sharedTerms are a rate and a burst in the units of the script.
type sharedTerms struct {
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

func newSharedTerms(rate float64, burst int, reserve []float64) *sharedTerms {
	whole, part := math.Modf(1e6 / rate)
	burst = burstOf(rate, burst)
	t := &sharedTerms{
		burst: burst, window: windowOf(rate, burst),
		token: micros{uint64(whole), uint64(math.Ceil(part * (1 << 32)))},
	}
	for _, share := range reserve {
		t.room = append(t.room, t.token.times(t.burst-reserved(t.burst, share)))
	}
	return t
}

// NewShared returns a Shared. It does not talk to Redis yet. It panics with the
// error of cfg.Validate, if there is one.
func NewShared(cfg SharedConfig) *Shared {
	if err := cfg.Validate(); err != nil {
		panic(err)
	}
	cfg.Prefix = orElse(cfg.Prefix, "throttle:")
	cfg.Batch = orElse(cfg.Batch, 1)
	cfg.Timeout = orElse(cfg.Timeout, 50*time.Millisecond)
	cfg.Instances = orElse(cfg.Instances, 1)
	cfg.RetryEvery = orElse(cfg.RetryEvery, time.Second)
	cfg.Levels = orElse(cfg.Levels, 1)
	cfg.Reserve = reserveOf(cfg.Levels, cfg.Reserve)
	s := &Shared{cfg: cfg}
	s.outages.every = cfg.RetryEvery
	s.terms.Store(newSharedTerms(cfg.Rate, cfg.Burst, cfg.Reserve))
	rate, burst := s.part(cfg.Rate, cfg.Burst)
	s.local = NewGroup(GroupConfig[string]{
		Config: Config{
			Name: cfg.Name, Rate: rate, Burst: burst,
			Levels: cfg.Levels, Priority: cfg.Priority, Reserve: cfg.Reserve,
		},
		Overflow: ShareOne,
	})
	return s
}

func orElse[T comparable](value, otherwise T) T {
	var zero T
	if value == zero {
		return otherwise
	}
	return value
}

// part returns this instance's part of a limit.
func (s *Shared) part(rate float64, burst int) (float64, int) {
	return rate / float64(s.cfg.Instances), max(1, burstOf(rate, burst)/s.cfg.Instances)
}

// Do runs fn if there are tokens for it, and returns its error, or returns a
// [*LimitedError] and does not call fn. If ctx has already ended, it returns why.
func (s *Shared) Do(ctx context.Context, fn func(context.Context) error) error {
	if err := s.Wait(ctx); err != nil {
		return err
	}
	return fn(ctx)
}

// Wrap returns a function that does next as [Shared.Do] does it.
func (s *Shared) Wrap(next func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error { return s.Do(ctx, next) }
}

// Wait takes the tokens of a call as [Shared.Do] does, for work that is not one
// function. It waits for the answer of Redis only.
func (s *Shared) Wait(ctx context.Context) error {
	if ctx.Err() != nil {
		return ended.Error(ctx)
	}
	c := s.callOf(ctx)
	d, why, cause := s.decide(ctx, c)
	if d.OK {
		return nil
	}
	err := &LimitedError{
		Name: s.cfg.Name, Key: shorten(c.key), Reason: why, Limit: d.Limit,
		Level: c.level, Cost: c.n, After: d.RetryAfter, Err: cause,
	}
	if s.cfg.OnReject != nil {
		s.cfg.OnReject(ctx, err)
	}
	return err
}

// Allow takes the tokens of a call if they are there, and says how things stand.
// Like Wait it calls Key, Cost and Priority, but not OnReject. It admits nothing
// once ctx has ended.
func (s *Shared) Allow(ctx context.Context) Decision {
	if ctx.Err() != nil {
		t := s.terms.Load()
		return Decision{Limit: t.burst, Window: t.window}
	}
	d, _, _ := s.decide(ctx, s.callOf(ctx))
	return d
}

// SetRate changes the limit, for this instance: each says at each call what limit
// it goes by, so that all may change one after the other. It is the time until
// what has been spent refills that is kept.
func (s *Shared) SetRate(rate float64, burst int) error {
	f := invalid.Fields{Type: "throttle.SharedConfig"}
	s.cfg.checkRate(&f, rate, burst)
	if err := f.Err(); err != nil {
		return err
	}
	s.terms.Store(newSharedTerms(rate, burst, s.cfg.Reserve))
	return s.local.SetRate(s.part(rate, burst))
}

// SharedStats is a snapshot of what a [Shared] has done in this process.
type SharedStats struct {
	Admitted int64 // calls
	Refused  int64 // calls
	Spent    int64 // tokens
	Asked    int64 // times that Redis was asked: round trips
	Failed   int64 // of these, how many had no answer that means anything
	Alone    int64 // calls that were decided as OnOutage says
	Down     bool  // whether there is an outage at the moment, of some key at least
}

// Stats returns what the limiter has done so far.
func (s *Shared) Stats() SharedStats {
	return SharedStats{
		Admitted: s.admitted.Load(), Refused: s.refused.Load(), Spent: s.spent.Load(),
		Asked: s.asked.Load(), Failed: s.failed.Load(), Alone: s.alone.Load(),
		Down: s.outages.down.Load() > 0,
	}
}

// A sharedCall is what there is to know of a call.
type sharedCall struct {
	key      string // of Config's Key
	full     string // the key in Redis
	n, level int
}

func (s *Shared) callOf(ctx context.Context) sharedCall {
	c := sharedCall{n: 1, full: s.cfg.Prefix + s.cfg.Name}
	if s.cfg.Key != nil {
		c.key = s.cfg.Key(ctx)
		c.full += "/" + c.key
	}
	if s.cfg.Cost != nil {
		c.n = max(s.cfg.Cost(ctx), 0)
	}
	if s.cfg.Priority != nil {
		c.level = min(max(s.cfg.Priority(ctx), 0), s.cfg.Levels-1)
	}
	return c
}

// decide takes the tokens of a call, or says why not.
func (s *Shared) decide(ctx context.Context, c sharedCall) (d Decision, why Reason, cause error) {
	t := s.terms.Load()
	switch {
	case s.batch.spend(c.n): // or it takes none
		d = Decision{OK: true, Remaining: int(s.batch.held.Load())}
	case c.n > t.burst-reserved(t.burst, s.cfg.Reserve[c.level]):
		d, why = Decision{RetryAfter: never}, TooCostly
	default:
		d, why, cause = s.ask(ctx, t, c)
	}
	d.Limit, d.Window = t.burst, t.window
	if d.OK {
		s.admitted.Add(1)
		s.spent.Add(int64(c.n))
	} else {
		s.refused.Add(1)
	}
	return d, why, cause
}

// ask has Redis decide on a call, or decides alone in an outage.
func (s *Shared) ask(ctx context.Context, t *sharedTerms, c sharedCall) (Decision, Reason, error) {
	if o := s.outages.of(c.full); o != nil {
		return s.decideAlone(ctx, c, o)
	}
	if s.cfg.Batch > 1 {
		return s.askBatch(ctx, t, c)
	}
	a, outage, inTime := s.askOnce(ctx, t, c)
	switch {
	case !inTime:
		return Decision{}, ContextEnded, ended.Error(ctx)
	case outage != nil:
		return s.decideAlone(ctx, c, outage)
	}
	d := Decision{
		OK: a.taken > 0, Remaining: t.remaining(c.level, a.debt),
		RetryAfter: a.wait, ResetAfter: a.debt,
	}
	if !d.OK {
		return d, OverLimit, nil
	}
	return d, 0, nil
}

// remaining returns how many tokens a level could take on top of a debt.
func (t *sharedTerms) remaining(level int, debt time.Duration) int {
	left := float64(t.room[level].whole) + float64(t.room[level].part)/(1<<32) - float64(debt)/1e3
	token := float64(t.token.whole) + float64(t.token.part)/(1<<32)
	return int(max(0, math.Floor(left/token+1e-9)))
}

// decideAlone decides without Redis.
func (s *Shared) decideAlone(ctx context.Context, c sharedCall, o *outage) (Decision, Reason, error) {
	if s.cfg.OnError != nil && o.told.CompareAndSwap(false, true) {
		s.cfg.OnError(ctx, o.cause)
	}
	s.alone.Add(1)
	switch s.cfg.OnOutage {
	case AdmitAll:
		return Decision{OK: true}, 0, nil
	case LimitLocally:
		d, why := s.local.decide(c.key, c.n, c.level)
		if why == 0 || why == OverLimit {
			return d, why, nil
		}
	}
	return Decision{RetryAfter: max(0, time.Until(o.until))}, Outage, fmt.Errorf("%w: %w", ErrOutage, o.cause)
}
