package throttle

import (
	"context"
	"errors"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/invalid"
)

// Set gives key a limit of its own in this instance: the other instances must be told as
// well. The key keeps it until Set is called with the zero Limit. Tokens that have been
// spent stay spent, as with [Shared.Update]. The empty key has the limit of the
// configuration.
func (s *Shared) Set(key string, limit Limit) error {
	if key == "" {
		return errors.New("throttle: the empty key has the limit of the configuration: use Update")
	}
	if limit.isZero() {
		s.own.Delete(key)
		return nil
	}
	f := invalid.Fields{Type: "throttle.Limit"}
	if checkShared(&f, limit); f.Err() != nil {
		return f.Err()
	}
	s.own.Store(key, limit.withDefaults())
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
	c.N = 0
	answer, o, ok := s.redis.Ask(ctx, &t.Terms, c)
	switch {
	case !ok:
		return t.unknown()
	case o == nil:
		return t.peek(c.Level, answer)
	}
	d := t.unknown()
	switch t.cfg.OnOutage {
	case AdmitAll:
		d.OK = true
		return d
	case LimitLocally:
		return t.whole(s.alone.group(t).peek(key, c.Level))
	}
	d.RetryAfter = max(0, time.Until(o.Until))
	return d
}

// Refund gives back n tokens of a call of key that was admitted but not made: at most as
// many as fill the burst, and as were spent in the present window of each quota. If n is
// 0 or less it does nothing. It returns an error if Redis does not answer, which matches
// [ErrOutage], or if ctx ends.
func (s *Shared) Refund(ctx context.Context, key string, n int) error {
	t := s.termsOf(key)
	n = min(n, t.most[0])
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
	c.Level, c.N, c.Do, c.Refund = 0, 0, do, refund
	_, outage, ok := s.redis.Tell(ctx, &t.Terms, c)
	switch {
	case !ok:
		return ended.Error(ctx)
	case outage != nil:
		return s.outageError(outage)
	}
	return nil
}
