package breaker

import (
	"sync/atomic"
	"time"

	"github.com/sony/gobreaker/v2"
)

// A circuit is the gobreaker of one period in which calls or probes pass: from a change of
// state, or a Reset, to the next. Each period has its own, so a result can only reach the
// period in which its call began. The period ends when gobreaker opens. Phases of one
// period, which differ only in their rules, share its circuit.
//
// gobreaker's half-open state is not used: its Timeout is the same each time, and a call
// that never returns would keep it half-open forever. The breaker has its own open times
// and permits. See docs/decisions/gobreaker.md.
//
// gobreaker's lock guards the fields: only its callbacks use them, and all callbacks run
// under it. The callbacks run no user code and take no other lock.
type circuit struct {
	gb      *gobreaker.CircuitBreaker[struct{}]
	rules   *rules // of the present phase
	state   State  // of its period
	start   time.Time
	window  window // nil while half-open
	row     int    // failures since the last success
	passed  int    // successes
	lastErr error  // of the last failure
	cause   *verdict
	tripped atomic.Pointer[tripping]
}

// A tripping is why gobreaker has opened, with the figures of that moment.
type tripping struct {
	*verdict
	figures
}

// newCircuit returns the circuit of a phase that is Closed, HalfOpen or Disabled.
func (b *Breaker) newCircuit(state State, r *rules) *circuit {
	c := &circuit{rules: r, state: state, start: b.start}
	if state != HalfOpen {
		c.window = newWindow(r.Config, b.start)
	}
	c.gb = gobreaker.NewCircuitBreaker[struct{}](gobreaker.Settings{
		Interval:      0, // with an interval, gobreaker drops the results of longer calls
		Timeout:       longest,
		IsExcluded:    c.isExcluded,
		IsSuccessful:  c.isSuccessful,
		ReadyToTrip:   func(gobreaker.Counts) bool { return true }, // isSuccessful has decided
		OnStateChange: c.onStateChange,
	})
	return c
}

// A verdict is what a circuit is told of a call, in place of its error. The verdict on a
// fast success, the most frequent one, is nil.
type verdict struct {
	err     error // of the call; nil for a success
	failed  bool
	slow    bool
	trips   bool          // opens the circuit whatever the counts are
	openFor time.Duration // of a verdict that trips: for exactly that long, unless 0
	undoes  *verdict      // the earlier success of a call that has broken off

	// The circuit sets these when it counts the verdict.
	counted bool
	ended   int // of a success: the failures in a row that it ended
	nth     int // of a success: its number
}

// ignored is the verdict on a call that is not counted.
var ignored = &verdict{}

func succeeded(slow bool) *verdict {
	if slow {
		return &verdict{slow: true}
	}
	return nil
}

func (v *verdict) Error() string { return "breaker: verdict" }

// report counts the verdict on a call. It does nothing if gobreaker has opened.
func (c *circuit) report(v *verdict) {
	var err error
	if v != nil {
		err = v
	}
	c.send(err)
}

// isExcluded implements gobreaker.Settings.IsExcluded.
func (c *circuit) isExcluded(err error) bool {
	switch v := err.(type) {
	case nil:
		return false
	case *peek:
		v.figures, v.seen = c.figures(), true
		return true
	case *reform:
		c.follow(v.rules)
		return true
	default:
		return err == error(ignored)
	}
}

// isSuccessful implements gobreaker.Settings.IsSuccessful. It counts the verdict and
// returns false if the circuit opens for it. A failure need not open it, and a slow
// success may.
func (c *circuit) isSuccessful(err error) bool {
	if err == nil {
		c.row = 0
		c.passed++
		if c.window != nil {
			c.window.add(false, false)
		}
		return true
	}
	v := err.(*verdict)
	if !v.counted {
		c.count(v)
	}
	if !c.opensFor(v) {
		return true
	}
	c.cause = v
	return false
}

func (c *circuit) count(v *verdict) {
	v.counted = true
	if v.failed {
		if u := v.undoes; u != nil && u.nth == c.passed {
			c.row += u.ended // no other success has ended that row
		}
		c.row++
		c.lastErr = v.err
	} else {
		c.passed++
		v.nth, v.ended = c.passed, c.row
		c.row = 0
	}
	if c.window != nil {
		c.window.add(v.failed, v.slow)
	}
}

// opensFor reports whether the circuit opens for v, which has been counted.
func (c *circuit) opensFor(v *verdict) bool {
	r := c.rules
	switch {
	case c.state == Disabled || !v.failed && !v.slow:
		return false
	case c.state == HalfOpen:
		return v.failed || r.SlowRate > 0
	case v.trips || r.Failures > 0 && c.row >= r.Failures:
		return true
	}
	n := c.window.counts()
	if r.FailuresInWindow > 0 && n.Failed >= int64(r.FailuresInWindow) {
		return true
	}
	return n.Calls >= int64(r.MinCalls) &&
		(r.FailureRate > 0 && n.failureRate() >= r.FailureRate ||
			r.SlowRate > 0 && n.slowRate() >= r.SlowRate)
}

// onStateChange implements gobreaker.Settings.OnStateChange. The only change is from
// closed to open.
func (c *circuit) onStateChange(string, gobreaker.State, gobreaker.State) {
	c.tripped.Store(&tripping{c.cause, c.figures()})
}

// successes returns how many probes have succeeded.
func (c *circuit) successes() int { return int(c.gb.Counts().ConsecutiveSuccesses) }

// figures are what a circuit knows of its calls.
type figures struct {
	Counts
	lastErr error
}

func (c *circuit) figures() figures {
	f := figures{lastErr: c.lastErr}
	if c.window != nil {
		f.Counts = c.window.counts()
	}
	f.FailedInARow = int64(c.row)
	return f
}

// A peek is reported to a circuit to read its figures under gobreaker's lock.
type peek struct {
	figures
	seen bool
}

func (*peek) Error() string { return "breaker: peek" }

// look returns the figures. It reports false if gobreaker has opened.
func (c *circuit) look() (figures, bool) {
	var p peek
	c.send(&p)
	return p.figures, p.seen
}

// A reform is reported to a circuit to change its rules under gobreaker's lock.
type reform struct{ rules *rules }

func (*reform) Error() string { return "breaker: reform" }

// reform makes the circuit follow r, unless gobreaker has opened.
func (c *circuit) reform(r *rules) { c.send(&reform{r}) }

// follow keeps the window if its shape is the same.
func (c *circuit) follow(r *rules) {
	if c.window != nil && (r.Window != c.rules.Window || r.WindowCalls != c.rules.WindowCalls) {
		c.window = newWindow(r.Config, c.start)
	}
	c.rules = r
}

// send has gobreaker hand err to the callbacks, unless it has opened.
func (c *circuit) send(err error) {
	_, _ = c.gb.Execute(func() (struct{}, error) { return struct{}{}, err })
}
