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
	FailureRate  float64       // of Calls; 0 if there are none
	SlowRate     float64       // of Calls; 0 if there are none
	FailedInARow int64         // calls, without a success between them
	OpensInARow  int64         // times that it opened without having closed
	OpenLeft     time.Duration // time until it lets a probe through; 0 unless State is Open
	LastErr      error         // of the last failure, or the reason given to Trip or ForceOpen
}

// Stats returns a snapshot. It moves an open breaker on, as [Breaker.State] does.
func (b *Breaker) Stats() Stats {
	b = b.current()
	b.advance(b.phase.Load())
	b.deliver(context.Background())
	f := b.figures()
	b.mu.Lock()
	defer b.mu.Unlock()
	p := b.phase.Load()
	s := Stats{
		State:        p.state,
		Since:        p.since,
		Counts:       f.Counts,
		FailureRate:  f.failureRate(),
		SlowRate:     f.slowRate(),
		FailedInARow: int64(f.failed),
		OpensInARow:  int64(b.opens),
		LastErr:      f.lastErr,
	}
	if p.state == Open {
		s.OpenLeft = max(0, p.until-b.now())
	}
	return s
}

// figures returns those of the circuit, or of the time when it was last closed.
func (b *Breaker) figures() figures {
	for {
		p := b.phase.Load()
		if p.refusal != nil {
			return p.figures
		}
		f, ok := p.circuit.look()
		if !ok {
			continue // it has just opened
		}
		if f.lastErr == nil {
			f.lastErr = p.figures.lastErr
		}
		return f
	}
}
