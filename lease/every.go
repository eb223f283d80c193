package lease

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// Every calls fn once for each instant of the schedule, in the process that leads at that instant. Every returns nil
// when ctx is done. A run is one call to fn.
//
//   - A run is recorded in the store before fn is called. Therefore, the next leader does not repeat a run, even if
//     the clocks differ by some milliseconds. A run is not repeated if the leader dies during the run, or if fn returns
//     because its ctx is done. If ctx is done while a run is being recorded, fn is called with a ctx that is done.
//   - If several instants have passed since the last run, fn is called immediately, and only once for all these
//     instants. Several instants can pass while no process leads, or during a long run.
//   - fn is not called when the program starts. The first run is due at the first instant after the first call to
//     Every.
//   - If fn returns an error, the error is passed to [Config].OnError, and the next run starts when it is due.
//
// The store records only the time of the lease's last run, not the schedule. If the schedule is changed and an instant
// of the new schedule has passed since the last run, a run is due immediately. If a process's clock is far ahead, the
// process records runs in the future. No other process starts a run before the recorded time. If this time is more than
// a minute ahead, Every reports to OnError that the last run is in the future. In this case, reset the record of the
// last run, and then restart the leader, because the leader reads the record only when its term starts. If the store
// loses the record, the next leader restores it from the last run that the leader's process has seen in the store. If
// that process has seen no run, a run may be repeated.
//
// Every returns an error if schedule is nil, or if the schedule's Next returns an instant that is not later than
// Next's argument.
func (c *Candidate) Every(ctx context.Context, schedule Schedule, fn func(context.Context, Term) error) error {
	if schedule == nil {
		return fmt.Errorf("lease: %s: Schedule is nil: must be set", c.cfg.Name)
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

// makeRuns calls fn for the runs that are due during a term. It returns an error only if the schedule is invalid.
func (c *Candidate) makeRuns(
	ctx context.Context, term Term, schedule Schedule, called time.Time, fn func(context.Context, Term) error,
) error {
	last := time.UnixMilli(term.h.rec.LastRun)
	if term.h.rec.LastRun == 0 {
		// Record the time of the first call as if it were a run. Otherwise the first instant would be missed if it passed
		// while no process leads.
		last = called
		// If the store has lost the record of a run that this process has seen, record it again. Otherwise the run would be
		// repeated. A run in the future was reset intentionally.
		if seen := c.lastSeen(); seen.After(last) && !seen.After(time.Now()) {
			last = seen
		}
		term.h.startRun(ctx, last)
	}
	if time.Until(last) > time.Minute {
		c.onError(ctx, fmt.Errorf("lease: %s: last run is in the future: no run is due until after %v", c.cfg.Name, last))
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
			// Wake at least once a minute, because the clock may be set or the machine may be suspended.
			case <-time.After(min(time.Until(next), time.Minute)):
				continue
			}
		}
		last = run
		if term.h.startRun(ctx, run) {
			c.onError(ctx, fn(ctx, term)) // even if ctx is done, because the run is not repeated
		}
	}
}

// lastSeen returns the time of the last run that c has seen in the store.
func (c *Candidate) lastSeen() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return time.UnixMilli(c.lastRun)
}

// dueRun returns the latest instant of s that is after last and not after now, or the zero time if there is none. It
// also returns the next instant after that. Instants are rounded up to milliseconds, as they are in the store.
func dueRun(s Schedule, last, now time.Time) (run, next time.Time, err error) {
	next, err = nextOf(s, last)
	// Skip most instants. With an interval of seconds, a loop over all instants of a year without runs would take long.
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
