package breaker

import (
	"errors"
	"math"
	"math/rand/v2"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/sony/gobreaker/v2"
)

// A circuit is a gobreaker and what it goes by, from one opening of the breaker to the next:
// open, half-open and then closed. One that New or an operator has made is closed, or
// Disabled, from the beginning.
//
// Breaker.mu guards the fields. Only succeed is called without it.
type circuit struct {
	gb      *gobreaker.TwoStepCircuitBreaker[struct{}]
	cfg     *Config
	row     int   // failures since the last success
	lastErr error // of the last failure, or what has opened the circuit

	// These are of the calls since the circuit has closed.
	window window // nil before
	calm   striped
	moved  int64        // how many of calm the window has
	until  atomic.Int64 // successes are only counted before this instant; 0 during a row
}

const forever = time.Duration(math.MaxInt64)

var (
	errIgnored = errors.New("breaker: ignored") // the call says nothing
	errSlow    = errors.New("breaker: too many slow calls")
)

// newCircuit returns a circuit that has not closed. Its gobreaker opens at the first failure.
func newCircuit(cfg *Config, openFor time.Duration) *circuit {
	c := &circuit{cfg: cfg}
	c.gb = gobreaker.NewTwoStepCircuitBreaker[struct{}](gobreaker.Settings{
		Name:        cfg.Name,
		MaxRequests: uint32(cfg.Successes),
		Timeout:     max(1, openFor-1), // gobreaker is open until after it, a breaker until it
		ReadyToTrip: func(gobreaker.Counts) bool { return c.window == nil || c.overLimit() },
		IsExcluded:  func(err error) bool { return err == errIgnored },
	})
	return c
}

// close has the circuit count calls, and returns it.
func (c *circuit) close(now time.Duration) *circuit {
	c.row, c.window, c.calm = 0, newWindow(c.cfg), make(striped, min(runtime.GOMAXPROCS(0), 8))
	c.sync(now)
	return c
}

// tell tells gobreaker, which is closed, of a result, and reports whether it is still closed.
func (c *circuit) tell(err error) bool {
	done, _ := c.gb.Allow() // a closed one does
	done(err)
	return c.gb.State() == gobreaker.StateClosed
}

// succeed counts a fast success that changes nothing else: no row of failures is open, and the
// window does not move. It reports false if that is not so, or the circuit is over. It reads
// the clock, unless at says what time it is, if the window goes by time.
func (c *circuit) succeed(b *Breaker, at time.Duration) bool {
	until := time.Duration(c.until.Load())
	if until != forever && at == 0 {
		at = b.now()
	}
	return at < until && c.calm.add()
}

// count counts a success or a failure that ended now.
func (c *circuit) count(v verdict, now time.Duration) {
	switch {
	case v.end == failed:
		c.row++
		c.lastErr = v.err
	case !v.goesOn:
		c.row = 0
	}
	c.sync(now)
	c.window.add(v.end == failed, v.slow)
}

// sync moves the window on to now, with the successes that succeed has counted.
func (c *circuit) sync(now time.Duration) {
	n := c.calm.sum()
	c.window.succeeded(n - c.moved)
	c.moved = n
	until := c.window.slide(now)
	if c.row > 0 {
		until = 0
	}
	c.until.Store(int64(until))
}

// overLimit reports whether the counts are at a limit.
func (c *circuit) overLimit() bool {
	r, n := c.cfg, c.window.counts()
	return r.Failures > 0 && c.row >= r.Failures ||
		r.FailuresInWindow > 0 && n.Failed >= int64(r.FailuresInWindow) ||
		n.Calls >= int64(r.MinCalls) &&
			(r.FailureRate > 0 && n.failureRate() >= r.FailureRate || r.SlowRate > 0 && n.slowRate() >= r.SlowRate)
}

// follow puts cfg into effect, but for Successes, which gobreaker has. It keeps the window
// if its shape is the same.
func (c *circuit) follow(cfg *Config, now time.Duration) {
	was := c.cfg
	c.cfg = cfg
	if cfg.Window != was.Window || cfg.WindowCalls != was.WindowCalls {
		c.window, c.moved = newWindow(cfg), c.calm.sum()
		c.sync(now)
	}
}

// figures are what a circuit knows of its calls.
type figures struct {
	Counts
	lastErr error
}

func (c *circuit) figures(now time.Duration) figures {
	c.sync(now)
	f := figures{c.window.counts(), c.lastErr}
	f.FailedInARow = int64(c.row)
	return f
}

// A striped counter spreads additions over a few cache lines. It is never set back.
type striped []struct {
	n atomic.Uint64
	_ [56]byte // the rest of a cache line
}

const sealed = 1 << 63

// add adds one. It reports false if the counter was sealed: the one is lost.
func (s striped) add() bool { return s[rand.IntN(len(s))].n.Add(1) < sealed }

func (s striped) sum() (n int64) {
	for i := range s {
		n += int64(s[i].n.Load())
	}
	return n
}

// seal ends the counter and returns its last sum.
func (s striped) seal() (n int64) {
	for i := range s {
		n += int64(s[i].n.Or(sealed))
	}
	return n
}
