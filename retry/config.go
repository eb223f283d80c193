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
	Unlimited = -1       // in a field that accepts it: no limit
	None      = -1 << 31 // in a field that accepts it: switched off
)

// Config configures a [Retrier].
type Config struct {
	// Name appears in errors, events and metrics. It cannot change.
	Name string
	// Attempts limits the attempts of a call, including refused ones. Zero means 3; [Unlimited] means that
	// only ctx and Budget limit them.
	Attempts int
	// AttemptTimeout limits each attempt; its error is also context.DeadlineExceeded, and is retried. Within a
	// resiliencehttp.Transport, it also covers reading the body. Zero means no limit. To an inner breaker, it
	// looks like the caller's deadline; use resilience.Timeout as the innermost policy there.
	//
	// Around http.Client.Do it cuts off the body, which is read after Do has returned: use a
	// resiliencehttp.Transport instead.
	AttemptTimeout time.Duration
	// HealthyAfter is for sessions that run for days: an attempt that fails after this long counts as the
	// first of a new call. Zero means never.
	HealthyAfter time.Duration
	// Backoff returns a new Backoff for each call that is retried; Validate calls it as well. Nil means
	// Exponential(100ms, 10s).
	Backoff func() Backoff
	// Delay, if not nil, returns the delay to use in place of a.Delay. A negative delay ends the retrying.
	Delay func(ctx context.Context, a FailedAttempt) time.Duration
	// MinDelay is the shortest wait before a retry. If Backoff or Delay returns less, the wait is MinDelay plus
	// up to a tenth of it, at random, so that clients do not retry at the same moment. Zero means no minimum.
	MinDelay time.Duration
	// MaxRetryAfter is the longest RetryAfter of an error that is waited for; a longer one ends the retrying.
	// Zero means a minute.
	MaxRetryAfter time.Duration
	// RetryIf reports whether a failure is worth another attempt. It is not called for refusals, answers and
	// [Permanent] errors. Nil means resilience.Retryable.
	RetryIf func(error) bool
	// Budget limits retries to a fraction of the calls. Nil means no limit.
	Budget *Budget
}

// A FailedAttempt is an attempt that failed or was refused and is to be followed by another.
type FailedAttempt struct {
	Name        string        // of the Retrier
	Number      int           // from 1
	Err         error         // of the attempt
	Delay       time.Duration // before the next attempt
	RetryingFor time.Duration // since the first attempt failed
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
			"one that returns a new BackOff, or nil (for Exponential(100ms, 10s))")
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

// Update calls change with the effective configuration and applies the result. If that is invalid, nothing
// changes. A field that change leaves as it is shown continues to follow its default; functions are shown as
// they were given. Attempts may be [Unlimited]: change must not calculate with it. Calls in progress finish under
// the old configuration. change must not use r.
func (r *Retrier) Update(change func(*Config)) error { return r.setting.Update(change, sameName, nil) }
