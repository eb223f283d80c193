package throttle

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"sync"
	"time"
)

// A trip is one round trip to Redis. It fails when Timeout has passed, even if Eval has
// not returned by then.
type trip struct {
	s     *Shared
	ctx   context.Context // for observers
	terms *sharedTerms
	call  sharedCall
	began time.Time
	late  *time.Timer

	mu     sync.Mutex
	over   bool
	answer answer
	outage *outage       // if there is no answer
	ended  chan struct{} // closed at the end, if not nil
}

func (s *Shared) depart(ctx context.Context, terms *sharedTerms, c sharedCall, ended chan struct{}) *trip {
	t := &trip{s: s, ctx: ctx, terms: terms, call: c, began: time.Now(), ended: ended}
	s.asked.Add(1)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.late = time.AfterFunc(terms.cfg.Timeout, func() { t.arrive(answer{}, context.DeadlineExceeded) })
	return t
}

// arrive ends the trip, and returns the outage if it failed.
func (t *trip) arrive(a answer, err error) *outage {
	defer t.s.outages.deliver(t.ctx)
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.end() {
		return t.outage
	}
	if t.answer = a; err != nil {
		t.s.failed.Add(1)
		t.outage = t.s.outages.began(t.terms, t.call, err)
	} else {
		t.s.outages.ended(t.terms, t.call)
	}
	if t.ended != nil {
		close(t.ended)
	}
	return t.outage
}

// abort ends a trip that says nothing about Redis. It does nothing if the trip has
// ended.
func (t *trip) abort() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.end()
}

// end reports whether the trip was under way until now. The caller holds mu.
func (t *trip) end() bool {
	if t.over {
		return false
	}
	t.over = true
	t.late.Stop()
	t.s.askTime.Add(int64(time.Since(t.began)))
	return true
}

// askOnce makes a trip for one call, which takes one of amounts, on the goroutine of the
// call: another goroutine would add a quarter to the time of a round trip. It returns
// inTime false if ctx ended before the trip did.
func (s *Shared) askOnce(ctx context.Context, t *sharedTerms, c sharedCall, amounts []int) (a answer, o *outage, inTime bool) {
	trip := s.depart(ctx, t, c, nil)
	defer trip.abort() // if Eval panics
	within, cancel := context.WithTimeout(ctx, t.cfg.Timeout)
	defer cancel()
	a, err := s.eval(within, t, c, amounts)
	if err != nil && ctx.Err() != nil {
		// The call has cut the trip short. Another trip finds out whether Redis would
		// have answered in time.
		trip.abort()
		if s.outages.suspect(c.full) {
			c.do = "take" // nothing, but find out
			trip = s.depart(context.WithoutCancel(ctx), t, c, nil)
			go func() {
				defer s.outages.cleared(c.full)
				s.travel(trip, nil)
			}()
		}
		return a, nil, false
	}
	return a, trip.arrive(a, err), true
}

// travel makes a trip that does not belong to one call. It takes the first of amounts
// that is there, and nothing if there are no amounts.
func (s *Shared) travel(trip *trip, amounts []int) {
	t := trip.terms
	ctx, cancel := context.WithTimeout(trip.ctx, t.cfg.Timeout)
	defer cancel()
	a, err := answer{}, errors.New("throttle: Eval called runtime.Goexit")
	defer func() {
		if r := recover(); r != nil { // there is no caller to pass the panic to
			err = fmt.Errorf("throttle: %s: Eval panicked: %v\n\n%s", t.cfg.Name, r, debug.Stack())
		}
		trip.arrive(a, err)
	}()
	a, err = trip.s.eval(ctx, t, trip.call, amounts)
}
