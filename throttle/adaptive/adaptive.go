// Package adaptive provides client-side throttling: it does not send calls that the server would probably reject.
//
//	shed := adaptive.New(adaptive.Config{Name: "search"})
//	err := shed.Do(ctx, search)
//
// A [Throttle] refuses (sheds) a call with the probability
//
//	max(0, (requests - K x accepts) / (requests + 1))
//
// In the formula, requests is the number of calls in the last Window, both sent and shed, and accepts is the number of
// those calls that the server accepted or that are still in flight. A Throttle needs no configured limit and no
// support by the server. While the server rejects calls, a Throttle still sends a few calls, and thus notices when the
// server has recovered.
//
// # Stability
//
// This package is unstable until version 1.0.0: a minor version may change it.
//
// See "Handling Overload" in Site Reliability Engineering
// (https://sre.google/sre-book/handling-overload/).
package adaptive

import (
	"cmp"
	"context"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/invalid"
	"github.com/go-resilience/resilience/internal/notify"
	"github.com/go-resilience/resilience/internal/settings"
	"github.com/go-resilience/resilience/policy"
	"github.com/go-resilience/resilience/throttle"
	"github.com/go-resilience/resilience/throttle/internal/events"
)

// Config configures a [Throttle].
type Config struct {
	// Name identifies the Throttle in errors, events and metrics. It is optional. Update cannot change Name.
	Name string

	// K is the number of calls that are sent for each call that the server accepts. K must be above 1 and at most 1e9.
	// Zero means 2. With a smaller K, the server gets fewer calls. With a larger K, a Throttle notices sooner that the
	// server has recovered.
	K float64

	// Window is the time for which a call is counted. Counted calls expire in groups, one group for each 24th of Window.
	// Zero means 2 minutes. The minimum is 24ns. Update cannot change Window.
	Window time.Duration

	// Throttled reports whether an error means that the server rejected or could not accept the call. The Throttle does
	// not count a call that an inner policy refused, or a call that the caller canceled. So Throttled is not called for
	// such calls. Nil means that an error counts as a rejection in two cases:
	//
	//   - The error has a method Throttled() bool that returns true, as for HTTP 429 and 503.
	//   - The error has no method Answered() bool that returns true, and it has a RetryAfter, is a timeout, or was
	//     returned after the deadline of the call's ctx.
	Throttled func(error) bool
}

// Validate returns an error that names each invalid field, or nil.
func (c Config) Validate() error {
	f := invalid.Fields{Type: "adaptive.Config"}
	f.Need(c.K == 0 || c.K > 1 && c.K <= 1e9, "K", c.K, "0 (for 2), or above 1 and at most 1e9")
	f.Need(c.Window == 0 || c.Window >= steps, "Window", c.Window, "0 (for 2 minutes), or at least 24ns")
	return f.Err()
}

// withDefaults returns c with its zero fields filled in. c must be valid.
func (c Config) withDefaults() Config {
	c.K = cmp.Or(c.K, 2)
	c.Window = cmp.Or(c.Window, 2*time.Minute)
	return c
}

// A Throttle sheds calls that the server would probably reject. A Throttle is safe for concurrent use.
type Throttle struct {
	setting   settings.Setting[Config]
	observers notify.Observers[throttle.Event]
	rand      func() float64 // returns a number in [0, 1)
	began     time.Time      // the time at which step 0 started

	mu     sync.Mutex
	window [steps]step
	at     int64 // the number of the current step
	sum    step  // the sum of all steps of the window
	stats  Stats
}

const steps = 24

// A step counts the calls in a 24th of the window.
type step struct{ requests, accepts int64 }

// add adds the counts of calls to s, multiplied by times.
func (s *step) add(calls step, times int64) {
	s.requests += times * calls.requests
	s.accepts += times * calls.accepts
}

// Stats are the metrics of a [Throttle]. Counters never decrease.
type Stats struct {
	Sent        int64   `counter:"calls{outcome=admitted,reason=}"`    // calls that were sent
	Refused     int64   `counter:"calls{outcome=refused,reason=shed}"` // calls that were shed
	Probability float64 `gauge:"shed_ratio"`                           // the probability that a call is shed now
}

// New returns a Throttle, which at first sheds no calls. New panics if cfg is invalid; see [Config.Validate].
func New(cfg Config) *Throttle {
	a := &Throttle{rand: rand.Float64, began: time.Now()}
	a.setting.Init(cfg, Config.withDefaults)
	return a
}

// Do calls fn and returns the error of fn. If the call is shed, Do does not call fn and returns a
// [*throttle.LimitedError] without a RetryAfter. If ctx is already done, Do returns an error that matches the error and
// the cause of ctx.
func (a *Throttle) Do(ctx context.Context, fn func(context.Context) error) error {
	if ctx.Err() != nil {
		return ended.Error(ctx)
	}
	cfg := a.setting.Load()
	a.mu.Lock()
	p, at := a.probability(), a.at
	if p > 0 && a.rand() < p {
		a.add(at, step{requests: 1})
		a.stats.Refused++
		a.mu.Unlock()
		err := &throttle.LimitedError{Name: cfg.Name, Reason: throttle.Shed, Cost: 1}
		a.observers.Tell(ctx, throttle.Event{
			Kind: throttle.EventRefused, Name: cfg.Name, Cost: 1, Reason: throttle.Shed, Err: err,
		})
		return err
	}
	a.add(at, step{1, 1}) // a call in flight counts as accepted; otherwise, a slow server would cause calls to be shed
	a.stats.Sent++
	a.mu.Unlock()

	correction := uncounted // applies even if fn panics
	defer func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		a.probability() // advances the window to the current step
		a.add(at, correction)
	}()
	err := fn(ctx)
	correction = cfg.correctionOf(ctx, err)
	return err
}

// One of these corrections is added to a call's step when the call ends. Until then, the call is counted as accepted.
var accepted, throttled, uncounted = step{}, step{accepts: -1}, step{-1, -1}

// correctionOf returns the correction for the step of a call that returned err.
func (c *Config) correctionOf(ctx context.Context, err error) step {
	end := behavior.ReadUnder(ctx, err)
	rejected := err != nil && (end.Throttled || end.Kind == behavior.Overran ||
		end.Kind == behavior.Failed && (end.RetryAfter > 0 || behavior.IsTimeout(err)))
	switch {
	case end.Kind == behavior.Refused, end.Kind == behavior.Canceled:
		return uncounted
	case err != nil && c.Throttled != nil:
		rejected = c.Throttled(err)
	}
	if rejected {
		return throttled
	}
	return accepted
}

// Wrap returns a function that calls [Throttle.Do](ctx, next).
func (a *Throttle) Wrap(next func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error { return a.Do(ctx, next) }
}

// add adds the counts of calls to the step with the number at, unless that step is no longer in the window. The
// caller holds a.mu.
func (a *Throttle) add(at int64, calls step) {
	if a.at-at < steps {
		a.window[at%steps].add(calls, 1)
		a.sum.add(calls, 1)
	}
}

// probability advances the window to the current step, and returns the probability that a call is shed now. The
// caller holds a.mu.
func (a *Throttle) probability() float64 {
	cfg := a.setting.Load()
	at := int64(time.Since(a.began) / (cfg.Window / steps))
	for a.at = max(a.at, at-steps); a.at < at; {
		a.at++
		a.sum.add(a.window[a.at%steps], -1)
		a.window[a.at%steps] = step{}
	}
	excess := float64(a.sum.requests) - cfg.K*float64(a.sum.accepts)
	return max(0, excess/float64(a.sum.requests+1))
}

// Stats returns the metrics of a.
func (a *Throttle) Stats() Stats {
	a.mu.Lock()
	defer a.mu.Unlock()
	s := a.stats
	s.Probability = a.probability()
	return s
}

// Observe calls f with each event until stop is called. f runs on the goroutine of the call. The only kind of event
// is EventRefused.
func (a *Throttle) Observe(f func(context.Context, throttle.Event)) (stop func()) {
	return a.observers.Observe(f)
}

// Config returns the configuration with defaults filled in.
func (a *Throttle) Config() Config { return a.setting.Config() }

// Update is like [throttle.Limiter.Update]. Name and Window cannot change.
func (a *Throttle) Update(change func(*Config)) error {
	return a.setting.Update(change, same, nil)
}

// same returns an error if an update changes a field that cannot change.
func same(was, next *Config) error {
	f := invalid.Fields{Type: "adaptive.Config"}
	f.Same("Name", was.Name, next.Name)
	f.Same("Window", was.Window, next.Window)
	return f.Err()
}

var _ policy.Describer = (*Throttle)(nil)

// Describe implements [policy.Describer].
func (a *Throttle) Describe() policy.Description {
	return policy.Description{
		Kind:    "throttle",
		Name:    a.setting.Load().Name,
		Metrics: func() []policy.Metric { return policy.Metrics("throttle", a.Stats()) },
		Config:  func() any { return a.Config() },
		Update: func(dryRun bool, change func(cfg any) error) error {
			return a.setting.Change(dryRun, change, same, nil)
		},
		Observe: policy.Events(a.Observe, describe),
	}
}

// describe converts e to an event of package policy.
func describe(e throttle.Event) policy.Event {
	return events.Describe(e.Name, e.Key, string(e.Kind), string(e.Reason), e.Waited, e.Err)
}
