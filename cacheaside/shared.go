package cacheaside

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/go-resilience/resilience/internal/behavior"
)

// Intervals at which the Store is asked again about a load of another process.
const (
	pollFirst = 5 * time.Millisecond
	pollMost  = 100 * time.Millisecond
)

// consult asks the Store about the flights of l, and lands those that it has answers for. Those
// that are left must load: with the lease, they must then fill the Store.
func (l *load[K, V]) consult() {
	c, began := l.c, l.c.now()
	for {
		l.ask()
		var landed, again []*flight[K, V]
		rests, pause := true, pollMost
		for _, f := range l.flights {
			if !f.asked {
				continue
			}
			e, now := l.read(f), c.now()
			switch s, standing := f.lookup.State, e.standing(now); {
			case s == Hit && standing == fresh:
				f.entry = e
				landed = append(landed, f)
			case s == Failed && e.fallback(now), s == Busy && standing == stale:
				e.pause = now + l.cfg.ErrorPause
				if s == Busy {
					e.pause = now + min(f.lookup.Wait, pollMost)
				}
				f.entry, f.past = e, true
				landed = append(landed, f)
			case s == Failed && f.ask.WaitToken != "":
				f.err = fmt.Errorf("%s%v: %w", prefix(l.cfg.Name), f.key, errElsewhere)
				landed = append(landed, f)
			case s == Leased:
				c.offer(f, e)
			case s == Fenced:
				c.mu.Lock()
				f.passing = true
				c.mu.Unlock()
			case s == Busy:
				c.offer(f, e)
				f.ask.Refresh, f.damaged = false, false // the next value is another one
				f.ask.WaitToken = cmp.Or(f.ask.WaitToken, f.lookup.WaitToken)
				pause = min(pause, max(f.lookup.Wait, time.Millisecond))
				again = append(again, f)
			case s == Hit || s == Failed: // the value cannot be used: ask for the lease at once
				f.ask.Refresh, f.ask.Pause, f.damaged = true, 0, e == nil
				again, rests = append(again, f), false
			default:
				f.err = fmt.Errorf("%sthe Store answered with State %q", prefix(l.cfg.Name), s)
				landed = append(landed, f)
			}
		}
		l.land(landed)
		if len(again) == 0 || len(again) < len(l.flights) { // others load, and do not wait for these
			l.split(again, false)
			return
		}
		if rests {
			// The longer the load takes, the longer the intervals: polling adds at most an
			// eighth to the wait.
			pause = min(max((c.now()-began)/8, pollFirst), pause)
			select {
			case <-time.After(pause/2 + c.chance(pause)):
			case <-l.ctx.Done():
			}
		}
		l.drop() // nobody may wait any more
	}
}

func (f *flight[K, V]) name() string { return f.written }

// ask asks the Store about the keys of l. It waits for the answer even if l ends: other processes
// would wait for a lease that this process does not know about.
func (l *load[K, V]) ask() {
	t, at := l.c.tier, l.c.now() // before trusts: an invalidation in between is later than at
	each(t, l.flights, (*flight[K, V]).name, func(shard uint8, some []*flight[K, V]) {
		var asks []Request
		var asked []*flight[K, V]
		for _, f := range some {
			f.asked = false
			if t.trusts(f.written) {
				f.ask.Token = cmp.Or(f.ask.Token, newToken())
				asks, asked = append(asks, f.ask), append(asked, f)
			}
		}
		if len(asks) == 0 {
			return
		}
		_ = t.try(l.ctx, shard, func(ctx context.Context) error {
			looks, err := t.store.Acquire(ctx, asks...)
			if err == nil && len(looks) != len(asks) {
				err = fmt.Errorf("the Store gave %d answers about %d keys", len(looks), len(asks))
			}
			if err == nil {
				for i, f := range asked {
					f.lookup, f.at, f.asked = looks[i], at, true
					f.leased = looks[i].State == Leased
				}
			}
			return err
		})
	})
}

// read decodes what the Store holds. It returns nil if that is nothing or unreadable.
func (l *load[K, V]) read(f *flight[K, V]) *entry[V] {
	if f.lookup.Value == nil || f.damaged {
		return nil
	}
	e, err := l.cfg.open(f.lookup.Value)
	if err != nil {
		l.c.report(context.WithoutCancel(l.ctx), EventCodecFailed, &f.key, err, 0)
		return nil
	}
	l.cfg.weigh(f.key, e)
	l.cfg.begin(e, f.at, f.lookup.Fresh) // from the call: the answer may have taken a while
	if e.lagged {
		e.until(e.fresh) // the Store has it for no longer
	}
	return e
}

// fill stores the results of the flights that have a lease, or gives the lease back. It returns the flights of each
// call of the Store that failed.
func (l *load[K, V]) fill() (failed []failedFill[K, V]) {
	c, t := l.c, l.c.tier
	var full, none []*flight[K, V]
	var old []string
	for _, f := range l.flights {
		e, now := f.entry, c.now()
		switch {
		case !f.leased:
		case isFailure(f.err):
			f.failed = !behavior.IsAnswered(f.err) && !behavior.IsRefused(f.err) && l.ctx.Err() != context.Canceled
			none = append(none, f)
		case f.lookup.Value != nil && e.standing(now) == dead: // no process may go on to serve that old value
			old = append(old, f.written)
		case e.standing(now) == dead || l.cfg.ReplicaLag > 0 && !c.isCurrent(f):
			none = append(none, f)
		default:
			data, err := l.cfg.seal(e)
			if err != nil {
				c.report(context.WithoutCancel(l.ctx), EventCodecFailed, &f.key, err, 0)
				none = append(none, f)
				continue
			}
			f.filling.Value = data
			full = append(full, f)
		}
	}
	untold := t.tell(l.ctx, old, "", t.store.Invalidate) // some at once: callers wait
	for _, f := range l.flights {
		if err := untold[f.written]; err != nil {
			c.report(context.WithoutCancel(l.ctx), EventNotPropagated, &f.key, err, 0)
		}
	}
	l.release(none, false)
	var mu sync.Mutex
	each(t, full, (*flight[K, V]).name, func(shard uint8, some []*flight[K, V]) {
		if !t.admit(shard) {
			return
		}
		began := c.now()
		if current, err := l.store(some); err != nil {
			mu.Lock()
			failed = append(failed, failedFill[K, V]{shard, some, began, err})
			mu.Unlock()
		} else {
			t.record(l.ctx, shard, began, nil)
			for i, f := range some {
				f.invalidated = !current[i]
			}
		}
	})
	return failed
}

// store calls Fill with the values of flights of one shard. It waits for the answer even if l ends.
func (l *load[K, V]) store(flights []*flight[K, V]) ([]bool, error) {
	values := make([]Entry, len(flights))
	for i, f := range flights {
		now := l.c.now()
		values[i] = Entry{
			Key: f.written, Version: l.cfg.Version, Grant: f.lookup.Grant,
			Value: f.filling.Value, Fresh: f.entry.fresh - now, Keep: f.entry.keep - now,
		}
	}
	current, err := l.c.tier.store.Fill(context.WithoutCancel(l.ctx), values...)
	if err == nil && len(current) != len(values) {
		err = fmt.Errorf("the Store gave %d answers about %d values", len(current), len(values))
	}
	return current, err
}

// A failedFill is a call of Fill that failed, for flights of one shard.
type failedFill[K comparable, V any] struct {
	shard   uint8
	flights []*flight[K, V]
	began   time.Duration
	err     error
}

// settle finds out why a Fill failed, when the callers have their values. If the Store answers a smaller call, which
// ends the lease of the largest value, then it refused a value: this is no outage. The other values are stored one by
// one, and the leases of those that are refused, too, end, so that no process waits for them.
func (l *load[K, V]) settle(failed failedFill[K, V]) {
	t, err := l.c.tier, failed.err
	slices.SortStableFunc(failed.flights, func(a, b *flight[K, V]) int {
		return len(b.filling.Value) - len(a.filling.Value)
	})
	for i, f := range failed.flights {
		began := failed.began
		if i > 0 {
			began = l.c.now()
			// What was loaded within ReplicaLag of a change must not be stored, and the flight no longer tells.
			if l.cfg.ReplicaLag <= 0 {
				if _, err = l.store(failed.flights[i : i+1]); err == nil {
					continue
				}
			}
		}
		if e := t.store.Release(context.WithoutCancel(l.ctx), f.ask, false); e != nil {
			t.record(l.ctx, failed.shard, began, err)
			return
		}
		t.record(l.ctx, failed.shard, began, nil)
		if i == 0 || l.cfg.ReplicaLag <= 0 {
			l.c.report(context.WithoutCancel(l.ctx), EventCodecFailed, &f.key, err, 0)
		}
	}
}

func (c *Cache[K, V]) isCurrent(f *flight[K, V]) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.current(f.key) == f
}

// release gives the leases of flights back, of those that have one, some at once. If that fails, a lease
// ends by itself. With failed, those who wait are told that the load has failed.
func (l *load[K, V]) release(flights []*flight[K, V], failed bool) {
	t := l.c.tier
	if t == nil {
		return
	}
	each(t, flights, (*flight[K, V]).name, func(shard uint8, some []*flight[K, V]) {
		for _, f := range some {
			if f.leased {
				_ = t.try(l.ctx, shard, func(ctx context.Context) error {
					return t.store.Release(ctx, f.ask, failed || f.failed)
				})
			}
		}
	})
}
