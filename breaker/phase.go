package breaker

import (
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"time"
)

// A phase is what a breaker does between two changes of state, of rules, or of its counts
// by a Reset. It does not change: an Update makes a new phase with the same circuit.
type phase struct {
	state   State
	rules   *rules        // of the breaker in this phase
	circuit *circuit      // counts the results; nil if no call passes
	refusal *OpenError    // nil if every call passes
	until   time.Duration // no call passes before; forever if an operator decides
	since   time.Time     // of the state
	figures figures       // of the circuit when the breaker was last closed
}

const forever = time.Duration(math.MaxInt64)

// errSlow is the LastErr of a breaker that a slow success has opened.
var errSlow = errors.New("breaker: too many slow calls")

// advance begins the next phase if the time or the results of calls call for it.
func (b *Breaker) advance() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.catchUp()
}

// catchUp begins the next phase if the time or the results of calls call for it, and
// returns the present phase; b.mu is held.
func (b *Breaker) catchUp() *phase {
	p := b.phase.Load()
	switch {
	case p.state == Open && b.now() >= p.until:
		b.halfOpen(p)
	case p.circuit == nil: // open, or forced open
	case p.circuit.tripped.Load() != nil:
		b.trip(p, p.circuit.tripped.Load())
	case p.state == HalfOpen && p.circuit.successes() >= p.rules.Successes:
		b.close(p.figures.lastErr)
	}
	return b.phase.Load()
}

// trip ends phase p, whose calls have failed; b.mu is held.
func (b *Breaker) trip(p *phase, t *tripping) {
	b.opens++
	d := p.rules.openTime(b.opens)
	if t.openFor > 0 {
		d = min(t.openFor, p.rules.MaxRetryAfter)
	}
	err := t.err
	if err == nil {
		err = errSlow
	}
	f := t.figures
	if p.state == HalfOpen { // which counts only failures in a row
		f.Counts = p.figures.Counts
		f.FailedInARow = t.FailedInARow
	}
	b.open(d, err, f)
}

// openTime returns how long to stay open for the nth time in a row.
func (c Config) openTime(n int) time.Duration {
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
	until := b.now() + d
	f.lastErr = err
	b.enter(&phase{
		state:   Open,
		refusal: &OpenError{Name: b.name, Key: b.key, Reason: CircuitOpen, Until: b.start.Add(until), LastErr: err},
		until:   until,
		figures: f,
	}, Event{Err: err, OpenFor: d})
}

// halfOpen begins the phase after the open phase p; b.mu is held.
func (b *Breaker) halfOpen(p *phase) {
	refusal := *p.refusal
	refusal.Reason, refusal.since = CircuitHalfOpen, time.Now()
	c := b.newCircuit(HalfOpen, p.rules)
	c.row = int(p.figures.FailedInARow)
	b.enter(&phase{state: HalfOpen, circuit: c, refusal: &refusal, figures: p.figures}, Event{})
}

// close begins a closed phase; b.mu is held.
func (b *Breaker) close(lastErr error) {
	b.opens = 0
	c := b.newCircuit(Closed, b.phase.Load().rules)
	b.enter(&phase{state: Closed, circuit: c, figures: figures{lastErr: lastErr}}, Event{})
}

// enter begins phase p; b.mu is held. Every change of state happens here.
func (b *Breaker) enter(p *phase, e Event) {
	from := b.phase.Load()
	p.rules, p.since = from.rules, from.since
	if from.state != p.state {
		p.since = time.Now()
		e.Kind, e.Name, e.Key, e.At, e.From, e.To = EventChanged, b.name, b.key, p.since, from.state, p.state
		b.counters.enter(p.state)
		if p.rules.OnChange != nil || b.observers.Any() {
			b.changes.Add(e)
		}
	}
	b.busy.Store(0)
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
