// Package lease elects one process at a time as the leader, ends the leader's ctx before
// another process can lead, and lets a database refuse the writes of a past leader.
//
//	store := sqllease.New(db, sqllease.PostgreSQL, sqllease.Config{}) // or MySQL, SQLite; lease.NewMemory() in tests
//	err := store.Migrate(ctx)
//	...
//	err = lease.Run(ctx, store, lease.Config{Name: "billing"},
//		func(ctx context.Context, term lease.Term) error { // while this process leads; to return gives the lease up
//			tx, err := db.BeginTx(ctx, nil)
//			...
//			err = term.Fence(ctx, tx) // fails unless this process still leads
//			...
//			return tx.Commit()
//		})
//
// Every process that could lead calls [Run] with the same Name. One of them gets the lease and
// calls its function; the others wait. If the function returns, or the process dies and
// [Config.TTL] is over, whoever asks first leads next. [Every] calls a function once each
// interval, whoever leads.
//
// # What a leader can rely on
//
// The ctx of the function ends, with a cause that is [ErrLost], before the store lets another
// process have the lease. But a process can be paused between a look at its ctx and a write, and a
// clock can be set. Two things make a write safe:
//
//   - [Term.Fence] in the transaction that writes. It needs a store in the same database:
//     package sqllease.
//   - [Term.Epoch] in the request, for a resource that refuses epochs below the highest that it
//     has seen. The epoch grows with each term, even if the store has lost everything.
//
// Without either, a lease makes it unlikely that two processes work at once, and does not exclude
// it. All times of a lease are of the store's clock: if that is set forward, leases end early, which
// a leader may learn only by its next renewal; if back, that of a dead leader lasts longer. A
// machine that was suspended may count its own time short. Fence and epoch hold in all cases.
//
// Sources: Leader Election (Cloud Design Patterns); Gray and Cheriton, Leases, SOSP 1989; Burrows, The Chubby lock
// service, OSDI 2006 (sequencers).
package lease

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	mathrand "math/rand/v2"
	"sync"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/notify"
)

// A Candidate competes for one lease, each call of Run and Campaign by itself.
type Candidate struct {
	store     Store
	cfg       Config
	made      time.Time
	events    notify.Queue
	observers notify.Observers[Event]

	mu     sync.Mutex
	stats  Stats
	warned time.Time // when a failure of the store was last logged
}

// New returns a Candidate. It panics if store is nil, and with the error of [Config.Validate].
func New(store Store, cfg Config) *Candidate {
	if err := validate(store, cfg); err != nil {
		panic(err)
	}
	return &Candidate{store: store, cfg: cfg.withDefaults(), made: time.Now()}
}

func validate(store Store, cfg Config) error {
	err := cfg.Validate()
	if store == nil {
		err = errors.Join(errors.New("lease: the Store is nil: must be set"), err)
	}
	return err
}

// Run is New(store, cfg).Run(ctx, fn), but returns an error where New panics.
func Run(ctx context.Context, store Store, cfg Config, fn func(context.Context, Term) error) error {
	if err := validate(store, cfg); err != nil {
		return err
	}
	return New(store, cfg).Run(ctx, fn)
}

// Every is [Run] of a fn that is called once each interval, whoever leads. The first call begins at
// once; one that was due while nobody led is made once, late; one that takes longer than the
// interval delays the next. If a leader dies, its call is not made again.
//
// An error of fn gives the lease up and is returned: to go on at the next interval, log it and
// return nil. If ctx ends between two calls, Every returns nil.
//
//	cfg := lease.Config{Name: "report"}
//	err := lease.Every(ctx, store, cfg, time.Hour, func(ctx context.Context, term lease.Term) error {
//		if err := report(ctx, term); err != nil { // in a transaction with term.Fence
//			slog.WarnContext(ctx, "report", "err", err)
//		}
//		return nil // the next one is in an hour
//	})
func Every(
	ctx context.Context, store Store, cfg Config, interval time.Duration, fn func(context.Context, Term) error,
) error {
	if interval <= 0 {
		return fmt.Errorf("lease: the interval of Every is %v: must be more than 0", interval)
	}
	return Run(ctx, store, cfg, func(ctx context.Context, term Term) error {
		next := time.Now()
		if h := term.h; !h.rec.Ran.IsZero() {
			// At most an interval: a clock that was set back would delay the run by as much.
			next = h.heard.Add(min(h.rec.Ran.Add(interval).Sub(h.rec.Now), interval))
		}
		for {
			select {
			case <-time.After(time.Until(next)):
			case <-ctx.Done():
			}
			if !term.h.recordRun(ctx) {
				return nil // also if the next call is due
			}
			next = time.Now().Add(interval)
			if err := fn(ctx, term); err != nil {
				return err
			}
		}
	})
}

// Run waits until this process leads and calls fn, on the goroutine of the caller.
//
//   - If fn returns or panics while its term holds, Run gives the lease up, and returns fn's
//     error.
//   - If the term is lost, the ctx of fn ends with [ErrLost]. When fn has returned, whatever its
//     error, Run waits to lead again and calls fn again.
//   - If ctx ends, the ctx of fn ends with it. The lease is renewed until fn has returned. Then
//     Run gives it up, within TTL / 3, and returns fn's error.
//   - If ctx ends while fn is not running, Run returns an error that wraps its cause.
//
// A store that fails does not end Run.
func (c *Candidate) Run(ctx context.Context, fn func(context.Context, Term) error) error {
	for {
		term, err := c.campaign(ctx, ctx)
		if err != nil {
			return err
		}
		if again, err := c.lead(ctx, term, fn); !again {
			return err
		}
	}
}

// lead calls fn for one term. again reports whether the term was lost before fn returned.
func (c *Candidate) lead(ctx context.Context, term Term, fn func(context.Context, Term) error) (again bool, err error) {
	defer func() { // also when fn panics
		release, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.cfg.TTL/3)
		defer cancel()
		_ = term.Resign(release) // or the TTL ends it
	}()
	err = fn(term.Context(), term)
	over := term.h.over()
	return over != nil && over.reason != resigned && ctx.Err() == nil, err
}

// Campaign waits until the candidate has the lease, for work that is not one function. The caller
// must call [Term.Resign] when the work is done: until then the lease is renewed, also if ctx has
// ended, which bounds the wait alone. [Term.Context] carries its values.
//
// If ctx ends first, Campaign returns an error that wraps its cause, within TTL / 3. A store that
// fails does not end the wait.
func (c *Candidate) Campaign(ctx context.Context) (Term, error) {
	return c.campaign(ctx, context.WithoutCancel(ctx))
}

// campaign waits for the lease until ctx ends. The ctx of the term is made from base.
func (c *Candidate) campaign(ctx, base context.Context) (Term, error) {
	if ctx.Err() != nil {
		return Term{}, ended.Error(ctx)
	}
	began := time.Now()
	c.count(func(s *Stats) { s.Queued++ })
	defer c.count(func(s *Stats) {
		s.Queued--
		s.WaitTime += max(time.Since(began), 1) // 0 is a lease that nobody has waited for
	})
	token, granted := rand.Text(), false // granted: perhaps, by a call whose answer was lost
	for {
		rec, sent, err := c.ask(ctx, token)
		granted = granted || err != nil || rec.Token == token
		if c.holds(rec, token, sent) && err == nil && ctx.Err() == nil {
			return c.begin(base, rec, sent, time.Since(began)), nil
		}
		pause := c.cfg.Poll + mathrand.N(c.cfg.Poll/8+1) // so that many candidates do not ask in step
		if err == nil {
			pause = min(pause, untilFree(rec, c.cfg.Poll))
		} else if ctx.Err() == nil {
			c.storeFailed(ctx, "campaign", err)
		}
		select {
		case <-ctx.Done():
			if granted {
				c.withdraw(ctx, token)
			}
			return Term{}, fmt.Errorf("lease: %s: campaign: %w", c.cfg.Name, ended.Error(ctx))
		case <-time.After(pause):
		}
	}
}

// untilFree returns when the lease may be free, if it is not renewed.
func untilFree(rec Record, poll time.Duration) time.Duration {
	if left := rec.Until.Sub(rec.Now); left > 0 {
		return left + time.Millisecond // to which stores may round
	}
	return poll/8 + time.Millisecond // another is being given it, or a fenced transaction is open
}

// TryCampaign is Campaign without a wait, for a lease that is used as a lock. If the lease is held
// it returns a [*HeldError], and if the answer comes only when the term is over a [*LostError].
func (c *Candidate) TryCampaign(ctx context.Context) (Term, error) {
	if ctx.Err() != nil {
		return Term{}, ended.Error(ctx)
	}
	token := rand.Text()
	rec, sent, err := c.ask(ctx, token)
	switch {
	case err != nil:
		c.failed(ctx)
		c.withdraw(ctx, token)
		return Term{}, fmt.Errorf("lease: %s: %w", c.cfg.Name, err)
	case c.holds(rec, token, sent):
		return c.begin(context.WithoutCancel(ctx), rec, sent, time.Since(sent)), nil
	case rec.Token == token: // the answer came when its term had to be over
		c.withdraw(ctx, token)
		return Term{}, &LostError{Name: c.cfg.Name, Epoch: rec.Epoch, reason: notRenewed}
	}
	held := &HeldError{Name: c.cfg.Name, After: untilFree(rec, c.cfg.Poll)}
	if rec.Held() {
		held.Holder, held.After = rec.Holder, rec.Until.Sub(rec.Now)
	}
	return Term{}, held
}

// ask asks the store for the lease, and returns when it has done so.
func (c *Candidate) ask(ctx context.Context, token string) (rec Record, sent time.Time, err error) {
	call, cancel := context.WithTimeout(ctx, c.cfg.TTL/3)
	defer cancel()
	c.count(func(s *Stats) { s.Asked++ })
	sent = time.Now()
	rec, err = c.store.Acquire(call, Request{Name: c.cfg.Name, Token: token, Holder: c.cfg.Holder, TTL: c.cfg.TTL})
	return rec, sent, err
}

// holds reports whether the token has the lease by the answer to a request that was sent then.
func (c *Candidate) holds(rec Record, token string, sent time.Time) bool {
	return rec.Token == token && rec.Held() && time.Now().Before(c.endOf(sent))
}

// endOf returns when a term must end that was asked for, or renewed, then: before the store can
// give the lease to another. The store counts the TTL from a later moment.
func (c *Candidate) endOf(sent time.Time) time.Time { return sent.Add(c.cfg.TTL - c.cfg.Margin) }

// withdraw gives up what the store may have granted to a token: an answer may be on its way.
func (c *Candidate) withdraw(ctx context.Context, token string) {
	call, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.cfg.TTL/3)
	defer cancel()
	if err := c.store.Release(call, c.cfg.Name, token); err != nil {
		c.storeFailed(ctx, "withdraw", err)
	}
}

// failed counts a call of the store that has failed, but not because its caller left.
func (c *Candidate) failed(ctx context.Context) {
	if ctx.Err() != context.Canceled {
		c.count(func(s *Stats) { s.StoreErrors++ })
	}
}

// storeFailed tells of a call of the store that has failed.
func (c *Candidate) storeFailed(ctx context.Context, what string, err error) {
	err = fmt.Errorf("lease: %s: %s: %w", c.cfg.Name, what, err)
	warn := false
	c.count(func(s *Stats) {
		s.StoreErrors++
		if now := time.Now(); now.Sub(c.warned) >= time.Second {
			c.warned, warn = now, true
		}
	})
	if c.cfg.OnStoreError != nil {
		c.cfg.OnStoreError(ctx, err)
	} else if warn {
		slog.WarnContext(ctx, "lease: the store has failed", "err", err)
	}
}

// Config returns the configuration with its defaults filled in.
func (c *Candidate) Config() Config { return c.cfg }

// Look returns the lease as the store has it.
func (c *Candidate) Look(ctx context.Context) (Record, error) { return c.store.Load(ctx, c.cfg.Name) }
