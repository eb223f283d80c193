package breaker

import (
	"cmp"
	"context"
	"math"
	"time"

	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/internal/invalid"
)

// Config says when a [Breaker] opens, by the first of Failures, FailuresInWindow and FailureRate
// that is met, and for how long.
type Config struct {
	// Name appears in errors, events and figures. It cannot change.
	Name string
	// Failures in a row open it. Zero means 5 if FailuresInWindow and FailureRate are unset, else
	// no such limit.
	Failures int
	// FailuresInWindow open it. Zero means no such limit.
	FailuresInWindow int
	// FailureRate, in (0, 1], of the calls in the window opens it. Zero means no such limit.
	FailureRate float64
	// MinCalls must be in the window before FailureRate counts. Zero means 20, or WindowCalls if
	// that is less.
	MinCalls int
	// Window, at least a millisecond, is how long a call counts (0.9 to 1 times that), how long the
	// breaker must be closed for its open time to begin anew, and when work that goes on ends a row
	// of failures. Zero means a minute.
	Window time.Duration
	// WindowCalls, at most 1<<20, is how many calls are in the window. Zero means that it goes by time.
	WindowCalls int
	// SlowAfter makes a success that took so long a failure. Zero means never.
	SlowAfter time.Duration
	// Patience is how long a call must have run to be a failure, and not ignored, when the deadline
	// of its caller's ctx passes. Zero means nine tenths of SlowAfter, or of a second; negative that
	// all are ignored. If no caller waits for that long, a dependency that hangs opens nothing.
	Patience time.Duration
	// OpenFor is how long the breaker stays open, and up to a tenth longer at random. A probe that
	// has not returned within OpenFor has failed; one whose work goes on for OpenFor has
	// succeeded. Zero means 30 seconds.
	OpenFor time.Duration
	// MaxOpenFor lets the open time double with each opening, up to MaxOpenFor, until the breaker
	// has been closed for a Window. Zero means OpenFor.
	MaxOpenFor time.Duration
	// MaxRetryAfter bounds the longest RetryAfter() time.Duration of the failures that opened the
	// breaker, which takes the place of OpenFor. Zero means the larger of OpenFor and MaxOpenFor.
	MaxRetryAfter time.Duration
	// Probes must succeed to close the breaker, and no more run at once. Zero means 1. A change
	// takes effect at the next opening.
	Probes int
	// Classify says what an error means that would be a failure, or an answer that is Throttled()
	// bool. Nil means DefaultClassify.
	Classify func(error) Result
}

const (
	maxWindowCalls = 1 << 20
	minWindow      = time.Millisecond
	longest        = time.Duration(1 << 61) // of any time: 73 years, and safe to add
)

// Validate returns an error that names each invalid field, or nil.
func (c Config) Validate() error {
	f := invalid.Fields{Type: "breaker.Config"}
	leastMax := cmp.Or(c.OpenFor, 30*time.Second)
	f.Need(c.Failures >= 0, "Failures", c.Failures, "0 (for the default) or more")
	f.Need(c.FailuresInWindow >= 0, "FailuresInWindow", c.FailuresInWindow, "0 (for none) or more")
	f.Need(c.FailureRate >= 0 && c.FailureRate <= 1, "FailureRate", c.FailureRate, "0 (for none) or in (0, 1]")
	f.Need(c.MinCalls >= 0, "MinCalls", c.MinCalls, "0 (for 20) or more")
	f.Need(c.MinCalls <= 0 || c.FailureRate != 0, "MinCalls", c.MinCalls, "0 without FailureRate")
	f.Need(c.Window == 0 || c.Window >= minWindow, "Window", c.Window, "0 (for 1m) or at least 1ms")
	f.Need(c.WindowCalls >= 0 && c.WindowCalls <= maxWindowCalls, "WindowCalls", c.WindowCalls, "0 (for none) to 1<<20")
	f.Need(c.WindowCalls <= 0 || c.MinCalls <= c.WindowCalls, "MinCalls", c.MinCalls,
		"at most WindowCalls, or no rate ever counts")
	f.Need(c.WindowCalls <= 0 || c.FailuresInWindow <= c.WindowCalls, "FailuresInWindow", c.FailuresInWindow,
		"at most WindowCalls, or it is never reached")
	f.Need(c.SlowAfter >= 0, "SlowAfter", c.SlowAfter, "0 (for never) or more")
	f.Need(c.OpenFor >= 0, "OpenFor", c.OpenFor, "0 (for 30s) or more")
	f.Need(c.MaxOpenFor == 0 || c.MaxOpenFor >= leastMax, "MaxOpenFor", c.MaxOpenFor,
		"0 (for OpenFor) or at least OpenFor")
	f.Need(c.MaxRetryAfter >= 0, "MaxRetryAfter", c.MaxRetryAfter,
		"0 (for the larger of OpenFor and MaxOpenFor) or more")
	f.Need(c.Probes >= 0 && int64(c.Probes) <= math.MaxInt32, "Probes", c.Probes, "0 (for 1) to 1<<31 - 1")
	return f.Err()
}

func (c Config) withDefaults() Config {
	if c.FailuresInWindow == 0 && c.FailureRate == 0 {
		c.Failures = cmp.Or(c.Failures, 5)
	}
	if c.FailureRate != 0 {
		enough := 20
		if c.WindowCalls > 0 {
			enough = min(enough, c.WindowCalls)
		}
		c.MinCalls = cmp.Or(c.MinCalls, enough)
	}
	c.Window = min(cmp.Or(c.Window, time.Minute), longest)
	slow := cmp.Or(c.SlowAfter, time.Second)
	c.Patience = cmp.Or(c.Patience, slow-slow/10)
	c.OpenFor = min(cmp.Or(c.OpenFor, 30*time.Second), longest)
	c.MaxOpenFor = min(cmp.Or(c.MaxOpenFor, c.OpenFor), longest)
	c.MaxRetryAfter = min(cmp.Or(c.MaxRetryAfter, c.MaxOpenFor), longest)
	c.Probes = cmp.Or(c.Probes, 1)
	return c
}

func (b *Breaker) Config() Config { return b.setting.Config() }

func (b *Breaker) Settings() any {
	cfg := b.Config()
	cfg.Classify = nil
	return cfg
}

// Update calls change, which must not use the breaker, with the Config as it was given: a zero
// field means its default. If the result is not valid, nothing changes. The window is kept unless its
// length changes; counts over a new limit open the breaker at the next failure. A call under way is
// judged by the old Config.
func (b *Breaker) Update(change func(*Config)) error {
	return b.Change(false, func(cfg any) error { change(cfg.(*Config)); return nil })
}

func (b *Breaker) Change(dry bool, f func(cfg any) error) error {
	defer b.deliver(context.Background()) // of what follow has brought about
	return b.setting.Change(dry, f, sameName, b.follow)
}

func sameName(was, next *Config) error { return invalid.Renamed("breaker.Config", was.Name, next.Name) }

func (b *Breaker) follow(cfg *Config) {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := b.now()
	b.catchUp(now)
	was := b.cfg
	b.cfg = cfg
	if b.refusal == nil && (cfg.WindowCalls != was.WindowCalls || cfg.WindowCalls == 0 && cfg.Window != was.Window) {
		b.window.begin(cfg, now)
	}
}

// A Result is what the error of a call says about the dependency.
type Result uint8

const (
	Failure Result = iota
	Success        // it worked; its answer may be "not found"
	Ignore         // nothing
	refused        // the call was not made
)

// DefaultClassify returns what err is without a Classify.
func DefaultClassify(err error) Result {
	switch behavior.Read(err).Kind {
	case behavior.Done, behavior.Answered:
		return Success
	case behavior.Refused:
		return Ignore
	}
	return Failure
}
