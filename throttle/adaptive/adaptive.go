// Package adaptive is the client's side of throttling: it does not send calls that the
// server would probably turn away.
//
//	shed := adaptive.New(adaptive.Config{Name: "search"})
//	err := shed.Do(ctx, search)
//
// It sheds a call with the probability
//
//	max(0, (requests - K x accepts) / (requests + 1))
//
// where requests are the calls of the last Window, sent or shed, and accepts are the
// calls among them that the server accepted. A call in flight counts as accepted, so
// that a slow server is no reason to shed. It needs no limit and no agreement with the
// server, and sends enough calls to notice when the server has recovered.
//
// Source: Google's Site Reliability Engineering, "Handling Overload", on
// client-side throttling (https://sre.google/sre-book/handling-overload/).
package adaptive

import (
	"cmp"
	"context"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/internal/describe"
	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/invalid"
	"github.com/go-resilience/resilience/internal/notify"
	"github.com/go-resilience/resilience/internal/settings"
	"github.com/go-resilience/resilience/throttle"
	"github.com/go-resilience/resilience/throttle/internal/figures"
)

// Config says how a [Throttle] works.
type Config struct {
	// Name appears in errors, events and figures. Optional.
	Name string

	// K is how many calls are sent for each call that the server accepts: above 1, at
	// most 1e9. Zero means 2: an overloaded server has to turn away half of the calls
	// that it gets. A smaller K spares the server, a larger one notices sooner that the
	// server has recovered.
	K float64

	// Window is the time over which calls are counted, in steps of a 24th of it.
	// Zero means 2 minutes; the least is 24 ns. It cannot change.
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
}

// Validate returns an error that names each invalid field, or nil.
func (c Config) Validate() error {
	f := invalid.Fields{Type: "adaptive.Config"}
	f.Need(c.K == 0 || c.K > 1 && c.K <= 1e9, "K", c.K, "0 (for 2), or above 1 and at most 1e9")
	f.Need(c.Window == 0 || c.Window >= steps, "Window", c.Window, "0 (for 2 minutes), or at least 24ns")
	return f.Err()
}

func (c Config) withDefaults() Config {
	c.K = cmp.Or(c.K, 2)
	c.Window = cmp.Or(c.Window, 2*time.Minute)
	return c
}

// A Throttle sheds calls. It is safe for concurrent use. [New] makes one.
type Throttle struct {
	setting   settings.Setting[Config]
	observers notify.Observers[throttle.Event]
	rand      func() float64 // in [0, 1)
	began     time.Time

	mu     sync.Mutex
	window [steps]step
	at     int64 // the number of the present step
	sum    step  // of all steps
	stats  Stats
}

const steps = 24

// A step is a part of the window.
type step struct{ requests, accepts int64 }

// Stats is a snapshot of what a [Throttle] has done. Its counters never go back.
type Stats struct {
	Sent      int64 // calls
	Accepted  int64 // calls that have ended and that the server accepted
	Throttled int64 // calls that the server turned away or could not take
	Refused   int64 // calls that were shed

	Probability float64 // of shedding a call now
}

// New returns a Throttle without any calls in its window. It panics with the error of
// cfg.Validate, if there is one.
func New(cfg Config) *Throttle {
	a := &Throttle{rand: rand.Float64, began: time.Now()}
	a.setting.Init(cfg, Config.withDefaults)
	return a
}

// Do runs fn and returns its error. If it sheds the call, it returns a
// [*throttle.LimitedError] and does not run fn; its RetryAfter is 0, since it is not known
// when the server will have recovered. If ctx has already ended, Do returns why.
func (a *Throttle) Do(ctx context.Context, fn func(context.Context) error) error {
	if ctx.Err() != nil {
		return ended.Error(ctx)
	}
	cfg := a.setting.Load()
	a.mu.Lock()
	p, at := a.probability(), a.at
	shed := p > 0 && a.rand() < p
	a.add(at, 1, 0)
	if shed {
		a.stats.Refused++
		a.mu.Unlock()
		err := &throttle.LimitedError{Name: cfg.Name, Reason: throttle.Shed, Cost: 1}
		a.observers.Tell(ctx, throttle.Event{
			Kind: throttle.EventRefused, Name: cfg.Name, Cost: 1, Reason: throttle.Shed, Err: err,
		})
		return err
	}
	a.stats.Sent++
	a.add(at, 0, 1)
	a.mu.Unlock()

	counts, throttled := false, false // also if fn panics
	defer func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		a.probability() // which moves on to the present step
		switch {
		case !counts:
			a.add(at, -1, -1)
		case throttled:
			a.stats.Throttled++
			a.add(at, 0, -1)
		default:
			a.stats.Accepted++
		}
	}()
	err := fn(ctx)
	counts, throttled = cfg.read(ctx, err)
	return err
}

// read returns whether the end of a call says anything of the server, and whether that is that it
// turned the call away or could not take it.
func (c *Config) read(ctx context.Context, err error) (counts, throttled bool) {
	end := behavior.ReadUnder(ctx, err)
	switch {
	case end.Kind == behavior.Refused, end.Kind == behavior.Canceled:
		return false, false
	case err == nil:
		return true, false
	case c.Throttled != nil:
		return true, c.Throttled(err)
	}
	return true, end.Throttled || end.Kind == behavior.Overran ||
		end.Kind == behavior.Failed && (end.RetryAfter > 0 || behavior.IsTimeout(err))
}

// Wrap returns a function that runs next as [Throttle.Do] does.
func (a *Throttle) Wrap(next func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error { return a.Do(ctx, next) }
}

// add counts calls of a step, unless it has left the window. a.mu is held.
func (a *Throttle) add(at, requests, accepts int64) {
	if a.at-at >= steps {
		return
	}
	for _, s := range []*step{&a.window[at%steps], &a.sum} {
		s.requests += requests
		s.accepts += accepts
	}
}

// probability moves on to the present step, and returns the probability of shedding a call
// now. a.mu is held.
func (a *Throttle) probability() float64 {
	cfg := a.setting.Load()
	at := int64(time.Since(a.began) / (cfg.Window / steps))
	for a.at = max(a.at, at-steps); a.at < at; {
		a.at++
		old := &a.window[a.at%steps]
		a.sum.requests -= old.requests
		a.sum.accepts -= old.accepts
		*old = step{}
	}
	excess := float64(a.sum.requests) - cfg.K*float64(a.sum.accepts)
	return max(0, excess/float64(a.sum.requests+1))
}

// Stats returns a snapshot.
func (a *Throttle) Stats() Stats {
	a.mu.Lock()
	defer a.mu.Unlock()
	s := a.stats
	s.Probability = a.probability()
	return s
}

// Observe calls f with each event from now on, until stop is called, as
// [throttle.Limiter.Observe] does. The kind is EventRefused.
func (a *Throttle) Observe(f func(context.Context, throttle.Event)) (stop func()) {
	return a.observers.Observe(f)
}

// Name returns the Name of the Config.
func (a *Throttle) Name() string { return a.setting.Load().Name }

// Config returns the present Config, with its defaults filled in.
func (a *Throttle) Config() Config { return a.setting.Config() }

// Update changes the configuration, as [throttle.Limiter.Update] does. Name and Window cannot
// change.
func (a *Throttle) Update(change func(*Config)) error {
	return a.setting.Update(change, same, nil)
}

func same(was, next *Config) error {
	f := invalid.Fields{Type: "adaptive.Config"}
	f.Same("Name", was.Name, next.Name)
	f.Same("Window", was.Window, next.Window)
	return f.Err()
}

// Kind returns "throttle".
func (a *Throttle) Kind() string { return "throttle" }

// Settings returns a copy of the Config, with its defaults filled in and without Throttled.
func (a *Throttle) Settings() any {
	c := a.Config()
	c.Throttled = nil
	return c
}

// Change is [Throttle.Update] for who does not know the type: f gets a *Config. If f returns
// an error or dry is true, nothing changes.
func (a *Throttle) Change(dry bool, f func(cfg any) error) error {
	return a.setting.Change(dry, f, same, nil)
}

// ObserveAny is [Throttle.Observe] for who does not know the type of the events.
func (a *Throttle) ObserveAny(f func(context.Context, any)) (stop func()) {
	return a.Observe(func(ctx context.Context, e throttle.Event) { f(ctx, e) })
}

// Figures returns what [Throttle.Stats] counts.
func (a *Throttle) Figures() []describe.Figure {
	s := a.Stats()
	return append(figures.Calls(s.Sent, map[throttle.Reason]int64{throttle.Shed: s.Refused}, throttle.Shed),
		figures.Counter("answers{outcome=accepted}", s.Accepted), figures.Counter("answers{outcome=throttled}", s.Throttled),
		describe.Figure{Name: "throttle.shed_ratio", Value: s.Probability})
}
