package breaker

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"time"
)

// A State specifies which calls a [Breaker] admits.
type State string

const (
	Closed     State = "closed"      // all calls pass
	HalfOpen   State = "half_open"   // a few calls pass, as probes
	Open       State = "open"        // calls are refused until the open time ends
	ForcedOpen State = "forced_open" // all calls are refused until Enable is called
	Disabled   State = "disabled"    // all calls pass, and are counted, until Enable is called
)

// A probe is a call that was admitted while the breaker was half-open.
type probe struct {
	state  probeState
	outage uint32 // Breaker.outages when the probe was admitted
	// due is the time at which a probe whose function still runs loses its permit. For a probe whose stream
	// continues, due is the time at which the probe counts as successful.
	due  time.Duration
	done func(error) // reports the result to the machine
}

// A probeState is the progress of a probe.
type probeState uint8

const (
	probeRunning   probeState = iota // the function runs, and the breaker is still half-open
	probeStreaming                   // the function succeeded, the stream continues, and the breaker is still half-open
	probeLate                        // the function runs, but the breaker's half-open period has ended
	probeDecided                     // the result has been reported to the machine, or is no longer needed
)

var (
	errSlow = errors.New("breaker: successful call took SlowAfter or longer")
	errHung = errors.New("breaker: probe did not return within ProbeTimeout")
)

// jitter returns the fraction by which an open time is extended, from 0 to 0.1. Without jitter, breakers that
// open together in many processes would all probe at the same moment.
var jitter = func() float64 { return rand.Float64() / 10 }

// advance applies the transitions that are due at now.
func (b *Breaker) advance(now time.Duration) {
	switch b.state {
	case Open:
		if b.openLeft(now) <= 0 {
			refusal := *b.refusal
			refusal.State, refusal.since = HalfOpen, b.created.Add(now)
			b.refusal = &refusal
			b.setState(now, HalfOpen, Event{})
		}
	case Closed, Disabled:
		for b.overtime != nil && b.overtime.Len() > 0 {
			oldest := b.overtime.Front().Value.(*call)
			if now-oldest.succeededAt < b.cfg.Window {
				break
			}
			b.overtime.Remove(oldest.element)
			b.recordAnswer(now, oldest) // a stream without messages, such as an idle subscription, counts as a success
			// The run of broken streams ends, because oldest has continued for a whole Window. No stream has broken since
			// then: each failure is recorded after a call to advance.
			b.streams.end()
		}
		if now-b.since >= b.cfg.Window {
			b.consecOpens = 0
		}
	}
	// The order of the probes does not matter: the breaker closes only if all probes succeed.
	for _, p := range slices.Clone(b.probes) {
		switch {
		case now < p.due:
		case p.state == probeStreaming:
			b.decideProbe(now, p, &b.streams, outcome{Verdict: Success})
		case p.state == probeRunning:
			b.calls.count++
			b.trip(now, errHung, 0)
			fallthrough
		default:
			b.removeProbe(p)
		}
	}
}

// admitProbe admits c as a probe if a permit is left. Late probes of an earlier half-open period also hold permits.
// Therefore at most Config.Probes probes run at the same time, except for the overdue probes.
func (b *Breaker) admitProbe(c *call) bool {
	if len(b.probes) >= b.permits {
		return false
	}
	done, err := b.machine.Allow()
	if err != nil {
		return false
	}
	c.began = b.now()
	c.probe = &probe{outage: b.outages, due: c.began + b.cfg.ProbeTimeout, done: done}
	b.probes = append(b.probes, c.probe)
	return true
}

// finishProbe records the outcome of a probe whose function has returned. streams is true if the probe's stream
// continues.
func (b *Breaker) finishProbe(now time.Duration, c *call, out outcome, streams bool) {
	p := c.probe
	switch {
	case p.state == probeRunning && streams:
		p.state, p.due = probeStreaming, now+min(c.cfg.OpenFor, c.cfg.ProbeTimeout)
		b.calls.end()
	case p.state == probeRunning:
		b.decideProbe(now, p, &b.calls, out)
	case p.outage == b.outages && out.Verdict == Success: // the probe is late
		b.startCounting(now, Closed)
		fallthrough
	default:
		b.removeProbe(p)
	}
}

// decideProbe reports the outcome of a probe to the machine. It is called when the probe's function returns without a
// stream, when the probe's stream ends, and when a probe whose stream continues is due. If the stream breaks after it
// was due, while the breaker is still half-open, decideProbe is called a second time, and the breaker opens. r is the
// run to which a failure of the probe is added.
func (b *Breaker) decideProbe(now time.Duration, p *probe, r *run, out outcome) {
	b.removeProbe(p)
	again := p.state == probeDecided
	p.state = probeDecided
	switch {
	case out.Verdict == Failure:
		p.done(errFailed)
		b.outages++
		r.count++
		b.trip(now, out.err, out.retryAfter)
	case again:
	case out.Verdict == Ignore:
		p.done(errIgnored)
	default:
		p.done(nil)
		r.end()
		if b.machine.closed() {
			b.startCounting(now, Closed)
		}
	}
}

func (b *Breaker) removeProbe(p *probe) {
	b.probes = slices.DeleteFunc(b.probes, func(other *probe) bool { return other == p })
}

// trip opens the breaker because of a failure. hint is the longest RetryAfter of the failures that opened the
// breaker. The breaker stays open for hint plus jitter, at most MaxRetryAfter. If hint is 0, the breaker stays open
// for the time that openTime returns.
func (b *Breaker) trip(now time.Duration, err error, hint time.Duration) {
	b.consecOpens++
	if hint == 0 {
		b.enterOpen(now, b.openTime(), err)
		return
	}
	hint = min(hint, b.cfg.MaxRetryAfter)
	hint += time.Duration(jitter() * float64(hint))
	b.enterOpen(now, min(hint, b.cfg.MaxRetryAfter), err)
}

// openTime returns OpenFor, doubled for each consecutive opening up to MaxOpenFor, plus jitter.
func (b *Breaker) openTime() time.Duration {
	d := b.cfg.OpenFor
	for n := b.consecOpens; n > 1 && d < b.cfg.MaxOpenFor; n-- {
		d = min(d*2, b.cfg.MaxOpenFor)
	}
	return d + time.Duration(jitter()*float64(d))
}

// enterOpen opens the breaker for d, which is positive.
func (b *Breaker) enterOpen(now, d time.Duration, err error) {
	b.counts(now) // remove old results, because the window stops moving now
	b.lastErr, b.permits = err, b.cfg.Probes
	b.machine = newOpenMachine(d, b.cfg.Probes)
	// newOpenMachine has read the clock after now. Read the clock again, because the time in until must not be before the
	// time at which the machine becomes half-open.
	until := b.created.Add(b.now() + d)
	b.refusal = &OpenError{Name: b.cfg.Name, State: Open, Until: until, LastErr: err}
	b.setState(now, Open, Event{Err: err, OpenFor: d})
}

// openLeft returns the remaining open time.
func (b *Breaker) openLeft(now time.Duration) time.Duration {
	return b.refusal.Until.Sub(b.created) - now
}

// startCounting enters s with no failures and an empty window. s is Closed or Disabled.
func (b *Breaker) startCounting(now time.Duration, s State) {
	b.outages++
	b.refusal, b.machine = nil, nil
	b.calls, b.streams = run{}, run{}
	b.window.reset(b.cfg, now)
	b.setState(now, s, Event{})
}

// setState enters s and starts a new generation.
func (b *Breaker) setState(now time.Duration, s State, e Event) {
	from := b.state
	b.state = s
	b.generation++
	b.overtime = nil
	for _, p := range slices.Clone(b.probes) {
		if p.state == probeStreaming {
			p.state = probeDecided // the probe's function has returned, so the probe needs no permit
			b.removeProbe(p)
		} else {
			p.state = probeLate
		}
	}
	if s == from {
		return
	}
	b.since = now
	if b.transitions == nil {
		b.transitions = make(map[State]int64)
	}
	b.transitions[s]++
	if o := b.observing.Load(); o != nil {
		e.Kind, e.Name, e.At, e.From, e.To = EventChanged, b.cfg.Name, b.created.Add(now), from, s
		o.transitions.Add(e)
	}
}

// counts returns the counts of the window. No result expires while the breaker is open, half-open or forced open.
func (b *Breaker) counts(now time.Duration) Counts {
	if b.refusal == nil {
		b.window.advance(now)
	}
	return Counts{b.window.succeeded, b.window.failed, int64(max(b.calls.count, b.streams.count))}
}

// State returns the current state.
func (b *Breaker) State() (s State) {
	b.locked(context.Background(), func(time.Duration) { s = b.state })
	return s
}

// Trip opens the breaker for exactly d, even if the breaker is already open for a longer time. If d is not positive,
// the breaker opens for the same time as after a failure without a RetryAfter. Trip has no effect while the breaker is
// forced open or disabled. Errors and events report the given reason as the last error.
//
// docs/cookbook.md has a middleware that calls Trip after an error that has a RetryAfter.
func (b *Breaker) Trip(reason error, d time.Duration) {
	b.operate(false, func(now time.Duration) {
		if b.state != Open {
			b.consecOpens++
		}
		if d <= 0 {
			d = b.openTime()
		}
		b.outages++
		b.enterOpen(now, min(d, longest), reason)
	})
}

// Reset closes the breaker, unless it is forced open or disabled. Reset also clears the counts of the window, the
// consecutive failures and openings, and the last error. The counters in Stats continue.
func (b *Breaker) Reset() {
	b.operate(false, func(now time.Duration) { b.restart(now, Closed) })
}

// ForceOpen refuses all calls until Enable is called. Errors and events report the given reason as the last error.
func (b *Breaker) ForceOpen(reason error) {
	b.locked(context.Background(), func(now time.Duration) {
		b.counts(now) // remove old results, because the window stops moving now
		b.outages++
		b.lastErr, b.consecOpens = reason, 0
		b.refusal = &OpenError{Name: b.cfg.Name, State: ForcedOpen, LastErr: reason}
		b.setState(now, ForcedOpen, Event{Err: reason})
	})
}

// Disable lets all calls pass until Enable is called. Disable clears the same counts as Reset, but not the last error.
// While the breaker is disabled, calls are still counted.
func (b *Breaker) Disable() {
	b.locked(context.Background(), func(now time.Duration) {
		if b.state != Disabled {
			b.restart(now, Disabled)
		}
	})
}

// Enable ends the effect of ForceOpen or Disable: it closes the breaker, and clears the same counts as Reset and the
// last error. Enable has no effect if the breaker is neither forced open nor disabled.
func (b *Breaker) Enable() {
	b.operate(true, func(now time.Duration) { b.restart(now, Closed) })
}

// forced reports whether ForceOpen or Disable has set the state.
func (b *Breaker) forced() bool { return b.state == ForcedOpen || b.state == Disabled }

// operate calls f with b.mu held if b.forced() equals forced.
func (b *Breaker) operate(forced bool, f func(now time.Duration)) {
	b.locked(context.Background(), func(now time.Duration) {
		if b.forced() == forced {
			f(now)
		}
	})
}

// restart enters state s with no counts, as if the breaker were new.
func (b *Breaker) restart(now time.Duration, s State) {
	b.consecOpens = 0
	if s == Closed {
		b.lastErr = nil
	}
	b.startCounting(now, s)
}
