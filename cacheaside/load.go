package cacheaside

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/go-resilience/resilience/cacheaside/internal/entry"
	"github.com/go-resilience/resilience/cacheaside/internal/flight"
	"github.com/go-resilience/resilience/cacheaside/internal/tier"
	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/internal/ended"
)

// load runs Load, or takes part in a LoadMany.
func (c *Cache[K, V]) load(t *task[K, V]) (*entry.Entry[V], error) {
	if b := t.batch; b != nil {
		t.batch = nil
		return b.load(t)
	}
	if err := t.mayLoad(); err != nil {
		return nil, err
	}
	begun, took, err := c.run(t.cfg, &t.loading, t)
	t.took = took
	return t.loaded(t.value, t.terms, begun, err)
}

// mayLoad waits until t may load. It returns an error if t has been answered meanwhile.
func (t *task[K, V]) mayLoad() error {
	for {
		t.shard.mu.Lock()
		crowd := t.shard.Crowd(&t.Flight)
		t.shard.mu.Unlock()
		if isAnswered(&t.Flight) {
			return t.Answer().Err
		}
		if crowd == nil {
			return nil
		}
		select {
		case <-crowd:
		case <-t.Done:
		}
	}
}

func (t *task[K, V]) of(cache any) bool { return t.c == cache }

func (t *task[K, V]) loads(key K) bool { return t.Key == key }

func (t *task[K, V]) attempt(ctx context.Context) (err error) {
	t.value, err = t.cfg.Load(ctx, t.Key)
	return err
}

// queue records that t begins or ceases to wait for a slot.
func (t *task[K, V]) queue(waits bool) {
	t.shard.mu.Lock()
	defer t.shard.mu.Unlock()
	t.Queue(waits)
}

// A job is a call of Load or LoadMany. Middleware may attempt it several times.
type job interface {
	attempt(ctx context.Context) error
	queue(waits bool) // begins or ceases to wait for a slot
}

// run waits for a slot and runs a load with Middleware around it. It returns when the
// load began.
func (c *Cache[K, V]) run(cfg *Config[K, V], l *loading, load job) (begun, took time.Duration, err error) {
	if !c.takeSlot(l.ctx, load) {
		return c.now(), 0, fmt.Errorf("%swaiting to load: %w", prefix(cfg.Name), cfg.over(l.ctx, nil))
	}
	begun = c.now()
	first := begun
	defer func() { // even if load panics
		ended := c.now()
		took = ended - begun
		c.counts.loadTime.Add(int64(ended - first))
		c.slots.put()
	}()
	if cfg.Middleware == nil {
		err = load.attempt(l.ctx)
	} else {
		begun, err = c.runThrough(cfg, l, load, begun)
	}
	if isFailure(err) {
		err = cfg.over(l.ctx, err)
	}
	return begun, took, err
}

// takeSlot waits for a slot until ctx ends, and reports whether it took one.
func (c *Cache[K, V]) takeSlot(ctx context.Context, load job) bool {
	if c.slots.tryTake() {
		return true
	}
	load.queue(true)
	defer load.queue(false)
	return c.slots.take(ctx.Done())
}

// runThrough runs a load with Middleware around it. It returns when the last attempt
// began, whose value is used, or begun if there was none.
func (c *Cache[K, V]) runThrough(cfg *Config[K, V], l *loading, load job, begun time.Duration) (time.Duration, error) {
	succeeded := false
	err := cfg.Middleware(func(ctx context.Context) error {
		begun, l.terms = c.now(), entry.Terms{}
		err := load.attempt(ctx)
		succeeded = err == nil
		if isNotFound(err) && !behavior.IsAnswered(err) {
			err = answered{err} // matches by an Is method, which policies do not see
		}
		return err
	})(l.ctx)
	if err == nil && !succeeded {
		err = errors.New(prefix(cfg.Name) + "Middleware returned nil without a value from Load")
	}
	return begun, err
}

// over returns the error of a load whose ctx has ended. err is what the load returned,
// or nil.
func (cfg *Config[K, V]) over(ctx context.Context, err error) error {
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return &TimeoutError{Name: cfg.Name, What: "load", After: cfg.LoadTimeout, Err: err}
	}
	if err == nil {
		return ended.Error(ctx)
	}
	return err
}

// loaded makes the entry of a load's result.
func (t *task[K, V]) loaded(value V, by entry.Terms, begun time.Duration, err error) (*entry.Entry[V], error) {
	switch {
	case err == nil:
		cost := 1
		if t.cfg.Cost != nil {
			cost = t.cfg.Cost(t.Key, value)
		}
		t.result.Source = flight.Loaded
		return entry.Found(t.cfg.times(), value, cost, by, begun, t.took), nil
	case isFailure(err):
		return nil, err
	}
	t.result.Source = flight.Absent
	return entry.Missing[V](t.cfg.times(), by, begun), err
}

// fill stores the result of t. e is nil if nothing is remembered.
func (c *Cache[K, V]) fill(t *task[K, V], claim tier.Claim, e *entry.Entry[V]) {
	if claim == (tier.Claim{}) {
		return
	}
	now := c.now()
	if e == nil || e.Keep <= now {
		if !t.HasOld() {
			c.tier.Release(t.ctx, t.written, claim)
		} else { // the key no longer exists: no process may serve the value when a load fails
			_ = c.announce(t.ctx, []K{t.Key}, func(K) {}, (*tier.Tier).Invalidate)
		}
		return
	}
	data, err := c.seal(t.Key, e)
	if err != nil {
		c.tell(context.WithoutCancel(t.ctx), EventCodecFailed, t.Key, err)
		c.tier.Release(t.ctx, t.written, claim)
		return
	}
	t.result.Invalidated = c.tier.Fill(t.ctx, claim, tier.Filling{Key: t.written, Value: data, Fresh: e.Fresh - now, Keep: e.Keep - now})
}

// previous returns the value that t is about to replace.
func (t *task[K, V]) previous() (v V, ok bool) {
	t.shard.mu.Lock()
	e := t.shard.Before(&t.Flight, t.looked)
	t.shard.mu.Unlock()
	if e == nil || e.Absent {
		return v, false
	}
	v, _ = t.c.cfg().give(e)
	return v, true
}
