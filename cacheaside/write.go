package cacheaside

import (
	"context"
	"time"

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
	if c.shared == nil {
		defer c.forget(key)
		return write(ctx)
	}
	w, writeCtx, cancel := c.shared.fence(ctx, key)
	defer cancel()
	// Calls from now on find the fence in the Store. The entry in memory would outlive a
	// write that never returns.
	c.forget(key)
	defer func() {
		if untold := w.unfence(ctx); untold != nil {
			if err == nil {
				err = untold
			} else {
				err = &untoldError{err, untold}
			}
		}
	}()
	if writeCtx.Err() != nil {
		return ended.Error(writeCtx)
	}
	return write(writeCtx)
}

// A fencedWrite is the write of a Write, between Fence and Unfence.
type fencedWrite[K comparable, V any] struct {
	s       *shared[K, V]
	key     K
	written string
	shard   int
	token   string        // "" if the Store was not asked for a fence
	until   time.Duration // end of the ctx of write, 0 without a fence; the fence stands longer
}

// fence fences key and returns the ctx for the write.
func (s *shared[K, V]) fence(ctx context.Context, key K) (*fencedWrite[K, V], context.Context, context.CancelFunc) {
	w := &fencedWrite[K, V]{s: s, key: key, written: s.c.cfg().Key(key)}
	w.shard = s.shardOf(w.written)
	begun, now := time.Now(), s.c.now()
	err := s.mayAsk(w.shard)
	if err == nil {
		w.token = newToken()
		var window time.Duration
		// Wait for the answer even if ctx ends: a fence that nobody removes would stand
		// until it falls.
		window, err = s.store.Fence(context.WithoutCancel(ctx), w.written, w.token)
		if err == nil {
			s.worked(ctx, w.shard)
			w.until = now + window
			writeCtx, cancel := context.WithDeadlineCause(ctx, begun.Add(window),
				&TimeoutError{Name: s.c.cfg().Name, What: "write", After: window})
			return w, writeCtx, cancel
		}
		s.failed(ctx, w.shard, now, err)
	}
	s.c.tell(ctx, EventFenceFailed, key, err)
	return w, ctx, func() {}
}

// unfence removes the fence and invalidates memory. It returns an error if other
// processes may read the old value: the Store could not be told and no fence stands.
func (w *fencedWrite[K, V]) unfence(ctx context.Context) error {
	s := w.s
	ended := s.c.now()
	err := s.announce(ctx, []K{w.key}, w.token, func(ctx context.Context, keys []string) error {
		if w.token == "" {
			return s.store.Invalidate(ctx, keys...)
		}
		return s.store.Unfence(ctx, w.written, w.token)
	}, s.c.forget)
	if ended < w.until {
		return nil
	}
	return err
}
