package bulkhead

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"sync"
	"time"

	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/internal/invalid"
	"github.com/go-resilience/resilience/internal/linger"
)

// AdaptiveLimit makes a [Bulkhead] find its limit from the latency of its calls. While
// the calls take no longer than on an idle server, the limit grows with its use; once
// they queue at the server, the limit shrinks.
//
// A call that succeeds is a sample of the latency, and so is one that the dependency
// answered with no (Answered in the error protocol of this module). Any other call that
// ran out of time, was turned away by the dependency to shed load, or was told when to
// come back is a sample of at least four times the latency of an idle server. Nothing else
// says anything about load: other errors, calls that were refused further in or whose
// caller left, and panics. A call that hangs counts as long as it has run so far once
// ten times the usual latency has passed.
//
// To learn the latency of an idle server, the bulkhead probes: it lowers its limit for
// a few latencies, and 150 ms at the least, so far that no call waits at the server. It
// does so at each multiple of 10 s of Unix time while the limit is reached (or of 100
// latencies, if that is more), a second after what it knows has changed, and when latency
// stays high although the limit shrinks. If the calls then still take as long, the work
// itself has become slower, and the limit grows again. A call that costs more than the
// lowered limit ends a probe immediately. If calls that run for long, such as streams, hold
// all of the limit, and no call has begun or ended for ten latencies (100 ms at the least), it
// grows until the next call fits: not above what it was lately, but for the slots of responses
// that are still being read.
//
// Processes that share a server probe at the same moments, because the queue of one
// hides an idle server from the others. What a probe sees is not taken for slower work
// where it looks like such a queue: the latencies have risen and differ less from each
// other. Even so, ten and more processes whose clocks are seconds apart when the
// bulkheads are made, or some tens beside clients without a limit, may let a long queue
// stand: give these a Max that the server can bear. Processes whose calls take
// differently long do not get equal shares of an overloaded server: the shortest calls
// get least, and perhaps next to nothing.
//
// The limit suits servers that work on about ten calls or more at once, for any mixture
// of short and long calls. The latency of a smaller server depends more on chance than
// on the limit. Consider a server that works on one call at a time, at two or at twenty
// calls a second. Hardly a call is refused while the load is below its capacity. Under
// overload, however, the limit wanders between 2 and about 30, so that a call may wait
// for ten others, and now and then the server has nothing to do. Use a fixed Limit
// there.
//
// Each process has a limit of its own; the processes exchange nothing.
type AdaptiveLimit struct {
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

func (a AdaptiveLimit) withDefaults() AdaptiveLimit {
	a.Min = cmp.Or(a.Min, 1)
	a.Max = cmp.Or(a.Max, max(1000, a.Min))
	a.Initial = cmp.Or(a.Initial, min(max(20, a.Min), a.Max))
	a.Tolerance = cmp.Or(a.Tolerance, 0.25)
	return a
}

func (a AdaptiveLimit) validate(f *invalid.Fields) {
	d := a.withDefaults()
	f.Need(a.Min >= 0 && a.Min <= maxLimit, "Adaptive.Min", a.Min, fmt.Sprintf("0 (for 1) to %d", maxLimit))
	f.Need(a.Max >= 0 && a.Max <= maxLimit, "Adaptive.Max", a.Max, fmt.Sprintf("0 (for 1000) to %d", maxLimit))
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

// measure calls fn, in slots that the call has already, and learns from it.
func (b *Bulkhead) measure(ctx context.Context, a *adaptive, has taken, fn func(context.Context) error, work *linger.Work) error {
	c := b.started(ctx, a, has)
	if work != nil {
		return b.measureWork(ctx, a, has, fn, work, c)
	}
	how := silent // stays so if fn panics
	defer func() { b.ended(ctx, a, c, has, how) }()
	err := fn(ctx)
	how = outcomeOf(ctx, err)
	return err
}

// measureWork is measure for work that may outlast fn and holds its slots until it
// ends. The latency is the time until fn returns: a slow reader says nothing about the
// server.
func (b *Bulkhead) measureWork(ctx context.Context, a *adaptive, has taken, fn func(context.Context) error, work *linger.Work, c call) error {
	h := b.hold(has)
	return work.Hold(ctx, func(ctx context.Context) error {
		how := silent // stays so if fn panics
		defer func() {
			h.isAnswered(how == answered)
			b.learn(ctx, a, c, how)
		}()
		err := fn(ctx)
		how = outcomeOf(ctx, err)
		return err
	}, h)
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
		return overran
	case behavior.Failed:
		if end.Throttled || end.FailedAfter > 0 || behavior.IsTimeout(err) {
			return overran
		}
	}
	return silent
}

// started notes that a call starts, in slots that it has already. If an observer panics,
// started gives them back.
func (b *Bulkhead) started(ctx context.Context, a *adaptive, has taken) call {
	inFlight := int(b.queue.limit.Load()) - freeIn(b.queue.slots.word.Load())
	a.mu.Lock()
	c := a.controller.begin(b.unix(), inFlight)
	b.adjust(a)
	a.mu.Unlock()
	told := false
	defer func() {
		if !told {
			b.ended(ctx, a, c, has, silent)
		}
	}()
	b.announce(ctx)
	told = true
	return c
}

// ended gives the slots of a call back, and learns from it.
func (b *Bulkhead) ended(ctx context.Context, a *adaptive, c call, has taken, how outcome) {
	defer b.learn(ctx, a, c, how)
	b.leave(has)
}

// learn tells the controller how a call has ended.
func (b *Bulkhead) learn(ctx context.Context, a *adaptive, c call, how outcome) {
	a.mu.Lock()
	a.controller.end(c, b.unix(), how)
	b.adjust(a)
	a.mu.Unlock()
	b.announce(ctx)
}

// makeRoom has the controller look at a limit that keeps a call from n slots at a level.
func (b *Bulkhead) makeRoom(level, n int) {
	r := b.rules.Load() // the queue goes by these
	a := r.adaptive
	limit, inFlight := b.figures()
	if a == nil || inFlight+n <= r.most(limit, level) {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	room := a.controller.room + int(b.answered.Load())
	a.controller.want(b.unix(), inFlight+n+r.kept(room, level), room)
	b.adjust(a)
}

// endProbe ends a probe if its lowered limit is all that keeps a call from n slots at a
// level. It reports whether the call may be tried again.
func (b *Bulkhead) endProbe(ctx context.Context, r *rules, level, n int) bool {
	a := r.adaptive
	if a == nil {
		return false
	}
	a.mu.Lock()
	c := &a.controller
	if c.lowered() && n <= r.most(int(c.before), level) {
		c.abandon(b.unix())
		b.adjust(a)
	}
	a.mu.Unlock()
	b.announce(ctx)
	return n <= r.most(int(b.queue.limit.Load()), level)
}

// adjust makes the limit what the controller says. The mutex of a is held.
func (b *Bulkhead) adjust(a *adaptive) {
	c := &a.controller
	if int64(c.Limit()) == b.queue.limit.Load() {
		return
	}
	b.mu.Lock()
	defer b.unlock()
	r := b.rules.Load()
	if r.adaptive != a { // an Update has taken its place
		return
	}
	if c.lowered() && b.tooCostlyWaits(r, c.Limit()) {
		c.abandon(b.unix())
	}
	b.resize(r, Event{
		To:      c.Limit(),
		Latency: time.Duration(math.Exp(c.latency)),
		Base:    c.idle(),
		Probe:   c.lowered(),
	})
}
