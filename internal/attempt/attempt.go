// Package attempt marks the ctx of an operation that a retrier retries. Nested retriers
// find the mark, and only the outermost retries.
package attempt

import "context"

// Key is the key of the attempt's number, an int, among the values of a ctx.
type Key struct{}

// A marked ctx differs from the one in it by a value alone.
type marked struct {
	context.Context
	n int
}

func (m *marked) Value(key any) any {
	if key == (Key{}) {
		return m.n
	}
	return m.Context.Value(key)
}

// With returns ctx marked as the ctx of the nth attempt, from 1. Zero begins a new
// operation, which no retrier retries yet.
func With(ctx context.Context, n int) context.Context { return &marked{ctx, n} }

// From returns the number of the attempt that ctx belongs to. It returns 0 and false if no
// retrier retries the operation.
func From(ctx context.Context) (n int, ok bool) {
	n, _ = ctx.Value(Key{}).(int)
	return n, n > 0
}

// Unmarked returns ctx without its outermost marks, and so a ctx that ends when ctx does.
func Unmarked(ctx context.Context) context.Context {
	for {
		m, ok := ctx.(*marked)
		if !ok {
			return ctx
		}
		ctx = m.Context
	}
}
