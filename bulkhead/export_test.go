package bulkhead

import (
	"context"
	"time"
)

// A Controller is the controller of an adaptive limit, to be driven in virtual time.
type Controller struct{ controller }

func NewController(cfg AdaptiveLimit) *Controller {
	return &Controller{newController(cfg.withDefaults())}
}

// Begin returns the call that End takes.
func (c *Controller) Begin(now time.Duration, inFlight int) Call { return c.begin(now, inFlight) }

func (c *Controller) End(ended Call, now time.Duration, err error) {
	c.end(ended, now, outcomeOf(context.Background(), err))
}

// Probing reports whether the limit is lowered for a probe.
func (c *Controller) Probing() bool { return c.lowered() }

func (c *Controller) Base() time.Duration { return c.idle() }

// Restart does the work of SetLimit.
func (c *Controller) Restart(now time.Duration, limit int) { c.restart(now, limit) }

// A Call is returned by Begin.
type Call = call

// SkipAdmitted makes b count n calls more, in the word.
func SkipAdmitted(b *Bulkhead, n int) { b.slots.word.Add(uint64(n) * admitted) }

// WithMutex does fn while it holds the mutex of b.
func WithMutex(b *Bulkhead, fn func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	fn()
}

// Reform does the work of an Update of Adaptive.
func (c *Controller) Reform(now time.Duration, cfg AdaptiveLimit) { c.reform(now, cfg.withDefaults()) }
