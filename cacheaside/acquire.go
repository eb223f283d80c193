package cacheaside

import (
	"context"
	"sync"
	"time"
)

// ask asks the Store about the key of f. It is not ok if the Store cannot be asked,
// or does not answer, or f was answered meanwhile.
func (s *shared[K, V]) ask(f *flight[K, V]) (look Lookup, c claim, asked time.Duration, ok bool) {
	a := f.asked
	f.asked = nil
	if a == nil {
		a = &answer{ask: s.askFor(f)}
		s.acquire(&f.ctx, s.shardOf(f.written), []*answer{a})
	}
	if !a.ok {
		return look, c, 0, false
	}
	if a.look.State == Leased {
		c = claim{a.ask.Token, a.look.Grant}
	}
	select {
	case <-f.done: // nobody waits for it any more
		s.release(f, c)
		return look, claim{}, 0, false
	default:
	}
	return a.look, c, a.at, true
}

// askFor returns what f asks the Store: for a lease, unless a load of its key has
// failed a moment ago.
func (s *shared[K, V]) askFor(f *flight[K, V]) Ask {
	ask := Ask{Key: f.written, Renew: f.renew}
	if !f.shard.paused(f.key, s.c.now()) {
		ask.Token = newToken()
	}
	return ask
}

// An answer is what the Store has said to an Ask, if it is ok.
type answer struct {
	ask  Ask
	look Lookup
	at   time.Duration // when it was asked
	ok   bool
}

// acquire asks the Store; the keys are of one shard. It waits for the answer even if
// ctx ends: a lease that nobody knows of would make every other process wait.
func (s *shared[K, V]) acquire(ctx context.Context, shard int, answers []*answer) {
	asks := make([]Ask, 0, len(answers))
	for _, a := range answers {
		if s.trusts(a.ask.Key) {
			asks = append(asks, a.ask)
		}
	}
	if len(asks) == 0 {
		return
	}
	if s.mayAsk(shard) != nil {
		s.probe(shard, asks[0].Key)
		return
	}
	at := s.c.now()
	looks, err := s.store.Acquire(context.WithoutCancel(ctx), asks...)
	if err != nil {
		s.failed(ctx, shard, at, err)
		for _, ask := range asks { // it may have been granted all the same
			s.abandon(ask)
		}
		return
	}
	s.worked(ctx, shard)
	for _, a := range answers {
		if len(asks) > 0 && a.ask.Key == asks[0].Key && a.ask.Token == asks[0].Token {
			a.look, a.at, a.ok = looks[0], at, true
			asks, looks = asks[1:], looks[1:]
		}
	}
}

// launchMany asks the Store for what flights are to answer, a shard at a time, and
// lets them fly.
func (s *shared[K, V]) launchMany(flights []*flight[K, V]) {
	var calls [][]*flight[K, V]
	for _, some := range byShard(s.store, flights, func(f *flight[K, V]) string { return f.written }) {
		for len(some) > mostAtOnce {
			calls = append(calls, some[:mostAtOnce])
			some = some[mostAtOnce:]
		}
		calls = append(calls, some)
	}
	free := make(chan struct{}, mostCalls)
	for _, some := range calls {
		s.c.running.Go(func() { // until then the flights hold the Cache open
			free <- struct{}{}
			defer func() { <-free }()
			s.launchShard(some)
		})
	}
}

func (s *shared[K, V]) launchShard(flights []*flight[K, V]) {
	defer func() {
		_ = recover() // a Store that panics will do so again for each flight, which makes it an error
		for _, f := range flights {
			go s.c.fly(f)
		}
	}()
	answers := make([]*answer, len(flights))
	for i, f := range flights {
		answers[i] = &answer{ask: s.askFor(f)}
	}
	s.acquire(&flights[0].ctx, s.shardOf(flights[0].written), answers)
	for i, f := range flights {
		f.asked = answers[i]
	}
}

// release gives a lease back.
func (s *shared[K, V]) release(f *flight[K, V], c claim) {
	if c.token == "" {
		return
	}
	ctx, shard, asked := context.WithoutCancel(&f.ctx), s.shardOf(f.written), s.c.now()
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

// abandoned are the leases that the Store may have granted without an answer. It is
// told to release them when it answers again.
type abandoned struct {
	mu   sync.Mutex
	asks []Ask
}

const mostAbandoned = 1000 // the rest end when their time is over

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

// releaseAbandoned releases what was abandoned, until the Store does not answer.
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
		// Once: the time of the lease is short.
		if err := s.store.Release(ctx, ask.Key, ask.Token); err != nil {
			s.failed(ctx, s.shardOf(ask.Key), asked, err)
			return err
		}
		s.worked(ctx, s.shardOf(ask.Key))
	}
}
