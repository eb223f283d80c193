// Package adaptive provides a bulkhead that finds its limit by the latency of its calls. While they take no longer
// than on an idle server, the limit grows with its use; once they queue there, it shrinks.
//
//	slots := adaptive.New(adaptive.Config{
//		Bulkhead: bulkhead.Config{Name: "users", MaxWait: 100 * time.Millisecond},
//		Max:      200,
//	})
//	err := slots.Do(ctx, func(ctx context.Context) error { return fetchUser(ctx, 42) })
//
// Use it instead of package bulkhead where the capacity of the server is not known, changes, or is shared with other
// clients. If the server can work on fewer calls than a fixed limit admits, calls queue in the server, and no order of
// the bulkhead's queue helps: callers give up before the server gets to their calls. The queue of this package works
// as that of package bulkhead does, also under overload.
//
// # Samples
//
// A call that succeeds, or whose error is an answer (Answered() bool), is a sample of the latency; for a response, of
// the time to its headers. A call that ran out of time, was throttled, or has a RetryAfter
// is a sample of at least four times the latency of an idle server. So is a response body that is cut off for
// lack of time. A call that hangs counts with the time that it has run once ten times the usual latency has passed.
// Other errors, refusals of inner policies, panics and cancellations by the caller are no samples.
//
// # Probes
//
// To learn the latency of an idle server, the limit is lowered for a few latencies, at least 150ms, until no call waits
// there. Such a probe starts at each multiple of 10s of Unix time while the limit is reached (100 latencies, if that is
// more), a second after the known latency has changed, and when the latency stays high although the limit shrinks.
// During a probe, a call that costs more than Min may be refused as too costly.
//
// If long calls, such as streams, hold the whole limit, and none has started or ended for ten latencies (at least
// 100ms), the limit grows slot by slot until the next call fits. It grows to its recent values at most, plus the slots
// of responses that are still being read.
//
// # Limits
//
// Each process has its own limit. Ten or more processes whose clocks differ by seconds, or several dozen next to
// clients without a limit, may let a long queue stand: give them a Max that the server can bear. If processes overload
// a server, those with the shortest calls get the fewest slots, possibly almost none. For a server that works on fewer
// than about ten calls at the same time, use package bulkhead.
//
// # Stability
//
// This package is unstable until version 1.0.0: a minor version may change it.
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

// Config configures a [Bulkhead].
type Config struct {
	// Bulkhead is the configuration of everything except the limit. Its Limit must be 0.
	Bulkhead bulkhead.Config

	// Initial is the first limit. A limit that is not used shrinks to it. Zero means 20, or Min or Max if these exclude
	// 20.
	Initial int

	// Min is the lowest limit, at most 1<<30 - 1. Zero means 1.
	Min int

	// Max is the highest limit, at most 1<<30 - 1. Zero means 1000, or Min if that is more.
	Max int

	// Tolerance is how long a call may wait at the server, as a fraction of the mean latency of an idle server, at most
	// 10. Zero means 0.25. A higher Tolerance refuses fewer calls.
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

// slots returns the Config of the bulkhead with a limit. Its Cost returns the cost that acquire has found. The Cost of
// c is called only once for a call.
func (c Config) slots(limit int) bulkhead.Config {
	s := c.Bulkhead
	s.Limit = limit
	s.Cost = func(ctx context.Context) int { return ctx.Value(costKey{}).(int) }
	return s
}

// A Bulkhead is a [bulkhead.Bulkhead] whose limit follows the latency of its calls. It is safe for concurrent use.
type Bulkhead struct {
	setting settings.Setting[Config]
	slots   *bulkhead.Bulkhead
	born    time.Time

	mu               sync.Mutex // locked after setting's lock and before those of slots
	control          controller
	limit            int  // of slots
	taken            int  // slots, by calls and by responses that are still being read
	reading          int  // slots taken by responses that are still being read
	waiters          int  // calls that ask for slots
	recheckScheduled bool // makeRoom will be called again
}

// New returns a Bulkhead. It panics if cfg is invalid; see [Config.Validate].
func New(cfg Config) *Bulkhead {
	b := &Bulkhead{}
	b.setting.Init(cfg, Config.effective)
	b.control = newController(*b.setting.Load())
	b.born, b.limit = time.Now(), b.control.Limit()
	b.slots = bulkhead.New(cfg.slots(b.limit))
	return b
}

// Do is like [bulkhead.Bulkhead.Do].
func (b *Bulkhead) Do(ctx context.Context, fn func(context.Context) error) error {
	c, err := b.acquire(ctx)
	if err != nil {
		return err
	}
	work, how := linger.WorkOf(ctx), silent // stays so if fn panics
	err = work.Hold(ctx, func(ctx context.Context) error {
		defer func() { b.end(c, how) }()
		err := fn(ctx)
		how = resultOf(ctx, err)
		return err
	}, func(err error) { b.release(c, how, err) }, nil)
	if err == nil {
		work.OnEnd(b.workEnded)
	}
	return err
}

// Wrap returns a function that runs next under [Bulkhead.Do].
func (b *Bulkhead) Wrap(next func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error { return b.Do(ctx, next) }
}

// Begin is like [bulkhead.Bulkhead.Begin].
func (b *Bulkhead) Begin(ctx context.Context) (done func(error), err error) {
	c, err := b.acquire(ctx)
	if err != nil {
		return nil, err
	}
	var over atomic.Bool
	return func(err error) {
		if !over.Swap(true) {
			how := silent // stays so if a method of err panics
			defer func() {
				b.end(c, how)
				b.release(c, how, err)
			}()
			how = resultOf(ctx, err)
		}
	}, nil
}

// An admitted call has its slots.
type admitted struct {
	cost int
	free func(error) // releases them
	call call
}

// acquire takes the slots of a call, perhaps after a wait, or returns why it is refused.
func (b *Bulkhead) acquire(ctx context.Context) (c admitted, err error) {
	if ctx.Err() != nil {
		return c, ended.Error(ctx)
	}
	c.cost = 1
	if cost := b.setting.Load().Bulkhead.Cost; cost != nil {
		c.cost = max(cost(ctx), 0)
	}
	b.mu.Lock()
	b.waiters++
	if c.cost > 0 && b.taken+c.cost > b.limit {
		b.makeRoom()
	}
	b.mu.Unlock()
	defer func() { // even if Priority panics
		b.mu.Lock()
		defer b.mu.Unlock()
		b.waiters--
		if c.free != nil && c.cost > 0 {
			b.taken += c.cost
			c.call = b.control.begin(b.now(), b.taken)
			b.apply()
		}
	}()
	c.free, err = b.slots.Begin(context.WithValue(ctx, costKey{}, c.cost))
	return c, err
}

// end records the result of a call. Its response may still be read, until release.
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

// release releases the slots of a call that has ended with err.
func (b *Bulkhead) release(c admitted, how result, err error) {
	b.mu.Lock()
	b.taken -= c.cost
	if how == answered {
		b.reading -= c.cost
	}
	b.mu.Unlock()
	c.free(err)
}

// workEnded records the end of a call's work. Work that was cut off for lack of time is one more sample.
func (b *Bulkhead) workEnded(err error) {
	if resultOf(context.Background(), err) != overran {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.control.sample(0, overran)
}

// makeRoom raises the limit if slots are held for a long time, and is called again while calls ask for slots: if all of
// them wait, no other event would raise it. b.mu is held.
func (b *Bulkhead) makeRoom() {
	b.control.makeRoom(b.now(), b.taken, b.reading)
	b.apply()
	if !b.recheckScheduled {
		b.recheckScheduled = true
		time.AfterFunc(cohortTime, func() {
			b.mu.Lock()
			defer b.mu.Unlock()
			b.recheckScheduled = false
			if b.waiters > 0 {
				b.makeRoom()
			}
		})
	}
}

// resultOf returns the result of a call that ran under ctx and returned err.
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

// apply gives slots the limit of control. b.mu is held.
func (b *Bulkhead) apply() {
	if n := b.control.Limit(); n != b.limit {
		b.limit = n
		_ = b.slots.Update(func(c *bulkhead.Config) { c.Limit = n }) // within Min and Max
	}
}

// now returns the Unix time according to a clock that never goes back.
func (b *Bulkhead) now() time.Duration {
	return time.Duration(b.born.UnixNano()) + time.Since(b.born)
}

// Update is like [bulkhead.Bulkhead.Update]. The learned latency is kept, and a probe in progress ends.
func (b *Bulkhead) Update(change func(*Config)) error {
	return b.setting.Update(change, b.allow, b.applyConfig)
}

// allow returns an error if the configuration cannot become next.
func (b *Bulkhead) allow(_, next *Config) error { return b.configureSlots(true, next, 1) }

// applyConfig puts next into effect.
func (b *Bulkhead) applyConfig(next *Config) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.control.update(b.now(), *next)
	b.limit = b.control.Limit()
	_ = b.configureSlots(false, next, b.limit) // allowed
}

// configureSlots gives slots the configuration in next.
func (b *Bulkhead) configureSlots(dry bool, next *Config, limit int) error {
	return b.slots.Describe().Update(dry, func(cfg any) error {
		*cfg.(*bulkhead.Config) = next.slots(limit)
		return nil
	})
}

// Config returns the configuration with defaults filled in.
func (b *Bulkhead) Config() Config { return b.setting.Config() }

// Stats are the metrics of a [Bulkhead].
type Stats struct {
	bulkhead.Stats

	Latency time.Duration // geometric mean of the last samples; 0 while Base is not known
	Base    time.Duration // latency of an idle server; 0 if it is not known yet
	Probing bool          // the limit is lowered to learn Base
}

// Stats returns the metrics of b.
func (b *Bulkhead) Stats() Stats {
	b.mu.Lock()
	defer b.mu.Unlock()
	c := &b.control
	s := Stats{Stats: b.slots.Stats(), Probing: c.loweredForProbe()}
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
