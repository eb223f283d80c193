// Package lease elects one process at a time as leader, ends the leader's ctx before another process can lead,
// and lets a database reject the writes of a former leader.
//
//	store := sqllease.New(db, sqllease.PostgreSQL, sqllease.Config{}) // or lease.NewMemory() in tests
//	if err := store.Migrate(ctx); err != nil {
//		return err
//	}
//	billing := lease.New(store, lease.Config{Name: "billing"})
//	err := billing.Loop(ctx, func(ctx context.Context, term lease.Term) error { // while this process leads
//		tx, err := db.BeginTx(ctx, nil)
//		...
//		err = term.Fence(ctx, tx) // fails unless this process still leads
//		...
//		return tx.Commit()
//	})
//
// Every process that may lead creates a [Candidate] with the same Name. [Candidate.Loop] is for a worker that
// leads again and again, [Candidate.Run] is for work that is done once, and [Candidate.Every] is for work that is
// due at the instants of a [Schedule].
//
// # Guarantees of a leader
//
// The leader's ctx ends, with a cause that matches [ErrLost], before the store gives the lease to another process.
// But a process can be paused between a check of its ctx and a write, and clocks can jump. Two things make a write
// safe:
//
//   - [Term.Fence] in the transaction that writes, with a store in the same database: package sqllease.
//   - [Term.Epoch] in the request, for a resource that rejects epochs lower than the highest it has seen.
//
// Without either, a lease makes it unlikely that two processes work at the same time, but does not exclude it. A
// store measures the TTL with its own clock. If that clock is set forward, leases end early, and a leader may learn
// of it only at its next renewal. If the clock is set back, a dead leader's lease lasts longer. A machine that was
// suspended may count too little time. Fences and epochs hold in all of these cases.
//
// Sources: Leader Election (Cloud Design Patterns); Gray and Cheriton, Leases, SOSP 1989; Burrows, The Chubby
// lock service, OSDI 2006.
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

// A Candidate competes for one lease. Each call to Run, Loop, Every, Campaign and TryCampaign competes by itself.
// A Candidate is safe for concurrent use.
type Candidate struct {
	store     Store
	cfg       Config
	events    notify.Queue
	observers notify.Observers[Event]

	mu     sync.Mutex
	stats  Stats
	vacant time.Time // when c first saw that no process held the lease; zero if it was held when c last looked
	warned time.Time // when a failure of the store was last logged
}

// New returns a Candidate. It panics if store is nil or cfg is invalid; see [Config.Validate].
func New(store Store, cfg Config) *Candidate {
	err := cfg.Validate()
	if store == nil {
		err = errors.Join(errors.New("lease: the Store is nil: must be set"), err)
	}
	if err != nil {
		panic(err)
	}
	return &Candidate{store: store, cfg: cfg.withDefaults()}
}

// Run waits until this process leads, calls fn on the caller's goroutine, releases the lease and returns fn's error.
//
//   - If the term is lost while fn runs, the ctx of fn ends with a cause that matches [ErrLost]. When fn has
//     returned, Run competes again and calls fn again, whatever fn's error was.
//   - If ctx is done while fn runs, the ctx of fn ends as well. The lease is renewed until fn has returned. Run then
//     releases it within TTL/3 and returns fn's error.
//   - If ctx is done while fn is not running, Run returns an error that wraps the cause of ctx.
//   - If fn panics, Run releases the lease and panics.
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
	defer func() { // even if fn panics
		release, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.cfg.TTL/3)
		defer cancel()
		_ = term.Resign(release) // after an error, the TTL ends the lease
	}()
	err = fn(term.Context(), term)
	why := term.h.endedBecause()
	return why != nil && why.reason != resigned && ctx.Err() == nil, err
}

// Loop is like [Candidate.Run], but after fn has returned it waits for Config.Poll and competes again, until ctx
// is done. fn's errors go to [Config].OnError. Loop returns nil.
func (c *Candidate) Loop(ctx context.Context, fn func(context.Context, Term) error) error {
	for ctx.Err() == nil {
		_ = c.Run(ctx, func(ctx context.Context, term Term) error {
			err := fn(ctx, term)
			c.report(ctx, err)
			return err
		})
		select {
		case <-ctx.Done():
		case <-time.After(c.cfg.Poll):
		}
	}
	return nil
}

// report passes an error of a function of Loop or Every to OnError. ctx is the function's ctx. An error that only
// reports that ctx is done is not passed on: EventLost has reported the loss of a term, and a shutdown is no error.
func (c *Candidate) report(ctx context.Context, err error) {
	switch {
	case err == nil || errors.Is(err, ctx.Err()) || errors.Is(err, context.Cause(ctx)):
	case c.cfg.OnError != nil:
		c.cfg.OnError(ctx, err)
	default:
		slog.WarnContext(ctx, "lease: function failed", "lease", c.cfg.Name, "err", err)
	}
}

// Campaign waits until this process leads, for work that is not a single function. The lease is renewed until
// [Term.Resign] is called, even after ctx is done: ctx limits only the wait. [Term.Context] has ctx's values.
//
// If ctx is done first, Campaign returns an error that wraps the cause of ctx, within TTL/3. A store that fails does
// not end the wait.
func (c *Candidate) Campaign(ctx context.Context) (Term, error) {
	return c.campaign(ctx, context.WithoutCancel(ctx))
}

// campaign waits for the lease until ctx is done. base is the parent of the term's ctx.
func (c *Candidate) campaign(ctx, base context.Context) (Term, error) {
	if ctx.Err() != nil {
		return Term{}, ended.Error(ctx)
	}
	began := time.Now()
	c.count(func(s *Stats) { s.Queued++ })
	defer c.count(func(s *Stats) {
		s.Queued--
		s.WaitTime += max(time.Since(began), 1) // 0 means that no call has waited; see health
	})
	// granted reports whether the store may have given the lease to token, perhaps by a call whose answer was lost.
	token, granted := rand.Text(), false
	for {
		rec, sent, err := c.acquireOnce(ctx, token)
		granted = granted || err != nil || rec.Token == token
		if c.ownsLease(rec, token, sent) && err == nil && ctx.Err() == nil {
			return c.begin(base, rec, sent, time.Since(began)), nil
		}
		pause := c.cfg.Poll + mathrand.N(c.cfg.Poll/8+1) // keeps many candidates from polling in step
		if err == nil {
			pause = min(pause, timeUntilFree(rec, c.cfg.Poll))
		} else if ctx.Err() == nil {
			c.storeFailed(ctx, 0, "campaign", err)
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

// timeUntilFree returns the time until the lease may be free, if it is not renewed.
func timeUntilFree(rec Record, poll time.Duration) time.Duration {
	if rec.Held() {
		return rec.Left + time.Millisecond // stores may round to a millisecond
	}
	return poll/8 + time.Millisecond // another process is getting it, or a fenced transaction is open
}

// TryCampaign is like [Candidate.Campaign] but does not wait, for a lease that is used as a lock. If the lease is
// held, it returns a [*HeldError]. If the store's answer arrives after the term has ended, it returns a [*LostError].
func (c *Candidate) TryCampaign(ctx context.Context) (Term, error) {
	if ctx.Err() != nil {
		return Term{}, ended.Error(ctx)
	}
	token := rand.Text()
	rec, sent, err := c.acquireOnce(ctx, token)
	switch {
	case err != nil:
		c.countFailure(ctx)
		c.withdraw(ctx, token)
		return Term{}, fmt.Errorf("lease: %s: %w", c.cfg.Name, err)
	case c.ownsLease(rec, token, sent):
		return c.begin(context.WithoutCancel(ctx), rec, sent, time.Since(sent)), nil
	case rec.Token == token: // the answer arrived after the end of the term
		c.withdraw(ctx, token)
		return Term{}, &LostError{Name: c.cfg.Name, Epoch: rec.Epoch, reason: notRenewed}
	}
	held := &HeldError{Name: c.cfg.Name, After: timeUntilFree(rec, c.cfg.Poll)}
	if rec.Held() {
		held.Holder, held.After = rec.Holder, rec.Left
	}
	return Term{}, held
}

// acquireOnce requests the lease once. sent is the time of the request.
func (c *Candidate) acquireOnce(ctx context.Context, token string) (rec Record, sent time.Time, err error) {
	call, cancel := context.WithTimeout(ctx, c.cfg.TTL/3)
	defer cancel()
	c.count(func(s *Stats) { s.Asked++ })
	sent = time.Now()
	rec, err = c.store.Acquire(call, Request{Name: c.cfg.Name, Token: token, Holder: c.cfg.Holder, TTL: c.cfg.TTL})
	if err == nil {
		c.saw(rec.Held())
	}
	return rec, sent, err
}

// ownsLease reports whether the token owns the lease, according to the answer to a request that was sent at sent.
func (c *Candidate) ownsLease(rec Record, token string, sent time.Time) bool {
	return rec.Token == token && rec.Held() && time.Now().Before(c.endOf(sent))
}

// endOf returns when a term ends that was requested or renewed at sent. That is before the store can give the lease
// to another process, because the store counts the TTL from a later moment.
func (c *Candidate) endOf(sent time.Time) time.Time { return sent.Add(c.cfg.TTL - c.cfg.Margin) }

// withdraw releases the lease that the store may have granted to token by a call whose answer has not arrived.
func (c *Candidate) withdraw(ctx context.Context, token string) {
	call, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.cfg.TTL/3)
	defer cancel()
	if err := c.store.Release(call, c.cfg.Name, token); err != nil {
		c.storeFailed(ctx, 0, "withdraw", err)
	}
}

// saw records whether the lease was held when the store answered.
func (c *Candidate) saw(held bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if held {
		c.vacant = time.Time{}
	} else if c.vacant.IsZero() {
		c.vacant = time.Now()
	}
}

// countFailure counts a failed call to the store, unless it failed because its caller canceled it.
func (c *Candidate) countFailure(ctx context.Context) {
	if ctx.Err() != context.Canceled {
		c.count(func(s *Stats) { s.StoreErrors++ })
	}
}

// storeFailed counts and reports a failed call to the store. epoch is the term's, or 0 outside of a term.
func (c *Candidate) storeFailed(ctx context.Context, epoch int64, what string, err error) {
	err = fmt.Errorf("lease: %s: %s: %w", c.cfg.Name, what, err)
	warn := !c.observers.Any()
	c.count(func(s *Stats) {
		s.StoreErrors++
		if now := time.Now(); now.Sub(c.warned) >= time.Second {
			c.warned = now
		} else {
			warn = false
		}
	})
	if warn {
		slog.WarnContext(ctx, "lease: store failed", "lease", c.cfg.Name, "err", err)
	}
	c.notify(ctx, Event{Kind: EventStoreFailed, Epoch: epoch, Err: err})
}

// Config returns the configuration with defaults filled in.
func (c *Candidate) Config() Config { return c.cfg }

// Status returns the lease as the store has it.
func (c *Candidate) Status(ctx context.Context) (Record, error) {
	rec, err := c.store.Load(ctx, c.cfg.Name)
	if err == nil {
		c.saw(rec.Held())
	}
	return rec, err
}
