package throttle

import (
	"context"
	"errors"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/invalid"
)

// termsOf returns the terms of a key. It panics if LimitFor returns an invalid limit.
func (s *Shared) termsOf(key string) *sharedTerms {
	t := s.terms.Load()
	if key == "" {
		return t
	}
	if s.sets.Load() > 0 {
		if own, ok := s.own.Load(key); ok {
			return newSharedTerms(t.cfg, own.(Limit))
		}
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

// Set gives key a limit of its own in this instance: the other instances must be told as
// well. The key keeps it until Set is called with the zero Limit. Tokens that have been
// spent stay spent, as with [Shared.SetLimit]. The empty key has the limit of the
// configuration.
func (s *Shared) Set(key string, limit Limit) error {
	if key == "" {
		return errors.New("throttle: the empty key has the limit of the configuration: use SetLimit")
	}
	if limit.isZero() {
		if _, ok := s.own.LoadAndDelete(key); ok {
			s.sets.Add(-1)
		}
		return nil
	}
	f := invalid.Fields{Type: "throttle.Limit"}
	if checkShared(&f, limit); f.Err() != nil {
		return f.Err()
	}
	if _, ok := s.own.Swap(key, limit.withDefaults()); !ok {
		s.sets.Add(1)
	}
	return nil
}

// Peek returns the Decision that a Take of 1 would return, but takes nothing: its
// Remaining is the number of tokens that are there now. It makes a round trip. It calls
// Priority. Once ctx has ended, or in an outage, it returns what Take would.
func (s *Shared) Peek(ctx context.Context, key string) Decision {
	t := s.termsOf(key)
	if ctx.Err() != nil {
		return t.unknown()
	}
	c := t.callOf(ctx, key)
	o := s.outages.of(c.full, t.cfg.RetryEvery)
	if o == nil {
		c.n = 0
		trip := s.depart(ctx, t, c)
		if !trip.wait(ctx) {
			return t.unknown()
		}
		if o = trip.outage; o == nil {
			return t.peek(c.level, trip.answer)
		}
	}
	d := t.unknown()
	switch t.cfg.OnOutage {
	case AdmitAll:
		d.OK = true
		return d
	case LimitLocally:
		return t.whole(s.alone.group(t).Peek(key))
	}
	d.RetryAfter = max(0, time.Until(o.until))
	return d
}

// peek returns the Decision on one token by an answer.
func (t *sharedTerms) peek(level int, a answer) Decision {
	a.wait = t.wait(1, level, a.debt)
	there := a.wait == 0
	for i, w := range a.windows {
		there = there && w.used < int64(t.quotas[i].room[level])
	}
	d, _ := t.decision(there, 1, level, a)
	return d
}

// wait returns the time until a level could take n tokens of the rate on top of a debt.
func (t *sharedTerms) wait(n, level int, debt time.Duration) time.Duration {
	cost, room := t.token.times(n), t.room[level]
	over := int64(debt/time.Microsecond) + int64(cost.whole) - int64(room.whole)
	if cost.part > room.part {
		over++
	}
	return time.Duration(max(over, 0)) * time.Microsecond
}

// Refund gives back n tokens of a call of key that was admitted but not made: at most as
// many as fill the burst, and as were spent in the present window of each quota. If n is
// 0 or less it does nothing. It returns an error if Redis does not answer, which matches
// [ErrOutage], or if ctx ends.
func (s *Shared) Refund(ctx context.Context, key string, n int) error {
	t := s.termsOf(key)
	n = min(n, t.most(0))
	if n <= 0 {
		return nil
	}
	if err := s.tell(ctx, t, key, "take", n); err != nil {
		return err
	}
	s.refunded.Add(int64(n))
	return nil
}

// Reset makes the burst and the quotas of key full again, for all instances. It returns an
// error if Redis does not answer, which matches [ErrOutage], or if ctx ends.
func (s *Shared) Reset(ctx context.Context, key string) error {
	return s.tell(ctx, s.termsOf(key), key, "reset", 0)
}

// tell has the script do something else than to take tokens.
func (s *Shared) tell(ctx context.Context, t *sharedTerms, key, do string, refund int) error {
	if ctx.Err() != nil {
		return ended.Error(ctx)
	}
	c := t.callOf(ctx, key)
	c.level, c.n, c.do, c.refund = 0, 0, do, refund
	trip := s.depart(ctx, t, c)
	switch {
	case !trip.wait(ctx):
		return ended.Error(ctx)
	case trip.outage != nil:
		return s.outageError(trip.outage)
	}
	return nil
}
