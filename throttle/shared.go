package throttle

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/invalid"
	"github.com/go-resilience/resilience/internal/keyed"
	"github.com/go-resilience/resilience/internal/settings"
	"github.com/go-resilience/resilience/throttle/internal/shared"
)

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
// the windows that the quotas have then. So an outage with LimitLocally costs at most the Burst,
// and each quota an N, once, on top of the limit: the part of each instance, less what that has
// spent of it lately. It costs that only where an instance does not call again in time, or the
// keys that owe are more than 100 000. An instance that is cut off while Redis answers others costs
// its part of the Rate as well, for as long as that lasts. With AdmitAll there is no bound.
// With LimitLocally an instance remembers for each limit what 100 000 keys have spent; keys
// that come when all of these have tokens to get back share one part in an outage. Of the
// limits by LimitFor and Set it has a part of the first 100 that it meets after an Update: keys
// of others have a part of the Rate, the Burst and the Quotas of the configuration.
//
// A call whose ctx ends while it waits for Redis may have taken its tokens.
//
// An outage concerns one hash slot of the 16384 slots of a Redis Cluster: if one master is
// down, or one key holds a value of another program, the keys of other slots are not
// affected. It is over when Redis has answered for a key of the slot, or for another key
// after two RetryEvery in which no call has tried the slot.
//
// A Shared does not wait for tokens. A retry around it that respects
// [LimitedError.RetryAfter] does.
type Shared struct {
	setting   settings.Setting[SharedConfig]
	terms     atomic.Pointer[sharedTerms]
	observers observers
	own       sync.Map // of Set: a Limit for each key
	alone     alone
	redis     shared.Redis

	refused                               [len(reasons)]atomic.Int64
	admitted, spent, refunded, outOfReach atomic.Int64
}

// NewShared returns a Shared. It does not call Eval yet. It panics with the error of
// cfg.Validate, if there is one.
func NewShared(cfg SharedConfig) *Shared {
	s := &Shared{}
	s.redis.Hears(s.observers.Any, s.tellOutage)
	s.setting.Init(cfg, SharedConfig.withDefaults)
	s.setTerms(s.setting.Load())
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
		c.N = max(t.cfg.Cost(ctx), 0)
	}
	d, why, cause := s.decide(ctx, t, c)
	if d.OK {
		return d, nil
	}
	err := &LimitedError{
		Name: t.cfg.Name, Key: keyed.Text(c.Key), Reason: why, Limit: d.Limit,
		Level: c.Level, Cost: c.N, After: d.RetryAfter, Err: cause,
	}
	if why == OverQuota || why == TooCostly {
		err.Quota = d.Quota
	}
	report(ctx, &s.observers, err)
	return d, err
}

// Allow takes a token of key if there is one, and reports whether it did. Like
// [Shared.Take] it calls Priority, but not Cost, and admits nothing once ctx
// has ended.
func (s *Shared) Allow(ctx context.Context, key string) bool { return s.Take(ctx, key, 1).OK }

// Take takes n tokens of key, if all of them are there. It calls Priority, but not
// Cost. If n is 0 or less, Take takes none and admits. It admits nothing once ctx
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
	c.N = max(n, 0)
	d, _, _ := s.decide(ctx, t, c)
	return d
}

// decide takes the tokens of a call, or returns why it cannot.
func (s *Shared) decide(ctx context.Context, t *sharedTerms, c shared.Call) (d Decision, why Reason, cause error) {
	switch {
	case c.N == 0:
		d = t.unknown()
		d.OK = true
	case c.N > t.most[c.Level]:
		d, why = t.unknown(), TooCostly
		d.RetryAfter = never
		if i := t.costliest(c.N, c.Level); i >= 0 {
			d.Quota, d.Limit, d.Window = t.quotas[i].Quota, t.quotas[i].N, 0
		}
	default:
		d, why, cause = s.ask(ctx, t, c)
	}
	if d.OK {
		s.admitted.Add(1)
		s.spent.Add(int64(c.N))
	} else {
		s.refused[why.index()].Add(1)
	}
	return d, why, cause
}

// ask lets Redis decide on a call or, in an outage, OnOutage.
func (s *Shared) ask(ctx context.Context, t *sharedTerms, c shared.Call) (Decision, Reason, error) {
	answer, outage, ok := s.redis.Ask(ctx, &t.Terms, c)
	switch {
	case !ok:
		return t.unknown(), ContextEnded, ended.Error(ctx)
	case outage != nil:
		d, why, err := s.decideAlone(t, c, outage)
		if d.OK {
			s.redis.Owe(c)
		}
		return d, why, err
	case answer.Taken > 0 && t.cfg.OnOutage == LimitLocally:
		// The part of this instance has as much less for an outage.
		_, _ = s.alone.group(t).decide(c.Key, c.N, 0)
	}
	d, why := t.decision(answer.Taken > 0, c.N, c.Level, answer)
	return d, why, nil
}

// decideAlone decides on a call without Redis.
func (s *Shared) decideAlone(t *sharedTerms, c shared.Call, o *shared.Outage) (Decision, Reason, error) {
	s.outOfReach.Add(1)
	d := t.unknown()
	switch t.cfg.OnOutage {
	case AdmitAll:
		d.OK = true
		return d, "", nil
	case LimitLocally:
		part, why := s.alone.group(t).decide(c.Key, c.N, c.Level)
		if why == "" || why == OverLimit || why == OverQuota {
			return t.whole(part), why, nil
		}
	}
	d.RetryAfter = max(0, time.Until(o.Until))
	return d, Outage, s.outageError(o)
}

func (s *Shared) outageError(o *shared.Outage) error { return fmt.Errorf("%w: %w", ErrOutage, o.Cause) }

// tellOutage tells the observers of an outage that began or ended.
func (s *Shared) tellOutage(ctx context.Context, e shared.Event) {
	kind := EventRecovered
	if e.Began {
		kind = EventOutageBegan
	}
	s.observers.Tell(ctx, Event{Kind: kind, Name: s.Name(), Key: e.Key, Err: e.Cause})
}

// termsOf returns the terms of a key. It panics if LimitFor returns an invalid limit.
func (s *Shared) termsOf(key string) *sharedTerms {
	t := s.terms.Load()
	if key == "" {
		return t
	}
	if own, ok := s.own.Load(key); ok {
		return newSharedTerms(t.cfg, own.(Limit))
	}
	if t.cfg.LimitFor == nil {
		return t
	}
	l := t.cfg.LimitFor(key)
	if l.isZero() {
		return t
	}
	f := invalid.Fields{Type: "throttle.Limit"}
	if checkShared(&f, l); f.Err() != nil {
		panic(f.Err())
	}
	return newSharedTerms(t.cfg, l.withDefaults())
}

// Name returns the Name of the SharedConfig.
func (s *Shared) Name() string { return s.setting.Load().Name }

// Config returns the present SharedConfig, with its defaults filled in.
func (s *Shared) Config() SharedConfig { return s.setting.Config() }

// Update changes the configuration of this instance, as [Limiter.Update] does. Each
// instance sends the limit with each call, so the instances may change it one after the
// other: meanwhile they admit together at most what the larger limit would.
//
//   - Redis keeps the tokens that the burst lacks, and what has been spent of a quota. What
//     this instance has admitted alone in an outage stays spent, except by keys whose limit
//     comes from LimitFor or Set.
//   - Outages go on. A new OnOutage decides about later calls, a new Timeout about later
//     round trips, a new RetryEvery after the next attempt.
//   - A new Eval makes later round trips.
//   - Counters go on.
//   - Name, Prefix and Levels cannot change.
//
// change must not use the Shared.
func (s *Shared) Update(change func(*SharedConfig)) error {
	return s.setting.Update(change, s.admit, s.setTerms)
}

// Change is Update for a program that does not know the type of the configuration: f gets a
// pointer to it, as Update's change does. If f returns an error, or dry is true, nothing
// changes; dry returns the error that the change would have.
func (s *Shared) Change(dry bool, f func(cfg any) error) error {
	admit := s.admit
	if dry {
		admit = func(was, next *SharedConfig) error {
			return errors.Join(was.fixed(next), s.alone.base.Change(true, func(cfg any) error {
				*cfg.(*GroupConfig[string]) = next.localOf()
				return nil
			}))
		}
	}
	return s.setting.Change(dry, f, admit, s.setTerms)
}

func (s *Shared) admit(was, next *SharedConfig) error {
	if err := was.fixed(next); err != nil {
		return err
	}
	return s.alone.adopt(next)
}

// fixed returns an error if Name, Prefix or Levels have changed.
func (c *SharedConfig) fixed(next *SharedConfig) error {
	f := invalid.Fields{Type: "throttle.SharedConfig"}
	f.Same("Name", c.Name, next.Name)
	f.Same("Prefix", c.Prefix, next.Prefix)
	f.Same("Levels", c.Levels, next.Levels)
	return f.Err()
}

// Stats returns a snapshot.
func (s *Shared) Stats() SharedStats {
	var n tally
	for i := range n {
		n[i] = s.refused[i].Load()
	}
	refused, refusals := byReason(n)
	redis := s.redis.Stats()
	return SharedStats{
		Admitted: s.admitted.Load(), Refused: refused, Refusals: refusals, Spent: s.spent.Load(), Refunded: s.refunded.Load(),
		Asked: redis.Asked, AskTime: redis.AskTime, Failed: redis.Failed,
		Alone: s.outOfReach.Load(), Outages: redis.Outages, Down: redis.Down,
	}
}

// Observe calls f with each event from now on, until stop is called, as
// [Limiter.Observe] does. The kinds are EventRefused, EventOutageBegan and
// EventRecovered. An outage is that of a hash slot; Key is the key of the call that
// noticed it. EventOutageBegan and EventRecovered are told by the call that waits for the
// answer or, if all such calls have left, by the next one. Of the errors of an outage, Err is
// that with which it began: Eval sees the later ones.
func (s *Shared) Observe(f func(context.Context, Event)) (stop func()) {
	return s.observers.Observe(f)
}
