package breaker

import (
	"context"
	"strings"
	"time"

	"github.com/go-resilience/resilience/internal/describe"
	"github.com/go-resilience/resilience/internal/notify"
)

type EventKind string

const (
	EventChanged EventKind = "changed" // the state has changed
	EventRefused EventKind = "refused" // a call was refused
)

// An Event is a change of state or a refused call.
type Event struct {
	Kind EventKind
	Name string // of the breaker
	At   time.Time
	// Err is what opened the breaker, as in [OpenError], or the [*OpenError] of a refusal.
	Err error

	From, To State         // of EventChanged
	OpenFor  time.Duration // if To is Open: how long from At on
}

// Level is 4, slog's Warn, for a refusal and an opening, and -4, Debug, otherwise.
func (e Event) Level() int {
	if e.Kind == EventRefused || e.To == Open || e.To == ForcedOpen {
		return 4
	}
	return -4
}

// Fields calls yield with each detail.
func (e Event) Fields(yield func(name string, value any)) {
	yield("event", string(e.Kind))
	yield("name", e.Name)
	if e.Kind == EventRefused {
		if refusal, ok := e.Err.(*OpenError); ok {
			yield("reason", "circuit "+string(refusal.State))
		}
	} else {
		yield("from", string(e.From))
		yield("to", string(e.To))
	}
	if e.OpenFor > 0 {
		yield("for", e.OpenFor)
	}
	if e.Err != nil {
		yield("err", e.Err)
	}
}

// Observe calls f with each event until stop is called: on the goroutine that uses the breaker, and
// without a lock. A panic in f passes on to the caller. Changes of state are told one at a time and
// in order. ctx is that of the call that caused the change, or of another at the same time, without
// its end, or context.Background.
func (b *Breaker) Observe(f func(context.Context, Event)) (stop func()) {
	b.observing.CompareAndSwap(nil, new(audience))
	return b.observing.Load().Observe(f)
}

// ObserveAny is Observe for whoever does not know Event.
func (b *Breaker) ObserveAny(f func(context.Context, any)) (stop func()) {
	return b.Observe(func(ctx context.Context, e Event) { f(ctx, e) })
}

type audience struct {
	notify.Observers[Event]
	changes notify.Queue // of Events that wait to be told
}

// deliver tells of the changes that wait, in order. If another goroutine is telling, or an
// observer further up the stack, that one goes on with these.
func (b *Breaker) deliver(ctx context.Context) {
	if a := b.observing.Load(); a != nil {
		a.changes.Deliver(ctx, func(ctx context.Context, e any) { a.TellAny(context.WithoutCancel(ctx), e) })
	}
}

// Totals are counters since New.
type Totals struct {
	// Calls by result, also if that has changed nothing. A call that breaks off after it has
	// succeeded is in Succeeded and in Failed.
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

// Stats is a snapshot of a [Breaker].
type Stats struct {
	Totals
	State State
	Since time.Time // of the last change of State, or of New
	// Window is that of the moment when calls last passed, but for FailedInARow, which counts
	// failed probes, too.
	Window      Counts
	FailureRate float64       // of the calls in the window; 0 if there are none
	OpensInARow int64         // without having been closed for a whole Window
	OpenLeft    time.Duration // 0 unless State is Open
	LastErr     error         // of the last failure, or the reason of an operator
}

func (b *Breaker) Stats() (s Stats) {
	b.operate(context.Background(), func(now time.Duration) {
		s = Stats{
			Totals: Totals{
				b.calls[Success], b.calls[Failure], b.calls[Ignore], b.calls[refused],
				b.changes[Open], b.changes[HalfOpen], b.changes[Closed], b.changes[ForcedOpen], b.changes[Disabled],
			},
			State:       b.state,
			Since:       b.start.Add(b.since),
			Window:      b.counts(now),
			OpensInARow: int64(b.opens),
			LastErr:     b.lastErr,
		}
		s.FailureRate = share(s.Window.Failed, s.Window.Succeeded)
		if b.state == Open {
			s.OpenLeft = b.openLeft(now)
		}
	})
	return s
}

// Needed reports whether a resilience.Group keeps it: while it has open time left, or is forced
// open or disabled.
func (b *Breaker) Needed() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	// Half-open without traffic may last forever.
	return b.forced() || b.state == Open && b.openLeft(b.now()) > 0
}

func (b *Breaker) Kind() string { return "breaker" }

// Figures returns breaker.calls by outcome, breaker.transitions by the new state, breaker.state
// (1 for its state, 0 for the others), and breaker.failure_ratio of the window.
func (b *Breaker) Figures() []describe.Figure {
	s := b.Stats()
	all := []describe.Figure{
		{Name: "breaker.calls{outcome=success}", Counter: true, Value: float64(s.Succeeded)},
		{Name: "breaker.calls{outcome=failure}", Counter: true, Value: float64(s.Failed)},
		{Name: "breaker.calls{outcome=ignored}", Counter: true, Value: float64(s.Ignored)},
		{Name: "breaker.calls{outcome=refused}", Counter: true, Value: float64(s.Refused)},
		{Name: "breaker.failure_ratio", Value: s.FailureRate},
	}
	changes := [...]int64{s.Closed, s.HalfOpened, s.Opened, s.ForcedOpen, s.Disabled}
	for i, state := range [...]State{Closed, HalfOpen, Open, ForcedOpen, Disabled} {
		label := "{state=" + strings.NewReplacer(" ", "_", "-", "_").Replace(string(state)) + "}"
		in := describe.Figure{Name: "breaker.state" + label}
		if state == s.State {
			in.Value = 1
		}
		all = append(all, in,
			describe.Figure{Name: "breaker.transitions" + label, Counter: true, Value: float64(changes[i])})
	}
	return all
}

// Health returns nil if the breaker is closed, else an error that says its state and wraps the last
// error. It has the methods HealthState() string and Failed() bool: whether calls are refused.
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
