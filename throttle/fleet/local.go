package fleet

import (
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	"github.com/go-resilience/resilience/throttle"
)

const (
	maxLocal   = 100_000
	maxScan    = 100 // parts that are checked while l.mu is held
	purgeEvery = time.Minute
)

// A localPart is this process's part of a meter. If OnOutage is Local, the part limits calls during an outage. A part
// is removed only when none of its tokens are spent, which may be long after the outage. If it were removed at the
// end of the outage, each short outage would make the whole part of a quota available again.
type localPart struct {
	limiter *throttle.Limiter
	terms   partTerms
}

// partTerms are the values that determine the limit of a localPart.
type partTerms struct {
	limit     int64
	perSecond float64
	window    throttle.Window
	instances int
}

// reserveWithout decides whether a call is admitted without Redis, as OnOutage specifies. err is the error of Redis.
func (l *Limits) reserveWithout(ctx context.Context, r *Reservation, err error) (*Reservation, error) {
	outage := &throttle.LimitedError{
		Name: r.cfg.Name, Key: r.meters[0].key, Reason: throttle.Outage, After: l.retryAfter(r), Err: err,
	}
	switch r.cfg.OnOutage {
	case Refuse:
		return nil, l.refuse(ctx, outage)
	case Local:
		if e := l.takeLocally(ctx, r); e != nil {
			if e.Reason == throttle.TooCostly { // the call is too costly only for the part of this process
				e = outage
			}
			return nil, l.refuse(ctx, e)
		}
	}
	r.without = true
	l.mu.Lock()
	defer l.mu.Unlock()
	select {
	case <-l.closed:
		return nil, ErrClosed
	default:
	}
	l.stats.Admitted++
	l.stats.AdmittedLocal++
	return r, nil
}

// takeLocally takes the costs of r from this process's parts of all its meters, or from none of them.
func (l *Limits) takeLocally(ctx context.Context, r *Reservation) *throttle.LimitedError {
	for i := range r.meters {
		taken, e := l.takePart(ctx, r.cfg, r.keys[i], &r.meters[i])
		if e != nil {
			for _, taken := range r.parts {
				taken.Settle(0)
			}
			r.parts = nil
			return e
		}
		r.parts = append(r.parts, taken)
	}
	return nil
}

// takePart takes the cost of a call from this process's part of m. key is the key of m's state in Redis.
func (l *Limits) takePart(
	ctx context.Context, cfg *Config, key string, m *Meter,
) (*throttle.Reservation, *throttle.LimitedError) {
	l.mu.Lock()
	defer l.mu.Unlock()
	terms := partTerms{m.limit, m.perSecond, m.window, cfg.Instances}
	part := l.local[key]
	switch {
	case part == nil && len(l.local) >= maxLocal:
		if l.removeSome(); len(l.local) >= maxLocal {
			return nil, m.refusal(cfg, throttle.OverLimit)
		}
		fallthrough
	case part == nil:
		part = &localPart{throttle.New(m.local(cfg.Instances)), terms}
		l.local[key] = part
	case part.terms != terms:
		part.terms = terms
		_ = part.limiter.Update(func(c *throttle.Config) { *c = m.local(cfg.Instances) })
	}
	cost := int(m.cost)
	if m.kind == slots {
		cost = 1
	}
	taken, err := part.limiter.Reserve(context.WithoutCancel(ctx), cost)
	e, _ := errors.AsType[*throttle.LimitedError](err)
	switch {
	case e != nil && m.kind == slots:
		e = m.refusal(cfg, throttle.OverLimit)
	case e != nil:
		e.Name, e.Key = cfg.Name, m.key
	}
	return taken, e
}

// settleLocally corrects the localParts from which r has taken tokens.
func (r *Reservation) settleLocally(usedOf func(*Meter) (used int64, ok bool)) {
	for i, taken := range r.parts {
		m := &r.meters[i]
		used, ok := usedOf(m)
		switch {
		case m.kind == slots:
			used = 0
		case !ok:
			used = m.cost
		}
		taken.Settle(int(used))
	}
}

// purgeLocal removes idle parts in the background: now and, while any parts remain, every minute. The caller holds
// l.mu.
func (l *Limits) purgeLocal() {
	switch {
	case len(l.local) == 0:
	case l.purger == nil:
		l.purger = time.AfterFunc(0, l.purge)
	default:
		l.purger.Reset(0)
	}
}

// purge removes idle parts, and schedules the next purge if parts remain.
func (l *Limits) purge() {
	l.mu.Lock()
	keys := slices.Collect(maps.Keys(l.local))
	l.mu.Unlock()
	for some := range slices.Chunk(keys, maxScan) {
		l.mu.Lock()
		for _, key := range some {
			l.removeIfIdle(key)
		}
		l.mu.Unlock()
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.local) > 0 {
		l.purger.Reset(purgeEvery)
	}
}

// removeSome removes the idle parts among some parts. Further calls check other parts, because the iteration over a map
// starts at a random key. The caller holds l.mu.
func (l *Limits) removeSome() {
	n := 0
	for key := range l.local {
		if n++; n > maxScan {
			return
		}
		l.removeIfIdle(key)
	}
}

// removeIfIdle removes the part of key if it has no spent tokens. The caller holds l.mu.
func (l *Limits) removeIfIdle(key string) {
	if part := l.local[key]; part != nil && !part.limiter.Describe().InUse() {
		delete(l.local, key)
	}
}
