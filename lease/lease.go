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
// Every process that could lead calls [Run] with the same Name. One of them gets the
// lease and calls its function; the others wait. The lease lasts for [Config.TTL] and
// is renewed when a third of it has passed. If the process dies, another one leads when the TTL
// is over. If the function returns, the lease is given up and another one leads
// immediately. [Every] calls a function once each interval instead.
//
// # What a leader can rely on
//
// The ctx of the function ends, with a cause that is [ErrLost], before the store lets
// another process have the lease. The time counts from the start of the last renewal
// that succeeded, on the monotonic clock of the process, less [Config.Margin]. The wall
// clock of a process plays no part: all times of a lease are of the store's clock.
//
// A ctx cannot stop work that does not look at it, and a process can be paused at any
// moment. Consider a leader that finds its ctx alive, is stopped for a minute, and
// then writes: another process has led meanwhile. Two things make such a write safe:
//
//   - [Term.Fence] in the transaction that writes. It fails unless the term still
//     holds, and no other term can begin until the transaction ends. It needs a store
//     in the same database: package sqllease.
//   - [Term.Epoch] in the request, for a resource that remembers the highest epoch it
//     has seen and refuses lower ones. The epoch grows with each term. It includes the
//     time of the store, so that it grows even if the store has lost everything.
//
// Without either, a lease makes it unlikely that two processes work at once, and saves
// the cost of it. It does not exclude it.
//
// # Clocks
//
// If the clock of the store is set forward, leases end early: a leader may then learn
// of it only by its next renewal. If it is set back, the lease of a leader that dies
// lasts longer by as much. The fence and the epoch hold in both cases. On a machine
// that was suspended, the monotonic clock may not have counted the time: the fence
// covers that too.
//
// Patterns: Leader Election in Cloud Design Patterns
// (https://learn.microsoft.com/azure/architecture/patterns/leader-election). Gray and
// Cheriton, Leases: An Efficient Fault-Tolerant Mechanism for Distributed File Cache
// Consistency, SOSP 1989. Burrows, The Chubby lock service, OSDI 2006 (sequencers).
package lease

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"github.com/go-resilience/resilience/internal/invalid"
	"github.com/go-resilience/resilience/internal/notify"
	"github.com/go-resilience/resilience/internal/settings"
)

// A Config says which lease a [Candidate] competes for, and how. Candidates for one
// lease should have the same TTL and Poll.
type Config struct {
	// Name is the name of the lease. All candidates with the same Name and store
	// compete. It is required: up to 200 bytes of UTF-8, without a zero byte.
	Name string

	// Holder tells people and proxies who holds the lease, such as the address at
	// which the leader can be reached. It need not be unique. Empty means the host name
	// and the process id. It is limited as Name is.
	Holder string

	// TTL is how long the lease lasts without a renewal, and so how long nobody leads
	// after a leader has died. Zero means 15 s; the least is 10 ms.
	TTL time.Duration

	// Margin is how long before the end of the lease the ctx of a term ends if no
	// renewal has succeeded. It is the time for work to stop, and covers the
	// difference in speed between the clocks of the store and the process. Zero means
	// TTL / 10; the most is TTL / 2.
	Margin time.Duration

	// Poll is how often a waiting candidate asks the store whether the lease is free.
	// It does not delay the end of a lease that runs out, as the candidate knows when
	// that is. A store that implements [Notifier] tells of a lease that is given up
	// without waiting for Poll. Zero means TTL / 3.
	Poll time.Duration

	// OnEvent, if not nil, is called for each Event. It should return soon, as the
	// work of a term waits for it.
	OnEvent func(context.Context, Event)

	// OnStoreError, if not nil, is called when the store has failed. The candidate
	// tries again. It should return soon, as the next renewal waits for it. Nil means
	// that slog's default logger warns, once a second at most.
	OnStoreError func(context.Context, error)

	// OnPanic is called with each panic of a hook or an observer, and its stack: some run on
	// a goroutine of the candidate, so no panic passes on. Stats.HookPanics counts them. Nil
	// means that slog's default logger tells of them.
	OnPanic func(ctx context.Context, value any, stack []byte)
}

// Validate returns an error that names each invalid field, or nil.
func (c Config) Validate() error {
	f := invalid.Fields{Type: "lease.Config"}
	f.Need(c.Name != "", "Name", `""`, "set: it names the lease")
	f.Need(isText(c.Name), "Name", fmt.Sprintf("%.40q", c.Name), "up to 200 bytes of UTF-8 without a zero byte")
	f.Need(isText(c.Holder), "Holder", fmt.Sprintf("%.40q", c.Holder), "up to 200 bytes of UTF-8 without a zero byte")
	f.Need(c.TTL == 0 || c.TTL >= 10*time.Millisecond, "TTL", c.TTL, "0 (for 15s), or 10ms or more")
	f.Need(c.Margin >= 0 && c.Margin <= cmp.Or(max(c.TTL, 0), defaultTTL)/2, "Margin", c.Margin, "0 (for TTL/10), or at most TTL/2")
	f.Need(c.Poll >= 0, "Poll", c.Poll, "0 (for TTL/3) or more")
	return f.Err()
}

const (
	defaultTTL = 15 * time.Second
	longest    = time.Duration(1 << 61) // of any time: 73 years, and safe to add
)

func isText(s string) bool {
	return len(s) <= 200 && utf8.ValidString(s) && !strings.Contains(s, "\x00")
}

func (c Config) withDefaults() Config {
	c.Holder = cmp.Or(c.Holder, thisProcess())
	c.TTL = min(cmp.Or(c.TTL, defaultTTL), longest)
	c.Margin = cmp.Or(c.Margin, c.TTL/10)
	c.Poll = min(cmp.Or(c.Poll, c.TTL/3), longest)
	return c
}

func thisProcess() string {
	host, _ := os.Hostname()
	return strings.ToValidUTF8(fmt.Sprintf("%.180s/%d", host, os.Getpid()), "")
}

// A Candidate competes for one lease. It is safe for concurrent use, and built by
// [New]. Several calls of Run and Campaign compete with each other too.
type Candidate struct {
	store     Store
	setting   settings.Setting[Config]
	events    notify.Queue[Event]
	observers notify.Observers[Event]
	panics    notify.Panics // of hooks
	count     counters
	warned    atomic.Int64 // when a failure of the store was last logged
}

// New returns a Candidate, which does nothing until [Candidate.Run] or
// [Candidate.Campaign] is called. It panics if store is nil, and with the error of
// [Config.Validate], if there is one.
func New(store Store, cfg Config) *Candidate {
	if err := validate(store, cfg); err != nil {
		panic(err)
	}
	c := &Candidate{store: store}
	c.setting.Init(cfg, Config.withDefaults)
	return c
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

// Every is [Run] of a fn that is called when a term begins and then once each interval, which
// must be more than 0. A call that takes longer delays the next one. An error of fn while its
// term holds gives the lease up and is returned: to go on at the next interval, log it and
// return nil. If ctx ends between two calls, Every returns nil.
//
// No registry shows the lease, since nobody has its Candidate: for that, make one by [New],
// and count the interval in the function of its [Candidate.Run].
func Every(ctx context.Context, store Store, cfg Config, interval time.Duration, fn func(context.Context, Term) error) error {
	if interval <= 0 {
		return fmt.Errorf("lease: the interval of Every is %v: must be more than 0", interval)
	}
	return Run(ctx, store, cfg, func(ctx context.Context, term Term) error {
		for next := time.Tick(interval); ; {
			if err := fn(ctx, term); err != nil {
				return err
			}
			select {
			case <-next:
			case <-ctx.Done():
			}
			if term.Err() != nil || ctx.Err() != nil { // also if the next call is due
				return nil
			}
		}
	})
}

// Run waits until this process leads and calls fn, on the goroutine of the caller.
//
//   - If fn returns while its term holds, Run gives the lease up and returns fn's error.
//   - If the term is lost, the ctx of fn ends, and its cause matches [ErrLost]. When fn
//     has returned, whatever its error, Run waits to lead again and calls fn again.
//   - If ctx ends, the ctx of fn ends with it. The lease is renewed until fn has
//     returned, so that fn can finish in peace. Then Run gives the lease up, which takes
//     milliseconds, or at most a third of the TTL if the store does not answer, and
//     returns fn's error.
//   - If ctx ends while fn is not running, Run returns an error that wraps its cause.
//
// A store that fails does not end Run. If fn panics, the lease is given up.
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

// lead calls fn for one term. again reports whether the term was lost before fn
// returned.
func (c *Candidate) lead(ctx context.Context, term Term, fn func(context.Context, Term) error) (again bool, err error) {
	defer func() { // also when fn panics
		release, cancel := context.WithTimeout(context.WithoutCancel(ctx), term.h.cfg.TTL/3)
		defer cancel()
		_ = term.Resign(release) // or the TTL ends it
	}()
	err = fn(term.Context(), term)
	return term.lost() && ctx.Err() == nil, err
}

// Name returns [Config.Name].
func (c *Candidate) Name() string { return c.setting.Load().Name }

// Config returns the present Config, with its defaults filled in.
func (c *Candidate) Config() Config { return c.setting.Config() }

// Update calls change with the present configuration as it was given, in which a zero field
// means its default, and the changes take effect. It is
// atomic among Updates; change must not call the Candidate. If the new
// configuration is not valid, or has another Name, Update returns an error and nothing
// changes.
//
// A term under way keeps the TTL and Margin with which it began. A waiting call keeps
// its place in the line, unless the TTL changes: then it joins again at the end. The
// Stats stay. A Margin or Poll that was left to the TTL follows it.
func (c *Candidate) Update(change func(*Config)) error {
	return c.setting.Update(change, (*Config).fixed, nil)
}

// Change is Update for a program that does not know the type of the configuration: f gets a
// pointer to it, as Update's change does. If f returns an error, or dry is true, nothing
// changes; dry returns the error that the change would have.
func (c *Candidate) Change(dry bool, f func(cfg any) error) error {
	return c.setting.Change(dry, f, (*Config).fixed, nil)
}

// fixed returns an error if Name has changed.
func (c *Config) fixed(next *Config) error {
	f := invalid.Fields{Type: "lease.Config"}
	f.Same("Name", c.Name, next.Name)
	return f.Err()
}
