package throttle

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/invalid"
)

// AdaptiveConfig says how an [Adaptive] works.
type AdaptiveConfig struct {
	// Name appears in errors. Optional.
	Name string

	// K is how many calls are sent for each one that the server accepts: above 1.
	// Zero means 2: half of what is sent to a server over its capacity is refused
	// there. Less spares the server, more notices sooner when it has recovered.
	K float64

	// Window is the time over which calls are counted, in steps of a 24th of it.
	// Zero means 2 minutes; the least is 24 ns.
	Window time.Duration

	// Refused reports whether an error, which is not nil, means that the server
	// refused the call or was not able to take it. Nil means an error that says so:
	// its method Throttled() bool returns true, as for HTTP 429, or it is no answer
	// and its RetryAfter() time.Duration is above 0, as for HTTP 503, or it is a
	// time-out, that of the call's ctx included. With any other error the server
	// has taken the call. Refused is not asked about calls that this module did not
	// make (Refused() bool is true) or whose ctx was canceled: these count neither
	// way.
	Refused func(error) bool

	// Levels is the number of priority levels, at most 1000. Zero means 1. More
	// need a Priority. The less important are kept back first: a level only when
	// those below are not enough.
	Levels int

	// Priority returns the level of a call: 0 is the most important. What it
	// returns is clamped to 0 ... Levels-1. It needs Levels.
	Priority func(context.Context) int

	// OnReject, if not nil, is called for each call that is not sent, with its
	// ctx.
	OnReject func(context.Context, *LimitedError)
}

// Validate returns an error that says which fields cannot mean anything, or nil.
func (c AdaptiveConfig) Validate() error {
	f := invalid.Fields{Type: "throttle.AdaptiveConfig"}
	f.Need(c.K == 0 || c.K > 1 && c.K <= 1e9, "K", c.K, "0 (for 2), or above 1 and at most 1e9")
	f.Need(c.Window == 0 || c.Window >= steps, "Window", c.Window, "0 (for 2 minutes), or at least 24ns")
	checkLevels(&f, c.Levels, c.Priority, nil)
	return f.Err()
}

// An Adaptive is the client's side of throttling: it does not send what the
// server would most probably refuse. It keeps back a call with the probability
//
//	max(0, (requests - K x accepts) / (requests + 1))
//
// where requests are the calls that were wanted in the last Window, sent or not,
// and accepts those of them that the server accepted. A call counts from the
// moment it is sent, and as accepted until it turns out not to be: calls in
// flight are no reason to keep others back.
//
// It needs no limit and no word with the server, and lets through enough to notice
// when that has recovered. It is safe for concurrent use, and built by
// [NewAdaptive].
//
// Source: Google's Site Reliability Engineering, "Handling Overload", on
// client-side throttling (https://sre.google/sre-book/handling-overload/).
type Adaptive struct {
	cfg  AdaptiveConfig
	base time.Time
	rand func() float64 // in [0, 1)

	mu     sync.Mutex
	window [steps]step
	at     int64 // the number of the present step, since base
	sum    step  // of the window
	stats  AdaptiveStats
}

const steps = 24

// A step is part of the window.
type step struct {
	requests []int64 // by level
	accepts  int64
}

// NewAdaptive returns an Adaptive that keeps nothing back yet. It panics with the
// error of cfg.Validate, if there is one.
func NewAdaptive(cfg AdaptiveConfig) *Adaptive {
	if err := cfg.Validate(); err != nil {
		panic(err)
	}
	cfg.K = orElse(cfg.K, 2)
	cfg.Window = orElse(cfg.Window, 2*time.Minute)
	cfg.Levels = orElse(cfg.Levels, 1)
	a := &Adaptive{cfg: cfg, base: time.Now(), rand: rand.Float64}
	a.sum.requests = make([]int64, cfg.Levels)
	for i := range a.window {
		a.window[i].requests = make([]int64, cfg.Levels)
	}
	return a
}

// Do runs fn and returns its error, or keeps it back and returns a
// [*LimitedError], whose RetryAfter is 0: nobody knows. If ctx has already ended,
// it returns why.
func (a *Adaptive) Do(ctx context.Context, fn func(context.Context) error) error {
	if ctx.Err() != nil {
		return ended.Error(ctx)
	}
	level := 0
	if a.cfg.Priority != nil {
		level = min(max(a.cfg.Priority(ctx), 0), a.cfg.Levels-1)
	}
	sent, ok := a.send(level)
	if !ok {
		err := &LimitedError{Name: a.cfg.Name, Reason: Shed, Level: level, Cost: 1}
		if a.cfg.OnReject != nil {
			a.cfg.OnReject(ctx, err)
		}
		return err
	}
	what := neither // unless fn returns: a panic says nothing about the server
	defer func() { a.done(sent, level, what) }()
	err := fn(ctx)
	what = a.outcomeOf(ctx, err)
	return err
}

// outcomeOf returns what the end of a call says about the server.
func (a *Adaptive) outcomeOf(ctx context.Context, err error) outcome {
	end := behavior.ReadUnder(ctx, err)
	switch {
	case end.Kind == behavior.Refused, end.Kind == behavior.Canceled:
		return neither
	case err == nil:
		return accepted
	case a.cfg.Refused != nil && !a.cfg.Refused(err):
		return accepted
	case a.cfg.Refused != nil, end.Throttled, end.FailedAfter > 0, end.Kind == behavior.Overran,
		end.Kind == behavior.Failed && behavior.IsTimeout(err):
		return refused
	}
	return accepted
}

// Wrap returns a function that does next as [Adaptive.Do] does it.
func (a *Adaptive) Wrap(next func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error { return a.Do(ctx, next) }
}

// AdaptiveStats is a snapshot of what an [Adaptive] has done.
type AdaptiveStats struct {
	Sent     int64 // calls
	Accepted int64 // calls, by the server; those in flight are not among them
	Refused  int64 // calls that were kept back

	Probability float64 // with which a call of the least important level is kept back now
}

// Stats returns what the Adaptive has done so far.
func (a *Adaptive) Stats() AdaptiveStats {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.advance()
	s := a.stats
	s.Probability = a.probability(a.cfg.Levels - 1)
	return s
}

// send counts a call and reports whether to send it, and in which step it is.
func (a *Adaptive) send(level int) (at int64, ok bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.advance()
	p := a.probability(level)
	now := &a.window[a.at%steps]
	now.requests[level]++
	a.sum.requests[level]++
	if p > 0 && a.rand() < p {
		a.stats.Refused++
		return 0, false
	}
	a.stats.Sent++
	now.accepts++
	a.sum.accepts++
	return a.at, true
}

// probability is that of keeping back a call of a level. What is to be kept back
// of all calls is taken from the least important level first.
func (a *Adaptive) probability(level int) float64 {
	var requests, below int64
	for i, n := range a.sum.requests {
		requests += n
		if i > level {
			below += n
		}
	}
	excess := float64(requests) - a.cfg.K*float64(a.sum.accepts) - float64(below)
	return min(1, max(0, excess/float64(a.sum.requests[level]+1)))
}

// outcome is what became of a call that was sent.
type outcome int

const (
	refused outcome = iota
	accepted
	neither
)

// done takes back what send counted for a call too much.
func (a *Adaptive) done(sent int64, level int, what outcome) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if what == accepted {
		a.stats.Accepted++
		return
	}
	a.advance()
	if a.at-sent >= steps {
		return // it is no longer in the window
	}
	then := &a.window[sent%steps]
	then.accepts--
	a.sum.accepts--
	if what == neither {
		then.requests[level]--
		a.sum.requests[level]--
	}
}

// advance empties the steps that have left the window.
func (a *Adaptive) advance() {
	at := int64(time.Since(a.base) / (a.cfg.Window / steps))
	if at-a.at > steps {
		a.at = at - steps
	}
	for a.at < at {
		a.at++
		old := &a.window[a.at%steps]
		a.sum.accepts -= old.accepts
		old.accepts = 0
		for level, n := range old.requests {
			a.sum.requests[level] -= n
			old.requests[level] = 0
		}
	}
}
