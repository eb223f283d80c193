// Package adaptive is a bulkhead that finds its limit by the latency of its calls: while they
// take no longer than on an idle server, the limit grows with its use; once they queue at the
// server, it shrinks.
//
//	slots := adaptive.New(adaptive.Config{
//		Bulkhead: bulkhead.Config{Name: "users", MaxWait: 100 * time.Millisecond},
//		Max:      200,
//	})
//	err := slots.Do(ctx, func(ctx context.Context) error { return fetchUser(ctx, 42) })
//
// A call that succeeds is a sample of the latency, and so is one that the dependency
// answered with no (Answered in the error protocol of this module). Any other call that
// ran out of time, was turned away by the dependency to shed load, or was told when to
// come back is a sample of at least four times the latency of an idle server. Nothing else
// says anything about load: other errors, calls that were refused further in or whose
// caller left, and panics. A call that hangs counts as long as it has run so far once
// ten times the usual latency has passed. The latency of a response is the time to its
// headers. A body that breaks off because time ran out is one more sample of that kind.
//
// To learn the latency of an idle server, the limit is lowered for a few latencies, and 150 ms
// at the least, so far that no call waits at the server: at each multiple of 10 s of Unix time
// while the limit is reached (or of 100 latencies, if that is more), a second after what is
// known has changed, and when latency stays high although the limit shrinks. Such a probe ends
// for nobody: give Min the highest Cost, since a call that costs more than the present limit is
// refused as too costly. If calls that run for long, such as streams, hold all of the limit, and
// no call has begun or ended for ten latencies (100 ms at the least), it grows slot by slot until
// the next call fits: not above what it was lately, but for the slots of responses that are still
// being read.
//
// Each process has a limit of its own. Processes that share a server probe at the same moments,
// because the queue of one hides an idle server from the others. Ten and more processes whose
// clocks are seconds apart when their limits are made, or some tens beside clients without a
// limit, may let a long queue stand: give these a Max that the server can bear. Processes whose
// calls take differently long do not get equal parts of an overloaded server: the shortest calls
// get least, and perhaps next to nothing.
//
// The limit suits servers that work on about ten calls or more at once. The latency of a smaller
// one depends more on chance than on the limit: use a bulkhead with a fixed Limit there.
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
	"github.com/go-resilience/resilience/internal/describe"
	"github.com/go-resilience/resilience/internal/ended"
	"github.com/go-resilience/resilience/internal/invalid"
	"github.com/go-resilience/resilience/internal/linger"
	"github.com/go-resilience/resilience/internal/settings"
)

// Config says how a [Bulkhead] works.
type Config struct {
	// Bulkhead is everything but the limit. Its Limit must be 0.
	Bulkhead bulkhead.Config

	// Initial is the first limit. Zero means 20, or Min or Max if these exclude 20. A
	// limit that is little used shrinks to Initial and no further.
	Initial int

	// Min and Max bound the limit: 1 to 1 073 741 823. Zero means a Min of 1, and a Max
	// of 1000, or of Min if that is more.
	Min, Max int

	// Tolerance is how long a call may wait at the server, as a fraction of the mean
	// latency of an idle one: above 0 to 10. Zero means 0.25. A higher Tolerance keeps
	// a longer queue at the server and refuses less.
	Tolerance float64
}

func (c Config) withDefaults() Config {
	c.Min = cmp.Or(c.Min, 1)
	c.Max = cmp.Or(c.Max, max(1000, c.Min))
	c.Initial = cmp.Or(c.Initial, min(max(20, c.Min), c.Max))
	c.Tolerance = cmp.Or(c.Tolerance, 0.25)
	return c
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
	f.Need(d.Tolerance > 0 && d.Tolerance <= 10, "Tolerance", c.Tolerance, "0 (for 0.25), or above 0 to 10")
	return errors.Join(f.Err(), c.slots(1).Validate())
}

type costKey struct{}

// slots returns the Config of the bulkhead with a limit. Its Cost is what Do has found, since
// the caller's is asked once.
func (c Config) slots(limit int) bulkhead.Config {
	s := c.Bulkhead
	s.Limit = limit
	if s.Cost != nil {
		s.Cost = func(ctx context.Context) int {
			if n, ok := ctx.Value(costKey{}).(int); ok {
				return n
			}
			return 1 // an Update has just set Cost
		}
	}
	return s
}

// A Bulkhead is a [bulkhead.Bulkhead] whose limit follows the latency of its calls. It is safe
// for concurrent use. [New] makes one.
type Bulkhead struct {
	setting settings.Setting[Config]
	slots   *bulkhead.Bulkhead
	born    time.Time

	mu      sync.Mutex // taken after the lock of setting, and before those of slots
	control controller
	limit   int         // of slots
	taken   int         // slots, of calls and of responses that are still being read
	reading int         // the latter, of calls that were answered
	asking  int         // calls that ask for slots
	stuck   *time.Timer // calls look while a call asks; nil until one finds no slots
}

// New returns a Bulkhead. It panics with the error of cfg.Validate, if there is one.
func New(cfg Config) *Bulkhead {
	b := &Bulkhead{}
	b.setting.Init(cfg, Config.withDefaults)
	b.control = newController(*b.setting.Load())
	b.born, b.limit = time.Now(), b.control.Limit()
	b.slots = bulkhead.New(cfg.slots(b.limit))
	return b
}

// Do runs fn when there is a slot for it, and returns its error, as [bulkhead.Bulkhead.Do] does.
func (b *Bulkhead) Do(ctx context.Context, fn func(context.Context) error) (err error) {
	if ctx.Err() != nil {
		return ended.Error(ctx)
	}
	ctx, cost := b.costOf(ctx)
	if cost == 0 {
		return b.slots.Do(ctx, fn)
	}
	b.ask(cost)
	work := linger.Of(ctx)
	var c call
	began, how := false, silent // stays so if fn panics
	defer func() {
		if !began {
			b.withdraw()
			return
		}
		b.end(c, cost, how)
		if work == nil || err != nil || how == silent {
			b.close(cost, how)
			return
		}
		work.Release(func() { b.close(cost, how) })
		work.OnEnd(b.brokeOff)
	}()
	return b.slots.Do(ctx, func(ctx context.Context) error {
		began, c = true, b.begin(cost)
		err := fn(ctx)
		how = resultOf(ctx, err)
		return err
	})
}

// Wrap returns a function that runs next under [Bulkhead.Do].
func (b *Bulkhead) Wrap(next func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error { return b.Do(ctx, next) }
}

// Begin takes a slot as [Bulkhead.Do] does, for work that is not one function. When the work is
// over, the caller calls done with its error, from any goroutine. A second call of done does
// nothing. If Begin returns an error, done is nil.
func (b *Bulkhead) Begin(ctx context.Context) (done func(error), err error) {
	if ctx.Err() != nil {
		return nil, ended.Error(ctx)
	}
	ctx, cost := b.costOf(ctx)
	if cost == 0 {
		return b.slots.Begin(ctx)
	}
	b.ask(cost)
	began := false
	defer func() {
		if !began {
			b.withdraw()
		}
	}()
	free, err := b.slots.Begin(ctx)
	if err != nil {
		return nil, err
	}
	began = true
	c := b.begin(cost)
	var over atomic.Bool
	return func(err error) {
		if !over.Swap(true) {
			free(err)
			how := resultOf(ctx, err)
			b.end(c, cost, how)
			b.close(cost, how)
		}
	}, nil
}

// costOf returns the cost of a call, at least 0, and the ctx that tells it to slots.
func (b *Bulkhead) costOf(ctx context.Context) (context.Context, int) {
	cost := b.setting.Load().Bulkhead.Cost
	if cost == nil {
		return ctx, 1
	}
	n := max(cost(ctx), 0)
	return context.WithValue(ctx, costKey{}, n), n
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

// ask notes that a call asks for slots, until begin or withdraw.
func (b *Bulkhead) ask(cost int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.asking++
	if b.taken+cost > b.limit {
		b.control.makeRoom(b.now(), b.taken, b.reading)
		b.apply()
		if b.stuck == nil {
			b.stuck = time.AfterFunc(cohortTime, b.look)
		}
	}
}

// withdraw notes that a call got no slots.
func (b *Bulkhead) withdraw() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.asking--
}

// look has the limit raised if all calls wait, so that none would come to do it.
func (b *Bulkhead) look() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.asking == 0 {
		b.stuck = nil
		return
	}
	b.control.makeRoom(b.now(), b.taken, b.reading)
	b.apply()
	b.stuck.Reset(cohortTime)
}

// begin notes that a call has its slots.
func (b *Bulkhead) begin(cost int) call {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.asking--
	b.taken += cost
	defer b.apply()
	return b.control.begin(b.now(), b.taken)
}

// end notes the end of a call, whose response may still be read until close.
func (b *Bulkhead) end(c call, cost int, how result) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if how == answered {
		b.reading += cost
	}
	b.control.end(c, b.now(), how)
	b.apply()
}

// close notes that a call that has ended holds no slots any more.
func (b *Bulkhead) close(cost int, how result) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.taken -= cost
	if how == answered {
		b.reading -= cost
	}
}

// brokeOff notes the end of a call's work. If it broke off for lack of time, that is one more
// sample.
func (b *Bulkhead) brokeOff(err error) {
	if err == nil || resultOf(context.Background(), err) != overran {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.control.sample(0, overran)
}

// apply makes the limit of slots that of control. b.mu is held.
func (b *Bulkhead) apply() {
	if n := b.control.Limit(); n != b.limit {
		b.limit = n
		_ = b.slots.SetLimit(n) // within Min and Max
	}
}

// now returns the Unix time, which no change of the clock sets back.
func (b *Bulkhead) now() time.Duration {
	return time.Duration(b.born.UnixNano()) + time.Since(b.born)
}

// Update changes the Config. It calls change with the Config as it was given: a zero field
// means its default. What change leaves in it takes effect if it is valid. Otherwise Update
// returns an error that names the field, and nothing changes. The limit keeps what it has
// learned, a probe under way ends, and the rest is as in [bulkhead.Bulkhead.Update].
func (b *Bulkhead) Update(change func(*Config)) error {
	return b.setting.Update(change, b.allow, b.follow)
}

// Change is Update for a program that does not know Config: f gets a *Config. If f returns an
// error, or dry is true, nothing changes; dry returns the error that the change would have.
func (b *Bulkhead) Change(dry bool, f func(cfg any) error) error {
	return b.setting.Change(dry, f, b.allow, b.follow)
}

func (b *Bulkhead) allow(_, next *Config) error { return b.change(true, next, 1) }

func (b *Bulkhead) follow(next *Config) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.control.update(b.now(), *next)
	b.limit = b.control.Limit()
	_ = b.change(false, next, b.limit) // allowed
}

// change makes the Config of slots that of next.
func (b *Bulkhead) change(dry bool, next *Config, limit int) error {
	return b.slots.Change(dry, func(cfg any) error {
		*cfg.(*bulkhead.Config) = next.slots(limit)
		return nil
	})
}

// Config returns the present Config, with its defaults filled in.
func (b *Bulkhead) Config() Config { return b.setting.Config() }

// Settings returns Config without functions.
func (b *Bulkhead) Settings() any {
	c := b.Config()
	c.Bulkhead.Priority, c.Bulkhead.Cost, c.Bulkhead.Share = nil, nil, nil
	return c
}

// Stats is a snapshot of a [Bulkhead].
type Stats struct {
	bulkhead.Stats

	Latency time.Duration // geometric mean of the last calls that were looked at
	Base    time.Duration // the same on an idle server; 0: not known yet
	Probing bool          // the limit is lowered for a few latencies, to learn Base
}

// Stats returns a snapshot.
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

// Name returns the Name of the Bulkhead in Config.
func (b *Bulkhead) Name() string { return b.slots.Name() }

// Kind returns "bulkhead".
func (b *Bulkhead) Kind() string { return b.slots.Kind() }

// Figures returns those of a [bulkhead.Bulkhead].
func (b *Bulkhead) Figures() []describe.Figure { return b.slots.Figures() }

// Health returns an error while no slot is free.
func (b *Bulkhead) Health() error { return b.slots.Health() }

// Needed reports whether a call has a slot or waits for one.
func (b *Bulkhead) Needed() bool { return b.slots.Needed() }

// Observe is [bulkhead.Bulkhead.Observe].
func (b *Bulkhead) Observe(f func(context.Context, bulkhead.Event)) (stop func()) {
	return b.slots.Observe(f)
}

// ObserveAny is Observe for a program that does not know Event.
func (b *Bulkhead) ObserveAny(f func(context.Context, any)) (stop func()) {
	return b.slots.ObserveAny(f)
}
