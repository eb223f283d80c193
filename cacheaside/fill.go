package cacheaside

import (
	"context"
	"sync"
)

// fill stores what f loaded; e is nil if there is nothing to remember.
func (s *shared[K, V]) fill(f *flight[K, V], c claim, e *entry[V]) {
	if c.token == "" {
		return
	}
	ctx, now, shard := context.WithoutCancel(&f.ctx), s.c.now(), s.shardOf(f.written)
	if e == nil || e.keep <= now {
		if f.old.Load() == nil {
			s.release(f, c)
		} else {
			s.remove(ctx, f)
		}
		return
	}
	data, err := s.c.seal(f.key, e)
	if err != nil {
		s.c.tell(ctx, BadPayload, f.key, err)
		s.release(f, c)
		return
	}
	x := &filling{
		Filling: Filling{Key: f.written, Grant: c.grant, Value: data, Fresh: e.fresh - now, Keep: e.keep - now},
		ready:   make(chan struct{}),
	}
	s.fills[shard].send(x, func(values []Filling) ([]bool, error) {
		asked := s.c.now()
		if err := s.mayAsk(shard); err != nil {
			return nil, err
		}
		current, err := s.store.Fill(ctx, values...)
		if err != nil {
			s.failed(ctx, shard, asked, err)
		} else {
			s.worked(ctx, shard)
		}
		return current, err
	})
	f.invalidated = x.err == nil && !x.current
	if x.err != nil {
		s.abandon(Ask{Key: f.written, Token: c.token})
	}
}

// remove takes the old value of f from the Store: it is gone for good, and no process
// may serve it when a load fails.
func (s *shared[K, V]) remove(ctx context.Context, f *flight[K, V]) {
	gone := []*change[K]{{key: f.key, written: f.written}}
	err := s.tellShard(ctx, s.shardOf(f.written), gone, func(ctx context.Context, keys []string) error {
		return s.store.Invalidate(ctx, keys...)
	})
	if err != nil {
		s.untold.add(f.written, "")
		s.catchUp()
	}
}

// A fillQueue fills one shard. One call is under way at a time; the fillings that
// arrive meanwhile go along with the next.
type fillQueue struct {
	mu      sync.Mutex
	busy    bool
	waiting []*filling
}

type filling struct {
	Filling
	ready   chan struct{} // closed when it has been sent, or is to send what waits
	sent    bool
	current bool // nothing was invalidated since its grant
	err     error
}

func (q *fillQueue) send(x *filling, call func([]Filling) ([]bool, error)) {
	q.mu.Lock()
	q.waiting = append(q.waiting, x)
	if q.busy {
		q.mu.Unlock()
		<-x.ready
		if x.sent {
			return
		}
		q.mu.Lock()
	}
	q.busy = true
	some := q.waiting[:min(len(q.waiting), mostAtOnce)] // x is the first
	q.waiting = q.waiting[len(some):]
	q.mu.Unlock()

	values := make([]Filling, len(some))
	for i, y := range some {
		values[i] = y.Filling
		y.sent, y.err = true, errNotFilled // if call panics
	}
	defer func() {
		for _, y := range some[1:] {
			close(y.ready)
		}
		q.mu.Lock()
		defer q.mu.Unlock()
		if q.busy = len(q.waiting) > 0; q.busy {
			close(q.waiting[0].ready)
		}
	}()
	current, err := call(values)
	for i, y := range some {
		y.err = err
		if err == nil {
			y.current = current[i]
		}
	}
}
