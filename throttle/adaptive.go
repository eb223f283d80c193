package throttle

import (
	"cmp"
	"context"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/invalid"
	"github.com/go-resilience/resilience/internal/settings"
)

// AdaptiveConfig says how an [Adaptive] works.
type AdaptiveConfig struct {
	// Name appears in errors, events and figures. Optional.
	Name string

	// K is how many calls are sent for each call that the server accepts: above 1, at
	// most 1e9. Zero means 2: an overloaded server has to turn away half of the calls
	// that it gets. A smaller K spares the server, a larger one notices sooner that the
	// server has recovered.
	K float64

	// Window is the time over which calls are counted, in steps of a 24th of it.
	// Zero means 2 minutes; the least is 24 ns.
	Window time.Duration

	// Throttled reports whether a non-nil error means that the server turned the call away
	// or could not take it. Calls with any other error count as accepted. Nil means the
	// errors that say so themselves:
	//
	//   - their method Throttled() bool returns true, as for HTTP 429 and 503,
	//   - they are no answer and their method RetryAfter() time.Duration returns more
	//     than 0, as for HTTP 500 with Retry-After,
	//   - they are a timeout, that of the call's ctx included.
	//
	// Throttled is not called for a call that this module did not make (its error's
	// Refused() bool returns true) or whose ctx was canceled. Such a call counts
	// neither as accepted nor as throttled.
	Throttled func(error) bool

	// Levels is the number of priority levels, at most 1000. Zero means 1. More
	// need a Priority. The less important calls are shed first: a level is shed only
	// when it is not enough to shed all less important levels.
	Levels int

	// Priority returns the level of a call: 0 is the most important. A value outside
	// 0 ... Levels-1 is clamped. Priority needs Levels.
	Priority func(context.Context) int
}

// Validate returns an error that names each invalid field, or nil.
func (c AdaptiveConfig) Validate() error {
	f := invalid.Fields{Type: "throttle.AdaptiveConfig"}
	c.validate(&f)
	return f.Err()
}

func (c AdaptiveConfig) validate(f *invalid.Fields) {
	f.Need(c.K == 0 || c.K > 1 && c.K <= 1e9, "K", c.K, "0 (for 2), or above 1 and at most 1e9")
	f.Need(c.Window == 0 || c.Window >= steps, "Window", c.Window, "0 (for 2 minutes), or at least 24ns")
	checkLevels(f, c.Levels, c.Priority)
}

// withDefaults returns a valid c with its zero fields filled in.
func (c AdaptiveConfig) withDefaults() AdaptiveConfig {
	c.K = cmp.Or(c.K, 2)
	c.Window = cmp.Or(c.Window, 2*time.Minute)
	c.Levels = cmp.Or(c.Levels, 1)
	return c
}

// An Adaptive is the client's side of throttling: it does not send calls that the
// server would probably turn away. It sheds a call with the probability
//
//	max(0, (requests - K x accepts) / (requests + 1))
//
// where requests are the calls of the last Window, sent or shed, and accepts are the
// calls among them that the server accepted. A call in flight counts as accepted, so
// that a slow server is no reason to shed.
//
// An Adaptive needs no limit and no agreement with the server. It sends enough calls to
// notice when the server has recovered. It is safe for concurrent use. [NewAdaptive]
// makes one.
//
// Source: Google's Site Reliability Engineering, "Handling Overload", on
// client-side throttling (https://sre.google/sre-book/handling-overload/).
type Adaptive struct {
	setting   settings.Setting[AdaptiveConfig] // whose lock is taken before mu
	observers observers
	rand      func() float64 // in [0, 1)

	mu     sync.Mutex
	window [steps]step
	at     int64         // the number of the present step
	first  int64         // the number of the step that began at base
	oldest int64         // calls of earlier steps had left the window by then
	base   time.Time     // when Window was set
	length time.Duration // of a step
	sum    step          // of all steps
	stats  AdaptiveStats
}

const steps = 24

// A step is a part of the window.
type step struct {
	requests []int64 // by level
	accepts  int64
}

// NewAdaptive returns an Adaptive without any calls in its window. It panics with the
// error of cfg.Validate, if there is one.
func NewAdaptive(cfg AdaptiveConfig) *Adaptive {
	a := &Adaptive{rand: rand.Float64}
	a.setting.Init(cfg, AdaptiveConfig.withDefaults)
	a.sum.requests = make([]int64, a.setting.Load().Levels)
	for i := range a.window {
		a.window[i].requests = make([]int64, len(a.sum.requests))
	}
	a.use(a.setting.Load())
	return a
}

// use puts cfg, which has its defaults, into effect.
func (a *Adaptive) use(cfg *AdaptiveConfig) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if length := cfg.Window / steps; length != a.length {
		if a.length > 0 {
			a.advance()
			if a.at-a.first >= steps {
				a.oldest = a.at - steps + 1
			}
			// The present step takes over the calls of all others.
			for i := range a.window {
				a.window[i].accepts = 0
				clear(a.window[i].requests)
			}
			copy(a.window[a.at%steps].requests, a.sum.requests)
			a.window[a.at%steps].accepts = a.sum.accepts
		}
		a.first, a.base, a.length = a.at, time.Now(), length
	}
}

// Do runs fn and returns its error. If it sheds the call, it returns a [*LimitedError]
// and does not run fn; its RetryAfter is 0, since it is not known when the server will
// have recovered. If ctx has already ended, Do returns why.
func (a *Adaptive) Do(ctx context.Context, fn func(context.Context) error) error {
	if ctx.Err() != nil {
		return ended.Error(ctx)
	}
	cfg := a.setting.Load()
	level := 0
	if cfg.Priority != nil {
		level = min(max(cfg.Priority(ctx), 0), cfg.Levels-1)
	}
	sent, ok := a.send(level)
	if !ok {
		err := &LimitedError{Name: cfg.Name, Reason: Shed, Level: level, Cost: 1}
		report(ctx, &a.observers, err)
		return err
	}
	what := neither // also if fn panics
	defer func() { a.done(sent, level, what) }()
	err := fn(ctx)
	what = cfg.outcomeOf(ctx, err)
	return err
}

// outcomeOf returns what the error of a call says about the server.
func (c *AdaptiveConfig) outcomeOf(ctx context.Context, err error) outcome {
	end := behavior.ReadUnder(ctx, err)
	switch {
	case end.Kind == behavior.Refused, end.Kind == behavior.Canceled:
		return neither
	case err == nil:
		return accepted
	case c.Throttled != nil && !c.Throttled(err):
		return accepted
	case c.Throttled != nil, end.Throttled, end.FailedAfter > 0, end.Kind == behavior.Overran,
		end.Kind == behavior.Failed && behavior.IsTimeout(err):
		return throttled
	}
	return accepted
}

// Wrap returns a function that runs next as [Adaptive.Do] does.
func (a *Adaptive) Wrap(next func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error { return a.Do(ctx, next) }
}

// send counts a call and reports whether to send it. at is the step that counts it.
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

// probability returns the probability of shedding a call of a level. The excess of all
// calls is shed from the least important level first.
func (a *Adaptive) probability(level int) float64 {
	var requests, below int64
	for i, n := range a.sum.requests {
		requests += n
		if i > level {
			below += n
		}
	}
	excess := float64(requests) - a.setting.Load().K*float64(a.sum.accepts) - float64(below)
	return min(1, max(0, excess/float64(a.sum.requests[level]+1)))
}

// An outcome says what became of a call that was sent.
type outcome int

const (
	throttled outcome = iota
	accepted
	neither
)

// done corrects the counts of send by the outcome of the call.
func (a *Adaptive) done(sent int64, level int, what outcome) {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch what {
	case accepted:
		a.stats.Accepted++
		return
	case throttled:
		a.stats.Throttled++
	}
	if sent < a.oldest {
		return
	}
	sent = max(sent, a.first) // it may have taken over the step
	if a.at-sent >= steps {
		return // the step has left the window
	}
	then := &a.window[sent%steps]
	then.accepts--
	a.sum.accepts--
	if what == neither {
		then.requests[level]--
		a.sum.requests[level]--
	}
}

// advance moves on to the present step and empties the steps that leave the window.
func (a *Adaptive) advance() {
	at := a.first + int64(time.Since(a.base)/a.length)
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

// Name returns the Name of the AdaptiveConfig.
func (a *Adaptive) Name() string { return a.setting.Load().Name }

// Config returns the present AdaptiveConfig, with its defaults filled in.
func (a *Adaptive) Config() AdaptiveConfig { return a.setting.Config() }

// Update changes the configuration as [Limiter.Update] does.
//
//   - The calls of the window stay counted. If Window changes, all of them leave the
//     window together, one new Window later.
//   - Calls under way end under the configuration with which they began.
//   - Counters go on.
//   - Name and Levels cannot change.
//
// change must not use the Adaptive.
func (a *Adaptive) Update(change func(*AdaptiveConfig)) error {
	return a.setting.Update(change, (*AdaptiveConfig).fixed, a.use)
}

// Change is Update for a program that does not know the type of the configuration: f gets a
// pointer to it, as Update's change does. If f returns an error, or dry is true, nothing
// changes; dry returns the error that the change would have.
func (a *Adaptive) Change(dry bool, f func(cfg any) error) error {
	return a.setting.Change(dry, f, (*AdaptiveConfig).fixed, a.use)
}

// Stats returns a snapshot.
func (a *Adaptive) Stats() AdaptiveStats {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.advance()
	s := a.stats
	s.Probability = a.probability(len(a.sum.requests) - 1)
	return s
}

// Observe calls f with each event from now on, until stop is called, as
// [Limiter.Observe] does. The kind is EventRefused.
func (a *Adaptive) Observe(f func(context.Context, Event)) (stop func()) {
	return a.observers.Observe(f)
}

// fixed returns an error if Name or Levels have changed.
func (c *AdaptiveConfig) fixed(next *AdaptiveConfig) error {
	f := invalid.Fields{Type: "throttle.AdaptiveConfig"}
	f.Same("Name", c.Name, next.Name)
	f.Same("Levels", c.Levels, next.Levels)
	return f.Err()
}
