package resiliencehttp

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
)

// A loose is the Done, Err and AfterFunc of a ctx that ends with the caller's ctx or by
// cancel. It does what a ctx of context.WithCancelCause would, for fewer allocations: see
// docs/decisions/http-client.md. It becomes such a ctx when it ends.
type loose struct {
	caller context.Context // nil if that never ends
	leave  func() bool     // unties it from caller
	ended  atomic.Pointer[endedCtx]

	mu    sync.Mutex
	done  chan struct{} // nil until somebody asks for it
	funcs []func()      // to be called when it ends; nil where one was removed
	few   [2]func()     // the memory of funcs, mostly
	body  *body         // to be ended with it; nil if there is none
}

// An endedCtx is a ctx of package context that has ended, with a cause.
type endedCtx struct {
	context.Context
	err error
}

var endedWell = newEndedCtx(nil)

func newEndedCtx(cause error) *endedCtx {
	ctx, cancel := context.WithCancelCause(context.Background())
	cancel(cause)
	if errors.Is(cause, context.DeadlineExceeded) {
		return &endedCtx{ctx, context.DeadlineExceeded} // as the ctx of the time-out says
	}
	return &endedCtx{ctx, context.Canceled}
}

// tie has l end with the caller's ctx.
func (l *loose) tie(caller context.Context) {
	if caller.Done() != nil {
		l.caller = caller
		l.leave = context.AfterFunc(caller, func() { l.cancel(context.Cause(caller)) })
	}
}

// cancel ends l with a cause. Nil means that it is not needed any more.
func (l *loose) cancel(cause error) {
	end := endedWell
	if cause != nil {
		end = newEndedCtx(cause)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.ended.CompareAndSwap(nil, end) {
		return
	}
	if l.done != nil {
		close(l.done)
	}
	for _, f := range l.funcs {
		if f != nil {
			go f()
		}
	}
	if l.body != nil {
		go l.body.ctxEnded()
	}
	l.funcs, l.body = nil, nil
}

// watch has the body ended with l.
func (l *loose) watch(b *body) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended.Load() != nil {
		go b.ctxEnded()
		return
	}
	l.body = b
}

// unwatch undoes watch.
func (l *loose) unwatch() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.body = nil
}

// release unties l from the caller's ctx and ends it.
func (l *loose) release() {
	if l.leave != nil {
		l.leave()
	}
	l.cancel(nil)
}

func (l *loose) Done() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.done == nil {
		l.done = make(chan struct{})
		if l.ended.Load() != nil {
			close(l.done)
		}
	}
	return l.done
}

// Err also ends l if the caller's ctx has ended: a function of AfterFunc runs a moment later.
func (l *loose) Err() error {
	end := l.ended.Load()
	if end == nil && l.caller != nil && l.caller.Err() != nil {
		l.cancel(context.Cause(l.caller))
		end = l.ended.Load()
	}
	if end != nil {
		return end.err
	}
	return nil
}

// endValue returns what context.Cause looks for, if l has ended.
func (l *loose) endValue(key any) any {
	if end := l.ended.Load(); end != nil {
		return end.Value(key)
	}
	return nil
}

// AfterFunc does what context.AfterFunc does with a ctx.
func (l *loose) AfterFunc(f func()) (stop func() bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended.Load() != nil {
		go f()
		return func() bool { return false }
	}
	if l.funcs == nil {
		l.funcs = l.few[:0]
	}
	i := len(l.funcs)
	l.funcs = append(l.funcs, f)
	return func() bool { return l.remove(i) }
}

// remove reports whether it has kept the ith function of AfterFunc from being called.
func (l *loose) remove(i int) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if i >= len(l.funcs) || l.funcs[i] == nil {
		return false
	}
	l.funcs[i] = nil
	return true
}
