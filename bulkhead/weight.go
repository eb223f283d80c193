package bulkhead

import "context"

type weightKey struct{}

// WithWeight returns a ctx whose calls take n slots of every bulkhead that they
// pass through. A weight below 1 counts as 1.
//
// A call that waits for many slots is passed by lighter calls behind it, which
// fit into what is free, until these have taken as many slots as the limit has;
// from then on, free slots are kept for it. A call that is heavier than the
// limit, less what is kept for the levels above, is refused at once: [TooHeavy].
func WithWeight(ctx context.Context, n int) context.Context {
	return context.WithValue(ctx, weightKey{}, max(n, 1))
}

func weightOf(ctx context.Context) int {
	if n, ok := ctx.Value(weightKey{}).(int); ok {
		return n
	}
	return 1
}
