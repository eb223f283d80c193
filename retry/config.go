package retry

import (
	"cmp"
	"context"
	"time"

	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/internal/delay"
	"github.com/go-resilience/resilience/internal/invalid"
)

const (
	Unlimited = -1       // no limit; only for fields whose comment names Unlimited
	None      = -1 << 31 // nothing at all; only for fields whose comment names None
)

// Config configures a [Retrier].
type Config struct {
	// Name identifies the Retrier in errors, events and metrics. Update cannot change Name.
	Name string
	// Attempts is the maximum number of attempts of a call, including attempts that were refused. Zero means 3.
	// [Unlimited] means that only ctx and Budget limit the attempts.
	Attempts int
	// AttemptTimeout is the longest duration of an attempt. If an attempt exceeds AttemptTimeout, its ctx is
	// canceled, and another attempt may follow. If the error of the canceled attempt is retryable, it matches
	// [context.DeadlineExceeded]. Zero means no limit.
	//
	// For HTTP, use a resiliencehttp.Transport: within a Transport, an attempt includes the reading of the body. Do not
	// use AttemptTimeout around http.Client.Do: the body is read after http.Client.Do has returned, so AttemptTimeout
	// would cut off the body.
	//
	// A breaker inside the Retrier cannot distinguish AttemptTimeout from the caller's deadline. If there is a breaker
	// inside the Retrier, use resilience.Timeout as the innermost policy instead of AttemptTimeout.
	AttemptTimeout time.Duration
	// HealthyAfter is for calls that normally run for days, such as sessions. If an attempt has run for at least
	// HealthyAfter and then fails, the count of attempts starts again: the failed attempt counts as the first attempt
	// of a new call. Zero means that the count never starts again.
	HealthyAfter time.Duration
	// Backoff returns a new [Backoff] for each call that is retried. Config.Validate also calls the function Backoff.
	// Nil means Exponential(100ms, 10s).
	Backoff func() Backoff
	// Delay, if not nil, returns the delay before the next attempt. The returned delay replaces a.Delay, which comes
	// from Backoff. A negative delay means that no retry follows. Delay is not called after a negative delay from
	// Backoff.
	Delay func(ctx context.Context, a FailedAttempt) time.Duration
	// MinDelay is the shortest wait before a retry. If Backoff or Delay returns a shorter delay, the wait is
	// MinDelay plus up to a tenth of MinDelay at random. The random part keeps clients from retrying at the same
	// moment. Zero means no minimum.
	MinDelay time.Duration
	// MaxRetryAfter is the longest RetryAfter that a call waits for. If the RetryAfter of an error is longer than
	// MaxRetryAfter, the call is not retried. Otherwise the RetryAfter is a minimum for the wait, like MinDelay, and
	// up to a tenth of it is added at random. Zero means 1 minute.
	MaxRetryAfter time.Duration
	// RetryIf reports whether a call that failed with the error should be retried. RetryIf is not called for a
	// [Permanent] error, or for an error whose method Refused() bool or Answered() bool returns true. For such an
	// error, resilience.Retryable decides. Nil means resilience.Retryable.
	RetryIf func(error) bool
	// Budget limits the retries to a fraction of the calls. Retriers can share a Budget. Nil means no limit.
	Budget *Budget
}

// A FailedAttempt describes an attempt that failed or was refused, and the wait before the next attempt.
type FailedAttempt struct {
	Name        string        // the Retrier's name
	Number      int           // the attempt's number, from 1
	Err         error         // the attempt's error
	Delay       time.Duration // the wait before the next attempt
	RetryingFor time.Duration // the time since the first attempt failed
}

// Validate returns an error that names each invalid field, or nil.
func (c Config) Validate() error {
	f := invalid.Fields{Type: "retry.Config"}
	f.Need(c.Attempts >= 0 || c.Attempts == Unlimited, "Attempts", c.Attempts, "0 (for 3), more, or Unlimited")
	f.Need(c.AttemptTimeout >= 0, "AttemptTimeout", c.AttemptTimeout, "0 (for none) or more")
	f.Need(c.HealthyAfter >= 0, "HealthyAfter", c.HealthyAfter, "0 (for never) or more")
	f.Need(c.MinDelay >= 0, "MinDelay", c.MinDelay, "0 (for none) or more")
	f.Need(c.MaxRetryAfter >= 0, "MaxRetryAfter", c.MaxRetryAfter, "0 (for 1m) or more")
	if c.Backoff != nil {
		b := c.Backoff()
		f.Need(b != nil, "Backoff", "a function that returns nil",
			"a function that returns a new BackOff, or nil (for Exponential(100ms, 10s))")
		is, must := delay.Check(b)
		f.Need(must == "", "Backoff", is, must)
	}
	return f.Err()
}

func (c Config) withDefaults() Config {
	if c.Backoff == nil {
		c.Backoff = Exponential(100*time.Millisecond, 10*time.Second)
	}
	if c.RetryIf == nil {
		c.RetryIf = func(err error) bool { return behavior.Read(err).Retryable }
	}
	c.Attempts = cmp.Or(c.Attempts, 3)
	c.MaxRetryAfter = cmp.Or(c.MaxRetryAfter, time.Minute)
	return c
}

func sameName(was, next *Config) error { return invalid.Renamed("retry.Config", was.Name, next.Name) }

// Config returns the configuration with defaults filled in.
func (r *Retrier) Config() Config { return r.setting.Config() }

// Update calls change with the effective configuration, and then applies the modified configuration. If the modified
// configuration is invalid, Update returns an error, and nothing changes. If change does not alter a field, the field
// keeps its value, or continues to follow its default. In the Config that change receives, a field that holds a
// function is nil if the field was not set. Attempts may be Unlimited, which is -1, so change must test for Unlimited
// before it calculates with Attempts. change must not call methods of r, because Update holds a lock.
//
// Calls in flight finish under the old configuration.
func (r *Retrier) Update(change func(*Config)) error {
	return r.setting.Update(change, sameName, r.useBudget)
}
