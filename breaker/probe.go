package breaker

import (
	"errors"
	"slices"
	"time"

	"github.com/sony/gobreaker/v2"
)

// A probe is a call made while the breaker is half-open. One that has not ended at expires has
// failed.
type probe struct {
	circuit *circuit
	expires time.Duration
	done    func(error) // tells gobreaker of its end
}

// errHung is the LastErr of a breaker that a probe without an end has opened.
var errHung = errors.New("breaker: a probe has not ended within MaxHalfOpen")

// probes are the probes under way, those of earlier openings too, so that there are never more
// than Config.Probes at once.
type probes []*probe

// expire forgets the probes whose time is up, and reports whether one of them was of c.
func (s *probes) expire(c *circuit, now time.Duration) (hung bool) {
	*s = slices.DeleteFunc(*s, func(p *probe) bool {
		over := p.expires <= now
		hung = hung || over && p.circuit == c
		return over
	})
	return hung
}

// end forgets a probe that has ended.
func (s *probes) end(ended *probe) {
	*s = slices.DeleteFunc(*s, func(p *probe) bool { return p == ended })
}

// take begins a probe of phase p. If there is none, the error is that of gobreaker, or nil
// because p is over.
func (b *Breaker) take(p *phase) (*probe, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.catchUp() != p {
		return nil, nil
	}
	if len(b.probes) >= p.cfg.Probes {
		return nil, gobreaker.ErrTooManyRequests
	}
	done, err := p.circuit.gb.Allow()
	if err != nil {
		return nil, err
	}
	t := &probe{p.circuit, b.now() + p.cfg.MaxHalfOpen, done}
	b.probes = append(b.probes, t)
	return t, nil
}

// settleProbe counts the verdict on a probe, and a second one if it breaks off later. Of a
// Ping, which is no probe, it reports false if gobreaker waits for as many probes as it needs.
func (b *Breaker) settleProbe(c call, v verdict) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	p := b.catchUp()
	done, err := func(error) {}, v.told(p.cfg.SlowRate > 0)
	if c.probe != nil {
		b.totals.count(v)
		b.probes.end(c.probe)
		done = c.probe.done
	}
	if !p.is(c.phase) {
		return true
	}
	if c.probe == nil {
		allowed, full := p.circuit.gb.Allow()
		if full == nil {
			done = allowed
		} else if err == nil {
			return false
		}
	}
	done(err)
	switch {
	case err == errIgnored:
	case err != nil:
		b.trip(p, v)
	case p.circuit.gb.State() == gobreaker.StateClosed:
		b.close(p.circuit)
	default:
		p.circuit.row = 0
	}
	return true
}
