// Package throttle limits the rate at which calls are made or accepted, overall or for each tenant.
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
// Over any interval a [Limiter] admits at most Burst + Rate x interval tokens, apart from tokens that are
// given back, and what its quotas allow. A call spends its tokens even if it fails. If its cost is known only
// afterwards, use [Limiter.Reserve].
//
// A [Group] holds a limit for each of many keys, and [All] takes from several limits at once. Package fleet
// shares limits between processes; package adaptive sheds calls that a server would turn away.
//
// # A limit of zero
//
// A configuration file may contain a 0 that means "nothing", for a tier without e-mails, or "no limit". The zero
// value of a Config means neither, so convert it: [None] admits nothing, and [Unlimited] everything.
//
//	switch rate {
//	case 0:
//		cfg.Rate = throttle.None
//	case -1:
//		cfg.Rate = throttle.Unlimited
//	}
//
// Sources: Throttling (Cloud Design Patterns); the generic cell rate algorithm (ITU-T I.371), which is equivalent
// to a token bucket.
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

const (
	// Unlimited, in a field that accepts it, means that there is no limit.
	Unlimited = -1

	// None, in a field that accepts it, means a limit of nothing: no call is admitted, unless its cost is zero.
	// It is not Unlimited-1 or any other result of likely arithmetic. Before a function of Update calculates
	// with such a field, it must test for both.
	None = -1 << 31
)

// Config configures a [Limiter].
type Config struct {
	// Name appears in errors, events and metrics, and in [Reservation.SettleEach]. It cannot change.
	Name string

	// Rate is the number of tokens a second, above 0 and at most 1e9. The time of a token is rounded up to a
	// nanosecond. See [PerMinute]. Zero means that only Quotas, of which there must be one, limit the calls.
	// [None] admits nothing; [Unlimited] means that there is no limit apart from Quotas. A 0 from elsewhere that
	// means "nothing" must become None.
	Rate float64

	// Burst is how many tokens may be spent at once after a pause; New starts with a full burst. Zero means a
	// second's worth: Rate, rounded up. [None] admits nothing; a 0 from elsewhere that means "nothing" must become
	// None. A burst must refill within 36 years. Without a Rate, or with an Unlimited one, Burst must be 0.
	Burst int

	// Quotas limit the tokens of longer windows, such as a day; at most 8 of them, of different windows. A call
	// takes its tokens from the burst and from every quota, or from none. No call waits for a quota.
	Quotas []Quota

	// MaxWait is how long a call may wait for its tokens. Zero means that it does not wait; [Unlimited] means
	// until its ctx ends. Calls are admitted in order, whatever they cost. A call whose tokens cannot come in time
	// does not wait.
	MaxWait time.Duration

	// Cost returns how many tokens a call takes. Nil means 1. Zero or less is always admitted. A call that
	// costs more than the burst or a quota ever holds is refused as [TooCostly].
	Cost func(context.Context) int
}

// Validate returns an error that names each invalid field, or nil.
func (c Config) Validate() error {
	f := invalid.Fields{Type: "throttle.Config"}
	checkQuotas(&f, c.Quotas)
	f.Need(c.MaxWait >= 0 || c.MaxWait == Unlimited, "MaxWait", c.MaxWait, "0 or more, or throttle.Unlimited")
	switch {
	case c.Rate == Unlimited, c.Rate == 0 && len(c.Quotas) > 0:
		f.Need(c.Burst == 0, "Burst", c.Burst, "0 where there is no Rate")
	case c.Rate != None && !(c.Rate > 0 && c.Rate <= 1e9):
		f.Need(false, "Rate", c.Rate,
			"above 0 and at most 1e9 tokens a second, throttle.None to admit nothing, or throttle.Unlimited")
	case c.Burst < 0 && c.Burst != None:
		f.Need(false, "Burst", c.Burst, "0 (for a second's worth) or more, or throttle.None to admit nothing")
	case !c.admitsNothing():
		f.Need(float64(c.burst())/c.Rate <= maxTime.Seconds(), "Rate", c.Rate,
			fmt.Sprintf("enough to refill a Burst of %d within 36 years", c.burst()))
	}
	return f.Err()
}

// withDefaults returns a valid c with its zero fields filled in.
func (c Config) withDefaults() Config {
	if c.Rate > 0 {
		c.Burst = c.burst()
	}
	for i := range c.Quotas {
		w := c.Quotas[i].Window.calendar()
		c.Quotas[i].Window.In, c.Quotas[i].Window.From = w.In, w.From
	}
	return c
}

// burst returns the Burst, or its default if it is zero.
func (c Config) burst() int { return cmp.Or(c.Burst, int(math.Ceil(c.Rate))) }

// admitsNothing reports whether the rate of c admits nothing.
func (c Config) admitsNothing() bool { return c.Rate == None || c.Burst == None }

// cost returns the number of tokens that a call takes.
func (c *Config) cost(ctx context.Context) int {
	if c.Cost == nil {
		return 1
	}
	return max(0, c.Cost(ctx))
}

// A Limiter limits the rate of calls. It is safe for concurrent use.
type Limiter struct {
	limit
	meter   meter
	setting settings.Setting[Config] // its lock is taken before that of limit
}

// New returns a Limiter with a full burst. It panics if cfg is invalid; see [Config.Validate].
func New(cfg Config) *Limiter {
	l := &Limiter{limit: limit{stats: newStats()}}
	l.setting.Init(cfg, Config.withDefaults, func(c *Config) { c.Quotas = slices.Clone(c.Quotas) })
	l.use(l.setting.Load())
	return l
}

// use makes cfg the current configuration.
func (l *Limiter) use(cfg *Config) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.applyConfig(cfg, &l.meter)
}

// Do takes the tokens of a call, waiting for them if it may, then runs fn and returns its error. It returns a
// [*LimitedError] if it refuses the call, and the error of ctx if that had already ended. If a policy within fn
// refused the call, the tokens are given back.
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

// Wrap returns a function that runs next under Do.
func (l *Limiter) Wrap(next func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error { return l.Do(ctx, next) }
}

// Wait is [Limiter.Do] for work that is not a single function.
func (l *Limiter) Wait(ctx context.Context) error {
	_, err := l.hold(ctx, byCost)
	return err
}

// Admit is [Limiter.Wait] that also returns what is left of the limit, for the headers of a response.
func (l *Limiter) Admit(ctx context.Context) (Decision, error) {
	_, err := l.hold(ctx, byCost)
	return l.decision(&l.meter, err), err
}

// byCost stands for the number of tokens that Cost returns.
const byCost = -1

// hold admits a call that takes n tokens.
func (l *Limiter) hold(ctx context.Context, n int) (hold, error) {
	cfg := l.setting.Load()
	return l.enter(ctx, &l.meter, cfg, nil, n)
}

// Allow takes one token if there is one, and reports whether it did. It does not wait, call Config.Cost or
// cause an event.
func (l *Limiter) Allow() bool { return l.allow(&l.meter, 1) }

// Reserve takes n tokens, waiting for them as Do does. [Reservation.Settle] later corrects how many were used. A
// negative n is an error.
func (l *Limiter) Reserve(ctx context.Context, n int) (*Reservation, error) {
	if n < 0 {
		return nil, negative(l.setting.Load().Name, n)
	}
	return reserve(ctx, n, l)
}

// negative returns the error of Reserve for a negative number of tokens.
func negative(name string, n int) error {
	if name != "" {
		name += ": "
	}
	return fmt.Errorf("throttle: %sReserve of %d tokens: must be 0 or more", name, n)
}

// Stats returns the metrics.
func (l *limit) Stats() Stats {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.stats
	s.Refusals = maps.Clone(s.Refusals)
	return s
}

// Observe calls f with each event until stop is called, on the goroutine of the call and before the call runs. The
// kinds are EventRefused and EventWaited.
func (l *limit) Observe(f func(context.Context, Event)) (stop func()) {
	return l.observers.Observe(f)
}

// Config returns the configuration with defaults filled in.
func (l *Limiter) Config() Config { return l.setting.Config() }

// Update calls change with the effective configuration and applies the result. If that is invalid, nothing
// changes. A field that change leaves as it is shown continues to follow its default: a new Rate brings a new
// Burst, unless Burst was set or is set to something new. Spent tokens stay spent, those of a quota if its window
// stays the same: if 7 of 10 are gone, 13 of 20 are left. A waiting call keeps its place and its MaxWait. change
// must not use l.
func (l *Limiter) Update(change func(*Config)) error {
	return l.setting.Update(change, sameName, l.use)
}

// sameName returns an error if an update changes the name.
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
		InUse:   func() bool { return !l.idle(&l.meter) },
	}
}

// PerMinute converts a number of tokens a minute into a Rate. It keeps [None] and [Unlimited] as they are.
func PerMinute(n float64) float64 {
	if n == None || n == Unlimited {
		return n
	}
	return n / 60
}
