package breaker

import (
	"cmp"
	"context"
	"math"
	"time"

	"github.com/go-resilience/resilience/internal/invalid"
)

// Config says when a [Breaker] opens, for how long, and how it closes again. The
// zero Config opens after 5 failures in a row, for 30 seconds, and closes after
// one successful probe.
//
// Any of Failures, FailuresInWindow, FailureRate, SlowRate and OpenWhen opens it; of
// several, the first that is met. A call that is neither a failure nor slow never does.
type Config struct {
	// Name appears in errors and events.
	Name string

	// Failures is how many calls in a row must fail. Zero means 5 if no other of these
	// is set, and no such limit if one is.
	Failures int
	// FailuresInWindow is how many of the calls in the window must have failed, in a row
	// or not. Zero means no such limit.
	FailuresInWindow int
	// FailureRate is the share of the calls in the window that must have failed,
	// in (0, 1]. Zero means no such limit.
	FailureRate float64
	// SlowRate is the share of the calls in the window, failed or not, that must
	// have taken SlowAfter or longer, in (0, 1]. It needs SlowAfter, and makes a
	// probe that is slow a failed one. Zero means no such limit.
	SlowRate float64
	// SlowAfter is how long a call takes that counts as slow. Without a SlowRate,
	// slow calls are counted, and change nothing. Zero means that no call is slow.
	SlowAfter time.Duration
	// OpenWhen, if not nil, is asked after each call that failed or was slow while the
	// breaker was closed, and opens it by returning true. It runs without a lock, on the
	// goroutine of the call, and perhaps on several at once.
	OpenWhen func(Counts) bool
	// MinCalls is how many calls there must be in the window before a rate counts.
	// Zero means 20, or WindowCalls if that is less.
	MinCalls int
	// Window is the time for which a call is remembered, from its end, in ten
	// buckets: it leaves after 0.9 to 1 times Window. At least a millisecond. Zero
	// means 60 seconds, if there is no WindowCalls and more than Failures is set.
	Window time.Duration
	// WindowCalls is how many calls are remembered instead, at most 1<<20. Zero
	// means 100 if there is no Window and nothing but Failures is set: they are for
	// Stats only.
	WindowCalls int

	// Patience is how long a call must have run, when the deadline of its caller's ctx
	// passed, to count as a failure and as slow. A call that had less time is ignored.
	// Zero means nine tenths of SlowAfter, or of a second if that is not set, so that
	// callers that allow just as much are counted. Negative means that every call whose
	// deadline passed is ignored.
	//
	// Set it below the time that callers usually allow; a Timeout or an AttemptTimeout
	// around the breaker is such a caller. Otherwise a dependency that hangs does not
	// open the breaker.
	Patience time.Duration

	// OpenFor is the least time that the breaker stays open when calls have failed.
	// Zero means 30 seconds. Negative means none: the next call is a probe. That
	// is not possible with a Ping.
	OpenFor time.Duration
	// MaxOpenFor lets that time double with each failed probe, up to this, until
	// the breaker closes. Zero means OpenFor: it does not grow.
	MaxOpenFor time.Duration
	// Jitter is the share by which each such time is lengthened at random, up to 1,
	// so that a fleet does not probe together. Zero means 0.1, negative none.
	Jitter float64
	// MaxRetryAfter is the longest time that the breaker stays open because a failure
	// said so, by its RetryAfter or by the outcome [Trip]; [Breaker.Trip] has no such
	// limit. Zero means the larger of OpenFor and
	// MaxOpenFor, or 30 seconds if OpenFor is negative.
	MaxRetryAfter time.Duration

	// Probes is the most calls let through at once while half-open. Zero means 1.
	Probes int
	// Successes is how many probes must succeed, without a failure between them, to
	// close it. There are never more probes at once than are still wanted. Zero
	// means Probes.
	Successes int
	// MaxHalfOpen is how long a probe holds its permit. After that another call may take
	// it, and the result of the probe no longer counts. Zero means a minute.
	MaxHalfOpen time.Duration
	// Ping, if not nil, is the probe: it is called by a goroutine of the breaker,
	// one call at a time, until Successes of them have returned nil, while other
	// calls are refused. The goroutine lives while the breaker is open or half-open,
	// or until [Breaker.Close]. The ctx of a Ping ends after MaxHalfOpen; when one
	// has not returned by then, other calls probe after all. A Ping that panics has
	// failed with a [*PanicError].
	Ping func(context.Context) error

	// Classify says what an error means; nil means DefaultClassify. It is asked about
	// each error that would count as a failure, and about no other: not about answers,
	// refusals, or calls that are ignored because their caller has left.
	Classify func(error) Outcome

	// OnChange is called after each change of state, one call at a time and in the
	// order of the changes: From is always the To before. OnReject is called for
	// each refused call. Both run on a goroutine that uses the breaker, without a
	// lock: they may use all its methods, and delay the calls that wait for them. ctx
	// is that of the call that caused the event. A change may have the ctx of another
	// call at the same time, and context.Background if no call caused it. With a Ping,
	// OnChange also runs on the goroutine that pings, where a panic ends the program.
	OnChange func(context.Context, Change)
	OnReject func(context.Context, *OpenError)
}

const (
	maxWindowCalls = 1 << 20
	minWindow      = time.Millisecond
	openFor        = 30 * time.Second
)

// Validate returns an error that names each field whose value cannot mean
// anything, alone or with the others.
func (c Config) Validate() error {
	f := invalid.Fields{Type: "breaker.Config"}
	rates := c.FailureRate != 0 || c.SlowRate != 0
	leastMax := cmp.Or(c.OpenFor, openFor)
	f.Need(c.Failures >= 0, "Failures", c.Failures, "0 (for the default) or more")
	f.Need(c.FailuresInWindow >= 0, "FailuresInWindow", c.FailuresInWindow, "0 (for none) or more")
	f.Need(isShare(c.FailureRate), "FailureRate", c.FailureRate, "0 (for none) or in (0, 1]")
	f.Need(isShare(c.SlowRate), "SlowRate", c.SlowRate, "0 (for none) or in (0, 1]")
	f.Need(c.SlowAfter >= 0, "SlowAfter", c.SlowAfter, "0 or more")
	f.Need(c.SlowRate == 0 || c.SlowAfter != 0, "SlowAfter", c.SlowAfter, "set for SlowRate to count")
	f.Need(c.MinCalls >= 0, "MinCalls", c.MinCalls, "0 (for 20) or more")
	f.Need(c.MinCalls <= 0 || rates, "MinCalls", c.MinCalls, "0 without FailureRate or SlowRate")
	f.Need(c.Window == 0 || c.Window >= minWindow, "Window", c.Window, "0 (for the default) or at least 1ms")
	f.Need(c.WindowCalls >= 0 && c.WindowCalls <= maxWindowCalls, "WindowCalls", c.WindowCalls, "0 (for the default) to 1<<20")
	f.Need(c.Window == 0 || c.WindowCalls == 0, "WindowCalls", c.WindowCalls, "0 when Window is set: one or the other")
	f.Need(c.WindowCalls <= 0 || c.MinCalls <= c.WindowCalls, "MinCalls", c.MinCalls, "at most WindowCalls, or no rate ever counts")
	f.Need(c.WindowCalls <= 0 || c.FailuresInWindow <= c.WindowCalls, "FailuresInWindow", c.FailuresInWindow, "at most WindowCalls, or it is never reached")
	f.Need(c.OpenFor >= 0 || c.Ping == nil, "OpenFor", c.OpenFor, "0 (for 30s) or more with a Ping, which has to pause")
	f.Need(c.OpenFor >= 0 || c.MaxOpenFor == 0, "MaxOpenFor", c.MaxOpenFor, "0 when OpenFor is negative")
	f.Need(c.OpenFor < 0 || c.MaxOpenFor == 0 || c.MaxOpenFor >= leastMax, "MaxOpenFor", c.MaxOpenFor, "0 (for OpenFor) or at least OpenFor")
	f.Need(c.MaxRetryAfter >= 0, "MaxRetryAfter", c.MaxRetryAfter, "0 (for the larger of OpenFor and MaxOpenFor) or more")
	f.Need(c.Jitter <= 1, "Jitter", c.Jitter, "0 (for 0.1), at most 1, or negative (for none)")
	f.Need(c.Probes >= 0, "Probes", c.Probes, "0 (for 1) or more")
	f.Need(c.Successes >= 0 && int64(c.Successes) <= math.MaxInt32, "Successes", c.Successes, "0 (for Probes) to 1<<31 - 1")
	f.Need(c.Successes > 0 || int64(c.Probes) <= math.MaxInt32, "Probes", c.Probes, "at most 1<<31 - 1")
	f.Need(c.MaxHalfOpen >= 0, "MaxHalfOpen", c.MaxHalfOpen, "0 (for 1m) or more")
	return f.Err()
}

func isShare(x float64) bool { return x >= 0 && x <= 1 }

func (c Config) withDefaults() Config {
	if c.FailuresInWindow == 0 && c.FailureRate == 0 && c.SlowRate == 0 && c.OpenWhen == nil {
		orDefault(&c.Failures, 5)
		if c.Window == 0 {
			orDefault(&c.WindowCalls, 100)
		}
	}
	if c.WindowCalls == 0 {
		orDefault(&c.Window, time.Minute)
	}
	if c.WindowCalls > 0 && c.WindowCalls < 20 {
		orDefault(&c.MinCalls, c.WindowCalls)
	}
	orDefault(&c.MinCalls, 20)
	enough := cmp.Or(c.SlowAfter, time.Second)
	orDefault(&c.Patience, enough-enough/10) // the time of a ctx begins before the call
	orDefault(&c.OpenFor, openFor)
	c.OpenFor = max(c.OpenFor, 0)
	orDefault(&c.MaxOpenFor, c.OpenFor)
	orDefault(&c.Jitter, 0.1)
	orDefault(&c.MaxRetryAfter, cmp.Or(c.MaxOpenFor, openFor))
	orDefault(&c.Probes, 1)
	orDefault(&c.Successes, c.Probes)
	orDefault(&c.MaxHalfOpen, time.Minute)
	for _, d := range []*time.Duration{&c.OpenFor, &c.MaxOpenFor, &c.MaxRetryAfter, &c.MaxHalfOpen} {
		*d = min(*d, longest)
	}
	return c
}

func orDefault[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}
