package bulkhead

import (
	"context"
	"math"
	"sync"
	"time"

	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/internal/invalid"
	"github.com/go-resilience/resilience/internal/linger"
)

// Adaptive makes a [Bulkhead] find its limit from the latency of its calls: while
// the calls take no longer than on an idle server, the limit grows with its use; once
// they queue at the server, the limit shrinks.
//
// A call that succeeds is a sample of the latency, and so is one that the dependency
// answered with no (Answered in the error protocol of this module). A call that ran
// out of time, was refused by the dependency to shed load, or was told when to come
// back is a sample of at least four times the latency of an idle server. Everything
// else says nothing about load: other errors, calls that were refused further in or
// whose caller left, and panics. A call that hangs counts as long as it has run so
// far once ten times the usual latency has passed.
//
// To learn how long an idle server takes, the bulkhead lowers its limit for a few
// latencies, so far that no call waits at the server: every 10 s (or 100 latencies,
// if that is more) while the limit is reached, and when latency stays high although
// the limit shrinks. If the calls then still take as long, the work itself has become
// slower, and the limit grows again. A call whose weight needs more than the lowered
// limit ends this at once.
//
// The limit is good for servers that work on about ten calls or more at once, for any
// mixture of short and long calls. For smaller ones it is not: their latency depends
// more on chance than on the limit. For a server that works on one call at a time, at
// two or at twenty calls a second, hardly a call is refused while the load is below its
// capacity; but under overload the limit wanders between 2 and about 30, so that a call
// may wait for ten others, and now and then the server has nothing to do. Set a fixed
// Limit there.
//
// The limit bounds each process for itself.
type Adaptive struct {
	// Initial is the first limit. Zero means 20, or Min or Max if these exclude
	// it. A limit that is little used shrinks to Initial and no further.
	Initial int

	// Min and Max bound the limit. Zero means a Min of 1, and a Max of 1000, or of
	// Min if that is more.
	Min, Max int

	// Tolerance is how long a call may wait at the server, as a fraction of the mean
	// latency of an idle one: above 0 to 10. Zero means 0.25. More of it keeps a
	// longer queue at the server and refuses less.
	Tolerance float64
}

func (a Adaptive) withDefaults() Adaptive {
	if a.Min == 0 {
		a.Min = 1
	}
	if a.Max == 0 {
		a.Max = max(1000, a.Min)
	}
	if a.Initial == 0 {
		a.Initial = min(max(20, a.Min), a.Max)
	}
	if a.Tolerance == 0 {
		a.Tolerance = 0.25
	}
	return a
}

func (a Adaptive) validate(f *invalid.Fields) {
	d := a.withDefaults()
	f.Need(a.Min >= 0 && a.Min <= maxLimit, "Adaptive.Min", a.Min, "0 (for 1) or more")
	f.Need(a.Max >= 0 && a.Max <= maxLimit, "Adaptive.Max", a.Max, "0 (for 1000) or more")
	f.Need(d.Min <= d.Max, "Adaptive.Min", a.Min, "no more than Max")
	f.Need(d.Initial >= d.Min && d.Initial <= d.Max, "Adaptive.Initial", a.Initial, "0 (for 20), or within Min and Max")
	f.Need(d.Tolerance > 0 && d.Tolerance <= 10, "Adaptive.Tolerance", a.Tolerance, "0 (for 0.25), or above 0 to 10")
}

// adaptive drives the limit of a bulkhead. Its mutex is taken before that of the
// bulkhead.
type adaptive struct {
	mu         sync.Mutex
	controller controller
}

// measure does fn, in slots that the call has already, and learns from it.
func (b *Bulkhead) measure(ctx context.Context, n int, fn func(context.Context) error, work *linger.Work) error {
	c := b.begin(n)
	if work != nil {
		return b.measureWork(ctx, n, fn, work, c)
	}
	how := silent // stays so if fn panics
	defer func() { b.end(c, n, how) }()
	err := fn(ctx)
	how = outcomeOf(ctx, err)
	return err
}

// measureWork is measure of work that may go on after fn and holds its slots until then.
// The latency is the time until fn returns: a slow reader says nothing about the server.
func (b *Bulkhead) measureWork(ctx context.Context, n int, fn func(context.Context) error, work *linger.Work, c call) error {
	return b.outlast(ctx, n, func(ctx context.Context) error {
		how := silent // stays so if fn panics
		defer func() { b.learn(c, how) }()
		err := fn(ctx)
		how = outcomeOf(ctx, err)
		return err
	}, work)
}

// outcomeOf returns what the end of a call made under ctx says about load.
func outcomeOf(ctx context.Context, err error) outcome {
	if err == nil {
		return answered
	}
	switch end := behavior.ReadUnder(ctx, err); end.Kind {
	case behavior.Done, behavior.Answered:
		return answered
	case behavior.Overran:
		return dropped
	case behavior.Failed:
		if end.Throttled || end.FailedAfter > 0 || behavior.IsTimeout(err) {
			return dropped
		}
	}
	return silent
}

// begin notes that a call starts, in n slots that it has already. If OnLimit panics,
// it gives them back.
func (b *Bulkhead) begin(n int) call {
	inFlight := int(b.limit.Load()) - freeIn(b.slots.word.Load())
	b.adaptive.mu.Lock()
	c := b.adaptive.controller.begin(b.now(), inFlight)
	changed := b.follow()
	b.adaptive.mu.Unlock()
	if changed {
		told := false
		defer func() {
			if !told {
				b.end(c, n, silent)
			}
		}()
		b.announce()
		told = true
	}
	return c
}

// end gives the slots of a call back, and learns from it.
func (b *Bulkhead) end(c call, n int, how outcome) {
	defer b.learn(c, how)
	b.leave(n)
}

// learn tells the controller how a call has ended.
func (b *Bulkhead) learn(c call, how outcome) {
	b.adaptive.mu.Lock()
	b.adaptive.controller.end(c, b.now(), how)
	changed := b.follow()
	b.adaptive.mu.Unlock()
	if changed {
		b.announce()
	}
}

// endProbe ends the lowering of the limit for a probe, if that is all that keeps a
// call from n slots at a level. It reports whether it may be tried again.
func (b *Bulkhead) endProbe(n, level int) bool {
	if b.cfg.Adaptive == nil {
		return false
	}
	b.adaptive.mu.Lock()
	c := &b.adaptive.controller
	ends := c.lowered() && n <= int(c.before)-b.kept[level]
	if ends {
		c.abandon(b.now())
		b.follow()
	}
	b.adaptive.mu.Unlock()
	if ends {
		b.announce()
	}
	return ends || !b.tooHeavy(n, level)
}

// follow makes the limit what the controller says, and reports whether that is a
// change. The controller's mutex is held.
func (b *Bulkhead) follow() bool {
	c := &b.adaptive.controller
	if int64(c.Limit()) == b.limit.Load() {
		return false
	}
	b.mu.Lock()
	defer b.unlock()
	if c.lowered() && b.heavierWaits(c.Limit()) {
		c.abandon(b.now())
		if int64(c.Limit()) == b.limit.Load() {
			return false
		}
	}
	b.resize(LimitChange{
		To:      c.Limit(),
		Latency: time.Duration(math.Exp(c.latency)),
		Base:    c.idle(),
		Probe:   c.lowered(),
	})
	return true
}
