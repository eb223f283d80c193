package throttle

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"sync"
)

// A trip is one round trip to Redis. It does not end with the call that it was begun
// for: an answer that fails to come would otherwise go unnoticed where calls are less
// patient than Timeout.
type trip struct {
	ctx     context.Context // ends after Timeout
	arrive  func(answer, error)
	arrived chan struct{} // closed when the following are set
	answer  answer
	outage  *outage // if there is no answer
}

// depart begins a trip that asks for the first of some amounts of tokens that is
// there.
func (s *Shared) depart(ctx context.Context, t *sharedTerms, c sharedCall, amounts []int) *trip {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.cfg.Timeout)
	trip := &trip{ctx: ctx, arrived: make(chan struct{})}
	var once sync.Once
	trip.arrive = func(a answer, err error) {
		once.Do(func() {
			if trip.answer = a; err != nil {
				s.failed.Add(1)
				trip.outage = s.outages.began(c.full, err)
			} else {
				s.outages.ended(c.full)
			}
			close(trip.arrived)
		})
	}
	s.asked.Add(1)
	go func() {
		defer cancel()
		a, err := answer{}, errors.New("throttle: Eval called runtime.Goexit")
		defer func() {
			if r := recover(); r != nil {
				err = fmt.Errorf("throttle: %s: Eval panicked: %v\n\n%s", s.cfg.Name, r, debug.Stack())
			}
			trip.arrive(a, err)
		}()
		a, err = s.eval(ctx, t, c, amounts)
	}()
	return trip
}

// wait waits for the end of the trip and reports whether it came before that of ctx.
func (t *trip) wait(ctx context.Context) bool {
	select {
	case <-t.arrived:
	case <-t.ctx.Done(): // Eval may take longer
		t.arrive(answer{}, t.ctx.Err())
	case <-ctx.Done():
		context.AfterFunc(t.ctx, func() { t.arrive(answer{}, t.ctx.Err()) })
		return false
	}
	return true
}
