package cacheaside

import (
	"context"
	"fmt"
	"runtime/debug"
	"slices"
	"sync"
	"time"
)

// A fenced write is the write of an Update, between Fence and Unfence.
type fencedWrite[K comparable, V any] struct {
	s       *shared[K, V]
	key     K
	written string
	shard   int
	token   string // "": the Store was not asked for a fence
	stands  bool
	until   time.Duration // by then write has returned, if it heeds its ctx; the fence stands for longer
}

// fence fences key and returns the ctx of its writer.
func (s *shared[K, V]) fence(ctx context.Context, key K) (*fencedWrite[K, V], context.Context, context.CancelFunc) {
	w := &fencedWrite[K, V]{s: s, key: key, written: s.c.cfg.Key(key)}
	w.shard = s.shardOf(w.written)
	begun, now := time.Now(), s.c.now()
	err := s.mayAsk(w.shard)
	if err == nil {
		w.token = newToken()
		var window time.Duration
		// Its answer is waited for even if ctx ends: a fence that nobody knows of
		// would stand until its time is over.
		window, err = s.store.Fence(context.WithoutCancel(ctx), w.written, w.token)
		if err == nil {
			s.worked(ctx, w.shard)
			w.stands, w.until = true, now+window
			writeCtx, cancel := context.WithDeadlineCause(ctx, begun.Add(window),
				&TimeoutError{Name: s.c.cfg.Name, What: "write", After: window})
			return w, writeCtx, cancel
		}
		s.failed(ctx, w.shard, now, err)
	}
	s.c.tell(ctx, FenceFailed, key, err)
	return w, ctx, func() {}
}

// unfence takes the fence down and tells memory. It returns an error if other
// processes may get the old value: that is, if the Store could not be told and no
// fence keeps the old value out of it.
func (w *fencedWrite[K, V]) unfence(ctx context.Context) error {
	s := w.s
	ended := s.c.now()
	err := s.announce(ctx, []K{w.key}, w.token, func(ctx context.Context, keys []string) error {
		if w.token == "" {
			return s.store.Invalidate(ctx, keys...)
		}
		return s.store.Unfence(ctx, w.written, w.token)
	}, s.c.forget)
	if w.stands && ended < w.until {
		return nil
	}
	return err
}

// announce tells the Store and then memory: in the other order a flight could read
// the old value from the Store in between, and keep it. It sees to it that the Store
// is told in the end; until then what it holds of the keys is not used here.
func (s *shared[K, V]) announce(ctx context.Context, keys []K, token string,
	there func(context.Context, []string) error, here func(K)) error {
	// The change is made: that the caller has gone is no reason to stop.
	ctx = context.WithoutCancel(ctx)
	changes := make([]*change[K], len(keys))
	for i, key := range keys {
		changes[i] = &change[K]{key: key, written: s.c.cfg.Key(key)}
	}
	tell := func(shard int, changes []*change[K]) {
		if s.c.breaks.order {
			for _, ch := range changes {
				here(ch.key)
			}
		}
		err := s.tellShard(ctx, shard, changes, there)
		for _, ch := range changes {
			if ch.err = err; err != nil {
				s.untold.add(ch.written, token)
			}
			if !s.c.breaks.order {
				here(ch.key)
			}
		}
	}
	var telling sync.WaitGroup
	free := make(chan struct{}, mostCalls)
	for shard, changes := range byShard(s.store, changes, func(ch *change[K]) string { return ch.written }) {
		for some := range slices.Chunk(changes, mostAtOnce) {
			if len(some) == len(keys) { // most often
				tell(shard, some)
				continue
			}
			telling.Go(func() {
				free <- struct{}{}
				defer func() { <-free }()
				tell(shard, some)
			})
		}
	}
	telling.Wait()
	return s.notTold(ctx, changes)
}

// A change is a key that the Store is to be told of.
type change[K comparable] struct {
	key     K
	written string
	err     error
}

// tellShard tells the Store of changes to keys of one shard, unless it is down.
func (s *shared[K, V]) tellShard(ctx context.Context, shard int, changes []*change[K],
	there func(context.Context, []string) error) (err error) {
	asked := s.c.now()
	if err := s.mayAsk(shard); err != nil {
		return err
	}
	written := make([]string, len(changes))
	for i, ch := range changes {
		written[i] = ch.written
	}
	defer func() {
		if v := recover(); v != nil { // memory is to be told all the same
			err = fmt.Errorf("the Store panicked: %v\n%s", v, debug.Stack())
		}
		if err != nil {
			s.failed(ctx, shard, asked, err)
		}
	}()
	if err := there(ctx, written); err != nil {
		return err
	}
	for _, key := range written {
		s.recent.note(tell{key: key, at: s.c.now()})
	}
	s.worked(ctx, shard)
	return nil
}

// notTold returns an error that says which changes the Store could not be told of,
// or nil.
func (s *shared[K, V]) notTold(ctx context.Context, changes []*change[K]) error {
	var failed *InvalidateError
	for _, ch := range changes {
		if ch.err == nil {
			continue
		}
		if failed == nil {
			failed = &InvalidateError{Name: s.c.cfg.Name, Err: ch.err}
		}
		failed.Keys = append(failed.Keys, ch.written)
		s.c.tell(ctx, NotInvalidated, ch.key, ch.err)
	}
	if failed == nil {
		return nil
	}
	s.catchUp()
	return failed
}

func (s *shared[K, V]) announceAll(ctx context.Context) error {
	ctx = context.WithoutCancel(ctx)
	asked := s.c.now()
	err := s.mayAsk(allShards)
	if err == nil {
		if err = s.store.InvalidateAll(ctx); err == nil {
			s.recent.note(tell{all: true, at: s.c.now()})
			s.worked(ctx, allShards)
			return nil
		}
		s.failed(ctx, allShards, asked, err)
	}
	s.untold.addAll()
	s.c.tellAll(ctx, NotInvalidated, err)
	s.catchUp()
	return &InvalidateError{Name: s.c.cfg.Name, Err: err}
}
