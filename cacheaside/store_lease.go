package cacheaside

import (
	"context"
	"slices"
	"sync"
	"time"
)

// ask asks the Store about the key of f. ok is false if the Store cannot be asked or
// does not answer, or if f has been answered meanwhile.
func (s *shared[K, V]) ask(f *flight[K, V]) (look Lookup, c claim, asked time.Duration, ok bool) {
	a := f.asked
	f.asked = nil
	if a == nil {
		a = &answer{ask: s.askFor(f)}
		s.acquire(f.ctx, s.shardOf(f.written), []*answer{a})
	}
	if !a.ok {
		return look, c, 0, false
	}
	if a.look.State == Leased {
		c = claim{a.ask.Token, a.look.Grant}
	}
	select {
	case <-f.done: // no caller waits any more
		s.release(f, c)
		return look, claim{}, 0, false
	default:
	}
	f.looked = a.at
	return a.look, c, a.at, true
}

// askFor returns the Ask of f: for a lease, unless a load of the key failed recently.
func (s *shared[K, V]) askFor(f *flight[K, V]) Ask {
	ask := Ask{Key: f.written, Refresh: f.refresh}
	if !f.shard.paused(f.key, s.c.now()) {
		ask.Token = newToken()
	}
	return ask
}

// An answer is what the Store has answered to an Ask, if ok is true.
type answer struct {
	ask  Ask
	look Lookup
	at   time.Duration // time of the call
	ok   bool
}

// acquire asks the Store about keys of one shard. It waits for the answer even if ctx
// ends: other processes would wait for a lease that this process does not know about.
func (s *shared[K, V]) acquire(ctx context.Context, shard int, answers []*answer) {
	at := s.c.now() // before trusts: an invalidation in between is later than at
	asks, asked := make([]Ask, 0, len(answers)), make([]*answer, 0, len(answers))
	for _, a := range answers {
		if s.trusts(a.ask.Key) {
			asks, asked = append(asks, a.ask), append(asked, a)
		}
	}
	if len(asks) == 0 {
		return
	}
	if s.mayAsk(shard) != nil {
		s.probe(shard, asks[0].Key)
		return
	}
	looks, err := s.store.Acquire(context.WithoutCancel(ctx), asks...)
	if err != nil {
		s.failed(ctx, shard, at, err)
		for _, ask := range asks { // the lease may have been granted nevertheless
			s.abandon(ask)
		}
		return
	}
	s.worked(ctx, shard)
	for i, a := range asked {
		a.look, a.at, a.ok = looks[i], at, true
	}
}

// launchMany asks the Store about the keys of flights, one shard at a time, and starts
// them.
func (s *shared[K, V]) launchMany(flights []*flight[K, V]) {
	var calls [][]*flight[K, V]
	for _, some := range byShard(s.store, flights, func(f *flight[K, V]) string { return f.written }) {
		calls = slices.AppendSeq(calls, slices.Chunk(some, mostAtOnce))
	}
	free := make(chan struct{}, mostCalls)
	for _, some := range calls {
		s.c.running.Go(func() { // until then the flights keep Close waiting
			free <- struct{}{}
			defer func() { <-free }()
			s.launchShard(some)
		})
	}
}

func (s *shared[K, V]) launchShard(flights []*flight[K, V]) {
	defer func() {
		_ = recover() // the Store will panic again for each flight, which turns it into an error
		for _, f := range flights {
			go s.c.fly(f)
		}
	}()
	answers := make([]*answer, len(flights))
	for i, f := range flights {
		answers[i] = &answer{ask: s.askFor(f)}
	}
	s.acquire(flights[0].ctx, s.shardOf(flights[0].written), answers)
	for i, f := range flights {
		f.asked = answers[i]
	}
}

// release returns a lease.
func (s *shared[K, V]) release(f *flight[K, V], c claim) {
	if c.token == "" {
		return
	}
	ctx, shard, asked := context.WithoutCancel(f.ctx), s.shardOf(f.written), s.c.now()
	err := s.mayAsk(shard)
	if err == nil {
		if err = s.store.Release(ctx, f.written, c.token); err == nil {
			s.worked(ctx, shard)
			return
		}
		s.failed(ctx, shard, asked, err)
	}
	s.abandon(Ask{Key: f.written, Token: c.token})
}

// abandoned are leases that the Store may have granted without an answer. They are
// released when it answers again.
type abandoned struct {
	mu   sync.Mutex
	asks []Ask
}

const mostAbandoned = 1000 // further ones end by themselves

func (a *abandoned) len() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.asks)
}

func (s *shared[K, V]) abandon(ask Ask) {
	if ask.Token == "" {
		return
	}
	a := &s.abandoned
	a.mu.Lock()
	if len(a.asks) < mostAbandoned {
		a.asks = append(a.asks, ask)
	}
	a.mu.Unlock()
	s.catchUp()
}

// releaseAbandoned releases the abandoned leases until the Store fails.
func (s *shared[K, V]) releaseAbandoned(ctx context.Context) error {
	a := &s.abandoned
	for {
		a.mu.Lock()
		if len(a.asks) == 0 {
			a.mu.Unlock()
			return nil
		}
		ask := a.asks[len(a.asks)-1]
		a.asks = a.asks[:len(a.asks)-1]
		a.mu.Unlock()
		asked := s.c.now()
		// Try once: a lease is short.
		if err := s.store.Release(ctx, ask.Key, ask.Token); err != nil {
			s.failed(ctx, s.shardOf(ask.Key), asked, err)
			return err
		}
		s.worked(ctx, s.shardOf(ask.Key))
	}
}

// fill stores the result of f. e is nil if nothing is remembered.
func (s *shared[K, V]) fill(f *flight[K, V], c claim, e *entry[V]) {
	if c.token == "" {
		return
	}
	ctx, now, shard := context.WithoutCancel(f.ctx), s.c.now(), s.shardOf(f.written)
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
		s.c.tell(ctx, EventCodecFailed, f.key, err)
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

// remove deletes the old value of f from the Store. The key no longer exists, so no
// process may serve the value when a load fails.
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

// A fillQueue fills one shard. It makes one call at a time, which includes all fillings
// that arrived during the previous one.
type fillQueue struct {
	mu      sync.Mutex
	busy    bool
	waiting []*filling
}

type filling struct {
	Filling
	ready   chan struct{} // closed when the filling has been sent, or must send the waiting ones
	sent    bool
	current bool // nothing was invalidated since the grant
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
		y.sent, y.err = true, errNotFilled // in case call panics
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
