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
	Unlimited = -1       // means no limit, in a field that accepts Unlimited
	None      = -1 << 31 // means that the field's function is off, in a field that accepts None
)

// Config configures a [Retrier].
type Config struct {
	// Name appears in errors, events and metrics. It cannot change.
	Name string
	// Attempts limits the attempts of a call, including refused attempts. Zero means 3. [Unlimited] means that
	// only ctx and Budget limit the attempts.
	Attempts int
	// AttemptTimeout is the longest duration of an attempt. The error of an attempt that exceeds AttemptTimeout
	// matches context.DeadlineExceeded and is retried. Zero means no limit.
	//
	// Within a resiliencehttp.Transport, AttemptTimeout includes the time for reading the body. Do not use
	// AttemptTimeout around http.Client.Do: the body is read after http.Client.Do has returned, so the timeout
	// would cut off the body. Use a resiliencehttp.Transport instead.
	//
	// To an inner breaker, an AttemptTimeout looks like the caller's deadline. With an inner breaker, use
	// resilience.Timeout as the innermost policy instead.
	AttemptTimeout time.Duration
	// HealthyAfter is for sessions that run for days. An attempt that fails after at least HealthyAfter counts as
	// the first attempt of a new call. Zero means that no attempt starts a new call.
	HealthyAfter time.Duration
	// Backoff returns a new Backoff for each call that is retried. Validate also calls Backoff. Nil means
	// Exponential(100ms, 10s).
	Backoff func() Backoff
	// Delay, if not nil, returns the delay that replaces a.Delay. A negative delay ends the retrying.
	Delay func(ctx context.Context, a FailedAttempt) time.Duration
	// MinDelay is the shortest wait before a retry. If Backoff or Delay returns a shorter delay, the wait is
	// MinDelay plus up to a tenth of MinDelay at random. The random part keeps clients from retrying at the same
	// moment. Zero means no minimum.
	MinDelay time.Duration
	// MaxRetryAfter is the longest RetryAfter for which a call waits. An error with a longer RetryAfter ends the
	// retrying. Zero means 1 minute.
	MaxRetryAfter time.Duration
	// RetryIf reports whether a failure is worth another attempt. RetryIf is not called for refusals, answers and
	// [Permanent] errors. Nil means resilience.Retryable.
	RetryIf func(error) bool
	// Budget limits retries to a fraction of the calls. Nil means no limit.
	Budget *Budget
}

// A FailedAttempt is an attempt that failed or was refused, and after which another attempt is planned.
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

// Update calls change with the effective configuration and applies the result. If the result is invalid, Update
// returns an error, and nothing changes. If change does not alter a field, that field continues to follow its
// default. change receives the functions that the Config was given, without defaults. Attempts may be
// [Unlimited], so change must test for Unlimited before it calculates with Attempts. change must not use r.
//
// Calls in flight finish under the old configuration.
func (r *Retrier) Update(change func(*Config)) error { return r.setting.Update(change, sameName, nil) }
