package adaptive

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

func NewController(cfg Config) *Controller {
	return &Controller{controller: newController(cfg.withDefaults())}
}

// A Call is returned by Begin.
type Call = call

// Begin returns the call that End takes.
func (c *Controller) Begin(now time.Duration, taken int) Call { return c.begin(now, taken) }

func (c *Controller) End(ended Call, now time.Duration, err error) {
	c.end(ended, now, resultOf(context.Background(), err))
}

// ResultOf returns what the end of a call says of the load, in words.
func ResultOf(ctx context.Context, err error) string {
	return [...]string{"answered", "overran", "silent"}[resultOf(ctx, err)]
}

// MakeRoom says that a call cannot begin while so many slots are taken.
func (c *Controller) MakeRoom(now time.Duration, taken int) { c.makeRoom(now, taken, 0) }

// CutOff says that the work of a call was cut off for lack of time.
func (c *Controller) CutOff() { c.cutOff() }

// Usual returns the usual latency.
func (c *Controller) Usual() time.Duration { return time.Duration(c.scale) }

// Probing reports whether the limit is lowered for a probe.
func (c *Controller) Probing() bool { return c.loweredForProbe() }

// Base returns the latency of an idle server, 0 if it is not known.
func (c *Controller) Base() time.Duration {
	if !c.base.known {
		return 0
	}
	return time.Duration(math.Exp(c.base.log))
}

// Update does the work of an Update of the limit.
func (c *Controller) Update(now time.Duration, cfg Config) { c.update(now, cfg.withDefaults()) }

// IsQueueing decides by the mean and the variance of logarithms: of the base, and of a probe.
func IsQueueing(baseLog, baseSpread, log, spread float64) bool {
	b := base{log: baseLog, spread: baseSpread}
	return b.isQueueing(&samples{n: 1, logs: log, squares: spread + log*log})
}

// Told returns what c knows after a probe and after each fifth cohort, when that is over.
func (c *Controller) Told(now time.Duration) (string, bool) {
	if c.cohort.number == c.told || c.cohort.number%5 != 0 && !c.probing {
		return "", false
	}
	c.told = c.cohort.number
	b, ms := &c.base, func(log float64) float64 { return math.Exp(log) / 1e6 }
	line := fmt.Sprintf("%7.3fs cohort %d limit %.4g of %.4g, base %.4g ms ± %.4f, spread %.4f, "+
		"rise %.4f, mean %.4g ms, latency %.4g ms, scale %.4g ms, ceiling %.4g ms, next %v",
		now.Seconds(), c.cohort.number, c.limit, c.former, ms(b.log), math.Sqrt(b.variance), b.spread,
		b.rise, b.mean/1e6, ms(c.latency), c.scale/1e6, ms(c.ceiling), c.next)
	for _, is := range []struct {
		so   bool
		word string
	}{{c.probing, "probing"}, {c.probing && c.common, "as all"}, {c.doubt, "in doubt"}, {c.reached, "reached"},
		{c.peak.limit > 0, "from a peak"}} {
		if is.so {
			line += ", " + is.word
		}
	}
	return line, true
}

// Slots returns how many slots are taken, how many of them by responses that are still being read,
// and how many slots are needed by calls that ask for them.
func Slots(b *Bulkhead) (taken, reading, needed int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.taken, b.reading, b.needed
}
