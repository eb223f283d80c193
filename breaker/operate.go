package breaker

import (
	"context"
	"time"
)

// Trip opens the breaker for d, whatever its calls say, then lets it probe. Zero
// or less means the time for which it would open by itself. err, which may be nil,
// is reported as the last error. Calls under way change nothing any more. An open
// breaker stays open until d from now, instead of as long as it would have.
//
// Trip does nothing while the breaker is forced open or disabled.
func (b *Breaker) Trip(err error, d time.Duration) {
	b.operate(func(b *Breaker) {
		d := min(d, longest)
		if d <= 0 {
			d = b.cfg.openTime(1, 0)
		}
		c := b.newTripped(d, err)
		b.override(func(p *phase, f figures) {
			if p.state == ForcedOpen || p.state == Disabled {
				return
			}
			b.opens = max(b.opens, 1)
			b.open(c, d, err, f)
		})
	})
}

// Reset closes the breaker and forgets all that it has counted. Calls under way
// change nothing any more. It does nothing while the breaker is forced open or
// disabled.
func (b *Breaker) Reset() {
	b.operate(func(b *Breaker) {
		b.override(func(p *phase, _ figures) {
			if p.state != ForcedOpen && p.state != Disabled {
				b.close(nil)
			}
		})
	})
}

// ForceOpen refuses every call until [Breaker.Enable]. reason, which may be nil, is
// reported as the last error.
func (b *Breaker) ForceOpen(reason error) {
	b.operate(func(b *Breaker) {
		b.override(func(_ *phase, f figures) {
			f.lastErr = reason
			b.opens = 0
			b.enter(&phase{
				state:   ForcedOpen,
				circuit: b.newCircuit(),
				refusal: &OpenError{Name: b.cfg.Name, State: ForcedOpen, LastErr: reason},
				until:   forever,
				figures: f,
			}, Change{Err: reason})
		})
	})
}

// Disable lets every call through until [Breaker.Enable], and goes on counting.
func (b *Breaker) Disable() {
	b.operate(func(b *Breaker) {
		b.override(func(p *phase, _ figures) {
			if p.state == Disabled {
				return
			}
			c := b.newCircuit()
			c.measures = true
			b.opens = 0
			b.enter(&phase{state: Disabled, circuit: c, figures: figures{lastErr: p.figures.lastErr}}, Change{})
		})
	})
}

// Enable ends [Breaker.ForceOpen] and [Breaker.Disable]: the breaker is closed, and
// counts from nothing. It does nothing in any other state.
func (b *Breaker) Enable() {
	b.operate(func(b *Breaker) {
		b.override(func(p *phase, _ figures) {
			if p.state == ForcedOpen || p.state == Disabled {
				b.close(nil)
			}
		})
	})
}

// operate runs f on the breaker that b stands for, and delivers its events.
func (b *Breaker) operate(f func(*Breaker)) {
	if b.seat != nil {
		b.seat.with(f)
		return
	}
	f(b)
}

// override runs f with b.mu held, with the phase that it may end and its figures.
func (b *Breaker) override(f func(*phase, figures)) {
	defer b.deliver(context.Background())
	looked := b.figures()
	b.mu.Lock()
	defer b.mu.Unlock()
	f(b.phase.Load(), looked)
}
