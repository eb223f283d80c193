package retry

import (
	"cmp"
	"context"
	"time"

	"github.com/go-resilience/resilience/internal/invalid"
)

// Config says when, how often and for how long a [Retrier] retries.
type Config struct {
	// Name appears in errors and events. It may be empty.
	Name string

	// Attempts is the most often that a call runs fn, the first attempt included. An
	// attempt that a policy further in refuses counts. Zero means 3; a negative number
	// means no limit.
	Attempts int

	// MaxElapsed limits the time since the call of Do began: a wait that would pass it
	// is not begun. It does not end an attempt; AttemptTimeout does. Zero means no
	// limit but the deadline of ctx.
	MaxElapsed time.Duration

	// AttemptTimeout is how long each attempt may take: its ctx ends after that time.
	// An attempt that fails because of it is retried like any other, and its error is
	// context.DeadlineExceeded as well as what fn returned. Within a
	// resiliencehttp.Transport it also covers the body of the response. Zero means
	// none.
	AttemptTimeout time.Duration

	// Backoff returns the delays of one call: a new one each time, since it
	// has state. It is called when the first attempt of a call has failed, and once or
	// twice by Validate, New and Update. A negative delay ends the retrying; a panic
	// passes through. Nil means Exponential(100ms, 10s).
	Backoff func() Backoff

	// Delay returns the delay before the attempt that follows a, in place of a.Delay,
	// which comes from Backoff. Set it if the delay depends on the error or on ctx, or
	// comes from a list: list[a.Number-1]. A negative delay ends the retrying. RetryAfter
	// of the error still sets the least delay, and the limits of any wait hold. Nil means
	// a.Delay.
	Delay func(ctx context.Context, a Attempt) time.Duration

	// MaxRetryAfter is the longest wait that an error may ask for by its method
	// RetryAfter. An error that asks for more ends the retrying, since an earlier
	// attempt would be of no use.
	//
	// If MaxRetryAfter is set, a Retrier also waits for an open breaker (a refusal that
	// is not retryable, but says when it will be) that asks for no more than this. Zero
	// means a minute, and that an open breaker ends the retrying.
	MaxRetryAfter time.Duration

	// If reports whether a failure is worth another attempt. It is asked once for each
	// attempt that failed; it is not asked about a refusal, an answer or an error
	// marked by [Permanent], nor once ctx has ended. Nil means resilience.Retryable.
	If func(error) bool

	// Budget limits retries to a fraction of the calls. Share one among the retriers of
	// one dependency. Nil means no such limit. A registry shows it if it is added, beside
	// the retriers.
	Budget *Budget

	// BudgetFor returns the Budget of a call by its ctx, in place of Budget. Consider a
	// client of many hosts: with a Budget for each host, one that fails does not use up
	// the retries of the others. [BudgetGroup.By] returns such a function. It is called
	// when an attempt has succeeded or failed, perhaps more than once in a call, and must
	// be fast. A nil result means no such limit.
	BudgetFor func(context.Context) *Budget

	// OnRetry is called before each wait for another attempt, with the ctx of Do. It is
	// not called when no attempt is to follow.
	OnRetry func(context.Context, Attempt)
}

// An Attempt is one that failed, or was refused, and is to be followed by another.
type Attempt struct {
	Name        string        // of the Retrier
	Number      int           // of the attempt that failed, from 1
	Err         error         // the error of the attempt
	Delay       time.Duration // the wait before the next attempt
	RetryingFor time.Duration // the time since the first attempt failed
}

// Validate returns an error that names each invalid field, or nil.
func (c Config) Validate() error {
	f := invalid.Fields{Type: "retry.Config"}
	f.Need(c.MaxElapsed >= 0, "MaxElapsed", c.MaxElapsed, "0 (for no limit) or more")
	f.Need(c.AttemptTimeout >= 0, "AttemptTimeout", c.AttemptTimeout, "0 (for none) or more")
	f.Need(c.MaxRetryAfter >= 0, "MaxRetryAfter", c.MaxRetryAfter, "0 (for 1m) or more")
	f.Need(c.Budget == nil || c.BudgetFor == nil, "BudgetFor", "a function", "nil where Budget is set: one or the other")
	if c.Backoff == nil {
		return f.Err()
	}
	switch b := c.Backoff().(type) {
	case nil:
		f.Need(false, "Backoff", "a function that returns nil", "one that returns a new BackOff, or nil (for Exponential(100ms, 10s))")
	case *misuse:
		f.Need(false, "Backoff", b.what, b.want)
	}
	return f.Err()
}

// withDefaults returns c, which is valid, with its defaults filled in. MaxRetryAfter
// stays zero, which says more than a minute does.
func (c Config) withDefaults() Config {
	if c.Backoff == nil {
		c.Backoff = Exponential(defaultFirst, defaultLongest)
	}
	c.Attempts = cmp.Or(c.Attempts, 3)
	return c
}

// maxRetryAfter returns the longest wait that an error may ask for.
func (c *Config) maxRetryAfter() time.Duration { return cmp.Or(c.MaxRetryAfter, time.Minute) }

// Name returns the Name of r's Config.
func (r *Retrier) Name() string { return r.setting.Load().Name }

// Config returns the present Config of r, with its defaults filled in. MaxRetryAfter stays
// zero if it is, since zero also means that an open breaker ends the retrying.
func (r *Retrier) Config() Config { return r.setting.Config() }

// Update changes the Config of r: it calls change with the present Config as it was given, in
// which a zero field means its default, validates the result and makes it effective. If the
// result is not valid, Update returns the error of Validate and changes nothing.
//
// A call under way ends under the Config that it began with, its Budget included; a later
// call begins with the new one. The figures are kept. A new Budget starts with its own
// figures. The Name cannot change. change must not call r.
func (r *Retrier) Update(change func(*Config)) error {
	return r.setting.Update(change, (*Config).fixed, nil)
}

// Change is Update for a program that does not know the type of the configuration: f gets a
// pointer to it, as Update's change does. If f returns an error, or dry is true, nothing
// changes; dry returns the error that the change would have.
func (r *Retrier) Change(dry bool, f func(cfg any) error) error {
	return r.setting.Change(dry, f, (*Config).fixed, nil)
}

// fixed returns an error if Name has changed.
func (c *Config) fixed(next *Config) error {
	f := invalid.Fields{Type: "retry.Config"}
	f.Same("Name", c.Name, next.Name)
	return f.Err()
}
