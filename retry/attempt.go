package retry

import (
	"context"
	"reflect"
	"sync"
)

// AttemptFrom returns the number of the attempt that ctx belongs to, from 1. ok
// is false if no [Retrier] is at work. Of nested ones it is the number of the
// innermost that retries.
//
// It is there for what a server or a trace should know: a header, an attribute
// of a span.
func AttemptFrom(ctx context.Context) (n int, ok bool) {
	n, ok = ctx.Value(attemptKey{}).(int)
	return n, ok
}

type attemptKey struct{}

// attemptCtx marks a ctx as that of the nth attempt. It never changes, and so is
// safe to keep after its call, and to share.
type attemptCtx struct {
	context.Context
	n int
}

func (c *attemptCtx) Value(key any) any {
	if key == (attemptKey{}) {
		return c.n
	}
	return c.Context.Value(key)
}

var firstOfBackground = &attemptCtx{context.Background(), 1}

// firsts holds the marked contexts of first attempts that were made last, for
// calls that come one after another under the same ctx.
var firsts sync.Pool

// firstAttempt marks ctx as that of a first attempt. All calls under one ctx may
// use the same mark, so it goes back into the pool as soon as it is found or
// made, and the pool forgets it with the next collections of garbage.
func firstAttempt(ctx context.Context) context.Context {
	if ctx == context.Background() {
		return firstOfBackground
	}
	m, _ := firsts.Get().(*attemptCtx)
	if m == nil || m.Context != ctx {
		m = &attemptCtx{ctx, 1}
		if reflect.TypeOf(ctx).Kind() != reflect.Pointer {
			return m // to compare it might panic
		}
	}
	firsts.Put(m)
	return m
}
