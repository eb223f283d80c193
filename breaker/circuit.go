package breaker

import (
	"runtime"
	"time"

	"github.com/sony/gobreaker/v2"
)

// A circuit is one gobreaker with the window that decides when it trips. Its
// fields are guarded by gobreaker's lock: they are used in gobreaker's callbacks
// only, which all run under it. No user code runs there.
//
// Interval is 0, so that a generation ends with a change of state and with nothing
// else: a result is not dropped because its call took longer than some interval.
type circuit struct {
	gb       *gobreaker.CircuitBreaker[error]
	b        *Breaker
	window   window
	measures bool // but never trips: the breaker is disabled
	halfOpen bool
	failed   int      // in a row
	lastErr  error    // of the last failure
	cause    *verdict // of the change that is about to come
}

// newCircuit returns a closed circuit.
func (b *Breaker) newCircuit() *circuit { return b.newCircuitFor(b.cfg.OpenFor) }

// newCircuitFor returns a closed circuit whose gobreaker stays open for a little
// less than least, the shortest time for which an open phase of it lasts. So it is
// ready for half-open when a phase ends; before, a call that found the breaker
// closed, and comes to gobreaker only now, is still refused.
func (b *Breaker) newCircuitFor(least time.Duration) *circuit {
	c := &circuit{b: b}
	if b.cfg.WindowCalls > 0 {
		c.window = newCallWindow(b.cfg.WindowCalls)
	} else {
		c.window = newTimeWindow(b.cfg.Window, b.start)
	}
	c.gb = gobreaker.NewCircuitBreaker[error](gobreaker.Settings{
		MaxRequests:   uint32(b.cfg.Successes),
		Timeout:       max(1, least-1),
		IsExcluded:    c.isExcluded,
		IsSuccessful:  c.isSuccessful,
		ReadyToTrip:   func(gobreaker.Counts) bool { return true }, // isSuccessful has decided
		OnStateChange: c.onStateChange,
	})
	return c
}

// newTripped returns an open circuit for a phase of d. It never was in use, so
// that nobody sees it open.
func (b *Breaker) newTripped(d time.Duration, err error) *circuit {
	c := b.newCircuitFor(min(d, b.cfg.OpenFor))
	c.gb.Execute(func() (error, error) {
		return nil, &verdict{err: err, failed: true, trips: true}
	})
	return c
}

// isExcluded is gobreaker's first question about a result of this generation.
func (c *circuit) isExcluded(err error) bool {
	switch v := err.(type) {
	case nil:
		return false
	case *peek:
		v.figures = c.figures()
		return true
	default:
		return err == errIgnored || err == errMoved
	}
}

// isSuccessful is its second. For gobreaker a call fails if the circuit is to open
// for it, which need not be a failure: it may be one slow call too many.
func (c *circuit) isSuccessful(err error) bool {
	if err == nil {
		if !c.halfOpen {
			c.failed = 0
			c.window.add(false, false)
		}
		return true
	}
	v, ok := err.(*verdict)
	if !ok { // gobreaker's word for a panic
		v = &verdict{err: err, failed: true}
	}
	if v.failed {
		c.failed++
		c.lastErr = v.err
	} else {
		c.failed = 0
	}
	if c.halfOpen { // a slow probe is a failed one
		c.cause = v
		return false
	}
	c.window.add(v.failed, v.slow)
	if c.measures || !v.trips && !c.overLimit() {
		return true
	}
	c.cause = v
	return false
}

func (c *circuit) overLimit() bool {
	cfg := &c.b.cfg
	if cfg.Failures > 0 && c.failed >= cfg.Failures {
		return true
	}
	n := c.window.counts()
	if n.Calls < int64(cfg.MinCalls) {
		return false
	}
	return cfg.FailureRate > 0 && n.failureRate() >= cfg.FailureRate ||
		cfg.SlowRate > 0 && n.slowRate() >= cfg.SlowRate
}

func (c *circuit) onStateChange(_ string, _, to gobreaker.State) {
	c.halfOpen = to == gobreaker.StateHalfOpen
	switch to {
	case gobreaker.StateOpen:
		c.b.opened(c, c.cause, c.figures())
		c.cause = nil
	case gobreaker.StateHalfOpen:
		c.b.halfOpened(c)
	case gobreaker.StateClosed:
		c.b.closedAgain(c)
	}
}

// report tells the circuit of a call that was not made inside gobreaker, unless
// the phase in which it began is over.
func (c *circuit) report(p *phase, verdict error) {
	for c.b.phase.Load() == p {
		_, err := c.gb.Execute(func() (error, error) {
			// gobreaker has noted the generation before this line: if the phase is
			// still p, the verdict counts for p or for nothing.
			if c.b.phase.Load() != p {
				return nil, errMoved
			}
			return nil, verdict
		})
		if err != gobreaker.ErrTooManyRequests {
			return
		}
		// A call that found the breaker closed, and comes to gobreaker only now,
		// holds a permit for a moment.
		runtime.Gosched()
	}
}

// figures are what a circuit knows of its calls.
type figures struct {
	Counts
	failed  int // in a row
	lastErr error
}

func (c *circuit) figures() figures {
	return figures{Counts: c.window.counts(), failed: c.failed, lastErr: c.lastErr}
}

// A peek is a verdict that asks for the figures, under gobreaker's lock.
type peek struct{ figures }

func (*peek) Error() string { return "breaker: peek" }

// look returns the figures, and whether the circuit was closed and could be asked.
func (c *circuit) look() (figures, bool) {
	var p peek
	_, err := c.gb.Execute(func() (error, error) { return nil, &p })
	return p.figures, err == error(&p)
}
