package breaker

import (
	"strings"
	"time"

	"github.com/go-resilience/resilience/internal/describe"
)

// Totals are counters since New. They never go back.
type Totals struct {
	// Calls by result, also if that changes nothing because the breaker has opened or closed
	// since. A call that breaks off after it has succeeded is in Succeeded and in Failed.
	Succeeded int64
	Failed    int64
	Ignored   int64
	Refused   int64

	// Changes of state, by the new state.
	Opened     int64
	HalfOpened int64
	Closed     int64
	ForcedOpen int64
	Disabled   int64
}

func (t *Totals) count(o Outcome) { *[...]*int64{&t.Failed, &t.Succeeded, &t.Ignored}[o]++ }

// changes returns the counter of changes to s.
func (t *Totals) changes(s State) *int64 {
	return map[State]*int64{
		Open: &t.Opened, HalfOpen: &t.HalfOpened, Closed: &t.Closed, ForcedOpen: &t.ForcedOpen, Disabled: &t.Disabled,
	}[s]
}

// Stats is a snapshot of a [Breaker].
type Stats struct {
	Totals
	State State
	Since time.Time // of the last change of State, or of New
	// Window counts the calls in the window. While calls do not pass it is that of the moment
	// when they last did, but for FailedInARow, which counts failed probes, too.
	Window      Counts
	FailureRate float64       // of the calls in the window; 0 if there are none
	OpensInARow int64         // openings without having been closed for a whole Window
	OpenLeft    time.Duration // time until it lets a probe through; 0 unless State is Open
	LastErr     error         // of the last failure, or the reason given to Trip or ForceOpen
}

// Stats returns a snapshot; a breaker whose open time has passed becomes half-open.
func (b *Breaker) Stats() (s Stats) {
	b.operate(func(now time.Duration) {
		s = Stats{
			Totals:      b.totals,
			State:       b.state,
			Since:       b.start.Add(b.since),
			Window:      b.counts(now),
			OpensInARow: int64(b.opens),
			LastErr:     b.lastErr,
		}
		s.FailureRate = share(s.Window.Failed, s.Window.Succeeded)
		if b.state == Open {
			s.OpenLeft = b.until - now
		}
	})
	return s
}

// Needed reports whether it has open time left, or is forced open or disabled. A
// resilience.Group does not evict it then.
func (b *Breaker) Needed() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	// Half-open without traffic may last forever.
	return b.forced() || b.state == Open && b.now() < b.until
}

func (b *Breaker) Kind() string { return "breaker" }

var states = []State{Closed, HalfOpen, Open, ForcedOpen, Disabled}

// Figures returns breaker.calls by outcome, breaker.transitions by the new state, breaker.state
// (1 for its state, 0 for the others), breaker.failure_ratio of the window, and
// breaker.open.left_seconds.
func (b *Breaker) Figures() []describe.Figure {
	s := b.Stats()
	var all []describe.Figure
	add := func(name string, counter bool, v float64) {
		all = append(all, describe.Figure{Name: name, Counter: counter, Value: v})
	}
	add("breaker.calls{outcome=success}", true, float64(s.Succeeded))
	add("breaker.calls{outcome=failure}", true, float64(s.Failed))
	add("breaker.calls{outcome=ignored}", true, float64(s.Ignored))
	add("breaker.calls{outcome=refused}", true, float64(s.Refused))
	for _, state := range states {
		label := "{state=" + strings.NewReplacer(" ", "_", "-", "_").Replace(string(state)) + "}"
		in := 0.0
		if state == s.State {
			in = 1
		}
		add("breaker.transitions"+label, true, float64(*s.changes(state)))
		add("breaker.state"+label, false, in)
	}
	add("breaker.failure_ratio", false, s.FailureRate)
	add("breaker.open.left_seconds", false, s.OpenLeft.Seconds())
	return all
}

// Health returns nil if the breaker is closed. Otherwise it returns an error that says its
// state and wraps the last error. The error has the methods HealthState() string and Failed()
// bool, which is true while calls are refused.
func (b *Breaker) Health() error {
	s := b.Stats()
	if s.State == Closed {
		return nil
	}
	return &healthError{s.State, s.LastErr}
}

type healthError struct {
	state State
	last  error
}

func (e *healthError) Error() string {
	if e.last == nil {
		return string(e.state)
	}
	return string(e.state) + ": " + e.last.Error()
}

func (e *healthError) Unwrap() error       { return e.last }
func (e *healthError) HealthState() string { return string(e.state) }
func (e *healthError) Failed() bool        { return e.state == Open || e.state == ForcedOpen }

// Settings returns Config without its function.
func (b *Breaker) Settings() any {
	cfg := b.Config()
	cfg.Classify = nil
	return cfg
}
