// Package shared asks Redis about a limit that instances share: the script, a trip to Redis
// and back, what is wrong with Redis, and what this instance owes.
package shared

import (
	"context"
	"sync/atomic"
	"time"
)

// Redis is where a limit is kept.
type Redis struct {
	debts   debts
	outages outages
	ahead   atomic.Int64 // how far its clock is ahead, as last seen

	asked, askTime, failed atomic.Int64
}

// Hears sets who hears of outages: heard reports whether anybody does. It precedes all use.
func (r *Redis) Hears(heard func() bool, hear func(context.Context, Event)) {
	r.outages.heard, r.outages.hear = heard, hear
}

// Ask lets Redis decide on a call. It returns the outage if there is no answer in time, or
// none is waited for, and false if ctx ends first.
func (r *Redis) Ask(ctx context.Context, t *Terms, c Call) (a Answer, o *Outage, ok bool) {
	if o := r.outages.of(c.Full, t.RetryEvery); o != nil {
		r.outages.deliver(ctx)
		return a, o, true
	}
	return r.Tell(ctx, t, c)
}

// Tell is Ask for a call that tries Redis in an outage, too.
func (r *Redis) Tell(ctx context.Context, t *Terms, c Call) (a Answer, o *Outage, ok bool) {
	trip := r.depart(ctx, t, c)
	if !trip.wait(ctx) {
		return a, nil, false
	}
	return trip.answer, trip.outage, true
}

// Owe notes that a call was admitted without an answer.
func (r *Redis) Owe(c Call) { r.debts.owe(c.Full, debt{tokens: c.N}) }

// Stats are figures about Redis.
type Stats struct {
	Asked   int64
	AskTime time.Duration
	Failed  int64
	Outages int64
	Down    bool
	Slots   int // for which Redis has not answered
}

// Stats returns a snapshot.
func (r *Redis) Stats() Stats {
	o := &r.outages
	o.mu.Lock()
	defer o.mu.Unlock()
	return Stats{
		Asked: r.asked.Load(), AskTime: time.Duration(r.askTime.Load()), Failed: r.failed.Load(),
		Outages: o.begun, Down: o.down > 0, Slots: len(o.slots),
	}
}
