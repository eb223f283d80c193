// Package throttle limits the rate at which calls are made or accepted, in all or for
// each tenant.
//
//	limit := throttle.New(throttle.Config{
//		Name:    "search",
//		Rate:    100,                   // tokens a second
//		Burst:   20,                    // tokens that may be spent at once
//		MaxWait: 50 * time.Millisecond, // how long a call may wait for its tokens
//	})
//	err := limit.Do(ctx, func(ctx context.Context) error { return search(ctx, "go") })
//	if limited, ok := errors.AsType[*throttle.LimitedError](err); ok {
//		log.Printf("come back in %v", limited.RetryAfter()) // the call was not made
//	}
//
// Over any interval a [Limiter] admits at most Burst + Rate x interval tokens, but for what is given
// back, and what its quotas allow. A call spends its tokens also if it fails. [Limiter.Reserve] is for
// a call whose cost is known only when it has ended.
//
// A [Group] holds a limit for each of many tenants. [All] takes from several limits or from
// none. Package fleet has limits for many processes, kept in Redis; package adaptive stops a
// client from sending calls that the server would turn away.
//
// Sources: Throttling (Cloud Design Patterns); the generic cell rate algorithm (ITU-T I.371), which
// is equivalent to a token bucket.
package throttle

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/internal/invalid"
	"github.com/go-resilience/resilience/internal/settings"
	"github.com/go-resilience/resilience/policy"
)

// Config says how a [Limiter] works.
type Config struct {
	// Name appears in errors, events and figures. It cannot change.
	Name string

	// Rate is the number of tokens a second: above 0, at most 1e9. Zero, where there are
	// Quotas, means that only these limit. The time of a token is rounded up to a
	// nanosecond. See [PerMinute].
	Rate float64

	// Burst is how many tokens may be spent at once after a pause; New starts with a full
	// one. Zero means a second's worth: Rate, rounded up. It must refill within 36 years.
	Burst int

	// Quotas, at most 8 of different windows, bound the tokens of longer times, such as a day. A call
	// takes its tokens from the Burst and from each quota, or from none. No call waits for a quota.
	Quotas []Quota

	// MaxWait is how long a call may wait for its tokens: zero means not at all, negative until its
	// ctx ends. The first to come is admitted first, whatever it costs. A call whose tokens cannot
	// come in time does not wait.
	MaxWait time.Duration

	// Cost returns how many tokens a call takes; below 0 counts as 0, which is always
	// admitted. Nil means 1. A call that costs more than the Burst or the N of a quota is
	// refused: [TooCostly].
	Cost func(context.Context) int
}

// Validate returns an error that names each invalid field, or nil.
func (c Config) Validate() error {
	f := invalid.Fields{Type: "throttle.Config"}
	checkQuotas(&f, c.Quotas)
	switch burst := c.burst(); {
	case c.Rate == 0 && len(c.Quotas) > 0:
		f.Need(c.Burst == 0, "Burst", c.Burst, "0 where there is no Rate")
	case !(c.Rate > 0 && c.Rate <= 1e9):
		f.Need(false, "Rate", c.Rate, "above 0 and at most 1e9 tokens a second")
	case c.Burst < 0:
		f.Need(false, "Burst", c.Burst, "0 (for a second's worth) or more")
	default:
		f.Need(float64(burst)/c.Rate <= maxTime.Seconds(), "Rate", c.Rate,
			fmt.Sprintf("enough to refill a Burst of %d within 36 years", burst))
	}
	return f.Err()
}

// withDefaults returns a valid c with its zero fields filled in.
func (c Config) withDefaults() Config {
	if c.Rate != 0 {
		c.Burst = c.burst()
	}
	for i := range c.Quotas {
		w := c.Quotas[i].window()
		c.Quotas[i].In, c.Quotas[i].From = w.In, w.From
	}
	return c
}

// burst returns the Burst, or its default if it is zero.
func (c Config) burst() int { return cmp.Or(c.Burst, int(math.Ceil(c.Rate))) }

// cost returns the tokens of a call.
func (c *Config) cost(ctx context.Context) int {
	if c.Cost == nil {
		return 1
	}
	return max(0, c.Cost(ctx))
}

// A Limiter admits calls at a limited rate. It is safe for concurrent use.
type Limiter struct {
	limit
	meter   meter
	setting settings.Setting[Config] // whose lock is taken before that of limit
}

// New panics if cfg is not valid.
func New(cfg Config) *Limiter {
	l := &Limiter{limit: limit{stats: newStats()}}
	l.setting.Init(cfg, Config.withDefaults, func(c *Config) { c.Quotas = slices.Clone(c.Quotas) })
	l.use(l.setting.Load())
	return l
}

func (l *Limiter) use(cfg *Config) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.follow(cfg, &l.meter)
}

// Do takes the tokens of a call, perhaps after a wait, runs fn and returns its error; or it returns a
// [*LimitedError], or why ctx had ended before. If a policy within fn refused the call, Do gives the
// tokens back, since nothing was sent.
func (l *Limiter) Do(ctx context.Context, fn func(context.Context) error) error {
	h, err := l.hold(ctx, byCost)
	if err != nil {
		return err
	}
	err = fn(ctx)
	if behavior.IsRefused(err) {
		l.settle(&l.meter, h, 0)
	}
	return err
}

func (l *Limiter) Wrap(next func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error { return l.Do(ctx, next) }
}

// Wait is [Limiter.Do] for work that is not one function.
func (l *Limiter) Wait(ctx context.Context) error {
	_, err := l.hold(ctx, byCost)
	return err
}

// Admit is [Limiter.Wait] that returns what is left.
func (l *Limiter) Admit(ctx context.Context) (Decision, error) {
	_, err := l.hold(ctx, byCost)
	return l.decision(&l.meter, err), err
}

// byCost is the number of tokens of a call that takes what Cost says.
const byCost = -1

func (l *Limiter) hold(ctx context.Context, n int) (hold, error) {
	cfg := l.setting.Load()
	return l.enter(ctx, &l.meter, cfg, nil, n)
}

// Allow takes a token if there is one, and reports whether it did. It does not wait or call
// Cost, and causes no event.
func (l *Limiter) Allow() bool { return l.allow(&l.meter, 1) }

// Reserve takes n tokens, or none if n is below 0, and waits for them as Do does.
// [Reservation.Settle] says how many were used.
func (l *Limiter) Reserve(ctx context.Context, n int) (*Reservation, error) {
	return reserve(ctx, max(0, n), l)
}

func (l *limit) Stats() Stats {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.stats
	s.Refusals = maps.Clone(s.Refusals)
	return s
}

// Observe calls f with each event, on the goroutine of the call, until stop is called. The kinds
// are EventRefused, and EventWaited, before the function of the call runs.
func (l *limit) Observe(f func(context.Context, Event)) (stop func()) {
	return l.observers.Observe(f)
}

// Config returns the configuration with defaults filled in.
func (l *Limiter) Config() Config { return l.setting.Config() }

// Update calls change, which must not use the Limiter, with the Config as it was given: a zero field
// means its default. If the result is not valid, nothing changes. Tokens that have been spent stay
// spent until the new Rate has paid for them, those of a quota if its window is the same: if 7 of 10
// are gone, 13 of 20 are left. A waiting call keeps its place and its MaxWait.
func (l *Limiter) Update(change func(*Config)) error {
	return l.setting.Update(change, sameName, l.use)
}

func sameName(was, next *Config) error {
	return invalid.Renamed("throttle.Config", was.Name, next.Name)
}

var (
	_ policy.Describer = (*Limiter)(nil)
	_ policy.Describer = (*Group[string])(nil)
)

// Describe implements [policy.Describer].
func (l *Limiter) Describe() policy.Description {
	return policy.Description{
		Kind:    "throttle",
		Name:    l.setting.Load().Name,
		Metrics: func() []policy.Metric { return policy.Metrics("throttle", l.Stats()) },
		Config:  func() any { return l.Config() },
		Update: func(dryRun bool, change func(cfg any) error) error {
			return l.setting.Change(dryRun, change, sameName, l.use)
		},
		Observe: policy.Events(l.Observe, Event.describe),
	}
}

// PerMinute returns the Rate of n tokens a minute.
func PerMinute(n float64) float64 { return n / 60 }
