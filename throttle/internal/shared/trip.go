package shared

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"sync"
	"time"

	"github.com/go-resilience/resilience/internal/linger"
)

// A trip is one round trip to Redis, on a goroutine of its own. The call waits until it is
// over: for an answer, for Timeout, or until ctx ends. The trip goes on, since what Redis has
// taken must be known, however late its answer comes.
type trip struct {
	r     *Redis
	ctx   context.Context // of the call, without its end
	terms *Terms
	call  Call
	debt  debt // that Redis is told of
	began time.Time
	late  *time.Timer
	ended chan struct{} // closed when it is over

	mu     sync.Mutex
	over   bool
	left   bool // the call has not waited
	answer Answer
	outage *Outage // if there is no answer in time
}

var errExited = errors.New("throttle: Eval called runtime.Goexit")

func (r *Redis) depart(ctx context.Context, terms *Terms, c Call) *trip {
	t := &trip{
		r: r, ctx: linger.Apart(context.WithoutCancel(ctx)), terms: terms, call: c,
		began: time.Now(), ended: make(chan struct{}),
	}
	// A Redis that has not answered may take a debt all the same, each time.
	if c.Do == "take" && r.outages.well(c.Full) {
		t.debt = r.debts.collect(c.Full)
	}
	r.asked.Add(1)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.late = time.AfterFunc(terms.Timeout, t.isLate)
	go t.travel()
	return t
}

// wait waits until the trip is over. It reports false if ctx ends first.
func (t *trip) wait(ctx context.Context) bool {
	select {
	case <-t.ended:
	case <-ctx.Done():
	}
	t.r.outages.deliver(ctx)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.left = !t.over
	return t.over
}

// travel asks Redis. It waits for an answer for a RetryEvery longer than the call does.
func (t *trip) travel() {
	ctx, cancel := context.WithDeadline(t.ctx, t.began.Add(t.terms.Timeout).Add(t.terms.RetryEvery))
	defer cancel()
	a, err := Answer{}, errExited
	defer func() {
		if v := recover(); v != nil { // there is no caller to pass the panic to
			err = fmt.Errorf("throttle: %s: Eval panicked: %v\n\n%s", t.terms.Name, v, debug.Stack())
		}
		if t.arrive(a, err) {
			close(t.ended)
		}
	}()
	a, err = t.r.eval(ctx, t.terms, t.call, t.debt)
}

// arrive takes the answer, or the error. It reports whether that is in time.
func (t *trip) arrive(a Answer, err error) (inTime bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	inTime = t.end()
	if err != nil {
		// The debt may have been paid all the same: better twice than not at all.
		t.r.debts.owe(t.call.Full, t.debt)
		if !inTime {
			t.r.outages.lost(t.terms, t.call, err)
			return false
		}
		t.r.failed.Add(1)
		t.outage = t.r.outages.began(t.terms, t.call, err)
		return true
	}
	if t.call.Do == "reset" {
		t.r.debts.collect(t.call.Full)
	}
	if !inTime || t.left { // nobody has used the tokens: they pay for what was admitted alone
		t.r.debts.pay(t.call.Full, a.Taken)
	}
	if inTime {
		t.answer = a
		t.r.outages.ended(t.terms, t.call)
	}
	return inTime
}

// isLate ends a trip whose Timeout has passed.
func (t *trip) isLate() {
	t.mu.Lock()
	over := t.end()
	if over {
		t.r.failed.Add(1)
		t.outage = t.r.outages.late(t.terms, t.call, context.DeadlineExceeded)
	}
	t.mu.Unlock()
	if over {
		close(t.ended)
	}
}

// end reports whether the trip was not over until now. The caller holds mu.
func (t *trip) end() bool {
	if t.over {
		return false
	}
	t.over = true
	t.late.Stop()
	t.r.askTime.Add(int64(time.Since(t.began)))
	return true
}
