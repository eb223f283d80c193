package cacheaside

import (
	"context"
	"sync/atomic"
	"time"
)

// A loadCtx is the ctx of a load. It has the values of the ctx of the call that began
// the load, and ends separately. It behaves like a context.WithDeadline without a cause,
// and becomes one when Done is first called. Until then it needs neither a channel nor a
// timer, which cost more than a quick load.
type loadCtx struct {
	caller   context.Context // of the call that began the load; gives its values only
	deadline time.Time
	terms    terms // set by the load for its result

	job   any // the *flight or *batch that loads
	ended atomic.Int32
	std   atomic.Pointer[stdCtx] // nil until Done is called
}

// What ended a loadCtx. Its deadline counts even if it has not been recorded here.
const (
	byCancel int32 = iota + 1
	byDeadline
)

type stdCtx struct {
	context.Context
	cancel context.CancelFunc
}

// init starts c, with the values of ctx and the given deadline.
func (c *loadCtx) init(ctx context.Context, deadline time.Time, job any) {
	c.caller, c.deadline, c.job = ctx, deadline, job
}

// expire records that the deadline of c has passed.
func (c *loadCtx) expire() { c.ended.CompareAndSwap(0, byDeadline) }

// cancel ends c if it has not ended.
func (c *loadCtx) cancel() {
	c.ended.CompareAndSwap(0, byCancel)
	// After the deadline, std ends by itself.
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
		// Err may already have returned Canceled, whatever the time.
		s.Context, s.cancel = context.WithCancel(c.values())
	} else {
		s.Context, s.cancel = context.WithDeadline(c.values(), c.deadline)
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
	case !time.Now().Before(c.deadline):
		return context.DeadlineExceeded
	}
	return nil
}

// Value asks std if there is one: package context looks there for what it needs to end
// the children of c.
func (c *loadCtx) Value(key any) any {
	if key == (loadKey{}) {
		return c
	}
	if s := c.std.Load(); s != nil {
		return s.Value(key)
	}
	return c.values().Value(key)
}

// values returns a ctx with the values of the call that began the load, which never ends.
func (c *loadCtx) values() context.Context { return context.WithoutCancel(c.caller) }
