package breaker

import (
	"context"
	"time"
)

// Trip opens the breaker for exactly d; then it probes. Zero or less means the time for
// which it would open by itself: longer after each opening, if MaxOpenFor allows. err, which
// may be nil, is reported as the last error. The results of calls under way no longer
// count. If the breaker is open already, d replaces the time that is left.
//
// Trip does nothing while the breaker is forced open or disabled.
func (b *Breaker) Trip(err error, d time.Duration) {
	b.operate(context.Background(), func(p *phase, f figures) {
		if p.state == ForcedOpen || p.state == Disabled {
			return
		}
		if p.state != Open {
			b.opens++
		}
		if d <= 0 {
			d = p.cfg.openTime(b.opens)
		}
		b.open(min(d, longest), err, f)
	})
}

// Reset closes the breaker and forgets all that it has counted. The results of
// calls under way no longer count. It does nothing while the breaker is forced open or
// disabled.
func (b *Breaker) Reset() {
	b.operate(context.Background(), func(p *phase, _ figures) {
		if p.state != ForcedOpen && p.state != Disabled {
			b.close(newCircuit(p.cfg, 0))
		}
	})
}

// ForceOpen refuses every call until [Breaker.Enable]. reason, which may be nil, is
// reported as the last error.
func (b *Breaker) ForceOpen(reason error) {
	b.operate(context.Background(), func(_ *phase, f figures) {
		f.lastErr = reason
		b.opens = 0
		b.enter(&phase{
			state:   ForcedOpen,
			refusal: &OpenError{Name: b.name, Key: b.key, Reason: CircuitForcedOpen, LastErr: reason},
			until:   forever,
			figures: f,
		}, Event{Err: reason})
	})
}

// Disable lets every call through until [Breaker.Enable]. The breaker goes on counting.
func (b *Breaker) Disable() {
	b.operate(context.Background(), func(p *phase, f figures) {
		if p.state == Disabled {
			return
		}
		b.opens = 0
		c := newCircuit(p.cfg, 0).close(b.now())
		c.lastErr = f.lastErr
		b.enter(&phase{state: Disabled, circuit: c}, Event{})
	})
}

// Enable ends [Breaker.ForceOpen] and [Breaker.Disable]: the breaker closes and counts
// anew. In any other state Enable does nothing.
func (b *Breaker) Enable() {
	b.operate(context.Background(), func(p *phase, _ figures) {
		if p.state == ForcedOpen || p.state == Disabled {
			b.close(newCircuit(p.cfg, 0))
		}
	})
}

// operate calls f with the present phase and its figures while b.mu is held, and then
// tells of the changes.
func (b *Breaker) operate(ctx context.Context, f func(*phase, figures)) {
	defer b.deliver(ctx)
	b.mu.Lock()
	defer b.mu.Unlock()
	f(b.look())
}
