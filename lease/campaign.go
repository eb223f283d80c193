package lease

import (
	"context"
	"crypto/rand"
	"fmt"
	mathrand "math/rand/v2"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
)

// Campaign waits until the candidate has the lease, for work that is not one function.
// The caller must call [Term.Resign] when the work is done: until then the lease is
// renewed, also if ctx has ended. ctx bounds the wait alone; [Term.Context] carries its
// values.
//
// If ctx ends first, Campaign returns an error that wraps its cause, after it has told
// the store that it no longer waits: that takes milliseconds, or at most a third of the
// TTL if the store does not answer. A store that fails does not end the wait.
func (c *Candidate) Campaign(ctx context.Context) (Term, error) {
	return c.campaign(ctx, context.WithoutCancel(ctx))
}

// TryCampaign is Campaign without a wait, for a lease that is used as a lock. It asks
// the store once. If the lease is held it returns a [*HeldError], if the store fails the
// error of the store, and if the answer comes only when the term is over a [*LostError]. The
// last two come after it has given up what the store may have granted, as with Campaign.
func (c *Candidate) TryCampaign(ctx context.Context) (Term, error) {
	if ctx.Err() != nil {
		return Term{}, ended.Error(ctx)
	}
	cfg, token, began := c.setting.Load(), rand.Text(), time.Now()
	rec, h, err := c.ask(ctx, cfg, token, true)
	switch {
	case err != nil:
		c.withdraw(ctx, cfg, token)
		return Term{}, fmt.Errorf("lease: %s: %w", cfg.Name, err)
	case rec.Token == token && h == nil: // the answer came when its term had to be over
		c.withdraw(ctx, cfg, token)
		return Term{}, &LostError{Name: cfg.Name, Epoch: rec.Epoch, reason: notRenewed}
	case h == nil:
		c.count.refused.Add(1)
		if rec.Held() {
			return Term{}, &HeldError{Name: cfg.Name, Holder: rec.Holder, After: rec.Until.Sub(rec.Now)}
		}
		return Term{}, &HeldError{Name: cfg.Name, After: cfg.Poll}
	}
	h.begin(context.WithoutCancel(ctx), time.Since(began))
	return Term{h}, nil
}

// campaign waits for the lease until ctx ends. The ctx of the term is made from base.
func (c *Candidate) campaign(ctx, base context.Context) (Term, error) {
	if ctx.Err() != nil {
		return Term{}, ended.Error(ctx)
	}
	began := time.Now()
	c.count.queued.Add(1)
	defer func() {
		c.count.queued.Add(-1)
		c.count.waitTime.Add(max(int64(time.Since(began)), 1)) // 0 is a lease that nobody has waited for
	}()
	cfg, token := c.setting.Load(), rand.Text()
	var wake chan struct{} // nil: not listening yet
	listening, stop := context.WithCancel(ctx)
	defer stop()
	for {
		rec, h, err := c.ask(ctx, cfg, token, false)
		if h != nil && ctx.Err() == nil {
			h.begin(base, time.Since(began))
			return Term{h}, nil
		}
		pause := cfg.Poll + mathrand.N(cfg.Poll/8+1) // so that many candidates do not ask in step
		if err == nil {
			pause = min(pause, untilFree(cfg, rec))
		} else if ctx.Err() == nil {
			c.storeFailed(ctx, "campaign", err)
		}
		if wake == nil {
			wake = make(chan struct{}, 1)
			c.listen(listening, wake)
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		case <-wake:
		}
		if ctx.Err() != nil {
			c.withdraw(ctx, cfg, token)
			return Term{}, fmt.Errorf("lease: %s: campaign: %w", cfg.Name, ended.Error(ctx))
		}
		// A call that is under way may yet set the old TTL: it must not be for this token.
		now := c.setting.Load()
		if now.TTL != cfg.TTL {
			c.withdraw(ctx, cfg, token)
			token = rand.Text()
		}
		cfg = now
	}
}

// ask asks the store for the lease. h is nil if the token has not got it.
func (c *Candidate) ask(ctx context.Context, cfg *Config, token string, once bool) (rec Record, h *holding, err error) {
	call, cancel := context.WithTimeout(ctx, cfg.TTL/3)
	defer cancel()
	c.count.asked.Add(1)
	sent := time.Now()
	rec, err = c.store.Acquire(call, Request{
		Name: cfg.Name, Token: token, Holder: cfg.Holder, TTL: cfg.TTL, Grace: grace(cfg), Once: once,
	})
	if err != nil || rec.Token != token || !rec.Held() || !time.Now().Before(endOf(cfg, sent)) {
		return rec, nil, err
	}
	return rec, newHolding(c, cfg, rec, sent), nil
}

// endOf returns when a term must end that was asked for, or renewed, then: before the
// store can give the lease to another. The store counts the TTL from a later moment.
func endOf(cfg *Config, sent time.Time) time.Time { return sent.Add(cfg.TTL - cfg.Margin) }

// grace is how long a free lease waits for the first in line. That candidate looks within
// its Poll and an eighth of it.
func grace(cfg *Config) time.Duration { return cfg.Poll + cfg.Poll/4 }

// untilFree returns when this candidate may find the lease free, if it is not renewed.
func untilFree(cfg *Config, rec Record) time.Duration {
	left := rec.Until.Sub(rec.Now) + time.Millisecond // to which stores may round
	if rec.Ahead {
		left += grace(cfg)
	}
	if left > time.Millisecond {
		return left
	}
	return cfg.Poll/8 + time.Millisecond // a fenced transaction is open
}

// withdraw gives up the place of a token in the line, or the lease: an answer that has
// granted it may be on its way.
func (c *Candidate) withdraw(ctx context.Context, cfg *Config, token string) {
	call, cancel := context.WithTimeout(context.WithoutCancel(ctx), cfg.TTL/3)
	defer cancel()
	if err := c.store.Release(call, cfg.Name, token); err != nil {
		c.storeFailed(ctx, "withdraw", err)
	}
}

// listen has the store wake a campaign, until ctx ends.
func (c *Candidate) listen(ctx context.Context, wake chan struct{}) {
	n, ok := c.store.(Notifier)
	if !ok {
		return
	}
	notify := func() {
		select {
		case wake <- struct{}{}:
		default:
		}
	}
	go func() {
		for {
			err := n.Listen(ctx, c.Name(), notify)
			if ctx.Err() != nil {
				return
			}
			c.storeFailed(ctx, "listen", err)
			select {
			case <-ctx.Done():
			case <-time.After(c.setting.Load().Poll):
			}
		}
	}()
}
