package breaker

import (
	"context"
	"errors"
	"fmt"
	"math"
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

// A phase is the time between two changes: one state of one circuit. Its identity
// is that of the generation to which a result belongs.
type phase struct {
	state   State
	circuit *circuit
	refusal *OpenError    // nil: calls pass
	until   time.Duration // no call passes before; forever where an operator decides
	since   time.Time     // of the state
	figures figures       // of the circuit when it was last closed

	successes int // of probes; guarded by Breaker.mu
}

const forever = time.Duration(math.MaxInt64)

// errSlow is what opened a breaker whose last call has succeeded.
var errSlow = errors.New("breaker: too many slow calls")

// opened, halfOpened and closedAgain follow gobreaker. They are called with its
// lock held, and do nothing for a circuit that is no longer in use, or not yet.
func (b *Breaker) opened(c *circuit, cause *verdict, f figures) {
	b.follow(c, func(p *phase) {
		err := cause.err
		if err == nil {
			err = errSlow
		}
		if p.state == HalfOpen {
			f.Counts = p.figures.Counts
		}
		b.opens++
		b.open(c, b.cfg.openTime(b.opens, cause.hold), err, f)
	})
}

func (b *Breaker) halfOpened(c *circuit) {
	b.follow(c, func(p *phase) {
		b.enter(&phase{
			state:   HalfOpen,
			circuit: c,
			refusal: &OpenError{Name: b.cfg.Name, State: HalfOpen, Until: p.refusal.Until, LastErr: p.refusal.LastErr},
			until:   p.until, // a straggler may bring it about before, in a long phase
			figures: p.figures,
		}, Change{})
	})
}

func (b *Breaker) closedAgain(c *circuit) {
	b.follow(c, func(p *phase) { b.close(p.figures.lastErr) })
}

// follow runs f with b.mu held and with the phase that c is to end.
func (b *Breaker) follow(c *circuit, f func(*phase)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if p := b.phase.Load(); p.circuit == c {
		f(p)
	}
}

// close begins a closed phase; b.mu is held. Each has a circuit of its own: no
// call that was let through before can tell it anything.
func (b *Breaker) close(lastErr error) {
	b.opens = 0
	b.enter(&phase{state: Closed, circuit: b.newCircuit(), figures: figures{lastErr: lastErr}}, Change{})
}

// open begins a phase of d in which calls are refused; b.mu is held.
func (b *Breaker) open(c *circuit, d time.Duration, err error, f figures) {
	until := b.now() + d
	f.lastErr = err
	b.enter(&phase{
		state:   Open,
		circuit: c,
		refusal: &OpenError{Name: b.cfg.Name, State: Open, Until: b.start.Add(until), LastErr: err},
		until:   until,
		figures: f,
	}, Change{Err: err, OpenFor: d})
}

// enter begins phase p; b.mu is held. It is where every change happens.
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
	ctx    context.Context // nil: that of the next to come by
	change Change
}

// deliver calls OnChange for the events that wait, in order. If another goroutine
// is at it, or a hook further up the stack, that one goes on with them.
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
	b = b.current()
	p := b.advance(b.phase.Load())
	b.deliver(context.Background())
	return p.state
}
