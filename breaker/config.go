package breaker

import (
	"cmp"
	"context"
	"math"
	"time"

	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/internal/invalid"
)

// Unlimited, in a field that accepts it, means that there is no limit.
const Unlimited = -1

// Config says when a [Breaker] opens, and for how long. It opens when the first of ConsecutiveFailures,
// FailuresInWindow and FailureRate is reached.
type Config struct {
	// Name appears in errors, events and metrics. It cannot change.
	Name string

	// ConsecutiveFailures is how many consecutive failures open the breaker. A call that succeeds ends a run
	// of failed calls, even if its stream continues; a stream that ends well or has continued for a Window
	// ends a run of broken streams. A burst counts as one failure: see the package documentation. Zero means
	// 5 if neither FailuresInWindow nor FailureRate is set, and otherwise that this limit is not used.
	ConsecutiveFailures int
	// FailuresInWindow is how many failures in the window open the breaker. The largest burst counts as one
	// if it is at least half of them. Zero means that this limit is not used.
	FailuresInWindow int
	// FailureRate is the fraction of failed calls in the window, in (0, 1], that opens the breaker. The
	// largest burst counts as one call if it is at least half of the failures. Zero means that this limit is
	// not used.
	FailureRate float64
	// MinCalls is how many calls must be in the window before FailureRate is used. Zero means 20, or
	// WindowCalls if that is less.
	MinCalls int

	// Window is how long a call counts, at least 1ms. The window moves in steps of a tenth, so a call leaves
	// it after 0.9 to 1 times Window. A breaker that has been closed for a Window opens for OpenFor again: see
	// MaxOpenFor. Zero means 1 minute.
	Window time.Duration
	// WindowCalls makes the window hold the last WindowCalls calls, at most 1<<20, instead of those of the
	// last Window. Zero means that the window is one of time.
	WindowCalls int

	// SlowAfter turns a success that took this long into a failure. Zero means never.
	SlowAfter time.Duration
	// Patience is how long a caller must have waited for its deadline to count as a failure; a shorter call
	// is ignored. If no caller waits that long, a dependency that hangs does not open the breaker. Zero means
	// 90% of SlowAfter or, without SlowAfter, 900ms; [Unlimited] means that a deadline is never a failure.
	Patience time.Duration

	// OpenFor is how long the breaker stays open, plus up to a tenth at random. Zero means 30 seconds.
	OpenFor time.Duration
	// ProbeTimeout is how long a probe may take before it counts as failed. If it succeeds later, during the
	// same outage, the breaker closes all the same. A probe whose stream continues has succeeded after
	// ProbeTimeout or OpenFor, whichever is less. Zero means OpenFor.
	ProbeTimeout time.Duration
	// MaxOpenFor lets the open time double with each opening, up to MaxOpenFor, until the breaker has been
	// closed for a Window. Up to a tenth at random is added. Zero means OpenFor: the open time does not grow.
	MaxOpenFor time.Duration
	// MaxRetryAfter limits the RetryAfter() time.Duration of the failures that open the breaker. The longest
	// one is used instead of OpenFor, plus up to a tenth at random but at most MaxRetryAfter. Zero means the
	// larger of OpenFor and MaxOpenFor.
	MaxRetryAfter time.Duration
	// Probes is how many probes must succeed to close the breaker, and how many may run at once, apart from
	// those that have exceeded ProbeTimeout. A change takes effect at the next opening. Zero means 1.
	Probes int

	// Classify returns the [Verdict] on an error that would otherwise be a failure, and on an answer whose
	// Throttled() bool method returns true. Nil means [DefaultClassify].
	Classify func(error) Verdict
}

const (
	maxWindowCalls = 1 << 20
	minWindow      = time.Millisecond
	longest        = time.Duration(1 << 61) // 73 years; sums of two do not overflow
)

// Validate returns an error that names each invalid field, or nil.
func (c Config) Validate() error {
	f := invalid.Fields{Type: "breaker.Config"}
	leastMax := cmp.Or(c.OpenFor, 30*time.Second)
	f.Need(c.ConsecutiveFailures >= 0, "ConsecutiveFailures", c.ConsecutiveFailures, "0 (for the default) or more")
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
	f.Need(c.Patience >= 0 || c.Patience == Unlimited, "Patience", c.Patience,
		"0 (for nine tenths of SlowAfter, or of 1s) or more, or Unlimited")
	f.Need(c.OpenFor >= 0, "OpenFor", c.OpenFor, "0 (for 30s) or more")
	f.Need(c.ProbeTimeout >= 0, "ProbeTimeout", c.ProbeTimeout, "0 (for OpenFor) or more")
	f.Need(c.MaxOpenFor == 0 || c.MaxOpenFor >= leastMax, "MaxOpenFor", c.MaxOpenFor,
		"0 (for OpenFor) or at least OpenFor")
	f.Need(c.MaxRetryAfter >= 0, "MaxRetryAfter", c.MaxRetryAfter,
		"0 (for the larger of OpenFor and MaxOpenFor) or more")
	f.Need(c.Probes >= 0 && int64(c.Probes) <= math.MaxInt32, "Probes", c.Probes, "0 (for 1) to 1<<31 - 1")
	return f.Err()
}

func (c Config) withDefaults() Config {
	if c.FailuresInWindow == 0 && c.FailureRate == 0 {
		c.ConsecutiveFailures = cmp.Or(c.ConsecutiveFailures, 5)
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
	c.ProbeTimeout = min(cmp.Or(c.ProbeTimeout, c.OpenFor), longest)
	c.MaxOpenFor = min(cmp.Or(c.MaxOpenFor, c.OpenFor), longest)
	c.MaxRetryAfter = min(cmp.Or(c.MaxRetryAfter, c.MaxOpenFor), longest)
	c.Probes = cmp.Or(c.Probes, 1)
	return c
}

// Config returns the configuration with defaults filled in.
func (b *Breaker) Config() Config { return b.setting.Config() }

// Update calls change with the effective configuration and applies the result. If that is invalid, Update
// returns the error of Validate, and nothing changes. A field that change leaves as it is shown continues to
// follow its default. Test for [Unlimited] before calculating with a field. change must not use b.
//
// The window is kept unless its length changes. If the counts exceed a new limit, the breaker opens at the
// next failure. Calls in flight are judged by the old configuration.
func (b *Breaker) Update(change func(*Config)) error {
	defer b.notify(context.Background()) // of the transitions that applyConfig finds due
	return b.setting.Update(change, sameName, b.applyConfig)
}

func sameName(was, next *Config) error { return invalid.Renamed("breaker.Config", was.Name, next.Name) }

func (b *Breaker) applyConfig(cfg *Config) {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := b.now()
	b.advance(now)
	old := b.cfg
	b.cfg = cfg
	if b.refusal == nil && (cfg.WindowCalls != old.WindowCalls || cfg.WindowCalls == 0 && cfg.Window != old.Window) {
		b.window.reset(cfg, now)
	}
}

// A Verdict is what the error of a call says about the dependency.
type Verdict int

// The verdicts. Any other value that Classify returns counts as Failure.
const (
	Failure Verdict = iota // the dependency does not work
	Success                // the dependency works, although its answer may be "not found"
	Ignore                 // nothing is known
	refused                // the call was not made; only for counting
)

// DefaultClassify is the Classify of a Config that has none. It returns Success for nil and for an answer
// (Answered() bool), Ignore for a refusal of an inner policy (Refused() bool), and Failure otherwise.
func DefaultClassify(err error) Verdict {
	switch behavior.Read(err).Kind {
	case behavior.Done, behavior.Answered:
		return Success
	case behavior.Refused:
		return Ignore
	}
	return Failure
}
