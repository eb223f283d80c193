package cacheaside

import (
	"context"
	"time"

	"github.com/go-resilience/resilience/cacheaside/internal/tier"
	"github.com/go-resilience/resilience/internal/ended"
)

// Write calls write, which changes in the store of record what Load reads for key, and
// then invalidates key. It invalidates even if write fails or panics, since the change
// may have been made. It returns the error of write.
//
// With a Store, Write fences the key before it calls write. While the fence stands,
// every process reads the store of record and keeps nothing. The ctx of write ends
// before the fence does (see Config.WriteTimeout of package redisstore), with a
// [*TimeoutError] as its cause. If the Store cannot be reached, write runs without a
// fence.
//
// If the Store cannot be told after the write, the fence still keeps the old value out
// of the Store, and Write returns the error of write: other processes miss until the
// Store has been told or the fence has fallen. Other processes can read the old value
// only if there was no fence either. Write then returns an [*InvalidateError], joined to
// the error of write if there is one. It matches [ErrUntold] and does not mean that the
// write failed; [WriteError] removes it. OnEvent reports each of these cases.
func (c *Cache[K, V]) Write(ctx context.Context, key K, write func(context.Context) error) (err error) {
	if ctx.Err() != nil {
		return ended.Error(ctx)
	}
	if c.closed.Load() {
		return ErrClosed
	}
	if c.tier == nil {
		defer c.forget(key)
		return write(ctx)
	}
	fence, begun := c.fence(ctx, key)
	// Calls from now on find the fence in the Store. The entry in memory would outlive a
	// write that never returns.
	c.forget(key)
	defer func() {
		if untold := c.unfence(ctx, key, fence, begun); untold != nil {
			if err == nil {
				untold.written = true
				err = untold
			} else {
				err = &untoldError{err, untold}
			}
		}
	}()
	if fence.Window > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadlineCause(ctx, begun.Add(fence.Window),
			&TimeoutError{Name: c.cfg().Name, What: "write", After: fence.Window})
		defer cancel()
	}
	if ctx.Err() != nil {
		return ended.Error(ctx)
	}
	return write(ctx)
}

// fence fences key, if the Store can be reached, and returns when it began to.
func (c *Cache[K, V]) fence(ctx context.Context, key K) (tier.Fence, time.Time) {
	begun := time.Now()
	fence, err := c.tier.Fence(ctx, c.cfg().Key(key))
	if err != nil {
		c.tell(ctx, EventFenceFailed, key, err)
	}
	return fence, begun
}

// unfence removes the fence and invalidates key. It returns an error if other processes
// may read the old value: the Store could not be told and no fence stands.
func (c *Cache[K, V]) unfence(ctx context.Context, key K, fence tier.Fence, begun time.Time) *InvalidateError {
	stands := time.Since(begun) < fence.Window
	untold := c.announce(ctx, []K{key}, c.forget, func(t *tier.Tier, ctx context.Context, keys []string, told func(int)) []error {
		return t.Unfence(ctx, keys, fence, told)
	})
	if stands {
		return nil
	}
	return untold
}
