package bulkhead

import (
	"context"
	"fmt"
	"math"
	"time"
)

// A Controller is the controller of an adaptive limit, to be driven in virtual time.
type Controller struct {
	controller
	told int // the cohort that Told has told of
}

func NewController(cfg AdaptiveLimit) *Controller {
	return &Controller{controller: newController(cfg.withDefaults())}
}

// Begin returns the call that End takes.
func (c *Controller) Begin(now time.Duration, inFlight int) Call { return c.begin(now, inFlight) }

func (c *Controller) End(ended Call, now time.Duration, err error) {
	c.end(ended, now, outcomeOf(context.Background(), err))
}

// Want says that a call needs a limit of n to begin.
func (c *Controller) Want(now time.Duration, n int) { c.want(now, n, c.room) }

// Probing reports whether the limit is lowered for a probe.
func (c *Controller) Probing() bool { return c.lowered() }

func (c *Controller) Base() time.Duration { return c.idle() }

// MayBeQueue decides by the mean and the variance of logarithms: of the base, and of a probe.
func MayBeQueue(baseLog, baseSpread, log, spread float64) bool {
	b := base{log: baseLog, spread: baseSpread}
	return b.mayBeQueue(&samples{n: 1, logs: log, squares: spread + log*log})
}

// Told returns what c knows after a probe and after each fifth cohort, when that is over.
func (c *Controller) Told(now time.Duration) (string, bool) {
	if c.cohort.number == c.told || c.cohort.number%5 != 0 && !c.probing {
		return "", false
	}
	c.told = c.cohort.number
	b, ms := &c.base, func(log float64) float64 { return math.Exp(log) / 1e6 }
	line := fmt.Sprintf("%7.3fs cohort %d limit %.4g of %.4g, base %.4g ms ± %.4f, spread %.4f, rise %.4f, mean %.4g ms, latency %.4g ms, scale %.4g ms, ceiling %.4g ms, next %v",
		now.Seconds(), c.cohort.number, c.limit, c.former, ms(b.log), math.Sqrt(b.variance), b.spread, b.rise, b.mean/1e6, ms(c.latency), c.scale/1e6, ms(c.ceiling), c.next)
	for _, is := range []struct {
		so   bool
		word string
	}{{c.probing, "probing"}, {c.probing && c.common, "as all"}, {c.doubt, "in doubt"}, {c.reached, "reached"}, {c.peak.limit > 0, "from a peak"}} {
		if is.so {
			line += ", " + is.word
		}
	}
	return line, true
}

// Restart does the work of SetLimit.
func (c *Controller) Restart(now time.Duration, limit int) { c.restart(now, limit) }

// A Call is returned by Begin.
type Call = call

// SkipAdmitted makes b count n calls more, in the word.
func SkipAdmitted(b *Bulkhead, n int) { b.queue.slots.word.Add(uint64(n) * admitted) }

// WithMutex does fn while it holds the mutex of b.
func WithMutex(b *Bulkhead, fn func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	fn()
}

// Reform does the work of an Update of Adaptive.
func (c *Controller) Reform(now time.Duration, cfg AdaptiveLimit) { c.reform(now, cfg.withDefaults()) }

// Looked returns how often b has considered a waiter for free slots.
func Looked(b *Bulkhead) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.queue.looked
}

// Shares returns how many shares b knows.
func Shares(b *Bulkhead) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.queue.shares.known)
}

// A Waiting is a share of which calls wait, as the decisions about turns see it.
type Waiting struct {
	Name                string
	Weight, Held, Calls int
}

// turnsOf returns the turns of shares.
func turnsOf(waiting []Waiting) (*turns, *shares, map[string]*line) {
	var t turns
	var s shares
	lines := map[string]*line{}
	for _, w := range waiting {
		of := s.of(w.Name, w.Weight)
		s.count(of, w.Held, w.Calls)
		lines[w.Name] = &line{share: of, waiters: w.Calls}
		if w.Calls > 0 {
			t.add(lines[w.Name])
		}
	}
	return &t, &s, lines
}

// Turns returns the shares that the next n slots go to, each of which is given back
// before the next.
func Turns(limit, n int, waiting []Waiting) (order []string) {
	t, s, _ := turnsOf(waiting)
	for range n {
		l := t.next(s, limit)
		order = append(order, l.share.name)
		t.served(l, 1, limit)
	}
	return order
}

// GivesWay returns the share that loses a place in a full queue to a call of newcomer.
func GivesWay(newcomer string, waiting []Waiting) string {
	t, _, lines := turnsOf(waiting)
	return t.mostCrowded(lines[newcomer]).share.name
}

// An Arrival is what a call without slots finds at the queue.
type Arrival struct {
	Full       bool
	Cost, Most int
	Late, Own  bool
}

// Refusal returns why the call may not wait.
func (a Arrival) Refusal() Reason {
	return arrival{full: a.Full, cost: a.Cost, most: a.Most, late: a.Late, own: a.Own}.refusal()
}

// A Pace is how fast the slots of a queue are handed on.
type Pace struct{ pace }

func (p *Pace) Restart(now time.Duration)       { p.restart(now) }
func (p *Pace) Handed(n int, now time.Duration) { p.handed(n, now) }

// Least returns the shortest time that n slots may take.
func (p *Pace) Least(n int) time.Duration { return p.least(n) }
