package breaker

import (
	"context"
	"time"
)

// Stats is what a [Breaker] knows at one moment.
type Stats struct {
	State State
	Since time.Time // of the last change of State, or of New
	// Counts are those of the window: when the breaker last was closed, unless it
	// is closed or disabled now.
	Counts
	FailureRate float64       // of Calls; 0 if there are none
	SlowRate    float64       // of Calls; 0 if there are none
	OpensInARow int64         // times that it opened without having closed
	OpenLeft    time.Duration // time until it lets a probe through; 0 unless State is Open
	LastErr     error         // of the last failure, or the reason given to Trip or ForceOpen
}

// Stats returns a snapshot. It moves an open breaker on, as [Breaker.State] does.
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

// look returns the present phase with its figures, or those of the time when the
// breaker was last closed; b.mu is held.
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
