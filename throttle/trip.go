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
	s    *Shared
	key  string
	late *time.Timer

	mu     sync.Mutex
	over   bool
	answer answer
	outage *outage       // if there is no answer
	ended  chan struct{} // closed at the end, if not nil
}

func (s *Shared) depart(c sharedCall, ended chan struct{}) *trip {
	t := &trip{s: s, key: c.full, ended: ended}
	s.asked.Add(1)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.late = time.AfterFunc(s.cfg.Timeout, func() { t.arrive(answer{}, context.DeadlineExceeded) })
	return t
}

// arrive ends the trip, and returns the outage if it failed.
func (t *trip) arrive(a answer, err error) *outage {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.over {
		return t.outage
	}
	t.over = true
	t.late.Stop()
	if t.answer = a; err != nil {
		t.s.failed.Add(1)
		t.outage = t.s.outages.began(t.key, err)
	} else {
		t.s.outages.ended(t.key)
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
	t.over = true
	t.late.Stop()
}

// askOnce makes a trip for one call, on the goroutine of the call: another goroutine
// would add a quarter to the time of a round trip. It returns inTime false if ctx ended
// before the trip did.
func (s *Shared) askOnce(ctx context.Context, t *sharedTerms, c sharedCall) (a answer, o *outage, inTime bool) {
	trip := s.depart(c, nil)
	defer trip.abort() // if Eval panics
	within, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	a, err := s.eval(within, t, c, []int{c.n})
	if err != nil && ctx.Err() != nil {
		// The call has cut the trip short. Another trip finds out whether Redis would
		// have answered in time.
		trip.abort()
		if s.outages.suspect(c.full) {
			trip = s.depart(c, nil)
			go func() {
				defer s.outages.cleared(c.full)
				s.travel(context.WithoutCancel(ctx), trip, t, c, nil)
			}()
		}
		return a, nil, false
	}
	return a, trip.arrive(a, err), true
}

// travel makes a trip that does not belong to one call. It takes the first of amounts
// that is there, and nothing if there are no amounts.
func (s *Shared) travel(ctx context.Context, trip *trip, t *sharedTerms, c sharedCall, amounts []int) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	a, err := answer{}, errors.New("throttle: Eval called runtime.Goexit")
	defer func() {
		if r := recover(); r != nil { // there is no caller to pass the panic to
			err = fmt.Errorf("throttle: %s: Eval panicked: %v\n\n%s", s.cfg.Name, r, debug.Stack())
		}
		trip.arrive(a, err)
	}()
	a, err = s.eval(ctx, t, c, amounts)
}
