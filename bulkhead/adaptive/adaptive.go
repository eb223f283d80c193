// Package adaptive is a bulkhead that finds its limit by the latency of its calls: while they
// take no longer than on an idle server, the limit grows with its use; once they queue there, it
// shrinks.
//
//	slots := adaptive.New(adaptive.Config{
//		Bulkhead: bulkhead.Config{Name: "users", MaxWait: 100 * time.Millisecond},
//		Max:      200,
//	})
//	err := slots.Do(ctx, func(ctx context.Context) error { return fetchUser(ctx, 42) })
//
// A call that succeeds, or that the dependency answered with no, is a sample of the latency: for a
// response, of the time to its headers. One that ran out of time, was turned away to shed load, or
// was told when to come back is a sample of at least four times the latency of an idle server, and
// so is a body that breaks off for lack of time. One that hangs counts as long as it has run once
// ten times the usual latency has passed. Other errors, refusals further in, panics and callers
// who leave say nothing.
//
// To learn the latency of an idle server, the limit is lowered for a few latencies, 150 ms at the
// least, so far that no call waits there: at each multiple of 10 s of Unix time while the limit is
// reached (100 latencies, if that is more), a second after what is known has changed, and when
// latency stays high although the limit shrinks. Such a probe ends for nobody: a call that costs
// more than Min may be refused as too costly.
//
// If calls that run for long, such as streams, hold all of the limit, and none has begun or ended
// for ten latencies (100 ms at the least), it grows slot by slot until the next call fits: to what
// it was lately, and by the slots of responses that are still being read.
//
// Each process has a limit of its own. Ten and more whose clocks are seconds apart, or some tens
// beside clients without a limit, may let a long queue stand: give these a Max that the server can
// bear. Of an overloaded server, processes whose calls are shortest get least, perhaps next to
// nothing. For a server that works on fewer than about ten calls at once use a fixed Limit.
package adaptive

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/invalid"
	"github.com/go-resilience/resilience/internal/linger"
	"github.com/go-resilience/resilience/internal/settings"
	"github.com/go-resilience/resilience/policy"
)

// Config says how a [Bulkhead] works.
type Config struct {
	// Bulkhead is everything but the limit. Its Limit must be 0.
	Bulkhead bulkhead.Config

	// Initial is the first limit, to which one that is little used shrinks; zero means 20, or
	// Min or Max if these exclude 20.
	Initial int

	// Min and Max bound the limit: 1 to 1 073 741 823; zero means 1, and 1000 or Min if that
	// is more.
	Min, Max int

	// Tolerance is how long a call may wait at the server, as a fraction of the mean latency of
	// an idle one: above 0 to 10; zero means 0.25. A higher one refuses less.
	Tolerance float64
}

func (c Config) withDefaults() Config {
	c.Min = cmp.Or(c.Min, 1)
	c.Max = cmp.Or(c.Max, max(1000, c.Min))
	c.Initial = cmp.Or(c.Initial, min(max(20, c.Min), c.Max))
	c.Tolerance = cmp.Or(c.Tolerance, 0.25)
	return c
}

// effective returns c, which is valid, with all defaults filled in.
func (c Config) effective() Config {
	slots := bulkhead.New(c.slots(1)).Config()
	slots.Limit, slots.Cost = 0, c.Bulkhead.Cost
	c.Bulkhead = slots
	return c.withDefaults()
}

// Validate returns an error that names each invalid field, or nil.
func (c Config) Validate() error {
	const most = 1<<30 - 1
	f := invalid.Fields{Type: "adaptive.Config"}
	d := c.withDefaults()
	f.Need(c.Bulkhead.Limit == 0, "Bulkhead.Limit", c.Bulkhead.Limit, "0: Initial, Min and Max bound the limit")
	f.Need(c.Min >= 0 && c.Min <= most, "Min", c.Min, fmt.Sprintf("0 (for 1) to %d", most))
	f.Need(c.Max >= 0 && c.Max <= most, "Max", c.Max, fmt.Sprintf("0 (for 1000) to %d", most))
	f.Need(d.Min <= d.Max, "Min", c.Min, "no more than Max")
	f.Need(d.Initial >= d.Min && d.Initial <= d.Max, "Initial", c.Initial, "0 (for 20), or within Min and Max")
	f.Need(c.Tolerance >= 0 && c.Tolerance <= 10, "Tolerance", c.Tolerance, "0 (for 0.25), or above 0 to 10")
	return errors.Join(f.Err(), c.slots(1).Validate())
}

type costKey struct{}

// slots returns the Config of the bulkhead with a limit. Its Cost is what enter has found, since
// the caller's is asked once.
func (c Config) slots(limit int) bulkhead.Config {
	s := c.Bulkhead
	s.Limit = limit
	s.Cost = func(ctx context.Context) int { return ctx.Value(costKey{}).(int) }
	return s
}

// A Bulkhead is a [bulkhead.Bulkhead] whose limit follows the latency of its calls.
type Bulkhead struct {
	setting settings.Setting[Config]
	slots   *bulkhead.Bulkhead
	born    time.Time

	mu      sync.Mutex // taken after the lock of setting, and before those of slots
	control controller
	limit   int  // of slots
	taken   int  // slots, of calls and of responses that are still being read
	reading int  // the latter, of calls that were answered
	asking  int  // calls that ask for slots
	looking bool // makeRoom looks again soon
}

// New panics if cfg is not valid.
func New(cfg Config) *Bulkhead {
	b := &Bulkhead{}
	b.setting.Init(cfg, Config.effective)
	b.control = newController(*b.setting.Load())
	b.born, b.limit = time.Now(), b.control.Limit()
	b.slots = bulkhead.New(cfg.slots(b.limit))
	return b
}

// Do is as [bulkhead.Bulkhead.Do].
func (b *Bulkhead) Do(ctx context.Context, fn func(context.Context) error) error {
	c, err := b.enter(ctx)
	if err != nil {
		return err
	}
	work, how := linger.WorkOf(ctx), silent // stays so if fn panics
	err = work.Hold(ctx, func(ctx context.Context) error {
		defer func() { b.end(c, how) }()
		err := fn(ctx)
		how = resultOf(ctx, err)
		return err
	}, func(err error) { b.leave(c, how, err) }, nil)
	if err == nil {
		work.OnEnd(b.brokeOff)
	}
	return err
}

func (b *Bulkhead) Wrap(next func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error { return b.Do(ctx, next) }
}

// Begin is as [bulkhead.Bulkhead.Begin].
func (b *Bulkhead) Begin(ctx context.Context) (done func(error), err error) {
	c, err := b.enter(ctx)
	if err != nil {
		return nil, err
	}
	var over atomic.Bool
	return func(err error) {
		if !over.Swap(true) {
			how := silent // stays so if a method of err panics
			defer func() {
				b.end(c, how)
				b.leave(c, how, err)
			}()
			how = resultOf(ctx, err)
		}
	}, nil
}

// An admitted is a call that has its slots.
type admitted struct {
	cost int
	free func(error) // gives them back
	call call
}

// enter waits for the slots of a call.
func (b *Bulkhead) enter(ctx context.Context) (c admitted, err error) {
	if ctx.Err() != nil {
		return c, ended.Error(ctx)
	}
	c.cost = 1
	if cost := b.setting.Load().Bulkhead.Cost; cost != nil {
		c.cost = max(cost(ctx), 0)
	}
	b.mu.Lock()
	b.asking++
	if c.cost > 0 && b.taken+c.cost > b.limit {
		b.makeRoom()
	}
	b.mu.Unlock()
	defer func() { // also if Priority panics
		b.mu.Lock()
		defer b.mu.Unlock()
		b.asking--
		if c.free != nil && c.cost > 0 {
			b.taken += c.cost
			c.call = b.control.begin(b.now(), b.taken)
			b.apply()
		}
	}()
	c.free, err = b.slots.Begin(context.WithValue(ctx, costKey{}, c.cost))
	return c, err
}

// end notes the end of a call, whose response may still be read until leave.
func (b *Bulkhead) end(c admitted, how result) {
	if c.cost == 0 {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if how == answered {
		b.reading += c.cost
	}
	b.control.end(c.call, b.now(), how)
	b.apply()
}

// leave gives the slots of a call back that has ended.
func (b *Bulkhead) leave(c admitted, how result, err error) {
	b.mu.Lock()
	b.taken -= c.cost
	if how == answered {
		b.reading -= c.cost
	}
	b.mu.Unlock()
	c.free(err)
}

// brokeOff notes the end of a call's work. If it broke off for lack of time, that is one more
// sample.
func (b *Bulkhead) brokeOff(err error) {
	if resultOf(context.Background(), err) != overran {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.control.sample(0, overran)
}

// makeRoom has the limit raised beside slots that are held for long, and again while a call asks:
// if all wait, none comes to do it. b.mu is held.
func (b *Bulkhead) makeRoom() {
	b.control.makeRoom(b.now(), b.taken, b.reading)
	b.apply()
	if !b.looking {
		b.looking = true
		time.AfterFunc(cohortTime, func() {
			b.mu.Lock()
			defer b.mu.Unlock()
			b.looking = false
			if b.asking > 0 {
				b.makeRoom()
			}
		})
	}
}

// resultOf returns what the end of a call made under ctx says of the load.
func resultOf(ctx context.Context, err error) result {
	switch end := behavior.ReadUnder(ctx, err); end.Kind {
	case behavior.Done, behavior.Answered:
		return answered
	case behavior.Overran:
		return overran
	case behavior.Failed:
		if end.Throttled || end.RetryAfter > 0 || behavior.IsTimeout(err) {
			return overran
		}
	}
	return silent
}

// apply makes the limit of slots that of control. b.mu is held.
func (b *Bulkhead) apply() {
	if n := b.control.Limit(); n != b.limit {
		b.limit = n
		_ = b.slots.Update(func(c *bulkhead.Config) { c.Limit = n }) // within Min and Max
	}
}

// now returns the Unix time, which no change of the clock sets back.
func (b *Bulkhead) now() time.Duration {
	return time.Duration(b.born.UnixNano()) + time.Since(b.born)
}

// Update is as [bulkhead.Bulkhead.Update]. The limit keeps what it has learned, and a probe under
// way ends.
func (b *Bulkhead) Update(change func(*Config)) error {
	return b.setting.Update(change, b.allow, b.applyConfig)
}

func (b *Bulkhead) allow(_, next *Config) error { return b.change(true, next, 1) }

func (b *Bulkhead) applyConfig(next *Config) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.control.update(b.now(), *next)
	b.limit = b.control.Limit()
	_ = b.change(false, next, b.limit) // allowed
}

// change makes the Config of slots that of next.
func (b *Bulkhead) change(dry bool, next *Config, limit int) error {
	return b.slots.Describe().Update(dry, func(cfg any) error {
		*cfg.(*bulkhead.Config) = next.slots(limit)
		return nil
	})
}

// Config has its defaults filled in.
func (b *Bulkhead) Config() Config { return b.setting.Config() }

// Stats is a snapshot of a [Bulkhead].
type Stats struct {
	bulkhead.Stats

	Latency time.Duration // of the last calls that were looked at: the geometric mean
	Base    time.Duration // of an idle server; 0: not known yet
	Probing bool          // the limit is lowered to learn Base
}

func (b *Bulkhead) Stats() Stats {
	b.mu.Lock()
	defer b.mu.Unlock()
	c := &b.control
	s := Stats{Stats: b.slots.Stats(), Probing: c.lowered()}
	if c.base.known {
		s.Latency, s.Base = time.Duration(math.Exp(c.latency)), time.Duration(math.Exp(c.base.log))
	}
	return s
}

// Observe is like [bulkhead.Bulkhead.Observe].
func (b *Bulkhead) Observe(f func(context.Context, bulkhead.Event)) (stop func()) {
	return b.slots.Observe(f)
}

// Describe implements [policy.Describer], as [bulkhead.Bulkhead.Describe] does: the kind is the same.
func (b *Bulkhead) Describe() policy.Description {
	d := b.slots.Describe()
	d.Config = func() any { return b.Config() }
	d.Update = func(dryRun bool, change func(cfg any) error) error {
		return b.setting.Change(dryRun, change, b.allow, b.applyConfig)
	}
	return d
}
