package breaker

import (
	"context"
	"time"
)

// Stats is a snapshot of a [Breaker].
type Stats struct {
	State State
	Since time.Time // of the last change of State, or of New
	// Counts are the calls in the window. While the breaker is open or half-open they
	// are those of the moment when it was last closed.
	Counts
	FailureRate float64       // of Calls; 0 if there are none
	SlowRate    float64       // of Calls; 0 if there are none
	OpensInARow int64         // how often it has opened since it was last closed
	OpenLeft    time.Duration // time until it lets a probe through; 0 unless State is Open
	LastErr     error         // of the last failure, or the reason given to Trip or ForceOpen
}

// Stats returns a snapshot. A breaker whose open time has passed becomes half-open.
func (b *Breaker) Stats() Stats {
	defer b.deliver(context.Background())
	b.mu.Lock()
	defer b.mu.Unlock()
	p, f := b.look()
	s := Stats{
		State:       p.state,
		Since:       p.since,
		Counts:      f.Counts,
		FailureRate: f.failureRate(),
		SlowRate:    f.slowRate(),
		OpensInARow: int64(b.opens),
		LastErr:     f.lastErr,
	}
	if p.state == Open {
		s.OpenLeft = max(0, p.until-b.now())
	}
	return s
}

// look returns the present phase with its figures, which are those of the moment when the
// breaker was last closed if no call passes; b.mu is held.
func (b *Breaker) look() (*phase, figures) {
	for {
		p := b.catchUp()
		if p.refusal != nil {
			return p, p.figures
		}
		if f, ok := p.circuit.look(); ok {
			if f.lastErr == nil {
				f.lastErr = p.figures.lastErr
			}
			return p, f
		}
	}
}
