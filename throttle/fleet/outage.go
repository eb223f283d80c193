package fleet

import (
	"context"
	"errors"
	"fmt"
	"log"
	"maps"
	"runtime/debug"
	"time"

	"github.com/go-resilience/resilience/internal/invalid"
	"github.com/go-resilience/resilience/policy"
	"github.com/go-resilience/resilience/throttle"
	"github.com/go-resilience/resilience/throttle/internal/events"
)

// An outage is the time during which a node decides about no call.
type outage struct {
	trouble
	err  error
	key  string    // of a cooldown that the node had
	next time.Time // when it is tried again
}

// outageOf returns why the node of a cooldown cannot be reached, or nil.
func (l *Limits) outageOf(cfg *Config, key string) error {
	node := cfg.Node(key)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.tryAll(cfg)
	if o := l.down[node]; o != nil {
		return o.err
	}
	return nil
}

// tryAll has all nodes that are away tried in the background, each RetryEvery, so that no call waits for
// them: after a failover, another node has the keys of one, and its outage would not end. l.mu is held.
func (l *Limits) tryAll(cfg *Config) {
	for away, o := range l.down {
		if now := time.Now(); !now.Before(o.next) {
			o.next = now.Add(cfg.RetryEvery)
			go l.try(cfg, away, o.key)
		}
	}
}

// fails records an error of Eval for a key. If it affects other calls, the outage of the key's node begins. The
// node is tried immediately, so that the outage after a single lost answer ends with the first ping.
func (l *Limits) fails(ctx context.Context, cfg *Config, key string, err error) {
	node, trouble := cfg.Node(key), troubleOf(err)
	l.mu.Lock()
	l.stats.Failed++
	if trouble == callOnly {
		l.mu.Unlock()
		return
	}
	begins := l.down[node] == nil
	if begins {
		if len(l.down) == 0 {
			clear(l.local) // left by a call that decided alone just as the last outage ended
		}
		l.down[node] = &outage{trouble, err, key, time.Now().Add(cfg.RetryEvery)}
	}
	l.mu.Unlock()
	if begins {
		l.observers.Tell(ctx, throttle.Event{Kind: throttle.EventOutageBegan, Name: cfg.Name, Key: node, Err: err})
		go l.try(cfg, node, key)
	}
}

// try asks a node for a sign of life, which ends its outage.
func (l *Limits) try(cfg *Config, node, key string) {
	err := survive("Eval", func() (err error) {
		_, err = l.eval(context.Background(), cfg, []string{key}, "ping")
		return err
	})
	l.mu.Lock()
	if o := l.down[node]; o != nil && err != nil {
		if t := troubleOf(err); t != callOnly {
			o.trouble, o.err = t, err
			l.mu.Unlock()
			return
		}
	}
	ends := l.down[node] != nil
	delete(l.down, node)
	if len(l.down) == 0 {
		clear(l.local) // what they have admitted is not told
	}
	l.mu.Unlock()
	if ends {
		_ = survive("an observer", func() error {
			l.observers.Tell(context.Background(), throttle.Event{Kind: throttle.EventOutageEnded, Name: cfg.Name, Key: node})
			return nil
		})
	}
}

// survive calls f, which is the user's what, on a goroutine of ours. If it panics, nobody else can
// tell of it.
func survive(what string, f func() error) (err error) {
	defer func() {
		if v := recover(); v != nil {
			log.Printf("fleet: %s panicked: %v\n\n%s", what, v, debug.Stack())
			err = fmt.Errorf("fleet: %s panicked: %v", what, v)
		}
	}()
	return f()
}

// reserveAlone decides about a call without Redis, which cannot be reached because of err.
func (l *Limits) reserveAlone(ctx context.Context, r *Reservation, err error) (*Reservation, error) {
	outage := &throttle.LimitedError{
		Name: r.cfg.Name, Key: r.meters[0].tag, Reason: throttle.Outage, After: r.cfg.RetryEvery,
		Err: fmt.Errorf("%w: %w", throttle.ErrOutage, err),
	}
	if r.cfg.OnOutage == Refuse {
		return nil, l.refuse(ctx, outage)
	}
	for i := range r.meters {
		taken, e := l.takeAlone(ctx, r.cfg, r.keys[i], &r.meters[i])
		if e == nil {
			r.alone = append(r.alone, taken)
			continue
		}
		for _, taken := range r.alone {
			taken.Settle(ctx, 0)
		}
		if e.Reason == throttle.TooCostly { // for the part of this process
			e = outage
		}
		return nil, l.refuse(ctx, e)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.stats.Admitted++
	l.stats.AdmittedLocal++
	return r, nil
}

const maxLocal = 100_000

// takeAlone takes the cost of a call from this process's part of m, whose state in Redis has a key.
func (l *Limits) takeAlone(
	ctx context.Context, cfg *Config, key string, m *Meter,
) (*throttle.Reservation, *throttle.LimitedError) {
	l.mu.Lock()
	defer l.mu.Unlock()
	part, cost := l.local[key], int(m.cost)
	if part == nil {
		if len(l.local) >= maxLocal {
			return nil, m.refusal(cfg, throttle.OverLimit)
		}
		part = throttle.New(m.local(cfg.Instances))
		l.local[key] = part
	}
	_ = part.Update(func(c *throttle.Config) { *c = m.local(cfg.Instances) }) // both may have changed since
	if m.kind == slots {
		cost = 1
	}
	taken, err := part.Reserve(context.WithoutCancel(ctx), cost)
	e, _ := errors.AsType[*throttle.LimitedError](err)
	switch {
	case e != nil && m.kind == slots:
		e = m.refusal(cfg, throttle.OverLimit)
	case e != nil:
		e.Name, e.Key = cfg.Name, m.key
	}
	return taken, e
}

// Stats are the metrics of [Limits] in this process. Counters never decrease. Settlements and renewals that
// are sent together are one round trip.
type Stats struct {
	Admitted      int64                     `counter:"calls{outcome=admitted,reason=}"`
	Refusals      map[throttle.Reason]int64 `counter:"calls{outcome=refused,reason=*}"` // every reason has an entry
	AdmittedLocal int64                     `counter:"calls.local"`                     // of Admitted, by Local
	RoundTrips    int64                     `counter:"redis.calls"`                     // to Redis
	Failed        int64                     `counter:"redis.failures"`                  // calls without an answer in time
	Forgiven      int64                     `counter:"tokens.forgiven"`                 // debt beyond a burst or quota
	Unsettled     int                       `gauge:"settlements.pending"`               // that have not reached Redis yet
	LateSettled   int64                     `counter:"settlements{result=late}"`        // that came too late to count
	NeverSettled  int64                     `counter:"settlements{result=lost}"`        // that never reached Redis
	LostSlots     int64                     `counter:"slots.lost"`                      // reservations whose slots were lost
	Down          bool                      `gauge:"down"`                              // a node cannot be reached
}

// newStats returns Stats with an entry for every reason for which calls are refused here.
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
	l.tryAll(l.setting.Load()) // or a limit that nobody calls would be down for good
	s := l.stats
	s.Refusals = maps.Clone(s.Refusals)
	s.Down = len(l.down) > 0
	return s
}

// Observe is [throttle.Limiter.Observe]. The kinds are EventRefused, EventOutageBegan and
// EventOutageEnded, whose Key is the node.
func (l *Limits) Observe(f func(context.Context, throttle.Event)) (stop func()) {
	return l.observers.Observe(f)
}

// Config returns the configuration with defaults filled in.
func (l *Limits) Config() Config { return l.setting.Config() }

// Update is [throttle.Limiter.Update] for this process, and for calls that begin later: a call that waits
// keeps its Config.
func (l *Limits) Update(change func(*Config)) error { return l.setting.Update(change, same, nil) }

func same(was, next *Config) error { return invalid.Renamed("fleet.Config", was.Name, next.Name) }

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

// describe converts e to the form that the tools read.
func describe(e throttle.Event) policy.Event {
	return events.Describe(e.Name, e.Key, string(e.Kind), string(e.Reason), e.Waited, e.Err)
}

// health reports an outage: as a failure if calls are refused because of it.
func (l *Limits) health() policy.Health {
	cfg := l.setting.Load()
	status := policy.Warn
	if cfg.OnOutage == Refuse {
		status = policy.Fail
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.tryAll(cfg) // without calls, nothing else would find out that the outage is over
	for _, o := range l.down {
		return policy.Health{Status: status, State: string(o.trouble), Err: fmt.Errorf("%w: %w", throttle.ErrOutage, o.err)}
	}
	return policy.Health{}
}
