// Package attempt marks the ctx of an operation that a retrier retries. If retriers are nested, the inner
// retriers find the mark, and only the outermost retrier retries.
package attempt

import "context"

type key struct{}

// first is the ctx of all first attempts under context.Background. It is shared, because the creation of a ctx would
// be the only allocation of a call that succeeds.
var first = context.WithValue(context.Background(), key{}, 1)

// With returns ctx, marked as the ctx of attempt n. Attempts are numbered from 1. If n is 0, the mark means that a
// new operation starts, which no retrier retries yet.
func With(ctx context.Context, n int) context.Context {
	if n == 1 && ctx == context.Background() {
		return first
	}
	return context.WithValue(ctx, key{}, n)
}

// From returns the number of the attempt that ctx belongs to. It returns 0 and false if no retrier retries the
// operation.
func From(ctx context.Context) (n int, ok bool) {
	n, _ = ctx.Value(key{}).(int)
	return n, n > 0
}
