package registry

import (
	"context"
	"fmt"
	"iter"

	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/cacheaside"
	"github.com/go-resilience/resilience/retry"
	"github.com/go-resilience/resilience/saga"
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
		s += ": " + e.Err.Error()
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
// [*HealthError]. These fail: a breaker that is open, a Group whose breakers are all open,
// a throttle.Shared whose store is down, and a saga's Runner with stuck sagas or a store
// that it cannot ask. These are worth knowing: a breaker that is half-open or disabled, a
// Group with a breaker that is not closed, a bulkhead without a free slot (not one of a
// Group), a budget that is spent, and a cache whose Store is yet to be told of an
// invalidation.
//
// Health asks the store of each Runner, and ends that with ctx. With resiliencehttp it is
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
// asks the store of a Runner, and no other policy waits for anything.
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
		if s := p.Stats(); s.InFlight >= s.Limit {
			return &HealthError{State: "full", Detail: fmt.Sprintf("%d of %d in flight", s.InFlight, s.Limit)}
		}
	case observed[retry.BudgetStats, retry.Event]:
		if s := p.Stats(); s.Left == 0 && s.Charged > 0 {
			return &HealthError{State: "spent", Detail: fmt.Sprintf("%d retries in 10 s", s.Charged)}
		}
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
		Counts(context.Context) (saga.Counts, error)
	}:
		return sagaHealth(ctx, p)
	}
	return nil
}

func breakerHealth(s breaker.Stats) *HealthError {
	if s.State == breaker.Closed {
		return nil
	}
	return &HealthError{State: string(s.State), Fails: s.State == breaker.Open || s.State == breaker.ForcedOpen, Err: s.LastErr}
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

func sagaHealth(ctx context.Context, r interface {
	Counts(context.Context) (saga.Counts, error)
}) *HealthError {
	counts, err := r.Counts(ctx)
	if err != nil {
		return &HealthError{State: "store down", Fails: true, Err: err}
	}
	stuck := 0
	for i := range counts.Sagas {
		stuck += counts.Sagas[i].Stuck
	}
	switch {
	case stuck >= saga.CountLimit:
		return &HealthError{State: "stuck", Fails: true, Detail: fmt.Sprintf("%d sagas or more", saga.CountLimit)}
	case stuck == 1:
		return &HealthError{State: "stuck", Fails: true, Detail: "1 saga"}
	case stuck > 0:
		return &HealthError{State: "stuck", Fails: true, Detail: fmt.Sprintf("%d sagas", stuck)}
	}
	return nil
}
