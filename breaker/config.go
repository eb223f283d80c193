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
// Failures, FailuresInWindow, FailureRate, SlowRate and OpenWhen each open the breaker;
// of several, the first that is met. Only a call that failed or was slow opens it.
type Config struct {
	// Name appears in errors, events and figures.
	Name string

	// Failures is how many calls in a row must fail. Zero means 5 if FailuresInWindow,
	// FailureRate, SlowRate and OpenWhen are all unset, and no such limit otherwise.
	Failures int
	// FailuresInWindow is how many calls in the window must have failed, in a row or
	// not. Zero means no such limit.
	FailuresInWindow int
	// FailureRate is the share of the calls in the window that must have failed,
	// in (0, 1]. Zero means no such limit.
	FailureRate float64
	// SlowRate is the share of the calls in the window, failed or not, that must have
	// been slow, in (0, 1]. It needs SlowAfter, and a slow probe fails if it is set.
	// Zero means no such limit.
	SlowRate float64
	// SlowAfter is the least duration of a slow call. Without a SlowRate, slow calls
	// are only counted. Zero means no call is slow.
	SlowAfter time.Duration
	// OpenWhen, if not nil, opens the breaker by returning true. It is called after each
	// call that failed or was slow while the breaker was closed, on the goroutine of the
	// call, without a lock, and perhaps on several goroutines at once.
	OpenWhen func(Counts) bool
	// MinCalls is how many calls the window must hold before a rate counts. It needs a
	// rate. Zero means 20, or WindowCalls if that is less.
	MinCalls int
	// Window is how long the window remembers a call after its end. It has ten
	// buckets, so a call leaves after 0.9 to 1 times Window. The least Window is a
	// millisecond. Zero means 60 seconds, unless WindowCalls is set or defaults to 100.
	Window time.Duration
	// WindowCalls makes the window remember the last WindowCalls calls instead, at most
	// 1<<20. Zero means 100 if Failures is the only limit and Window is not set: such a
	// window is for Stats only.
	WindowCalls int

	// Patience is how long a call must have run when the deadline of its caller's ctx
	// passes, to count as a failure and as slow. A call that had less time is ignored.
	// Zero means nine tenths of SlowAfter, or nine tenths of a second if SlowAfter is
	// not set: a caller that allows exactly that time makes its ctx before the call.
	// Negative means every call whose deadline passed is ignored.
	//
	// Set Patience below the time that callers usually allow. A Timeout or an
	// AttemptTimeout around the breaker is such a caller. Otherwise a dependency that
	// hangs does not open the breaker.
	Patience time.Duration

	// OpenFor is the least time that the breaker stays open after failures. Jitter
	// lengthens it. Zero means 30 seconds. Negative means none: the next call is a probe. A Ping
	// needs an OpenFor that is not negative.
	OpenFor time.Duration
	// MaxOpenFor lets the open time double with each failed probe, up to MaxOpenFor,
	// until the breaker closes. Zero means OpenFor: the time does not grow.
	MaxOpenFor time.Duration
	// Jitter is the share by which an open time is lengthened at random, at most 1,
	// so that the processes of a fleet do not probe together. Zero means 0.1, negative
	// none.
	Jitter float64
	// MaxRetryAfter is the longest time that the breaker stays open because an error
	// said so, by its RetryAfter or by the outcome [OpensFor]. [Breaker.Trip] has no such
	// limit. Zero means the larger of OpenFor and MaxOpenFor, or 30 seconds if OpenFor
	// is negative.
	MaxRetryAfter time.Duration

	// Probes is the most probes at once. Zero means 1.
	Probes int
	// Successes is how many probes must succeed, without a failure between them, to
	// close the breaker. No more probes are made at once than are still needed. Zero
	// means Probes.
	Successes int
	// MaxHalfOpen is how long a probe may take. One that has not ended by then has failed,
	// whatever it returns later: the breaker opens again when the next call arrives, or
	// the program asks for State or Stats. Zero means a minute.
	MaxHalfOpen time.Duration
	// Ping, if not nil, replaces the probes. A goroutine of the breaker calls it, one
	// call at a time, until Successes calls have returned nil; meanwhile other calls are
	// refused. The goroutine lives while the breaker is open or half-open, or until
	// [Breaker.Close]. The ctx of a Ping ends after MaxHalfOpen. If a Ping has not
	// returned by then, other calls probe, and the next Ping waits for it. A Ping that
	// panics fails with an error that has a method Stack() []byte.
	Ping func(context.Context) error

	// Classify says what an error means. Nil means DefaultClassify. It is asked about
	// each error that would count as a failure, and about no other: not about answers,
	// refusals, or calls that are ignored because their caller has left.
	Classify func(error) Outcome

	// OnChange, if not nil, is called after each change of state with an EventChanged, one
	// call at a time and in order: From is always the To before. For refused calls see
	// [Breaker.Observe].
	//
	// It runs on a goroutine that uses the breaker, without a lock. It may use all methods
	// of the breaker, and it delays that goroutine. ctx is that of the call that caused
	// the change. A change that happens at the same time as another may have the ctx of
	// the other's call, and one that no call caused has context.Background. A panic
	// passes on to that goroutine's caller. With a Ping, OnChange also runs on the
	// goroutine that pings: a panic there goes to OnPanic.
	OnChange func(context.Context, Event)

	// OnPanic is called with each panic of OnChange or an observer on the goroutine that
	// pings, and its stack. Totals.HookPanics counts them. Nil means that slog's default
	// logger tells of them.
	OnPanic func(ctx context.Context, value any, stack []byte)
}

const (
	maxWindowCalls = 1 << 20
	minWindow      = time.Millisecond
	openFor        = 30 * time.Second
	longest        = time.Duration(1 << 61) // of any time: 73 years, and safe to add
)

// Validate returns an error that names each invalid field, or nil.
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
	f.Need(c.MaxOpenFor == 0 || c.MaxOpenFor >= leastMax, "MaxOpenFor", c.MaxOpenFor, "0 (for OpenFor) or at least OpenFor")
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
	rates := c.FailureRate != 0 || c.SlowRate != 0
	if c.FailuresInWindow == 0 && !rates && c.OpenWhen == nil {
		c.Failures = cmp.Or(c.Failures, 5)
		if c.Window == 0 {
			c.WindowCalls = cmp.Or(c.WindowCalls, 100)
		}
	}
	if c.WindowCalls == 0 {
		c.Window = cmp.Or(c.Window, time.Minute)
	}
	if rates {
		enough := 20
		if c.WindowCalls > 0 {
			enough = min(enough, c.WindowCalls)
		}
		c.MinCalls = cmp.Or(c.MinCalls, enough)
	}
	slow := cmp.Or(c.SlowAfter, time.Second)
	c.Patience = cmp.Or(c.Patience, slow-slow/10)
	c.OpenFor = min(cmp.Or(c.OpenFor, openFor), longest)
	c.MaxOpenFor = min(cmp.Or(c.MaxOpenFor, max(c.OpenFor, 0)), longest)
	c.Jitter = cmp.Or(c.Jitter, 0.1)
	c.MaxRetryAfter = min(cmp.Or(c.MaxRetryAfter, c.MaxOpenFor, openFor), longest)
	c.Probes = cmp.Or(c.Probes, 1)
	c.Successes = cmp.Or(c.Successes, c.Probes)
	c.MaxHalfOpen = min(cmp.Or(c.MaxHalfOpen, time.Minute), longest)
	return c
}
