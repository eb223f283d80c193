package resiliencehttp

import (
	"context"
	"sync/atomic"
	"time"
)

// A deadlineCtx is the caller's ctx with the Timeout of a client. It becomes a ctx of package
// context when something waits for its end, and costs nothing until then. Whatever sends a
// request or waits beside it has a timer of its own for the same time.
type deadlineCtx struct {
	context.Context // the caller's
	at              time.Time
	cause           error
	timed           atomic.Pointer[timedCtx]
}

type timedCtx struct {
	context.Context
	stop context.CancelFunc
}

// watched returns the ctx of package context.
func (d *deadlineCtx) watched() *timedCtx {
	if t := d.timed.Load(); t != nil {
		return t
	}
	ctx, stop := context.WithDeadlineCause(d.Context, d.at, d.cause)
	t := &timedCtx{ctx, stop}
	if !d.timed.CompareAndSwap(nil, t) {
		stop()
		return d.timed.Load()
	}
	return t
}

// present returns the ctx that has the end of d so far.
func (d *deadlineCtx) present() context.Context {
	if t := d.timed.Load(); t != nil {
		return t
	}
	return d.Context
}

// stop releases the timer, if there is one.
func (d *deadlineCtx) stop() {
	if t := d.timed.Load(); t != nil {
		t.stop()
	}
}

func (d *deadlineCtx) Deadline() (time.Time, bool) { return d.at, true }
func (d *deadlineCtx) Done() <-chan struct{}       { return d.watched().Done() }
func (d *deadlineCtx) Err() error                  { return d.present().Err() }
func (d *deadlineCtx) Value(key any) any           { return d.present().Value(key) }

// AfterFunc spares a ctx derived from d a goroutine: package context looks for it.
func (d *deadlineCtx) AfterFunc(f func()) (stop func() bool) {
	return context.AfterFunc(d.watched().Context, f)
}
