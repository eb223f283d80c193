package breaker

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/sony/gobreaker/v2"
)

// A State is what a [Breaker] does with calls.
type State string

const (
	Closed     State = "closed"      // calls pass
	HalfOpen   State = "half-open"   // a few calls pass, as probes
	Open       State = "open"        // calls are refused until a time
	ForcedOpen State = "forced open" // calls are refused until Enable
	Disabled   State = "disabled"    // calls pass and are counted, until Enable
)

// A probe is a call that was admitted while the breaker was half-open.
type probe struct {
	period uint32
	// due is by when its function must have returned. Once it has, and its work goes on, due
	// is when the probe has succeeded unless the work ends before.
	due      time.Duration
	returned bool
	done     func(error) // tells the machine; nil when it has
}

var (
	errIgnored = errors.New("breaker: ignored") // these two are told to gobreaker
	errFailed  = errors.New("breaker: failed")
	errSlow    = errors.New("breaker: a call took SlowAfter or longer")
	errHung    = errors.New("breaker: a probe has not returned within OpenFor")
)

// spread is the share of its length by which an open time is longer, from 0 to 0.1: otherwise
// the processes of a fleet, which open together, would all probe in the same moment.
var spread = func() float64 { return rand.Float64() / 10 }

// newMachine returns a gobreaker that is open for a time, or closed if that is 0.
func (b *Breaker) newMachine(openFor time.Duration) *machine {
	opening := openFor > 0
	m := gobreaker.NewTwoStepCircuitBreaker[struct{}](gobreaker.Settings{
		MaxRequests: uint32(b.cfg.Probes),
		Timeout:     max(1, openFor-1), // gobreaker is open until after it, a breaker until it
		ReadyToTrip: func(gobreaker.Counts) bool { return opening || b.rowOver() || b.windowOver() },
		IsExcluded:  func(err error) bool { return err == errIgnored },
	})
	if opening {
		report(m, errFailed)
		opening = false
	}
	return m
}

// report reports a result to a closed gobreaker, and returns its state.
func report(m *machine, err error) gobreaker.State {
	done, _ := m.Allow()
	done(err)
	return m.State()
}

// rowOver and windowOver report whether the results are at a limit of the Config.
func (b *Breaker) rowOver() bool { return b.cfg.Failures > 0 && b.row >= b.cfg.Failures }

func (b *Breaker) windowOver() bool {
	cfg, succeeded, failed := b.cfg, b.window.succeeded, b.window.failed
	return cfg.FailuresInWindow > 0 && failed >= int64(cfg.FailuresInWindow) ||
		cfg.FailureRate > 0 && succeeded+failed >= int64(cfg.MinCalls) && share(failed, succeeded) >= cfg.FailureRate
}

// catchUp makes the changes that time has brought about.
func (b *Breaker) catchUp(now time.Duration) {
	switch b.state {
	case Open:
		if b.openLeft(now) <= 0 {
			refusal := *b.refusal
			refusal.State, refusal.since = HalfOpen, b.start.Add(now)
			b.refusal = &refusal
			b.change(now, HalfOpen, Event{})
		}
	case Closed, Disabled:
		for b.works != nil && b.works.Len() > 0 {
			oldest := b.works.Front().Value.(*call)
			if now-oldest.since < b.cfg.Window {
				break
			}
			b.works.Remove(oldest.element)
			b.endRow() // nothing has failed since that moment: each failure catches up first
		}
		if now-b.since >= b.cfg.Window {
			b.opens = 0
		}
	}
	// The order does not matter: the breaker closes when all probes of its opening have
	// succeeded, and opens if one has not.
	for _, p := range slices.Clone(b.probes) {
		switch {
		case now < p.due:
		case p.returned:
			b.probeEnded(now, p, verdict{Result: Success})
		default:
			b.probeEnded(now, p, verdict{Result: Failure, err: errHung})
		}
	}
}

// admitProbe admits c as a probe if there are permits left. A probe of an earlier opening whose
// function has not returned takes one, so that never more run at once.
func (b *Breaker) admitProbe(c *call) bool {
	if len(b.probes) >= int(b.permits) {
		return false
	}
	done, err := b.machine.Allow()
	if err != nil {
		return false
	}
	c.begun = b.now()
	c.probe = &probe{period: b.period, due: c.begun + b.cfg.OpenFor, done: done}
	b.probes = append(b.probes, c.probe)
	return true
}

// probeEnded counts the result of a probe: when it has returned, when its work has ended, or
// when it was due. A success that breaks off later, but still while the breaker is half-open,
// opens it, too.
func (b *Breaker) probeEnded(now time.Duration, p *probe, v verdict) {
	b.forget(func(other *probe) bool { return other == p })
	done := p.done
	p.done = nil
	switch {
	case p.period != b.period:
	case v.Result == Failure:
		if done != nil {
			done(errFailed)
		}
		b.row++
		b.trip(now, v)
	case done == nil:
	case v.Result == Ignore:
		done(errIgnored)
	default:
		done(nil)
		b.endRow()
		if b.machine.State() == gobreaker.StateClosed {
			b.enterCounting(now, Closed)
		}
	}
}

func (b *Breaker) forget(these func(*probe) bool) { b.probes = slices.DeleteFunc(b.probes, these) }

// trip opens the breaker because of a failure: for the longest RetryAfter among the failures
// that did it, or else for OpenFor, or longer if it has been open before.
func (b *Breaker) trip(now time.Duration, v verdict) {
	d := v.retryAfter // of a probe
	if b.state == Closed {
		d = b.window.longest(!b.windowOver())
	}
	b.opens++
	b.enterOpen(now, min(d, b.cfg.MaxRetryAfter), v.err, true)
}

// enterOpen opens the breaker for d, spread or not, or for the time of the Config if d is not
// positive.
func (b *Breaker) enterOpen(now, d time.Duration, err error, spreads bool) {
	if d <= 0 {
		d, spreads = b.cfg.OpenFor, true
		for n := b.opens; n > 1 && d < b.cfg.MaxOpenFor; n-- {
			d = min(d*2, b.cfg.MaxOpenFor)
		}
	}
	if spreads {
		d += time.Duration(spread() * float64(d))
	}
	d = max(d, time.Microsecond) // gobreaker takes no time for its default
	b.counts(now)                // stay as they are now
	b.lastErr, b.permits = err, uint32(b.cfg.Probes)
	b.machine = b.newMachine(d)
	until := b.start.Add(b.now() + d) // not before gobreaker's
	b.refusal = &OpenError{Name: b.cfg.Name, State: Open, Until: until, LastErr: err}
	b.change(now, Open, Event{Err: err, OpenFor: d})
}

// openLeft returns the rest of the open time.
func (b *Breaker) openLeft(now time.Duration) time.Duration {
	return b.refusal.Until.Sub(b.start) - now
}

// enterCounting begins to count the calls anew, Closed or Disabled.
func (b *Breaker) enterCounting(now time.Duration, s State) {
	b.refusal, b.row = nil, 0
	b.window.begin(b.cfg, now)
	b.change(now, s, Event{})
}

// change begins a new period: results of calls that began before change nothing.
func (b *Breaker) change(now time.Duration, s State, e Event) {
	from := b.state
	b.state = s
	b.period++
	b.works = nil
	b.forget(func(p *probe) bool { return p.returned })
	if s == from {
		return
	}
	b.since = now
	if b.changes == nil {
		b.changes = make(map[State]int64)
	}
	b.changes[s]++
	if a := b.observing.Load(); a != nil {
		e.Kind, e.Name, e.At, e.From, e.To = EventChanged, b.cfg.Name, b.start.Add(now), from, s
		a.changes.Add(e)
	}
}

// counts returns those of the window, as it was when a call passed last.
func (b *Breaker) counts(now time.Duration) Counts {
	if b.refusal == nil {
		b.window.advance(now)
	}
	return Counts{b.window.succeeded + b.window.failed, b.window.succeeded, b.window.failed, int64(b.row)}
}

func (b *Breaker) State() (s State) {
	b.operate(context.Background(), func(time.Duration) { s = b.state })
	return s
}

// Trip opens the breaker for exactly d, or if that is not positive for as long as it would open by
// itself, unless it is forced open or disabled. err is reported as the last error. docs/cookbook.md
// has middleware that trips for the first RetryAfter.
func (b *Breaker) Trip(err error, d time.Duration) {
	b.command(false, func(now time.Duration) {
		if b.state != Open {
			b.opens++
		}
		b.enterOpen(now, min(d, longest), err, false)
	})
}

// Reset closes the breaker, unless it is forced open or disabled, and counts anew.
func (b *Breaker) Reset() {
	b.command(false, func(now time.Duration) { b.restart(now, Closed) })
}

// ForceOpen refuses all calls until Enable. reason is reported as the last error.
func (b *Breaker) ForceOpen(reason error) {
	b.operate(context.Background(), func(now time.Duration) {
		b.counts(now) // stay as they are now
		b.lastErr, b.opens = reason, 0
		b.refusal = &OpenError{Name: b.cfg.Name, State: ForcedOpen, LastErr: reason}
		b.change(now, ForcedOpen, Event{Err: reason})
	})
}

// Disable lets all calls pass until Enable.
func (b *Breaker) Disable() {
	b.operate(context.Background(), func(now time.Duration) {
		if b.state != Disabled {
			b.restart(now, Disabled)
		}
	})
}

// Enable closes a breaker that is forced open or disabled, and counts anew.
func (b *Breaker) Enable() {
	b.command(true, func(now time.Duration) { b.restart(now, Closed) })
}

// forced reports whether an operator has decided the state.
func (b *Breaker) forced() bool { return b.state == ForcedOpen || b.state == Disabled }

// command calls f if the state is forced, or if it is not.
func (b *Breaker) command(forced bool, f func(now time.Duration)) {
	b.operate(context.Background(), func(now time.Duration) {
		if b.forced() == forced {
			f(now)
		}
	})
}

// restart makes the breaker as it was when it was new.
func (b *Breaker) restart(now time.Duration, s State) {
	b.machine, b.opens = nil, 0
	if s == Closed {
		b.lastErr = nil
	}
	b.enterCounting(now, s)
}
