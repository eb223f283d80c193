package retry

import (
	"cmp"
	"context"
	"time"

	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/internal/invalid"
)

// Config says when and how often a [Retrier] retries.
type Config struct {
	// Name appears in errors and events. It cannot change.
	Name string
	// Attempts bounds the attempts of a call, refused ones included. Zero means 3, negative no limit.
	Attempts int
	// AttemptTimeout ends the ctx of an attempt, whose error is context.DeadlineExceeded, too, and
	// retried. Within a resiliencehttp.Transport it covers the body. Zero means no limit. To a breaker
	// further in it is the caller's deadline, and one below its Patience never opens it: there, take a
	// resilience.Timeout as the innermost policy instead.
	AttemptTimeout time.Duration
	// HealthyAfter is for sessions that run for days: an attempt that failed after so long
	// counts as the first of a new call. Zero means never.
	HealthyAfter time.Duration
	// Backoff returns a new Backoff for each call that is retried, and for Validate. Nil means
	// Exponential(100ms, 10s).
	Backoff func() Backoff
	// Delay returns a delay in place of a.Delay, that of Backoff; a negative one ends the retrying.
	Delay func(ctx context.Context, a Attempt) time.Duration
	// MaxRetryAfter: a longer RetryAfter of an error ends the retrying. Zero means a minute.
	MaxRetryAfter time.Duration
	// If reports whether a failure, neither refusal nor answer nor [Permanent], is worth another
	// attempt. Nil means resilience.Retryable.
	If func(error) bool
	// Budget limits retries to a fraction of the calls. Nil means no limit.
	Budget *Budget
	// OnRetry is called before each wait.
	OnRetry func(context.Context, Attempt)
}

// An Attempt has failed or was refused, and another follows.
type Attempt struct {
	Name        string
	Number      int // from 1
	Err         error
	Delay       time.Duration // before the next attempt
	RetryingFor time.Duration // since the first attempt failed
}

// Validate returns an error that names each invalid field, or nil.
func (c Config) Validate() error {
	f := invalid.Fields{Type: "retry.Config"}
	f.Need(c.AttemptTimeout >= 0, "AttemptTimeout", c.AttemptTimeout, "0 (for none) or more")
	f.Need(c.HealthyAfter >= 0, "HealthyAfter", c.HealthyAfter, "0 (for never) or more")
	f.Need(c.MaxRetryAfter >= 0, "MaxRetryAfter", c.MaxRetryAfter, "0 (for 1m) or more")
	if c.Backoff != nil {
		f.Need(c.Backoff() != nil, "Backoff", "a function that returns nil",
			"one that returns a new BackOff, or nil (for Exponential(100ms, 10s))")
	}
	return f.Err()
}

func (c Config) withDefaults() Config {
	if c.Backoff == nil {
		c.Backoff = Exponential(100*time.Millisecond, 10*time.Second)
	}
	if c.If == nil {
		c.If = func(err error) bool { return behavior.Read(err).Retryable }
	}
	c.Attempts = cmp.Or(c.Attempts, 3)
	c.MaxRetryAfter = cmp.Or(c.MaxRetryAfter, time.Minute)
	return c
}

func sameName(was, next *Config) error { return invalid.Renamed("retry.Config", was.Name, next.Name) }

func (r *Retrier) Name() string { return r.setting.Load().Name }

func (r *Retrier) Config() Config { return r.setting.Config() }

func (r *Retrier) Settings() any {
	c := r.Config()
	c.Backoff, c.Delay, c.If, c.OnRetry, c.Budget = nil, nil, nil, nil, nil
	return c
}

// Update calls change, which must not use r, with the Config as it was given: a zero field means its
// default. If the result is not valid, nothing changes. A call under way ends under the old Config.
func (r *Retrier) Update(change func(*Config)) error { return r.setting.Update(change, sameName, nil) }

func (r *Retrier) Change(dry bool, f func(cfg any) error) error {
	return r.setting.Change(dry, f, sameName, nil)
}
