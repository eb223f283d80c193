package fleet

import (
	"context"
	"fmt"
	"maps"

	"github.com/go-resilience/resilience/policy"
	"github.com/go-resilience/resilience/throttle"
	"github.com/go-resilience/resilience/throttle/internal/events"
)

// Stats are the metrics of [Limits] in this process. Counters never decrease. Settlements or renewals that are sent
// together count as one round trip.
type Stats struct {
	Admitted      int64                     `counter:"calls{outcome=admitted,reason=}"`
	Refusals      map[throttle.Reason]int64 `counter:"calls{outcome=refused,reason=*}"` // every reason has an entry
	AdmittedLocal int64                     `counter:"calls.local"`                     // calls that OnOutage admitted
	RoundTrips    int64                     `counter:"redis.calls"`                     // round trips to Redis
	Failed        int64                     `counter:"redis.failures"`                  // calls whose round trip failed
	Forgiven      int64                     `counter:"tokens{outcome=forgiven}"`        // debt beyond a burst or a quota
	Unsettled     int                       `gauge:"settlements.pending"`               // settlements not yet in Redis
	LateSettled   int64                     `counter:"settlements{outcome=late}"`       // settlements too late to count
	NeverSettled  int64                     `counter:"settlements{outcome=lost}"`       // settlements that Redis never got
	LostSlots     int64                     `counter:"slots.lost"`                      // reservations that lost slots
	Down          bool                      `gauge:"down"`                              // whether a node cannot be reached
}

// newStats returns Stats. Refusals has an entry for every reason for which Limits refuse calls.
func newStats() Stats {
	return Stats{Refusals: map[throttle.Reason]int64{
		throttle.OverLimit: 0, throttle.OverQuota: 0, throttle.CoolingDown: 0, throttle.WaitTooLong: 0,
		throttle.DeadlineTooClose: 0, throttle.ContextEnded: 0, throttle.TooCostly: 0, throttle.Outage: 0,
	}}
}

// Stats returns the metrics of this process.
func (l *Limits) Stats() Stats {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.tryAll(l.setting.Load()) // only Stats and Health notice the end of an outage if there are no calls
	s := l.stats
	s.Refusals = maps.Clone(s.Refusals)
	for _, n := range l.nodes {
		s.Down = s.Down || n.trouble.isOutage()
	}
	return s
}

// Observe calls f with each event until stop is called. The kinds of the events are EventRefused, EventOutageBegan and
// EventOutageEnded. The Key of an outage event is the Redis node. f runs on the goroutine of a call or, if a ping has
// found the start or the end of an outage, on a goroutine of this package. A panic there is logged.
func (l *Limits) Observe(f func(context.Context, throttle.Event)) (stop func()) {
	return l.observers.Observe(f)
}

var _ policy.Describer = (*Limits)(nil)

// Describe implements [policy.Describer].
func (l *Limits) Describe() policy.Description {
	return policy.Description{
		Kind:    "throttle",
		Name:    l.setting.Load().Name,
		Metrics: func() []policy.Metric { return policy.Metrics("throttle", l.Stats()) },
		Health:  func(context.Context) policy.Health { return l.health() },
		Config:  func() any { return l.Config() },
		Update: func(dryRun bool, change func(cfg any) error) error {
			return l.setting.Change(dryRun, change, same, nil)
		},
		Observe: policy.Events(l.Observe, describe),
	}
}

// describe converts e to an event of package policy.
func describe(e throttle.Event) policy.Event {
	return events.Describe(e.Name, e.Key, string(e.Kind), string(e.Reason), e.Waited, e.Err)
}

// health reports the worst trouble of all nodes. A trouble is a failure if calls are refused or return an error
// because of the trouble. Otherwise it is a warning.
func (l *Limits) health() policy.Health {
	cfg := l.setting.Load()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.tryAll(cfg) // only Stats and Health notice the end of an outage if there are no calls
	var worst policy.Health
	for _, n := range l.nodes {
		h := policy.Health{Status: policy.Warn, State: string(n.trouble), Err: n.err}
		if n.trouble.isOutage() {
			h.Err = fmt.Errorf("%w: %w", throttle.ErrOutage, n.err)
		}
		if cfg.OnOutage == Refuse || !n.trouble.isOutage() {
			h.Status = policy.Fail
		}
		if h.Status > worst.Status {
			worst = h
		}
	}
	return worst
}
