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
// What to know:
//
//   - Over any interval a [Limiter] admits at most Burst + Rate x interval tokens,
//     whatever the number of goroutines. It starts with a full burst.
//   - A call spends one token, or the number that Cost returns. A call that fails has
//     spent its tokens all the same, unless a policy further in refused it: then nothing
//     was sent, and [Limiter.Do] gives them back.
//   - [Limiter.Reserve] is for a call whose cost is known only when it has ended: it takes
//     an estimate, and [Reservation.Settle] corrects it, into debt if need be.
//   - A Limiter may have quotas besides its rate: 1000 tokens a day, 10 000 a month of a
//     customer. A call takes its tokens from all of them or from none. See [Quota].
//   - A refused call learns from [LimitedError.RetryAfter] when to come back.
//   - With a MaxWait, a call waits for its tokens behind all calls that came before. A
//     call that could not get its tokens in time is refused immediately.
//
// A [Group] holds a limit for each of many tenants. [All] takes from several limits or from
// none. Package fleet has limits for many processes, kept in Redis; package adaptive stops a
// client from sending calls that the server would turn away.
//
// Source: Throttling in the Cloud Design Patterns catalog
// (https://learn.microsoft.com/azure/architecture/patterns/throttling). The
// algorithm is the generic cell rate algorithm in its virtual scheduling form
// (ITU-T I.371), which is equivalent to a token bucket.
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
	"github.com/go-resilience/resilience/internal/describe"
	"github.com/go-resilience/resilience/internal/invalid"
	"github.com/go-resilience/resilience/internal/settings"
	"github.com/go-resilience/resilience/throttle/internal/figures"
)

// Config says how a [Limiter] works.
type Config struct {
	// Name appears in errors, events and figures. Optional.
	Name string

	// Rate is the number of tokens a second: above 0, at most 1e9. It is required,
	// unless there are Quotas: then zero means that only these limit. [PerMinute]
	// helps. The time of a token is rounded up to a whole nanosecond, so that a rate is
	// never higher; above a million a second it is lower by more than a thousandth.
	Rate float64

	// Burst is how many tokens may be spent at once after a pause. Zero means a
	// second's worth: Rate, rounded up. A Burst must refill within 36 years.
	Burst int

	// Quotas bound the tokens of longer times, such as a day: at most 8, each for another
	// window. A call takes its tokens from the Burst and from each quota, or from none of
	// them. A call that finds too few tokens in a quota is refused immediately, whatever
	// MaxWait is: [OverQuota]. A call that waits for the Rate takes its tokens from the
	// quotas when it begins to wait, so it counts in the windows of that time.
	Quotas []Quota

	// MaxWait is how long a call may wait for its tokens. Zero means that a call
	// without tokens is refused immediately, negative that it may wait until its ctx
	// ends. Who came first is admitted first, also if it needs more tokens than those
	// behind it; whoever gives up moves up those behind. Waiting calls are admitted on a
	// schedule that follows the rate: if a timer is late, all calls that are due are
	// admitted together.
	MaxWait time.Duration

	// Cost returns how many tokens a call takes. Nil means 1. A call of cost 0 is always
	// admitted. A negative cost counts as 0. A call that costs more than the Burst or the
	// N of a quota is refused immediately: [TooCostly].
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

// A Limiter admits calls at a limited rate. It is safe for concurrent use. [New]
// makes one.
type Limiter struct {
	limit
	meter   meter
	setting settings.Setting[Config] // whose lock is taken before that of limit
}

// New returns a Limiter with a full burst. It panics with the error of
// cfg.Validate, if there is one.
func New(cfg Config) *Limiter {
	l := &Limiter{}
	l.setting.Init(cfg, Config.withDefaults, func(c *Config) { c.Quotas = slices.Clone(c.Quotas) })
	l.use(l.setting.Load())
	return l
}

func (l *Limiter) use(cfg *Config) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.follow(cfg, &l.meter)
}

// Do takes the tokens of a call, runs fn and returns its error. Without tokens the
// call waits, if MaxWait allows it. Otherwise Do returns a [*LimitedError] and does
// not run fn. If ctx has already ended, Do returns why. If a policy within fn refused the
// call, Do gives the tokens back.
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

// Wrap returns a function that runs next as [Limiter.Do] does.
func (l *Limiter) Wrap(next func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error { return l.Do(ctx, next) }
}

// Wait takes the tokens of a call as [Limiter.Do] does, for work that is not one
// function. With a MaxWait of 0 it admits or refuses the call immediately.
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

// Allow takes a token if there is one, and reports whether it did. It does not wait, does
// not call Cost, and causes no event.
func (l *Limiter) Allow() bool { return l.allow(&l.meter, 1) }

// Reserve takes n tokens, or none if n is below 0, and waits for them as [Limiter.Do]
// does. [Reservation.Settle] says how many were used.
func (l *Limiter) Reserve(ctx context.Context, n int) (*Reservation, error) {
	return reserve(ctx, max(0, n), l)
}

// Stats returns a snapshot.
func (l *limit) Stats() Stats {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.stats
	s.Refusals = maps.Clone(s.Refusals)
	return s
}

// Observe calls f with each event from now on, until stop is called: synchronously, with
// the ctx of the call, and while no lock is held. The kinds are EventRefused, and
// EventWaited, before the function of the call runs. A panic in f passes on to the caller. A
// second call of stop does nothing.
func (l *limit) Observe(f func(context.Context, Event)) (stop func()) {
	return l.observers.Observe(f)
}

// ObserveAny is Observe for who does not know the type of the events.
func (l *limit) ObserveAny(f func(context.Context, any)) (stop func()) {
	return l.Observe(func(ctx context.Context, e Event) { f(ctx, e) })
}

// Kind returns "throttle".
func (l *limit) Kind() string { return "throttle" }

// Name returns the Name of the Config.
func (l *Limiter) Name() string { return l.setting.Load().Name }

// Config returns the present Config, with its defaults filled in.
func (l *Limiter) Config() Config { return l.setting.Config() }

// Update changes the configuration. It calls change with the Config as it was given: a zero
// field means its default. If the result is invalid, Update returns the error and changes
// nothing.
//
//   - Tokens that have been spent stay spent. If 7 of 10 tokens are gone, then 7 of 20 are
//     gone as well, which leaves 13, and they refill at the new rate. What has been spent of
//     a quota stays spent if there is still a quota with the same window, whatever its N.
//   - A waiting call keeps its place and its MaxWait, and waits as long as the
//     new rate requires. It is admitted even if it takes more than the new Burst.
//   - Calls under way end under the Config with which they began. Counters go on.
//   - Name cannot change.
//
// Updates are made one after the other. change must not use the Limiter.
func (l *Limiter) Update(change func(*Config)) error {
	return l.setting.Update(change, sameName, l.use)
}

func sameName(was, next *Config) error {
	f := invalid.Fields{Type: "throttle.Config"}
	f.Same("Name", was.Name, next.Name)
	return f.Err()
}

// Settings returns a copy of the Config, with its defaults filled in and without Cost.
func (l *Limiter) Settings() any {
	c := l.Config()
	c.Cost = nil
	return c
}

// Change is [Limiter.Update] for who does not know the type: f gets a *Config. If f returns an
// error or dry is true, nothing changes.
func (l *Limiter) Change(dry bool, f func(cfg any) error) error {
	return l.setting.Change(dry, f, sameName, l.use)
}

// Figures returns what [Limiter.Stats] counts of calls.
func (l *Limiter) Figures() []describe.Figure { return l.Stats().figures() }

func (t Totals) figures() []describe.Figure {
	return figures.Calls(t.Admitted, t.Refusals,
		OverLimit, OverQuota, WaitTooLong, DeadlineTooClose, ContextEnded, TooCostly)
}

// PerMinute returns the [Config] Rate of n tokens a minute.
func PerMinute(n float64) float64 { return n / 60 }
