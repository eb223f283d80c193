package bulkhead

import (
	"context"
	"sync/atomic"
)

type weightKey struct{}

// WithWeight returns a ctx whose calls take n slots of every bulkhead that they
// pass through. A weight below 1 counts as 1.
//
// While the first waiter of a level needs more slots than are free, lighter calls
// behind it may take those, until they have taken as many as the limit has since the
// first of that level was last served. From then on, free slots are kept for the first.
// So heavy calls neither starve behind light ones nor hold them up for ever. Where the
// newest waiter is first (LIFO), a heavy one stays first once a slot was free and was
// not enough for it.
//
// A call that is heavier than the limit, less what Reserve keeps for the levels
// above, is refused immediately: [TooHeavy].
func WithWeight(ctx context.Context, n int) context.Context {
	weighted.Store(true)
	return context.WithValue(ctx, weightKey{}, max(n, 1))
}

// weighted says that there are weights in this program. Until then a call need not
// look for one in its ctx, which is slow where that is deep.
var weighted atomic.Bool

func weightOf(ctx context.Context) int {
	if n, ok := ctx.Value(weightKey{}).(int); ok {
		return n
	}
	return 1
}
