package breaker

import (
	"cmp"
	"context"
	"math"
	"time"

	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/internal/invalid"
)

// Unlimited means that there is no limit. Unlimited is valid only for fields whose comment mentions it.
const Unlimited = -1

// Config specifies when a [Breaker] opens and how long the breaker stays open. ConsecutiveFailures,
// FailuresInWindow and FailureRate are limits. The breaker opens when any of the limits is reached.
type Config struct {
	// Name identifies the breaker in errors, events and metrics. Update cannot change Name.
	Name string

	// ConsecutiveFailures is the number of consecutive failures that opens the breaker. Failed calls and broken
	// streams are counted separately. A call that succeeds ends a run of failed calls, even if the call's stream
	// continues. A stream that ends without a failure ends a run of broken streams. A stream that has continued for the
	// time Window also ends a run of broken streams. A burst counts as one failure; see the package documentation. So if
	// many calls are in flight, a dependency that fails most but not all calls may never reach ConsecutiveFailures. Set
	// FailureRate to open the breaker for such a dependency. If FailuresInWindow or FailureRate is set, zero means that
	// ConsecutiveFailures is not used. If neither is set, zero means 5.
	ConsecutiveFailures int
	// FailuresInWindow opens the breaker when the window has this number of failures. If the largest burst has at
	// least half of the failures in the window, the burst counts as one failure. If WindowCalls is set, the maximum
	// is WindowCalls. Zero means that FailuresInWindow is not used.
	FailuresInWindow int
	// FailureRate opens the breaker when this fraction of the calls in the window has failed. The maximum is 1. If the
	// largest burst has at least half of the failures in the window, the burst counts as one call. Zero means that
	// FailureRate is not used.
	FailureRate float64
	// MinCalls is the number of calls that must be in the window before FailureRate is used. Without FailureRate,
	// MinCalls must be 0. If WindowCalls is set, the maximum is WindowCalls. Zero means 20, or WindowCalls if
	// WindowCalls is between 1 and 19.
	MinCalls int

	// Window is the length of the window: the result of a call is counted for this time. The minimum is 1ms. Results
	// expire in groups, one group for each tenth of Window. So a result is counted for 0.9 to 1 times Window. Window
	// also affects the open time; see MaxOpenFor. Zero means 1 minute.
	Window time.Duration
	// WindowCalls is the number of calls that the window holds, at most 1<<20. If WindowCalls is set, the window holds
	// the last WindowCalls calls, regardless of their age. Zero means that the window holds the calls from the last
	// Window.
	WindowCalls int

	// SlowAfter limits the duration of a successful call. A successful call that takes SlowAfter or longer counts as a
	// failure. Zero means that a success never counts as a failure, however long the call takes.
	SlowAfter time.Duration
	// Patience applies to a call that fails after the deadline of the caller's ctx. If the call had at least Patience
	// from its start to the deadline, it counts as a failure. A call that had less time is ignored, because the caller
	// may have allowed too little time. If all callers allow less time than Patience, a dependency that hangs does not
	// open the breaker. Zero means 90% of SlowAfter or, without SlowAfter, 900ms. [Unlimited] means that a missed
	// deadline is never a failure.
	Patience time.Duration

	// OpenFor is the time for which the breaker stays open. Up to a tenth of OpenFor is added at random. Zero means 30
	// seconds.
	OpenFor time.Duration
	// ProbeTimeout is the time after which an unfinished probe counts as failed. If a probe exceeds ProbeTimeout but
	// then succeeds during the same outage, the breaker closes. A probe may return while its stream continues. The
	// probe then counts as successful when the stream has continued for ProbeTimeout or for OpenFor, whichever is
	// shorter. Zero means OpenFor.
	ProbeTimeout time.Duration
	// MaxOpenFor is the longest open time, before the random tenth is added. The minimum is OpenFor. The first open
	// time is OpenFor. The open time doubles with each further opening, up to MaxOpenFor. If the breaker has been closed
	// for a whole Window, its next open time is OpenFor again. Zero means OpenFor: the open time does not grow.
	MaxOpenFor time.Duration
	// MaxRetryAfter is the longest open time that a dependency can request. If errors that open the breaker have a method
	// RetryAfter() time.Duration, the longest RetryAfter replaces OpenFor as the open time. Up to a tenth of the
	// RetryAfter is added at random, but the sum is at most MaxRetryAfter. Zero means the larger of OpenFor and
	// MaxOpenFor.
	MaxRetryAfter time.Duration
	// Probes is the number of probes that must succeed to close the breaker. Probes is also the maximum number of
	// probes that run at the same time. Probes that have exceeded ProbeTimeout are not included in this maximum. If
	// Update changes Probes, the change takes effect when the breaker opens the next time. The maximum is 1<<31 - 1.
	// Zero means 1.
	Probes int

	// Classify returns the [Verdict] on an error. Classify is called for an error that would otherwise be a failure, and
	// for an error whose methods Answered() bool and Throttled() bool both return true. Nil means [DefaultClassify].
	Classify func(error) Verdict
}

const (
	maxWindowCalls = 1 << 20
	minWindow      = time.Millisecond
	longest        = time.Duration(1 << 61) // 73 years; the sum of two such durations does not overflow
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

// Update calls change with the effective configuration and applies the result. If the result is invalid, Update returns
// the error of [Config.Validate], and nothing changes. A field that the function does not alter keeps its value, or
// continues to follow its default. Patience may be Unlimited, which is -1. The function must test for Unlimited before
// it calculates with Patience. The function must not call methods of b, because Update holds a lock.
//
// The window keeps its counts unless the length of the window changes. If the counts already exceed a new limit, the
// breaker opens at the next failure. The results of calls in flight are classified under the old configuration.
func (b *Breaker) Update(change func(*Config)) error {
	defer b.notify(context.Background()) // applyConfig may apply transitions that are due
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

// A Verdict specifies how the result of a call counts.
type Verdict int

// The verdicts. A value other than Failure, Success and Ignore counts as Failure.
const (
	Failure Verdict = iota // the dependency does not work
	Success                // the dependency works, although its answer may be "not found"
	Ignore                 // the result does not show whether the dependency works
	refused                // only an index of Breaker.results: the breaker refused the call
)

// DefaultClassify classifies errors if Config.Classify is nil. DefaultClassify returns Success for nil and for an
// error whose method Answered() bool returns true. DefaultClassify returns Ignore for an error whose method Refused()
// bool returns true, which means that an inner policy refused the call. For any other error, DefaultClassify returns
// Failure.
func DefaultClassify(err error) Verdict {
	switch behavior.Read(err).Kind {
	case behavior.Done, behavior.Answered:
		return Success
	case behavior.Refused:
		return Ignore
	}
	return Failure
}
