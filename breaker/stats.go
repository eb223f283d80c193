package breaker

import (
	"context"
	"iter"
	"time"
)

// Totals are counters since New. They never go back: not by Reset, a change of state or of
// the Config, nor when a Group evicts a breaker.
type Totals struct {
	// Calls by outcome. A call is counted when it ends, even if its result changes
	// nothing because the breaker has opened or closed since. A call that breaks off
	// after it has succeeded counts as Succeeded and as Failed. Pings are not counted.
	Succeeded int64
	Failed    int64
	Ignored   int64
	Refused   int64
	Slow      int64 // of Succeeded and Failed: see [Counts]

	// Changes of state, by the new state.
	Opened     int64
	HalfOpened int64
	Closed     int64
	ForcedOpen int64
	Disabled   int64

	HookPanics int64 // of OnChange and observers, on the goroutine of a Ping
}

// Stats is a snapshot of a [Breaker].
type Stats struct {
	Totals
	State State
	Since time.Time // of the last change of State, or of New
	// Window counts the calls in the window. While the breaker is open or half-open it
	// is that of the moment when the breaker was last closed.
	Window      Counts
	FailureRate float64       // of the calls in the window; 0 if there are none
	SlowRate    float64       // of the calls in the window; 0 if there are none
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
		Totals:      b.sums(),
		State:       p.state,
		Since:       p.since,
		Window:      f.Counts,
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
	p := b.catchUp()
	if p.refusal != nil {
		return p, p.figures
	}
	return p, p.circuit.figures(b.now())
}

// sums returns the totals; b.mu is held.
func (b *Breaker) sums() Totals {
	t := b.totals
	t.Refused, t.HookPanics = b.refused.Load(), b.panics.Count()
	if c := b.phase.Load().circuit; c != nil {
		t.Succeeded += c.calm.sum()
	}
	return t
}

// lockedSums is sums for those who do not hold b.mu.
func (b *Breaker) lockedSums() Totals {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.sums()
}

// GroupStats is a snapshot of a [Group].
type GroupStats struct {
	// Totals are the sums over all breakers of the group: those that it holds, those
	// that it has evicted, as they were at that time, and the one that keys share.
	Totals
	Keys   int           // breakers that the group holds, without the one that keys share
	States map[State]int // how many of these are in each state
}

// Stats returns a snapshot.
func (g *Group[K]) Stats() GroupStats {
	s := GroupStats{States: make(map[State]int)}
	s.Totals = g.members.Shared().lockedSums()
	g.members.Shards(func(shard int, members iter.Seq[*Breaker]) {
		s.Totals.add(g.evicted[shard])
		for b := range members {
			s.Totals.add(b.lockedSums())
			s.States[b.peek()]++
			s.Keys++
		}
	})
	return s
}

// peek returns the state without a lock and without moving an open breaker on.
func (b *Breaker) peek() State {
	p := b.phase.Load()
	if p.state == Open && b.now() >= p.until {
		return HalfOpen
	}
	return p.state
}

// enter counts a change of state.
func (t *Totals) enter(to State) {
	switch to {
	case Open:
		t.Opened++
	case HalfOpen:
		t.HalfOpened++
	case Closed:
		t.Closed++
	case ForcedOpen:
		t.ForcedOpen++
	case Disabled:
		t.Disabled++
	}
}

// count counts a call by its verdict.
func (t *Totals) count(v verdict) {
	switch v.end {
	case succeeded:
		t.Succeeded++
	case failed:
		t.Failed++
	default:
		t.Ignored++
	}
	if v.slow {
		t.Slow++
	}
}

func (t *Totals) add(o Totals) {
	t.Succeeded += o.Succeeded
	t.Failed += o.Failed
	t.Ignored += o.Ignored
	t.Refused += o.Refused
	t.Slow += o.Slow
	t.Opened += o.Opened
	t.HalfOpened += o.HalfOpened
	t.Closed += o.Closed
	t.ForcedOpen += o.ForcedOpen
	t.Disabled += o.Disabled
	t.HookPanics += o.HookPanics
}
