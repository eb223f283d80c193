package lease

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// Every calls fn once for each instant of the schedule, in whichever process leads, until ctx is done. Every
// then returns nil.
//
//   - A run is recorded in the store before fn is called. A process whose clock differs by some milliseconds, or that
//     leads next, does not repeat it. If the leader dies during a run, that run is not repeated.
//   - If instants have passed since the last run, because no process led or a run took long, fn is called once for
//     all of them, immediately.
//   - The start of a program is not a run. The first run starts at the first instant after the first call to Every.
//   - fn's errors go to [Config].OnError, and the next run starts when it is due.
//
// The runs of a lease belong together. If the schedule is changed, its instants since the last run count as passed. A
// process whose clock is far ahead records runs of the future, and no process repeats them; Every reports to OnError
// that the last run is in the future.
//
// Every returns an error if schedule is nil, or if its Next returns an instant that is not later than its argument.
func (c *Candidate) Every(ctx context.Context, schedule Schedule, fn func(context.Context, Term) error) error {
	if schedule == nil {
		return fmt.Errorf("lease: %s: the Schedule is nil: must be set", c.cfg.Name)
	}
	called := time.Now()
	for ctx.Err() == nil {
		var wrong error
		_ = c.Run(ctx, func(ctx context.Context, term Term) error {
			wrong = c.makeRuns(ctx, term, schedule, called, fn)
			return wrong
		})
		if wrong != nil {
			return fmt.Errorf("lease: %s: %w", c.cfg.Name, wrong)
		}
	}
	return nil
}

// makeRuns performs the runs of a term. It returns an error only if the schedule is wrong.
func (c *Candidate) makeRuns(
	ctx context.Context, term Term, schedule Schedule, called time.Time, fn func(context.Context, Term) error,
) error {
	last := time.UnixMilli(term.h.rec.LastRun)
	if term.h.rec.LastRun == 0 {
		// Otherwise the first instant would be missed if it passes while no process leads.
		term.h.startRun(ctx, called)
		last = called
	}
	if time.Until(last) > time.Minute {
		c.report(ctx, fmt.Errorf("lease: %s: last run is in the future: no run is due until after %v", c.cfg.Name, last))
	}
	for {
		run, next, err := dueRun(schedule, last, time.Now())
		if err != nil {
			return err
		}
		if run.IsZero() {
			select {
			case <-ctx.Done():
				return nil
			case <-time.After(min(time.Until(next), time.Minute)): // a clock may be set, or the machine suspended
				continue
			}
		}
		last = run
		if term.h.startRun(ctx, run) {
			c.report(ctx, fn(ctx, term))
		}
	}
}

// dueRun returns the last instant of s after last that has passed at now, or the zero time if there is none, and the
// instant that follows. Instants are rounded up to milliseconds, as the store has them.
func dueRun(s Schedule, last, now time.Time) (run, next time.Time, err error) {
	next, err = nextOf(s, last)
	// A loop over all instants would take long for a schedule of seconds after a year without runs.
	for back := time.Second; err == nil && now.Add(-back).After(next); back *= 2 {
		var at time.Time
		if at, err = nextOf(s, now.Add(-back)); !at.After(now) {
			next = at
			break
		}
	}
	for err == nil && !next.After(now) {
		run = next
		next, err = nextOf(s, run)
	}
	return run, next, err
}

var errNotLater = errors.New("the Schedule's Next must return a later instant")

// nextOf returns s.Next(t), rounded up to milliseconds.
func nextOf(s Schedule, t time.Time) (time.Time, error) {
	next := s.Next(t)
	switch {
	case next.IsZero():
		return t.Add(longest), nil
	case !next.After(t):
		return next, fmt.Errorf("%w: it returned %v for %v", errNotLater, next, t)
	}
	return time.UnixMilli(next.Add(time.Millisecond - 1).UnixMilli()), nil
}
