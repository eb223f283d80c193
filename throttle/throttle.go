// Package throttle limits the rate at which a program makes or accepts calls, overall or for each tenant.
//
//	limit := throttle.New(throttle.Config{
//		Name:    "search",
//		Rate:    100,                   // tokens a second
//		Burst:   20,                    // tokens that calls may spend at the same moment
//		MaxWait: 50 * time.Millisecond, // the maximum time that a call waits for its tokens
//	})
//	err := limit.Do(ctx, func(ctx context.Context) error { return search(ctx, "go") })
//	if limited, ok := errors.AsType[*throttle.LimitedError](err); ok {
//		log.Printf("come back in %v", limited.RetryAfter()) // the call did not run
//	}
//
// A call takes one token, or the number of tokens that Config.Cost returns. A call spends its tokens even if it fails.
// If the cost of a call is known only after the call, use [Limiter.Reserve]. In any t seconds, a [Limiter] with a
// Rate gives calls at most Burst + Rate*t tokens, not counting refunded tokens. Quotas are additional limits for
// longer windows.
//
// A [Group] holds a limit for each of many keys:
//
//	perUser := throttle.NewGroup(throttle.GroupConfig[string]{
//		Config: throttle.Config{Name: "api", Rate: 10, Burst: 20},
//	})
//	err := perUser.Do(ctx, user, handle)
//
// [All] combines several limits: a call takes its tokens from all of them, or from none. Package fleet shares limits
// between processes. Package adaptive refuses calls that a server would probably reject.
//
// # A limit of zero
//
// A 0 in a configuration file may mean "nothing", as in a plan without e-mails, or it may mean "no limit". In a
// [Config], a zero Rate or Burst means neither "nothing" nor "no limit". Convert a 0 from a file to [None], which
// admits nothing, or to [Unlimited], which admits everything:
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
	"github.com/go-resilience/resilience/internal/refund"
	"github.com/go-resilience/resilience/internal/settings"
	"github.com/go-resilience/resilience/policy"
)

const (
	// Unlimited means that there is no limit. Unlimited is valid only for fields whose comment mentions Unlimited.
	Unlimited = -1

	// None means that nothing is admitted, except for calls whose cost is zero. None is valid only for fields whose
	// comment mentions None. If a field may be None or Unlimited, a function that is passed to Update must test for both
	// before it calculates with the field. None is a large negative number. Therefore a calculation such as Unlimited-1
	// does not result in None.
	None = -1 << 31
)

// Config configures a [Limiter].
type Config struct {
	// Name identifies the limit in errors, events and metrics, and in [Reservation.SettleEach]. Update cannot change
	// Name.
	Name string

	// Rate is the number of tokens a second, above 0 and at most 1e9; see [PerMinute]. The time between two tokens is
	// rounded up to a whole nanosecond. [None] admits nothing. [Unlimited] means that only Quotas, if there are any,
	// limit the calls. Zero means the same, but requires at least one quota. If a 0 from another source means "nothing",
	// convert the 0 to None.
	Rate float64

	// Burst is the number of tokens that calls may spend together after a pause. A new Limiter has a full burst. Zero
	// means the tokens of one second: Rate, rounded up. [None] admits nothing. If a 0 from another source means
	// "nothing", convert the 0 to None. The time in which a burst refills, which is Burst / Rate, must be at most 36
	// years. If Rate is zero or Unlimited, Burst must be 0.
	Burst int

	// Quotas limit the tokens of longer windows, such as a day. At most 8 quotas are allowed, and their windows must
	// differ. A call takes its tokens from the burst and from every quota, or takes no tokens. No call waits for a
	// quota.
	Quotas []Quota

	// MaxWait is the maximum time that a call waits for its tokens. Zero means that no call waits. [Unlimited] means
	// that a call waits until its ctx is done. Waiting calls are admitted in the order of their arrival, regardless of
	// their cost. If a call would have to wait for longer than MaxWait, or until after its deadline, the call is
	// refused immediately.
	MaxWait time.Duration

	// Cost returns the number of tokens that a call takes. Nil means 1. A call whose cost is zero or less is always
	// admitted. If a call costs more tokens than the burst or a quota can hold, the call is refused as [TooCostly].
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

// withDefaults returns c with its zero fields filled in. c must be valid.
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

// burst returns Burst, or its default if Burst is zero.
func (c Config) burst() int { return cmp.Or(c.Burst, int(math.Ceil(c.Rate))) }

// admitsNothing reports whether Rate or Burst is None.
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
	setting settings.Setting[Config] // the lock of setting is acquired before the lock of limit
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

// Do takes the tokens of a call, calls fn and returns the error of fn. If there are not enough tokens, Do waits for
// them for at most MaxWait. If the call is refused, Do returns a [*LimitedError]. If ctx is already done, Do returns
// an error that matches the error and the cause of ctx. If fn returns an error whose method Refused() bool returns
// true, an inner policy refused the call, and Do refunds the tokens.
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

// Wrap returns a function that calls [Limiter.Do](ctx, next).
func (l *Limiter) Wrap(next func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error { return l.Do(ctx, next) }
}

// Wait takes the tokens of a call in the same way as [Limiter.Do], but calls no function. Use Wait for work that is
// not a single function: the caller does the work after Wait has returned nil.
func (l *Limiter) Wait(ctx context.Context) error {
	_, err := l.hold(ctx, byCost)
	return err
}

// Admit is like [Limiter.Wait], but also returns the state of the limit after it has admitted or refused the call. A
// server can send the Decision in the headers of its response.
func (l *Limiter) Admit(ctx context.Context) (Decision, error) {
	h, err := l.hold(ctx, byCost)
	if err == nil {
		refund.Record(ctx, func() { l.settle(&l.meter, h, 0) })
	}
	return l.decision(&l.meter, err), err
}

// byCost is passed as a number of tokens. It represents the number that Cost returns.
const byCost = -1

// hold admits a call that takes n tokens. n may be byCost.
func (l *Limiter) hold(ctx context.Context, n int) (hold, error) {
	cfg := l.setting.Load()
	return l.enter(ctx, &l.meter, cfg, nil, n)
}

// Allow takes one token if the limit has a token, and reports whether it took the token. Allow does not wait, does
// not call Config.Cost and causes no event.
func (l *Limiter) Allow() bool { return l.allow(&l.meter, 1) }

// Reserve takes n tokens. If there are not enough tokens, Reserve waits for them in the same way as [Limiter.Do]. Use
// [Reservation.Settle] to correct the number of tokens later. Reserve returns an error if n is negative.
func (l *Limiter) Reserve(ctx context.Context, n int) (*Reservation, error) {
	if n < 0 {
		return nil, negative(l.setting.Load().Name, n)
	}
	return reserve(ctx, n, l)
}

// negative returns the error that Reserve returns for a negative number of tokens.
func negative(name string, n int) error {
	if name != "" {
		name += ": "
	}
	return fmt.Errorf("throttle: %sReserve of %d tokens: must be 0 or more", name, n)
}

// Stats returns the metrics of the limit.
func (l *limit) Stats() Stats {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.stats
	s.Refusals = maps.Clone(s.Refusals)
	return s
}

// Observe calls f with each event until stop is called. f runs on the goroutine of the call, before the call runs.
// The kinds of the events are EventRefused and EventWaited.
func (l *limit) Observe(f func(context.Context, Event)) (stop func()) {
	return l.observers.Observe(f)
}

// Config returns the configuration with defaults filled in.
func (l *Limiter) Config() Config { return l.setting.Config() }

// Update calls the function change with the effective configuration, and applies the result. If the result is invalid,
// Update changes nothing and returns an error. If the function does not alter a field, the field keeps its value or
// continues to follow its default. For example, a new Rate also changes the default of Burst. The function must not
// call methods of l, because Update holds a lock.
//
// Tokens that are already spent stay spent. For example, if 7 tokens are spent and Burst changes from 10 to 20, 13
// tokens remain. The spent tokens of a quota stay spent if the quota's window stays the same. While Rate or Burst is
// None, or Rate is Unlimited, the burst refills at the previous rate. If a rate or a quota was Unlimited and gets a
// limit, the tokens that calls took before do not count. A waiting call keeps its place and its MaxWait. If a
// waiting call costs more than the new Burst, the call waits until the rate has yielded all of the call's tokens.
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

// PerMinute converts a number of tokens a minute into a Rate. PerMinute returns [None] and [Unlimited] unchanged.
func PerMinute(n float64) float64 {
	if n == None || n == Unlimited {
		return n
	}
	return n / 60
}
