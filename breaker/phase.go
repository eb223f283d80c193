package breaker

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"time"
)

// A State is what a [Breaker] does with calls.
type State uint8

const (
	Closed     State = iota // calls pass
	HalfOpen                // a few calls pass, as probes
	Open                    // calls are refused until a time
	ForcedOpen              // calls are refused until Enable
	Disabled                // calls pass and are measured, until Enable
)

var stateNames = [...]string{"closed", "half-open", "open", "forced open", "disabled"}

// String returns the state in words: "half-open".
func (s State) String() string {
	if int(s) >= len(stateNames) {
		return fmt.Sprintf("breaker.State(%d)", uint8(s))
	}
	return stateNames[s]
}

// A Change is a change of a breaker's state.
type Change struct {
	Name     string // of the breaker
	From, To State
	At       time.Time
	// Err is what opened it: the error of the last call, or the reason given to
	// Trip or ForceOpen. Nil for the other changes.
	Err error
	// OpenFor is for how long calls are refused now, if To is Open.
	OpenFor time.Duration
}

// A phase is the time between two changes: one state with the settings and counts that
// belong to it.
type phase struct {
	state   State
	circuit *circuit      // that results go to; nil if no call passes
	refusal *OpenError    // nil: every call passes
	until   time.Duration // no call passes before; forever where an operator decides
	since   time.Time     // of the state
	figures figures       // of the circuit when it was last closed
}

const forever = time.Duration(math.MaxInt64)

// errSlow is what opened a breaker whose last call has succeeded.
var errSlow = errors.New("breaker: too many slow calls")

// advance begins the next phase, if its time has come.
func (b *Breaker) advance() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.catchUp()
}

// catchUp begins the next phase, if the time or the results of calls bring it about,
// and returns the present one; b.mu is held.
func (b *Breaker) catchUp() *phase {
	p := b.phase.Load()
	switch {
	case p.state == Open && b.now() >= p.until:
		b.halfOpen(p)
	case p.circuit == nil: // open, or forced open
	case p.circuit.tripped.Load() != nil:
		b.trip(p, p.circuit.tripped.Load())
	case p.state == HalfOpen && p.circuit.successes() >= b.cfg.Successes:
		b.close(p.figures.lastErr)
	}
	return b.phase.Load()
}

// trip ends phase p, whose calls have failed; b.mu is held.
func (b *Breaker) trip(p *phase, t *tripping) {
	b.opens++
	d := b.cfg.openTime(b.opens)
	if t.hold > 0 {
		d = min(t.hold, b.cfg.MaxRetryAfter)
	}
	err := t.err
	if err == nil {
		err = errSlow
	}
	f := t.figures
	if p.state == HalfOpen { // where only failures in a row are counted
		f.Counts = p.figures.Counts
		f.FailedInARow = t.FailedInARow
	}
	b.open(d, err, f)
}

// openTime returns how long to stay open when it is for the nth time in a row.
func (c *Config) openTime(n int) time.Duration {
	d := c.OpenFor
	for ; n > 1 && d < c.MaxOpenFor; n-- {
		d = min(d*2, c.MaxOpenFor)
	}
	if c.Jitter > 0 {
		d += time.Duration(rand.Float64() * c.Jitter * float64(d))
	}
	return d
}

// open begins a phase of d in which calls are refused; b.mu is held.
func (b *Breaker) open(d time.Duration, err error, f figures) {
	until := b.now() + d
	f.lastErr = err
	b.enter(&phase{
		state:   Open,
		refusal: &OpenError{Name: b.cfg.Name, State: Open, Until: b.start.Add(until), LastErr: err},
		until:   until,
		figures: f,
	}, Change{Err: err, OpenFor: d})
}

// halfOpen begins the phase after the open phase p; b.mu is held.
func (b *Breaker) halfOpen(p *phase) {
	refusal := *p.refusal
	refusal.State, refusal.since = HalfOpen, time.Now()
	c := b.newCircuit(HalfOpen)
	c.row = int(p.figures.FailedInARow)
	b.enter(&phase{state: HalfOpen, circuit: c, refusal: &refusal, figures: p.figures}, Change{})
}

// close begins a closed phase; b.mu is held.
func (b *Breaker) close(lastErr error) {
	b.opens = 0
	b.enter(&phase{state: Closed, circuit: b.newCircuit(Closed), figures: figures{lastErr: lastErr}}, Change{})
}

// enter begins phase p; b.mu is held. Every change of state happens here.
func (b *Breaker) enter(p *phase, c Change) {
	from := b.phase.Load()
	p.since = from.since
	if from.state != p.state {
		c.Name, c.From, c.To, c.At = b.cfg.Name, from.state, p.state, time.Now()
		p.since = c.At
		if b.cfg.OnChange != nil {
			b.events = append(b.events, event{change: c})
			b.waiting.Store(true)
		}
	}
	b.busy.Store(0)
	b.phase.Store(p)
	b.repoint(p)
}

// An event is a change that OnChange is yet to be told of.
type event struct {
	ctx    context.Context // nil: that of the next caller that delivers
	change Change
}

// deliver calls OnChange for the events that wait, in order. If another goroutine
// is delivering, or a hook further up the stack, it goes on with these.
func (b *Breaker) deliver(ctx context.Context) {
	if b.waiting.Load() {
		b.deliverAll(ctx)
	}
}

func (b *Breaker) deliverAll(ctx context.Context) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for i := range b.events {
		if b.events[i].ctx == nil {
			b.events[i].ctx = ctx
		}
	}
	if b.delivering {
		return
	}
	b.delivering = true
	defer func() { // also when a hook panics
		b.delivering = false
		b.waiting.Store(len(b.events) > 0)
	}()
	for len(b.events) > 0 {
		e := b.events[0]
		b.events = b.events[1:]
		b.tell(e)
	}
	b.events = nil
}

// tell calls OnChange without the lock that its caller holds.
func (b *Breaker) tell(e event) {
	b.mu.Unlock()
	defer b.mu.Lock()
	b.cfg.OnChange(e.ctx, e.change)
}

// State returns the state. A breaker whose open time has passed becomes half-open
// now.
func (b *Breaker) State() State {
	b.mu.Lock()
	state := b.catchUp().state
	b.mu.Unlock()
	b.deliver(context.Background())
	return state
}
