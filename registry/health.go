package registry

import (
	"context"
	"fmt"
	"iter"
	"time"

	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/cacheaside"
	"github.com/go-resilience/resilience/lease"
	"github.com/go-resilience/resilience/retry"
	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/saga/store"
	"github.com/go-resilience/resilience/throttle"
)

// A HealthError says what is wrong with a policy, or with what it guards.
type HealthError struct {
	State  string // "open", "full", "store down"
	Fails  bool   // calls fail because of it; otherwise it is only worth knowing
	Detail string // in figures: "3 of 10 open"
	Err    error  // behind it, such as what opened a breaker; nil if there is none
}

// Error returns the state, the detail and the text of Err.
func (e *HealthError) Error() string {
	s := e.State
	if e.Detail != "" {
		s += ": " + e.Detail
	}
	if e.Err != nil {
		s += ": " + fmt.Sprint(e.Err)
	}
	return s
}

// Unwrap returns Err.
func (e *HealthError) Unwrap() error { return e.Err }

// HealthState returns State, for resiliencehttp.HealthOf.
func (e *HealthError) HealthState() string { return e.State }

// Failed returns Fails, for resiliencehttp.HealthOf.
func (e *HealthError) Failed() bool { return e.Fails }

// Health returns the policies by kind and name, "breaker/users", each with nil or a
// [*HealthError]. These fail: a breaker that is open or forced open, a Group whose breakers are all open,
// a throttle.Shared whose store is down, a saga's Runner with stuck sagas or a store that it
// cannot ask, and a lease's Candidate whose lease nobody has held for longer than its TTL, or
// with a store that it cannot ask. (A lease that was asked for by TryCampaign alone is a lock,
// and may be free.) These are worth knowing: a breaker that is half-open or disabled, a
// Group with a breaker that is not closed, a bulkhead without a free slot (not one of a
// Group), a pool without a free connection, a budget that is spent, a cache whose Store is yet to be told of an
// invalidation, and a Runner whose store has sagas that were due for longer than its
// DueAfter, whether it runs or not.
//
// Health asks the store of each Runner and Candidate, and ends that with ctx. With resiliencehttp it is
// a handler: resiliencehttp.HealthOf(reg.Health).
func (r *Registry) Health(ctx context.Context) iter.Seq2[string, error] {
	return func(yield func(string, error) bool) {
		for e := range r.All() {
			if !yield(e.path(), e.Health(ctx)) {
				return
			}
		}
	}
}

// Health returns nil or a [*HealthError], as [Registry.Health] does for each policy. It
// asks the store of a Runner or a Candidate, and no other policy waits for anything.
func (e Entry) Health(ctx context.Context) error {
	if ill := e.health(ctx); ill != nil {
		return ill
	}
	return nil
}

// health returns what is wrong with the policy, or nil.
func (e Entry) health(ctx context.Context) *HealthError {
	switch p := e.Policy.(type) {
	case observed[breaker.Stats, breaker.Event]:
		return breakerHealth(p.Stats())
	case observed[breaker.GroupStats, breaker.Event]:
		return breakersHealth(p.Stats())
	case observed[bulkhead.Stats, bulkhead.Event]:
		return bulkheadHealth(p.Stats())
	case pooled:
		return poolHealth(p.Stats())
	case observed[retry.BudgetStats, retry.Event]:
		return budgetHealth(p.Stats())
	case observed[retry.BudgetGroupStats, retry.Event]:
		if s := p.Stats(); s.Empty > 0 && s.Charged > 0 {
			return &HealthError{State: "spent", Detail: fmt.Sprintf("%d of %d spent", s.Empty, s.Keys)}
		}
	case observed[throttle.SharedStats, throttle.Event]:
		if s := p.Stats(); s.Down {
			return &HealthError{State: "store down", Fails: true}
		}
	case observed[cacheaside.Stats, cacheaside.Event]:
		if s := p.Stats(); s.Untold > 0 {
			return &HealthError{State: "invalidations untold", Detail: fmt.Sprintf("%d keys", s.Untold)}
		}
	case interface {
		observed[lease.Stats, lease.Event]
		Look(context.Context) (lease.State, error)
		Config() lease.Config
	}:
		held, err := p.Look(ctx)
		if err != nil {
			return &HealthError{State: "store down", Fails: true, Err: err}
		}
		return leaseHealth(held, p.Stats(), time.Since(e.source.added), p.Config().TTL)
	case interface {
		Counts(context.Context) (store.Counts, error)
		Config() saga.RunnerConfig
	}:
		counts, err := p.Counts(ctx)
		if err != nil {
			return &HealthError{State: "store down", Fails: true, Err: err}
		}
		return sagaHealth(counts, p.Config().DueAfter)
	}
	return nil
}

func breakerHealth(s breaker.Stats) *HealthError {
	if s.State == breaker.Closed {
		return nil
	}
	return &HealthError{State: string(s.State), Fails: s.State == breaker.Open || s.State == breaker.ForcedOpen, Err: s.LastErr}
}

func bulkheadHealth(s bulkhead.Stats) *HealthError {
	if s.InFlight < s.Limit {
		return nil
	}
	return &HealthError{State: "full", Detail: fmt.Sprintf("%d of %d in flight", s.InFlight, s.Limit)}
}

func budgetHealth(s retry.BudgetStats) *HealthError {
	if s.Left > 0 || s.Charged == 0 {
		return nil
	}
	return &HealthError{State: "spent", Detail: fmt.Sprintf("%d retries in 10 s", s.Charged)}
}

// breakersHealth: a Group whose breakers are all open is as ill as one breaker that is.
func breakersHealth(s breaker.GroupStats) *HealthError {
	open, halfOpen, disabled := s.States[breaker.Open]+s.States[breaker.ForcedOpen], s.States[breaker.HalfOpen], s.States[breaker.Disabled]
	switch {
	case open > 0 && open == s.Keys:
		return &HealthError{State: "open", Fails: true, Detail: fmt.Sprintf("%d of %d open", open, s.Keys)}
	case open > 0:
		return &HealthError{State: "partly open", Detail: fmt.Sprintf("%d of %d open", open, s.Keys)}
	case halfOpen > 0:
		return &HealthError{State: "half-open", Detail: fmt.Sprintf("%d of %d half-open", halfOpen, s.Keys)}
	case disabled > 0:
		return &HealthError{State: "disabled", Detail: fmt.Sprintf("%d of %d disabled", disabled, s.Keys)}
	}
	return nil
}

// leaseHealth judges a lease whose Candidate has been there for a time. One that was asked for
// by TryCampaign alone is a lock, which nobody needs to hold.
func leaseHealth(held lease.State, s lease.Stats, there, ttl time.Duration) *HealthError {
	lock := s.Asked > 0 && s.Queued == 0 && s.WaitTime == 0
	vacant := held.Now.Sub(held.Since)
	if held.Since.IsZero() { // forever
		vacant = there
	}
	if !held.Until.IsZero() || lock || vacant <= ttl {
		return nil
	}
	return &HealthError{State: "vacant", Fails: true, Detail: fmt.Sprintf("nobody has held it for %v", vacant.Round(time.Second))}
}

// sagaHealth judges the sagas in a store, which may be due for up to a time; negative means
// any time.
func sagaHealth(counts store.Counts, dueAfter time.Duration) *HealthError {
	stuck, due := 0, 0
	var waits time.Duration // of the first that became due
	for i := range counts.Sagas {
		c := &counts.Sagas[i]
		stuck += c.Stuck
		if due += c.Due; c.Due > 0 {
			waits = max(waits, counts.Now.Sub(c.OldestDue))
		}
	}
	overdue := ""
	if dueAfter >= 0 && waits >= dueAfter && due > 0 {
		overdue = fmt.Sprintf("%s due, the first for %v", sagas(due), waits.Round(time.Second))
	}
	switch {
	case stuck > 0 && overdue != "":
		return &HealthError{State: "stuck", Fails: true, Detail: sagas(stuck) + "; " + overdue}
	case stuck > 0:
		return &HealthError{State: "stuck", Fails: true, Detail: sagas(stuck)}
	case overdue != "":
		return &HealthError{State: "overdue", Detail: overdue}
	}
	return nil
}

// sagas returns a number of sagas in words. A Count has no number above store.CountLimit.
func sagas(n int) string {
	switch {
	case n >= store.CountLimit:
		return fmt.Sprintf("%d sagas or more", store.CountLimit)
	case n == 1:
		return "1 saga"
	}
	return fmt.Sprintf("%d sagas", n)
}
