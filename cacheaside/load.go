package cacheaside

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/go-resilience/resilience/internal/behavior"
	"github.com/go-resilience/resilience/internal/ended"
)

// obtain finds the answer of f in the Store, or loads it and fills the Store. For a key
// that does not exist it returns the error and, if the absence is remembered, an entry.
func (c *Cache[K, V]) obtain(f *flight[K, V]) (*entry[V], error) {
	if c.shared == nil {
		return c.load(f)
	}
	e, claim, err := c.shared.consult(f)
	if e != nil || err != nil {
		f.batch.skip(f)
		return e, err
	}
	filled := false
	defer func() {
		if !filled { // the load failed or panicked
			c.shared.release(f, claim)
		}
	}()
	e, err = c.load(f)
	if !isFailure(err) {
		filled = true
		c.shared.fill(f, claim, e)
	}
	return e, err
}

// load runs Load, or takes part in a LoadMany.
func (c *Cache[K, V]) load(f *flight[K, V]) (*entry[V], error) {
	if b := f.batch; b != nil {
		f.batch = nil
		return b.load(f)
	}
	if err := c.mayLoad(f); err != nil {
		return nil, err
	}
	begun, took, err := c.run(f.cfg, &f.loading, f)
	f.took = took
	return c.loaded(f, f.value, &f.terms, begun, err)
}

func (f *flight[K, V]) attempt(ctx context.Context) (err error) {
	f.value, err = f.cfg.Load(ctx, f.key)
	return err
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
		begun, l.terms = c.now(), terms{}
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
func (c *Cache[K, V]) loaded(f *flight[K, V], value V, t *terms, begun time.Duration, err error) (*entry[V], error) {
	switch {
	case err == nil:
		e := f.cfg.found(f.key, value, *t, begun, f.took)
		e.tags = c.tagging(t.tags, f.tagged)
		f.loaded = true
		return e, nil
	case isFailure(err):
		return nil, err
	}
	f.absent = true
	e := f.cfg.missing(*t, begun)
	if e != nil {
		e.tags = c.tagging(t.tags, f.tagged)
	}
	return e, err
}
