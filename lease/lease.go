// Package lease provides leader election: one process at a time holds a lease and leads. The leader's ctx is canceled
// before another process can lead, within the limits described below, and a database can reject the writes of a former
// leader.
//
//	store := sqllease.New(db, sqllease.PostgreSQL, sqllease.Config{}) // or lease.NewMemory() in tests
//	if err := store.Migrate(ctx); err != nil {
//		return err
//	}
//	billing := lease.New(store, lease.Config{Name: "billing"})
//	err := billing.Loop(ctx, func(ctx context.Context, term lease.Term) error { // called while this process leads
//		tx, err := db.BeginTx(ctx, nil)
//		...
//		err = term.Fence(ctx, tx) // returns an error unless this process still leads
//		...
//		return tx.Commit()
//	})
//
// Every process that may lead creates a [Candidate] with the same Name. [Candidate.Loop] is for a worker that leads
// repeatedly. [Candidate.Run] is for work that is done once. [Candidate.Every] is for work that is due at the instants
// of a [Schedule]. A term is a period in which a process leads.
//
// # Guarantees of a leader
//
// The leader's ctx is canceled, with a cause that matches [ErrLost], before the store gives the lease to another
// process. This does not hold if the process is paused, if the store's clock is set forward, or if the store loses
// data. So the cancellation does not suffice to make a write safe. To make a write safe, do one of the following:
//
//   - Call [Term.Fence] in the transaction that writes. The lease's store must be in the same database as the
//     transaction; see package sqllease.
//   - Send [Term.Epoch] in each request to a resource that rejects epochs lower than the highest epoch it has received.
//
// Without a fence or an epoch, it is unlikely but possible that two processes work at the same time. A process can be
// paused between the check of its ctx and a write. A store measures the TTL with its own clock. If the store's clock is
// set forward or the store loses data, leases end early, and the leader may notice only at its next renewal. If the
// store's clock is set back, the lease of a dead leader lasts longer. The clock of a machine may stop while the machine
// is suspended. Fences and epochs are safe even if a clock is set or a machine is suspended.
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
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/notify"
)

// A Candidate competes for one lease. It is safe for concurrent use. Concurrent calls to Run, Loop, Every, Campaign and
// TryCampaign compete with each other.
type Candidate struct {
	store     Store
	cfg       Config
	events    notify.Queue
	observers notify.Observers[Event]

	mu      sync.Mutex
	stats   Stats
	vacant  time.Time // time at which c first observed that no process held the lease; see saw
	lastRun int64     // the greatest LastRun of the records that c has seen
	warned  time.Time // time at which a failure of the store was last logged
}

// New returns a Candidate. It panics if store is nil or cfg is invalid; see [Config.Validate].
func New(store Store, cfg Config) *Candidate {
	err := cfg.Validate()
	if store == nil {
		err = errors.Join(errors.New("lease: Store is nil: must be set"), err)
	}
	if err != nil {
		panic(err)
	}
	return &Candidate{store: store, cfg: cfg.withDefaults()}
}

// Run waits until this process leads, calls fn on the caller's goroutine, releases the lease and returns fn's error.
//
//   - If the term is lost while fn runs, fn's ctx is canceled with a cause that matches [ErrLost]. After a lost term,
//     Run ignores fn's error, pauses for Config.Poll, competes again, and calls fn again when this process leads.
//   - If ctx is done while fn runs, fn's ctx is also done. The lease is renewed until fn has returned. When fn has
//     returned, Run releases the lease, with a timeout of TTL/3, and returns fn's error.
//   - If ctx is done while fn does not run, Run returns an error that wraps the cause of ctx.
//   - If fn panics, Run releases the lease and panics.
//
// If the store fails, Run does not return, but repeats the call to the store.
func (c *Candidate) Run(ctx context.Context, fn func(context.Context, Term) error) error {
	for {
		term, err := c.campaign(ctx, ctx)
		if err != nil {
			return err
		}
		if again, err := c.lead(ctx, term, fn); !again {
			return err
		}
		c.pause(ctx) // if the store ends each term at once, elections without a pause would overload it
	}
}

// pause waits for Poll, or until ctx is done.
func (c *Candidate) pause(ctx context.Context) {
	select {
	case <-ctx.Done():
	case <-time.After(c.cfg.Poll):
	}
}

// lead calls fn for one term. again reports whether to compete again, because the term was lost before fn returned.
func (c *Candidate) lead(ctx context.Context, term Term, fn func(context.Context, Term) error) (again bool, err error) {
	defer func() { // even if fn panics
		release, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.cfg.TTL/3)
		defer cancel()
		_ = term.Resign(release) // the lease ends after its TTL if Resign fails
	}()
	err = fn(term.Context(), term)
	why := term.h.endedBecause()
	return why != nil && why.reason != resigned && ctx.Err() == nil, err
}

// Loop is like [Candidate.Run], but competes and calls fn repeatedly until ctx is done, with a pause of Config.Poll
// after each call. fn's errors are passed to [Config].OnError. Loop returns nil.
func (c *Candidate) Loop(ctx context.Context, fn func(context.Context, Term) error) error {
	for ctx.Err() == nil {
		_ = c.Run(ctx, func(ctx context.Context, term Term) error {
			err := fn(ctx, term)
			c.report(ctx, err)
			return err
		})
		c.pause(ctx)
	}
	return nil
}

// report passes an error of Loop's function to OnError. ctx is the function's ctx. report ignores an error that only
// reports that ctx is done: either EventLost has already reported the loss of the term, or the program shuts down,
// which is not an error. In both cases, the function is called again in the next term.
func (c *Candidate) report(ctx context.Context, err error) {
	if ctx.Err() == nil || !reportsOnly(err, ctx.Err(), context.Cause(ctx)) {
		c.onError(ctx, err)
	}
}

// onError passes err to OnError, unless it is nil.
func (c *Candidate) onError(ctx context.Context, err error) {
	switch {
	case err == nil:
	case c.cfg.OnError != nil:
		c.cfg.OnError(ctx, err)
	default:
		slog.WarnContext(ctx, "lease: function failed", "lease", c.cfg.Name, "err", err)
	}
}

// reportsOnly reports whether err, and each error that err joins, matches one of ends.
func reportsOnly(err error, ends ...error) bool {
	isEnd := func(end error) bool { return reflect.TypeOf(end).Comparable() && err == end }
	if slices.ContainsFunc(ends, isEnd) {
		return true
	}
	switch e := err.(type) {
	case interface{ Unwrap() []error }:
		return !slices.ContainsFunc(e.Unwrap(), func(err error) bool { return !reportsOnly(err, ends...) })
	case interface{ Unwrap() error }:
		if e.Unwrap() != nil {
			return reportsOnly(e.Unwrap(), ends...)
		}
	}
	return slices.ContainsFunc(ends, func(end error) bool { return errors.Is(err, end) })
}

// Campaign waits until this process leads. Campaign is for work that is not a single function; otherwise use
// [Candidate.Run]. The lease is renewed until the term is lost or [Term.Resign] is called, even after ctx is done,
// because ctx limits only the wait. [Term.Context] has ctx's values.
//
// If ctx is done before this process leads, Campaign returns an error that wraps the cause of ctx. Campaign may return
// up to TTL/3 after ctx is done. If the store fails, Campaign continues to wait.
func (c *Candidate) Campaign(ctx context.Context) (Term, error) {
	return c.campaign(ctx, context.WithoutCancel(ctx))
}

// campaign waits for the lease until ctx is done. base is the parent of the term's ctx.
func (c *Candidate) campaign(ctx, base context.Context) (Term, error) {
	if ctx.Err() != nil {
		return Term{}, ended.Error(ctx)
	}
	began := time.Now()
	c.count(func(s *Stats) {
		if s.Queued++; s.Queued == 1 {
			c.vacant = time.Time{} // the lease was not needed before
		}
	})
	defer c.count(func(s *Stats) {
		s.Queued--
		s.WaitTime += time.Since(began)
	})
	// granted reports whether the store may have given the lease to token. This may happen in a call whose answer was
	// lost.
	token, granted := rand.Text(), false
	for {
		rec, sent, err := c.acquireOnce(ctx, token)
		granted = granted || err != nil || rec.Token == token
		if c.ownsLease(rec, token, sent) && err == nil && ctx.Err() == nil {
			return c.begin(base, rec, sent, time.Since(began)), nil
		}
		pause := c.cfg.Poll + mathrand.N(c.cfg.Poll/8+1) // random, because many candidates must not poll at the same time
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

// timeUntilFree returns the time until the lease may be free, unless it is renewed.
func timeUntilFree(rec Record, poll time.Duration) time.Duration {
	if rec.Held() {
		return rec.Left + time.Millisecond // stores may round to a millisecond
	}
	return poll/8 + time.Millisecond // another process is acquiring the lease, or a fenced transaction is open
}

// TryCampaign is like [Candidate.Campaign] but does not wait for the lease. TryCampaign is for a lease that is used as
// a lock. If the lease is held, TryCampaign returns a [*HeldError]. If the store does not answer, the store may still
// have granted the lease. TryCampaign then tries to release the lease, which takes up to TTL/3, even after ctx is done.
// If the store grants the lease, but its answer arrives only after the term has ended, TryCampaign returns a
// [*LostError].
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

// acquireOnce requests the lease once. sent is the time when the request was sent.
func (c *Candidate) acquireOnce(ctx context.Context, token string) (rec Record, sent time.Time, err error) {
	call, cancel := context.WithTimeout(ctx, c.cfg.TTL/3)
	defer cancel()
	c.count(func(s *Stats) { s.Asked++ })
	sent = time.Now()
	rec, err = c.store.Acquire(call, Request{Name: c.cfg.Name, Token: token, Holder: c.cfg.Holder, TTL: c.cfg.TTL})
	if err == nil {
		c.saw(rec)
	}
	return rec, sent, err
}

// ownsLease reports whether token holds the lease. rec is the store's answer to a request that was sent at the time
// sent.
func (c *Candidate) ownsLease(rec Record, token string, sent time.Time) bool {
	return rec.Token == token && rec.Held() && time.Now().Before(c.endOf(sent))
}

// endOf returns the time when a term ends. sent is the time when the term's last request or renewal was sent. The term
// ends before the store can give the lease to another process, because the TTL starts in the store only when the
// request has arrived.
func (c *Candidate) endOf(sent time.Time) time.Time { return sent.Add(c.cfg.TTL - c.cfg.Margin) }

// withdraw releases the lease that the store may have granted to token in a call whose answer did not arrive.
func (c *Candidate) withdraw(ctx context.Context, token string) {
	call, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.cfg.TTL/3)
	defer cancel()
	if err := c.store.Release(call, c.cfg.Name, token); err != nil {
		c.storeFailed(ctx, 0, "withdraw", err)
	}
}

// saw records what the store has answered. c.vacant is zero if the lease was held. It is also set to zero when the
// first of the calls that wait to lead starts to wait.
func (c *Candidate) saw(rec Record) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.lastRun = max(c.lastRun, rec.LastRun)
	if rec.Held() {
		c.vacant = time.Time{}
	} else if c.vacant.IsZero() {
		c.vacant = time.Now()
	}
}

// countFailure counts a failed call to the store, unless the call failed because the caller canceled ctx.
func (c *Candidate) countFailure(ctx context.Context) {
	if ctx.Err() != context.Canceled {
		c.count(func(s *Stats) { s.StoreErrors++ })
	}
}

// storeFailed counts and reports a failed call to the store. epoch is the term's epoch, or 0 outside of a term.
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

// Status returns the lease's current record in the store.
func (c *Candidate) Status(ctx context.Context) (Record, error) {
	rec, err := c.store.Load(ctx, c.cfg.Name)
	if err == nil {
		c.saw(rec)
	}
	return rec, err
}
