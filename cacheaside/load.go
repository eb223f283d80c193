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
	if e != nil || !isFailure(err) {
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
	begun, err := c.run(&f.ctx, f)
	return c.loaded(f, f.value, &f.ctx.terms, begun, err)
}

func (f *flight[K, V]) attempt(ctx context.Context) (err error) {
	f.value, err = f.c.cfg.Load(ctx, f.key)
	return err
}

// A job is a call of Load or LoadMany. Middleware may attempt it several times.
type job interface {
	attempt(ctx context.Context) error
}

// run waits for a slot and runs a load with Middleware around it. It returns when the
// load began.
func (c *Cache[K, V]) run(ctx *loadCtx, load job) (begun time.Duration, err error) {
	if !ctx.takeSlot(c.slots) {
		return c.now(), fmt.Errorf("%swaiting to load: %w", prefix(c.cfg.Name), c.over(ctx, nil))
	}
	defer ctx.returnSlot()
	begun = c.now()
	if c.cfg.Middleware == nil {
		err = load.attempt(ctx)
	} else {
		succeeded := false
		err = c.cfg.Middleware(func(ctx context.Context) error {
			begun = c.now() // of the attempt whose value is used
			err := load.attempt(ctx)
			succeeded = err == nil
			if isNotFound(err) && !behavior.IsAnswered(err) {
				err = answered{err} // matches by an Is method, which policies do not see
			}
			return err
		})(ctx)
		if err == nil && !succeeded {
			err = errors.New(prefix(c.cfg.Name) + "Middleware returned nil without a value from Load")
		}
	}
	if isFailure(err) && ctx.Err() != nil {
		err = c.over(ctx, err)
	}
	return begun, err
}

// over returns the error of a load whose ctx has ended. err is what the load returned,
// or nil.
func (c *Cache[K, V]) over(ctx context.Context, err error) error {
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return &TimeoutError{Name: c.cfg.Name, What: "load", After: c.cfg.LoadTimeout, Err: err}
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
		e := c.found(f.key, value, *t, begun)
		e.tags = c.tagging(t.tags, f.tagged)
		c.counts.loaded.Add(1)
		f.loaded = true
		return e, nil
	case isFailure(err):
		return nil, err
	}
	c.counts.notFound.Add(1)
	e := c.missing(*t, begun)
	if e != nil {
		e.tags = c.tagging(t.tags, f.tagged)
	}
	return e, err
}
