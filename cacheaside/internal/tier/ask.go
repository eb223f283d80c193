package tier

import (
	"context"
	"slices"
	"sync"
	"time"
)

// A Claim is a lease granted by the Store. The zero Claim is none.
type Claim struct {
	token, grant string
}

// A Question is about one key: what it asks, and what the Store has answered, if OK.
type Question struct {
	Key     string
	Lease   bool // whether it wants the lease
	Refresh bool // even if the value is fresh

	OK     bool
	Lookup Lookup
	At     time.Duration // when it was asked
	Claim  Claim         // if the State is Leased

	token string
}

func (q *Question) ask() Ask {
	if q.Lease {
		q.token = newToken()
	}
	return Ask{Key: q.Key, Token: q.token, Refresh: q.Refresh}
}

// Ask asks one question. It waits for the answer even if ctx ends: other processes would
// wait for a lease that this process does not know about.
func (t *Tier) Ask(ctx context.Context, q *Question) {
	t.askShard(ctx, t.shardOf(q.Key), []*Question{q})
}

// AskMany asks several questions, and calls asked for those of each call of the Store, on
// a goroutine of its own.
func (t *Tier) AskMany(ctx context.Context, questions []*Question, asked func(some []*Question)) {
	free := make(chan struct{}, mostCalls)
	for shard, questions := range byShard(t, questions, func(q *Question) string { return q.Key }) {
		for some := range slices.Chunk(questions, mostAtOnce) {
			t.Go(func() {
				free <- struct{}{}
				defer func() { <-free }()
				defer asked(some) // even if a hook ends the goroutine
				t.askShard(ctx, shard, some)
			})
		}
	}
}

func (t *Tier) askShard(ctx context.Context, shard int, questions []*Question) {
	at := t.Now() // before trusts: an invalidation in between is later than at
	asks, asked := make([]Ask, 0, len(questions)), make([]*Question, 0, len(questions))
	for _, q := range questions {
		if t.trusts(q.Key) {
			asks, asked = append(asks, q.ask()), append(asked, q)
		}
	}
	if len(asks) == 0 {
		return
	}
	if t.mayAsk(shard) != nil {
		t.probe(shard, asks[0].Key)
		return
	}
	var looks []Lookup
	err := guarded(func() (err error) {
		looks, err = t.store.Acquire(context.WithoutCancel(ctx), asks...)
		return complete(len(looks), len(asks), err)
	})
	for i, q := range asked {
		if err != nil { // the lease may have been granted nevertheless
			t.abandon(q.Key, q.token)
			continue
		}
		q.Lookup, q.At, q.OK = looks[i], at, true
		if q.Lookup.State == Leased {
			q.Claim = Claim{q.token, q.Lookup.Grant}
		}
	}
	t.ended(ctx, shard, at, err)
}

// Release returns a lease.
func (t *Tier) Release(ctx context.Context, key string, c Claim) {
	if c.token == "" {
		return
	}
	shard, asked := t.shardOf(key), t.Now()
	if t.mayAsk(shard) != nil {
		t.abandon(key, c.token)
		return
	}
	err := guarded(func() error { return t.store.Release(context.WithoutCancel(ctx), key, c.token) })
	if err != nil {
		t.abandon(key, c.token)
	}
	t.ended(ctx, shard, asked, err)
}

// abandoned are leases that the Store may have granted without an answer. They are
// released when it answers again.
type abandoned struct {
	mu     sync.Mutex
	leases []abandonedLease
}

type abandonedLease struct{ key, token string }

const mostAbandoned = 1000 // further ones end by themselves

func (a *abandoned) len() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.leases)
}

// pop returns the last of the leases and removes it.
func (a *abandoned) pop() (l abandonedLease, ok bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	n := len(a.leases)
	if n == 0 {
		return l, false
	}
	l, a.leases = a.leases[n-1], a.leases[:n-1]
	return l, true
}

func (t *Tier) abandon(key, token string) {
	if token == "" {
		return
	}
	a := &t.abandoned
	a.mu.Lock()
	if len(a.leases) < mostAbandoned {
		a.leases = append(a.leases, abandonedLease{key, token})
	}
	a.mu.Unlock()
	t.catchUp()
}

// releaseAbandoned releases the abandoned leases until the Store fails. It tries each
// once: a lease is short.
func (t *Tier) releaseAbandoned(ctx context.Context) {
	for l, ok := t.abandoned.pop(); ok; l, ok = t.abandoned.pop() {
		asked := t.Now()
		err := guarded(func() error { return t.store.Release(ctx, l.key, l.token) })
		t.ended(ctx, t.shardOf(l.key), asked, err)
		if err != nil {
			return
		}
	}
}
