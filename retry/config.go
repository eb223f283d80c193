package retry

import (
	"cmp"
	"context"
	"time"

	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/internal/invalid"
)

// Config says when and how often a [Retrier] retries. The deadline of its ctx limits the time of a
// whole call.
type Config struct {
	// Name appears in errors and events. It may be empty, and cannot change.
	Name string
	// Attempts is how often a call runs fn at most, refused attempts included. Zero means 3,
	// negative no limit.
	Attempts int
	// AttemptTimeout is the time after which the ctx of an attempt ends. The error is then
	// context.DeadlineExceeded, too, and retried. Within a resiliencehttp.Transport it covers
	// the body. Zero means no limit.
	AttemptTimeout time.Duration
	// HealthyAfter is for sessions that run for days: an attempt that ran for so long before
	// it failed counts as the first of a new call. Zero means never.
	HealthyAfter time.Duration
	// Backoff returns a new Backoff for each call whose first attempt has failed, and is called
	// by Validate, New and Update. Nil means Exponential(100ms, 10s).
	Backoff func() Backoff
	// Delay returns the delay after a, in place of a.Delay, which comes from Backoff. Negative
	// ends the retrying. RetryAfter of the error sets the least all the same.
	Delay func(ctx context.Context, a Attempt) time.Duration
	// MaxRetryAfter is the longest RetryAfter of an error that is waited for: a longer one ends
	// the retrying. Zero means a minute.
	MaxRetryAfter time.Duration
	// If reports whether a failure is worth another attempt. It is not asked about refusals,
	// answers and errors marked by [Permanent], nor once ctx has ended. Nil means
	// resilience.Retryable.
	If func(error) bool
	// Budget limits retries to a fraction of the calls. Nil means no such limit.
	Budget *Budget
	// OnRetry is called before each wait, with the ctx of Do.
	OnRetry func(context.Context, Attempt)
}

// An Attempt has failed or was refused, and another follows.
type Attempt struct {
	Name        string // of the Retrier
	Number      int    // from 1
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
		b := c.Backoff()
		f.Need(b != nil, "Backoff", "a function that returns nil",
			"one that returns a new BackOff, or nil (for Exponential(100ms, 10s))")
		if m, ok := b.(*misuse); ok {
			f.Need(false, "Backoff", m.what, m.want)
		}
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

// Config returns the present Config, with its defaults filled in.
func (r *Retrier) Config() Config { return r.setting.Config() }

// Settings returns Config without functions and Budget.
func (r *Retrier) Settings() any {
	c := r.Config()
	c.Backoff, c.Delay, c.If, c.OnRetry, c.Budget = nil, nil, nil, nil, nil
	return c
}

// Update calls change, which must not use r, with the Config as it was given: a zero field means its
// default. If the result is not valid, Update returns the error of Validate and changes nothing. A
// call under way ends under the Config that it began with.
func (r *Retrier) Update(change func(*Config)) error { return r.setting.Update(change, sameName, nil) }

// Change is Update for whoever does not know Config. If dry is true, nothing changes.
func (r *Retrier) Change(dry bool, f func(cfg any) error) error {
	return r.setting.Change(dry, f, sameName, nil)
}
