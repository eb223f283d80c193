package cacheaside

import (
	"context"
	"sync/atomic"
	"time"
)

// A loadCtx is the ctx of a load. It has the values of the ctx of the call that
// began the load and an end of its own. It behaves like a context.WithDeadline
// that has no cause, and becomes one when Done is first called: until then it
// needs neither a channel nor a timer, which cost more than a quick load.
type loadCtx struct {
	values   context.Context // never ends
	deadline time.Time
	terms    terms // what the load says of its result

	job    any                     // the *flight or the *batch that loads
	depth  int                     // how many loads it is nested in
	slots  chan struct{}           // of which the load has taken one
	nest   atomic.Pointer[nesting] // plain, over or of its own, once the load runs
	partOf atomic.Pointer[loadCtx] // another load that brings the answer of this one

	ended atomic.Int32
	std   atomic.Pointer[stdCtx] // nil until Done is called
}

// What ended a loadCtx. Its deadline does so even if nobody has noted it here.
const (
	byCancel int32 = iota + 1
	byDeadline
)

type stdCtx struct {
	context.Context
	cancel context.CancelFunc
}

// init begins the life of c: it has the values of ctx, and lasts until deadline.
func (c *loadCtx) init(ctx context.Context, deadline time.Time, job any) {
	c.values, c.deadline, c.job = context.WithoutCancel(ctx), deadline, job
	if outer := loadOf(ctx); outer != nil {
		c.depth = outer.depth + 1
	}
}

// expire notes that the deadline of c has passed.
func (c *loadCtx) expire() { c.ended.CompareAndSwap(0, byDeadline) }

// cancel ends c, if it has not ended.
func (c *loadCtx) cancel() {
	c.ended.CompareAndSwap(0, byCancel)
	// After its deadline std ends by itself, if it has not yet.
	if s := c.std.Load(); s != nil && c.ended.Load() == byCancel {
		s.cancel()
	}
}

func (c *loadCtx) Deadline() (time.Time, bool) { return c.deadline, true }

func (c *loadCtx) Done() <-chan struct{} {
	s := c.std.Load()
	if s == nil {
		s = c.makeStd()
	}
	return s.Done()
}

func (c *loadCtx) makeStd() *stdCtx {
	s := new(stdCtx)
	if c.ended.Load() == byCancel {
		// Whatever the time: Err may have said Canceled already.
		s.Context, s.cancel = context.WithCancel(c.values)
	} else {
		s.Context, s.cancel = context.WithDeadline(c.values, c.deadline)
	}
	if !c.std.CompareAndSwap(nil, s) {
		s.cancel()
		return c.std.Load()
	}
	if c.ended.Load() == byCancel {
		s.cancel()
	}
	return s
}

func (c *loadCtx) Err() error {
	switch s := c.std.Load(); {
	case s != nil:
		return s.Err()
	case c.ended.Load() == byCancel:
		return context.Canceled
	case c.ended.Load() == byDeadline || !time.Now().Before(c.deadline):
		return context.DeadlineExceeded
	}
	return nil
}

// Value asks std where there is one, because package context looks there for what
// it needs to end the children of c along with it.
func (c *loadCtx) Value(key any) any {
	if key == (loadKey{}) {
		return c
	}
	if s := c.std.Load(); s != nil {
		return s.Value(key)
	}
	return c.values.Value(key)
}
