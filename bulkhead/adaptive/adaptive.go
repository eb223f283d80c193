// Package adaptive provides a bulkhead that adjusts its limit to the latency of its calls. The limit grows while
// calls are as fast as on an idle server and use almost the whole limit. The limit shrinks when calls queue in the
// server.
//
//	slots := adaptive.New(adaptive.Config{
//		Bulkhead: bulkhead.Config{Name: "users", MaxWait: 100 * time.Millisecond},
//		Max:      200,
//	})
//	err := slots.Do(ctx, func(ctx context.Context) error { return fetchUser(ctx, 42) })
//
// Use this package instead of package bulkhead if the capacity of the server is not known, changes, or is shared with
// other clients. If a fixed limit is above the capacity of the server, calls queue in the server. The callers may
// cancel before the server reaches their calls, and the bulkhead cannot choose the order of calls there. Calls wait for
// a slot in the same way as in package bulkhead.
//
// # Samples
//
// The limit depends on samples of the latency. The result of a call determines the sample:
//
//   - A call that succeeds is a sample. A call whose error has a method Answered() bool that returns true is also a
//     sample. If a call has a response, its latency is the time until the headers of the response.
//   - Any other call shows overload if it ran out of time, was throttled, or returned an error with a RetryAfter. A
//     call that shows overload is also a sample. The latency of such a sample counts as at least four times the latency
//     of an idle server. A response body that is cut off because time ran out is an additional sample that shows
//     overload.
//   - A call that still runs after ten times the usual latency becomes a sample when the next call starts or ends. The
//     usual latency is a mean of the latest samples. The sample of a call that still runs is a lower bound of the
//     call's latency.
//   - All other calls are not samples: a call that ended with another error or a panic, that an inner policy refused,
//     or that its caller canceled.
//
// # Probes
//
// A probe measures the latency of an idle server. To do so, the probe lowers the limit until no call waits in the
// server. A probe lasts for a few times the usual latency, and for at least 150ms. Probes start at these times:
//
//   - While calls use the whole limit, a regular probe starts about every 10s. The time between regular probes is about
//     100 times the usual latency if this time is longer than 10s. Regular probes start when the Unix time is a
//     multiple of 10s. So all processes probe at the same time.
//   - After a probe has found a change of the idle server's latency, another probe starts at the next full second.
//   - If the latency stays high although the limit has shrunk, a probe starts immediately.
//
// During a probe, the limit may be as low as Config.Min. A call that costs more slots than the current limit is
// refused with the reason bulkhead.TooCostly. The refusal is retryable if the call costs at most Config.Max.
//
// # Long calls
//
// Long calls, such as streams, may hold all slots. If no call has started or ended for ten times the usual latency (at
// least 100ms), the limit grows for a new call that needs slots. The limit grows by one slot at a time, until the new
// call fits or the limit reaches a bound. The bound is the highest recent limit plus the number of slots of responses
// that are still being read.
//
// # Limits
//
// Each process has its own limit. A long queue may remain in the server in two cases:
//
//   - Ten or more processes call the server, and their clocks differ by seconds.
//   - Several dozen processes call the server, and share it with clients that have no limit.
//
// If a long queue may remain in the server, set Max to at most the number of concurrent calls that the server can
// handle from each process. If several processes overload a server, the processes with the shortest calls get the
// fewest slots. These processes may get almost no slots. For a server that works on fewer than about ten calls at the
// same time, use package bulkhead.
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
	// Bulkhead configures everything except the limit. Bulkhead.Limit must be 0.
	Bulkhead bulkhead.Config

	// Initial is the first limit, from Min to Max. The limit may grow above Initial. If calls later use only a small
	// part of the limit, the limit shrinks to Initial. Zero means 20, but at least Min and at most Max.
	Initial int

	// Min is the lowest limit, at most 1<<30 - 1 and at most Max. Zero means 1.
	Min int

	// Max is the highest limit, at most 1<<30 - 1. Zero means 1000, or Min if Min is more than 1000.
	Max int

	// Tolerance is the time that calls may wait in the server, as a fraction of the mean latency of an idle server. The
	// maximum is 10. Zero means 0.25. With a higher Tolerance, fewer calls are refused, but calls wait longer in the
	// server.
	Tolerance float64
}

func (c Config) withDefaults() Config {
	c.Min = cmp.Or(c.Min, 1)
	c.Max = cmp.Or(c.Max, max(1000, c.Min))
	c.Initial = cmp.Or(c.Initial, min(max(20, c.Min), c.Max))
	c.Tolerance = cmp.Or(c.Tolerance, 0.25)
	return c
}

// effective returns c with all defaults filled in. c must be valid.
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

// A callCtx is the ctx of a call in the inner bulkhead. Package bulkhead calls MaxLimit.
type callCtx struct {
	context.Context
	cost, max int
}

// Value adds the call's cost to the values of the ctx.
func (c *callCtx) Value(key any) any {
	if key == (costKey{}) {
		return c.cost
	}
	return c.Context.Value(key)
}

// MaxLimit returns Config.Max.
func (c *callCtx) MaxLimit() int { return c.max }

// slots returns the Config of the inner bulkhead, with a limit. The Cost of this Config returns the cost that acquire
// has stored in ctx. Thus the Cost of c is called only once for each call.
func (c Config) slots(limit int) bulkhead.Config {
	s := c.Bulkhead
	s.Limit = limit
	s.Cost = func(ctx context.Context) int { return ctx.Value(costKey{}).(int) }
	return s
}

// A Bulkhead is a [bulkhead.Bulkhead] whose limit follows the latency of its calls. A Bulkhead is safe for concurrent
// use.
type Bulkhead struct {
	setting settings.Setting[Config]
	slots   *bulkhead.Bulkhead
	born    time.Time

	mu               sync.Mutex // acquired after the lock of setting and before the locks of slots
	control          controller
	limit            int  // the limit of slots
	taken            int  // slots taken by running calls and by responses that are still being read
	reading          int  // slots taken by responses that are still being read
	needed           int  // slots that the calls need that have arrived and are not yet admitted or refused
	recheckScheduled bool // a timer will call makeRoom again
}

// New returns a Bulkhead. New panics if cfg is invalid; see [Config.Validate].
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
	work, how := linger.WorkOf(ctx), silent // the value of how if fn panics
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

// Wrap returns a function that calls [Bulkhead.Do](ctx, next).
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
			how := silent // the value of how if a method of err panics
			defer func() {
				b.end(c, how)
				b.release(c, how, err)
			}()
			how = resultOf(ctx, err)
		}
	}, nil
}

// An admitted is a call that has its slots.
type admitted struct {
	cost int
	free func(error) // releases the slots
	call call
}

// acquire takes the slots for a call, and waits for the slots if necessary. If the call is refused, acquire returns the
// refusal.
func (b *Bulkhead) acquire(ctx context.Context) (c admitted, err error) {
	if ctx.Err() != nil {
		return c, ended.Error(ctx)
	}
	c.cost = 1
	cfg := b.setting.Load()
	if cost := cfg.Bulkhead.Cost; cost != nil {
		c.cost = max(cost(ctx), 0)
	}
	b.mu.Lock()
	b.needed += c.cost
	// needed includes other calls that have arrived. Without them, two calls could arrive together for the last slot, and
	// neither would call makeRoom. If no other call arrived, the call without the slot would wait forever.
	if c.cost > 0 && b.taken+b.needed > b.limit {
		b.makeRoom()
	}
	b.mu.Unlock()
	defer func() { // deferred, because Priority may panic
		b.mu.Lock()
		defer b.mu.Unlock()
		b.needed -= c.cost
		if c.free != nil && c.cost > 0 {
			b.taken += c.cost
			c.call = b.control.begin(b.now(), b.taken)
			b.apply()
		}
	}()
	c.free, err = b.slots.Begin(&callCtx{ctx, c.cost, cfg.Max})
	return c, err
}

// end records the result of a call. The response of the call may be read until release is called.
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

// workEnded records the result of a call's work, such as reading a response body. If the work was cut off because time
// ran out, workEnded adds a sample.
func (b *Bulkhead) workEnded(err error) {
	if resultOf(context.Background(), err) != overran {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.control.cutOff()
}

// makeRoom raises the limit if calls hold slots for a long time. While calls wait for slots, a timer calls makeRoom
// again, because no other event raises the limit if all new calls wait. The caller holds b.mu.
func (b *Bulkhead) makeRoom() {
	b.control.makeRoom(b.now(), b.taken, b.reading)
	b.apply()
	if !b.recheckScheduled {
		b.recheckScheduled = true
		time.AfterFunc(cohortTime, func() {
			b.mu.Lock()
			defer b.mu.Unlock()
			b.recheckScheduled = false
			if b.needed > 0 {
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

// apply sets the limit of slots to the limit of control. The caller holds b.mu.
func (b *Bulkhead) apply() {
	if n := b.control.Limit(); n != b.limit {
		b.limit = n
		_ = b.slots.Update(func(c *bulkhead.Config) { c.Limit = n }) // valid: n is within Min and Max
	}
}

// now returns the Unix time according to a clock that never goes back.
func (b *Bulkhead) now() time.Duration {
	return time.Duration(b.born.UnixNano()) + time.Since(b.born)
}

// Update is like [bulkhead.Bulkhead.Update]. Update does not reset the latency that probes have measured. Update ends a
// probe that is in progress.
func (b *Bulkhead) Update(change func(*Config)) error {
	return b.setting.Update(change, b.allow, b.applyConfig)
}

// allow returns an error if the configuration cannot be changed to next.
func (b *Bulkhead) allow(_, next *Config) error { return b.configureSlots(true, next, 1) }

// applyConfig applies next to control and slots.
func (b *Bulkhead) applyConfig(next *Config) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.control.update(b.now(), *next)
	b.limit = b.control.Limit()
	_ = b.configureSlots(false, next, b.limit) // valid: allow has checked next
}

// configureSlots updates slots to the configuration in next, with a limit. If dry is true, it only checks the
// configuration.
func (b *Bulkhead) configureSlots(dry bool, next *Config, limit int) error {
	return b.slots.Describe().Update(dry, func(cfg any) error {
		*cfg.(*bulkhead.Config) = next.slots(limit)
		return nil
	})
}

// Config returns the configuration of b, with defaults filled in.
func (b *Bulkhead) Config() Config { return b.setting.Config() }

// Stats are the metrics of a [Bulkhead].
type Stats struct {
	bulkhead.Stats

	Latency time.Duration // geometric mean of the latest samples; 0 while Base is not known
	Base    time.Duration // latency of an idle server; 0 until the latency is known
	Probing bool          // a probe has lowered the limit to measure Base
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

// Describe implements [policy.Describer]. The Kind of the Description is the same as for a [bulkhead.Bulkhead].
func (b *Bulkhead) Describe() policy.Description {
	d := b.slots.Describe()
	d.Config = func() any { return b.Config() }
	d.Update = func(dryRun bool, change func(cfg any) error) error {
		return b.setting.Change(dryRun, change, b.allow, b.applyConfig)
	}
	return d
}
