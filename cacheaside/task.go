package cacheaside

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"time"

	"github.com/go-resilience/resilience/cacheaside/internal/entry"
	"github.com/go-resilience/resilience/cacheaside/internal/flight"
	"github.com/go-resilience/resilience/cacheaside/internal/tier"
	"github.com/go-resilience/resilience/internal/panics"
)

// A task is a flight with what its goroutine needs. That goroutine alone uses the fields
// below the flight.
type task[K comparable, V any] struct {
	flight.Flight[K, V]
	c       *Cache[K, V]
	cfg     *Config[K, V] // the settings when the flight began
	shard   *shard[K, V]
	written string         // the key as converted for the Store
	loading                // its call of Load
	batch   *batch[K, V]   // of GetMany; nil if the flight loads by itself
	asked   *tier.Question // if GetMany has asked the Store
	looked  time.Duration  // when the Store was last asked
	refresh bool           // load even if the value in the Store is fresh
	value   V              // returned by Load
	took    time.Duration  // duration of the load, 0 if it has not returned
	result  flight.Result[V]
}

// launch creates the flight of key, with one caller. Its caller starts it, on a goroutine
// of its own. The shard is locked.
func (c *Cache[K, V]) launch(ctx context.Context, s *shard[K, V], key K, written string, now time.Time, old *entry.Entry[V]) *task[K, V] {
	cfg := c.cfg()
	t := &task[K, V]{c: c, cfg: cfg, shard: s, written: written}
	t.Began = now.Sub(c.base)
	t.Terms = flight.Terms{Finish: cfg.Finish, ErrorPause: cfg.ErrorPause, Soft: cfg.SoftTimeout}
	t.init(ctx, now.Add(cfg.LoadTimeout), t)
	unwatch := context.AfterFunc(t.ctx, func() { c.overdue(t) })
	t.End = func() {
		unwatch()
		t.cancel()
	}
	s.Launch(&t.Flight, key, written, old)
	c.running.Add(1)
	return t
}

// overdue answers the callers of t when LoadTimeout has passed, even if its load ignores
// its ctx. It is called when that ctx has ended.
func (c *Cache[K, V]) overdue(t *task[K, V]) {
	if !errors.Is(t.ctx.Err(), context.DeadlineExceeded) {
		return
	}
	err := &TimeoutError{Name: t.cfg.Name, What: "load", After: t.cfg.LoadTimeout}
	t.shard.mu.Lock()
	overdue, counts := t.shard.Overdue(&t.Flight, c.now(), err)
	if overdue {
		c.running.Add(1) // Close has not begun to wait: it answers the callers first
		defer c.running.Done()
	}
	if counts {
		c.counts.timedOut.Add(1)
	}
	t.shard.mu.Unlock()
	if counts {
		c.tellLoad(t, EventLoadFailed, c.now()-t.Began, err)
	}
}

// fly runs t, on a goroutine of its own.
func (c *Cache[K, V]) fly(t *task[K, V]) {
	defer c.running.Done()
	returned := false
	defer func() {
		if !returned {
			fault := c.panicked(recover())
			t.batch.skip(t)
			c.land(t, nil, fault)
		}
	}()
	e, err := c.obtain(t)
	returned = true
	c.land(t, e, err)
}

// panicked returns the error of a load that panicked with value, or called Goexit.
func (c *Cache[K, V]) panicked(value any) error {
	text := prefix(c.cfg().Name) + "load called runtime.Goexit"
	if value != nil {
		text = fmt.Sprintf("%sload panicked: %v", prefix(c.cfg().Name), value)
	}
	return panics.New(text, value, debug.Stack())
}

// obtain finds the answer of t in the Store, or loads it and fills the Store. For a key
// that does not exist it returns the error and, if the absence is remembered, an entry.
func (c *Cache[K, V]) obtain(t *task[K, V]) (*entry.Entry[V], error) {
	if c.tier == nil {
		return c.load(t)
	}
	e, claim, err := c.consult(t)
	if e != nil || err != nil {
		t.batch.skip(t)
		return e, err
	}
	filled := false
	defer func() {
		if !filled { // the load failed or panicked
			c.tier.Release(t.ctx, t.written, claim)
		}
	}()
	e, err = c.load(t)
	if !isFailure(err) {
		filled = true
		c.fill(t, claim, e)
	}
	return e, err
}

// consult asks the Store for the answer of t. If the Store has none, t must load; with a
// claim, it must then fill the Store.
func (c *Cache[K, V]) consult(t *task[K, V]) (*entry.Entry[V], tier.Claim, error) {
	var none tier.Claim
	began, damaged := c.now(), false
	for {
		q, ok := c.ask(t)
		if !ok {
			if c.entries != nil {
				return nil, none, nil // callers join t, and its result is kept
			}
			e, err := c.turn(t)
			return e, none, err
		}
		if damaged {
			q.Lookup.Value = nil
		}
		e, err := c.read(t, q)
		if err != nil {
			c.tier.Release(t.ctx, t.written, q.Claim)
			return nil, none, err
		}
		switch tier.Next(q.Lookup.State, e.Standing(c.now()), e != nil && e.Absent, e == nil) {
		case tier.Use:
			if q.Lookup.State == Hit {
				c.counts.storeHits.Add(1)
				c.refreshAhead(t, e)
			}
			return e, none, answerOf(e)
		case tier.UseOld:
			if q.Lookup.State == Busy {
				e.Pause = c.now() + min(q.Lookup.Wait, pollMost)
			}
			t.result.Stale = true
			return e, none, nil
		case tier.Load:
			c.offer(t, e, q.At)
			return nil, q.Claim, nil
		case tier.LoadAlone:
			e, err := c.turn(t)
			return e, none, err
		case tier.AskAgain:
			t.refresh, damaged = true, true
		case tier.Unpause:
			t.shard.mu.Lock()
			t.shard.Unpause(t.Key)
			t.shard.mu.Unlock()
		case tier.Rest:
			t.batch.skip(t)
			t.refresh, damaged = false, false // the next value is another one
			// The longer the load takes, the longer the intervals: polling adds at most an
			// eighth to the wait.
			wait := min(max((c.now()-began)/8, pollFirst), pollMost, max(q.Lookup.Wait, time.Millisecond))
			if e, answered, err := c.rest(t, e, q.At, wait/2+c.chance(wait)); answered {
				return e, none, err
			}
		default:
			return nil, none, fmt.Errorf("%sthe Store answered with State %q", prefix(t.cfg.Name), q.Lookup.State)
		}
	}
}

// Intervals at which the Store is asked again about a load of another process.
const (
	pollFirst = 5 * time.Millisecond
	pollMost  = 100 * time.Millisecond
)

// question returns what t asks the Store: for the lease, unless a load of the key failed
// recently.
func (c *Cache[K, V]) question(t *task[K, V]) *tier.Question {
	t.shard.mu.Lock()
	defer t.shard.mu.Unlock()
	return &tier.Question{Key: t.written, Refresh: t.refresh, Lease: !t.shard.Paused(t.Key, c.now())}
}

// ask asks the Store about the key of t. It reports false if the Store cannot be asked or
// does not answer, or if t has been answered meanwhile.
func (c *Cache[K, V]) ask(t *task[K, V]) (*tier.Question, bool) {
	q := t.asked
	t.asked = nil
	if q == nil {
		q = c.question(t)
		c.tier.Ask(t.ctx, q)
	}
	if !q.OK {
		return q, false
	}
	select {
	case <-t.Done: // no caller waits any more
		c.tier.Release(t.ctx, t.written, q.Claim)
		return q, false
	default:
	}
	t.looked = q.At
	return q, true
}

// answerOf returns the error that goes with an entry.
func answerOf[V any](e *entry.Entry[V]) error {
	if e.Absent {
		return ErrNotFound
	}
	return nil
}

// read decodes what the Store holds. It returns nil if that is nothing or unreadable.
func (c *Cache[K, V]) read(t *task[K, V], q *tier.Question) (*entry.Entry[V], error) {
	if q.Lookup.Value == nil {
		return nil, nil
	}
	e, err := c.open(t.Key, q.Lookup.Value)
	if errors.Is(err, ErrKeyCollision) {
		return nil, fmt.Errorf("%s%v: the store has the value of another key as %q: %w",
			prefix(t.cfg.Name), t.Key, t.written, ErrKeyCollision)
	}
	if err != nil {
		c.tell(t.ctx, EventCodecFailed, t.Key, err)
		return nil, nil
	}
	// Times count from the call: the answer may have taken a while.
	e.Begin(t.cfg.times(), q.At, q.Lookup.Fresh)
	return e, nil
}

// offer gives the callers of t an old value: immediately if it may be served during a
// refresh, otherwise if the load fails.
func (c *Cache[K, V]) offer(t *task[K, V], e *entry.Entry[V], asked time.Duration) {
	if e == nil || e.Absent {
		return
	}
	t.shard.mu.Lock()
	defer t.shard.mu.Unlock()
	t.shard.Offer(&t.Flight, e, asked)
}

// refreshAhead decides, without memory, whether a hit in the Store is refreshed early.
func (c *Cache[K, V]) refreshAhead(t *task[K, V], e *entry.Entry[V]) {
	beta := c.cfg().Ahead
	if c.entries != nil || beta == 0 || !e.Ahead(beta, c.now()) {
		return
	}
	s := t.shard
	s.mu.Lock()
	if c.closed.Load() {
		s.mu.Unlock()
		return
	}
	early := c.launch(t.caller, s, t.Key, t.written, time.Now(), nil)
	early.refresh = true
	s.mu.Unlock()
	go c.fly(early)
	c.tell(t.ctx, EventRefreshBegun, t.Key, nil)
}
