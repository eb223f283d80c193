package tier

import (
	"context"
	"errors"
	"sync"
)

var errNotFilled = errors.New("cacheaside: not filled")

// Fill stores a value and ends the lease of its key. It reports whether something was
// invalidated since the lease was granted: the value is not stored then.
func (t *Tier) Fill(ctx context.Context, c Claim, value Filling) (invalidated bool) {
	shard := t.shardOf(value.Key)
	value.Grant = c.grant
	x := &filling{Filling: value}
	t.fills[shard].send(x, func(values []Filling) (current []bool, err error) {
		asked := t.Now()
		if err := t.mayAsk(shard); err != nil {
			return nil, err
		}
		err = guarded(func() (err error) {
			current, err = t.store.Fill(context.WithoutCancel(ctx), values...)
			return complete(len(current), len(values), err)
		})
		t.ended(ctx, shard, asked, err)
		return current, err
	})
	if x.err != nil {
		t.abandon(value.Key, c.token)
		return false
	}
	return !x.current
}

// A fillQueue fills one shard. It makes one call at a time, which includes all fillings
// that arrived during the previous one.
type fillQueue struct {
	turn chan struct{} // to make a call

	mu      sync.Mutex
	waiting []*filling
}

type filling struct {
	Filling
	sent    bool
	current bool // nothing was invalidated since the grant
	err     error
}

func (q *fillQueue) send(x *filling, call func([]Filling) ([]bool, error)) {
	q.mu.Lock()
	q.waiting = append(q.waiting, x)
	q.mu.Unlock()
	q.turn <- struct{}{}
	defer func() { <-q.turn }()
	for !x.sent {
		q.sendSome(call)
	}
}

func (q *fillQueue) sendSome(call func([]Filling) ([]bool, error)) {
	q.mu.Lock()
	some := q.waiting[:min(len(q.waiting), mostAtOnce)]
	q.waiting = q.waiting[len(some):]
	q.mu.Unlock()
	values := make([]Filling, len(some))
	for i, y := range some {
		values[i] = y.Filling
		y.sent, y.err = true, errNotFilled // in case a hook ends the goroutine
	}
	current, err := call(values)
	for i, y := range some {
		y.err = err
		if err == nil {
			y.current = current[i]
		}
	}
}
