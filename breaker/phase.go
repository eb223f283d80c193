package breaker

import (
	"context"
	"math/rand/v2"
	"time"
)

// A phase is what a breaker does between two changes of state, of Config, or of its counts
// by a Reset. It does not change: an Update makes a new phase with the same circuit.
type phase struct {
	state   State
	cfg     *Config       // of the breaker in this phase
	circuit *circuit      // nil while forced open
	refusal *OpenError    // nil if every call passes
	until   time.Duration // no call passes before; forever if an operator decides
	since   time.Time     // of the state
	figures figures       // when the breaker was last closed; of no use if every call passes
}

// is reports whether p and q belong to one period: perhaps their Configs differ.
func (p *phase) is(q *phase) bool { return p.circuit == q.circuit && p.state == q.state }

// catchUp begins the next phase if the time calls for it, and returns the present phase; b.mu
// is held.
func (b *Breaker) catchUp() *phase {
	p := b.phase.Load()
	switch {
	case p.state == Open && b.now() >= p.until:
		b.halfOpen(p)
	case b.probes.expire(p.circuit, b.now()): // it is half-open
		b.trip(p, verdict{end: failed, err: errHung})
	}
	return b.phase.Load()
}

// trip opens the breaker because of a call that failed, or was slow, in phase p; b.mu is held.
// The call is counted already if the breaker is closed.
func (b *Breaker) trip(p *phase, v verdict) {
	f := p.figures
	if p.state == Closed {
		f = p.circuit.figures(b.now())
	} else if v.end == failed {
		f.FailedInARow = int64(p.circuit.row) + 1
	} else {
		f.FailedInARow = 0
	}
	b.opens++
	d := p.cfg.openTime(b.opens)
	if v.openFor > 0 {
		d = min(v.openFor, p.cfg.MaxRetryAfter)
	}
	if v.end != failed {
		v.err = errSlow
	}
	b.open(d, v.err, f)
}

// openTime returns how long to stay open for the nth time in a row.
func (c *Config) openTime(n int) time.Duration {
	d := max(c.OpenFor, 0)
	for ; n > 1 && d < c.MaxOpenFor; n-- {
		d = min(d*2, c.MaxOpenFor)
	}
	if c.Jitter > 0 {
		d += time.Duration(rand.Float64() * c.Jitter * float64(d))
	}
	return d
}

// open begins an open phase of duration d; b.mu is held.
func (b *Breaker) open(d time.Duration, err error, f figures) {
	c := newCircuit(b.phase.Load().cfg, d)
	c.row, c.lastErr = int(f.FailedInARow), err
	c.tell(errHung) // any failure opens gobreaker
	until := b.now() + d
	f.lastErr = err
	b.enter(&phase{
		state:   Open,
		circuit: c,
		refusal: &OpenError{Name: b.name, Key: b.key, Reason: CircuitOpen, Until: b.start.Add(until), LastErr: err},
		until:   until,
		figures: f,
	}, Event{Err: err, OpenFor: d})
}

// halfOpen begins the phase after the open phase p; b.mu is held.
func (b *Breaker) halfOpen(p *phase) {
	refusal := *p.refusal
	refusal.Reason, refusal.since = CircuitHalfOpen, time.Now()
	b.enter(&phase{state: HalfOpen, circuit: p.circuit, refusal: &refusal, figures: p.figures}, Event{})
}

// close begins a closed phase, in which c counts the calls; b.mu is held.
func (b *Breaker) close(c *circuit) {
	b.opens = 0
	b.enter(&phase{state: Closed, circuit: c.close(b.now())}, Event{})
}

// enter begins phase p; b.mu is held. Every change of state happens here.
func (b *Breaker) enter(p *phase, e Event) {
	from := b.phase.Load()
	p.cfg, p.since = from.cfg, from.since
	if from.state != p.state {
		p.since = time.Now()
		e.Kind, e.Name, e.Key, e.At, e.From, e.To = EventChanged, b.name, b.key, p.since, from.state, p.state
		b.totals.enter(p.state)
		if p.cfg.OnChange != nil || b.observers.Any() {
			b.changes.Add(e)
		}
	}
	if c := from.circuit; c != nil && c != p.circuit {
		b.totals.Succeeded += c.calm.seal()
	}
	b.phase.Store(p)
	b.repoint(p)
}

// State returns the state. A breaker whose open time has passed becomes half-open.
func (b *Breaker) State() State {
	b.mu.Lock()
	state := b.catchUp().state
	b.mu.Unlock()
	b.deliver(context.Background())
	return state
}
